"""Device agreement: one update on 1 device, and on 8 virtual devices by sharded jit, shard_map and pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.models import ModelConfig
from jaxpt.train import parallel
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft

DEVICES = 8
ENV = EnvConfig("chain", {"p": 5, "max_level": 2}, (1, 2))
MODEL = ModelConfig(vocab=ENV.make().spec.vocab, d_model=16, n_layers=1, n_heads=2)
OPTIM = OptimConfig(learning_rate=1e-2)
PROGRAMS = {
    "sft": (make_sft, SftConfig(env=ENV, model=MODEL, optim=OPTIM, batch=16, eval=EvalConfig(1, 8))),
    "grpo": (make_policy, PolicyConfig(env=ENV, model=MODEL, optim=OPTIM, prompts=8, group=4, eval=EvalConfig(1, 8))),
}
SHARDED = {
    "jit": lambda make, cfg: parallel.step_by_jit(make, cfg, parallel.make_mesh(DEVICES)),
    "shard_map": lambda make, cfg: parallel.step_by_shard_map(make, cfg, parallel.make_mesh(DEVICES)),
    "pmap": lambda make, cfg: parallel.step_by_pmap(make, cfg, DEVICES),
}


@pytest.fixture(scope="module")
def reference():
    """GRPO, its state after 3 updates on one device, and what the next update gives."""
    make, cfg = PROGRAMS["grpo"]
    program = make(cfg)
    step = jax.jit(program.step)
    state = program.init(jax.random.key(0), {k: jnp.float32(v) for k, v in program.hyper.items()})
    for _ in range(3):
        state, _ = step(state)
    return make, cfg, step, state, step(state)


@pytest.mark.parametrize("how", SHARDED)
def test_one_update_agrees(reference, how):
    assert len(jax.devices()) >= DEVICES
    make, cfg, _, state, (expected, metrics) = reference
    got, got_metrics = SHARDED[how](make, cfg)(jax.tree.map(jnp.copy, state))
    for a, b in zip(jax.tree.leaves(expected["params"]), jax.tree.leaves(got["params"]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for name, value in metrics.items():  # counts and rewards of the sampled episodes among them
        np.testing.assert_allclose(value, got_metrics[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_twenty_supervised_updates_agree():
    make, cfg = PROGRAMS["sft"]
    program = make(cfg)
    losses = []
    for step in (jax.jit(program.step), SHARDED["shard_map"](make, cfg)):
        state = program.init(jax.random.key(1), {k: jnp.float32(v) for k, v in program.hyper.items()})
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
