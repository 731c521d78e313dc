"""Device agreement: one update of every row on 1 device, and on 8 virtual devices by sharded jit, shard_map and pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.models import ModelConfig
from jaxpt.objectives import policy
from jaxpt.train import parallel
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.critic import CriticConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft

DEVICES = 8
ENV = EnvConfig("tree", {"vocab": 3, "depth": 2})  # rewards that differ from the first batch on, two lengths
MODEL = ModelConfig(vocab=ENV.make().spec.vocab, d_model=16, n_layers=1, n_heads=2)
# eps: where a gradient is 0 but for rounding, plain Adam makes steps of the whole rate from its sign.
OPTIM = OptimConfig(learning_rate=1e-2, eps=1e-4)
ROWS = tuple(row.name for row in policy.ROWS)
PROGRAMS = {
    "sft": (make_sft, SftConfig(env=ENV, model=MODEL, optim=OPTIM, batch=16, style="best", eval=EvalConfig(1, 8))),
    "policy": (make_policy, PolicyConfig(
        env=ENV, model=MODEL, optim=OPTIM, prompts=16, group=4, minibatches=2, objectives=ROWS, eval=EvalConfig(1, 8),
        critic=CriticConfig(optim=OPTIM), temperature=4.0,  # a fresh policy would repeat its prompt
    )),
}
SHARDED = {
    "jit": lambda make, cfg: parallel.step_by_jit(make, cfg, parallel.make_mesh(DEVICES)),
    "shard_map": lambda make, cfg: parallel.step_by_shard_map(make, cfg, parallel.make_mesh(DEVICES)),
    "pmap": lambda make, cfg: parallel.step_by_pmap(make, cfg, DEVICES),
}


def numbers(program, **changed):
    return {k: jnp.float32(v) for k, v in {**program.hyper, **changed}.items()}


@pytest.fixture(scope="module")
def reference():
    """The state after 2 updates of GRPO on one device, and what one update of every row makes of it."""
    make, cfg = PROGRAMS["policy"]
    program = make(cfg)
    step = jax.jit(program.step)
    state = program.init(jax.random.key(0), numbers(program, **cfg.arm("grpo")))
    for _ in range(2):
        state, _ = step(state)
    begun = {}
    for name in ROWS:  # dynamic sampling fills places shard by shard: one round is what can agree
        begun[name] = {**state, "hyper": numbers(program, **{**cfg.arm(name), "max_rounds": 1.0})}
    return begun, {name: step(state) for name, state in begun.items()}


@pytest.mark.parametrize("how", ["jit", "shard_map", pytest.param("pmap", marks=pytest.mark.slow)])
def test_one_update_of_every_row_agrees(reference, how):
    assert len(jax.devices()) >= DEVICES
    begun, expected = reference
    step = SHARDED[how](*PROGRAMS["policy"])
    for name in ROWS:
        state, metrics = step(jax.tree.map(jnp.copy, begun[name]))
        for tree in ("params", "critic"):
            for a, b in zip(*map(jax.tree.leaves, (expected[name][0][tree], state[tree])), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
        for metric, value in expected[name][1].items():  # counts and rewards of the sampled episodes among them
            np.testing.assert_allclose(value, metrics[metric], rtol=1e-4, atol=1e-5, err_msg=f"{name} {metric}")


@pytest.mark.slow
def test_twenty_supervised_updates_agree():
    make, cfg = PROGRAMS["sft"]
    program = make(cfg)
    losses = []
    for step in (jax.jit(program.step), SHARDED["shard_map"](make, cfg)):
        state = program.init(jax.random.key(1), numbers(program))
        curve = []
        for _ in range(20):
            state, metrics = step(state)
            curve.append(float(metrics["loss"]))
        losses.append(curve)
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_rows_must_divide():
    with pytest.raises(ValueError, match="12 rows do not divide over 8 shards"):
        parallel.named(8).rows(12)
