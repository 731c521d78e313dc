"""Exact expectations over the tree and the bandit against recursions in plain Python (float64)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.envs import exact, make

TREES = {
    "tree": (make("tree"), 3, 3, ()),
    "observed": (make("tree", observe=(1,)), 3, 3, (1,)),
    "chain of stops": (make("tree", vocab=2, depth=4), 2, 4, ()),
}
GRADIENT = jax.jit(jax.value_and_grad(exact.value))
SEEDS = st.integers(0, 2**31 - 1)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def recursion(logits, reward, vocab, depth, place=0, decisions=0):
    """J below a place, by the definition of the tree; row `place` of the table holds the tokens 1..vocab.

    Inner places come first in the heap, so that they are the nodes 0, 1, .. of the table as well.
    """
    if decisions == depth:
        return reward[place]
    p = softmax(logits[place, 1 : vocab + 1])
    total = p[0] * reward[place]
    for s in range(1, vocab):
        child = (vocab - 1) * place + s
        total += p[s] * recursion(logits, reward, vocab, depth, child, decisions + 1)
    return total


def nodes(vocab, depth):
    return sum((vocab - 1) ** k for k in range(depth))


def problem(env, rows, scale):
    def make_problem(key):
        k_task, k_logits = jax.random.split(key)
        task = env.sample(k_task, 1)
        leaves = exact.leaves(env, task, key)
        logits = scale * jax.random.normal(k_logits, (rows, env.spec.vocab))
        return task, leaves, logits, *jax.value_and_grad(exact.value)(logits, leaves)

    return jax.jit(make_problem)


@pytest.mark.parametrize("name", TREES)
def test_value_and_gradient(name):
    env, vocab, depth, _ = TREES[name]
    rows = nodes(vocab, depth)
    solve = problem(env, rows + 1, 2.0)  # one row that no decision uses

    @given(SEEDS)
    def holds(seed):
        task, leaves, logits, value, gradient = jax.device_get(solve(jax.random.key(seed)))
        assert leaves.node.max() == rows - 1
        table, reward = logits.astype(np.float64), task.reward.astype(np.float64)
        assert abs(value - recursion(table, reward, vocab, depth)) < 1e-6
        h = 1e-5
        for at in np.ndindex(table.shape):
            up, down = table.copy(), table.copy()
            up[at] += h
            down[at] -= h
            slope = recursion(up, reward, vocab, depth) - recursion(down, reward, vocab, depth)
            assert abs(gradient[at] - slope / (2 * h)) < 1e-6
        illegal = np.ones(table.shape, bool)
        illegal[:rows, 1 : vocab + 1] = False
        assert not gradient[illegal].any()

    holds()


@pytest.mark.parametrize("name", TREES)
def test_leaves_stand_in_the_heaps_order(name):
    env, vocab, depth, observe = TREES[name]
    task = env.sample(jax.random.key(0), 1)
    leaves = jax.device_get(exact.leaves(env, task, jax.random.key(0)))
    assert (leaves.reward == task.reward).all()
    assert len(leaves.tokens) == nodes(vocab, depth + 1)
    assert set(leaves.length) == {k + (k > 1 and bool(observe)) for k in range(1, depth + 1)}
    forced = (leaves.tokens > 0) & ~leaves.mask
    assert (leaves.tokens[forced] == vocab + 1).all() and bool(forced.any()) == bool(observe)
    # Every decision's node is the heap's number of the place it is taken from.
    for tokens, mask, node in zip(leaves.tokens, leaves.mask, leaves.node, strict=True):
        place = 0
        for token, chosen, n in zip(tokens, mask, node, strict=True):
            if chosen:
                assert n == place
                place = (vocab - 1) * place + token - 1


def test_the_optimum_is_the_best_leaf():
    env, vocab, depth, _ = TREES["tree"]
    task = env.sample(jax.random.key(3), 1)
    leaves = exact.leaves(env, task, jax.random.key(0))
    best = int(leaves.reward.argmax())
    chosen = np.asarray(leaves.mask[best])
    at = np.asarray(leaves.node[best])[chosen]
    table = np.zeros((7, env.spec.vocab), np.float32)
    table[at] = -np.inf
    table[at, np.asarray(leaves.tokens[best])[chosen]] = 0
    value, gradient = GRADIENT(jnp.asarray(table), leaves)
    assert value == task.reward.max() == task.best[0]
    assert jnp.isfinite(gradient).all() and not gradient.any()  # -inf logits: exact and no NaN


def test_padding_and_invalid_tokens_have_no_probability():
    env = TREES["observed"][0]
    task = env.sample(jax.random.key(0), 1)
    leaves = exact.leaves(env, task, jax.random.key(0))
    poison = jnp.zeros((7, env.spec.vocab)).at[:, jnp.array([0, 4])].set(jnp.nan)
    probability = exact.leaf_prob(poison, leaves)
    np.testing.assert_allclose(probability.sum(), 1, rtol=1e-6)
    gradient = GRADIENT(poison, leaves)[1]
    assert jnp.isfinite(gradient).all() and not gradient[:, jnp.array([0, 4])].any()
    logp = exact.leaf_logp(poison, leaves)
    np.testing.assert_allclose(logp, jnp.where(leaves.mask, -np.log(3.0), 0.0), rtol=1e-6)


def test_bandit_value_is_the_softmax_average():
    env = make("bandit", arms=5)
    logits = jax.random.normal(jax.random.key(0), (1, env.spec.vocab))
    for seed in range(3):
        means = env.sample(jax.random.key(seed), 1)
        assert sorted(means.tolist()) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
        leaves = exact.leaves(env, means, jax.random.key(0))
        p = softmax(np.asarray(logits, np.float64)[0, 1:6])
        value, gradient = GRADIENT(logits, leaves)
        np.testing.assert_allclose(value, p @ np.asarray(means), rtol=1e-5)
        closed = p * (np.asarray(means) - p @ np.asarray(means))  # d J / d logit = p (r - J)
        np.testing.assert_allclose(gradient[0, 1:6], closed, atol=1e-6)


def test_bandit_noise_lives_in_the_state():
    env = make("bandit", noise=0.5)
    means = jnp.array([0.0, 1.0, 0.5, 0.25])

    def pull(key):
        return env.outcome(means, env.feed(means, env.init(means, key), jnp.int32(2)))

    got = jax.device_get(jax.vmap(pull)(jax.random.split(jax.random.key(0), 4000)))
    assert (got.gold == 1).all()
    assert abs(got.reward.mean() - 1) < 5 * 0.5 / 4000**0.5
    assert abs(got.reward.std() - 0.5) < 5 * 0.5 / 8000**0.5
    for token in (0, 5, -3):
        outcome = env.outcome(means, env.feed(means, env.init(means, jax.random.key(0)), jnp.int32(token)))
        assert outcome.reward == outcome.gold == 0 and not outcome.truncated


def test_an_invalid_token_ends_the_tree_with_nothing():
    env = make("tree")
    task = env.sample(jax.random.key(0), 1)
    for token in (0, 4, -1):
        outcome = env.outcome(task, env.feed(task, env.init(task, jax.random.key(0)), jnp.int32(token)))
        assert outcome.reward == 0 and not outcome.truncated
