"""Supervised objectives: maximum likelihood of given tokens.

`sft` is a row of the policy algebra and takes log-probabilities. The others take logits [B,T,V], whose index t
decides tokens[t], and differ by what one token's loss is. Where [B,T,V] would not fit, `chunked_cross_entropy` takes
what the logits are made of.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxpt.objectives.algebra import compose
from jaxpt.objectives.reduction import Totals, token_mean, totals_of
from jaxpt.objectives.row import Row, replaced
from jaxpt.ops.logprobs import centred, token_stats
from jaxpt.ops.masked import at_least_float32, keep, masked_sum, safe_div, stop, weighed
from jaxpt.types import Array, Metrics


class Decision(NamedTuple):
    """What a loss may know of a token and the distribution it is from. All [B,T]."""

    logp: Array  # of the token
    logsumexp: Array  # of the logits
    mean_logp: Array  # over the vocabulary; entries of logit -inf are none of it


# --- the loss of one token


def nll(x: Decision) -> Array:
    return -x.logp


def with_z_loss(x: Decision, *, z_coef: float) -> Array:
    return -x.logp + z_coef * x.logsumexp**2


def smoothed(x: Decision, *, smoothing: float) -> Array:
    return -(1 - smoothing) * x.logp - smoothing * x.mean_logp


def focal(x: Decision, *, gamma: float) -> Array:
    """gamma is 0 or at least 1: in between the slope at p = 1 is infinite."""
    missing = jnp.maximum(-jnp.expm1(x.logp), 0.0)  # 1 - p; logp may round to just above 0
    return missing**gamma * -x.logp


def dft(x: Decision) -> Array:
    p = stop(jnp.exp(x.logp))
    return p * -jnp.where(p > 0, x.logp, 0.0)


# --- rows


def _row(
    name: str, paper: str, formula: str, per_token: Callable[..., Array], words: str, *,
    weighted: bool = False, hyper: Mapping[str, float] | None = None, alias_of: str = "",
) -> Row:
    """The mean of per_token over the tokens, or over their weights."""
    hyper = dict(hyper or {})

    def prepare(batch, *, total=lambda tree: tree, **overrides) -> dict:
        sums = totals_of(batch["mask"])
        if weighted:
            sums["weights"] = masked_sum(at_least_float32(batch["weights"]), batch["mask"])
        return {"totals": total(sums)}

    def loss(logits, tokens, mask, weights=None, *, totals, **overrides):
        chex.assert_equal_shape([tokens, mask])
        chex.assert_equal_shape_prefix([logits, mask], 2)
        logits, tokens = keep(at_least_float32(logits), mask[..., None]), keep(tokens, mask)
        decision = _decision(logits, tokens)
        values = per_token(decision, **replaced(name, hyper, overrides))
        metrics = {
            "nll": weighed(nll(decision), mask),
            "accuracy": weighed((jnp.argmax(logits, axis=-1) == tokens).astype(values.dtype), mask),
        }
        if not weighted:
            return token_mean(values, mask, totals), metrics
        values = keep(stop(at_least_float32(weights)), mask) * values
        return safe_div(masked_sum(values, mask), totals["weights"]), metrics

    reduction = "1/weights sum_i sum_t m_it w_it" if weighted else "1/tokens sum_i sum_t m_it"
    where = WHERE + ("\nweights: sum of w_it over the tokens of the whole batch" if weighted else "")
    reduced = "every token weighs its own weight" if weighted else "every token weighs the same"
    return Row(
        name=name, family="supervised", paper=paper, formula=f"loss = {reduction} [ {formula} ]\n{where}",
        needs=("weights",) if weighted else (), hyper=hyper, prepare=prepare, loss=loss, additive=True,
        claims=("additive",), parts={"token": words, "reduction": reduced}, alias_of=alias_of,
    )


def _decision(logits: Array, tokens: Array) -> Decision:
    logits, top = centred(logits)
    there = logits > -jnp.inf
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    mean = jnp.sum(jnp.where(there, logits, 0.0), axis=-1) / jnp.sum(there, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return Decision(chosen - logsumexp, logsumexp + top, mean - logsumexp)


SFT = compose(
    "sft",
    "Ouyang et al. 2022, arXiv 2203.02155, section 3.5: maximum likelihood of the demonstrations' tokens; the score function with "
    "advantage 1",
    advantage="constant", ratio="none", surrogate="score", reduction="token_mean",
    claims=("additive",),
)

WHERE = "p_it = softmax(logits_it), y_it: the token"
CE = "-log p_it[y_it]"
ROWS = (
    SFT,
    _row(
        "cross_entropy",
        "maximum likelihood of the kept tokens, from logits (Bengio et al. 2003, A Neural Probabilistic Language Model)",
        CE, nll, "negative log-likelihood",
    ),
    _row(
        "sequence_kd",
        "Kim & Rush 2016, arXiv 1606.07947, section 3.2: the tokens are the teacher's own text, given the prompt",
        CE, nll, "negative log-likelihood", alias_of="cross_entropy",
    ),
    _row(
        "weighted_cross_entropy",
        "maximum likelihood of weighted tokens (of the prompt against the response in Huerta-Enochian & Ko 2024, "
        "arXiv 2401.13586; of the answer against the reasoning); with every weight 1 it is cross_entropy",
        CE, nll, "negative log-likelihood", weighted=True,
    ),
    _row(
        "z_loss", "Chowdhery et al. 2022, arXiv 2204.02311, section 5: an auxiliary 1e-4 log^2 Z of the softmax",
        f"{CE} + {{z_coef}} (log sum_v exp logits_itv)^2", with_z_loss,
        "negative log-likelihood plus the square of the log-normaliser", hyper={"z_coef": 1e-4},
    ),
    _row(
        "label_smoothing", "Szegedy et al. 2015, arXiv 1512.00567, section 7",
        "-(1 - {smoothing}) log p_it[y_it] - {smoothing}/V sum_v log p_it[v]", smoothed,
        "negative log-likelihood of the token mixed with a uniform one", hyper={"smoothing": 0.1},
    ),
    _row(
        "focal", "Lin et al. 2017, arXiv 1708.02002, eq. 4, with the gamma it found best",
        "-(1 - p_it[y_it])^{gamma} log p_it[y_it]", focal,
        "negative log-likelihood, less of it where the token is already likely", hyper={"gamma": 2.0},
    ),
    _row(
        "dft", "Wu et al. 2025, arXiv 2508.05629, section 3 (dynamic fine-tuning), by tokens",
        "-sg(p_it[y_it]) log p_it[y_it]", dft,
        "negative log-likelihood times the token's own probability, a constant",
    ),
)


# --- at the boundary


def from_labels(labels: Array, ignore: int = -100) -> tuple[Array, Array]:
    """Labels in the convention of PyTorch's cross entropy and of transformers (`ignore` where nothing is to be
    learned, labels[t] the token at t) as (tokens, mask), both [B,T]. Nothing decides index 0, so it is masked.

    A token is left out by its place, never by which one it is: an end of text that also pads is learned wherever
    it has a label.
    """
    mask = (labels != ignore).at[:, 0].set(False)
    return keep(labels, mask), mask


def chunked_cross_entropy(
    hidden: Array, W: Array, tokens: Array, mask: Array, *, totals: Totals, z_coef: float = 0.0, chunk: int = 1024,
) -> tuple[Array, Metrics]:
    """The rows cross_entropy (z_coef 0) and z_loss of logits[:, t] = hidden[:, t-1] @ W, which are never held.

    hidden [B,T,D], W [D,V], tokens and mask [B,T] (index 0, which nothing decides, is masked). The logits of `chunk`
    positions are there at a time, forward and backward: memory falls with it, and so does speed when it is small.
    """
    decides = jnp.pad(mask[:, 1:] > 0, ((0, 0), (0, 1)))
    stats = token_stats(
        keep(hidden, decides[..., None]), W, keep(tokens, mask), want=("logp", "logsumexp"), chunk=chunk
    )
    x = Decision(stats["logp"], stats["logsumexp"], jnp.zeros_like(stats["logp"]))
    return token_mean(with_z_loss(x, z_coef=z_coef), mask, totals), {"nll": weighed(nll(x), mask)}
