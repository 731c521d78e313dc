"""The twin's closed forms against plain numpy and against what follows from definitions, and the experiment's own
arithmetic: what its claims make of curves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.envs import exact
from jaxpt.experiments import kl_estimators
from jaxpt.train import kl_twin

CONFIG = kl_estimators.EXPERIMENT.tiers["cpu"].config
WORLDS = kl_twin.Worlds(depth=2, count=2)
BETA = 0.3


@pytest.fixture(scope="module")
def world():
    leaves = WORLDS.leaves()
    drawn = jax.tree.map(lambda x: x[0], WORLDS.draw(jax.random.key(3), kl_twin.table_of(leaves)))
    return leaves._replace(reward=drawn["reward"]), drawn["reference"]


def runner(program, steps):
    """(hyper) -> metrics; compiles once."""

    @jax.jit
    def scan(numbers):
        state = program.init(jax.random.key(0), numbers)
        return jax.lax.scan(lambda s, _: program.step(s), state, length=steps)[1]

    def run(**hyper):
        numbers = {name: jnp.float32(x) for name, x in {**program.hyper, **hyper}.items()}
        return jax.tree.map(np.asarray, scan(numbers))

    return run


@jax.jit
def solve(leaves, reference):
    best = kl_twin.optimum(reference, leaves, BETA)
    value, slope = jax.value_and_grad(kl_twin.regularised)(best, reference, leaves, BETA)
    return exact.leaf_prob(best, leaves), kl_twin.sequence_kl(best, reference, leaves), value, slope


def test_the_optimum_is_the_tilted_reference(world):
    leaves, reference = world
    best, kl, value, slope = solve(leaves, reference)
    ref = np.asarray(exact.leaf_prob(reference, leaves), np.float64)
    tilted = ref * np.exp(np.asarray(leaves.reward, np.float64) / BETA)
    np.testing.assert_allclose(best, tilted / tilted.sum(), rtol=1e-5)
    np.testing.assert_allclose(value, BETA * np.log(tilted.sum()), rtol=1e-5)
    np.testing.assert_allclose(slope, 0, atol=1e-5)
    np.testing.assert_allclose(kl, tilted / tilted.sum() @ np.log(tilted / tilted.sum() / ref), rtol=1e-4)


@pytest.fixture(scope="module")
def measured():
    penalties = ("k1_loss", "k3_loss", "k1_reward", "k3_reward")
    run = runner(kl_twin.make_kl_bias(kl_twin.KlBiasConfig(worlds=WORLDS, penalties=penalties)), 3)
    return {lag: run(lag=lag) for lag in (0.0, 0.3)}


def test_what_follows_from_the_definitions_on_policy(measured):
    here = measured[0.0]
    for name, want in {"pull_k1_loss": 0, "pull_k1_reward": 1, "error_k1_loss": 1, "error_k1_reward": 0, "off_k1": 0,
                       "off_k3": 0, "behind": 0}.items():
        np.testing.assert_allclose(here[f"{name}_world"], want, atol=2e-3, err_msg=name)
    # In the reward, k3 = k1 + (ref/pi - 1) in expectation takes away what k3 in the loss pulls.
    np.testing.assert_allclose(here["pull_k3_loss_world"] + here["pull_k3_reward_world"], 1, atol=5e-3)


def test_samples_that_lag_change_every_report(measured):
    here, lagged = measured[0.0], measured[0.3]
    np.testing.assert_array_equal(here["kl_world"], lagged["kl_world"])
    assert (lagged["behind_world"] > 1e-3).all() and (lagged["off_k1_world"] < -0.1).all()


@pytest.fixture(scope="module")
def learning():
    cfg = kl_twin.KlLearningConfig(worlds=WORLDS, updates=60, penalties=("k1_reward", "k3_loss"))
    return cfg, runner(kl_twin.make_kl_learning(cfg), 60)


def test_training_nears_the_optimum_and_never_passes_it(learning):
    cfg, run = learning
    ends = {beta: run(**cfg.arm("k1_reward"), beta=beta)["reached_world"] for beta in (0.2, 0.5)}
    for reached in ends.values():
        assert reached.max() < 1 + 1e-3
    assert (ends[0.5][-1] > 0.9).all()


def test_no_weight_is_no_penalty(learning):
    cfg, run = learning
    free = [run(**cfg.arm(name), weight=0.0)["kl_world"] for name in ("k1_reward", "k3_loss")]
    np.testing.assert_allclose(*free, rtol=1e-4)
    other = run(**cfg.arm("k3_loss"), weight=0.0, draws=1.0)["kl_world"]
    assert np.abs(other - free[1]).max() > 1e-3


def test_unknown_penalties_are_named():
    with pytest.raises(ValueError, match="penalties: got 'k4_loss'"):
        kl_twin.KlLearningConfig(penalties=("k4_loss",))


@pytest.mark.parametrize("tier", kl_estimators.EXPERIMENT.tiers)
def test_arms_differ_in_numbers_only_and_make_equally_many_updates(tier):
    cfg = kl_estimators.EXPERIMENT.tiers[tier].config
    stages = {s.name: s for s in kl_estimators.stages(cfg, {})}
    trained = {name: s for name, s in stages.items() if s.make is kl_twin.make_kl_learning}
    assert len({s.config for s in trained.values()}) == 1 and {s.stream for s in stages.values()} == {"worlds"}
    assert {s.steps * int(s.hyper["epochs"]) for s in trained.values()} == {cfg.updates}
    assert all(s.steps % s.chunk == 0 for s in trained.values())
    assert stages["near_none"].hyper["weight"] == 0 and stages["far_again"].hyper["draws"] == 1


def test_a_claim_compares_worlds_in_pairs():
    reached = {"far_k1_reward": [[0.9, 0.5], [0.8, 0.7]], "far_k3_loss": [[0.8, 0.6], [0.5, 0.7]]}
    curves = {f"{arm}/reached_world": np.stack([np.zeros((2, 2)), np.array(x)], axis=1) for arm, x in reached.items()}
    claim = next(c for c in kl_estimators.CLAIMS if c.name == "k1_in_the_reward_beats_k3_in_the_loss")
    np.testing.assert_allclose(claim.estimand(curves), [0.1, -0.1, 0.3, 0.0], atol=1e-12)
    noise = {f"here/sd_{k}_world": np.array([[[a], [2.0], [b]]]) for k, a, b in (("k1", 8.0, 1.0), ("k3", 1.0, 16.0))}
    near, far = kl_estimators.CLAIMS[:2]
    np.testing.assert_allclose([near.estimand(noise), near.control(noise), far.estimand(noise)], [[3], [-4], [4]])


@pytest.mark.parametrize("field, value, sentence", [
    ("updates", 250, "--updates 250: expected a multiple of 400"),
    ("far_beta", 0.0, "--far-beta 0.0"),
    ("group", 1, "--group 1: expected at least 2"),
    ("k3_weight", float("nan"), "--k3-weight nan"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
