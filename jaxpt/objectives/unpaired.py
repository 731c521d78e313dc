"""Objectives of single responses that are desirable or not: one row each, in the spirit of preference.py.

    z_i = sum_t m_it (logp_it - ref_logp_it)     x reference point     x link     x reduction

The reference point is one number of the whole batch: `prepare` computes it without a gradient, and every share of
the batch uses the same. Rows without a kept token add nothing and are counted nowhere.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxpt.objectives.parts import Part, bind
from jaxpt.objectives.preference_algebra import given, kept
from jaxpt.objectives.row import Row
from jaxpt.ops.masked import keep, masked_sum, safe_div, stop, weighed
from jaxpt.types import Array

METRICS = ("desirable_reward", "undesirable_reward", "point")  # rewards without beta; the reference point
Batch = Mapping[str, Array]


def log_ratio(name: str, logp: Array, ref_logp: Array | None, mask: Array) -> Array:
    """z [B]: the response's log-probability over the reference's."""
    (logp,) = kept((logp,), (mask,))
    (ref_logp,) = given(name, "ref_logp", (ref_logp,), (mask,))
    return masked_sum(logp - ref_logp, mask, axis=1)


def _kinds(desirable: Array, mask: Array) -> tuple[Array, Array]:
    """Which rows count as desirable, as undesirable. [B] bool each."""
    there = jnp.any(mask > 0, axis=1)
    return there & (desirable > 0), there & ~(desirable > 0)


def _mismatched_kl(name: str, batch: Batch, total: Callable) -> Array:
    z = log_ratio(name, batch["kl_logp"], batch["kl_ref_logp"], batch["kl_mask"])
    there = jnp.any(batch["kl_mask"] > 0, axis=1)
    pooled = total((masked_sum(z, there), jnp.sum(there, dtype=jnp.float32)))
    return jnp.maximum(safe_div(*pooled), 0.0)


def _midpoint(name: str, batch: Batch, total: Callable) -> Array:
    z = log_ratio(name, batch["logp"], batch["ref_logp"], batch["mask"])
    kinds = _kinds(batch["desirable"], batch["mask"])
    pooled = total([(masked_sum(z, kind), jnp.sum(kind, dtype=jnp.float32)) for kind in kinds])
    there = sum((rows > 0).astype(jnp.float32) for _, rows in pooled)
    return safe_div(sum(safe_div(*kind) for kind in pooled), there)


def _zero(name: str, batch: Batch, total: Callable) -> Array:
    return jnp.zeros((), jnp.promote_types(batch["logp"].dtype, jnp.float32))


# row, whole batch, total -> reference point, in units of z
POINTS = {
    "none": Part(_zero, "p = 0", "no reference point"),
    "mismatched_kl": Part(
        _mismatched_kl, "p = max(0, mean of z over the batch's mismatched pairs), 0 where there are none",
        "KL to the reference, from responses behind prompts they were not written for",
    ),
    "midpoint": Part(
        _midpoint,
        "p = (mean z of the desirable + mean z of the undesirable)/2; the one mean where the other has no rows",
        "halfway between the mean rewards of the two kinds",
    ),
}


def _prospect(v: Array, desirable: Array, *, desirable_weight: float, undesirable_weight: float) -> Array:
    return jnp.where(desirable, desirable_weight, undesirable_weight) * jax.nn.sigmoid(-v)


# v [B]: how far the response stands on its right side of the reference point, desirable [B] -> loss [B]
LINKS = {
    "prospect": Part(
        _prospect,
        "w_i (1 - sigmoid(v_i))\nw_i = {desirable_weight} of the desirable, {undesirable_weight} of the others",
        "Kahneman-Tversky value: saturates on both sides", ("desirable_weight", "undesirable_weight"),
    ),
    "classifier": Part(lambda v, desirable: jax.nn.softplus(-v), "-log sigmoid(v_i)", "binary cross-entropy"),
}


def _rows(per_row: Array, kinds: tuple[Array, Array], totals: Mapping[str, Array]) -> Array:
    return safe_div(masked_sum(per_row, kinds[0] | kinds[1]), totals["desirable"] + totals["undesirable"])


def _kinds_apart(per_row: Array, kinds: tuple[Array, Array], totals: Mapping[str, Array]) -> Array:
    desirable = safe_div(masked_sum(per_row, kinds[0]), totals["desirable"])
    return desirable + safe_div(masked_sum(per_row, kinds[1]), totals["undesirable"])


REDUCTIONS = {
    "rows": Part(_rows, "1/rows sum_i", "every row weighs the same"),
    "kinds": Part(_kinds_apart, "sum over the kinds of 1/(rows of the kind) sum_i", "the two kinds weigh the same"),
}


def compose(
    name: str, paper: str, *, point: str, link: str, reduction: str, hyper: Mapping[str, float],
    claims: tuple[str, ...] = (),
) -> Row:
    """Joins named parts into a row. `hyper` must give the constants that the parts use, and beta."""
    beta = Part(
        None, "v_i = {beta} (z_i - p) of the desirable, {beta} (p - z_i) of the others", "log-ratio of the sums", ("beta",)
    )
    parts = {"reward": beta, "point": POINTS[point], "link": LINKS[link], "reduction": REDUCTIONS[reduction]}
    apply, constants_with = bind(name, parts, dict(hyper))
    kl = point == "mismatched_kl"

    def prepare(batch: Batch, *, total=lambda tree: tree, **overrides: float) -> dict:
        constants_with(overrides)
        counts = [jnp.sum(kind, dtype=jnp.float32) for kind in _kinds(batch["desirable"], batch["mask"])]
        totals = total(dict(zip(("desirable", "undesirable"), counts, strict=True)))
        return {"totals": totals, "point": stop(parts["point"].fn(name, batch, total))}

    def loss(
        logp, desirable, mask, *, totals, point, ref_logp=None, kl_logp=None, kl_ref_logp=None, kl_mask=None, **overrides
    ):  # kl_*: already in `point`
        constants = constants_with(overrides)
        z = log_ratio(name, logp, ref_logp, mask)
        kinds = _kinds(desirable, mask)
        v = jnp.where(kinds[0], 1.0, -1.0) * constants["beta"] * (z - stop(point))
        value = parts["reduction"].fn(apply("link", v, kinds[0], **constants), kinds, totals)
        there = kinds[0] | kinds[1]
        return value, {
            "desirable_reward": weighed(z, kinds[0]), "undesirable_reward": weighed(z, kinds[1]),
            "point": weighed(keep(jnp.zeros_like(z) + point, there), there),
        }

    per_row, *where = parts["link"].formula.split("\n")
    lines = [f"loss = {parts['reduction'].formula} [ {per_row} ]", *where, beta.formula, parts["point"].formula]
    return Row(
        name=name, family="unpaired", paper=paper,
        formula="\n".join([*lines, "z_i = sum_t m_it (logp_it - ref_logp_it)"]),
        needs=("logp", "ref_logp", *(("kl_logp",) * kl)), hyper=dict(hyper), prepare=prepare, loss=loss, additive=True,
        claims=("additive", *claims), parts={kind: part.words for kind, part in parts.items()},
    )


KTO = compose(
    "kto",
    "Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8; the KL from mismatched pairs as in section 4.1 (built by "
    "pairs.mismatched), over the whole batch; 0 where it has none, as in a batch of one row",
    point="mismatched_kl", link="prospect", reduction="rows",
    hyper={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}, claims=("monotone",),
)

BCO = compose(
    "bco",
    "Jung et al. 2024, arXiv 2404.04656, section 4: binary classifier with the reward shift, of this batch instead "
    "of a moving average; without the density ratio between the prompts of the two kinds",
    point="midpoint", link="classifier", reduction="kinds", hyper={"beta": 0.01}, claims=("monotone",),
)

ROWS = (KTO, BCO)
