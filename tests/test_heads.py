"""Scalars read off hidden states, against loops; a reward model of a few updates."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given

from jaxpt.models.heads import at_end, at_steps, init_head, scores
from jaxpt.objectives.reward import bradley_terry

B, T, D, STEPS = 5, 7, 3, 3
seeds = st.integers(0, 2**31 - 1)
read = jax.jit(lambda head, hidden, length, ends: (
    (behind := scores(head, hidden)), at_end(behind, length), *at_steps(behind, ends, STEPS)))


@given(seeds)
def test_what_stands_behind_a_token_the_last_one_and_each_step(seed):
    rng = np.random.default_rng(seed)
    head = {"w": rng.normal(size=D).astype(np.float32), "b": np.float32(rng.normal())}
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    length, ends = rng.integers(0, T + 1, B), rng.random((B, T)) < 0.4
    behind, last, steps, mask = read(head, hidden, length, ends)
    for b in range(B):
        row = [float(hidden[b, t].astype(float) @ head["w"].astype(float) + head["b"]) for t in range(T)]
        np.testing.assert_allclose(behind[b], row, atol=1e-5)
        np.testing.assert_allclose(last[b], row[max(length[b] - 1, 0)], atol=1e-5)
        marked = [row[t] for t in range(T) if ends[b, t]][:STEPS]
        np.testing.assert_allclose(steps[b], marked + [0.0] * (STEPS - len(marked)), atol=1e-5)
        assert mask[b].tolist() == [k < len(marked) for k in range(STEPS)]


def test_padding_gives_a_reward_no_gradient():
    hidden = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
    length = jnp.array([1, 2, 3, 4, 5])
    pull = jax.grad(lambda h: jnp.sum(at_end(scores({"w": jnp.ones(D), "b": jnp.zeros(())}, h), length)))(hidden)
    assert np.array_equal(np.abs(pull).sum(-1) > 0, np.arange(T)[None] == np.asarray(length)[:, None] - 1)


def test_a_head_learns_which_row_is_preferred():
    """From no opinion, log 2, by Bradley and Terry's loss."""
    rng = np.random.default_rng(0)
    good, bad = (rng.normal(m, 1, (64, T, D)).astype(np.float32) for m in (0.5, -0.5))
    length = jnp.full(64, T)

    @jax.jit
    def loss(head):
        return jnp.mean(bradley_terry(at_end(scores(head, good), length), at_end(scores(head, bad), length)))

    head = init_head(D)
    np.testing.assert_allclose(loss(head), np.log(2), rtol=1e-6)
    for _ in range(20):
        head = jax.tree.map(lambda w, g: w - g, head, jax.grad(loss)(head))
    assert loss(head) < 0.5
