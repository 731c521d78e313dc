"""Reductions of per-token losses [B,T] to one number, by denominators of the whole batch.

`totals` are computed once over the whole batch; a partial batch divides by the same totals, so the losses
of any partition of the rows add up (by sum or psum) to the loss of the whole.
"""

import jax.numpy as jnp

from jaxpt.ops.masked import count, masked_mean, masked_sum, safe_div
from jaxpt.types import Array

Totals = dict[str, Array]


def totals_of(mask: Array) -> Totals:
    """tokens: trainable tokens of the batch; rows: rows that have at least one. mask [B,T]."""
    return {"tokens": count(mask), "rows": jnp.sum(jnp.any(mask > 0, axis=1), dtype=jnp.float32)}


def token_mean(per_token: Array, mask: Array, totals: Totals) -> Array:
    """Every token weighs the same: sum over tokens / tokens of the batch."""
    return safe_div(masked_sum(per_token, mask), totals["tokens"])


def sequence_mean(per_token: Array, mask: Array, totals: Totals) -> Array:
    """Every row weighs the same: mean over its own tokens, then sum / rows of the batch."""
    return safe_div(jnp.sum(masked_mean(per_token, mask, axis=1)), totals["rows"])


def sequence_sum(per_token: Array, mask: Array, totals: Totals) -> Array:
    """The log-probability of a whole sequence: sum over tokens, then sum / rows of the batch."""
    return safe_div(masked_sum(per_token, mask), totals["rows"])


def budget_mean(per_token: Array, mask: Array, totals: Totals, *, max_length: float) -> Array:
    """A constant per row, whatever its length: sum over tokens / (rows x max_length) (Liu et al. 2025, section 3.2).

    max_length is the response budget in tokens, never the width to which a batch happens to be padded.
    """
    return safe_div(masked_sum(per_token, mask), totals["rows"] * max_length)
