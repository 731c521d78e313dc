"""The preference algebra: `compose` joins parts into a Row of pairs.

    objective = score of a response x reference x shape (divergence)      the reward of a response
              x margin, link                                              the loss of a pair
              (x weight of the pair, + further terms)

A pair counts when both of its responses have a token that is kept. A pair with an empty response (everything
truncated, say) compares nothing: it adds nothing, gets no gradient and stands in no denominator, so that the mean
of no tokens is never asked for. Masks may have holes; tokens are counted by the mask, never by position.
"""

from collections.abc import Mapping

import chex
import jax.numpy as jnp

from jaxpt.objectives import preference_parts as tables
from jaxpt.objectives.parts import Part, bind
from jaxpt.objectives.preference_parts import Pairs
from jaxpt.objectives.row import Row
from jaxpt.ops.masked import at_least_float32, count, keep, masked_sum, safe_div, stop, weighed
from jaxpt.types import Array

METRICS = ("chosen_reward", "rejected_reward", "accuracy")  # of pairs that count; rewards without beta


def compose(
    name: str,
    paper: str,
    *,
    link: str,
    score: str = "sum",
    reference: str = "log_ratio",
    shape: str = "log",
    margin: str = "pair",
    term: str = "none",
    weight: str = "none",
    hyper: Mapping[str, float],
    claims: tuple[str, ...] = (),
) -> Row:
    """Joins named parts into a row. `hyper` must give exactly the constants that the parts use.

    A margin of quantiles ranks the pairs of a batch: it goes with no term and no weight, and the row is not additive.
    """
    parts = {
        "score": tables.SCORES[score], "reference": tables.REFERENCES[reference], "shape": tables.SHAPES[shape],
        "margin": tables.MARGINS[margin], "link": tables.LINKS[link], "term": tables.TERMS[term],
        "weight": tables.WEIGHTS[weight],
    }
    additive = margin == "pair"
    if not additive and (term, weight) != ("none", "none"):
        raise ValueError(f"row {name!r}: quantiles are of no pair that a term or a weight could belong to")
    apply, constants_with = bind(name, parts, dict(hyper))
    needs = ["ref_logp"] * (reference != "none") + ["collision"] * (weight == "aligned_confidence")

    def scores(constants: dict, tokens: tuple[Array, Array], masks: tuple[Array, Array]) -> tuple[Array, Array]:
        """Per-token values of both responses [B,T] -> a score of each [B]."""
        public = jnp.minimum(*(count(mask, axis=1) for mask in masks))
        return tuple(apply("score", x, mask, public, **constants) for x, mask in zip(tokens, masks, strict=True))

    def prepare(batch: Mapping[str, Array], *, total=lambda tree: tree, **overrides: float) -> dict:
        constants_with(overrides)
        masks, whole = _of_pairs(batch["chosen_mask"], batch["rejected_mask"])
        pairs = jnp.sum(whole, dtype=jnp.float32)
        return {"totals": total({"pairs": pairs, "chosen_tokens": count(masks[0])})}

    def loss(
        chosen_logp, rejected_logp, chosen_mask, rejected_mask, *, totals,
        ref_chosen_logp=None, ref_rejected_logp=None, chosen_collision=None, rejected_collision=None, **overrides,
    ):
        constants = constants_with(overrides)
        masks, counts = _of_pairs(chosen_mask, rejected_mask)
        logp = kept((chosen_logp, rejected_logp), masks)
        fixed = {"ref_logp": (ref_chosen_logp, ref_rejected_logp), "collision": (chosen_collision, rejected_collision)}
        ref_logp, collisions = (given(name, need, x, masks) if need in needs else None for need, x in fixed.items())
        ratio = logp if ref_logp is None else tuple(x - ref for x, ref in zip(logp, ref_logp, strict=True))
        chosen, rejected = (apply("shape", z, **constants) for z in scores(constants, ratio, masks))
        between = [jnp.subtract(*scores(constants, x, masks)) for x in (logp, ref_logp) if margin == "quantile"]
        margins, at = parts["margin"].fn((chosen, rejected), between, counts)
        per_pair = apply("link", Pairs(chosen, rejected, margins), **constants)
        if weight != "none":
            per_pair = per_pair * parts["weight"].fn(logp, masks, collisions)
        if term != "none":
            per_pair = per_pair - constants["nll_coef"] * parts["term"].fn(logp[0], masks[0], totals)
        measured = (chosen, rejected, (chosen > rejected).astype(jnp.float32))
        metrics = {k: weighed(x, counts) for k, x in zip(METRICS, measured, strict=True)}
        return safe_div(masked_sum(per_pair, at), totals["pairs"]), metrics

    return Row(
        name=name, family="preference", paper=paper, formula=_formula(parts), needs=("logp", *needs), hyper=dict(hyper),
        prepare=prepare, loss=loss, additive=additive, claims=("additive",) * additive + claims,
        parts={kind: part.words for kind, part in parts.items()},
    )


def kept(values: tuple[Array, ...], masks: tuple[Array, ...]) -> tuple[Array, ...]:
    """Per-token values, at least float32, 0 where nothing is kept."""
    chex.assert_equal_shape_prefix([*values, *masks], 1)
    for x, mask in zip(values, masks, strict=True):
        chex.assert_equal_shape([x, mask])
    return tuple(keep(at_least_float32(x), mask) for x, mask in zip(values, masks, strict=True))


def given(name: str, need: str, values: tuple[Array | None, ...], masks: tuple[Array, ...]) -> tuple[Array, ...]:
    """Constants that the row cannot do without, kept by the masks."""
    if any(x is None for x in values):
        raise TypeError(f"row {name!r} needs the {need} of every response")
    return kept(stop(values), masks)


def _of_pairs(chosen_mask: Array, rejected_mask: Array) -> tuple[tuple[Array, Array], Array]:
    """The masks, empty where either response of the pair is, and [B] the pairs of which neither is."""
    whole = jnp.any(chosen_mask > 0, axis=1) & jnp.any(rejected_mask > 0, axis=1)
    return ((chosen_mask > 0) & whole[:, None], (rejected_mask > 0) & whole[:, None]), whole


def _formula(parts: Mapping[str, Part]) -> str:
    """The loss on the first line, what it is made of below."""
    link, *where = parts["link"].formula.split("\n")
    weighted = f"w_i ({link})" if parts["weight"].formula else link
    of_pair = " ".join(filter(None, (weighted, parts["term"].formula)))
    below = [parts[kind].formula for kind in ("weight", "margin", "shape", "reference", "score")]
    return "\n".join([f"loss = 1/pairs sum_i [ {of_pair} ]", *where, *filter(None, below)])
