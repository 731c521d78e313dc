"""The parts a preference objective is made of, by kind: a function, its formula and its words.

Of pair i: s_i(x) the score of per-token values x, z_i the score of a response against the reference, c_i and r_i
the rewards of the chosen and the rejected response, d_i their margin. What `describe` prints is made of these pieces.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.objectives.parts import Part
from jaxpt.objectives.reduction import Totals
from jaxpt.ops.masked import bounded_exp, bounded_expm1, keep, masked_mean, masked_sum, stop
from jaxpt.types import Array

softplus = jax.nn.softplus
sigmoid = jax.nn.sigmoid
log_sigmoid = jax.nn.log_sigmoid


class Pairs(NamedTuple):
    chosen: Array  # [B] reward of the chosen response
    rejected: Array  # [B] reward of the rejected one
    margin: Array  # [B] chosen over rejected, by a rule of MARGINS


def log1mexp(x: Array, edge: float = 1e-10) -> Array:
    """log(1 - exp(x)) for x < 0 without cancellation, continued by its tangent from -edge on.

    A log-probability of exactly 0 (or, by rounding, above) then has a finite value and gradient.
    Maechler 2012, Accurately computing log(1 - exp(-|a|)).
    """
    inside = jnp.minimum(x, -edge)
    near = inside > -math.log(2.0)
    by_expm1 = jnp.log(-jnp.expm1(jnp.where(near, inside, -1.0)))
    by_log1p = jnp.log1p(-jnp.exp(jnp.where(near, -1.0, inside)))
    return jnp.where(near, by_expm1, by_log1p) - jnp.maximum(x + edge, 0.0) / edge


def _length_desensitised(x: Array, mask: Array, public: Array, *, ld_alpha: float) -> Array:
    place = jnp.cumsum(mask > 0, axis=1)  # 1 for the first token that counts
    return masked_sum(jnp.where(place <= public[:, None], x, ld_alpha * x), mask, axis=1)


SCORES = {  # x, mask [B,T], public [B]: tokens that the shorter response of the pair has -> [B]
    "sum": Part(
        lambda x, mask, public: masked_sum(x, mask, axis=1),
        "s_i(x) = sum_t m_it x_it", "sum over the response's tokens",
    ),
    "mean": Part(
        lambda x, mask, public: masked_mean(x, mask, axis=1),
        "s_i(x) = 1/n_i sum_t m_it x_it", "mean over the response's tokens",
    ),
    "length_desensitised": Part(
        _length_desensitised,
        "s_i(x) = sum_(t <= l_i) x_it + {ld_alpha} sum_(t > l_i) x_it, l_i = min(n_i chosen, n_i rejected)",
        "tokens beyond the length of the shorter response weigh less", ("ld_alpha",),
    ),
}
REFERENCES = {
    "none": Part(None, "z_i = s_i(logp)", "no reference"),
    "log_ratio": Part(None, "z_i = s_i(logp - ref_logp)", "log-ratio to the reference"),
}


SHAPES = {  # z [B] -> reward [B]: f'(u) of the divergence that holds the policy to the reference, u = exp(z)
    "log": Part(lambda z: z, "c_i, r_i = z_i of the chosen, of the rejected", "the score itself (reverse KL)"),
    "forward_kl": Part(
        lambda z: -bounded_expm1(-z),
        "c_i, r_i = 1 - exp(-z_i), linear below z_i = -20", "1 - 1/u (forward KL)",
    ),
    "js": Part(
        lambda z: math.log(2.0) - softplus(-z),
        "c_i, r_i = log(2 u_i / (1 + u_i)), u_i = exp(z_i)", "log(2u / (1 + u)) (Jensen-Shannon)",
    ),
    "alpha": Part(
        lambda z, *, alpha: -bounded_expm1(-alpha * z) / alpha,
        "c_i, r_i = (1 - exp(-{alpha} z_i)) / {alpha}, linear below {alpha} z_i = -20",
        "(1 - u^-alpha) / alpha (alpha divergence; alpha -> 0: reverse KL, 1: forward KL)", ("alpha",),
    ),
    "odds": Part(
        lambda z: z - log1mexp(z),
        "c_i, r_i = log(p_i / (1 - p_i)), p_i = exp(z_i)", "log-odds of the mean token probability",
    ),
}


def _quantiles(high: Array, low: Array, counts: Array) -> tuple[Array, Array]:
    """The k-th smallest of one minus the k-th smallest of the other, of those that count, and where there is a k-th."""
    there = jnp.arange(counts.shape[0]) < jnp.sum(counts)
    high, low = (keep(jnp.sort(keep(x, counts, jnp.inf)), there) for x in (high, low))
    return high - low, there


# rewards (chosen, rejected), scores between the two (under the policy, under the reference), which pairs count,
# all [B] -> (margin, where it counts) [B]
MARGINS = {
    "pair": Part(
        lambda rewards, between, counts: (rewards[0] - rewards[1], counts), "d_i = c_i - r_i", "within the pair"
    ),
    "quantile": Part(
        lambda rewards, between, counts: _quantiles(*between, counts),
        "d_i = i-th smallest of s(logp chosen) - s(logp rejected), minus i-th smallest of the same of ref_logp",
        "quantiles of the policy's log-ratio between the two responses over those of the reference's",
    ),
    "quantile_unpaired": Part(
        lambda rewards, between, counts: _quantiles(*rewards, counts),
        "d_i = i-th smallest c - i-th smallest r", "quantiles of the chosen rewards over those of the rejected",
    ),
}


def _conservative(pairs: Pairs, *, beta: float, label_smoothing: float) -> Array:
    h = beta * pairs.margin
    return (1 - label_smoothing) * softplus(-h) + label_smoothing * softplus(h)


def _robust(pairs: Pairs, *, beta: float, label_smoothing: float) -> Array:
    h = beta * pairs.margin
    return ((1 - label_smoothing) * softplus(-h) - label_smoothing * softplus(h)) / (1 - 2 * label_smoothing)


def _exo(pairs: Pairs, *, beta: float, label_smoothing: float) -> Array:
    h = beta * pairs.margin
    wins = sigmoid(h) * (log_sigmoid(h) - jnp.log1p(-label_smoothing))
    return wins + sigmoid(-h) * (log_sigmoid(-h) - jnp.log(label_smoothing))


def _nca(pairs: Pairs, *, beta: float) -> Array:
    chosen, rejected = beta * pairs.chosen, beta * pairs.rejected
    return softplus(-chosen) + 0.5 * softplus(chosen) + 0.5 * softplus(rejected)


def _discopop(pairs: Pairs, *, beta: float, tau: float) -> Array:
    h = beta * pairs.margin
    return sigmoid(-h / tau) * softplus(-h) + bounded_exp(log_sigmoid(h / tau) - h)  # exp(-h) alone overflows


LINKS = {  # Pairs -> loss [B]; the formula's first line is the loss, what follows says what stands in it
    "logistic": Part(
        lambda pairs, *, beta: softplus(-beta * pairs.margin), "-log sigmoid({beta} d_i)", "logistic", ("beta",)
    ),
    "conservative": Part(
        _conservative, "-(1 - {label_smoothing}) log sigmoid({beta} d_i) - {label_smoothing} log sigmoid(-{beta} d_i)",
        "logistic with smoothed labels; optimum at beta d = log((1 - e) / e)", ("beta", "label_smoothing"),
    ),
    "robust": Part(
        _robust,
        "[-(1 - {label_smoothing}) log sigmoid({beta} d_i) + {label_smoothing} log sigmoid(-{beta} d_i)]"
        " / (1 - 2 {label_smoothing})",
        "logistic, unbiased under labels flipped at the rate e < 1/2", ("beta", "label_smoothing"),
    ),
    "shifted_logistic": Part(
        lambda pairs, *, beta, gamma: softplus(gamma - beta * pairs.margin),
        "-log sigmoid({beta} d_i - {gamma})", "logistic with a target margin", ("beta", "gamma"),
    ),
    "weighted_logistic": Part(
        lambda pairs, *, lam: lam * softplus(-pairs.margin), "-{lam} log sigmoid(d_i)", "logistic, weighted", ("lam",)
    ),
    "positive_logistic": Part(
        lambda pairs, *, beta, lam: softplus(-beta * (pairs.margin - lam * jax.nn.relu(-pairs.chosen))),
        "-log sigmoid({beta} (d_i - {lam} max(0, -c_i)))",
        "logistic, with a penalty where the chosen response falls", ("beta", "lam"),
    ),
    "hinge": Part(
        lambda pairs, *, beta: jax.nn.relu(1 - beta * pairs.margin),
        "max(0, 1 - {beta} d_i)", "hinge of a scaled margin", ("beta",),
    ),
    "margin_hinge": Part(
        lambda pairs, *, delta: jax.nn.relu(delta - pairs.margin),
        "max(0, {delta} - d_i)", "hinge at a margin", ("delta",),
    ),
    "squared": Part(
        lambda pairs, *, tau: (pairs.margin - 1 / (2 * tau)) ** 2,
        "(d_i - 1/(2 {tau}))^2", "squared; optimum at d = 1/(2 tau)", ("tau",),
    ),
    "squared_each": Part(
        lambda pairs, *, eta: (pairs.chosen - eta / 2) ** 2 + (pairs.rejected + eta / 2) ** 2,
        "(c_i - {eta}/2)^2 + (r_i + {eta}/2)^2",
        "squared, each response to its own target: c = eta/2, r = -eta/2", ("eta",),
    ),
    "exo": Part(
        _exo, "KL((q_i, 1 - q_i) || (1 - {label_smoothing}, {label_smoothing}))\nq_i = sigmoid({beta} d_i)",
        "reverse KL to the smoothed label; optimum at beta d = log((1 - e) / e)", ("beta", "label_smoothing"),
    ),
    "nca": Part(
        _nca, "-log sigmoid({beta} c_i) - log sigmoid(-{beta} c_i)/2 - log sigmoid(-{beta} r_i)/2",
        "noise contrastive; optimum at beta c = log 2", ("beta",),
    ),
    "classifier": Part(
        lambda pairs, *, beta: softplus(-beta * pairs.chosen) + softplus(beta * pairs.rejected),
        "-log sigmoid({beta} c_i) - log sigmoid(-{beta} r_i)", "each response classified by itself", ("beta",),
    ),
    "apo_zero": Part(
        lambda pairs, *, beta: sigmoid(-beta * pairs.chosen) + sigmoid(beta * pairs.rejected),
        "1 - sigmoid({beta} c_i) + sigmoid({beta} r_i)", "chosen up, rejected down", ("beta",),
    ),
    "apo_down": Part(
        lambda pairs, *, beta: sigmoid(beta * pairs.chosen) + sigmoid(-beta * pairs.margin),
        "sigmoid({beta} c_i) + 1 - sigmoid({beta} d_i)", "chosen down, rejected further down", ("beta",),
    ),
    "discopop": Part(
        _discopop,
        "-(1 - a_i) log sigmoid({beta} d_i) + a_i exp(-{beta} d_i)\na_i = sigmoid({beta} d_i / {tau})",
        "logistic below 0, exponential above; rises within about |beta d| < 5 tau", ("beta", "tau"),
    ),
}


def _token_mean(logp: Array, mask: Array, totals: Totals) -> Array:
    return masked_sum(logp, mask, axis=1) * totals["pairs"] / jnp.maximum(totals["chosen_tokens"], 1.0)


TERMS = {  # logp and mask of the chosen responses [B,T], totals -> what is rewarded besides, [B]
    "none": Part(None, "", "nothing"),
    "nll_sum": Part(
        lambda logp, mask, totals: masked_sum(logp, mask, axis=1),
        "- {nll_coef} sum_t m_it logp_it of the chosen",
        "likelihood of the chosen response, tokens summed", ("nll_coef",),
    ),
    "nll_mean": Part(
        lambda logp, mask, totals: masked_mean(logp, mask, axis=1),
        "- {nll_coef}/n_i sum_t m_it logp_it of the chosen",
        "likelihood of the chosen response, mean over its tokens", ("nll_coef",),
    ),
    "nll_tokens": Part(
        _token_mean, "- {nll_coef} pairs/tokens sum_t m_it logp_it of the chosen",
        "likelihood of the chosen responses, mean over the batch's tokens", ("nll_coef",),
    ),
}


def _confidence(logp: tuple[Array, Array], masks: tuple[Array, Array], collisions: None) -> Array:
    chosen, rejected = (masked_mean(x, mask, axis=1) for x, mask in zip(logp, masks, strict=True))
    return stop(bounded_exp(chosen) * bounded_exp(rejected))


def _aligned(logp: tuple[Array, Array], masks: tuple[Array, Array], collisions: tuple[Array, Array]) -> Array:
    return _confidence(tuple(x - y for x, y in zip(logp, collisions, strict=True)), masks, None)


# of both responses: logp, masks, collisions (log sum_v pi(v)^2) [B,T] -> weight of the pair [B], a constant
WEIGHTS = {
    "none": Part(None, "", "every pair weighs the same"),
    "confidence": Part(
        _confidence, "w_i = sg(v_i of the chosen * v_i of the rejected), v_i = exp(1/n_i sum_t m_it logp_it)",
        "the policy's geometric mean probability of the pair's tokens",
    ),
    "aligned_confidence": Part(
        _aligned,
        "w_i = sg(v_i of the chosen * v_i of the rejected), v_i = exp(1/n_i sum_t m_it (logp_it - log sum_v pi(v)^2))",
        "the policy's mean probability of the pair's tokens over that of tokens it draws itself",
    ),
}
