"""Advantages of whole episodes, [B] -> [B], from the rewards of a group (rows with one value of `group`).

One contract for all that read rewards: a reward that is not finite is missing; its row gets 0 and takes no
part in its group's baseline (it still counts in the totals of a reduction, as a token or row of loss 0).
A group without signal (one scored member, or rewards equal up to float rounding) gets exactly 0.
Arithmetic is float32 (float64 stays), centred on a member of the group before any mean, so equal rewards
give exact zeros at any size and any value.
"""

import jax.numpy as jnp

from jaxpt.ops.masked import group_extreme, group_sum, keep, safe_div
from jaxpt.types import Array


def _positions(rewards: Array, group: Array) -> tuple[Array, Array, Array]:
    """Each reward's place in its group's range, centred: (u - mean u) with u in [0,1]; the range; n.

    All three are [B]; places are 0 in a group without signal.
    """
    rewards = rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32))
    scored = jnp.isfinite(rewards)
    low, high = group_extreme(rewards, group, scored)
    n = group_sum(jnp.ones_like(rewards), group, scored)
    rounding = 4 * jnp.finfo(rewards.dtype).eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
    signal = scored & (n > 1) & (high - low > rounding)
    spread = keep(high - low, signal)
    u = safe_div(keep(rewards - keep(low, signal), signal), spread)
    return keep(u - safe_div(group_sum(u, group, scored), n), signal), spread, n


def constant(rewards: Array, group: Array) -> Array:
    """A = 1: every kept token is to be repeated. Maximum likelihood as a policy gradient."""
    return jnp.ones_like(rewards, jnp.promote_types(rewards.dtype, jnp.float32))


def monte_carlo(rewards: Array, group: Array) -> Array:
    """A_i = r_i: no baseline (Williams 1992)."""
    rewards = rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32))
    return keep(rewards, jnp.isfinite(rewards))


def centred(rewards: Array, group: Array) -> Array:
    """A_i = r_i - mean of the group, the row itself included (Liu et al. 2025, arXiv 2503.20783, section 3.2)."""
    place, spread, _ = _positions(rewards, group)
    return place * spread


def leave_one_out(rewards: Array, group: Array) -> Array:
    """A_i = r_i - mean of the other members' rewards (Kool et al. 2019; Ahmadian et al. 2024, eq. 8).

    Equal to n / (n - 1) times the centred reward; the baseline does not depend on r_i.
    """
    place, spread, n = _positions(rewards, group)
    return place * spread * safe_div(n, n - 1)


def standardised(rewards: Array, group: Array, *, std_eps: float = 0.0, ddof: float = 1.0) -> Array:
    """A_i = (r_i - mean) / (std + std_eps) over the group (Shao et al. 2024, section 4.1.2).

    The paper leaves std's degrees of freedom open and names no eps; TRL, verl, OpenRLHF and Tunix all divide
    by n - 1. std_eps is in the units of the reward; 0 makes the result exactly invariant to affine maps.
    """
    place, spread, n = _positions(rewards, group)
    scored = jnp.isfinite(rewards)
    variance = safe_div(group_sum(place**2, group, scored), jnp.maximum(n - ddof, 0.0))
    std = jnp.sqrt(jnp.where(variance > 0, variance, 1.0))
    return safe_div(place * spread, std * spread + std_eps)
