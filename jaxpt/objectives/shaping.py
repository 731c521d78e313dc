"""What happens to rewards and masks before any advantage: penalties, potentials, selection and filters."""

import chex
import jax.numpy as jnp

from jaxpt.objectives.value import gae
from jaxpt.ops.masked import group_extreme, keep
from jaxpt.types import Array, Trajectory


def soft_overlong(length: Array, max_length: float, buffer: float) -> Array:
    """0 up to max_length - buffer tokens, then linear down to -1 at max_length (Yu et al. 2025, eq. 13). [B] -> [B]"""
    over = length - (max_length - buffer)
    return -jnp.clip(over / jnp.maximum(buffer, 1e-6), 0.0, 1.0)  # buffer 0: a step behind max_length


def potential_based(potential: Array, mask: Array, gamma: float, final_potential: Array | None = None) -> Array:
    """gamma Phi(s_t+1) - Phi(s_t) for every decision: added to the rewards of single decisions it changes no policy's
    rank (Ng, Harada, Russell 1999, theorem 1), as its discounted sum is -Phi(s_0) whatever is decided.

    potential [B,T]: Phi of the state in which each decision is taken; read on the mask, of which every entry is a step.
    final_potential [B]: Phi behind the last step; 0 where the episode ends there, as the theorem needs. -> [B,T]
    """
    chex.assert_equal_shape([potential, mask])
    return gae(jnp.zeros_like(keep(potential, mask)), potential, mask, gamma, 0.0, final_potential)


def has_signal(reward: Array, group: Array) -> Array:
    """[B] bool: the finite rewards of the row's group are not all equal."""
    low, high = group_extreme(reward, group, jnp.isfinite(reward))
    rounding = 4 * jnp.finfo(jnp.float32).eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
    return high - low > rounding


def on_last_token(x: Array, mask: Array) -> Array:
    """x [B] at the last trainable token of each row, 0 elsewhere. -> [B,T]"""
    behind = jnp.cumsum((mask > 0)[:, ::-1], axis=1)[:, ::-1]
    return jnp.where((mask > 0) & (behind == 1), x[:, None], 0.0)


def without_overlong(traj: Trajectory, mask: Array, overlong_filter: float) -> Array:
    """The mask without truncated rows (Yu et al. 2025, section 3.4), where overlong_filter > 0."""
    return mask & ~(traj.truncated & (jnp.asarray(overlong_filter) > 0))[:, None]
