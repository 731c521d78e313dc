"""What every row follows on average: expected gradients by enumeration of whole batches, in float64, against
closed forms found by another route: the product rule over leaves, distributions of the other members' rewards, and,
where a batch is whitened, plain numpy over all groups. Known biases come out as numbers (the last test).
"""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import ALL, BETA, ENTROPY, ENVS, MAX_LENGTH, NODES, N, V, off, setting

from jaxpt.envs import exact
from jaxpt.objectives import ROWS
from jaxpt.train.expected import expected_gradient
from jaxpt.types import bare_trajectory


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=ENVS)
def s(request):
    return setting(request.param)


def given_own(own, kinds, G, f):
    """E[f(own, others)] over G - 1 other members of the given kinds (kind -> probability), by multinomial weights."""
    total, names = 0.0, sorted(kinds)
    for counts in itertools.product(range(G), repeat=len(names)):
        if sum(counts) == G - 1:
            chances = (kinds[k] ** c / math.factorial(c) for k, c in zip(names, counts, strict=True))
            weight = math.factorial(G - 1) * math.prod(chances)
            total += weight * f(own, [k for k, c in zip(names, counts, strict=True) for _ in range(c)])
    return total


def standardised(own, others):
    group = [own, *others]
    return (own - np.mean(group)) / np.std(group, ddof=1) if max(group) > min(group) else 0.0


def kinds_of(s):
    """Distribution of (reward, length)."""
    kinds = {}
    for q, kind in zip(s.p, zip(s.reward.tolist(), s.length.tolist(), strict=True), strict=True):
        kinds[kind] = kinds.get(kind, 0.0) + q
    return kinds


def by_kind(s, G, f):
    kinds = kinds_of(s)
    return np.array([given_own(kind, kinds, G, f) for kind in zip(s.reward.tolist(), s.length.tolist(), strict=True)])


def row_weight(own, others):
    return standardised(own[0], [r for r, _ in others]) / own[1]


def token_weight(own, others):
    members = [own, *others]
    return len(members) * standardised(own[0], [r for r, _ in others]) / sum(n for _, n in members)


def rewarded_token_weight(own, others):
    members = [own, *others]
    return len(members) / sum(n for r, n in members if r > 0) if own[0] > 0 else 0.0


def whitened(s, G, advantages, extra=lambda leaf, t: 0.0, coefs=None):
    """Token mean of -whitened A x score over all groups, plus `extra` x score at every token, in plain numpy.

    advantages(members) -> [G][decisions]. coefs [NODES,V]-valued further pull per decision.
    """
    out = np.zeros((NODES, V))
    for members in itertools.product(range(N), repeat=G):
        p = math.prod(s.p[m] for m in members)
        where = [(m, t) for m in members for t in np.flatnonzero(s.mask[m])]
        A = np.array([a for row in advantages(members) for a in row])
        A = (A - A.mean()) / np.sqrt(A.var() + 1e-4**2)
        for (m, t), a in zip(where, A, strict=True):
            out += p / len(where) * (extra(m, t) - a) * s.score[m, t]
            if coefs is not None:
                out[s.node[m, t]] += p / len(where) * coefs[s.node[m, t]]
    return out


def test_tables_and_values(s):
    grad_J = s.along(s.reward)
    np.testing.assert_allclose(jax.grad(exact.value)(jnp.asarray(s.logits), s.leaves), grad_J, atol=1e-12)
    through = np.zeros((2, NODES))
    for leaf, t in np.argwhere(s.mask):
        through[:, s.node[leaf, t]] += s.p[leaf] * np.array([s.reward[leaf], 1])
    want = np.divide(*through, out=np.zeros(NODES), where=through[1] > 0)
    np.testing.assert_allclose(exact.node_values(jnp.asarray(s.logits), s.leaves), want, atol=1e-12)


def test_what_each_row_follows(s):
    G, grad_J = 3, s.along(s.reward)
    got = s.means(ALL, G, reference=s.reference)
    claims = {
        # maximum likelihood of own samples, all or those that earn a reward, over their tokens
        "sft": s.along(by_kind(s, G, lambda own, others: G / sum(n for _, n in [own, *others]))),
        "raft": s.along(by_kind(s, G, rewarded_token_weight)),
        "reinforce": grad_J, "rloo": grad_J, "dr_grpo": (G - 1) / G * grad_J / MAX_LENGTH,
        **dict.fromkeys(("grpo_no_kl", "gspo", "gspo_token", "dapo_sequence_mean"), s.along(by_kind(s, G, row_weight))),
        "dapo": s.along(by_kind(s, G, token_weight)),
    }
    k1 = s.l - s.f
    # k3 in the loss: E[1/n sum_t (1 - ref/pi) grad log pi]
    claims["grpo"] = claims["grpo_no_kl"] - 0.04 * s.along((1 - np.exp(-k1)) / s.length[:, None])
    baseline = s.along(s.reward / s.length) - (s.p @ s.reward) * s.along(1 / s.length)
    claims["grpo_no_std"] = (G - 1) / G * baseline
    claims["grpo_no_length"] = s.along(by_kind(s, G, lambda own, others: standardised(own[0], [r for r, _ in others])))

    def to_go(members):
        for m in members:
            ts = np.flatnonzero(s.mask[m])
            yield [s.reward[m] - BETA * sum(k1[m, j] for j in ts[k:]) for k in range(len(ts))]

    def estimated(members):  # GAE, gamma 0.9, lam 0.95, from the definition
        for m in members:
            ts = np.flatnonzero(s.mask[m])
            r = [-BETA * k1[m, t] for t in ts]
            r[-1] += s.reward[m]
            v = [*(s.values[s.node[m, t]] for t in ts), 0.0]
            delta = [r[k] + 0.9 * v[k + 1] - v[k] for k in range(len(ts))]
            yield [sum((0.9 * 0.95) ** (j - k) * delta[j] for j in range(k, len(ts))) for k in range(len(ts))]

    def centred(members):
        mean = np.mean([s.reward[m] for m in members])
        return [[s.reward[m] - mean] * s.length[m] for m in members]

    log_pi = np.log(np.where(s.legal, s.pi, 1))
    entropy_pull = -s.state_pull(np.ones(NODES), s.pi * log_pi)  # grad H(s) = -sum_a pi log pi grad log pi
    claims["reinforce_plus_plus"] = -whitened(s, G, to_go)
    claims["reinforce_plus_plus_baseline"] = -whitened(s, G, centred, lambda m, t: 0.01 * k1[m, t])
    claims["ppo"] = -whitened(s, G, estimated, coefs=-ENTROPY * entropy_pull)
    assert set(claims) == set(ALL)
    for name, claim in claims.items():
        np.testing.assert_allclose(got[name], -claim, atol=1e-9, err_msg=name)
    assert np.abs(claims["grpo_no_kl"] - grad_J).max() > 1e-3  # the test can tell them apart


@partial(jax.jit, static_argnums=(0, 1))
def made(names, G, leaves, old_logp, ref_logp, baseline):
    """What each row makes of every group: {name: [N^G,G,T]}. A loss that is the score's needs no program of its own."""
    members = jnp.stack(jnp.meshgrid(*[jnp.arange(N)] * G, indexing="ij"), axis=-1).reshape(-1, G)

    def one(row, m):
        traj = bare_trajectory(
            leaves.tokens[m], leaves.mask[m], reward=leaves.reward[m], old_logp=old_logp[m], group=jnp.zeros(G, jnp.int32),
            length=leaves.length[m],
        )
        return row.prepare(traj, ref_logp=ref_logp[m], baseline=jnp.full(G, baseline))["advantages"]

    return members, {name: jax.vmap(partial(one, ROWS[name]))(members) for name in names}


def followed_by_scores(s, names, G, reward, baseline=0.0):
    """Mean over all groups of 1/G sum_i sum_t A_it x score, the update of a row that sums over tokens."""
    leaves = s.leaves._replace(reward=jnp.asarray(reward))
    members, advantages = jax.device_get(made(names, G, leaves, s.l, s.f, baseline))
    out = {}
    for name, A in advantages.items():
        assert ROWS[name].parts["surrogate"] == ROWS["rloo"].parts["surrogate"]
        assert ROWS[name].parts["reduction"] == ROWS["rloo"].parts["reduction"]
        weight = np.zeros((N, A.shape[2]))
        np.add.at(weight, members, s.p[members].prod(1)[:, None, None] * A / G)
        out[name] = np.einsum("nt,ntkv->kv", weight, s.score)
    return out


def test_what_other_baselines_follow(s):
    G, grad_J = 3, s.along(s.reward)
    got = followed_by_scores(s, ("remax", "reinforce_baseline", "rloo_kl", "pkpo", "opo"), G, s.reward, baseline=0.7)
    weighed = lambda own, others: own[0] - sum(r * n for r, n in [own, *others]) / sum(n for _, n in [own, *others])  # noqa: E731
    claims = {
        "remax": grad_J, "reinforce_baseline": (G - 1) / G * grad_J, "opo": s.along(by_kind(s, G, weighed)),
        "rloo_kl": grad_J - 0.03 * s.along((s.l - s.f).sum(1)),  # the KL of whole sequences
        "pkpo": s.along(2 * np.maximum.outer(s.reward, s.reward) @ s.p),  # grad of E max(r, r')
    }
    for name, claim in claims.items():
        np.testing.assert_allclose(got[name], claim, atol=1e-9, err_msg=name)
    if s.length.max() > 1:
        assert off(claims["opo"], grad_J) > 1e-3  # the row takes part in its own baseline, weighed by its length


def test_maxrl_follows_the_first_terms_of_the_log_of_success(s):
    """grad of sum_(k < G) pass@k / k = (1 - (1 - p)^(G-1)) / p grad p, groups that all fail counting as 0."""
    G, success = 3, (s.reward >= np.sort(s.reward)[N // 2]).astype(float)
    p = s.p @ success
    got = followed_by_scores(s, ("maxrl", "pkpo"), G, success)
    np.testing.assert_allclose(got["maxrl"], (1 - (1 - p) ** (G - 1)) / p * s.along(success), atol=1e-9)
    np.testing.assert_allclose(got["pkpo"], 2 * (1 - p) * s.along(success), atol=1e-9)  # grad of pass@2


def test_binary_bandit_closed_form():
    """One decision, reward 0 or 1 with success probability q: GRPO follows grad q times a factor of q alone."""
    s = setting("bandit")
    reward = np.array([0.0, 1, 1, 0, 0, 1, 0])
    q, G = s.p @ reward, 3
    std = lambda k: math.sqrt(k * (G - k) / G / (G - 1))  # noqa: E731  of k successes among G
    binomial = [math.comb(G - 1, k) * q**k * (1 - q) ** (G - 1 - k) for k in range(G)]
    factor = sum(b * (1 - (k + 1) / G) / std(k + 1) for k, b in enumerate(binomial) if k + 1 < G)
    factor += sum(b * (k / G) / std(k) for k, b in enumerate(binomial) if k > 0)
    got = s.means(ALL, G, reference=s.reference, leaves=s.leaves._replace(reward=jnp.asarray(reward)))
    np.testing.assert_allclose(got["gspo"], -factor * s.along(reward), atol=1e-9)


def test_dynamic_sampling_divides_by_the_groups_that_are_left(s):
    """P groups of which each has signal with probability q: (1 - (1 - q)^P) / q times the gradient without
    selection, because the batch's mean is taken over the groups with signal."""
    got = s.means(("dapo", "dapo_sequence_mean", "grpo_no_kl"), 2, 2)
    tie = np.equal.outer(s.reward, s.reward)
    q = 1 - s.p @ tie @ s.p
    np.testing.assert_allclose(got["grpo_no_kl"], -s.along(by_kind(s, 2, row_weight)), atol=1e-12)
    np.testing.assert_allclose(got["dapo_sequence_mean"], (1 - (1 - q) ** 2) / q * got["grpo_no_kl"], atol=1e-12)
    # Token mean: a group's own tokens, and those of the other group where it has signal.
    pairs = list(itertools.product(range(N), repeat=2))
    tokens = {}  # distribution of the other group's kept tokens
    for i, j in pairs:
        kept = 0 if tie[i, j] else int(s.length[i] + s.length[j])
        tokens[kept] = tokens.get(kept, 0.0) + s.p[i] * s.p[j]
    weight = np.zeros(N)
    for i, j in pairs:
        mean = sum(prob / (s.length[i] + s.length[j] + kept) for kept, prob in tokens.items())
        weight[i] += 2 * 2 * s.p[j] * standardised(s.reward[i], [s.reward[j]]) * mean  # any of 2 members of 2 groups
    np.testing.assert_allclose(got["dapo"], -s.along(weight), atol=1e-12)


# --- the enumeration itself, and the biases as numbers --------------------------------------------------------------


def test_chunks_do_not_matter():
    s, row = setting("observed"), ROWS["rloo"]
    whole = s.moments(ALL, 3, reference=s.reference)["rloo"]
    chunked = jax.jit(lambda logits: expected_gradient(row, s.leaves, logits, 3, chunk=100))(jnp.asarray(s.logits))
    np.testing.assert_allclose(chunked.mean, whole.mean, atol=1e-13)
    np.testing.assert_allclose(chunked.variance, whole.variance, rtol=1e-9)
    with pytest.raises(ValueError, match="7 leaves in batches of 12"):
        expected_gradient(row, s.leaves, jnp.asarray(s.logits), 12)


def test_known_biases():
    """How far expected gradients point away from what they stand for, on one tree with lengths 1 and 2, groups of
    3, no KL. Every number comes twice, by enumeration of the row and from its closed form."""
    s, G = setting("observed"), 3
    grad_J, rows = s.along(s.reward), s.means(ALL, G)
    length = s.along(s.reward / s.length) - (s.p @ s.reward) * s.along(1 / s.length)
    deviation = s.along(by_kind(s, G, lambda own, others: standardised(own[0], [r for r, _ in others])))
    outcome = lambda members: [[s.reward[m]] * s.length[m] for m in members]  # noqa: E731
    biases = {  # sine of the angle: stated, by enumeration, closed form
        "no bias: rloo, dr_grpo": (0.0, off(rows["dr_grpo"], grad_J), off(grad_J, grad_J)),
        "length: mean over the row's own tokens": (0.167, off(rows["grpo_no_std"], grad_J), off(length, grad_J)),
        "deviation: over the group's standard deviation": (0.121, off(rows["grpo_no_length"], grad_J), off(deviation, grad_J)),
        "both: grpo": (0.255, off(rows["grpo_no_kl"], grad_J), off(s.along(by_kind(s, G, row_weight)), grad_J)),
        "deviation, token mean: dapo": (0.139, off(rows["dapo"], grad_J), off(s.along(by_kind(s, G, token_weight)), grad_J)),
        "whitened over one group's tokens: reinforce_plus_plus": (
            0.218, off(rows["reinforce_plus_plus"], grad_J), off(whitened(s, G, outcome), grad_J)
        ),
    }
    for name, (stated, enumerated, closed) in biases.items():
        assert enumerated == pytest.approx(closed, abs=1e-6), name
        assert enumerated == pytest.approx(stated, abs=6e-4), name
