"""What the parts of a row follow on average, by enumeration in float64: baselines and critics, ratios off-policy,
and whose gradient a KL estimator is, against softmax algebra at each state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import BETA, ENTROPY, ENVS, MAX_LENGTH, NODES, PAIR_NAMES, PART_NAMES, N, V, kl_pulls, off, setting

from jaxpt.envs import exact


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=ENVS)
def s(request):
    return setting(request.param)


def test_groups_of_one_and_two(s):
    grad_J = s.along(s.reward)
    one, two = s.moments(PART_NAMES, 1), s.moments(PAIR_NAMES, 2)
    np.testing.assert_allclose(one["reinforce"].mean, -grad_J, atol=1e-12)
    np.testing.assert_allclose(one["rloo"].mean, 0, atol=1e-12)
    np.testing.assert_allclose(two["rloo"].mean, -grad_J, atol=1e-12)
    np.testing.assert_allclose(two["dr_grpo"].mean, -grad_J / 2 / MAX_LENGTH, atol=1e-12)


def test_variance(s):
    """REINFORCE: that of one row, over their number. RLOO: from its pairs. A group of one has no signal, so no noise."""
    grad_J, score = s.along(s.reward), s.score.sum(1).reshape(N, -1)
    one, two = s.moments(PART_NAMES, 1), s.moments(PAIR_NAMES, 2)
    alone = (s.p @ (s.reward[:, None] * score) ** 2 - grad_J.ravel() ** 2).sum()
    np.testing.assert_allclose(one["reinforce"].variance, alone, rtol=1e-9)
    np.testing.assert_allclose(two["reinforce"].variance, alone / 2, rtol=1e-9)
    pairs = [(s.p[i] * s.p[j], (s.reward[i] - s.reward[j]) * (score[i] - score[j]) / 2) for i in range(N) for j in range(N)]
    spread = sum(p * np.sum((g - grad_J.ravel()) ** 2) for p, g in pairs)
    np.testing.assert_allclose(two["rloo"].variance, spread, rtol=1e-9)
    assert one["rloo"].variance == 0 and two["rloo"].variance < alone / 2


def test_a_critic_is_a_baseline(s):
    """lam = 1: grad J whatever the critic says. lam = 0: grad J for the true values, biased for others."""
    grad_J, true = s.along(s.reward), exact.node_values(jnp.asarray(s.logits), s.leaves)
    right, wrong = (s.moments(PART_NAMES, values=v) for v in (true, None))
    for got in (right["gae_0"], right["gae_1"], wrong["gae_1"]):
        np.testing.assert_allclose(got.mean, -grad_J, atol=1e-12)
    v, bootstrapped = s.values, s.mask * 0.0
    for leaf, t in np.argwhere(s.mask):
        later = np.flatnonzero(s.mask[leaf, t + 1 :])
        bootstrapped[leaf, t] = v[s.node[leaf, t + 1 + later[0]]] if len(later) else s.reward[leaf]
    np.testing.assert_allclose(wrong["gae_0"].mean, -s.along(bootstrapped), atol=1e-12)
    assert right["gae_1"].variance < wrong["gae_1"].variance


def test_token_ratios_off_policy(s):
    """Unclipped: sum_s d_mu(s) sum_a pi(a|s) Q_mu(s,a) grad log pi. grad J where every episode is one decision;
    otherwise states are visited and continued as the sampler does."""
    got = s.means(PAIR_NAMES, 2, behaviour=s.behaviour)["importance"]
    q = np.zeros((2, NODES, V))  # of the sampler: reward x probability, probability
    for leaf, t in np.argwhere(s.mask):
        q[:, s.node[leaf, t], s.tokens[leaf, t]] += s.prob(s.mu)[leaf] * np.array([s.reward[leaf], 1])
    q_mu = np.divide(q[0], q[1], out=np.zeros((NODES, V)), where=q[1] > 0)
    claim = s.state_pull(s.visits(s.mu), s.pi * q_mu)
    np.testing.assert_allclose(got, -claim, atol=1e-12)
    assert (np.abs(claim - s.along(s.reward)).max() > 1e-3) == (s.length.max() > 1)
    # the trainer's policy over the sampler's as a weight: of each token the same, of the whole row grad J itself
    weighed = s.means(PART_NAMES, behaviour=s.behaviour)
    np.testing.assert_allclose(weighed["corrected_tokens"], -claim, atol=1e-12)
    np.testing.assert_allclose(weighed["corrected"], -s.along(s.reward), atol=1e-12)


def test_surprise_in_the_reward_is_the_entropy_of_whole_sequences(s):
    got = s.means(PART_NAMES)["soft"]

    def soft_value(logits):
        logp = exact.leaf_logp(logits, s.leaves).sum(1)
        return jnp.sum(jnp.exp(logp) * (s.leaves.reward - ENTROPY * logp))

    np.testing.assert_allclose(got, -jax.grad(soft_value)(jnp.asarray(s.logits)), atol=1e-12)


def without_reward(s):
    return s.leaves._replace(reward=jnp.zeros(N))


def test_whose_gradient_a_kl_is(s):
    got = s.moments(PART_NAMES, reference=s.reference, leaves=without_reward(s))
    reverse, forward = kl_pulls(s, s.visits(s.pi))
    np.testing.assert_allclose(got["k1"].mean, 0, atol=1e-12)  # a penalty that is noise
    assert got["k1"].variance > 0.01
    for name in ("k2", "k3_as_k2", "k1_score", "k3_importance"):
        np.testing.assert_allclose(got[name].mean, BETA * reverse, atol=1e-12)
    np.testing.assert_allclose(got["k3"].mean, BETA * forward, atol=1e-12)
    # in the reward: the KL of whole sequences, whatever the credit
    sequence = s.along((s.l - s.f).sum(1))
    for name in ("k1_in_reward", "k1_in_token_rewards"):
        np.testing.assert_allclose(got[name].mean, BETA * sequence, atol=1e-12)

    def sequence_kl(logits):
        logp = exact.leaf_logp(logits, s.leaves)
        return jnp.sum(jnp.exp(logp.sum(1)) * (logp - s.f).sum(1))

    np.testing.assert_allclose(jax.grad(sequence_kl)(jnp.asarray(s.logits)), sequence, atol=1e-12)
    assert (np.abs(sequence - reverse).max() > 1e-3) == (s.length.max() > 1)
    if s.length.max() > 1:  # credit from the token on leaves the noise of earlier tokens out
        assert got["k1_in_token_rewards"].variance < got["k1_in_reward"].variance


def test_off_policy_only_forms_with_the_ratio_are_the_reverse_kl(s):
    got = s.means(PART_NAMES, behaviour=s.behaviour, reference=s.reference, leaves=without_reward(s))
    reverse, _ = kl_pulls(s, s.visits(s.mu))
    for name in ("k1_score", "k3_importance"):
        np.testing.assert_allclose(got[name], BETA * reverse, atol=1e-12)
    log = np.log(np.where(s.legal, s.pi, 1)) - np.log(np.where(s.legal, s.ref, 1))
    for name in ("k2", "k3_as_k2"):  # actions are weighed as the sampler takes them
        np.testing.assert_allclose(got[name], BETA * s.state_pull(s.visits(s.mu), s.mu * log), atol=1e-12)
        assert np.abs(got[name] - BETA * reverse).max() > 1e-2
    np.testing.assert_allclose(
        got["k1"], BETA * s.state_pull(s.visits(s.mu), s.mu), atol=1e-12
    )  # no zero mean any more, and no KL either


def test_the_bias_of_k3_in_the_loss_as_a_number():
    """On one tree: its direction is off by 0.185 (sine), and it differs from the gradient of KL(pi || ref) of each
    state by 0.296 of its size; 0 for k2."""
    s = setting("observed")
    got = s.means(PART_NAMES, reference=s.reference, leaves=without_reward(s))
    reverse, forward = kl_pulls(s, s.visits(s.pi))
    relative = lambda g: np.linalg.norm(g / BETA - reverse) / np.linalg.norm(reverse)  # noqa: E731
    assert off(got["k3"], reverse) == pytest.approx(off(forward, reverse), abs=1e-9) == pytest.approx(0.1855, abs=1e-4)
    assert relative(got["k3"]) == pytest.approx(0.2961, abs=1e-4) and relative(got["k2"]) < 1e-9
