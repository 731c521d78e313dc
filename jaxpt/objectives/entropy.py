"""What the policy's entropy at a token decides: how much the token counts, and how large an entropy bonus is."""

import jax.numpy as jnp

from jaxpt.ops.masked import count, largest
from jaxpt.types import Array


def top_entropy(advantages: Array, mask: Array, entropy: Array, *, entropy_share: float) -> Array:
    """[B,T]: 1 for the entropy_share of the batch's tokens whose entropy is largest, 0 for the others."""
    return largest(entropy, mask, entropy_share * count(mask)).astype(advantages.dtype)


def entropy_advantage(
    advantages: Array, mask: Array, entropy: Array, *, entropy_gain: float, entropy_limit: float
) -> Array:
    """[B,T]: by what the advantage is multiplied so that min(entropy_gain H, |A| / entropy_limit) is added to it."""
    size = jnp.abs(advantages)
    there = size > 0
    added = jnp.minimum(entropy_gain * entropy / jnp.where(there, size, 1.0), 1.0 / entropy_limit)
    return 1.0 + jnp.where(there, jnp.sign(advantages) * added, 0.0)


def bonus_below_target(
    entropy_coef: float, *, entropy_target: float, entropy_step: float, entropy_last: float
) -> Array:
    """entropy_coef where the entropy of the batch before was at most entropy_target, 0 where it was above."""
    return jnp.where(jnp.asarray(entropy_last) <= entropy_target, entropy_coef, 0.0)


def adapted(coefficient: Array, entropy: Array, *, entropy_target: Array, entropy_step: Array) -> Array:
    """The controller of He et al. 2025 (arXiv 2505.22312, section 3.2.5): entropy_step up where the batch's mean
    entropy (nats) is below entropy_target, down where it is above, never below 0 (the floor of their code)."""
    return jnp.maximum(coefficient + entropy_step * jnp.sign(entropy_target - entropy), 0.0)
