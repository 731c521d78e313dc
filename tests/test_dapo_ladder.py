"""The ladder: what differs between two arms, and how success is compared at equal tokens."""

import dataclasses

import numpy as np
import pytest

from jaxpt.experiments import dapo_ladder
from jaxpt.experiments.dapo_ladder import CHANGES, ON_GRPO, ON_LADDER, OUT_OF_DAPO
from jaxpt.lab.experiment import topological

EXPERIMENT = dapo_ladder.EXPERIMENT
CONFIG = EXPERIMENT.tiers["cpu"].config
STAGES = {stage.name: stage for stage in dapo_ladder.stages(CONFIG, {})}
LEAF = {
    "filter": {"overlong_filter"}, "clip": {"eps_high"}, "penalty": {"overlong_penalty"}, "token": {"row"},
    "dynamic": {"max_rounds"},
}


@pytest.mark.parametrize("tier", EXPERIMENT.tiers)
def test_arms_are_numbers_of_one_program_and_see_the_same_draws(tier):
    stages = dapo_ladder.stages(EXPERIMENT.tiers[tier].config, {})
    assert topological(stages)[0].name == "start"
    arms = [stage for stage in stages if stage.after == "start"]
    assert len({(arm.make, repr(arm.config), arm.steps) for arm in arms}) == 1 and len(arms) == len(stages) - 1
    assert {arm.stream for arm in arms if not arm.name.endswith("again")} == {"policy"}
    assert all(stage.steps % stage.config.eval.every == 0 for stage in stages)


@pytest.mark.parametrize("way", [ON_LADDER, ON_GRPO, OUT_OF_DAPO])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_measured_by_two_arms_that_differ_in_it_alone(way, change):
    with_it, without = (STAGES[name].hyper for name in way[change])
    assert with_it.keys() == without.keys()
    assert {leaf for leaf in with_it if with_it[leaf] != without[leaf]} == LEAF[change]


def test_the_top_of_the_ladder_is_dapo_and_its_bottom_grpo_with_dapo_s_parts_off():
    own = STAGES["dapo"].config.arm("dapo")
    assert own.items() - STAGES["dapo"].hyper.items() <= {
        "buffer": own["buffer"], "overlong_penalty": 1.0, "max_rounds": 10.0
    }.items()
    base = STAGES["base"].hyper
    assert [base[leaf] for leaf in ("overlong_filter", "overlong_penalty", "max_rounds")] == [0, 0, 1]
    assert base["eps_low"] == base["eps_high"] == STAGES["grpo"].hyper["eps_high"]


def test_equal_tokens_compares_where_the_cheaper_arm_is_done():
    """Success rises by 0.01 a batch in both arms, but one generates twice the tokens for it: of 100 tokens, the last 25
    are batches 76 to 100 of the one, and 37.5 to 50 of the other."""
    batch = np.arange(1, 101, dtype=float)
    gold = np.stack([batch, batch]) / 100
    curves = {"cheap/gold": gold, "dear/gold": gold}
    curves |= {"cheap/generated": np.stack([batch] * 2), "dear/generated": np.stack([2 * batch] * 2)}
    np.testing.assert_allclose(dapo_ladder.at_equal_tokens(curves, "dear", "cheap"), 0.4424 - 0.88)
    np.testing.assert_allclose(dapo_ladder.at_equal_tokens(curves, "cheap", "dear"), 0.88 - 0.4424)
    np.testing.assert_allclose(dapo_ladder.at_equal_tokens(curves, "cheap", "cheap"), 0)


def test_claims_read_the_right_arms():
    """Every metric of the i-th arm is 2^i, so that a sum of differences tells which arms are in it."""
    place = {name: 2.0**i for i, name in enumerate(STAGES)}
    names = ("gold", "entropy", "truncated", "wrong_length", "no_signal", "clip_fraction")
    curves = {f"{arm}/{metric}": np.full((2, 40), at) for arm, at in place.items() for metric in names}
    curves |= {f"{arm}/generated": np.tile(np.arange(1.0, 41), (2, 1)) for arm in place}
    curves["seeds"] = np.arange(2)
    for claim in EXPERIMENT.claims:
        for estimand in (claim.estimand, claim.control):
            assert estimand(curves).shape == (2,) and np.isfinite(estimand(curves)).all() and estimand(curves).all(), claim.name
    shortens = next(claim for claim in EXPERIMENT.claims if claim.name == "the_token_loss_shortens_wrong_answers")
    expected = (place["base"] - place["token"] + place["without_token"] - place["dapo"]) / 2
    np.testing.assert_allclose(shortens.estimand(curves), expected)
    assert dapo_ladder.sections(CONFIG, curves).count("\n| ") == 2 * 2 + len(CHANGES) + len(dapo_ladder.ARMS) + 2


@pytest.mark.parametrize("field, value, sentence", [
    ("level", 0, "--level 0: expected a number from 1 to 32"),
    ("ramble", 1.0, "--ramble 1"),
    ("updates", 30, "--updates 30: expected a multiple of 20"),
    ("rate", float("nan"), "--rate nan"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
