"""Where peers differ from each other, and where ours stands: each difference as a number on a small input."""

from types import SimpleNamespace

import cases_advantages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases_policy import SKYRL_AT, SAME
from wheels import Config

from jaxpt.objectives import get, kl
from jaxpt.objectives.reduction import totals_of
from jaxpt.types import bare_trajectory

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
CORE = "verl.trainer.ppo.core_algos"


def torch_of(peer, *arrays):
    torch = peer("torch")
    return [torch.tensor(np.asarray(x, np.float32)) for x in arrays]


def ours(row, rewards, group=None, **hyper):
    """Advantages [B] of rows of one token."""
    n = len(rewards)
    mask = jnp.ones((n, 1), bool)
    traj = bare_trajectory(
        jnp.zeros((n, 1), jnp.int32), mask, reward=jnp.float32(rewards), group=jnp.zeros(n, jnp.int32) if group is None else group
    )
    return np.asarray(get(row).prepare(traj, **hyper)["advantages"][:, 0])


def verl(peer, name, rewards, group, **more):
    core = peer(CORE)
    (rewards,) = torch_of(peer, rewards)
    return getattr(core, f"compute_{name}")(rewards[:, None], peer("torch").ones(len(rewards), 1), index=np.array(group), **more)[0][:, 0]


def test_the_constant_beside_the_deviation(peer):
    """Rewards 1e-4 apart: TRL's 1e-4 halves what verl's 1e-6 leaves whole."""
    rewards = [0.0, 1e-4, 0.0, 1e-4]
    trl, verls, none = (np.abs(ours(row, rewards)).max() for row in ("trl.grpo", "verl.grpo", "grpo_no_kl"))
    np.testing.assert_allclose(np.abs(verl(peer, "grpo_outcome_advantage", rewards, [0] * 4)).max(), verls, rtol=1e-4)
    assert trl < 0.4 * verls and 0.98 * none < verls < none


def test_equal_rewards_tell_nothing_except_by_rounding(peer):
    """Seven rewards of float32 0.3 have a mean one digit off, over a deviation of 0 plus 1e-9."""
    maker = peer("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    arrays = torch_of(peer, [0.3] * 7, np.ones((7, 1)), np.zeros((7, 1)), np.zeros(7))
    x = dict(zip(("untied", "m", "values", "group"), arrays, strict=True))
    theirs = cases_advantages.openrlhf(maker.compute_advantages_and_returns, x, "group_norm")["advantages"]
    assert float(theirs[0, 0]) == pytest.approx(0.898, abs=1e-3)
    for row in ("openrlhf.group_norm", "grpo", "trl.grpo", "verl.grpo"):
        np.testing.assert_array_equal(ours(row, [0.3] * 7), 0.0)


def test_a_group_of_one(peer):
    """verl gives its reward, but 0 in its vectorised leave-one-out; SkyRL's leave-one-out 0; Tunix NaN."""
    rewards, group = [0.7], [0]
    assert float(verl(peer, "grpo_outcome_advantage", rewards, group)[0]) == pytest.approx(0.7, rel=1e-5)
    assert float(verl(peer, "rloo_outcome_advantage", rewards, group)[0]) == pytest.approx(0.7)
    assert float(verl(peer, "rloo_vectorized_outcome_advantage", rewards, group)[0]) == 0
    skyrl = peer(SKYRL_AT).compute_rloo_outcome_advantage(*torch_of(peer, [[0.7]], [[1.0]]), index=np.array(group))[0]
    assert float(skyrl[0, 0]) == 0
    with np.errstate(all="ignore"):
        assert np.isnan(peer("tunix.rl.algo_core").compute_advantages(np.float32(rewards), 1)).all()
    expected = {"verl.grpo": 0.7, "verl.rloo": 0.7, "verl.rloo_vectorized": 0.0, "skyrl.rloo": 0.0, "grpo": 0.0, "rloo": 0.0}
    for row, value in expected.items():
        np.testing.assert_allclose(ours(row, rewards), value, rtol=1e-5)


def test_dr_grpo_over_the_padded_width(peer):
    """Two columns of padding halve verl's loss (and Tunix's); a budget does not see them."""
    core, common = peer(CORE), peer("tunix.rl.common")
    short, long = np.ones((2, 2), np.float32), np.pad(np.ones((2, 2), np.float32), ((0, 0), (0, 2)))
    for mask, expected in ((short, 1.0), (long, 0.5)):
        values = torch_of(peer, np.ones_like(mask), mask)
        assert float(core.agg_loss(*values, "seq-mean-token-sum-norm")) == expected
        assert float(common.aggregate_loss(jnp.ones_like(mask), jnp.asarray(mask), "sequence-mean-token-scale")) == expected
    for row, values in (("verl.dr_grpo", (-1.0, -0.5)), ("dr_grpo", (-0.5, -0.5)), ("trl.dr_grpo", (-0.5, -0.5))):
        hyper = {"max_length": 4.0} if "max_length" in get(row).hyper else {}
        for mask, expected in zip((short, long), values, strict=True):
            zero = jnp.zeros(mask.shape)
            got = get(row).loss(zero, zero, zero + 1, jnp.asarray(mask) > 0, totals=totals_of(jnp.asarray(mask)), **hyper)[0]
            np.testing.assert_allclose(got, expected)


def test_the_dead_zone_of_a_clamped_k3(peer):
    """4 nats below the reference verl, SkyRL and OpenRLHF no longer pull; the gradient is 1 - e^4."""
    for module, call in (
        (CORE, lambda m, l, f: m.kl_penalty(l, f, "k3")),
        (SKYRL_AT, lambda m, l, f: m.compute_approx_kl(l, f, None, "k3")),
        ("openrlhf.models.utils", lambda m, l, f: m.compute_approx_kl(l, f, kl_estimator="k3")),
    ):
        (logp, ref) = torch_of(peer, -5.0, -1.0)
        call(peer(module), logp.requires_grad_(), ref).backward()
        assert float(logp.grad) == 0
    slope = jax.grad(lambda logp: peer("tunix.rl.common").compute_kl_divergence(logp, jnp.float32(-1), "low_var_kl"))(jnp.float32(-5))
    np.testing.assert_allclose(slope, 1 - np.exp(4), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(kl.k3)(jnp.float32(-5), jnp.float32(-1)), 1 - np.exp(4), rtol=1e-5)


def test_gae_past_a_tool_token(peer):
    """Values .1, 9 (of the tool's token), .3, .2, a reward of 1 at the end, lam 0.9: the first token's advantage is
    0.758 where the tool's token is no step, 0.672 where it is one of value 0, 1.572 where its value counts."""
    values, mask, rewards = [[0.1, 9.0, 0.3, 0.2]], [[1.0, 0, 1, 1]], [[0.0, 0, 0, 1]]
    tensors = torch_of(peer, rewards, values, mask)
    raw = lambda call, **lam: float((call(*tensors, 1.0, **lam)[1] - tensors[1])[0, 0])  # returns are not whitened  # noqa: E731
    assert raw(peer(CORE).compute_gae_advantage_return, lam=0.9) == pytest.approx(0.758, abs=1e-3)
    assert raw(peer(SKYRL_AT).compute_gae_advantage_return, lambd=0.9) == pytest.approx(1.5722, abs=1e-3)
    maker = peer("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    openrlhf = maker.get_advantages_and_returns(None, tensors[1], tensors[0], tensors[2], 1.0, 0.9)[0]
    assert float(openrlhf[0, 0]) == pytest.approx(0.6722, abs=1e-3)
    traj = bare_trajectory(jnp.zeros((1, 4), jnp.int32), jnp.asarray(mask) > 0, reward=jnp.ones(1))
    for row, expected in (("verl.ppo", 0.758), ("tunix.ppo", 0.758), ("ppo", 0.758), ("openrlhf.ppo", 0.6722)):
        ready = get(row).prepare(traj, values=jnp.asarray(values), ref_logp=jnp.zeros((1, 4)), lam=0.9)
        np.testing.assert_allclose(ready["returns"][0, 0] - 0.1, expected, atol=1e-3)


def test_returns_past_a_tool_token(peer):
    """A reward behind a tool's token, discount 0.5: verl carries it over, SkyRL starts anew at the tool's token."""
    rewards, mask = torch_of(peer, [[0.0, 0, 1]], [[1.0, 0, 1]])
    verls = peer(CORE).compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=Config(gamma=0.5))[1]
    assert verls[0].tolist() == [0.5, 0, 1]
    skyrls = peer(SKYRL_AT).compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)[1]
    assert float(skyrls[0, 0]) == 0
    from jaxpt.objectives.value import gae

    ours = gae(jnp.float32(rewards.numpy()), jnp.zeros((1, 3)), jnp.asarray(mask.numpy()) > 0, 0.5, 1.0)
    np.testing.assert_allclose(ours[0], [0.5, 0, 1])


def test_ipo_by_sums_and_by_means(peer):
    """+2 nats over 10 tokens against -2 over 20, tau 0.1: 1.0 by sums, 22.09 by means."""
    chosen, rejected = np.full((1, 20), 0.2) * (np.arange(20) < 10), np.full((1, 20), -0.1)
    sums = torch_of(peer, [2.0], [-2.0], [0.0], [0.0])
    assert float(peer("openrlhf.models.loss").DPOLoss(0.1, ipo=True)(*sums)[0]) == pytest.approx(1.0)
    batch = {
        "chosen_logp": jnp.asarray(chosen), "rejected_logp": jnp.asarray(rejected), "ref_chosen_logp": jnp.zeros((1, 20)),
        "ref_rejected_logp": jnp.zeros((1, 20)), "chosen_mask": jnp.asarray(np.arange(20)[None] < 10),
        "rejected_mask": jnp.ones((1, 20), bool),
    }  # fmt: skip
    for row, expected in (("openrlhf.ipo", 1.0), ("ipo_sum", 1.0), ("trl.ipo", 22.09), ("ipo", 22.09)):
        np.testing.assert_allclose(get(row).loss(**batch, **get(row).prepare(batch))[0], expected, rtol=1e-4)


def test_the_cap_of_cispo(peer):
    """A ratio of e at eps_high 0.28: verl's weight is 1.28, TRL's 0.28."""
    (logp, old, mask) = torch_of(peer, [[0.0]], [[-1.0]], [[1.0]])
    config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info={})
    peer(CORE).compute_policy_loss_cispo(old, logp.requires_grad_(), mask, mask, "token-mean", config)[0].backward()
    assert float(logp.grad) == pytest.approx(-1.28)
    one = jnp.ones((1, 1))
    for row, hyper, weight in (("verl.cispo", {"eps_high": 0.28}, 1.28), ("trl.cispo", {"ratio_cap": 0.28}, 0.28)):
        loss = lambda logp, row=row, hyper=hyper: get(row).loss(logp, -one, one, one > 0, totals=totals_of(one), **hyper)[0]  # noqa: E731
        np.testing.assert_allclose(jax.grad(loss)(0 * one), -weight, rtol=1e-6)


def test_an_empty_row_is_counted_by_trl_alone(peer):
    core, mask = peer(CORE), [[1.0, 1.0], [0.0, 0.0]]
    assert float(core.agg_loss(*torch_of(peer, np.ones((2, 2)), mask), "seq-mean-token-mean")) == pytest.approx(1.0)
    zero, kept = jnp.zeros((2, 2)), jnp.asarray(mask) > 0
    for row, expected in (("trl.grpo", -0.5), ("verl.gspo", -1.0), ("skyrl.gspo", -0.5), ("grpo_no_kl", -1.0)):
        np.testing.assert_allclose(get(row).loss(zero, zero, zero + 1, kept, totals=totals_of(kept))[0], expected)


def test_the_ends_of_gkd(peer):
    """TRL's divergence jumps from about 0 to the whole KL at beta 1; ours is continuous, under two names."""
    call = peer("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    student, teacher = np.array([[[2.0, 0.0, -1.0]]]), np.array([[[0.0, 1.0, 0.5]]])
    near, end = (float(call(*torch_of(peer, student, teacher), beta=beta)) for beta in (0.999, 1))
    assert near < 0.01 * end
    batch = {"student_logits": jnp.asarray(student), "teacher_logits": jnp.asarray(teacher), "mask": jnp.ones((1, 1), bool)}
    of = lambda row, beta: float(get(row).loss(**batch, **get(row).prepare(batch), beta=beta)[0])  # noqa: E731
    assert of("jsd", 0.999) == pytest.approx(near, rel=1e-2) and of("jsd", 1.0) == pytest.approx(0, abs=1e-6)
    assert of("jsd_rescaled", 1.0) == pytest.approx(end, rel=1e-4) and of("jsd_rescaled", 0.999) == pytest.approx(end, rel=1e-2)


def test_the_odds_of_a_whole_response(peer):
    """Tunix's ORPO takes the odds of summed log-probabilities, TRL's those of their means: -10 and -20 over ten tokens."""
    trl = peer("trl.experimental.orpo.orpo_trainer").ORPOTrainer.odds_ratio_loss
    self = SimpleNamespace(beta=1.0, accelerator=SAME)
    assert -float(trl(self, *torch_of(peer, [-1.0], [-2.0]))[0]) == pytest.approx(0.2383, abs=1e-3)
    batch = {
        "chosen_logp": jnp.full((1, 10), -1.0), "rejected_logp": jnp.full((1, 10), -2.0), "chosen_mask": jnp.ones((1, 10), bool),
        "rejected_mask": jnp.ones((1, 10), bool),
    }  # fmt: skip
    of = lambda row: float(get(row).loss(**batch, **get(row).prepare(batch), lam=1.0, nll_coef=0.0)[0])  # noqa: E731
    assert of("trl.orpo") == pytest.approx(0.2383, abs=1e-3) and of("tunix.orpo") == pytest.approx(4.54e-5, rel=1e-2)


def test_covariances_of_scaled_advantages(peer):
    """SkyRL divides the advantages by the tokens before Clip-Cov compares covariances with a constant: nothing is left
    out any more."""
    module = peer(SKYRL_AT)
    logp, advantages, mask = torch_of(peer, [[0.0, -2.0, -2.0, 0.0]], [[2.0, -2.0, 2.0, -2.0]], np.ones((1, 4)))
    config = Config(eps_clip_low=0.2, eps_clip_high=0.2, clip_cov=Config(clip_ratio=1.0, clip_cov_lb=1.0, clip_cov_ub=5.0))
    shares = [
        module.compute_policy_loss_clip_cov(logp, logp, a, config, mask)[1]["clip_ratio"]
        for a in (advantages, module.apply_loss_reduction_to_advantages_minibatch(advantages, mask, "token_mean", 1, 4))
    ]
    assert shares == [0.5, 0.0]


def test_a_masked_nan(peer):
    """One NaN where nothing counts: verl's CISPO has a finite loss and a gradient of NaN; its row has neither."""
    nan = float("nan")
    logp, old, advantages, mask = torch_of(peer, [[-1.0, -1.0]], [[-1.0, nan]], [[1.0, 1.0]], [[1.0, 0.0]])
    config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={})
    loss = peer(CORE).compute_policy_loss_cispo(old, logp.requires_grad_(), advantages, mask, "token-mean", config)[0]
    loss.backward()
    assert np.isfinite(float(loss)) and np.isnan(logp.grad.numpy()).any()
    kept = jnp.asarray([[True, False]])
    ours = lambda logp: get("verl.cispo").loss(  # noqa: E731
        logp, jnp.asarray([[-1.0, nan]]), jnp.ones((1, 2)), kept, totals=totals_of(kept)
    )[0]
    np.testing.assert_allclose(jax.grad(ours)(jnp.asarray([[-1.0, nan]])), [[-1.0, 0.0]])
