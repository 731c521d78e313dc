"""Pairs made of groups: the best and the worst response, and responses behind prompts they were not written for."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives.pairs import best_and_worst, mismatched

seeds = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_a_mismatched_pair_contains_no_matched_index(size):
    response, valid = mismatched(jnp.arange(size))
    assert sorted(response.tolist()) == list(range(size))
    assert (np.asarray(response) != np.arange(size)).all() == np.asarray(valid).all() == (size >= 2)
    if size == 1:
        assert not valid.any()


@given(seed=seeds)
def test_mismatched_pairs_keep_groups_apart(seed):
    rng = np.random.default_rng(seed)
    group = rng.integers(0, rng.integers(1, 5), 8)
    response, valid = map(np.asarray, mismatched(jnp.asarray(group)))
    assert sorted(response) == list(range(8)) and (valid == (group[response] != group)).all()
    most = np.bincount(group).max()
    assert valid.sum() == min(8, 2 * (8 - most))  # the most that any pairing can have


def test_best_and_worst_of_a_group():
    reward = jnp.asarray([0.1, 0.9, 0.9, 0.3, 0.3, 0.3, jnp.nan, 1.0, -1.0, 2.0])
    group = jnp.asarray([5, 5, 5, 2, 2, 2, 7, 7, 7, 9])
    chosen, rejected, exists = map(np.asarray, best_and_worst(reward, group))
    assert np.flatnonzero(exists).tolist() == [0, 6]  # a tied group and a lone row make no pair
    assert (chosen[0], rejected[0], chosen[6], rejected[6]) == (1, 0, 7, 8)


@given(seed=seeds)
def test_best_and_worst_against_a_loop(seed):
    rng = np.random.default_rng(seed)
    reward, group = rng.choice([0.0, 0.5, 1.0, np.nan], 8), rng.integers(0, 4, 8)
    chosen, rejected, exists = map(np.asarray, best_and_worst(jnp.asarray(reward, jnp.float32), jnp.asarray(group)))
    for i in range(8):
        found = [reward[j] for j in range(8) if group[j] == group[i] and np.isfinite(reward[j])]
        first = i == np.flatnonzero(group == group[i])[0]
        assert exists[i] == (first and len(set(found)) > 1)
        if exists[i]:
            assert reward[chosen[i]] == max(found) and reward[rejected[i]] == min(found)
            assert group[chosen[i]] == group[rejected[i]] == group[i]
