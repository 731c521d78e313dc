"""Distillation: how far a student's distribution over the next token is from a teacher's, as rows.

The texts may be given, the teacher's or the student's own; that is the data's affair, not the loss's.
    offline             forward_kl or kd on given texts; sequence_kd (supervised.py) on texts of the teacher
    on-policy           reverse_kl or jsd on texts of the student, over the whole vocabulary; `opd` on its sampled
                        tokens alone
    self-distillation   any of these, where the teacher is the student's own weights (frozen, or an average) that
                        read more: the solution, a rule, a longer prompt. Only the teacher's logits differ, so there
                        is no row for it.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.reduction import token_mean, totals_of
from jaxpt.objectives.row import Row, replaced
from jaxpt.ops.logprobs import centred
from jaxpt.ops.masked import at_least_float32, keep, safe_div, stop, weighed
from jaxpt.types import Array


class Distribution(NamedTuple):
    """Over the last axis. An entry that is not `there` (logit -inf) has probability 0 and enters no arithmetic."""

    p: Array
    logp: Array  # 0 where there is no entry
    there: Array


def distribution(logits: Array) -> Distribution:
    """softmax over the last axis; of nothing, where all logits are -inf, every probability is 0."""
    there = logits > -jnp.inf
    logits, _ = centred(jnp.where(jnp.any(there, axis=-1, keepdims=True), logits, 0.0))
    logp = jnp.where(there, logits, 0.0) - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return Distribution(jnp.where(there, jnp.exp(logp), 0.0), logp, there)


# --- divergences: distributions over the last axis in, [...] in nats out


def kl_to_mixture(q: Distribution, p: Distribution, share: float) -> Array:
    """KL(q || m) / share, m = share p + (1 - share) q. At share 1 it is KL(q || p), at share 0 it vanishes.

    The entries (m - q - q log(m / q)) / share add up to it, because m and q both sum to 1. None is negative, each
    is 0 exactly where p = q, and a series takes the place of the difference where it would cancel. +inf, with
    gradient 0, where share is 1 and q has an entry that p lacks.
    """
    share = jnp.asarray(share, q.p.dtype)
    lacking = q.there & ~p.there
    log_ratio = jnp.where(p.there & q.there, p.logp - q.logp, -200.0)
    growth = jnp.expm1(jnp.minimum(log_ratio, 60.0))  # p/q - 1; beyond, q is nothing beside p
    x = share * growth  # m/q - 1
    near, deep = jnp.abs(x) < 0.1, x < -0.5
    y = jnp.where(near, x, 0.0)
    close = q.p * growth * y * (1 / 2 - y * (1 / 3 - y * (1 / 4 - y * (1 / 5 - y * (1 / 6 - y / 7)))))
    deep_log = jnp.logaddexp(jnp.log1p(-share), jnp.log(share) + log_ratio)
    log_m = jnp.where(deep, deep_log, jnp.log1p(jnp.where(near | deep, 1.0, x)))  # log(m/q)
    apart = p.p - q.p - q.p * log_m / jnp.where(share > 0, share, 1.0)
    entries = jnp.where(q.there, jnp.where(near, close, apart), p.p)
    infinite = jnp.any(lacking, axis=-1) & (share == 1)
    return jnp.where(infinite, jnp.inf, jnp.sum(entries, axis=-1))


def forward_kl(s: Distribution, t: Distribution) -> Array:
    return kl_to_mixture(t, s, 1.0)


def reverse_kl(s: Distribution, t: Distribution) -> Array:
    return kl_to_mixture(s, t, 1.0)


def skew_kl(s: Distribution, t: Distribution, *, alpha: float) -> Array:
    return (1 - alpha) * kl_to_mixture(t, s, 1 - alpha)


def skew_reverse_kl(s: Distribution, t: Distribution, *, alpha: float) -> Array:
    return (1 - alpha) * kl_to_mixture(s, t, 1 - alpha)


def jsd_rescaled(s: Distribution, t: Distribution, *, beta: float) -> Array:
    """JSD_beta / (beta (1 - beta)): continuous on [0, 1], KL(t || s) at 0 and KL(s || t) at 1."""
    return kl_to_mixture(t, s, 1 - beta) + kl_to_mixture(s, t, beta)


def jsd(s: Distribution, t: Distribution, *, beta: float) -> Array:
    """beta KL(t || m) + (1 - beta) KL(s || m), m = beta t + (1 - beta) s: continuous on [0, 1], 0 at both ends.

    So it and its gradient fade with beta (1 - beta); the jump to a KL at the ends that some libraries have is none
    of this formula's. `jsd_rescaled` is what tends to the two KLs. At beta of (t, s) it is as at 1 - beta of (s, t).
    """
    inner = jnp.clip(beta, 1e-7, 1 - 1e-7)  # an infinite KL at an end has no weight there
    return beta * (1 - beta) * jsd_rescaled(s, t, beta=inner)


def tvd(s: Distribution, t: Distribution) -> Array:
    return 0.5 * jnp.sum(jnp.abs(t.p - s.p), axis=-1)


def alpha_divergence(s: Distribution, t: Distribution, *, alpha: float) -> Array:
    """(1 - sum_v t^alpha s^(1 - alpha)) / (alpha (1 - alpha)), alpha in [0, 1]: KL(s || t) at 0, KL(t || s) at 1.

    By entries, as kl_to_mixture: with base b, other o, u = log(o/b) and the other's exponent a, at most 1/2,
    (o - b - (b e^(a u) - b) / a) / (1 - a); where a u is small the excesses of both exponentials over their tangents
    stand for it, and a series for an excess that would cancel.
    """
    swap = jnp.asarray(alpha) < 0.5
    base, other = (jax.tree.map(lambda x, y: jnp.where(swap, x, y), *pair) for pair in ((s, t), (t, s)))
    a = jnp.asarray(jnp.where(swap, alpha, 1 - alpha), base.p.dtype)
    some = jnp.where(a > 0, a, 1.0)
    u = jnp.where(base.there & other.there, other.logp - base.logp, 0.0)

    def series(x):  # (e^x - 1 - x) / x^2, |x| < 0.1
        return 1 / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6))))

    near, slow = jnp.abs(u) < 0.1, jnp.abs(a * u) < 0.1
    whole = jnp.where(near, base.p * u**2 * series(jnp.where(near, u, 0.0)), other.p - base.p - base.p * u)
    flat = base.p * a * u**2 * series(jnp.where(slow, a * u, 0.0))
    geometric = jnp.exp(jnp.where(slow, 0.0, base.logp + a * u))
    apart = other.p - base.p - (geometric - base.p) / some
    both = jnp.where(slow, whole - flat, apart) / (1 - a)
    entries = jnp.where(base.there & other.there, both, other.p / (1 - a) + base.p / some)
    infinite = jnp.any(base.there & ~other.there, axis=-1) & (a == 0)
    return jnp.where(infinite, jnp.inf, jnp.sum(entries, axis=-1))


Pair = tuple[Distribution, Distribution]


def top_k_and_tail(s: Distribution, t: Distribution, k: float) -> tuple[Pair, Pair]:
    """((s, t) on the teacher's k likeliest entries, (s, t) of all the rest as one entry): what k cached
    log-probabilities and their sum can tell. Ties go to the smaller token."""
    rank = jnp.argsort(jnp.argsort(jnp.where(t.there, -t.logp, jnp.inf), axis=-1), axis=-1)
    head = rank < k

    def split(x: Distribution) -> Pair:
        kept, rest = x.there & head, x.there & ~head
        some = jnp.any(rest, axis=-1, keepdims=True)
        inside = jnp.where(some, jnp.where(rest, x.logp, -jnp.inf), 0.0)
        logp = jnp.where(some, jax.nn.logsumexp(inside, axis=-1, keepdims=True), 0.0)
        tail = Distribution(jnp.where(some, jnp.exp(logp), 0.0), logp, some)
        return Distribution(jnp.where(kept, x.p, 0.0), jnp.where(kept, x.logp, 0.0), kept), tail

    return tuple(zip(split(s), split(t)))


def top_k_forward_kl(s: Distribution, t: Distribution, *, k: float) -> Array:
    """KL(t || s) over k + 1 outcomes: at most the full one, and equal to it from k = V - 1 on."""
    return sum(forward_kl(*pair) for pair in top_k_and_tail(s, t, k))


def top_k_reverse_kl(s: Distribution, t: Distribution, *, k: float) -> Array:
    """KL(s || t) over k + 1 outcomes, the teacher's top k."""
    return sum(reverse_kl(*pair) for pair in top_k_and_tail(s, t, k))


# --- rows


def _row(
    name: str, paper: str, formula: str, divergence: Callable[..., Array], words: str, *,
    hyper: Mapping[str, float] | None = None, alias_of: str = "",
) -> Row:
    """The token mean of temperature^2 divergence(student, teacher) of logits / temperature (1 unless in hyper)."""
    hyper = dict(hyper or {})

    def prepare(batch, *, total=lambda tree: tree, **overrides) -> dict:
        return {"totals": total(totals_of(batch["mask"]))}

    def loss(student_logits, teacher_logits, mask, *, totals, **overrides):
        chex.assert_equal_shape([student_logits, teacher_logits])
        chex.assert_equal_shape_prefix([student_logits, mask], 2)
        constants = replaced(name, hyper, overrides)
        temperature = constants.pop("temperature") if "temperature" in hyper else 1.0

        def read(logits: Array) -> Distribution:
            return distribution(keep(at_least_float32(logits), mask[..., None]) / temperature)

        s, t = read(student_logits), read(stop(teacher_logits))
        per_token = temperature**2 * divergence(s, t, **constants)
        best = [jnp.argmax(jnp.where(x.there, x.logp, -jnp.inf), axis=-1) for x in (s, t)]
        metrics = {
            "divergence": weighed(per_token, mask),
            "agreement": weighed((best[0] == best[1]).astype(per_token.dtype), mask),
        }
        return token_mean(per_token, mask, totals), metrics

    return Row(
        name=name, family="distillation", paper=paper, formula=f"loss = 1/tokens sum_i sum_t m_it {formula}\n{WHERE}",
        needs=(), hyper=hyper, prepare=prepare, loss=loss, additive=True, claims=("additive",),
        parts={"divergence": words, "reduction": "every token weighs the same"}, alias_of=alias_of,
    )


def _opd() -> Row:
    """Its advantages are made of log-probabilities alone: rewards of the environment have no say and may be missing."""
    row = compose(
        "opd",
        "Lu & Thinking Machines Lab 2025, On-Policy Distillation: k1 to the teacher as a reward of each token, "
        "discount 0; in expectation over the student's tokens its gradient is that of reverse_kl",
        advantage="returns", ratio="none", surrogate="score", reduction="token_mean",
        kl=Penalty("k1", placement="reward"), hyper={"gamma": 0.0, "beta": 1.0}, claims=("additive",),
    )

    def prepare(traj, *, process=None, **given) -> dict:
        return row.prepare(traj._replace(reward=jnp.zeros_like(traj.reward)), **given)

    return row._replace(
        prepare=prepare,
        formula="loss = 1/tokens sum_i sum_t m_it [ -A_it logp_it ]\n"
        "A_it = sum_s>=t {gamma}^(s-t) {beta} (ref_logp_is - old_logp_is), ref: the teacher\n"
        "no reward of the environment",
        parts={**row.parts, "shaping": "no reward but the teacher's"},
    )


WHERE = "s, t: the student's and the teacher's distribution over the vocabulary at token it; no gradient into t"
HINTON = "Hinton, Vinyals, Dean 2015, arXiv 1503.02531, section 2"
GKD = "Agarwal et al. 2023, arXiv 2306.13649"
MINILLM = "Gu et al. 2023, arXiv 2306.08543"
DISTILLM = "Ko et al. 2024, arXiv 2402.03898, section 3.1"
JSD = "({beta} KL(t || m) + (1 - {beta}) KL(s || m)), m = {beta} t + (1 - {beta}) s"
TAIL = (
    "Anshumann et al. 2025, arXiv 2503.16870: the teacher's k likeliest tokens leave a rest that must be accounted "
    "for, here as one outcome; k is the size of the cache, 4 is no paper's"
)
HEAD = "over the teacher's {k} likeliest tokens and one outcome for all others"

ROWS = (
    _row(
        "forward_kl",
        f"{HINTON}, at temperature 1; on tokens, the word-level distillation of Kim & Rush 2016, arXiv 1606.07947, "
        "section 3.1, less the teacher's entropy",
        "KL(t || s)", forward_kl, "KL from the teacher, which covers what the teacher does",
    ),
    _row(
        "reverse_kl", f"{MINILLM}, section 2.1, of one state; {GKD}",
        "KL(s || t)", reverse_kl, "KL from the student, which avoids what the teacher does not do",
    ),
    _row(
        "minillm_single_step",
        f"{MINILLM}, section 2.2: the part of its gradient that is a function of the logits of one state; the rest "
        "is a policy gradient, see minillm_long_term",
        "KL(s || t)", reverse_kl, "KL from the student", alias_of="reverse_kl",
    ),
    _row(
        "kd", f"{HINTON}: the factor keeps the gradient's size whatever the temperature; 2 was best on its speech data",
        "{temperature}^2 KL(t || s), both at temperature {temperature}",
        forward_kl, "KL from the teacher at a temperature, times its square", hyper={"temperature": 2.0},
    ),
    _row(
        "jsd", f"{GKD}, section 2 (generalised JSD)",
        JSD, jsd, "generalised Jensen-Shannon divergence, 0 at both ends of beta", hyper={"beta": 0.5},
    ),
    _row(
        "gkd", f"{GKD}, section 3: the loss of GKD; what is left of it, the share of the student's own texts, is data",
        JSD, jsd, "generalised Jensen-Shannon divergence", hyper={"beta": 0.5}, alias_of="jsd",
    ),
    _row(
        "jsd_rescaled", f"{GKD}, section 2, divided by beta (1 - beta): the limits that it names become the ends",
        JSD.replace(", m", " / ({beta} (1 - {beta})), m"), jsd_rescaled,
        "Jensen-Shannon divergence between KL(t || s) at beta 0 and KL(s || t) at beta 1", hyper={"beta": 0.5},
    ),
    _row(
        "skew_kl", f"{DISTILLM} (SKL)", "KL(t || {alpha} t + (1 - {alpha}) s)", skew_kl,
        "KL from the teacher to a mixture with it, at most -log alpha", hyper={"alpha": 0.1},
    ),
    _row(
        "skew_reverse_kl", f"{DISTILLM} (SRKL)", "KL(s || (1 - {alpha}) t + {alpha} s)", skew_reverse_kl,
        "KL from the student to a mixture with it, at most -log alpha", hyper={"alpha": 0.1},
    ),
    _row(
        "tvd", "Wen et al. 2023, arXiv 2307.15190, section 3 (TVD, by steps)", "1/2 sum_v |t_v - s_v|", tvd,
        "total variation distance",
    ),
    _row(
        "alpha_divergence",
        "Minka 2005, Divergence measures and message passing, section 2; in distillation Wang et al. 2021, "
        "arXiv 2102.07954",
        "(1 - sum_v t_v^{alpha} s_v^(1 - {alpha})) / ({alpha} (1 - {alpha}))", alpha_divergence,
        "alpha divergence between KL(s || t) at 0 and KL(t || s) at 1", hyper={"alpha": 0.5},
    ),
    _row(
        "top_k_forward_kl", TAIL, f"KL(t || s) {HEAD}", top_k_forward_kl,
        "KL from the teacher over its top k and a tail", hyper={"k": 4.0},
    ),
    _row(
        "top_k_reverse_kl", TAIL, f"KL(s || t) {HEAD}", top_k_reverse_kl,
        "KL from the student over the teacher's top k and a tail", hyper={"k": 4.0},
    ),
    _opd(),
)


def minillm_long_term(old_logp: Array, teacher_logp: Array, mask: Array) -> Array:
    """Advantages of the other part of MiniLLM's gradient (Gu et al. 2023, arXiv 2306.08543, section 2.2, length
    normalisation): the mean of log t - log s over the sampled tokens behind this one. All [B,T]; no gradient.
    """
    worth = keep(at_least_float32(stop(teacher_logp)), mask) - keep(at_least_float32(stop(old_logp)), mask)
    decided = (mask > 0).astype(worth.dtype)
    to_go, left = (jnp.cumsum(x[:, ::-1], axis=1)[:, ::-1] - x for x in (worth, decided))
    return keep(safe_div(to_go, left), mask)


def annealed(step: Array, steps: float, start: float, end: float, decay: float) -> Array:
    """The weight of a loss after `step` of `steps` updates, from start to end exactly:

        end + (start - end) (decay^(step/steps) - decay) / (1 - decay)

    decay in (0, 1]; 1 is a straight line, small ones fall fast first. Constant behind the last step. Weighing start
    by decay^(step/steps) and end by the rest, as is sometimes written, ends at start decay + end (1 - decay).
    Distillation with weight w and reinforcement learning with 1 - w make a hand-over from one to the other.
    """
    progress = jnp.clip(step / steps, 0.0, 1.0)
    rate = jnp.log(jnp.asarray(decay, jnp.result_type(float)))
    curved = rate < -1e-4
    bent = jnp.expm1(rate * progress) / jnp.expm1(jnp.where(curved, rate, -1.0))
    return start + (end - start) * jnp.where(curved, bent, progress)
