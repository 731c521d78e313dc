"""Generalized advantage estimation, whitening over a batch, and the critic's loss."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives.value import clipped_value_loss, gae, n_step, v_trace, whiten

B, T = 6, 7
seeds = st.integers(0, 2**31 - 1)


def draw(seed):
    """A mask with holes and an empty row, and numbers that are NaN off it."""
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0.3, 0.8, 1.0])
    mask[rng.integers(B)] = False
    return mask, np.where(mask, rng.normal(size=(B, T)), np.nan).astype(np.float32), rng


estimate = jax.jit(gae)


@given(seed=seeds, gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]), lam=st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_laws(seed, gamma, lam):
    mask, values, rng = draw(seed)
    rewards = np.where(mask, rng.normal(size=(B, T)), np.nan).astype(np.float32)
    final = rng.normal(size=B).astype(np.float32)
    got = np.asarray(estimate(rewards, values, mask, gamma, lam, final))
    assert (got[~mask] == 0).all()
    for i in range(B):
        ts = np.flatnonzero(mask[i])
        r, v = rewards[i, ts].astype(float), np.append(values[i, ts].astype(float), final[i])
        delta = r + gamma * v[1:] - v[:-1]
        want = np.zeros(len(ts))
        for k in range(len(ts)):
            want[k] = sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(ts)))
            if lam == 1:  # return minus value
                rest = sum(gamma ** (j - k) * r[j] for j in range(k, len(ts))) + gamma ** (len(ts) - k) * v[-1]
                np.testing.assert_allclose(got[i, ts[k]], rest - v[k], rtol=1e-4, atol=1e-5)
            if lam == 0:  # one-step temporal difference
                np.testing.assert_allclose(got[i, ts[k]], delta[k], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[i, ts], want, rtol=1e-4, atol=1e-5)


def test_gae_takes_any_number_type():
    with jax.enable_x64(True):
        args = jnp.ones((2, 3)), jnp.ones((2, 3), jnp.float32), jnp.ones((2, 3), bool)
        assert jax.eval_shape(gae, *args, 0.9, 0.9).dtype == jnp.float64
    whole = estimate(jnp.ones((2, 3), jnp.int32), jnp.full((2, 3), 0.5, jnp.bfloat16), jnp.ones((2, 3), bool), 1.0, 1.0)
    np.testing.assert_array_equal(whole[0], [2.5, 1.5, 0.5])


@jax.jit
def on_steps(rewards, values, log_ratio, mask, gamma, lam, n, final, bars):
    """Every function of single decisions, in one program; the last ones on-policy."""
    trace = lambda log_ratio: v_trace(  # noqa: E731
        rewards, values, log_ratio, mask, gamma, final, rho_bar=bars[0], c_bar=bars[1], lam=lam
    )
    return {
        "n_step": n_step(rewards, values, mask, gamma, n, final), "v_trace": trace(log_ratio),
        "on_policy": trace(jnp.where(mask, 0.0, log_ratio)), "gae": gae(rewards, values, mask, gamma, lam, final),
        "gae_1": gae(rewards, values, mask, gamma, 1.0, final),
        "returns": gae(rewards, jnp.zeros_like(values), mask, gamma, 1.0, final),
    }


def v_trace_loop(r, v, ratio, gamma, lam, bars):
    """Targets by the sum of eq. 1, not by recursion; v has the value behind the last step as its last entry."""
    steps = range(len(r))
    delta = [min(bars[0], ratio[t]) * (r[t] + gamma * v[t + 1] - v[t]) for t in steps]
    c = [lam * min(bars[1], x) for x in ratio]
    target = [
        v[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, len(r))) for s in steps
    ] + [v[-1]]
    return target[:-1], [min(bars[0], ratio[s]) * (r[s] + gamma * target[s + 1] - v[s]) for s in steps]


@given(
    seed=seeds, gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]), lam=st.sampled_from([0.9, 1.0]),
    n=st.sampled_from([1, 2, 3, T]), bars=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (1e9, 1e9)]),
)
def test_n_step_returns_and_v_trace(seed, gamma, lam, n, bars):
    mask, values, rng = draw(seed)
    rewards = np.where(mask, rng.normal(size=(B, T)), np.nan).astype(np.float32)
    log_ratio = np.where(mask, rng.normal(0, 0.7, (B, T)), np.nan).astype(np.float32)
    final = rng.normal(size=B).astype(np.float32)
    args = rewards, values, log_ratio, mask, gamma, lam, n, final, bars
    got = jax.device_get(on_steps(*args))
    order = np.argsort(~mask, axis=1, kind="stable")  # masked tokens moved behind the others
    packed = jax.device_get(on_steps(*(np.take_along_axis(x, order, 1) if np.shape(x) == (B, T) else x for x in args)))
    moved = jax.tree.map(lambda x: np.take_along_axis(x, order, 1), got)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), packed, moved)
    assert all((x[~mask] == 0).all() for x in jax.tree.leaves(got))
    assert_close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-5)  # noqa: E731
    for i in range(B):
        ts = np.flatnonzero(mask[i])
        r, v = rewards[i, ts].astype(float), np.append(values[i, ts].astype(float), final[i])
        for k, t in enumerate(ts):
            end = min(k + n, len(ts))
            ahead = sum(gamma ** (j - k) * r[j] for j in range(k, end)) + gamma ** (end - k) * v[end]
            assert_close(got["n_step"][i, t], ahead - v[k])
            rest = sum(gamma ** (j - k) * r[j] for j in range(k, len(ts))) + gamma ** (len(ts) - k) * final[i]
            assert_close(got["returns"][i, t], rest)
        targets, advantages = v_trace_loop(r, v, np.exp(log_ratio[i, ts].astype(float)), gamma, lam, bars)
        assert_close(got["v_trace"][0][i, ts], targets)
        assert_close(got["v_trace"][1][i, ts], advantages)
    if min(bars) >= 1:  # on-policy: V + GAE(lam); with lam = 1 the advantage is that of n = infinity
        clean = np.where(mask, values, 0)
        assert_close(got["on_policy"][0], np.where(mask, clean + got["gae"], 0))
        if lam == 1:
            assert_close(got["on_policy"][1], got["gae_1"])
    if n == T:
        assert_close(got["n_step"], got["gae_1"])


def test_v_trace_takes_any_log_ratio():
    mask, values, _ = draw(3)
    for size in (1e4, -1e4):
        out = v_trace(jnp.ones((B, T)), values, jnp.full((B, T), size), mask, 0.9)
        assert all(np.isfinite(x).all() for x in out)


bleach = jax.jit(whiten)


@given(seed=seeds, scale=st.sampled_from([1e-3, 1.0, 1e4]), shift=st.sampled_from([0.0, -3.0, 100.0]))
def test_whitening(seed, scale, shift):
    mask, x, _ = draw(seed)
    white = np.asarray(bleach(x, mask), np.float64)
    assert (white[~mask] == 0).all()
    if mask.sum() > 1:
        assert abs(white[mask].mean()) < 1e-6 and abs(white[mask].var() - 1) < 1e-5
        moved = np.asarray(bleach((x * scale + scale * shift).astype(np.float32), mask))
        np.testing.assert_allclose(moved, white, atol=1e-3)
    np.testing.assert_array_equal(bleach(np.where(mask, np.float32(0.1 * scale + shift), np.nan), mask), 0)


@pytest.mark.parametrize("n", [1, 2, 125, 1000, 12_500])
def test_whitening_equal_numbers_is_zero(n):
    """The mean of a thousand equal floats is not that float; its error must not be taken for a spread."""
    for value in (-7.3, 0.3, 1e6 + 0.1):
        np.testing.assert_array_equal(bleach(jnp.full((n, 8), value, jnp.float32), jnp.ones((n, 8), bool)), 0)


def test_whitening_numbers_that_differ_by_rounding_is_zero():
    x = jnp.asarray([[0.1 + 0.2, 0.3, 0.3]], jnp.float32) * jnp.asarray([[1, 1 + 1e-7, 1 - 1e-7]], jnp.float32)
    assert x.max() > x.min()
    np.testing.assert_array_equal(bleach(x, jnp.ones((1, 3), bool)), 0)


def test_clipped_value_loss():
    """PPO2's max of the two squares, 1/2 of it, over trainable tokens; the gradient is that of the larger one."""
    values = jnp.asarray([[0.0, 1.0, 1.0, jnp.nan], [0.1, -2.0, 0.5, jnp.inf]])
    old = jnp.asarray([[0.0, 0.0, 0.0, jnp.nan], [0.0, 0.0, 0.5, 3.0]])
    returns = jnp.asarray([[1.0, 2.0, 0.0, 0.0], [0.0, 1.0, 0.5, jnp.nan]])
    mask = jnp.asarray([[1, 1, 1, 0], [1, 1, 1, 0]])
    totals = {"tokens": jnp.float32(12), "rows": jnp.float32(2)}

    def loss(values, old, returns):
        return clipped_value_loss(values, old, returns, mask, totals=totals, value_clip=0.2)

    (value, metrics), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(values, old, returns)
    larger = [1.0, max(1.0, 1.8**2), max(1.0, 0.04), 0.01, max(9.0, 1.2**2), 0.0]
    np.testing.assert_allclose(value, 0.5 * sum(larger) / 12, rtol=1e-6)
    np.testing.assert_allclose(grads[0], np.array([[-1, 0, 1, 0], [0.1, -3, 0, 0]]) / 12, rtol=1e-6)
    assert not grads[1].any() and not grads[2].any()
    np.testing.assert_allclose(metrics["value_error"][0], 1 + 1 + 1 + 0.01 + 9, rtol=1e-6)
    assert metrics["value_error"][1] == 6 and metrics["value_clip_fraction"] == (1, 6)
