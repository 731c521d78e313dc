"""Advantages of groups, every entry of the table: loops from the papers, invariances, exact zeros, and one contract for
groups of one and missing rewards."""

from math import comb, sqrt

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from advantage_loops import ALONE, COMPARING, advantage
from hypothesis import given

from jaxpt.objectives import advantages as adv
from jaxpt.objectives.parts import ADVANTAGES
from jaxpt.ops.masked import group_extreme, group_sum, sorted_groups

B = 8
CONSTANTS = {
    "standardised": {"std_eps": 0.0, "ddof": 1.0}, "standardised_parts": {"std_eps": 0.0, "ddof": 1.0},
    "pass_at_k": {"k": 3.0}, "best_of_k": {"k": 3.0}, "exponential": {"temperature": 0.7, "weight_max": 20.0},
}
VALUES = [0.0, 1.0, 0.1, 0.3, 0.95, -2.0, 1e-4, 7.0]
PAIRWISE = ("pass_at_k", "best_of_k")  # take labels, not keys


def made(name, rewards, group, extra):
    part = ADVANTAGES[name]
    return part.fn(rewards, group, **{k: extra[k] for k in part.reads}, **CONSTANTS.get(name, {}))


@jax.jit
def battery(rewards, group, extra):
    return {name: made(name, rewards, group, extra) for name in ADVANTAGES}


@jax.jit
def by_keys(rewards, keys, extra):
    return {name: made(name, rewards, keys, extra) for name in ADVANTAGES if name not in PAIRWISE}


def run(rewards, group, extra):
    return jax.device_get(battery(rewards, group, extra))


@st.composite
def batches(draw):
    """Rewards with ties, non-dyadic values and small scales; groups of 1 to 8 in any order."""
    rewards = np.array(draw(st.lists(st.sampled_from(VALUES), min_size=B, max_size=B)))
    rewards = rewards * draw(st.sampled_from([1.0, 1e-3, 100.0])) + draw(st.sampled_from([0.0, -3.0]))
    sizes = draw(st.sampled_from([(8,), (7, 1), (3, 3, 2), (1,) * 8, (2, 2, 2, 2), (4, 4)]))
    group = np.repeat(np.arange(len(sizes)) * 5 - 2, sizes)
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    extra = {
        "length": rng.integers(1, 9, B).astype(np.float32), "baseline": rng.choice([0.0, 1.0, 0.3], B).astype(np.float32),
        "parts": rng.choice([0.0, 1.0, 0.3], (B, 2)).astype(np.float32),
    }
    return rewards.astype(np.float32), rng.permutation(group).astype(np.int32), extra


def loop(name, rewards, group, extra):
    members = [{"r": float(rewards[i]), **{k: np.float64(x[i]) for k, x in extra.items()}} for i in range(B)]
    out = np.zeros(B)
    for i in range(B):
        rest = [members[j] for j in range(B) if group[j] == group[i] and j != i]
        out[i] = advantage(name, members[i], rest, **CONSTANTS.get(name, {}))
    return out


def test_every_advantage_has_a_loop_and_a_law():
    assert set(ADVANTAGES) == {*ALONE, *COMPARING} == set(LAWS)


@given(batch=batches())
def test_against_float64_loops(batch):
    rewards, group, extra = batch
    for name, got in run(*batch).items():
        unsafe = np.zeros(B, bool)
        if name == "over_mean":  # a mean that cancels has few digits
            mean = np.array([rewards[group == g].mean() for g in group])
            unsafe = (mean > 0) & (mean < 0.01 * np.abs(rewards).max())
        scale = np.abs(rewards).max() if LAWS[name][1] else 1
        want = loop(name, rewards, group, extra)
        np.testing.assert_allclose(got[~unsafe], want[~unsafe], rtol=2e-3, atol=1e-5 * scale, err_msg=name)


@given(batch=batches(), order=st.permutations(range(B)))
def test_permutation_and_relabelling(batch, order):
    rewards, group, extra = batch
    order = np.array(order)
    whole = run(*batch)
    moved = run(rewards[order], 3 - group[order], {k: x[order] for k, x in extra.items()})
    for name in ADVANTAGES:
        np.testing.assert_allclose(moved[name], whole[name][order], rtol=1e-4, atol=1e-5, err_msg=name)


@given(batch=batches(), seed=st.integers(0, 100))
def test_keys_that_are_sorted_make_the_same_groups_as_labels(batch, seed):
    rewards, group, extra = batch
    state = np.random.default_rng(seed).integers(0, 2, B).astype(np.int32)
    for keys, label in (((group,), group), ((group, state), group * 2 + state)):
        whole = run(rewards, label.astype(np.int32), extra)
        for name, got in jax.device_get(by_keys(rewards, keys, extra)).items():
            np.testing.assert_allclose(got, whole[name], rtol=1e-4, atol=1e-5, err_msg=name)


@jax.jit
def both_ways(x, group, mask):
    sum_of, extreme_of = sorted_groups((group,))
    return (sum_of(x, mask), *extreme_of(x, mask)), (group_sum(x, group, mask), *group_extreme(x, group, mask))


@given(batch=batches(), seed=st.integers(0, 100))
def test_sums_and_extremes_of_sorted_groups(batch, seed):
    rewards, group, _ = batch
    mask = np.random.default_rng(seed).random(B) < 0.7
    for got, want in zip(*both_ways(np.where(mask, rewards, np.nan).astype(np.float32), group, mask), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_equal_rewards_are_exactly_zero(dtype):
    """Groups of every size in one batch of fixed shape: the first n rows are a group, the others alone."""
    for n in (1, 2, 3, 7, 8, 64):
        group = jnp.where(jnp.arange(N) < n, 0, jnp.arange(N))
        for value in (0.3, 0.1, 0.95, -7.3, 1e-4, 1e6):
            rewards = jnp.full(N, value).astype(dtype)
            extra = {"length": jnp.arange(N) % 7 + 1.0, "baseline": rewards, "parts": jnp.stack([rewards, -rewards], axis=1)}
            for name, got in run(rewards, group, extra).items():
                assert got.dtype == np.float32, name
                if name in COMPARING or name == "above_baseline":
                    np.testing.assert_array_equal(got, 0.0, err_msg=f"{name} {n} {value}")
                elif name == "exponential":
                    np.testing.assert_array_equal(got, 1.0)


def test_rewards_equal_up_to_rounding_have_no_signal():
    rewards = np.full(B, 0.3, np.float32)
    rewards[:3] = [0.1 + 0.2, 0.3 * (1 + 1e-7), 0.3]
    assert len(set(rewards.tolist())) > 1
    extra = {"length": np.ones(B, np.float32), "baseline": rewards, "parts": np.stack([rewards] * 2, axis=1)}
    got = run(rewards, np.zeros(B, np.int32), extra)
    for name in COMPARING:
        np.testing.assert_array_equal(got[name], 0.0, err_msg=name)


LAWS = {  # name -> what a shift of all rewards does (0: nothing; None: not invariant), power of a scale in front
    "constant": (0, 0), "monte_carlo": (None, 1), "above_baseline": (None, 1), "centred": (0, 1), "leave_one_out": (0, 1),
    "standardised": (0, 0), "standardised_parts": (0, 0), "less_length_weighted": (0, 1), "over_mean": (None, 0),
    "pass_at_k": (None, 0), "best_of_k": (0, 1), "exponential": (0, None),
}


@given(batch=batches(), scale=st.sampled_from([0.125, 4.0, 1024.0]), shift=st.sampled_from([-1.0, 0.5, 10.0]))
def test_affine_laws(batch, scale, shift):
    rewards, group, extra = batch
    rewards = np.round(rewards * 8) / 8  # exact under the maps below, so that ties stay ties
    before = run(rewards, group, extra)
    shifted, scaled = (
        run(f(rewards), group, extra | {"parts": f(extra["parts"]), "baseline": f(extra["baseline"])})
        for f in (lambda x: (x + shift).astype(np.float32), lambda x: (x * scale).astype(np.float32))
    )
    size = 1 + np.abs(rewards).max()
    for name, (by_shift, power) in LAWS.items():
        if by_shift == 0:
            np.testing.assert_allclose(shifted[name], before[name], rtol=1e-3, atol=1e-4 * size, err_msg=name)
        if power is not None:
            want = scale**power * before[name]
            np.testing.assert_allclose(scaled[name], want, rtol=1e-3, atol=1e-4 * scale**power * size, err_msg=name)


def test_a_baseline_of_others_does_not_depend_on_its_own_reward():
    rewards, group = jnp.asarray([0.2, 1.0, -0.5, 0.7]), jnp.asarray([0, 0, 0, 1])
    for f, rows in ((adv.leave_one_out, 3), (lambda r, g: adv.above_baseline(r, g, baseline=jnp.ones(4)), 4)):
        jacobian = jax.jit(jax.jacobian(f))(rewards, group)
        np.testing.assert_allclose(np.diag(jacobian)[:rows], 1.0, atol=1e-6)  # d(r_i - b_i)/dr_i = 1


@given(batch=batches(), missing=st.integers(0, B - 1), how=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_missing_reward_takes_no_part(batch, missing, how):
    rewards, group, extra = batch
    holed = rewards.copy()
    holed[missing] = how
    alone = group.copy()
    alone[missing] = 999  # the same as if the row were in no group
    got, expected = run(holed, group, extra), run(rewards, alone, extra)
    for name in ADVANTAGES:
        assert np.isfinite(got[name]).all() and got[name][missing] == (1 if name == "constant" else 0), name
        rest = (np.delete(x[name], missing) for x in (got, expected))
        np.testing.assert_allclose(*rest, rtol=1e-5, atol=1e-5, err_msg=name)


def test_what_is_missing_besides_the_reward():
    """A part or a baseline that is not finite makes its row missing, for the advantages that read it."""
    rewards, group = np.arange(B, dtype=np.float32), np.zeros(B, np.int32)
    extra = {"length": np.ones(B, np.float32), "baseline": np.zeros(B, np.float32), "parts": np.stack([rewards] * 2, axis=1)}
    holed = {k: x.copy() for k, x in extra.items()}
    holed["parts"][2, 1] = holed["baseline"][2] = np.nan
    got, want = run(rewards, group, holed), run(np.where(np.arange(B) == 2, np.float32(np.nan), rewards), group, extra)
    for name in ("standardised_parts", "above_baseline"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
        assert got[name][2] == 0


def test_parts_are_standardised_as_rewards_are():
    parts = jax.random.normal(jax.random.key(1), (6, 2))
    group = jnp.asarray([0, 0, 0, 1, 1, 1])
    both = adv.standardised_parts(jnp.sum(parts, 1), group, parts=parts)
    np.testing.assert_allclose(both, sum(adv.standardised(x, group) for x in parts.T), rtol=1e-5)
    one = parts[:3, 0] - parts[:3, 0].mean()
    np.testing.assert_allclose(adv.standardised(parts[:, 0], group)[:3], one / jnp.std(one, ddof=1), rtol=1e-5)


def test_constants_of_single_advantages():
    rewards, group = jnp.asarray([0.0, 0.0, 0.0, 4.0]), jnp.zeros(4, jnp.int32)
    for ddof in (0, 1):
        for eps in (0.0, 0.5):  # in the units of the reward
            expected = (np.asarray(rewards) - 1) / (np.std(rewards, ddof=ddof) + eps)
            np.testing.assert_allclose(adv.standardised(rewards, group, std_eps=eps, ddof=ddof), expected, rtol=1e-6)
    weights = adv.exponential(jnp.asarray([0.0, 2.0, -2.0, 1000.0]), jnp.arange(4) // 3, temperature=0.5, weight_max=20.0)
    np.testing.assert_allclose(weights, [1, 20, np.exp(-4), 1], rtol=1e-5)  # one is clipped, one alone


N = 64


@jax.jit
def of_k(rewards, n, k):
    """The first n of N rows are a group, the others alone."""
    group = jnp.where(jnp.arange(N) < n, 0, jnp.arange(N))
    return adv.pass_at_k(rewards, group, k=k), adv.best_of_k(rewards, group, k=k)


@pytest.mark.parametrize("n, k", [(8, 1), (8, 2), (8, 8), (64, 16), (64, 33), (3, 4)])
def test_draws_of_k_against_integers_that_nothing_rounds(n, k):
    """k = 1 is the standardised success, k > n no signal."""
    right = n // 4 + 1
    got = np.asarray(of_k((np.arange(N) < right).astype(np.float32), n, float(k))[0])
    F, Q = (comb(n - right, k) / comb(n, k), comb(n - right - 1, k - 1) / comb(n - 1, k - 1)) if k <= n else (0, 0)
    spread = sqrt(F * (1 - F)) or 1
    np.testing.assert_allclose(got[[0, n - 1]], [F / spread, (F - Q) / spread], rtol=1e-4)
    if k == 1:
        share = right / n
        np.testing.assert_allclose(got[[0, n - 1]], [sqrt((1 - share) / share), -sqrt(share / (1 - share))], rtol=1e-4)


@pytest.mark.parametrize("n, k", [(8, 2), (8, 8), (64, 16), (3, 4)])
def test_best_of_k_by_hand(n, k):
    """One sample is right: it adds 1 to every set without itself. One is wrong: it adds nothing."""
    one = of_k((np.arange(N) == 2).astype(np.float32), n, float(k))[1]
    np.testing.assert_allclose(one, np.where(np.arange(N) == 2, k if k <= n else 0, 0), rtol=1e-5)
    two = np.asarray(of_k((np.arange(N) < 2).astype(np.float32), n, float(k))[1])
    np.testing.assert_allclose(two[:2], k * (n - k) / (n - 1) if k <= n else 0, rtol=1e-4)  # sets without the other one
    np.testing.assert_array_equal(two[2:], 0)
