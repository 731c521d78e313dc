"""Counts of parameters and products against hand formulas and against the program itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt.models import LoraConfig, ModelConfig, MoeConfig, make_model
from jaxpt.models.counts import active_params, dot_flops, extend_flops, forward_flops, param_counts

M, N, K = 3, 5, 7
a, b = jax.ShapeDtypeStruct((M, K), jnp.float32), jax.ShapeDtypeStruct((K, N), jnp.float32)
ONE = 2 * M * N * K


@st.composite
def configs(draw):
    heads, groups = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1)]))
    return ModelConfig(
        vocab=draw(st.integers(2, 20)), d_model=heads * draw(st.sampled_from([2, 6])),
        n_heads=heads, n_kv_heads=groups, n_layers=draw(st.integers(1, 3)),
        d_ff=draw(st.sampled_from([None, 5])), tied=draw(st.booleans()),
        scan=draw(st.booleans()), qk_norm=draw(st.booleans()),
        dots=draw(st.sampled_from(["float32", "bfloat16"])), loops=draw(st.integers(1, 2)),
    )


@settings(max_examples=15)
@given(configs(), st.integers(1, 3), st.integers(1, 9))
def test_forward_flops_are_those_of_the_program(cfg, batch, seq):
    model = make_model(cfg)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    assert dot_flops(model.forward, params, tokens) == forward_flops(cfg, batch, seq)


@settings(max_examples=15)
@given(configs())
def test_param_counts_equal_the_hand_formula(cfg):
    D, L, V = cfg.d_model, cfg.n_layers, cfg.vocab
    attn = D * (cfg.n_heads + 2 * cfg.kv_heads) * cfg.head_dim + D * D + 2 * cfg.head_dim * cfg.qk_norm
    rest = L * (attn + 3 * D * cfg.ff + 2 * D) + D
    embedding = V * D * (1 if cfg.tied else 2)
    counted = param_counts(jax.eval_shape(make_model(cfg).init, jax.random.key(0)))
    assert counted == {"total": rest + embedding, "embedding": embedding, "non_embedding": rest}


FINE = {"latent_query": 3, "d_rope": 2, "d_value": 5, "d_head": 6, "moe": MoeConfig(experts=4, d_ff=6, shared=1, first=1)}


@pytest.mark.parametrize("more", [
    {}, {"lora": LoraConfig(rank=3, targets="attention")}, FINE, FINE | {"lora": LoraConfig(rank=3, kind="dora")},
])
def test_latent_attention_is_counted(more):
    cfg = ModelConfig(vocab=10, d_model=8, n_layers=2, n_heads=2, latent=5, **more)
    model = make_model(cfg)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens, one = (jax.ShapeDtypeStruct((3, n), jnp.int32) for n in (7, 1))
    assert dot_flops(model.forward, params, tokens) == forward_flops(cfg, 3, 7)
    cache, length = jax.eval_shape(lambda: model.cache(3, 9)), jax.ShapeDtypeStruct((3,), jnp.int32)
    assert dot_flops(model.extend, params, one, cache, length) == extend_flops(cfg, 3, 1, 9)


def test_experts_that_begin_later_are_counted_where_they_are():
    cfg = ModelConfig(vocab=10, d_model=8, n_layers=3, n_heads=2, latent=5, **FINE)
    params = jax.eval_shape(make_model(cfg).init, jax.random.key(0))
    parts = [set(params[f"layer_{i}"]) - {"attn", "attn_norm", "mlp_norm"} for i in range(3)]
    assert parts == [{"mlp"}, {"moe"}, {"moe"}]
    assert param_counts(params)["total"] - active_params(params, cfg) == 2 * (4 - 2) * 3 * 8 * 6


def test_hand_counted_model():
    cfg = ModelConfig(vocab=10, d_model=4, n_layers=1, n_heads=2, d_ff=3)
    # a token: qkv 4 x 12, out 4 x 4, gate and up 4 x 6, down 3 x 4; scores and values 5 slots x 4 each
    assert forward_flops(cfg, batch=2, seq=5) == 2 * 2 * 5 * (48 + 16 + 24 + 12 + 2 * 20)


def test_gradient_of_a_product_costs_two_more():
    both = jax.grad(lambda a, b: jnp.sum((a @ b) ** 2), (0, 1))
    assert dot_flops(both, a, b) == 3 * ONE


def loop(a, b):
    return jax.lax.while_loop(lambda c: c[1] < 4, lambda c: (c[0] + a @ b, c[1] + 1), (jnp.zeros((M, N)), 0))


@pytest.mark.parametrize("times, fn", [
    (1, jax.jit(jnp.matmul)),
    (1, jax.checkpoint(jnp.matmul)),
    (2, lambda a, b: jax.jit(jnp.matmul)(a, b) + jnp.einsum("mk,kn->mn", a, b)),
    (11, lambda a, b: jax.lax.scan(lambda c, _: (c + a @ b, None), jnp.zeros((M, N)), length=11)),
    (6, lambda a, b: jax.lax.map(lambda x: jax.lax.map(lambda y: x * y * (a @ b), jnp.ones(3)), jnp.ones(2))),
    (2, lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: (a @ b) * (a @ b))),
    (4, lambda a, b: jax.vmap(lambda s: (s * a) @ b)(jnp.ones(4))),
], ids=["jit", "checkpoint", "einsum", "scan", "nested", "cond", "vmap"])
def test_control_flow(times, fn):
    assert dot_flops(fn, a, b) == times * ONE


def test_custom_derivatives_are_entered():
    primal = lambda a, b: a @ b  # noqa: E731
    vjp = jax.custom_vjp(primal)
    vjp.defvjp(lambda a, b: (a @ b, (a, b)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
    jvp = jax.custom_jvp(primal)
    jvp.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))
    for fn in (vjp, jvp):
        assert dot_flops(fn, a, b) == ONE
        assert dot_flops(jax.grad(lambda a, b: jnp.sum(fn(a, b) ** 2), (0, 1)), a, b) == 3 * ONE


def test_while_needs_its_trips():
    assert dot_flops(loop, a, b, trips=4) == 4 * ONE
    with pytest.raises(ValueError, match="while_loop"):
        dot_flops(loop, a, b)


def test_shard_map_counts_every_device():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=auto, devices=jax.devices()[:4])
    rows, everywhere = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    spread = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows)
    many = jax.ShapeDtypeStruct((4 * M, K), jnp.float32)
    assert dot_flops(spread, many, b) == 4 * ONE


def test_xla_agrees_on_a_plain_product():
    big = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    x, y = big((64, 96)), big((96, 32))
    cost = jax.jit(jnp.matmul).lower(x, y).compile().cost_analysis()
    np.testing.assert_allclose(dot_flops(jnp.matmul, x, y), cost["flops"], rtol=0.01)
