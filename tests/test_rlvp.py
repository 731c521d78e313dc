"""Reward the outcome, penalise the path: what differs between two arms, and what its claims read."""

import dataclasses

import numpy as np
import pytest

from jaxpt.experiments import rlvp
from jaxpt.experiments.rlvp import ARMS
from jaxpt.lab.experiment import topological

EXPERIMENT = rlvp.EXPERIMENT
CONFIG = EXPERIMENT.tiers["cpu"].config
STAGES = {stage.name: stage for stage in rlvp.stages(CONFIG, {})}
DIFFERS = {  # arm -> the arm that it changes, and in what
    "penalty": ("summed", {"outcome_weight"}), "summed": ("outcome", {"path_total"}), "capped": ("summed", {"path_cap"}),
    "channels": ("outcome", {"path_weight"}), "lenient": ("channels", {"event_tampering"}),
    "credits": ("channels", {"event_looked", "event_ran"}), "pending": ("channels", {"event_discharged"}),
    "annealed": ("pending", {"path_until"}), "shown": ("annealed", {"demonstrated"}),
}


@pytest.mark.parametrize("tier", EXPERIMENT.tiers)
def test_arms_are_numbers_of_one_program_and_see_the_same_draws(tier):
    stages = rlvp.stages(EXPERIMENT.tiers[tier].config, {})
    assert topological(stages)[0].name == "start"
    for prefix, parent, stream in (("", "start", "policy"), ("twin_", None, "twin"), ("stuck_", None, "twin")):
        arms = [s for s in stages if s.after == parent and s.name != "start"]
        arms = [s for s in arms if s.name.startswith(prefix)] if prefix else arms
        assert len({(arm.make, repr(arm.config), arm.steps) for arm in arms}) == 1
        assert {arm.stream for arm in arms if not arm.name.endswith("again")} == {stream}
        assert len({tuple(arm.hyper) for arm in arms}) == 1
    assert {s.name for s in stages if s.after == "start"} == {*ARMS, "outcome_again"}


@pytest.mark.parametrize("arm", DIFFERS)
def test_an_arm_changes_one_thing(arm):
    other, leaves = DIFFERS[arm]
    for prefix in ["twin_"] + [""] * ({arm, other} <= {*ARMS}):
        ours, theirs = STAGES[prefix + arm].hyper, STAGES[prefix + other].hyper
        assert {leaf for leaf in ours if ours[leaf] != theirs[leaf]} == leaves


def test_the_path_has_faded_before_the_end_is_measured():
    for prefix, updates in (("", CONFIG.updates), ("twin_", CONFIG.twin_updates)):
        until = STAGES[f"{prefix}shown"].hyper["path_until"]
        assert 0 < until <= updates - rlvp.EVERY and STAGES[f"{prefix}channels"].hyper["path_until"] == 0


def test_claims_read_the_right_arms():
    """Every metric of the i-th stage is 2^i: differences and ratios tell which stages are in them."""
    place = {name: 2.0**i for i, name in enumerate(STAGES)}
    sampled = [f"differs_{event}" for event in rlvp.EVENTS] + ["rescued"]
    names = ["violations", "reward", "gold", "count_tampering", "no_signal", "all_fail", "outcome_variance", "violation_variance",
             "length", "generated", *(f"sampled_{name}" for name in sampled)]
    curves = {f"{stage}/{name}": np.full((3, 40), at) for stage, at in place.items() for name in names}
    exact = ("reward", "gold", "violations", "count_ran", "decisions")
    curves |= {f"{stage}/{name}_replica": np.full((3, 40, 2), at) for stage, at in place.items() for name in exact}
    for claim in EXPERIMENT.claims:
        for estimand in (claim.estimand, claim.control):
            values = estimand(curves)
            assert values.shape == ((6,) if claim.unit == "table" else (3,)) and np.isfinite(values).all(), claim.name
    claims = {claim.name: claim for claim in EXPERIMENT.claims}
    np.testing.assert_allclose(claims["the_recipe_keeps_success"].estimand(curves), 1 + place["shown"] - place["outcome"])
    np.testing.assert_allclose(claims["the_recipe_heeds_the_rules"].estimand(curves), 1 - place["shown"] / place["outcome"])
    farm = claims["the_twin_farms_credits"]
    np.testing.assert_allclose(farm.estimand(curves), place["twin_credits"] - place["twin_pending"])
    np.testing.assert_allclose(farm.control(curves), place["twin_channels"] - place["twin_pending"])
    lines = rlvp.sections(CONFIG, curves).count("\n| ")
    assert lines == 2 * 3 + len(ARMS) + len(rlvp.TWINS) + len(rlvp.EVENTS)


@pytest.mark.parametrize("field, value, sentence", [
    ("level", 0, "--level 0: expected a number from 1 to 8"),
    ("care", 1.5, "--care 1.5"),
    ("updates", 30, "--updates 30: expected a multiple of 20"),
    ("rate", float("nan"), "--rate nan"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
