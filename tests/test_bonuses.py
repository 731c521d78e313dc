"""Further rewards of single decisions: potentials, counts, novelty."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given

from jaxpt.objectives import bonuses
from jaxpt.objectives.shaping import potential_based

B, T, S, F = 4, 6, 5, 3
seeds = st.integers(0, 2**31 - 1)


@jax.jit
def everything(state, features, potential, mask, seen, gamma):
    return {
        "visits": bonuses.visits(state, mask, S), "count": bonuses.count_bonus(state, mask, seen, 0.5),
        "first": bonuses.first_visit_bonus(state, mask, 0.5), "novelty": bonuses.episodic_novelty(features, mask, 2),
        "potential": potential_based(potential, mask, gamma),
        "open": potential_based(potential, mask, gamma, jnp.ones(B)),
    }


@given(seed=seeds, gamma=st.sampled_from([0.5, 1.0]))
def test_against_loops(seed, gamma):
    """With nonsense wherever the mask is off, which nothing may read."""
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0.5, 1.0])
    state = np.where(mask, rng.integers(0, S, (B, T)), rng.choice([-7, 0, 99])).astype(np.int32)
    features = np.where(mask[..., None], rng.integers(0, 3, (B, T, F)), np.nan).astype(np.float32)
    potential = np.where(mask, rng.normal(size=(B, T)), np.nan).astype(np.float32)
    seen = rng.integers(0, 9, S).astype(np.float32)
    got = jax.device_get(everything(state, features, potential, mask, seen, gamma))
    np.testing.assert_array_equal(got["visits"], [(state[mask] == s).sum() for s in range(S)])
    for i in range(B):
        ts, gathered = np.flatnonzero(mask[i]), 0.0
        for k, t in enumerate(ts):
            np.testing.assert_allclose(got["count"][i, t], 0.5 / np.sqrt(max(seen[state[i, t]], 1)), rtol=1e-6)
            assert got["first"][i, t] == (0.5 if state[i, t] not in state[i, ts[:k]] else 0)
            square = np.sort([((features[i, t] - features[i, u]) ** 2).sum() for u in ts[:k]])[:2]
            mean = square.mean() if len(square) else 0
            kernel = [1e-3 / ((d / mean if mean > 0 else 0) + 1e-3) for d in square]
            np.testing.assert_allclose(got["novelty"][i, t], 1 / (np.sqrt(sum(kernel)) + 1e-3), rtol=1e-4)
            gathered += gamma**k * got["potential"][i, t]
        if len(ts):  # the potential's discounted sum is fixed at the start: minus Phi of the first state
            np.testing.assert_allclose(gathered, -potential[i, ts[0]], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got["open"][i, ts[-1]] - got["potential"][i, ts[-1]], gamma, rtol=1e-5)
    assert all((x[~mask] == 0).all() for name, x in got.items() if name != "visits")


def test_what_is_masked_gets_no_gradient_of_the_novelty():
    mask = jnp.asarray([[1, 1, 0, 1, 1]]) > 0
    features = jnp.where(mask[..., None], jax.random.normal(jax.random.key(0), (1, 5, F)), jnp.nan)
    grad = jax.grad(lambda x: jnp.sum(bonuses.episodic_novelty(x, mask, 2)))(features)
    assert jnp.isfinite(grad).all() and (grad[0, 2] == 0).all() and (grad[0, 4] != 0).any()


def test_potentials_keep_the_best_policy_and_a_bonus_per_step_does_not():
    """Two ways to one reward of 1: straight, or round a loop first. A bonus for standing next to the goal pays the loop;
    as a potential it cancels (Ng, Harada, Russell 1999)."""
    near = jnp.asarray([[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])  # Phi of the states passed
    mask = jnp.asarray([[1, 1, 0, 0], [1, 1, 1, 1]]) > 0
    as_bonus = 1 + jnp.sum(jnp.where(mask, 0.5 * near, 0), axis=1)
    as_potential = 1 + jnp.sum(potential_based(0.5 * near, mask, 1.0), axis=1)
    assert as_bonus[1] > as_bonus[0] and as_potential[1] == as_potential[0] == 1
