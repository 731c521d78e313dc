"""What happens to rewards and masks before any advantage: penalties, filters, and who gets the credit."""

import jax.numpy as jnp

from jaxpt.ops.masked import group_extreme, keep
from jaxpt.types import Array, Trajectory


def soft_overlong(length: Array, max_length: float, buffer: float) -> Array:
    """0 up to max_length - buffer tokens, then linear down to -1 at max_length (Yu et al. 2025, eq. 13). [B] -> [B]"""
    over = length - (max_length - buffer)
    return -jnp.clip(over / jnp.maximum(buffer, 1e-6), 0.0, 1.0)  # buffer 0: a step behind max_length


def has_signal(reward: Array, group: Array) -> Array:
    """[B] bool: the finite rewards of the row's group are not all equal."""
    low, high = group_extreme(reward, group, jnp.isfinite(reward))
    rounding = 4 * jnp.finfo(jnp.float32).eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
    return high - low > rounding


def on_last_token(x: Array, mask: Array) -> Array:
    """x [B] at the last trainable token of each row, 0 elsewhere. -> [B,T]"""
    behind = jnp.cumsum((mask > 0)[:, ::-1], axis=1)[:, ::-1]
    return jnp.where((mask > 0) & (behind == 1), x[:, None], 0.0)


def slots(credit: str, traj: Trajectory) -> Array:
    """[B,T]: which part of the episode a decision belongs to: 0, its turn, or its number among decisions."""
    mask = traj.mask > 0
    if credit == "trajectory":
        return jnp.zeros(mask.shape, jnp.int32)
    if credit == "turn":
        return jnp.where(mask, traj.turn, 0)
    return jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, 0).astype(jnp.int32)


def to_go(rewards: Array, mask: Array, slot: Array, places: int) -> tuple[Array, Array]:
    """Reward from the beginning of each slot to the end of the row, and which slots a row has.

    rewards, mask, slot [B,T] -> ([B,places], [B,places] bool). A reward that is not finite makes its row's
    slots, up to its own, not finite.
    """
    at = jnp.arange(mask.shape[0])[:, None], slot
    within = jnp.zeros((mask.shape[0], places), rewards.dtype).at[at].add(keep(rewards, mask))
    there = jnp.zeros(within.shape, bool).at[at].max(mask > 0)
    return jnp.cumsum(within[:, ::-1], axis=1)[:, ::-1], there


def without_overlong(traj: Trajectory, mask: Array, overlong_filter: float) -> Array:
    """The mask without truncated rows (Yu et al. 2025, section 3.4), where overlong_filter > 0."""
    return mask & ~(traj.truncated & (jnp.asarray(overlong_filter) > 0))[:, None]
