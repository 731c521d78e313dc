"""Reductions of per-token losses [B,T] to one number, by denominators of the whole batch.

`totals` are computed once over the whole batch; a partial batch divides by the same totals, so the losses
of any partition of the rows add up (by sum or psum) to the loss of the whole.
"""

import jax.numpy as jnp

from jaxpt.ops.masked import count, group_sum, masked_mean, masked_sum, safe_div
from jaxpt.types import Array

Totals = dict[str, Array]


def totals_of(mask: Array, prompt_tokens: Array | None = None) -> Totals:
    """tokens: trainable tokens of the batch; rows: rows that have at least one; prompts: groups that have at least one;
    all_rows: with the empty ones.

    mask [B,T]; prompt_tokens [B] as of prompt_tokens_of, None where every row is a prompt of its own. The rows of a
    group stand together in what is counted here: a whole batch, a minibatch of whole groups, a shard of whole groups.
    """
    rows = jnp.sum(jnp.any(mask > 0, axis=1), dtype=jnp.float32)
    prompts = rows if prompt_tokens is None else jnp.round(jnp.sum(safe_div(count(mask, axis=1), prompt_tokens)))
    return {"tokens": count(mask), "rows": rows, "prompts": prompts, "all_rows": jnp.float32(mask.shape[0])}


def prompt_tokens_of(mask: Array, group: Array) -> Array:
    """[B]: trainable tokens of all rows that share the row's prompt. mask [B,T], group [B]."""
    tokens = count(mask, axis=1)
    return group_sum(tokens, group, jnp.ones_like(tokens))


def token_sum(per_token: Array, mask: Array, totals: Totals) -> Array:
    """No denominator: the step grows with the batch (a log-likelihood; the learning rate has to know)."""
    return masked_sum(per_token, mask)


def token_mean(per_token: Array, mask: Array, totals: Totals) -> Array:
    """Every token weighs the same: sum over tokens / tokens of the batch."""
    return safe_div(masked_sum(per_token, mask), totals["tokens"])


def sequence_mean(per_token: Array, mask: Array, totals: Totals) -> Array:
    """Every row weighs the same: mean over its own tokens, then sum / rows of the batch."""
    return safe_div(jnp.sum(masked_mean(per_token, mask, axis=1)), totals["rows"])


def sequence_sum(per_token: Array, mask: Array, totals: Totals) -> Array:
    """The log-probability of a whole sequence: sum over tokens, then sum / rows of the batch."""
    return safe_div(masked_sum(per_token, mask), totals["rows"])


def prompt_mean(per_token: Array, mask: Array, totals: Totals, prompt_tokens: Array) -> Array:
    """Every prompt weighs the same: mean over all tokens of its rows, then sum / prompts of the batch.

    prompt_tokens [B] belong to the rows and come from the whole batch, so rows of one prompt may be in several parts.
    """
    rows = masked_sum(per_token, mask, axis=1)
    return safe_div(jnp.sum(safe_div(rows, prompt_tokens)), totals["prompts"])


def budget_mean(per_token: Array, mask: Array, totals: Totals, *, max_length: float) -> Array:
    """A constant per row, whatever its length: sum over tokens / (rows x max_length) (Liu et al. 2025, section 3.2).

    max_length is the response budget in tokens, never the width to which a batch happens to be padded.
    """
    return safe_div(masked_sum(per_token, mask), totals["rows"] * max_length)
