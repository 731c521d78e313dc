"""How a batch is split: the closed form of noise against enumeration, sizes of groups as a number, the arms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.envs import exact
from jaxpt.envs.bandit import bandit
from jaxpt.experiments import group_size
from jaxpt.lab.experiment import topological
from jaxpt.models import ModelConfig
from jaxpt.objectives import ROWS
from jaxpt.train.common import EnvConfig, EvalConfig, draw_tasks, levels_of
from jaxpt.train.expected import expected_gradient
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.split import SplitConfig, group_moments, make_split, make_split_noise

EXPERIMENT = group_size.EXPERIMENT
CONFIG = EXPERIMENT.tiers["cpu"].config


def hyper_of(program, **changed):
    return {name: jnp.float32(x) for name, x in {**program.hyper, **changed}.items()}


def test_noise_of_a_group_against_enumeration():
    """Every batch of 2 and of 3 answers among 4, one of them right."""
    env = bandit(arms=4)
    leaves = exact.leaves(env, env.sample(jax.random.key(0), 1), jax.random.key(0))
    leaves = leaves._replace(reward=(leaves.tokens[:, 0] == 1).astype(jnp.float32))
    width = int(leaves.tokens.max()) + 1

    @jax.jit
    def both(p):
        logits, found = jnp.full((1, width), jnp.log((1 - p) / 3)).at[0, 1].set(jnp.log(p)), {}
        for name, group in (("rloo", 3), ("grpo_no_kl", 2), ("grpo_no_kl", 3)):
            moments = expected_gradient(ROWS[name], leaves, logits, group, **ROWS[name].hyper)
            closed = group_moments(ROWS[name], jnp.int32(group), p, 4, 6, **ROWS[name].hyper)
            found[f"{name} {group}"] = (jnp.sum(moments.mean**2), moments.variance), closed
        return found

    for p in (0.1, 0.6):
        for where, (enumerated, closed) in jax.device_get(both(jnp.float32(p))).items():
            np.testing.assert_allclose(closed, enumerated, rtol=2e-4, err_msg=f"{where} {p}")


def test_the_group_of_least_noise_grows_as_success_falls():
    """Unless prompts are all alike: then nothing is lost by looking at one of them only."""
    program = make_split_noise(SplitConfig(objectives=("grpo_no_kl",)))
    steps = jax.jit(lambda state: jax.lax.scan(lambda s, _: program.step(s), state, length=6))

    def best(success, alike):
        _, metrics = steps(program.init(jax.random.key(0), hyper_of(program, success=success, alike=alike)))
        return 2 ** metrics["log2_group"][np.argmin(metrics["samples_grpo_no_kl"])]

    assert [best(p, 0.5) for p in (0.5, 0.1, 0.02)] == [4, 8, 16]
    assert best(0.5, 1.0) == best(0.05, 1.0) == 64


def test_the_linear_twin_learns_and_its_rate_is_the_best_one():
    cfg = SplitConfig(prompts=16, features=8, answers=4, samples=16, rates=(0.0, 8.0), replicas=2)
    program = make_split(cfg)
    state = program.init(jax.random.key(0), hyper_of(program, group=4.0))
    _, metrics = jax.jit(lambda state: jax.lax.scan(lambda s, _: program.step(s), state, length=40))(state)
    np.testing.assert_allclose(metrics["J"][:, 0], 0.25, rtol=1e-5)  # theta = 0 and never moved
    assert metrics["J"][-1, 1] > 0.5
    np.testing.assert_array_equal(metrics["J_best"], metrics["J"].max(axis=1))


def test_repeats_make_groups_and_refresh_makes_the_sampler():
    """Eight prompts: alone they have no baseline and teach nothing, four in a row are a group. With `refresh` beyond
    the run, samples stay those of the start; with 1, the policy of the last batch made them."""
    cfg = PolicyConfig(
        env=EnvConfig("bandit", {"arms": 3}), model=ModelConfig(vocab=5, d_model=8, n_layers=1, n_heads=1),
        objectives=("rloo",), prompts=8, group=1, repeats=1, refresh=1, eval=EvalConfig(10**6, 1),
    )
    program = make_policy(cfg)
    steps = jax.jit(lambda s: jax.lax.scan(lambda s, _: program.step(s), s, length=4))
    start = lambda **changed: program.init(jax.random.key(0), hyper_of(program, learning_rate=0.01, **changed))  # noqa: E731
    (alone, none), (fours, some), (stale, _) = (steps(start(**x)) for x in ({}, {"repeats": 4}, {"repeats": 4, "refresh": 9}))
    same = lambda a, b: all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))  # noqa: E731
    first = start()["params"]
    assert same(alone["params"], first) and (none["no_signal"] == 1).all()
    assert not same(fours["params"], first) and some["no_signal"].min() < 1
    assert set((np.asarray(some["no_signal"]) * 2).tolist()) <= {0.0, 1.0, 2.0}  # of two groups
    assert same(stale["sampler"], first) and not same(stale["params"], first)
    assert not same(fours["sampler"], first) and not same(fours["sampler"], fours["params"])


def test_levels_are_leaves():
    env = EnvConfig("chain", {"p": 5, "max_level": 4}, (1, 4))
    levels = levels_of(env, {"level_low": jnp.float32(2), "level_high": jnp.float32(3)})
    drawn = draw_tasks(env.make(), levels, jax.random.split(jax.random.key(0), 64)).level
    assert set(np.asarray(drawn).tolist()) == {2, 3} and levels_of(env, {}) == (1, 4)


@pytest.mark.parametrize("tier", EXPERIMENT.tiers)
def test_arms_of_a_split_differ_in_the_size_of_groups_and_the_rate_alone(tier):
    cfg = EXPERIMENT.tiers[tier].config
    stages = {stage.name: stage for stage in group_size.stages(cfg, {})}
    topological(list(stages.values()))
    arms = [stages[f"{split}_{group}"] for split in group_size.SPLITS for group in group_size.GROUPS]
    assert len({arm.config.prompts * arm.config.group for arm in arms}) == 1
    assert all(arm.config == arms[0].config and arm.steps == cfg.updates and arm.after == "start" for arm in arms)
    assert all(arm.config.prompts % arm.hyper["repeats"] == 0 for arm in arms)
    ranges = {split: cfg.levels(split) for split in group_size.SPLITS}
    assert ranges["easy"]["level_high"] < ranges["hard"]["level_low"]  # no task is in both
    assert stages["again_2"].hyper == stages["easy_2"].hyper and stages["again_2"].stream != stages["easy_2"].stream


def test_estimands():
    claims = {claim.name: claim for claim in EXPERIMENT.claims}
    ends = {"easy_2": 0.9, "easy_32": 0.8, "easy_8": 0.85, "again_2": 0.88, "again_8": 0.86, "hard_2": 0.5, "hard_32": 0.55}
    curves = {f"{arm}/sampled_gold": np.full((8, 2), x) for arm, x in ends.items()}
    for arm, early, late in (("easy_2", 0.6, 0.9), ("easy_8", 0.5, 0.8), ("hard_2", 0.2, 0.7), ("hard_8", 0.3, 0.6)):
        curves[f"twin_{arm}/J_best"] = np.repeat([[early], [late]], 8, axis=1).T.repeat([1, 7], axis=1)
    expected = {
        "hard_prompts_want_larger_groups": (0.15, 0.03), "easy_prompts_want_small_groups": (0.1, -0.02),
        "hard_prompts_want_small_groups_too": (-0.05, -0.02),
        "the_twin_wants_larger_groups_while_prompts_are_hard": (0.2, 0.0),
    }
    assert set(expected) == set(claims)
    for name, (estimate, control) in expected.items():
        np.testing.assert_allclose(claims[name].estimand(curves), np.full(8, estimate), atol=1e-12, err_msg=name)
        np.testing.assert_allclose(claims[name].control(curves), np.full(8, control), atol=1e-12, err_msg=name)


@pytest.mark.parametrize("field, value, sentence", [
    ("updates", 30, "--updates 30: expected a multiple of 20"),
    ("samples", 48, "--samples 48: expected a multiple of 32"),
    ("hard_levels", 9, "--hard-levels 9"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
