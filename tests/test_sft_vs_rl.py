"""SFT against RL on cards: fair arms, and claims that read what they say."""

import dataclasses

import numpy as np
import pytest

from jaxpt.envs.cards import LEVELS
from jaxpt.experiments import sft_vs_rl
from jaxpt.lab.experiment import topological
from jaxpt.train.budget import update_flops
from jaxpt.train.policy import policy_flops

EXPERIMENT = sft_vs_rl.EXPERIMENT
CONFIG = EXPERIMENT.tiers["cpu"].config
STAGES = {stage.name: stage for stage in sft_vs_rl.stages(CONFIG, {})}
FORKED = ("sft", "again", "diverse", "rl")


@pytest.mark.parametrize("tier", EXPERIMENT.tiers)
def test_arms_cost_equally_many_flops_and_none_trains_on_what_it_is_scored_on(tier):
    cfg = EXPERIMENT.tiers[tier].config
    stages = {stage.name: stage for stage in sft_vs_rl.stages(cfg, {})}
    topological(list(stages.values()))
    spent = {"rl": stages["rl"].steps * policy_flops(stages["rl"].config)}
    for name in ("sft", "again", "diverse"):
        config = stages[name].config
        spent[name] = stages[name].steps * update_flops(config.model, config.env.make().spec, config.batch)
    assert max(spent.values()) < 1.02 * min(spent.values())
    for stage in stages.values():
        low, high = (stage.hyper.get(f"level_{end}", stage.config.env.levels[0]) for end in ("low", "high"))
        assert low == high and LEVELS[int(low) - 1] == ("diverse" if stage.name == "diverse" else "seen")
        assert stage.config.env.levels == (1, 1)
        for name, levels in stage.config.eval.elsewhere.items():
            assert [LEVELS[level - 1] for level in levels] == [name, name]
        assert stage.steps % stage.config.eval.every == 0


def test_arms_share_a_start_and_differ_in_what_they_are_named_for():
    assert [STAGES[name].after for name in FORKED] == ["start"] * 4
    assert STAGES["raw"].after == STAGES["start"].after == "pretrain"
    assert (STAGES["raw"].config, STAGES["raw"].steps) == (STAGES["rl"].config, STAGES["rl"].steps)
    assert STAGES["again"].config == STAGES["sft"].config and STAGES["again"].hyper == STAGES["sft"].hyper
    assert STAGES["again"].stream != STAGES["sft"].stream
    assert {STAGES[name].config.style for name in ("start", "sft", "diverse")} == {"canonical"}


def fabricated(**ends):
    """Curves for 3 seeds: 0.5 everywhere, but for `arm` (and its suffix of where) as given."""
    curves = {"seeds": np.arange(3)}
    for arm in (*FORKED, "start", "raw"):
        for kind in ("greedy", "sampled"):
            for where in sft_vs_rl.SCORED:
                for what in ("gold", "syntax"):
                    curves[f"{arm}/{kind}_{what}_{where}"] = np.array([[np.nan, ends.get(f"{arm}_{where}", 0.5)]] * 3)
        for what, x in (("read_right", 2.0), ("read_wrong", 1.0), ("read_as_ten", 0.75)):
            curves[f"{arm}/greedy_{what}_shift"] = np.array([[np.nan, ends.get(f"{arm}_{what}", x)]] * 3)
        curves[f"{arm}/flops"] = np.tile([1.0, 2.0], (3, 1))
    return curves


@pytest.mark.parametrize("claim, ends, value, control", [
    ("sft_memorises_hands", {"sft_seen": 0.8, "sft_held": 0.6, "rl_held": 0.4, "again_held": 0.25}, 0.1, -0.05),
    ("sft_forgets_the_other_rule", {"start_shift": 0.3, "sft_shift": 0.1, "rl_shift": 0.4}, 0.2, -0.1),
    ("rl_gains_under_the_other_rule", {"start_shift": 0.3, "sft_shift": 0.1, "rl_shift": 0.4}, 0.1, -0.2),
    ("rl_beats_sft_under_the_other_rule", {"sft_shift": 0.1, "again_shift": 0.15, "rl_shift": 0.4}, 0.3, 0.05),
    ("sft_s_errors_are_the_old_rule", {"sft_read_as_ten": 0.9, "diverse_read_wrong": 0.0, "diverse_read_as_ten": 0.0}, 0.9, 0),
    ("diverse_prompts_close_half_of_the_gap", {"sft_shift": 0.1, "again_shift": 0.1, "rl_shift": 0.4, "diverse_shift": 0.3},
     0.05, -0.15),
    ("rl_needs_the_start", {"rl_seen": 0.6, "raw_seen": 0.1, "sft_seen": 0.7}, 0.5, -0.1),
])
def test_a_claim_reads_what_it_says(claim, ends, value, control):
    (found,) = [c for c in EXPERIMENT.claims if c.name == claim]
    np.testing.assert_allclose(found.estimand(fabricated(**ends)), [value] * 3, atol=1e-9)
    np.testing.assert_allclose(found.control(fabricated(**ends)), [control] * 3, atol=1e-9)


def test_the_report_has_a_row_for_every_arm():
    assert len(EXPERIMENT.claims) == 7
    text = sft_vs_rl.sections(CONFIG, fabricated())
    assert text.count("\n| ") == 2 + len(sft_vs_rl.TABLE) and "| 0.667 | 0.75 |" in text


@pytest.mark.parametrize("field, value, sentence", [
    ("updates", 30, "--updates 30: expected a multiple of 20"), ("k", 5, "--k 5: expected a number from 2 to 4"),
    ("minibatches", 3, "--minibatches 3: expected a divisor of --prompts 16"), ("rl_rate", 2.0, "--rl-rate 2.0"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})


def test_every_field_of_the_sweep_is_a_field():
    for table in sft_vs_rl.SWEEP:
        for field, (values, metric) in table.items():
            assert len(set(values)) > 2 and hasattr(CONFIG, field) and metric.split("/")[0] in STAGES
