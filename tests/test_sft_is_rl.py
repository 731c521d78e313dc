"""When imitation is a policy gradient: the identities by enumeration, and the experiment's own arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.envs import exact
from jaxpt.envs.tree import tree
from jaxpt.experiments import sft_is_rl
from jaxpt.lab.experiment import topological
from jaxpt.objectives import ROWS
from jaxpt.objectives.algebra import compose
from jaxpt.train.expected import expected_gradient
from jaxpt.types import bare_trajectory

EXPERIMENT = sft_is_rl.EXPERIMENT
CONFIG = EXPERIMENT.tiers["cpu"].config
STAGES = {stage.name: stage for stage in sft_is_rl.stages(CONFIG, {})}
IMITATION = compose("", "", advantage="constant", ratio="none", surrogate="score", reduction="sequence_sum")


# --- the law ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    """A tree of 7 responses of which 3 are right; logits of a policy and of an expert who is often wrong."""
    with jax.enable_x64(True):
        env = tree(vocab=3, depth=2)
        leaves = exact.leaves(env, env.sample(jax.random.key(3), 1), jax.random.key(0))
        right = jnp.asarray([0.0, 1, 0, 0, 1, 0, 1])
        policy, expert = np.random.default_rng(0).normal(size=(2, int(leaves.node.max()) + 1, int(leaves.tokens.max()) + 1))

        @jax.jit
        def update(row_is_imitation, reward, logits, sampler):
            """Expected update: samples of `sampler`, weighed by their reward or all alike."""
            given = leaves._replace(reward=reward)
            rows = (ROWS["reinforce"], IMITATION)
            one, other = (-expected_gradient(row, given, logits, 1, behaviour=sampler).mean for row in rows)
            return jnp.where(row_is_imitation, other, one)

        imitate = lambda logits, sampler: update(True, right, logits, sampler)  # noqa: E731
        reinforce = lambda logits, reward=right, sampler=None: update(  # noqa: E731
            False, reward, logits, logits if sampler is None else sampler
        )
        yield leaves._replace(reward=right), jnp.asarray(policy), jnp.asarray(expert), imitate, reinforce


def table_of(q, leaves, like):
    """Logits whose leaves have the probabilities q [N]."""
    through = jnp.zeros_like(like).at[leaves.node, leaves.tokens].add(jnp.where(leaves.mask, q[:, None], 0.0))
    return jnp.log(jnp.maximum(through, 1e-300))


def close(a, b):
    np.testing.assert_allclose(a, b, atol=1e-9)


def test_imitation_climbs_the_likelihood_of_whoever_samples(world):
    """Advantage 1 under samples of q is the gradient of -KL(q || policy); under the policy's own samples it is 0."""
    leaves, policy, expert, imitate, _ = world
    q = exact.leaf_prob(expert, leaves)
    close(imitate(policy, expert), jax.grad(lambda x: q @ exact.leaf_logp(x, leaves).sum(1))(policy))
    close(imitate(policy, policy), 0)
    assert np.abs(imitate(policy, expert)).max() > 0.05


def test_imitation_of_an_expert_is_rl_with_the_likelihood_ratio_for_a_reward(world):
    """The samples must be the expert's: on the policy's own, the reward that makes RL imitation is q / policy, and
    no other; the success of the response is another gradient."""
    leaves, policy, expert, imitate, reinforce = world
    ratio = exact.leaf_prob(expert, leaves) / exact.leaf_prob(policy, leaves)
    close(reinforce(policy, ratio), imitate(policy, expert))
    assert np.abs(reinforce(policy) - imitate(policy, expert)).max() > 0.05


def test_reinforce_is_imitation_of_the_own_right_answers_times_how_many_there_are(world):
    leaves, policy, _, imitate, reinforce = world
    p = exact.leaf_prob(policy, leaves)
    J, kept = p @ leaves.reward, table_of(p * leaves.reward / (p @ leaves.reward), leaves, policy)
    close(exact.leaf_prob(kept, leaves), p * leaves.reward / J)
    close(reinforce(policy), J * imitate(policy, kept))
    close(reinforce(policy), jax.grad(exact.value)(policy, leaves))


@jax.jit
def batch_gradients(traj):
    def gradient(row):
        ready = row.prepare(traj)
        loss = lambda x: row.loss(x, x, ready["advantages"], ready["mask"], totals=ready["totals"])[0]  # noqa: E731
        return jax.grad(loss)(traj.old_logp)

    return gradient(ROWS["reinforce"]), gradient(ROWS["raft"])


def test_on_every_batch_reinforce_is_raft_times_kept_tokens_a_row():
    rng, (B, T) = np.random.default_rng(1), (8, 5)
    for kept in (0, 1, 5, 8):
        mask = np.arange(T)[None] < rng.integers(1, T + 1, (B, 1))
        reward = rng.permutation(np.arange(B) < kept).astype(np.float32)
        logp = rng.normal(size=(B, T)).astype(np.float32)
        traj = bare_trajectory(np.zeros((B, T), np.int32), mask, reward=reward, old_logp=logp)
        reinforce, raft = jax.device_get(batch_gradients(traj))
        np.testing.assert_allclose(reinforce, raft * mask[reward > 0].sum() / B, rtol=1e-6, atol=1e-7)
        assert (np.abs(raft).max() > 0) == (kept > 0)


def test_fixed_points(world):
    """Imitation rests at its sampler: the expert, or the expert given that the answer is right. RL rests at neither
    expert, but wherever all answers are right; and so does imitation of one's own right answers."""
    leaves, policy, expert, imitate, reinforce = world
    q = exact.leaf_prob(expert, leaves)
    posterior = table_of(q * leaves.reward / (q @ leaves.reward), leaves, policy)
    close(imitate(expert, expert), 0)
    close(imitate(posterior, posterior), 0)
    close(exact.value(posterior, leaves), 1)
    close(reinforce(posterior), 0)
    assert np.abs(reinforce(expert)).max() > 0.02 and np.abs(imitate(expert, posterior)).max() > 0.02
    other = table_of(jnp.asarray([0.0, 1, 0, 0, 0, 0, 0]), leaves, policy)  # one right answer only
    close(reinforce(other), 0)  # the verifier does not care which
    assert np.abs(imitate(other, posterior)).max() > 0.02  # an expert does: its modes are to be covered


# --- the experiment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", EXPERIMENT.tiers)
def test_the_arms_are_forks_that_see_as_many_samples(tier):
    cfg = EXPERIMENT.tiers[tier].config
    stages = {stage.name: stage for stage in sft_is_rl.stages(cfg, {})}
    topological(list(stages.values()))
    own = [stages[arm] for arm in (*sft_is_rl.OWN, "coin")]
    assert all(stage.config == own[0].config and stage.stream == own[0].stream for stage in own)  # one compilation
    for arm in (*sft_is_rl.EXPERT, *sft_is_rl.OWN, "coin"):
        assert stages[arm].after == "start" and stages[arm].steps == cfg.updates
    batch = {stages[arm].config.batch for arm in sft_is_rl.EXPERT} | {cfg.prompts * cfg.group}
    assert len(batch) == 1
    assert stages["stale"].hyper["refresh"] >= cfg.updates and stages["stale"].hyper["row"] == stages["raft"].hyper["row"]
    assert "refresh" not in stages["raft"].hyper and own[0].config.refresh == 1


def fabricated(**final):
    """Curves of 8 seeds that end at the given successes; the start at 0.4."""
    given = {"start": 0.4, **final}
    return {f"{arm}/sampled_gold": np.full((8, 2), x) for arm, x in given.items()} | {"inputs/demonstrator": np.float64(0.6)}


def test_estimands():
    claims = {claim.name: claim for claim in EXPERIMENT.claims}
    curves = fabricated(sft=0.6, stale=0.65, raft=0.75, rloo=0.8, coin=0.2)
    expected = {
        "the_filter_goes_beyond_the_demonstrator": (0.15, 0.0), "filtered_imitation_is_rl": (0.35 - 0.32, 0.25 - 0.32),
        "samples_must_be_fresh": (0.1, -0.45), "negatives_matter": (0.05, -0.55),
    }
    for name, (estimate, control) in expected.items():
        np.testing.assert_allclose(claims[name].estimand(curves), np.full(8, estimate), atol=1e-12, err_msg=name)
        np.testing.assert_allclose(claims[name].control(curves), np.full(8, control), atol=1e-12, err_msg=name)
    assert sft_is_rl.demonstrator_success(CONFIG) == pytest.approx(0.596, abs=5e-4)


@pytest.mark.parametrize("field, value, sentence", [
    ("updates", 30, "--updates 30: expected a multiple of 20"),
    ("group", 0, "--group 0: expected at least 1"),
    ("stale_rate", float("nan"), "--stale-rate nan"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
