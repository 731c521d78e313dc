"""What an optimizer keeps: float32 masters of rounded weights, and nothing of what is frozen under adapters."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpt.models import LoraConfig, ModelConfig, MoeConfig, make_model
from jaxpt.models.lora import joined, moving
from jaxpt.objectives import get
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.learn import imitate
from jaxpt.train.optim import OptimConfig, apply_update, make_optimizer, start_optimizer
from jaxpt.train.parallel import ONE
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.pretrain import as_trajectory

ENV = EnvConfig("bandit", {"arms": 3})
MODEL = ModelConfig(vocab=ENV.make().spec.vocab, d_model=8, n_layers=1, n_heads=1)


def test_steps_below_a_rounding_add_up():
    """Each step is a tenth of the gap between two bfloat16 numbers near 1; after 25, the weights are where float32 is."""
    cfg = OptimConfig(weights="bfloat16", clip=1e9)
    params, state = start_optimizer(cfg, {"m": {"w": jnp.ones((2, 3)), "scale": jnp.ones(3)}})
    assert params["m"]["w"].dtype == jnp.bfloat16 and params["m"]["scale"].dtype == jnp.float32
    grads, rate = jax.tree.map(lambda x: -jnp.ones(x.shape), params), jnp.float32(2**-7 / 10)
    step = jax.jit(lambda p, s: apply_update(cfg, rate, grads, s, p)[:2])
    for _ in range(25):
        params, state = step(params, state)
    np.testing.assert_allclose(state["masters"]["m"]["w"], 1 + 2.5 * 2**-7, rtol=1e-5)  # Adam's step is the rate
    np.testing.assert_array_equal(params["m"]["w"], state["masters"]["m"]["w"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(params["m"]["scale"], state["masters"]["m"]["scale"])


def test_an_update_of_masters_is_the_float32_update_at_the_rounded_weights():
    """From gradients taken at the rounded weights, whose shares of 2 of 6 rows are summed in float32. With eps = 1 Adam's
    first step g / (|g| + eps) hardly magnifies what rounding has done to g."""
    model, row = make_model(MODEL), get("sft")
    start = jax.jit(model.init)(jax.random.key(3))
    traj = as_trajectory(jax.random.randint(jax.random.key(1), (6, 5), 0, MODEL.vocab))

    def update(micro, weights, params):
        cfg = SimpleNamespace(model=MODEL, optim=OptimConfig(eps=1.0, weights=weights, clip=1e9), micro=micro)

        def run(params):
            params, opt = start_optimizer(cfg.optim, params)
            state = {"params": params, "opt": opt, "hyper": {"learning_rate": jnp.float32(1)}}
            return imitate(cfg, model, row, ONE, state, traj)

        state, loss, norm, _ = jax.jit(run)(params)
        return state, loss, norm

    begun = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), start)
    (float32, loss, norm), (mixed, mixed_loss, mixed_norm) = update(0, "float32", begun), update(2, "bfloat16", start)
    np.testing.assert_allclose(loss, mixed_loss, atol=1e-6)
    np.testing.assert_allclose(norm, mixed_norm, rtol=0.02)  # shares' gradients are rounded, not their sum
    masters = mixed["opt"]["masters"]
    for before, after, first, last in zip(*map(jax.tree.leaves, (begun, float32["params"], start, masters)), strict=True):
        largest = jnp.abs(after - before).max()
        assert largest > 1e-3
        np.testing.assert_allclose(last - first, after - before, atol=0.01 * float(largest))  # 3 shares, 2^-9 each


@pytest.mark.parametrize("more", [{}, {"moe": MoeConfig(experts=2, bias=True, top_k=1, normalise=False)}])
def test_nothing_is_kept_of_a_frozen_base(more):
    model = make_model(ModelConfig(vocab=8, d_model=8, n_heads=2, lora=LoraConfig(rank=2), **more))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(model.init, jax.random.key(0)))
    part = moving({"params": params, "critic": {"head": jnp.zeros(3)}})
    assert set(part["critic"]) == {"head"} and "alpha" not in part["params"]
    kept = jax.tree.leaves(part["params"].get("base", {}))
    assert len(kept) == (2 if more else 0) and all(x.shape == (2,) for x in kept)  # routers' biases, of each layer
    changed = joined(params, jax.tree.map(lambda x: x + 1, part["params"]))
    assert jax.tree.structure(changed) == jax.tree.structure(params)
    np.testing.assert_array_equal(changed["base"]["embed"], params["base"]["embed"])
    a, before = (x["lora"]["layer_0"]["attn"]["qkv"]["a"] for x in (changed, params))
    np.testing.assert_array_equal(a, before + 1)
    dense = params["base"]
    assert jax.tree.structure(moving(dense)) == jax.tree.structure(dense)


def test_a_policy_with_adapters_trains_as_if_everything_were_kept():
    """The reference, the sampler and the moments are of adapters alone; the update is that of an optimizer over all."""
    cfg = PolicyConfig(
        env=ENV, model=ModelConfig(**{**vars(MODEL), "lora": LoraConfig(rank=2)}), objectives=("grpo",), prompts=8, group=4,
        optim=OptimConfig(0.1, eps=1e-3), refresh=2, eval=EvalConfig(1, 2),
    )
    program = make_policy(cfg)
    state = jax.jit(program.init)(jax.random.key(0), {k: jnp.float32(v) for k, v in program.hyper.items()})
    adapters = jax.tree.structure({"lora": state["params"]["lora"]})
    assert jax.tree.structure(state["reference"]) == jax.tree.structure(state["sampler"]) == adapters
    moments = optax.tree.get(state["opt"], "mu")
    assert jax.tree.structure(moments) == adapters
    step = jax.jit(program.step)
    before = state["params"]
    for _ in range(3):
        state, metrics = step(state)
    jax.tree.map(np.testing.assert_array_equal, state["params"]["base"], before["base"])
    assert metrics["sampled_drift"] != 0  # the policy has left its reference, which was joined to the same base
    change = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), state["params"]["lora"], before["lora"])
    assert max(jax.tree.leaves(change)) > 0.01


def test_bad_weights_are_named():
    with pytest.raises(ValueError, match="weights: got 'int8', expected one of float32, bfloat16"):
        OptimConfig(weights="int8")
    assert make_optimizer(OptimConfig()).init({"m": {"w": jnp.ones(2)}})
