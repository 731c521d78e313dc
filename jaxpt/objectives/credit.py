"""Who is compared with whom: the rewards of decisions [B,T] -> the advantage of every decision [B,T].

A credit cuts rows into slots (the response, its turns, its tokens), says what a slot is worth, and among which slots
its advantage is made: `of(worth, group)`, one of parts.ADVANTAGES, maps [N] to [N], where group is [N] labels or a
tuple of keys [N] that are the label together. A worth that is not finite is missing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpt.ops.masked import count, keep, safe_div
from jaxpt.types import Array, Trajectory

Of = Callable[[Array, Array | tuple[Array, ...]], Array]


def trajectory(of: Of, rewards: Array, traj: Trajectory) -> Array:
    """One advantage for the whole response, among the responses of the group."""
    mask = traj.mask > 0
    worth = jnp.where(jnp.any(mask, axis=1), jnp.sum(keep(rewards, mask), axis=1), jnp.nan)
    return jnp.broadcast_to(of(worth, traj.group)[:, None], mask.shape)


def turn(of: Of, rewards: Array, traj: Trajectory) -> Array:
    """One a turn: its reward to go, among the same turns of the rows that reach it."""
    return _same_slot(of, rewards, traj, _turns(traj))


def token(of: Of, rewards: Array, traj: Trajectory) -> Array:
    """One a token: its reward to go, among the same places of the rows that reach it."""
    return _same_slot(of, rewards, traj, jnp.maximum(jnp.cumsum(traj.mask > 0, axis=1) - 1, 0))


def steps(of: Of, rewards: Array, traj: Trajectory) -> Array:
    """Process supervision (Shao et al. 2024, section 4.1.3): the reward of each step, here of each turn, among all
    steps of the group; a token is worth the sum over its own step and those behind it."""
    slot = _turns(traj)
    within, there = _of_slots(rewards, traj.mask > 0, slot)
    there &= jnp.all(jnp.isfinite(within), axis=1, keepdims=True)  # a row of which a reward is missing is missing
    group = jnp.broadcast_to(traj.group[:, None], within.shape)
    made = of(jnp.where(there, within, jnp.nan).ravel(), (group.ravel(),)).reshape(within.shape)
    return jnp.take_along_axis(to_go(made, 1.0), slot, axis=1)


def anchor_state(
    of: Of, rewards: Array, traj: Trajectory, *, anchor: Array, gamma: float, step_weight: float
) -> Array:
    """The whole response's, plus step_weight times one a turn among the turns of the group, of any row, that begin
    in the same state, by discounted reward to go (Feng et al. 2025, arXiv 2505.10978, section 4).

    anchor [B,T] int: which state of the environment the decision's turn begins in; read on the mask. A state that
    no other turn begins in is a group of one.
    """
    mask, slot = traj.mask > 0, _turns(traj)
    within, there = _of_slots(rewards, mask, slot)
    lowest = jnp.iinfo(anchor.dtype).min
    state = jnp.full(slot.shape, lowest).at[_at(slot)].max(jnp.where(mask, anchor, lowest))
    group = jnp.broadcast_to(traj.group[:, None], state.shape)
    worth = jnp.where(there, to_go(within, gamma), jnp.nan)
    made = of(worth.ravel(), (group.ravel(), state.ravel())).reshape(worth.shape)
    return trajectory(of, rewards, traj) + step_weight * jnp.take_along_axis(made, slot, axis=1)


def channels(
    of: Of, rewards: Array, traj: Trajectory, *, outcome: Array, process: Array, total: Callable, path_weight: float
) -> Array:
    """Verified penalties beside the outcome, each normalised by its own tokens.

    The outcome's advantage at every token, plus path_weight times the verified reward of the turn at that turn's
    tokens, scaled by tokens / (tokens of turns that have one): in a token mean, each channel is then a mean over its
    own tokens, and neither fades as the other grows. outcome [B]; process [B,T]; a row without a reward gets 0.
    """
    mask, slot = traj.mask > 0, _turns(traj)
    scored = mask & jnp.isfinite(outcome)[:, None]
    verified, _ = _of_slots(process, mask, slot)
    path = keep(jnp.take_along_axis(verified, slot, axis=1), scored)
    tokens, of_path = total((count(mask), count(path != 0)))
    made = of(jnp.where(jnp.any(mask, axis=1), outcome, jnp.nan), traj.group)
    return made[:, None] + path_weight * safe_div(tokens, of_path) * path


def to_go(within: Array, gamma: float) -> Array:
    """sum_{q >= p} gamma^(q-p) x_q along the slots of a row, [B,P]. What is not finite makes all before it so."""

    def back(behind, x):
        behind = x + gamma * behind
        return behind, behind

    return jax.lax.scan(back, jnp.zeros_like(within[:, 0]), within.T, reverse=True)[1].T


def _same_slot(of: Of, rewards: Array, traj: Trajectory, slot: Array) -> Array:
    within, there = _of_slots(rewards, traj.mask > 0, slot)
    worth = jnp.where(there, to_go(within, 1.0), jnp.nan)
    made = jax.vmap(lambda worth: of(worth, traj.group), 1, 1)(worth)
    return jnp.take_along_axis(made, slot, axis=1)


def _of_slots(rewards: Array, mask: Array, slot: Array) -> tuple[Array, Array]:
    """Reward within each slot of a row and whether the row has it; there are as many slots as columns, [B,T]."""
    within = jnp.zeros(slot.shape, rewards.dtype).at[_at(slot)].add(keep(rewards, mask))
    return within, jnp.zeros(slot.shape, bool).at[_at(slot)].max(mask)


def _turns(traj: Trajectory) -> Array:
    return jnp.where(traj.mask > 0, traj.turn, 0)


def _at(slot: Array) -> tuple[Array, Array]:
    return jnp.arange(slot.shape[0])[:, None], slot
