"""Episodes for one batch: P groups of G, and, where the row selects groups, further rounds until it is full."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpt.objectives.shaping import has_signal
from jaxpt.ops.masked import count
from jaxpt.types import Array, Metrics, Trajectory


def collect(draw: Callable, key: Array, group: int, rounds: Array | None, total: Callable) -> tuple[Trajectory, Metrics]:
    """A batch, and metrics of everything that was generated for it.

    draw(key) -> Trajectory of P groups of `group` rows. rounds None: one draw. Otherwise groups whose rewards are
    all equal are replaced from further draws, at most `rounds` in all (1: every group stays); places that are
    still empty then have no trainable token. `total` sums over shards, each of which fills its own places.
    """

    def measured(key):
        traj = draw(key)
        return traj, episode_metrics(traj)

    if rounds is None:
        return measured(key)
    trajectory, metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measured, key))
    places = trajectory.reward.shape[0] // group

    def unfinished(loop):
        at, filled, *_ = loop
        return (at == 0) | ((at < rounds) & (total(jnp.sum(~filled)) > 0))

    def once(loop):
        at, filled, batch, metrics = loop
        fresh, more = measured(jax.random.fold_in(key, at))
        wanted = has_signal(fresh.reward, fresh.group)[::group] | (rounds <= 1)
        batch, filled = _fill(batch, filled, fresh, wanted, group)
        return at + 1, filled, batch, jax.tree.map(jnp.add, metrics, more)

    loop = (jnp.int32(0), jnp.zeros(places, bool), trajectory, metrics)
    at, _, batch, metrics = jax.lax.while_loop(unfinished, once, loop)
    batch = batch._replace(group=jnp.arange(places * group, dtype=batch.group.dtype) // group)
    return batch, {**metrics, "rounds": (at.astype(jnp.float32), jnp.float32(1))}


def _fill(batch: Trajectory, filled: Array, fresh: Trajectory, wanted: Array, group: int) -> tuple[Trajectory, Array]:
    """The wanted fresh groups in the empty places, both in order."""
    order = jnp.argsort(~wanted, stable=True)
    rank = jnp.cumsum(~filled) - 1
    takes = ~filled & (rank < jnp.sum(wanted))
    source = order[jnp.clip(rank, 0, wanted.size - 1)]

    def put(old, new):
        shape = (wanted.size, group, *old.shape[1:])
        chosen = takes.reshape(-1, *(1,) * old.ndim)
        return jnp.where(chosen, new.reshape(shape)[source], old.reshape(shape)).reshape(old.shape)

    return jax.tree.map(put, batch, fresh), filled | takes


def episode_metrics(traj: Trajectory) -> Metrics:
    """Means over episodes: reward, gold, response length (of wrong ones too), truncation, rows of groups with
    equal rewards. `generated`: tokens, of which only the sum means anything."""
    rows = jnp.float32(traj.reward.shape[0])
    length = count(traj.mask, axis=1)
    per_row = {
        "reward": traj.reward, "gold": traj.gold, "length": length, "truncated": traj.truncated.astype(jnp.float32),
        "no_signal": 1.0 - has_signal(traj.reward, traj.group),
    }
    wrong = (traj.gold <= 0).astype(jnp.float32)
    means = {name: (jnp.sum(x), rows) for name, x in per_row.items()}
    return {**means, "wrong_length": (jnp.sum(length * wrong), jnp.sum(wrong)), "generated": (jnp.sum(length), rows)}
