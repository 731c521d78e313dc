"""Expected gradients by enumeration of whole groups, in float64: what each row claims to follow.

Every group of G leaves is visited with its probability, so the expectation has no sampling error. The other
side is computed by other means: the gradient of J from the product rule over leaves, and for standardised
rewards from the distribution of the *rewards* of the other members.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.envs import exact
from jaxpt.envs.bandit import bandit
from jaxpt.envs.tree import tree
from jaxpt.objectives import ROWS
from jaxpt.types import bare_trajectory

ENVS = {"bandit": bandit(arms=3), "tree": tree(vocab=3, depth=2), "tree_observed": tree(vocab=3, depth=2, observe=(1,))}


def setting(name):
    """Leaves of one task, a random tabular policy, and in numpy: p [N] and d log pi(token) / d logits
    [N,T,nodes,V] of every decision (0 where there is none)."""
    env = ENVS[name]
    leaves = exact.leaves(env, env.sample(jax.random.key(7), 1), jax.random.key(0))
    nodes = int(leaves.node.max()) + 1
    logits = np.random.default_rng(1).normal(size=(nodes, env.spec.vocab))
    tokens, mask, node = (np.asarray(x) for x in (leaves.tokens, leaves.mask, leaves.node))
    taken = [sorted({int(t) for t, m, k in zip(tokens.ravel(), mask.ravel(), node.ravel()) if m and k == i}) for i in range(nodes)]
    p, score = np.ones(len(tokens)), np.zeros((*tokens.shape, *logits.shape))
    for leaf, t in zip(*np.nonzero(mask)):
        k = node[leaf, t]
        prob = np.exp(logits[k, taken[k]])
        prob /= prob.sum()
        p[leaf] *= prob[taken[k].index(int(tokens[leaf, t]))]
        score[leaf, t, k, tokens[leaf, t]] += 1
        score[leaf, t, k, taken[k]] -= prob
    return leaves, logits, p, score


def expected_gradient(row, leaves, logits, G, reference=None):
    """Sum over all N^G groups of P(group) * gradient of the row's loss on that group. The reference is the
    policy itself unless its logits are given."""

    def gradient(members):
        def loss(logits):
            logp = exact.leaf_logp(logits, leaves)[members]
            traj = bare_trajectory(
                leaves.tokens[members], leaves.mask[members], reward=leaves.reward[members],
                old_logp=jax.lax.stop_gradient(logp), group=jnp.zeros(G, jnp.int32), length=leaves.length[members],
            )
            ready = row.prepare(traj)
            ref_logp = traj.old_logp if reference is None else exact.leaf_logp(reference, leaves)[members]
            extra = {"ref_logp": ref_logp} if "ref_logp" in row.needs else {}
            return row.loss(logp, traj.old_logp, ready["advantages"], traj.mask, totals=ready["totals"], **extra)[0]

        return jax.grad(loss)(logits) * jnp.prod(exact.leaf_prob(logits, leaves)[members])

    groups = jnp.asarray(list(itertools.product(range(len(leaves.reward)), repeat=G)))
    return jnp.sum(jax.jit(jax.vmap(gradient))(groups), axis=0)


def standardised_given_own(reward, others, G):
    """E[A | own reward] when the other G - 1 rewards have the distribution `others` (value -> probability),
    summed over multisets with multinomial weights."""
    total = 0.0
    values = sorted(others)
    for counts in itertools.product(range(G), repeat=len(values)):
        if sum(counts) != G - 1:
            continue
        weight = math.factorial(G - 1) * math.prod(others[v] ** c / math.factorial(c) for v, c in zip(values, counts))
        group = [reward] + [v for v, c in zip(values, counts) for _ in range(c)]
        if len(group) > 1 and max(group) > min(group):
            total += weight * (reward - np.mean(group)) / np.std(group, ddof=1)
    return total


@pytest.mark.parametrize("name, G", [("bandit", 1), ("bandit", 2), ("bandit", 3), ("tree", 2), ("tree", 3), ("tree_observed", 3)])
def test_what_each_row_follows(name, G):
    with jax.enable_x64(True):
        leaves, logits, p, score_t = setting(name)
        score = score_t.sum(1)
        leaves = leaves._replace(reward=jnp.asarray(np.round(np.asarray(leaves.reward, np.float64) * 4) / 4))
        reward, lengths = np.asarray(leaves.reward), np.asarray(leaves.mask).sum(1)
        grad_J = np.einsum("n,n,nkv->kv", p, reward, score)
        np.testing.assert_allclose(jax.grad(exact.value)(jnp.asarray(logits), leaves), grad_J, atol=1e-12)

        got = {row: np.asarray(expected_gradient(ROWS[row], leaves, jnp.asarray(logits), G)) for row in
               ("reinforce", "rloo", "grpo", "grpo_no_kl")}
        np.testing.assert_allclose(got["reinforce"], -grad_J, atol=1e-6)
        np.testing.assert_allclose(got["rloo"], -grad_J if G > 1 else 0 * grad_J, atol=1e-6)

        others = {}
        for q, r in zip(p, reward):
            others[float(r)] = others.get(float(r), 0.0) + q
        weight = np.array([standardised_given_own(float(r), others, G) for r in reward]) / lengths
        claim = np.einsum("n,n,nkv->kv", p, weight, score)
        np.testing.assert_allclose(got["grpo"], -claim, atol=1e-6)
        np.testing.assert_allclose(got["grpo_no_kl"], -claim, atol=1e-6)
        if G > 1:  # and it is not the gradient of J: the test can tell them apart
            assert np.abs(claim - grad_J).max() > 1e-3


@pytest.mark.parametrize("name", ["bandit", "tree_observed"])
def test_the_kl_of_grpo_pulls_towards_the_reference(name):
    """k3 in the loss adds beta E[1/n sum_t (1 - ref/pi) grad log pi], whatever the group."""
    with jax.enable_x64(True):
        leaves, logits, p, score_t = setting(name)
        reference = jnp.asarray(np.random.default_rng(2).normal(size=logits.shape))
        got = expected_gradient(ROWS["grpo"], leaves, jnp.asarray(logits), 2, reference)
        without = expected_gradient(ROWS["grpo_no_kl"], leaves, jnp.asarray(logits), 2)
        logp, ref_logp = (np.asarray(exact.leaf_logp(jnp.asarray(x), leaves)) for x in (logits, reference))
        weight = (1 - np.exp(ref_logp - logp)) / np.asarray(leaves.mask).sum(1, keepdims=True)
        pull = np.einsum("n,nt,ntkv->kv", p, weight, score_t)
        np.testing.assert_allclose(got - without, 0.04 * pull, atol=1e-9)
        assert np.abs(pull).max() > 1e-2


def test_binary_bandit_closed_form():
    """One decision, reward 0 or 1 with success probability s: GRPO follows grad s times a factor of s alone."""
    with jax.enable_x64(True):
        leaves, logits, p, score_t = setting("bandit")
        score = score_t.sum(1)
        reward = np.array([0.0, 1.0, 1.0])
        leaves = leaves._replace(reward=jnp.asarray(reward))
        s, G = p @ reward, 3
        std = lambda k: math.sqrt(k * (G - k) / G / (G - 1))  # noqa: E731  of k successes among G
        binomial = [math.comb(G - 1, k) * s**k * (1 - s) ** (G - 1 - k) for k in range(G)]
        factor = sum(b * (1 - (k + 1) / G) / std(k + 1) for k, b in enumerate(binomial) if k + 1 < G)
        factor += sum(b * (k / G) / std(k) for k, b in enumerate(binomial) if k > 0)
        got = expected_gradient(ROWS["grpo"], leaves, jnp.asarray(logits), G)
        np.testing.assert_allclose(got, -factor * np.einsum("n,n,nkv->kv", p, reward, score), atol=1e-9)
