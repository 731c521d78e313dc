"""Sampling by row keys: the right distribution, the right log-probability, the right support."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from scipy import stats

from jaxpt.ops.sampling import greedy, row_keys, sampler, top_k_support, top_p_support

V = 7


def draw(chooser, keys, logits):
    return jax.jit(lambda keys, logits: chooser.choose(chooser.noise(keys, V), logits))(keys, logits)


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.9}])
def test_frequencies_match_the_reported_logp(kwargs):
    """Chi-square of 20,000 draws against exp(logp); a false alarm once in 10,000 seeds, and the seed is fixed."""
    n = 20_000
    logits = jnp.broadcast_to(jnp.asarray([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -jnp.inf]), (n, V))
    token, logp, support = draw(sampler(**kwargs), row_keys(jax.random.key(0), jnp.arange(n)), logits)
    probs = np.zeros(V)
    probs[np.asarray(token)] = np.exp(np.asarray(logp))
    counts = np.bincount(token, minlength=V)
    np.testing.assert_allclose(probs.sum(), 1, atol=1e-5)
    assert counts[6] == 0
    assert stats.chisquare(counts[probs > 0], n * probs[probs > 0] / probs.sum()).pvalue > 1e-4
    if kwargs.keys() & {"top_k", "top_p"}:
        np.testing.assert_array_equal(np.asarray(support[0]), probs > 0)
    else:
        assert support is None


@given(seed=st.integers(0, 2**31))
def test_a_row_does_not_depend_on_the_batch(seed):
    rng = np.random.default_rng(seed)
    logits, rows = jnp.asarray(rng.normal(size=(6, V)), jnp.float32), jnp.asarray(rng.permutation(100)[:6])
    order = rng.permutation(6)
    token, logp, _ = draw(sampler(), row_keys(jax.random.key(seed), rows), logits)
    again, logp_again, _ = draw(sampler(), row_keys(jax.random.key(seed), rows[order]), logits[order])
    np.testing.assert_array_equal(token[order], again)
    np.testing.assert_array_equal(logp[order], logp_again)


@given(seed=st.integers(0, 2**31), k=st.integers(1, V), p=st.floats(0.01, 1.0))
def test_supports_by_definition(seed, k, p):
    logits = np.random.default_rng(seed).normal(size=V).astype(np.float32) * 2
    order = np.argsort(-logits)
    np.testing.assert_array_equal(np.flatnonzero(top_k_support(jnp.asarray(logits)[None], k)[0]), sorted(order[:k]))
    probs = np.exp(logits - np.logaddexp.reduce(logits))
    before = np.cumsum(probs[order]) - probs[order]
    kept = np.flatnonzero(top_p_support(jnp.asarray(logits)[None], p)[0])
    if np.abs(before - p).min() > 1e-5:  # away from ties of rounding
        np.testing.assert_array_equal(kept, sorted(order[before < p]))
    assert len(kept) >= 1


def test_greedy_takes_the_first_of_equals():
    token, logp, support = greedy.choose((), jnp.asarray([[0.0, 1.0, 1.0], [-jnp.inf, -jnp.inf, 0.0]]))
    np.testing.assert_array_equal(token, [1, 2])
    np.testing.assert_allclose(logp, [1 - np.log(1 + 2 * np.e), 0.0], atol=1e-6)
    assert support is None
