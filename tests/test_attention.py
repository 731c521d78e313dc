"""Attention against a float64 loop, and the laws that masks and rotary positions must obey."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.ops.attention import attention, attention_value, cache_mask, causal_mask, frequencies, rope
from jaxpt.ops.dots import dot

B, T, S, H, G, K = 2, 5, 7, 4, 2, 6
SLOW = frequencies(1e4, K)
seeds = st.integers(0, 2**31 - 1)


def draw(seed, allowed=0.5):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-2, 2)  # flat to one-hot attention
    q = scale * rng.normal(size=(B, T, H, K))
    k, v = rng.normal(size=(2, B, S, G, K))
    return *(x.astype(np.float32) for x in (q, k, v)), rng.random((B, T, S)) < allowed


def by_loop(q, k, v, mask):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(B, T, H):
        slots = np.flatnonzero(mask[b, t])
        if len(slots):
            scores = k[b, slots, h // (H // G)] @ q[b, t, h] / np.sqrt(K)
            weights = np.exp(scores - scores.max())
            out[b, t, h] = weights @ v[b, slots, h // (H // G)] / weights.sum()
    return out


attend, read = jax.jit(attention), jax.jit(attention_value)
gradients = jax.jit(jax.grad(lambda q, k, v, mask, c: jnp.sum(c * attention(q, k, v, mask)), (0, 1, 2)))
cotangent = np.random.default_rng(0).normal(size=(B, T, H, K)).astype(np.float32)


@given(seeds, st.sampled_from([0.1, 0.5, 1.0]))
def test_equals_a_float64_loop(seed, allowed):
    q, k, v, mask = draw(seed, allowed)
    scale = 1 + np.abs(q).max()  # an error of a score is an error of a weight, times the score's size
    np.testing.assert_allclose(attend(q, k, v, mask), by_loop(q, k, v, mask), atol=2e-6 * scale)


@given(seeds)
def test_gradient_equals_finite_differences_of_the_loop(seed):
    q, k, v, mask = draw(seed)
    q = q / (1 + np.abs(q).max())
    direction = [np.random.default_rng(seed + 1).normal(size=x.shape) for x in (q, k, v)]
    along = lambda e: np.sum(  # noqa: E731
        cotangent * by_loop(*(x.astype(np.float64) + e * d for x, d in zip((q, k, v), direction)), mask))
    numeric = (along(1e-5) - along(-1e-5)) / 2e-5
    exact = sum(np.sum(g * d) for g, d in zip(gradients(q, k, v, mask, cotangent), direction))
    np.testing.assert_allclose(exact, numeric, atol=2e-4 * (1 + abs(numeric)))


def test_a_query_that_sees_nothing_gives_zero_and_passes_none():
    q, k, v, mask = draw(0, 1.0)
    mask[0, 1] = False
    assert np.all(attend(q, k, v, mask)[0, 1] == 0)
    assert np.all(gradients(q, k, v, mask, cotangent)[0][0, 1] == 0)
    for g in gradients(q, k, v, np.zeros_like(mask), cotangent):
        assert np.all(g == 0)


@given(seeds, st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_poison_reaches_neither_value_nor_gradient(seed, poison):
    q, k, v, mask = draw(seed)
    mask[:, :, 3] = False
    mask[:, 2] = False
    bad_q, bad_k, bad_v = q.copy(), k.copy(), v.copy()
    bad_q[:, 2], bad_k[:, 3], bad_v[:, 3] = poison, poison, poison
    np.testing.assert_array_equal(attend(bad_q, bad_k, bad_v, mask), attend(q, k, v, mask))
    cached = (np.swapaxes(x, 1, 2) for x in (bad_k, v))  # a cache is finite; an unseen key may be anything at all
    np.testing.assert_array_equal(read(bad_q, *cached, mask), attend(q, k, v, mask))
    clean = gradients(q, k, v, mask, cotangent)
    for bad, good in zip(gradients(bad_q, bad_k, bad_v, mask, cotangent), clean):
        assert np.all(np.isfinite(bad))
        np.testing.assert_array_equal(bad, good)
    assert np.all(clean[1][:, 3] == 0) and np.all(clean[2][:, 3] == 0)


@given(seeds)
def test_grouped_queries_equal_repeated_heads(seed):
    q, k, v, mask = draw(seed)
    repeated = attend(q, np.repeat(k, H // G, 2), np.repeat(v, H // G, 2), mask)
    np.testing.assert_allclose(attend(q, k, v, mask), repeated, atol=2e-6 * (1 + np.abs(q).max()))


@given(seeds, st.integers(-500, 500))
def test_rotated_scores_depend_on_differences_only(seed, shift):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, T, H, K)).astype(np.float32)
    at = rng.integers(500, 1000, size=(B, T))
    score = jax.jit(lambda p: jnp.einsum("bthk,bshk->bhts", rope(q, p, SLOW), rope(k, p, SLOW)))
    np.testing.assert_allclose(score(at), score(at + shift), atol=5e-3)  # float32 angles near 1000 radians
    norms = [np.linalg.norm(x, axis=-1) for x in (q, rope(q, at, SLOW))]
    np.testing.assert_allclose(*norms, rtol=1e-5)
    np.testing.assert_array_equal(rope(q, np.zeros((B, T), int), SLOW), q)
    moved = rope(k, at + 1, SLOW)
    assert np.abs(jnp.einsum("bthk,bshk->bhts", rope(q, at, SLOW), moved) - score(at)).max() > 1e-2


def test_rope_turns_pairs_as_complex_numbers():
    x = np.random.default_rng(0).normal(size=(B, T, H, K)).astype(np.float32)
    positions = np.random.default_rng(1).integers(0, 50, size=(B, T))
    turn = np.exp(1j * positions[..., None, None] * 100.0 ** (-2 * np.arange(K // 2) / K))
    z = (x[..., : K // 2] + 1j * x[..., K // 2 :]) * turn
    np.testing.assert_allclose(rope(x, positions, frequencies(100.0, K)), np.concatenate([z.real, z.imag], -1), atol=1e-5)


@given(seeds)
def test_masks_equal_their_definition(seed):
    rng = np.random.default_rng(seed)
    segments, prefix = rng.integers(-1, 3, size=(B, T)), rng.integers(0, T + 1, size=B)
    positions = rng.integers(0, S, size=(B, T))
    both = causal_mask(T, segments=jnp.array(segments), prefix=jnp.array(prefix))
    assert causal_mask(T).shape == (1, T, T)
    for b, t, s in np.ndindex(B, T, T):
        plain, ahead = s <= t, s < prefix[b] and t < prefix[b]
        same = segments[b, t] == segments[b, s] >= 0
        assert causal_mask(T)[0, t, s] == plain
        assert both[b, t, s] == ((plain or ahead) and same)
    branches, at = rng.integers(0, 3, size=(B, T)), np.sort(positions)
    own = causal_mask(T, branches=jnp.array(branches), window=2, positions=jnp.array(at))
    for b, t, s in np.ndindex(B, T, T):
        assert own[b, t, s] == (s <= t and at[b, t] - at[b, s] < 2 and branches[b, s] in (0, branches[b, t]))
    slots = cache_mask(jnp.array(positions), S)
    np.testing.assert_array_equal(slots, np.arange(S) <= positions[..., None])


@pytest.mark.parametrize("spec", ["btd,df->btf", "btgrk,bsgk->bgrts", "bgrts,bsgk->bgrtk"])
def test_rounded_product_and_its_backward_products(spec):
    left, right = spec.split("->")[0].split(",")
    rng = np.random.default_rng(0)
    a, b = (jnp.array(rng.normal(size=[2 + ord(c) % 5 for c in term]), jnp.float32) for term in (left, right))
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (a, b)]
    y, pull = jax.vjp(lambda a, b: dot(spec, a, b, "bfloat16"), a, b)
    exact, pull_exact = jax.vjp(lambda a, b: dot(spec, a, b), *rounded)
    g = jnp.array(rng.normal(size=y.shape), jnp.bfloat16).astype(jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, atol=1e-5)
    for one, other in zip(pull(g), pull_exact(g)):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_window_is_the_last_tokens_in_a_row_and_in_a_cache(window):
    T = 7
    mask = np.asarray(causal_mask(T, window=window)[0])
    np.testing.assert_array_equal(mask, [[0 <= t - s < window for s in range(T)] for t in range(T)])
    cached = np.asarray(cache_mask(jnp.array([[2, 5]]), T, window)[0])
    np.testing.assert_array_equal(cached, mask[[2, 5]])


def test_a_soft_cap_bounds_scores():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4)) * 3
    mask = causal_mask(5)
    scores = np.einsum("bthk,bshk->bhts", q, k) / 2
    weights = np.where(np.asarray(mask)[:, None], np.exp(1.5 * np.tanh(scores / 1.5)), 0)
    expected = np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(attention(q, k, v, mask, softcap=1.5), expected, atol=1e-5)
    np.testing.assert_allclose(attention(q, k, v, mask, softcap=1e4), attention(q, k, v, mask), atol=1e-4)
