"""One fixed batch for every family, on which rows are told apart, and a row's value and gradients there."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.objectives.families import FAMILIES, Arg
from jaxpt.objectives.row import Row
from jaxpt.types import Array, Trajectory, bare_trajectory

SIZES = {"B": 8, "T": 9, "K": 5, "V": 6}


def draw(family: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays for every argument of the family: masks with holes, one row (of two kept ones in K) with nothing kept."""
    rng = np.random.default_rng(seed)
    return {name: _values(arg, rng) for name, arg in FAMILIES[family].args.items()}


def _values(arg: Arg, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(SIZES[axis] for axis in arg.axes)
    if arg.kind == "mask":
        mask = rng.random(shape) < 0.8
        mask[0], mask[-1] = True, False
        return mask
    draws = {
        "logp": lambda: rng.normal(-1.2, 0.5, shape).clip(max=-0.01), "logits": lambda: rng.normal(0, 2, shape),
        "score": lambda: rng.normal(0, 1, shape), "advantage": lambda: rng.normal(0, 1, shape),
        "count": lambda: rng.random(shape), "label": lambda: (rng.random(shape) < 0.5) * 1.0,
        "token": lambda: rng.integers(0, SIZES["V"], shape), "length": lambda: rng.integers(1, 40, shape) * 1.0,
        "group": lambda: rng.integers(0, 2, shape),
    }
    values = draws[arg.kind]()
    return values if values.dtype.kind == "i" else np.float32(values)


class Case(NamedTuple):
    """A row's arguments on the batch of its family."""

    moving: dict[str, Array]  # what has a gradient, [B, ...]
    rows: dict[str, Array]  # what else belongs to single rows, [B, ...]
    shared: dict[str, Any]  # what every share of the batch is given whole


def probe_case(row: Row, reward_scale: float = 1.0) -> Case:
    """The row's arguments, with what its `prepare` makes of the whole batch; rewards of policy rows are scaled."""
    args = FAMILIES[row.family].args
    given, prepared = _policy(row, reward_scale) if row.family == "policy_loss" else _other(row)
    given = {name: x for name, x in given.items() if not args[name].optional or args[name].optional in row.needs}
    moves = lambda name, x: jnp.issubdtype(x.dtype, jnp.floating) and not args[name].constant  # noqa: E731
    of_rows = {name: x for name, x in prepared.items() if isinstance(x, jax.Array) and x.shape[:1] == (SIZES["B"],)}
    return Case(
        {name: x for name, x in given.items() if moves(name, x)},
        {name: x for name, x in given.items() if not moves(name, x)} | of_rows,
        {name: x for name, x in prepared.items() if name not in of_rows},
    )


def value_and_grads(row: Row, case: Case) -> tuple[Array, dict[str, Array]]:
    """What the row gives, and the gradients of (the sum of) it, by argument."""

    def loss(moving):
        out = row.loss(**{**case.rows, **moving}, **case.shared)
        value = out[0] if isinstance(out, tuple) else out
        return jnp.sum(value), value

    (_, value), grads = jax.value_and_grad(loss, has_aux=True)(case.moving)
    return value, grads


def probe(row: Row) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """`value_and_grads` on the family's batch."""
    return jax.device_get(jax.jit(lambda case: value_and_grads(row, case))(probe_case(row)))


def _other(row: Row) -> tuple[dict, dict]:
    batch = {name: jnp.asarray(x) for name, x in draw(row.family).items()}
    return batch, row.prepare(batch)


def policy_batch() -> tuple[Trajectory, dict[str, Array]]:
    """2 groups of 4 with everything that tells rows apart: lengths, masked slots, off-policy ratios."""
    rng = np.random.default_rng(0)
    B, T = SIZES["B"], SIZES["T"]
    length = np.array([4, 9, 6, 8, 5, 9, 7, 4])
    mask = (np.arange(T)[None] > 0) & (np.arange(T)[None] < length[:, None]) & (rng.random((B, T)) < 0.85)
    mask[:, 1] = True
    logp = rng.normal(-1.2, 0.5, (3, B, T)).clip(max=-0.01)
    logp[1:] = logp[0] + rng.normal(0, 0.5, (2, B, T))
    traj = bare_trajectory(
        jnp.zeros((B, T), jnp.int32), jnp.asarray(mask), reward=jnp.asarray([1.0, 0, 0, 1, 0, 0, 1, 0]),
        old_logp=jnp.asarray(logp[1], jnp.float32), group=jnp.arange(B) // 4, length=jnp.asarray(length),
    )
    turn, format_reward = (np.arange(T)[None] >= 4) & mask, np.arange(B) % 2 > 0
    traj = traj._replace(turn=jnp.asarray(turn, jnp.int32), parts=jnp.stack([traj.reward, jnp.float32(format_reward)], axis=1))
    stats = {"logp": logp[0], "ref_logp": logp[2], "entropy": -logp[0], "values": rng.random((B, T))}
    stats |= {"weights": rng.random((B, T)), "sampler_logp": logp[1] + rng.normal(0, 0.3, (B, T)) * (np.arange(B)[:, None] % 4 > 0)}
    stats |= {"vocab_kl": rng.random((B, T)), "baseline": np.arange(B) // 4 * 1.0, "anchor": (np.arange(B)[:, None] % 2) * turn}
    return traj, {name: jnp.asarray(x, jnp.int32 if name == "anchor" else jnp.float32) for name, x in stats.items()}


def _policy(row: Row, reward_scale: float) -> tuple[dict, dict]:
    traj, stats = policy_batch()
    traj = traj._replace(reward=reward_scale * traj.reward, parts=reward_scale * traj.parts)
    ready = row.prepare(traj, **{k: stats[k] for k in ("ref_logp", "values", "baseline", "anchor", "sampler_logp")})
    given = {name: {**stats, **ready, "old_logp": traj.old_logp}[name] for name in FAMILIES["policy_loss"].args}
    return given, {"totals": ready["totals"]}
