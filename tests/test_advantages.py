"""Advantages of groups: algebra, invariances, exact zeros, and one contract for groups of one and missing rewards."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives import advantages as adv

B = 8
BASELINED = {"centred": adv.centred, "leave_one_out": adv.leave_one_out, "standardised": adv.standardised}
jitted = {name: jax.jit(fn) for name, fn in BASELINED.items()}
VALUES = [0.0, 1.0, 0.1, 0.3, 0.95, -2.0, 1e-4, 7.0]


@st.composite
def batches(draw):
    """Rewards with ties, non-dyadic values and small scales; groups of 1 to 8 in any order."""
    rewards = np.array(draw(st.lists(st.sampled_from(VALUES), min_size=B, max_size=B)))
    rewards = rewards * draw(st.sampled_from([1.0, 1e-3, 100.0])) + draw(st.sampled_from([0.0, -3.0]))
    sizes = draw(st.sampled_from([(8,), (7, 1), (3, 3, 2), (1,) * 8, (2, 2, 2, 2), (4, 4)]))
    group = np.repeat(np.arange(len(sizes)) * 5 - 2, sizes)
    order = draw(st.permutations(range(B)))
    return rewards.astype(np.float32), group[list(order)].astype(np.int32)


def loop(name, rewards, group):
    out = np.zeros(B)
    for i in range(B):
        mine = [float(rewards[j]) for j in range(B) if group[j] == group[i]]
        rest = [float(rewards[j]) for j in range(B) if group[j] == group[i] and j != i]
        if len(mine) < 2 or max(mine) == min(mine):
            continue
        if name == "leave_one_out":
            out[i] = rewards[i] - np.mean(rest)
        else:
            out[i] = (rewards[i] - np.mean(mine)) / (np.std(mine, ddof=1) if name == "standardised" else 1)
    return out


@pytest.mark.parametrize("name", BASELINED)
@given(batch=batches())
def test_against_a_float64_loop(name, batch):
    rewards, group = batch
    scale = 1 if name == "standardised" else np.abs(rewards).max()
    np.testing.assert_allclose(jitted[name](rewards, group), loop(name, rewards, group), rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("name", BASELINED)
@given(batch=batches(), order=st.permutations(range(B)))
def test_permutation_and_relabelling(name, batch, order):
    rewards, group = batch
    order = np.array(order)
    whole = np.asarray(jitted[name](rewards, group))
    np.testing.assert_allclose(jitted[name](rewards[order], 3 - group[order]), whole[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("name", BASELINED)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 64])
def test_equal_rewards_are_exactly_zero(name, n, dtype):
    for value in (0.3, 0.1, 0.95, -7.3, 1e-4, 1e6):
        out = BASELINED[name](jnp.full(n, value).astype(dtype), jnp.zeros(n, jnp.int32))
        np.testing.assert_array_equal(out, 0.0)
        assert out.dtype == jnp.float32


def test_rewards_equal_up_to_rounding_have_no_signal():
    rewards = jnp.asarray([0.1 + 0.2, 0.3, 0.3], jnp.float32) * jnp.asarray([1, 1 + 1e-7, 1], jnp.float32)
    np.testing.assert_array_equal(adv.standardised(rewards, jnp.zeros(3, jnp.int32)), 0.0)


@given(batch=batches(), scale=st.sampled_from([0.125, 3.0, 1000.0]), shift=st.sampled_from([-1.0, 0.5, 10.0]))
def test_affine_laws(batch, scale, shift):
    rewards, group = batch
    rewards = np.round(rewards * 8) / 8  # exact under the maps below, so that ties stay ties
    moved = (rewards * scale + shift).astype(np.float32)
    for name in ("centred", "leave_one_out"):
        before = np.asarray(jitted[name](rewards, group))
        np.testing.assert_allclose(jitted[name](moved, group), scale * before, rtol=1e-4, atol=1e-3 * scale)
    std = np.asarray(jitted["standardised"](rewards, group))
    np.testing.assert_allclose(jitted["standardised"](moved, group), std, rtol=1e-3, atol=1e-3)


def test_the_leave_one_out_baseline_does_not_depend_on_its_own_reward():
    rewards, group = jnp.asarray([0.2, 1.0, -0.5, 0.7]), jnp.asarray([0, 0, 0, 1])
    jacobian = jax.jacobian(adv.leave_one_out)(rewards, group)
    np.testing.assert_allclose(np.diag(jacobian)[:3], 1.0, atol=1e-6)  # d(r_i - b_i)/dr_i = 1


@pytest.mark.parametrize("name", BASELINED)
@given(batch=batches(), missing=st.integers(0, B - 1))
def test_a_missing_reward_takes_no_part(name, batch, missing):
    rewards, group = batch
    holed = rewards.copy()
    holed[missing] = np.nan
    out = np.asarray(jitted[name](holed, group))
    assert out[missing] == 0 and np.isfinite(out).all()
    alone = group.copy()
    alone[missing] = 999  # the same as if the row were in no group
    expected = np.asarray(jitted[name](rewards, alone))
    np.testing.assert_allclose(np.delete(out, missing), np.delete(expected, missing), rtol=1e-6, atol=1e-6)


def test_monte_carlo_and_constant():
    rewards, group = jnp.asarray([1.0, jnp.nan, -2.0]), jnp.zeros(3, jnp.int32)
    np.testing.assert_array_equal(adv.monte_carlo(rewards, group), [1, 0, -2])
    np.testing.assert_array_equal(adv.constant(rewards, group), 1)


def test_std_eps_and_ddof_are_in_the_units_of_the_reward():
    rewards, group = jnp.asarray([0.0, 0.0, 0.0, 4.0]), jnp.zeros(4, jnp.int32)
    for ddof in (0, 1):
        for eps in (0.0, 0.5):
            expected = (np.asarray(rewards) - 1) / (np.std(rewards, ddof=ddof) + eps)
            np.testing.assert_allclose(adv.standardised(rewards, group, std_eps=eps, ddof=ddof), expected, rtol=1e-6)
