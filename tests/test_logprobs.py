"""token_stats: shift, temperature, support, chunks; value and gradient against float64 numpy."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.ops.logprobs import token_stats

B, T, D, V = 3, 5, 4, 11
WANT = ("logp", "entropy", "logsumexp", "kl")


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    hidden, other = rng.normal(size=(2, B, T, D)).astype(np.float32) * scale
    W, W_other = rng.normal(size=(2, D, V)).astype(np.float32)
    tokens = rng.integers(0, V, (B, T))
    support = rng.random((B, T, V)) < 0.6
    np.put_along_axis(support, tokens[..., None], True, axis=-1)
    return hidden, W, tokens, support, (other, W_other)


def oracle(hidden, W, tokens, support, other, temperature):
    out = {name: np.zeros((B, T)) for name in WANT}
    for b in range(B):
        for t in range(1, T):
            kept = np.flatnonzero(support[b, t])
            z = hidden[b, t - 1].astype(np.float64) @ W[:, kept].astype(np.float64) / temperature
            z2 = other[0][b, t - 1].astype(np.float64) @ other[1][:, kept].astype(np.float64) / temperature
            lse, lse2 = np.logaddexp.reduce(z), np.logaddexp.reduce(z2)
            p = np.exp(z - lse)
            out["logp"][b, t] = z[list(kept).index(tokens[b, t])] - lse
            out["entropy"][b, t] = -(p * (z - lse)).sum()
            out["logsumexp"][b, t] = lse
            out["kl"][b, t] = (p * (z - lse - z2 + lse2)).sum()
    return out


@jax.jit
def run(hidden, W, tokens, packed, other, temperature):
    return token_stats(hidden, W, tokens, want=WANT, temperature=temperature, support=packed, other=other)


@given(seed=st.integers(0, 2**31), temperature=st.sampled_from([0.5, 1.0, 2.0]), full=st.booleans())
def test_against_float64(seed, temperature, full):
    hidden, W, tokens, support, other = draw(seed)
    support = support | full
    got = run(hidden, W, tokens, np.packbits(support, axis=-1), other, temperature)
    for name, expected in oracle(hidden, W, tokens, support, other, temperature).items():
        np.testing.assert_allclose(got[name], expected, rtol=2e-4, atol=2e-5, err_msg=name)
    assert (np.asarray(got["entropy"]) <= np.log(V) + 1e-5).all() and (np.asarray(got["entropy"]) >= -1e-6).all()
    assert (np.asarray(got["kl"]) >= -1e-5).all()


@pytest.mark.parametrize("chunk", [5, 12])
def test_chunks_change_nothing(chunk):
    hidden, W, tokens, support, other = draw(0)
    packed = np.packbits(support, axis=-1)

    def total(hidden, W, chunk):
        stats = token_stats(hidden, W, tokens, want=WANT, temperature=0.7, support=packed, other=other, chunk=chunk)
        return sum(jnp.sum(x * (i + 1.0)) for i, x in enumerate(stats.values()))

    whole = jax.value_and_grad(total, argnums=(0, 1))(hidden, W, 10**6)
    parts = jax.value_and_grad(total, argnums=(0, 1))(hidden, W, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, parts)


def test_alignment_by_gradient():
    """logp[t] depends on hidden[t-1] and on no other position."""
    hidden, W, tokens, *_ = draw(1)
    jacobian = jax.jacobian(lambda h: token_stats(h, W, tokens)["logp"][0])(jnp.asarray(hidden))[:, 0]  # [T,T,D]
    touched = np.abs(np.asarray(jacobian)).sum(-1) > 0
    np.testing.assert_array_equal(touched, np.eye(T, k=-1, dtype=bool))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_extreme_logits_are_finite_in_value_and_gradient(scale):
    hidden, W, tokens, support, other = draw(2, scale)
    packed = np.packbits(support, axis=-1)
    for name in WANT:
        fn = lambda h: jnp.sum(  # noqa: E731
            token_stats(h, W, tokens, want=(name,), support=packed, other=other if name == "kl" else None)[name]
        )
        value, grad = jax.value_and_grad(fn)(jnp.asarray(hidden))
        assert np.isfinite(value) and np.isfinite(grad).all(), name


def test_kl_is_infinite_where_the_other_has_no_mass():
    hidden = jnp.ones((1, 2, 1))
    W, W_other = jnp.asarray([[0.0, 0.0]]), jnp.asarray([[0.0, -jnp.inf]])
    kl = lambda a, b: token_stats(hidden, a, jnp.zeros((1, 2), int), want=("kl",), other=(hidden, b))["kl"][0, 1]  # noqa: E731
    assert kl(W, W_other) == np.inf
    np.testing.assert_allclose(kl(W_other, W), np.log(2), rtol=1e-6)


def test_unknown_statistic_is_named():
    hidden, W, tokens, *_ = draw(0)
    with pytest.raises(ValueError, match="expected names from"):
        token_stats(hidden, W, tokens, want=("loggp",))
