"""Baselines compared: what the arms differ in, and the exact noise against what theory says of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.experiments import critic_or_group
from jaxpt.lab.experiment import topological
from jaxpt.train.baselines import BaselineConfig, make_baselines

EXPERIMENT = critic_or_group.EXPERIMENT
CONFIG = EXPERIMENT.tiers["cpu"].config
STAGES = {stage.name: stage for stage in critic_or_group.stages(CONFIG, {})}
SMALL = BaselineConfig(depth=2, worlds=2, stride=0.5)


@pytest.fixture(scope="module")
def measured():
    """lam -> metrics at errors of 0, 0.5, ... 2 deviations, on trees of 7 leaves."""
    program = make_baselines(SMALL)
    run = jax.jit(lambda key, lam: jax.lax.scan(lambda s, _: program.step(s), program.init(key, {"lam": lam}), length=5)[1])
    return {lam: jax.device_get(run(jax.random.key(1), jnp.float32(lam))) for lam in (1.0, 0.5)}


def test_an_error_is_noise_that_grows_with_its_square(measured):
    """With lam 1, A = R - V: independent of what the error is, it adds error^2 E sum_t |score_t|^2 w_t, and a term
    linear in it; so the variance is a parabola in the error."""
    error, noise = measured[1.0]["error"], measured[1.0]["noise_critic_world"].astype(np.float64)
    np.testing.assert_allclose(error, [0, 0.5, 1, 1.5, 2])
    third = np.diff(noise**2, n=3, axis=0)
    np.testing.assert_allclose(third, 0, atol=1e-3 * np.max(noise**2))
    assert (np.diff(noise**2, n=2, axis=0) > 0.1).all()


def test_a_critic_is_a_baseline_at_lam_one_and_a_bias_below_it(measured):
    np.testing.assert_allclose(measured[1.0]["bias_critic_world"], 0, atol=1e-5)
    assert (measured[0.5]["bias_critic_world"][1:] > 1e-3).all()
    np.testing.assert_allclose(measured[0.5]["bias_critic_world"][0], 0, atol=1e-5)  # true values: none at any lam


def test_a_group_s_noise_falls_with_its_size_and_a_true_critic_s_is_below_it(measured):
    """The mean of the G - 1 others is the value of the root with an error of variance Var R / (G - 1)."""
    two, three = (measured[1.0][f"noise_group_{size}_world"].astype(np.float64) ** 2 for size in (2, 3))
    assert (two > three).all() and (three > measured[1.0]["noise_critic_world"][0] ** 2).all()
    # Var_G = limit + c / (G - 1): the excess halves from 2 to 3, and the limit is above the true critic's.
    assert (2 * three - two > measured[1.0]["noise_critic_world"][0] ** 2).all()


@pytest.mark.parametrize("tier", EXPERIMENT.tiers)
def test_arms_draw_equally_many_episodes_and_programs_are_few(tier):
    stages = critic_or_group.stages(EXPERIMENT.tiers[tier].config, {})
    topological(stages)
    arms = [stage for stage in stages if stage.after == "start"]
    assert len({repr(arm.config) for arm in arms}) == 3
    assert len({(arm.steps, arm.config.prompts * arm.config.group, arm.config.minibatches) for arm in arms}) == 1
    for arm in arms:
        if "lam" in arm.hyper:
            assert arm.hyper["beta"] == arm.hyper["entropy_coef"] == 0, arm.name
    assert STAGES["unlearned"].hyper["critic_rate"] == STAGES["unlearned"].hyper["value_coef"] == 0
    assert {name: s.hyper["repeats"] for name, s in STAGES.items() if s.after and s.hyper["repeats"] != CONFIG.group} == {"ppo_spread": 1}


def test_a_crossing_is_read_between_the_points_of_the_grid():
    error = np.tile(np.array([0.0, 1.0, 2.0]), (2, 1))
    curves = {"exact_lam1/error": error, "exact_lam1/noise_critic": 2 + error, "exact_lam1/noise_group_3": np.full((2, 3), 3.5)}
    assert critic_or_group.crossing(curves, 3, "1") == pytest.approx(1.5)
    worlds = np.stack([2 + error, 3 + error], axis=2)
    curves |= {"exact_lam1/noise_critic_world": worlds, "exact_lam1/noise_group_3_world": np.full((2, 3, 2), 4.0)}
    np.testing.assert_allclose(critic_or_group.less_noise(1.0, 3)(curves), [0.25, 0, 0.25, 0])


def test_claims_and_sections_can_be_computed():
    rng = np.random.default_rng(0)
    names = ("gold", "reward", "entropy", "value_error", "generated", "flops")
    curves = {f"{arm}/{metric}": rng.uniform(0.2, 0.8, (2, 40)) for arm in STAGES for metric in names}
    for name in critic_or_group.LAMBDAS:
        exact = f"exact_lam{name}"
        curves[f"{exact}/error"] = np.tile(np.arange(17) / 8, (2, 1))
        for who in ("critic", "group_2", "group_3"):
            curves |= {f"{exact}/noise_{who}": rng.uniform(1, 2, (2, 17)), f"{exact}/noise_{who}_world": rng.uniform(1, 2, (2, 17, 4))}
    for twin in ("ppo", "unlearned", "group"):
        curves[f"twin_{twin}/J_replica"] = rng.uniform(size=(2, 20, 3))
    for claim in EXPERIMENT.claims:
        for estimand in (claim.estimand, claim.control):
            assert estimand(curves).ndim == 1 and np.isfinite(estimand(curves)).all(), claim.name
    assert critic_or_group.sections(CONFIG, curves).count("\n| ") == 2 * 2 + len(critic_or_group.ARMS) + len(critic_or_group.LAMBDAS)


@pytest.mark.parametrize("field, value, sentence", [
    ("level", 0, "--level 0: expected a number from 1 to 32"),
    ("lam", 1.5, "--lam 1.5"),
    ("updates", 30, "--updates 30: expected a multiple of 20"),
    ("small_critic_rate", float("nan"), "--small-critic-rate nan"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
