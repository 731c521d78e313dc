"""The transformer: what it may see, decoding against the forward pass, layouts, and its own numbers."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt.models import LoraConfig, ModelConfig, make_model, stack_layers, unstack_layers
from jaxpt.ops import dots

B, T, SIZE = 4, 12, 16
BASE = ModelConfig(vocab=11, d_model=16, n_heads=4, n_kv_heads=2, qk_norm=True)
VARIANTS = {
    "default": replace(BASE, n_kv_heads=None, qk_norm=False),
    "grouped, norms": BASE,
    "one kv head, untied": replace(BASE, n_kv_heads=1, tied=False),
    "scan": replace(BASE, scan=True),
}
RARE = {
    "latent": replace(BASE, n_kv_heads=None, qk_norm=False, latent=6),
    "window, soft-cap, parallel": replace(BASE, window=3, softcap=2.0, parallel=True),
}
EVERY = [*VARIANTS.items(), *(pytest.param(*x, marks=pytest.mark.slow) for x in RARE.items())]
seeds = st.integers(0, 2**31 - 1)


@cache
def build(cfg):
    """The model with compiled functions, and parameters whose norm scales are not all 1."""
    model = make_model(cfg)
    leaves, treedef = jax.tree.flatten(jax.jit(model.init)(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = treedef.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])
    return model._replace(forward=jax.jit(model.forward), extend=jax.jit(model.extend)), params


def draw_tokens(seed, shape=(B, T)):
    return jnp.array(np.random.default_rng(seed).integers(0, BASE.vocab, shape), jnp.int32)


@pytest.mark.parametrize("name, cfg", EVERY, ids=[*VARIANTS, *RARE])
@settings(max_examples=5)
@given(seed=seeds)
def test_extending_equals_forward(name, cfg, seed):
    """Prompts of unequal lengths in one padded prefill, then chunks of 2 and 1, rows at their own lengths."""
    model, params = build(cfg)
    rng = np.random.default_rng(seed)
    tokens, n = draw_tokens(seed), rng.integers(1, 6, B)
    expected, aux = model.forward(params, tokens)
    assert aux == {}
    rows = np.arange(B)[:, None]
    prompts = np.where(np.arange(5) < n[:, None], tokens[:, :5], rng.integers(0, BASE.vocab, (B, 5)))
    hidden, kv = model.extend(params, jnp.array(prompts), model.cache(B, SIZE), jnp.zeros(B, jnp.int32))
    for b in range(B):
        np.testing.assert_allclose(hidden[b, : n[b]], expected[b, : n[b]], atol=1e-5)
    at = n
    for k in (2, 1, 1, 2, 1):
        slots = at[:, None] + np.arange(k)
        hidden, kv = model.extend(params, tokens[rows, slots], kv, jnp.array(at, jnp.int32))
        np.testing.assert_allclose(hidden, expected[rows, slots], atol=1e-5)
        at = at + k


@pytest.mark.parametrize("cfg", [
    VARIANTS["default"], replace(BASE, lora=LoraConfig(rank=2), dots="bfloat16"),
    pytest.param(replace(BASE, lora=LoraConfig(rank=2, kind="dora", targets="all"), tied=False), marks=pytest.mark.slow),
    pytest.param(RARE["latent"], marks=pytest.mark.slow)])
def test_matrices_for_few_rows_are_the_same_ones(cfg, monkeypatch):
    monkeypatch.setattr(dots, "LARGE", 1)
    model, params = build(cfg)
    few = model.for_few_rows(params)
    down = few["layer_0"]["mlp"]["down"]
    assert (down if cfg.lora is None else down.w).w.shape == (cfg.d_model, cfg.ff)
    assert cfg.latent is None or few["layer_0"]["attn"]["widen"].shape[0] == cfg.latent
    ours, theirs = (model.extend(p, draw_tokens(0), model.cache(B, SIZE), jnp.zeros(B, jnp.int32)) for p in (params, few))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def test_slots_beyond_the_length_are_never_read():
    model, params = build(BASE)
    tokens, zero = draw_tokens(0), jnp.zeros(B, jnp.int32)
    n = jnp.array([1, 3, 5, 2])
    _, clean = model.extend(params, tokens[:, :5], model.cache(B, SIZE), zero)
    beyond = (jnp.arange(SIZE)[None] >= n[:, None])[:, None, :, None]
    dirty = jax.tree.map(lambda c: jnp.where(beyond, 1e30, c), clean)  # whatever a longer prompt left there
    for _ in range(3):
        hidden, clean = model.extend(params, tokens[:, :2], clean, n)
        bad, dirty = model.extend(params, tokens[:, :2], dirty, n)
        np.testing.assert_array_equal(bad, hidden)
        n = n + 2


def test_a_full_cache_is_not_overwritten():
    model, params = build(BASE)
    tokens, zero = draw_tokens(0), jnp.zeros(B, jnp.int32)
    _, full = model.extend(params, tokens, model.cache(B, T), zero)
    hidden, after = model.extend(params, tokens[:, :2], full, zero + T)
    jax.tree.map(np.testing.assert_array_equal, after, full)
    assert np.all(np.isfinite(hidden))


def test_causality_by_gradient():
    """d hidden[t] / d embedding of the token at s is exactly 0 for s > t and not 0 for s <= t."""
    model, params = build(VARIANTS["default"])
    tokens = jnp.arange(10)[None]  # each token once: the row of the embedding table is the position

    def at(t, embed):
        return model.forward(params | {"embed": embed}, tokens)[0][0, t].sum()

    size = jax.jit(jax.vmap(lambda t: jnp.abs(jax.grad(at, 1)(t, params["embed"])).sum(-1)))(jnp.arange(10))
    assert np.all(size[:, 10] == 0)  # the token that does not occur
    sees = np.tril(np.ones((10, 10), bool))
    assert np.all(size[:, :10][~sees] == 0)
    assert np.all(size[:, :10][sees] > 1e-4)


@given(seeds)
def test_packed_rows_equal_separate_rows(seed):
    model, params = build(BASE)
    cut = np.random.default_rng(seed).integers(1, T - 1)
    tokens = draw_tokens(seed)
    segments = np.where(np.arange(T) < cut, 0, 1)
    segments[-1] = -1  # padding at the end
    positions = np.where(np.arange(T) < cut, np.arange(T), np.arange(T) - cut)
    packed, _ = model.forward(params, tokens, positions=jnp.broadcast_to(positions, (B, T)),
                              segments=jnp.broadcast_to(segments, (B, T)))
    first, _ = model.forward(params, tokens)
    second, _ = model.forward(params, jnp.roll(tokens, -cut, axis=1))
    np.testing.assert_allclose(packed[:, :cut], first[:, :cut], atol=1e-5)
    np.testing.assert_allclose(packed[:, cut:-1], second[:, : T - 1 - cut], atol=1e-5)


@pytest.mark.parametrize("name, cfg", EVERY, ids=[*VARIANTS, *RARE])
def test_branches_equal_rows_of_their_own(name, cfg):
    """A trunk of 4 in room for 6, and two branches of 3 behind it, in one row."""
    model, params = build(cfg)
    tokens, trunk, each = draw_tokens(0), np.arange(6), np.arange(3)
    at = lambda left, *right: jnp.asarray(np.concatenate([left, *right])[None])  # noqa: E731
    hidden, _ = model.forward(
        params, tokens, positions=at(trunk, 4 + each, 4 + each), segments=at(np.where(trunk < 4, 0, -1), 0 * each, 0 * each),
        branches=at(0 * trunk, 0 * each + 1, 0 * each + 2),
    )
    for branch in (slice(6, 9), slice(9, 12)):
        alone, _ = model.forward(params, jnp.concatenate([tokens[:, :4], tokens[:, branch]], axis=1))
        np.testing.assert_allclose(hidden[:, :4], alone[:, :4], atol=1e-5)
        np.testing.assert_allclose(hidden[:, branch], alone[:, 4:], atol=1e-5)


@given(seeds)
def test_a_prefix_sees_itself_both_ways_and_nothing_after_it(seed):
    model, params = build(BASE)
    rng = np.random.default_rng(seed)
    tokens, prefix = draw_tokens(seed), rng.integers(3, T - 1, B)
    hidden, _ = model.forward(params, tokens, prefix=jnp.array(prefix))
    rows = np.arange(B)

    def changed(at):
        other, _ = model.forward(params, tokens.at[rows, at].set((tokens[rows, at] + 1) % BASE.vocab),
                                 prefix=jnp.array(prefix))
        return np.abs(other - hidden).max(-1) > 1e-6

    inside, outside = changed(prefix - 1), changed(prefix)
    assert np.all(inside[:, 0])  # the last token of the prefix is seen by the first
    assert not np.any(outside[np.arange(T) < prefix[:, None]])
    assert np.all(outside[rows, prefix])
    causal, _ = model.forward(params, tokens)
    alone, _ = model.forward(params, tokens, prefix=jnp.ones(B, jnp.int32))  # one token looks at itself
    np.testing.assert_allclose(alone, causal, atol=1e-5)


def test_scan_equals_unrolled_in_value_gradient_and_start():
    scan, stacked = build(replace(BASE, scan=True))
    plain, _ = build(BASE)
    params, tokens = unstack_layers(stacked), draw_tokens(0)
    np.testing.assert_allclose(scan.forward(stacked, tokens)[0], plain.forward(params, tokens)[0], atol=1e-5)

    def grad(model, p):
        return jax.jit(jax.grad(lambda p: (model.forward(p, tokens)[0] ** 3).mean()))(p)

    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)  # noqa: E731
    jax.tree.map(close, unstack_layers(grad(scan, stacked)), grad(plain, params))
    jax.tree.map(np.testing.assert_array_equal, stack_layers(params), stacked)
    start = [jax.jit(make_model(replace(BASE, scan=s)).init)(jax.random.key(0)) for s in (False, True)]
    jax.tree.map(np.testing.assert_array_equal, stack_layers(start[0]), start[1])
    many = {f"layer_{i}": {"w": jnp.full(1, i)} for i in range(11)}  # in order of number, not of name
    np.testing.assert_array_equal(stack_layers(many)["layers"]["w"][:, 0], np.arange(11))


@pytest.mark.slow
def test_rematerialised_layers_have_the_same_gradient():
    plain, params = build(BASE)
    again, tokens = make_model(replace(BASE, remat=True)), draw_tokens(0)

    def grad(model):
        return jax.jit(jax.grad(lambda p: (model.forward(p, tokens)[0] ** 3).mean()))(params)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grad(again), grad(plain))


def test_bfloat16_products_stay_close_and_leave_the_rest_float32():
    plain, params = build(BASE)
    rounded = make_model(replace(BASE, dots="bfloat16"))
    tokens = draw_tokens(0)

    def both(model):
        fn = lambda p: ((model.forward(p, tokens)[0] @ model.unembed(p)) ** 2).mean()  # noqa: E731
        return jax.jit(jax.value_and_grad(fn))(params)

    (a, grad_a), (b, grad_b) = both(plain), both(rounded)
    assert a != b and abs(a - b) < 0.02 * abs(a)
    for x, y in zip(jax.tree.leaves(grad_a), jax.tree.leaves(grad_b)):
        assert y.dtype == jnp.float32
        assert jnp.linalg.norm(x - y) < 0.05 * jnp.linalg.norm(x)


@pytest.mark.parametrize("name, cfg", EVERY, ids=[*VARIANTS, *RARE])
def test_params_are_plain_dicts_with_a_subtree_per_layer(name, cfg):
    def walk(tree):
        if isinstance(tree, jax.Array):
            return tree.dtype == jnp.float32
        return type(tree) is dict and all(map(walk, tree.values()))

    model, params = build(cfg)
    assert walk(params)
    layers = {"layers"} if cfg.scan else {"layer_0", "layer_1"}
    assert set(params) == {"embed", "final_norm"} | layers | (set() if cfg.tied else {"unembed"})
    assert model.unembed(params).shape == (cfg.d_model, cfg.vocab)
    each = [(3, cfg.kv_heads, 7, cfg.head_dim)] * 2 if cfg.latent is None else [(3, 1, 7, 6), (3, 1, 7, 2)]
    assert [c.shape for c in jax.tree.leaves(model.cache(3, 7))] == 2 * each


@pytest.mark.parametrize("d_model, n_layers", [(32, 3), (128, 1)])
def test_the_start_has_unit_logits_and_a_stream_that_depth_does_not_blow_up(d_model, n_layers):
    model = make_model(ModelConfig(vocab=64, d_model=d_model, n_layers=n_layers))
    params = jax.jit(model.init)(jax.random.key(0))
    hidden, _ = jax.jit(model.forward)(params, jnp.arange(64).reshape(4, 16))
    np.testing.assert_allclose(jnp.sqrt((hidden**2).mean()), 1, atol=0.01)
    assert 0.7 < (hidden @ model.unembed(params)).std() < 1.4
    for name, fan_in, scale in [("qkv", d_model, 1), ("out", d_model, (2 * n_layers) ** -0.5)]:
        np.testing.assert_allclose(params["layer_0"]["attn"][name].std(), scale * fan_in**-0.5, rtol=0.1)


def test_thoughts_replace_embeddings_where_they_are_seen():
    model, params = build(BASE)
    tokens, seen = draw_tokens(0), jnp.arange(T)[None] % 3 == jnp.arange(B)[:, None] % 3
    other = jnp.where(seen, (tokens + 1) % BASE.vocab, tokens)
    told, _ = jax.jit(model.forward)(params, other, latent=(params["embed"][tokens], seen))
    np.testing.assert_allclose(told, model.forward(params, tokens)[0], atol=1e-5)


@pytest.mark.parametrize("field, value, expected", [
    ("window", 0, "at least 1"), ("latent", 0, "at least 1"), ("softcap", 0.0, "positive"), ("loops", 0, "at least 1"),
    ("vocab", 0, "at least 1"), ("n_heads", 3, "divisor of d_model"), ("n_heads", 32, "even width"), ("n_heads", 0, "at least 1"), ("n_kv_heads", 3, "divisor of n_heads"), ("n_kv_heads", 0, "at least 1"),
    ("d_ff", 0, "at least 1"), ("rope_theta", 0.0, "positive"), ("dots", "float16", "'bfloat16'"),
])
def test_errors_name_field_value_and_expectation(field, value, expected):
    with pytest.raises(ValueError) as error:
        ModelConfig(**{"vocab": 8, "n_heads": 4, field: value})
    message = str(error.value)
    assert f"ModelConfig.{field} is {value!r}" in message and expected in message and message.count(".") <= 3


def test_hidden_width_follows_its_rule():
    assert [ModelConfig(8, d_model=d).ff for d in (32, 64, 128, 256)] == [88, 176, 344, 688]
