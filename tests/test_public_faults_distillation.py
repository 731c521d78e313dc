"""Public faults of supervised, distillation and length losses, on their own small inputs: what was wrong, and jaxpt's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.objectives import distillation, lengths, reward, supervised

DISTILLATION = {row.name: row for row in distillation.ROWS}
S, Q = np.array([0.6, 0.4]), np.array([0.9, 0.1])  # a student and a teacher


@functools.partial(jax.jit, static_argnames="name")
def loss(student, teacher, mask, hyper, name):
    """Value, gradient into the student and metrics of a divergence."""
    row = DISTILLATION[name]
    of = lambda x: row.loss(x, teacher, mask, **row.prepare({"mask": mask}), **hyper)  # noqa: E731
    (value, metrics), grad = jax.value_and_grad(of, has_aux=True)(student)
    return value, grad, metrics


def divergence(name, s=S, t=Q, **hyper):
    """Of two probability vectors; entries of 0 are excluded ones."""
    with np.errstate(divide="ignore"):
        student, teacher = (np.log(np.asarray(x)).astype(np.float32)[None, None] for x in (s, t))
    value, grad, _ = loss(student, teacher, np.ones((1, 1), bool), DISTILLATION[name].hyper | hyper, name)
    return float(value), np.asarray(grad)[0, 0]


def kl(a, b):
    return float(np.sum(a * np.log(a / b)))


def cross_entropy(logits, tokens, mask):
    row = {row.name: row for row in supervised.ROWS}["cross_entropy"]
    return float(row.loss(logits, tokens, mask, **row.prepare({"mask": mask}))[0])


def of_logp(logp):
    """Logits [1,T,2] of which token 0 has the given log-probability."""
    return jnp.stack([jnp.asarray(logp), jnp.log1p(-jnp.exp(jnp.asarray(logp)))], axis=-1)[None]


def test_end_of_text_is_learned_where_it_also_pads():
    """TRL #4970, Megatron-Bridge #4660: a mask by token drops the end of text wherever it is the pad token."""
    eos = 0
    labels = jnp.asarray([[-100, 0, 0, eos, -100]])  # nll 1, 1 and 3; the pad behind is the same token
    logits = of_logp([-9.0, -1.0, -1.0, -3.0, -9.0])
    assert cross_entropy(logits, *supervised.from_labels(labels)) == pytest.approx(5 / 3)


def test_short_prompts_keep_all_their_tokens():
    """TRL #4719, #6006, #6478: completions cut at the longest prompt lose 6 of a short prompt's 9 tokens."""
    place = np.arange(12)[None]
    mask = jnp.asarray((place >= np.array([[9], [3]])) & (place < 12))
    student, teacher = np.zeros((2, 12, 3), np.float32), np.zeros((2, 12, 3), np.float32)
    teacher[..., 0] = 2.0
    value, grad, metrics = loss(student, teacher, mask, {}, "forward_kl")
    assert metrics["divergence"][1] == 9 + 3
    q = np.array([np.exp(2), 1, 1]) / (np.exp(2) + 2)
    np.testing.assert_allclose(value, kl(q, np.full(3, 1 / 3)), rtol=1e-5)
    assert (np.abs(np.asarray(grad)[1]).sum(-1) > 0).sum() == 9


@pytest.mark.parametrize("beta", [0.25, 0.9])
def test_the_mixture_of_jsd_is_weighted_as_its_terms(beta):
    """TRL #3043: swapped weights of the mixture are 0.110287 at beta 0.25; every symmetric test at 0.5 is blind to it."""
    right = beta * kl(Q, beta * Q + (1 - beta) * S) + (1 - beta) * kl(S, beta * Q + (1 - beta) * S)
    assert divergence("jsd", beta=beta)[0] == pytest.approx(right, rel=1e-4)
    assert beta != 0.25 or right == pytest.approx(0.0445515, rel=1e-5)


def test_the_ends_of_jsd_have_a_contract():
    """TRL #6780, ms-swift #10078: 0.00031 at beta .999 and a jump to 0.3112 at 1, or silently nothing there."""
    assert divergence("jsd", beta=0.999)[0] == pytest.approx(0.000310739, rel=1e-3)
    assert divergence("jsd", beta=1.0)[0] == 0  # no jump
    assert divergence("jsd_rescaled", beta=0.999)[0] == pytest.approx(0.000310739 / (0.999 * 0.001), rel=1e-3)
    assert divergence("jsd_rescaled", beta=1.0)[0] == pytest.approx(kl(S, Q), rel=1e-5) == pytest.approx(0.311239, rel=1e-5)


def test_a_truncated_kl_has_a_tail_and_a_gradient():
    """verl #7806: cut off after the top 1 and clamped at 0, the reverse KL is 0 and its gradient too."""
    value, grad = divergence("top_k_reverse_kl", k=1.0)
    assert value == pytest.approx(0.311239, rel=1e-5) and abs(grad).min() > 0.1


def test_top_k_without_its_tail_is_no_divergence():
    """verl #7855, #7856: the top 1 alone is 0.364919; of (S, T) equal but for their tails it may be negative."""
    assert Q[0] * np.log(Q[0] / S[0]) == pytest.approx(0.364919, rel=1e-5)
    assert divergence("top_k_forward_kl", k=1.0)[0] == pytest.approx(kl(Q, S)) == pytest.approx(0.226289, rel=1e-5)
    s, t = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    assert t[0] * np.log(t[0] / s[0]) < 0 < divergence("top_k_forward_kl", s, t, k=1.0)[0] < kl(t, s)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_vocabulary_padded_on_both_sides(beta):
    """TRL's GKD: 0 * (-inf + inf) is NaN in value and gradient, whatever beta."""
    s, t = np.array([0.6, 0.4, 0.0]), np.array([0.9, 0.1, 0.0])
    value, grad = divergence("jsd_rescaled", s, t, beta=beta)
    assert value == pytest.approx(divergence("jsd_rescaled", beta=beta)[0], rel=1e-5)
    assert np.isfinite(grad).all() and grad[2] == 0
    same, flat = divergence("jsd_rescaled", s, s, beta=beta)
    assert same == 0 and np.abs(flat).max() < 1e-7


def test_a_large_gap_of_scores_does_not_overflow():
    """OpenRLHF's LogExpLoss: log(1 + exp(89)) is inf in float32."""
    row = {row.name: row for row in reward.ROWS}["bradley_terry"]
    of = lambda c: row.loss(c, jnp.asarray([89.0]), jnp.ones(1), totals={"pairs": 1.0})[0]  # noqa: E731
    value, grad = jax.value_and_grad(of)(jnp.zeros(1))
    assert value == 89 and grad[0] == -1


def test_the_overlong_penalty_counts_tokens_and_has_a_floor():
    """Tunix's DAPO: 15 tokens of 60 characters, budget 20, buffer 10, cost -5; by tokens, -0.5; and never below -1."""
    row = {row.name: row for row in lengths.ROWS}["soft_overlong"]
    added = row.loss(jnp.asarray([15, 60, 10]), jnp.ones(3), max_length=20.0, buffer=10.0)
    np.testing.assert_allclose(added, [-0.5, -1.0, 0.0], rtol=1e-6)


def test_log_one_minus_p_keeps_its_digits_near_one():
    """TRL #1473 and others: log1p(-exp(x)) is -inf at x = -1e-9 in float32. Here 1 - p is read from the
    log-probability, and a focal weight of an almost certain token is not rounded to 0."""
    x = supervised.Decision(jnp.float32(-1e-9), jnp.float32(0), jnp.float32(0))
    assert float(supervised.focal(x, gamma=1.0)) == pytest.approx(1e-18, rel=1e-5)
