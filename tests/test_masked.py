"""Masked arithmetic: whatever stands at a masked slot reaches neither value nor gradient."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.ops import masked

POISON = [np.nan, np.inf, -np.inf, 1e30, -1e30]
SHAPE = (4, 6)
seeds = st.integers(0, 2**31 - 1)

REDUCTIONS = {
    "sum": lambda x, m: masked.masked_sum(x, m),
    "sum_rows": lambda x, m: jnp.sum(masked.masked_sum(x, m, axis=1) ** 2),
    "mean": lambda x, m: masked.masked_mean(x, m),
    "mean_rows": lambda x, m: jnp.sum(masked.masked_mean(x, m, axis=1) ** 2),
    "exp": lambda x, m: jnp.sum(masked.bounded_exp(masked.keep(x, m)) * (m > 0)),
}
both = {name: jax.jit(jax.value_and_grad(fn)) for name, fn in REDUCTIONS.items()}


def draw(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < rng.choice([0.0, 0.3, 0.8, 1.0])
    mask[rng.integers(SHAPE[0])] &= rng.random() < 0.5  # an empty row, often
    return rng.normal(size=SHAPE).astype(np.float32), mask, rng


@pytest.mark.parametrize("name", REDUCTIONS)
@given(seed=seeds)
def test_poison(name, seed):
    x, mask, rng = draw(seed)
    value, grad = both[name](x, mask)
    poisoned = np.where(mask, x, rng.choice(POISON, SHAPE)).astype(np.float32)
    value_p, grad_p = both[name](poisoned, mask)
    assert np.isfinite(value) and np.isfinite(grad).all()
    np.testing.assert_array_equal(value, value_p)
    np.testing.assert_array_equal(grad, grad_p)
    assert (np.asarray(grad)[~mask] == 0).all()


@given(seed=seeds)
def test_against_a_float64_loop(seed):
    x, mask, _ = draw(seed)
    kept = [[float(v) for v, m in zip(row, row_mask, strict=True) if m] for row, row_mask in zip(x, mask, strict=True)]
    flat = [v for row in kept for v in row]
    np.testing.assert_allclose(masked.masked_sum(x, mask), sum(flat), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(masked.masked_mean(x, mask), sum(flat) / max(len(flat), 1), rtol=1e-5, atol=1e-5)
    rows = [sum(row) / max(len(row), 1) for row in kept]
    np.testing.assert_allclose(masked.masked_mean(jnp.asarray(x), jnp.asarray(mask), axis=1), rows, rtol=1e-5, atol=1e-5)


@given(x=st.floats(-1e4, 1e4, width=32))
def test_bounded_exp_is_exp_then_its_tangent(x):
    value, slope = jax.value_and_grad(masked.bounded_exp)(jnp.float32(x))
    expected = np.exp(x) if x <= 20 else np.exp(20.0) * (1 + x - 20)
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(slope, np.exp(min(x, 20.0)), rtol=2e-5, atol=1e-37)  # positive everywhere: no dead zone
    assert slope > 0 or x < -80


def test_safe_div_is_zero_at_zero_in_value_and_gradient():
    value, grads = jax.value_and_grad(masked.safe_div, argnums=(0, 1))(1.0, 0.0)
    assert value == 0 and grads == (0, 0)


@given(seed=seeds, n=st.integers(1, 8))
def test_groups_against_a_loop(seed, n):
    rng = np.random.default_rng(seed)
    B = 8
    x, group = rng.normal(size=B).astype(np.float32), rng.integers(0, n, B) * 7 - 3
    weight = rng.random(B) < 0.7
    x_poisoned = np.where(weight, x, np.nan).astype(np.float32)
    total = masked.group_sum(jnp.asarray(x_poisoned), jnp.asarray(group), jnp.asarray(weight))
    low, high = masked.group_extreme(jnp.asarray(x_poisoned), jnp.asarray(group), jnp.asarray(weight))
    for i in range(B):
        members = [float(x[j]) for j in range(B) if group[j] == group[i] and weight[j]]
        np.testing.assert_allclose(total[i], sum(members), rtol=1e-5, atol=1e-6)
        assert low[i] == min(members, default=np.inf) and high[i] == max(members, default=-np.inf)


@given(seed=seeds, number=st.sampled_from([0.0, 0.3, 1.0, 2.5, 3.0, 99.0]))
def test_largest_against_sorting(seed, number):
    """ceil(number) of the kept slots, with all that are equal to the last of them."""
    rng = np.random.default_rng(seed)
    x, mask = rng.choice([0.5, -1.0, 2.0, 3.5, np.inf], (3, 4)).astype(np.float32), rng.random((3, 4)) < 0.7
    ranked = np.sort(x[mask])[::-1][: int(np.ceil(number))]
    expected = mask & (x >= ranked[-1]) if len(ranked) else np.zeros_like(mask)
    np.testing.assert_array_equal(masked.largest(np.where(mask, x, np.nan), mask, number), expected)
