"""Bonuses for what has been seen rarely: further rewards of single decisions, for `process`. Pure functions; what has
been seen is an argument."""

import jax
import jax.numpy as jnp

from jaxpt.ops.masked import count, keep, safe_div
from jaxpt.types import Array


def visits(state: Array, mask: Array, size: int) -> Array:
    """[size]: how often each state number in [0, size) occurs on the mask; numbers outside are not counted. [B,T]"""
    inside = (mask > 0) & (state >= 0) & (state < size)
    return jnp.zeros(size, jnp.float32).at[jnp.where(inside, state, 0)].add(inside.astype(jnp.float32))


def count_bonus(state: Array, mask: Array, seen: Array, coef: float) -> Array:
    """coef / sqrt(N(s)) (Strehl and Littman 2008; Bellemare et al. 2016, arXiv 1606.01868, eq. 6 without its offset).

    state, mask [B,T]; seen [S]: N by state number, the visits of this batch included or not as the caller counts. A
    state never seen gets coef, as one seen once. -> [B,T], 0 off the mask.
    """
    here = jnp.where(mask > 0, state, 0)
    return keep(coef * jax.lax.rsqrt(jnp.maximum(seen[here], 1.0)), mask)


def first_visit_bonus(state: Array, mask: Array, coef: float) -> Array:
    """coef at the first decision of a row in each state, 0 at its returns: what a row gathers is coef x its number of
    distinct states, and going round in circles earns nothing. state, mask [B,T] -> [B,T]"""
    kept = mask > 0
    before = jnp.tril(jnp.ones((state.shape[1],) * 2, bool), -1)[None]
    same = (state[:, :, None] == state[:, None, :]) & kept[:, None, :]
    return jnp.where(kept & ~jnp.any(same & before, axis=2), coef, 0.0)


def episodic_novelty(
    features: Array, mask: Array, neighbours: int, *, epsilon: float = 1e-3, constant: float = 1e-3
) -> Array:
    """1 / (sqrt(sum of K(f, f_j) over the nearest earlier decisions of the row) + constant), K = epsilon / (d^2 / d_m^2 +
    epsilon) (Badia et al. 2020, arXiv 2002.06038, eq. 2 and 3).

    d_m^2 is the mean of the squared distances that are summed, in place of the paper's running mean over episodes.
    features [B,T,F], mask [B,T]; neighbours: how many, those that exist. The first decision has none: 1 / constant.
    """
    kept = mask > 0
    x = jnp.where(kept[:, :, None], features, 0.0)
    square = jnp.sum((x[:, :, None, :] - x[:, None, :, :]) ** 2, axis=3)
    earlier = jnp.tril(jnp.ones((mask.shape[1],) * 2, bool), -1)[None] & kept[:, None, :]
    nearest = -jax.lax.top_k(-jnp.where(earlier, square, jnp.inf), min(neighbours, mask.shape[1]))[0]
    there = jnp.isfinite(nearest)
    nearest = keep(nearest, there)
    mean = safe_div(jnp.sum(nearest, axis=2), count(there, axis=2))
    kernel = epsilon / (safe_div(nearest, jnp.broadcast_to(mean[:, :, None], nearest.shape)) + epsilon)
    return keep(1.0 / (jnp.sqrt(jnp.sum(keep(kernel, there), axis=2)) + constant), kept)
