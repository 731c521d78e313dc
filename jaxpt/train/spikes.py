"""ZClip: gradients whose norm stands out from those before it are shortened (Kumar et al. 2025, arXiv:2504.02507)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpt.types import Array

DECAY = 0.97  # of the norms' mean and variance (Kumar et al. 2025, section 4)
FIRST = 25  # updates that only measure: their plain mean and variance are where the averages begin


class Norms(NamedTuple):
    """Of the gradient norms so far, as they were let through."""

    count: Array
    mean: Array
    variance: Array


def clip_by_z_score(threshold: float) -> optax.GradientTransformation:
    """A norm g of z = (g - mean) / std > threshold becomes mean + threshold^2 / z std ("reciprocal" clipping, equation 6):
    the further out, the less is left. The averages see the shortened norm. A gradient that is not finite is let through
    and leaves them as they are."""

    def update(updates, norms, params=None):
        g = optax.tree.norm(updates)
        std = jnp.sqrt(norms.variance)
        z = jnp.where(std > 0, (g - norms.mean) / jnp.where(std > 0, std, 1.0), 0.0)
        out = (norms.count >= FIRST) & (z > threshold) & jnp.isfinite(g)
        kept = jnp.where(out, norms.mean + threshold**2 / jnp.where(out, z, 1.0) * std, g)
        scale = jnp.where(out, kept / jnp.where(out, g, 1.0), 1.0)
        moved = measured(norms, kept)
        norms = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(g), new, old), moved, norms)
        return jax.tree.map(lambda x: scale.astype(x.dtype) * x, updates), norms

    return optax.GradientTransformation(lambda params: Norms(jnp.int32(0), jnp.float32(0), jnp.float32(0)), update)


def measured(norms: Norms, g: Array) -> Norms:
    """With one norm more: the plain mean and variance of the first FIRST (Welford 1962), exponential averages beyond."""
    count = norms.count + 1
    share = jnp.where(count <= FIRST, 1 / count, 1 - DECAY)
    mean = norms.mean + share * (g - norms.mean)
    spread = jnp.where(count <= FIRST, (g - norms.mean) * (g - mean), (g - mean) ** 2)
    return Norms(count, mean, norms.variance + share * (spread - norms.variance))
