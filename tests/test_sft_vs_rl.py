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
RUNS = {"text": {}, "retries": {"retries": 3}, "visual": {"variant": "visual"}}
CONFIGS = {run: dataclasses.replace(CONFIG, **fields) for run, fields in RUNS.items()}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("tier", EXPERIMENT.tiers)
def test_arms_cost_equally_many_flops_and_none_trains_on_what_it_is_scored_on(tier, run):
    cfg = dataclasses.replace(EXPERIMENT.tiers[tier].config, **RUNS[run])
    stages = {stage.name: stage for stage in sft_vs_rl.stages(cfg, {})}
    topological(list(stages.values()))
    spent = {}
    for name in {*stages} - {"pretrain", "start"}:
        config = stages[name].config
        supervised = lambda config: update_flops(config.model, config.env.make().spec, config.batch)  # noqa: E731
        spent[name] = stages[name].steps * (policy_flops if hasattr(config, "group") else supervised)(config)
    assert max(spent.values()) < 1.02 * min(spent.values())
    for stage in stages.values():
        low, high = (stage.hyper.get(f"level_{end}", stage.config.env.levels[0]) for end in ("low", "high"))
        assert low == high and LEVELS[int(low) - 1] == (stage.name if stage.name in ("diverse", "once", "red") else "seen")
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


@pytest.mark.parametrize("run, one, other", [("retries", "once", "rl"), ("visual", "red", "sft")])
def test_a_further_run_has_one_more_arm_that_differs_in_its_hands(run, one, other):
    stages = {stage.name: stage for stage in sft_vs_rl.stages(CONFIGS[run], {})}
    assert {*stages} == {"pretrain", "start", "sft", "again", "rl", one}
    ours, theirs = stages[one], stages[other]
    assert dataclasses.replace(ours, name=other, hyper=theirs.hyper) == theirs
    assert {leaf for leaf in ours.hyper if ours.hyper[leaf] != theirs.hyper.get(leaf)} == {"level_low", "level_high"}
    env = stages["sft"].config.env.make()
    assert env.spec.parts[2:] == ("first",) * (run == "retries") and len(env.spec.token_names) == env.spec.vocab


def test_panels_show_arms_of_their_run():
    for cfg in CONFIGS.values():
        stages = {stage.name for stage in sft_vs_rl.stages(cfg, {})}
        series = [name for panel in sft_vs_rl.panels(cfg) for name in (*panel.series.values(), *(panel.x or {}).values())]
        assert {name.split("/")[0] for name in series} - stages == {"derived"}
        assert {*sft_vs_rl.derived(cfg, fabricated(cfg))} <= stages


def fabricated(cfg, **ends):
    """Curves for 3 seeds: 0.5 everywhere (of first attempts 0.25; of cards, 2 right, 1 wrong and 0.75 of it as 10), but
    as given by arm and where (success) or by arm, what and where, which is left out of a shift."""
    curves = {"seeds": np.arange(3)}
    usual = {"gold": 0.5, "syntax": 0.5, "first": 0.25, "read_right": 2.0, "read_wrong": 1.0, "read_as_ten": 0.75}
    for arm in sft_vs_rl.shown(cfg).values():
        for what, x in usual.items():
            for where in sft_vs_rl.SCORED[cfg.run]:
                named = {"gold": f"{arm}_{where}"}.get(what, f"{arm}_{what}" + f"_{where}" * (where != "shift"))
                for kind in ("greedy", "sampled"):
                    curves[f"{arm}/{kind}_{what}_{where}"] = np.array([[np.nan, ends.get(named, x)]] * 3)
        curves[f"{arm}/flops"] = np.tile([1.0, 2.0], (3, 1))
    return curves


def of_claims(run, claim, ends):
    (found,) = [c for c in sft_vs_rl.claims(CONFIGS[run]) if c.name == claim]
    return found.estimand(fabricated(CONFIGS[run], **ends)), found.control(fabricated(CONFIGS[run], **ends))


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
    np.testing.assert_allclose(of_claims("text", claim, ends), [[value] * 3, [control] * 3], atol=1e-9)


@pytest.mark.parametrize("run, claim, ends, value, control", [
    ("retries", "retries_better_the_first_try",
     {"rl_first_held": 0.4, "once_first_held": 0.3, "again_first_held": 0.2}, 0.1, -0.05),
    ("retries", "retries_help_under_the_other_rule", {"rl_shift": 0.4, "once_shift": 0.3, "sft_shift": 0.1}, 0.1, 0.4),
    ("retries", "retrying_is_learnt", {"rl_held": 0.8, "once_held": 0.6, "sft_first_held": 0.3}, 0.2, 0.05),
    ("retries", "retries_widen_the_lead", {"rl_held": 0.8, "once_held": 0.6, "sft_first_held": 0.4}, 0.45, 0.25),
    ("visual", "sft_forgets_red", {"sft_read_right_red": 1.0, "red_read_wrong_red": 0.0}, 1 / 6, -1 / 3),
    ("visual", "rl_gains_in_red", {"rl_red": 0.6, "sft_red": 0.1}, 0.1, -0.4),
    ("visual", "rl_beats_sft_in_red", {"rl_red": 0.4, "sft_red": 0.1, "again_red": 0.15}, 0.3, 0.05),
    ("visual", "the_shift_is_in_seeing",
     {"sft_read_right_red": 1.0, "sft_held": 0.25}, 1 / 6 + 0.25, -0.375),
])
def test_a_claim_of_a_further_run_reads_what_it_says(run, claim, ends, value, control):
    np.testing.assert_allclose(of_claims(run, claim, ends), [[value] * 3, [control] * 3], atol=1e-9)


@pytest.mark.parametrize("run, count, words", [
    ("text", 7, "| 0.667, 0.667, 0.667, 0.667 | 0.750, 0.750, 0.750, 0.750 | 0.75 |"), ("retries", 4, "| 0.250, 0.250, 0.250 |"),
    ("visual", 4, "| 0.667, 0.667, 0.667 | 0.750, 0.750, 0.750 | 0.500 |"),
])
def test_the_report_has_a_row_for_every_arm(run, count, words):
    cfg = CONFIGS[run]
    assert len(sft_vs_rl.claims(cfg)) == count
    text = sft_vs_rl.sections(cfg, fabricated(cfg))
    assert text.count("\n| ") == 2 + len(sft_vs_rl.shown(cfg)) and text.count(words) == len(sft_vs_rl.shown(cfg))


@pytest.mark.parametrize("field, value, sentence", [
    ("updates", 30, "--updates 30: expected a multiple of 20"), ("k", 5, "--k 5: expected a number from 2 to 4"),
    ("minibatches", 3, "--minibatches 3: expected a divisor of --prompts 16"), ("rl_rate", 2.0, "--rl-rate 2.0"),
    ("variant", "visible", "--variant visible: did you mean visual"), ("retries", -1, "--retries -1: expected at least 0"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
    with pytest.raises(ValueError, match="--retries 3: expected 0 with --variant visual"):
        dataclasses.replace(CONFIG, variant="visual", retries=3)


def test_every_field_of_the_sweep_is_a_field():
    for table in sft_vs_rl.SWEEP:
        for field, (values, metric) in table.items():
            assert len(set(values)) > 2 and hasattr(CONFIG, field) and metric.split("/")[0] in STAGES
