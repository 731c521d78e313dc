"""The main job's own arithmetic: what its demonstrator earns, and that its arms cost the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.experiments import first_light
from jaxpt.ops.sampling import row_keys
from jaxpt.rollout import demonstrate
from jaxpt.train.budget import update_flops
from jaxpt.train.common import draw_tasks
from jaxpt.train.policy import policy_flops

CONFIG = first_light.EXPERIMENT.tiers["cpu"].config
STAGES = {stage.name: stage for stage in first_light.stages(CONFIG, {})}


def test_the_demonstrator_s_success_is_the_closed_form():
    cfg, n = STAGES["start"].config, 8192
    env = cfg.env.make()

    @jax.jit
    def rewards(key):
        tasks = draw_tasks(env, cfg.env.levels, row_keys(jax.random.fold_in(key, 0), jnp.arange(n)))
        keys = row_keys(jax.random.fold_in(key, 1), jnp.arange(n))
        return demonstrate(env, tasks, keys, env.spec.styles.index(cfg.style)).reward

    expected = first_light.demonstrator_success(CONFIG)
    error = np.sqrt(expected * (1 - expected) / n)
    assert abs(float(np.mean(rewards(jax.random.key(0)))) - expected) < 4 * error


@pytest.mark.parametrize("tier", first_light.EXPERIMENT.tiers)
def test_the_arms_cost_the_same(tier):
    stages = {s.name: s for s in first_light.stages(first_light.EXPERIMENT.tiers[tier].config, {})}
    sft, grpo, coin = stages["sft"], stages["grpo"], stages["coin"]
    one = update_flops(sft.config.model, sft.config.env.make().spec, sft.config.batch)
    extra = sft.steps * one - grpo.steps * policy_flops(grpo.config)
    assert 0 <= extra < first_light.EVERY * one  # rounded up to a chunk, in favour of imitation
    assert grpo.config == coin.config and grpo.steps == coin.steps and grpo.stream == coin.stream
    assert all(stage.steps % stage.config.eval.every == 0 for stage in (sft, grpo, coin, stages["start"]))


@pytest.mark.parametrize("tier", first_light.EXPERIMENT.tiers)
def test_every_stage_of_every_tier_can_be_traced(tier):
    stages = first_light.stages(first_light.EXPERIMENT.tiers[tier].config, {})
    for make, config in {(s.make, id(s.config)): (s.make, s.config) for s in stages}.values():
        program = make(config)
        hyper = {name: jnp.float32(x) for name, x in program.hyper.items()}
        state = jax.eval_shape(program.init, jax.random.key(0), hyper)
        jax.eval_shape(program.step, state)


@pytest.mark.parametrize("field, value, sentence", [
    ("level", 0, "--level 0: expected a number from 1 to 32"),
    ("level", 99, "--level 99"),
    ("p", 6, "--p 6 --generators 4: p is 6"),
    ("prompts", 0, "--prompts 0: expected at least 1"),
    ("updates", 30, "--updates 30: expected a multiple of 20"),
    ("policy_rate", float("nan"), "--policy-rate nan"),
    ("objective", "grppo", "--objective grppo: did you mean grpo"),
    ("objective", "sft", "--objective sft: did you mean raft"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
