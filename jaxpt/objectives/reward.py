"""Reward models: losses of scores against comparisons, rankings and labels, and what is made of scores.

Scores are in nats: the sigmoid of a difference is the probability of being preferred, of a score that of being right.
"""

from collections.abc import Callable, Mapping

import chex
import jax
import jax.numpy as jnp

from jaxpt.objectives.reduction import Totals, sequence_sum, token_mean, totals_of
from jaxpt.objectives.row import Row, replaced
from jaxpt.objectives.shaping import on_last_token
from jaxpt.ops.masked import (
    at_least_float32, beyond_rounding, count, keep, less_mean, masked_sum, safe_div, stop, weighed,
)
from jaxpt.types import Array, Metrics

softplus, log_sigmoid = jax.nn.softplus, jax.nn.log_sigmoid


def _clean(x: Array, mask: Array) -> Array:
    return at_least_float32(keep(x, mask))


# --- two responses: chosen, rejected [B] -> [B]


def bradley_terry(chosen: Array, rejected: Array) -> Array:
    return softplus(rejected - chosen)


def bradley_terry_margin(chosen: Array, rejected: Array, margin: Array) -> Array:
    return softplus(rejected - chosen + margin)


def bradley_terry_centred(chosen: Array, rejected: Array, *, center_coef: float) -> Array:
    return softplus(rejected - chosen) + center_coef * (chosen + rejected) ** 2


def _pair(
    name: str, paper: str, formula: str, per_pair: Callable[..., Array], words: str, *,
    with_margin: bool = False, hyper: Mapping[str, float] | None = None,
) -> Row:
    """The mean of per_pair over the pairs."""
    hyper = dict(hyper or {})

    def prepare(batch, *, total=lambda tree: tree, **overrides) -> dict:
        return {"totals": total({"pairs": count(batch["mask"])})}

    def loss(chosen_score, rejected_score, mask, margin=None, *, totals, **overrides):
        scores = chosen_score, rejected_score, *((stop(margin),) if with_margin else ())
        chex.assert_equal_shape([*scores, mask])
        chosen, rejected, *margin = (_clean(x, mask) for x in scores)
        per_row = per_pair(chosen, rejected, *margin, **replaced(name, hyper, overrides))
        gap = chosen - rejected
        metrics = {"accuracy": weighed((gap > 0).astype(gap.dtype), mask), "gap": weighed(gap, mask)}
        return safe_div(masked_sum(per_row, mask), totals["pairs"]), metrics

    return Row(
        name=name, family="reward_pair", paper=paper, formula=f"loss = 1/pairs sum_i m_i [ {formula} ]\n{PAIR}",
        needs=("margin",) if with_margin else (), hyper=hyper, prepare=prepare, loss=loss, additive=True,
        claims=("additive",), parts={"pair": words, "reduction": "every pair weighs the same"},
    )


# --- candidates of one prompt, the best first: scores, mask [B,K] -> [B]


def plackett_luce(scores: Array, mask: Array) -> Array:
    """Minus the log-probability of the ranking: each candidate in turn is drawn from those that are left."""
    from_k_on = jnp.triu(jnp.ones((scores.shape[1],) * 2, bool))
    left = (mask > 0)[:, None, :] & from_k_on[None]  # [B,K,K]: k, j
    rivals = jnp.where(left, scores[:, None, :], -jnp.inf)
    rivals = jnp.where(mask[:, :, None] > 0, rivals, 0.0)  # where k is none, so that nothing is all -inf
    return masked_sum(jax.nn.logsumexp(rivals, axis=2) - scores, mask, axis=1)


def all_pairs(scores: Array, mask: Array) -> Array:
    """The mean of bradley_terry over the pairs of the prompt's candidates."""
    kept = mask > 0
    pairs = kept[:, :, None] & kept[:, None, :] & jnp.triu(jnp.ones((scores.shape[1],) * 2, bool), 1)[None]
    losses = bradley_terry(scores[:, :, None], scores[:, None, :])
    return safe_div(masked_sum(losses, pairs, axis=(1, 2)), count(pairs, axis=(1, 2)))


def _ranking(name: str, paper: str, formula: str, per_prompt: Callable[..., Array], words: str) -> Row:
    """The mean of per_prompt over the prompts that have at least two candidates: one alone is no ranking."""

    def comparable(mask: Array) -> Array:
        return jnp.sum(mask > 0, axis=1) > 1

    def prepare(batch, *, total=lambda tree: tree, **overrides) -> dict:
        return {"totals": total({"prompts": count(comparable(batch["mask"]))})}

    def loss(scores, mask, *, totals):
        chex.assert_equal_shape([scores, mask])
        scores, ranked = _clean(scores, mask), comparable(mask)
        best = jnp.argmax(jnp.where(mask > 0, scores, -jnp.inf), axis=1) == jnp.argmax(mask > 0, axis=1)
        value = safe_div(masked_sum(per_prompt(scores, mask), ranked), totals["prompts"])
        return value, {"accuracy": weighed(best.astype(scores.dtype), ranked)}

    return Row(
        name=name, family="reward_ranking", paper=paper, formula=f"loss = 1/prompts sum_i {formula}\n{RANKING}",
        needs=(), hyper={}, prepare=prepare, loss=loss, additive=True, claims=("additive",),
        parts={"ranking": words, "reduction": "every prompt with two candidates or more weighs the same"},
    )


# --- a score for every step: scores, labels [B,T] -> [B,T]


def log_loss(scores: Array, labels: Array) -> Array:
    return labels * softplus(-scores) + (1 - labels) * softplus(scores)


def squared_error(scores: Array, labels: Array) -> Array:
    return (scores - labels) ** 2


def _step(
    name: str, paper: str, formula: str, per_step: Callable[..., Array], words: str, *,
    reduction: Callable = token_mean, reduced: str = "every step weighs the same", last: bool = False,
) -> Row:
    """per_step, reduced over the kept steps, or over the last of each row."""

    def counted(mask: Array) -> Array:
        return on_last_token(jnp.ones(mask.shape[0]), mask) > 0 if last else mask > 0

    def prepare(batch, *, total=lambda tree: tree, **overrides) -> dict:
        return {"totals": total(totals_of(counted(batch["mask"])))}

    def loss(scores, labels, mask, *, totals):
        chex.assert_equal_shape([scores, labels, mask])
        mask = counted(mask)
        scores, labels = _clean(scores, mask), _clean(stop(labels), mask)
        right = ((scores > 0) == (labels > 0.5)).astype(scores.dtype)
        return reduction(per_step(scores, labels), mask, totals), {"accuracy": weighed(right, mask)}

    return Row(
        name=name, family="reward_step", paper=paper, formula=f"loss = {formula}\n{STEP}", needs=(), hyper={},
        prepare=prepare, loss=loss, additive=True, claims=("additive",),
        parts={"step": words, "reduction": reduced},
    )


PAIR = "c, r: scores of the chosen and the rejected response; pairs: of the whole batch"
RANKING = "s_i1, s_i2, ...: scores of the prompt's kept candidates, the best first; prompts: with two or more of them"
STEP = "s: score, y: label in [0, 1], m: the step is labelled; steps, rows: totals of the whole batch"
BT = "log(1 + exp(r_i - c_i))"
BCE = "[ -y log sigmoid(s) - (1 - y) log sigmoid(-s) ]"

SHEPHERD = "Wang et al. 2023, arXiv 2312.08935"

ROWS = (
    _pair(
        "bradley_terry",
        "Bradley & Terry 1952, Rank analysis of incomplete block designs; Ouyang et al. 2022, arXiv 2203.02155, eq. 1 "
        "at K = 2",
        BT, bradley_terry, "log-loss of the chosen being preferred",
    ),
    _pair(
        "bradley_terry_margin", "Touvron et al. 2023, arXiv 2307.09288, eq. 2; its margins are at least 0",
        "log(1 + exp(r_i - c_i + margin_i))", bradley_terry_margin,
        "log-loss of the chosen being preferred by more than the margin", with_margin=True,
    ),
    _pair(
        "bradley_terry_centred",
        "Eisenstein et al. 2023, arXiv 2312.09244: a square of the sum settles the constant that comparisons leave "
        "open; 0.01 as TRL recommends",
        f"{BT} + {{center_coef}} (c_i + r_i)^2", bradley_terry_centred,
        "log-loss of the chosen being preferred, and scores around 0", hyper={"center_coef": 0.01},
    ),
    _ranking(
        "plackett_luce",
        "Plackett 1975, The analysis of permutations; for reward models Zhu et al. 2023, arXiv 2301.11270, section 4",
        "sum_k [ log sum_j>=k exp(s_ij) - s_ik ]", plackett_luce, "log-loss of the whole ranking",
    ),
    _ranking(
        "all_pairs", "Ouyang et al. 2022, arXiv 2203.02155, eq. 1", "1/pairs_i sum_j<k log(1 + exp(s_ik - s_ij))",
        all_pairs, "log-loss of every pair of the ranking",
    ),
    _step(
        "orm",
        f"{SHEPHERD}, eq. 1 (outcome reward model): the score at the row's last step, the only one of an outcome model",
        f"1/rows sum_i {BCE} at the last step", log_loss, "log-loss of the outcome", last=True,
        reduced="every row weighs the same, at its last step",
    ),
    _step(
        "prm",
        "Lightman et al. 2023, arXiv 2305.20050, section 2.6 (process reward model): maximum likelihood of every "
        "step's label",
        f"1/steps sum_i sum_t m_it {BCE}", log_loss, "log-loss of every step",
    ),
    _step(
        "prm_sum", f"{SHEPHERD}, eq. 2: the steps of a solution are summed", f"1/rows sum_i sum_t m_it {BCE}",
        log_loss, "log-loss of every step", reduction=sequence_sum, reduced="steps of a row are summed",
    ),
    _step(
        "mse_reward", "Cobbe et al. 2021, arXiv 2110.14168: verifiers that regress on the label",
        "1/steps sum_i sum_t m_it (s - y)^2", squared_error, "squared error of every step",
    ),
)


# --- several attributes


def bradley_terry_heads(
    chosen: Array, rejected: Array, mask: Array, weights: Array, *, totals: Totals
) -> tuple[Array, Metrics]:
    """A vector of scores: sum over attributes h of weights[h] x the mean of bradley_terry over the pairs that were
    compared in h. For an attribute in which the rejected response is the better one, swap its scores.

    chosen, rejected, mask [B,H]; weights [H] >= 0; totals {"pairs": [H]}, count(mask, axis=0) of the whole batch.
    """
    chex.assert_equal_shape([chosen, rejected, mask])
    chosen, rejected = _clean(chosen, mask), _clean(rejected, mask)
    by_head = safe_div(masked_sum(bradley_terry(chosen, rejected), mask, axis=0), totals["pairs"])
    right = keep((chosen > rejected).astype(by_head.dtype), mask)
    return jnp.sum(stop(weights) * by_head), {"accuracy": weighed(right, mask)}


# --- scores of steps [B,T] -> log-probability [B] that the whole is right; 0 (certain) without any step


def product_of_steps(scores: Array, mask: Array) -> Array:
    """All steps are right, if each is by itself (Lightman et al. 2023, arXiv 2305.20050, section 2.6)."""
    return masked_sum(log_sigmoid(_clean(scores, mask)), mask, axis=1)


def weakest_step(scores: Array, mask: Array) -> Array:
    """As right as the weakest step (Wang et al. 2023, arXiv 2312.08935, section 3)."""
    logp = keep(log_sigmoid(_clean(scores, mask)), mask, jnp.inf)
    return keep(jnp.min(logp, axis=1), jnp.any(mask > 0, axis=1))


def last_step(scores: Array, mask: Array) -> Array:
    """As right as the last step, which has seen all others (Snell et al. 2024, arXiv 2408.03314)."""
    last = on_last_token(jnp.ones(mask.shape[0]), mask)
    return masked_sum(log_sigmoid(_clean(scores, last)), last, axis=1)


# --- scores of an ensemble's members [M,...] -> [...]


def ensemble_mean(scores: Array) -> Array:
    """The members' mean (Coste et al. 2023, arXiv 2310.02743, section 3)."""
    return jnp.mean(scores, axis=0)


def ensemble_min(scores: Array) -> Array:
    """The worst case, WCO (Coste et al. 2023, arXiv 2310.02743, section 3)."""
    return jnp.min(scores, axis=0)


def ensemble_between(scores: Array, *, gamma: float) -> Array:
    """gamma min + (1 - gamma) mean: between the mean (0) and the worst case (1)."""
    return gamma * jnp.min(scores, axis=0) + (1 - gamma) * jnp.mean(scores, axis=0)


def ensemble_uncertain(scores: Array, *, lam: float) -> Array:
    """mean - lam variance over M, UWO (Coste et al. 2023, arXiv 2310.02743, section 3; 0.5 for best of n, 0.1 for PPO).
    Unlike the others, it depends on the unit of the scores."""
    return jnp.mean(scores, axis=0) - lam * jnp.var(scores, axis=0)


# --- length


def length_residual(reward: Array, length: Array, mask: Array, total=lambda tree: tree) -> Array:
    """The reward less what a straight line through (length, reward) makes of the length: least squares over the rows
    that count, mean kept. So it neither rises nor falls with length on average; what quality and length have in
    common goes too. reward, length, mask [B]; `total` sums a tree over the shards of the batch. 0 off the mask.
    """
    reward, length = _clean(reward, mask), _clean(length, mask)
    n = total(count(mask))
    away = less_mean(less_mean(length, mask, n, total), mask, n, total)  # twice: a long sum's rounding error is no spread
    gain = less_mean(reward, mask, n, total)
    products, squares, size = total((jnp.sum(away * gain), jnp.sum(away**2), jnp.sum(length**2)))
    varies = beyond_rounding(squares, size)
    slope = jnp.where(varies, products / jnp.where(varies, squares, 1.0), 0.0)
    return keep(reward - slope * away, mask)
