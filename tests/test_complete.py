"""Completions of prompts against the forward pass without a cache."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt import rollout
from jaxpt.models import ModelConfig, make_model
from jaxpt.ops.sampling import greedy, row_keys, sampler

P, WIDTH, NEW, V = 3, 5, 11, 7
MODEL = make_model(ModelConfig(vocab=V, d_model=16, n_layers=1, n_heads=2))
PARAMS = jax.jit(MODEL.init)(jax.random.key(0))
N = np.array([5, 2, 3])
PROMPTS = np.random.default_rng(0).integers(0, V, (P, WIDTH))


@jax.jit
def logits(tokens):
    return MODEL.forward(PARAMS, tokens)[0] @ MODEL.unembed(PARAMS)


def complete(chooser, seed=0, group=1, prompts=PROMPTS, **more):
    keys = row_keys(jax.random.key(seed), jnp.arange(P * group))
    run = jax.jit(lambda prompts, n, keys: rollout.complete(MODEL, PARAMS, prompts, n, keys, chooser, new=NEW, group=group, **more))
    return jax.tree.map(np.asarray, run(jnp.asarray(prompts), jnp.asarray(N), keys))


def by_hand(row, n, ends):
    """The most probable token again and again, everything computed anew."""
    tokens = np.zeros((1, WIDTH + NEW), int)
    tokens[0, :n] = row[:n]
    for t in range(n, n + NEW):
        tokens[0, t] = np.argmax(logits(tokens)[0, t - 1])
        if tokens[0, t] in ends:
            return tokens[0], t + 1, False
    return tokens[0], n + NEW, True


def test_greedy_texts_end_where_they_should():
    free = [by_hand(row, n, ()) for row, n in zip(PROMPTS, N)]
    ends = (int(free[0][0][N[0] + 2]), int(free[2][0][N[2]]))  # the third new token of one row, the first of another
    for stop in ((), ends):
        found = complete(greedy, ends=stop)
        for b, (tokens, length, truncated) in enumerate(by_hand(row, n, stop) for row, n in zip(PROMPTS, N)):
            np.testing.assert_array_equal(found.tokens[b], tokens)
            assert (found.length[b], found.truncated[b]) == (length, truncated)
            np.testing.assert_array_equal(found.mask[b], (np.arange(WIDTH + NEW) >= N[b]) & (np.arange(WIDTH + NEW) < length))
    assert found.truncated.sum() < P


def test_draws_carry_the_log_probability_that_the_forward_pass_gives():
    found = complete(sampler(0.9), group=4, ends=(3,))
    np.testing.assert_array_equal(found.group, np.repeat(np.arange(P), 4))
    logp = jax.nn.log_softmax(logits(found.tokens) / 0.9)
    expected = np.take_along_axis(np.roll(logp, 1, axis=1), found.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.old_logp, np.where(found.mask, expected, 0), atol=1e-4)
    last = found.tokens[np.arange(4 * P), found.length - 1]
    np.testing.assert_array_equal(found.truncated, last != 3)
    assert 0 < found.truncated.sum() < 4 * P and len({row.tobytes() for row in found.tokens}) > P


def test_what_stands_behind_a_prompt_does_not_matter():
    dirty = np.where(np.arange(WIDTH) < N[:, None], PROMPTS, (PROMPTS + 1) % V)
    np.testing.assert_array_equal(complete(sampler(1.0), prompts=dirty).tokens, complete(sampler(1.0)).tokens)
