"""Advantages of a batch on one scale: (advantages [B,T], rewards [B], group [B], mask [B,T], total) -> [B,T].

mask: tokens of scored rows that are trained on. rewards: of the whole row, read where it has such a token. `total`
sums a tree over the shards of the batch, so that statistics are the whole batch's on any number of devices.
"""

import jax.numpy as jnp

from jaxpt.objectives.shaping import has_signal
from jaxpt.objectives.value import whiten
from jaxpt.ops.masked import beyond_rounding, count, keep, masked_sum, safe_div
from jaxpt.types import Array


def tokens_whitened(advantages, rewards, group, mask, total, *, std_eps: float) -> Array:
    """Mean 0 and variance 1 over the tokens of the batch."""
    return whiten(advantages, mask, total, std_eps=std_eps)


def rows_whitened(advantages, rewards, group, mask, total, *, std_eps: float) -> Array:
    """Mean 0 and variance 1 over the rows of the batch, whose tokens share one advantage."""
    rows = jnp.any(mask, axis=1)
    of_row = keep(jnp.max(keep(advantages, mask, -jnp.inf), axis=1), rows)
    return keep(jnp.broadcast_to(whiten(of_row, rows, total, std_eps=std_eps)[:, None], mask.shape), mask)


def less_batch_mean(advantages, rewards, group, mask, total) -> Array:
    """Minus the mean reward of the batch's rows; each takes part in its own baseline."""
    rows = jnp.any(mask, axis=1)
    mean = safe_div(*total((masked_sum(rewards, rows), count(rows))))
    return keep(advantages - mean, mask)


def over_batch_deviation(advantages, rewards, group, mask, total, *, std_eps: float) -> Array:
    """Over the standard deviation, over n - 1, of the rewards of the batch's rows; 0 where they vary by rounding."""
    rows = jnp.any(mask, axis=1)
    n = total(count(rows))
    spread = _deviation(rewards, rows, n, total)
    return keep(safe_div(advantages, jnp.where(spread > 0, spread + std_eps, 0.0)), mask)


def over_share_with_signal(advantages, rewards, group, mask, total) -> Array:
    """Times rows / (rows of groups whose rewards differ): the other groups only dilute the mean."""
    rows = jnp.any(mask, axis=1)
    signal = rows & has_signal(jnp.where(rows, rewards, jnp.nan), group)
    return keep(advantages * safe_div(*total((count(rows), count(signal)))), mask)


def _deviation(x: Array, rows: Array, n: Array, total) -> Array:
    """Over n - 1; 0 for fewer than two rows, and where they differ by rounding alone."""
    mean = safe_div(total(masked_sum(x, rows)), n)
    squares, size = total((masked_sum((x - mean) ** 2, rows), masked_sum(x**2, rows)))
    varies = beyond_rounding(squares, size)
    return jnp.sqrt(jnp.where(varies, safe_div(jnp.where(varies, squares, 1.0), jnp.maximum(n - 1, 0.0)), 0.0))
