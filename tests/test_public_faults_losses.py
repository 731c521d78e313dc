"""Faults that were reported of other libraries, as tests of ours: denominators, masks, ratios, KL. The wrong number of
each stands in the comment, with the report."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.objectives import ROWS, kl, ratios
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.reduction import totals_of
from jaxpt.train.estimators import EstimatorConfig
from jaxpt.types import bare_trajectory

ONES, NONE = jnp.ones, jnp.zeros


def loss_of(name, x, mask, totals=None, advantages=None, **changed):
    """The row's loss where the policy is the old one and a token's loss is -logp = x (score rows) or -A (ratio rows)."""
    x, mask = jnp.asarray(x, jnp.float32), jnp.asarray(mask, bool)
    advantages = ONES(x.shape) if advantages is None else jnp.broadcast_to(jnp.asarray(advantages, jnp.float32), x.shape)
    totals = totals_of(mask) if totals is None else totals
    return float(ROWS[name].loss(-x, -x, advantages, mask, totals=totals, **changed)[0])


def test_parts_are_weighed_by_their_tokens():
    """verl #906, #5625; SkyRL #925, #1296: means of means, 2 in place of 2.5 and 0.4 in place of 0.32; Tunix the same with
    the entropy bonus, 1.5 in place of 1.25."""
    x, mask = [[1.0, 9, 9], [3, 3, 3]], jnp.asarray([[1, 0, 0], [1, 1, 1]])
    first, second = (loss_of("sft", x, mask * part, totals_of(mask)) for part in (jnp.asarray([[1], [0]]), jnp.asarray([[0], [1]])))
    assert first + second == loss_of("sft", x, mask) == 2.5
    long = np.where(np.arange(900) < 100, 0.5, 0.3)[None].repeat(2, 0)
    long[1] = 0.3
    mask = np.array([[True] * 100 + [False] * 800, [True] * 900])
    shares = [loss_of("sft", long[k : k + 1], mask[k : k + 1], totals_of(jnp.asarray(mask))) for k in (0, 1)]
    assert sum(shares) == pytest.approx(0.32, rel=1e-5)
    mask, entropy = jnp.asarray([[1, 0, 0], [1, 1, 1]]), jnp.asarray([[2.0, 5, 5], [1, 1, 1]])
    flat = {"totals": totals_of(mask), "entropy_coef": 1.0}
    bonus = [
        ROWS["ppo"].loss(NONE((1, 3)), NONE((1, 3)), NONE((1, 3)), mask[k : k + 1], entropy=entropy[k : k + 1],
                         ref_logp=NONE((1, 3)), **flat)[0] for k in (0, 1)
    ]
    assert sum(bonus) == -1.25


def test_the_denominator_is_that_of_the_window():
    """TRL #5619, #6024: a loss of 1 a token, divided by the tokens of four steps at each of them; 0.5 in place of 1."""
    mask = jnp.ones((8, 10), bool)
    for step in range(4):
        window = mask[2 * step : 2 * step + 2]
        shares = [loss_of("dapo", NONE((1, 10)), row[None], totals_of(window), advantages=-1.0) for row in window]
        assert sum(shares) == pytest.approx(1.0)


def test_what_is_filtered_leaves_the_denominator_too():
    """TRL #6369: truncated tokens in the denominator alone, 0.833 in place of 1; prime-rl #674: padding, 0.6 in place of 1."""
    mask = np.ones((6, 5))
    reward = jnp.asarray([1.0, 0, 1, 0, 1, 0])
    traj = bare_trajectory(jnp.zeros((6, 5), jnp.int32), jnp.asarray(mask, bool), reward=reward, group=jnp.zeros(6, jnp.int32))
    ready = ROWS["dapo"].prepare(traj._replace(truncated=jnp.arange(6) == 5))
    unit = ROWS["dapo"].loss(NONE((6, 5)), NONE((6, 5)), -ONES((6, 5)), ready["mask"], totals=ready["totals"])[0]
    assert unit == 1 and ready["totals"]["tokens"] == 25
    assert loss_of("dapo", NONE((1, 5)), [[1, 1, 1, 0, 0]], advantages=-1.0) == 1


def test_rejected_tokens_stay_in_the_denominator_as_the_row_says():
    """verl #3915, slime #657: a choice that has to be stated. A correction's mask: 2/5. A mask of `prepare`: 2/2."""
    sampler = jnp.log(jnp.asarray([[1.0, 1.0, 0.1, 9.0, 0.05]]))
    rejected = loss_of("icepop", NONE((1, 5)), ONES((1, 5)), advantages=-1.0, sampler_logp=sampler)
    assert rejected == pytest.approx(0.4) and "stay in the denominators" in ROWS["icepop"].parts["correction"]
    assert loss_of("grpo_no_kl", NONE((1, 5)), [[1, 1, 0, 0, 0]], advantages=-1.0) == 1


def test_dr_grpo_divides_by_a_constant():
    """verl #3741: grows with the micro-batch, 2 in place of 0.5; TRL #3138: divided by the batch's tokens, 0.5 in place of
    0.25; verl and Tunix divide by the padded width."""
    mask = jnp.asarray([[1, 1, 0, 0]] * 4)
    shares = [loss_of("dr_grpo", NONE((1, 4)), mask[:1], totals_of(mask), -1.0, max_length=4.0) for _ in range(4)]
    assert sum(shares) == loss_of("dr_grpo", NONE((4, 4)), mask, None, -1.0, max_length=4.0) == 0.5
    for width in (6, 9):
        mask = np.arange(width)[None] < np.array([[2], [6]])
        assert loss_of("dr_grpo", NONE((2, width)), mask, None, [[1.0], [-1]], max_length=8.0) == 0.25


def test_grpo_is_zero_at_the_old_policy():
    """TRL #2995: the mean over the batch's tokens, 0.5 in place of 0."""
    assert loss_of("grpo_no_kl", NONE((2, 6)), np.arange(6)[None] < np.array([[2], [6]]), None, [[1.0], [-1]]) == 0


def test_garbage_at_masked_slots():
    """OpenRLHF #1240, verl #6349, SkyRL #1633: NaN; verl's cispo, clip_cov and kl_cov under token-mean: a finite loss with NaN
    gradients; OpenRLHF #1295: an infinite weight times a mask of 0."""
    mask, at = jnp.asarray([[True, True, False]]), lambda x: jnp.asarray([[-1.0, -2.0, x]])  # noqa: E731
    stats = {"ref_logp": at(np.nan), "entropy": at(np.inf), "sampler_logp": at(-np.inf)}
    names = ("cispo", "clip_cov", "kl_cov", "gspo", "gmpo", "sapo", "icepop", "grpo_tis", "grpo_sequence_mis", "top_entropy")

    @jax.jit
    @jax.value_and_grad
    def total(logp):
        given = lambda name: {k: x for k, x in stats.items() if k in ROWS[name].needs}  # noqa: E731
        loss = lambda name: ROWS[name].loss(logp, at(-np.inf), at(np.nan), mask, totals=totals_of(mask), **given(name))[0]  # noqa: E731
        return sum(map(loss, names))

    value, grad = total(at(np.nan))
    assert np.isfinite(value) and np.isfinite(grad).all() and grad[0, 2] == 0


def two_tokens(penalty, behaviour):
    """Expected gradient, by the first of two logits (1, 0), of a KL term alone towards (1/2, 1/2); samples of `behaviour`."""
    row = compose("", "", advantage="monte_carlo", ratio="token", surrogate="score", reduction="token_mean",
                  kl=Penalty(*penalty), hyper={"beta": 1.0})
    old = jnp.log(behaviour)[:, None]

    def loss(theta):
        logp = jax.nn.log_softmax(jnp.stack([theta, 0.0]))[:, None]
        one = lambda k: row.loss(  # noqa: E731
            logp[k : k + 1], old[k : k + 1], NONE((1, 1)), ONES((1, 1), bool), totals=totals_of(ONES((1, 1))),
            ref_logp=jnp.full((1, 1), jnp.log(0.5)),
        )[0]
        return behaviour[0] * one(0) + behaviour[1] * one(1)

    return float(jax.grad(loss)(1.0))


def test_whose_gradient_the_kl_is():
    """TRL #4967, verl #2953, slime #1004: k3 in the loss, 0.231 in place of 0.197; open-instruct #534 and Tunix's default: k1,
    0; OpenRLHF #1309, prime-rl #1391: k2 off-policy without the ratio, 0.137."""
    policy, other, right = jax.nn.softmax(jnp.asarray([1.0, 0.0])), jnp.asarray([0.9, 0.1]), 0.196612
    wrong = {("k3",): (policy, 0.231059), ("k1",): (policy, 0.0), ("k2",): (other, 0.137284)}
    for penalty, (behaviour, value) in wrong.items():
        assert two_tokens(penalty, behaviour) == pytest.approx(value, abs=1e-5)
    for penalty in (("k2",), ("k3", "k2"), ("k1", "k2"), ("k3", "score"), ("k3", "importance"), ("k1", "importance")):
        assert two_tokens(penalty, policy) == pytest.approx(right, abs=1e-5), penalty
    for penalty in (("k1", "score"), ("k3", "score"), ("k3", "importance"), ("k1", "importance")):
        assert two_tokens(penalty, other) == pytest.approx(right, abs=1e-5), penalty


def test_no_clamp_switches_the_kl_off_and_no_exp_overflows():
    """verl, SkyRL, OpenRLHF: k3 clamped at 10, gradient 0 in place of -53.6; TRL #3015, OpenRLHF #1160, SkyRL #1261: exp
    overflows before a clip, NaN in place of 0."""
    slope = jax.grad(lambda logp: kl.k3(logp, jnp.float32(0)))
    assert slope(-4.0) == pytest.approx(1 - math.exp(4), rel=1e-5) and np.isfinite(slope(-800.0)) and slope(-800.0) < -1e8
    one = ONES((1, 1), bool)
    clipped = lambda logp: ROWS["grpo_no_kl"].loss(logp, NONE((1, 1)), ONES((1, 1)), one, totals=totals_of(one))[0]  # noqa: E731
    assert jax.grad(clipped)(jnp.full((1, 1), 800.0)) == 0


def test_the_dual_clip_is_for_negative_advantages():
    """tianshou #433: for all of them, 3 in place of 1.1."""
    one, logp = ONES((1, 1), bool), jnp.full((1, 1), jnp.log(1.1))
    dual = lambda logp, a: -ROWS["ppo_dual_clip"].loss(  # noqa: E731
        logp, NONE((1, 1)), jnp.full((1, 1), a), one, totals=totals_of(one)
    )[0]
    assert dual(logp, 1.0) == pytest.approx(1.1) and dual(logp, -1.0) == pytest.approx(-1.1)
    assert dual(logp + 5, -1.0) == -3 and dual(logp + 5, 1.0) == pytest.approx(1.2)


def test_sequence_weights_multiply():
    """unsloth-zoo #870, TRL #5814: a sum of ratios, 2.01 in place of 1."""
    old, mask = jnp.asarray([[0.1, -0.1]]), ONES((1, 2), bool)
    np.testing.assert_allclose(ratios.sequence_truncated(old, mask, NONE((1, 2)), is_high=9.0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratios.sequence_ratio(old, NONE((1, 2)), mask), 1.0, rtol=1e-6)


def test_a_row_says_what_it_needs():
    """In place of an error from inside an operation on None."""
    one = ONES((1, 1), bool)
    for name, what in (("grpo", "ref_logp"), ("top_entropy", "entropy"), ("icepop", "sampler_logp"),
                       ("grpo_token_weights", "weights"), ("dapo_prompt_mean", "prompt_tokens")):
        with pytest.raises(TypeError, match=f"row '{name}' needs {what}"):
            ROWS[name].loss(*[NONE((1, 1))] * 3, one, totals=totals_of(one))
    with pytest.raises(ValueError, match="'icepop' needs sampler_logp, which this program does not compute"):
        EstimatorConfig(objectives=("icepop",))
