"""What a comparison is: the batches, one case, how either side is run on all batches, and when they are equal.

Everything is float64 where the peer allows it, so that 1e-5 is a statement about formulas and not about rounding.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.objectives.reduction import prompt_tokens_of, totals_of
from jaxpt.objectives.row import Row
from jaxpt.types import bare_trajectory

N, G, P, T, V = 200, 4, 2, 6, 5  # batches, members of a group, groups, places, vocabulary
B = P * G
GROUP = np.arange(B) // G


class Case(NamedTuple):
    peer: str  # "package.module:qualified.name"
    mode: str  # which of its branches
    call: Callable[[Any, dict], Any]  # (the peer's function, one batch) -> what it gives
    ours: Callable[..., Any]  # (one batch, **constants) -> the same
    constants: dict[str, float] = {}  # of ours; the peer has the same, and each changes what comes out
    given: dict[str, float] = {}  # further constants, at an end of their range, where a small change is none
    wrt: tuple[str, ...] = ("logp",)  # what is differentiated; empty where the peer takes no gradient
    masks: str = "holes"  # of MASKS
    framework: str = "torch"
    dtype: str = "float64"  # float32 where the peer makes it that

    @property
    def id(self) -> str:
        package, _, function = self.peer.partition(":")
        return f"{package.split('.')[0]}:{function}[{self.mode}]"


# --- batches


def _masks(rng) -> dict[str, np.ndarray]:
    """holes: any, and in every third batch an empty row; rows: none is empty; full: no mask at all."""
    mask = rng.random((N, B, T)) < 0.75
    place = rng.integers(0, T, (N, B))
    rows = mask | (np.arange(T) == place[..., None])
    holes = rows & ~((np.arange(B)[:, None] == rng.integers(0, B, N)[:, None, None]) & (np.arange(N) % 3 == 0)[:, None, None])
    return {"holes": holes, "rows": rows, "full": np.ones_like(mask)}


@cache
def batches(masks: str) -> dict[str, np.ndarray]:
    """[N,...] of everything that a case may ask for. Ratios lie on both sides of every clip; in every tenth batch one
    token is 25 nats off."""
    rng = np.random.default_rng(0)
    mask = _masks(rng)[masks]
    old_logp = -0.05 - rng.exponential(1.0, (N, B, T))
    wide = np.where(rng.random((N, B, T)) < 0.1, 1.5, 0.3)
    logp, ref_logp = ((old_logp + wide * rng.normal(size=(N, B, T))).clip(max=-0.05) for _ in range(2))
    scale = np.where(np.arange(N) % 4 == 1, 1e-3, 1.0)[:, None]  # where an eps shows
    rewards = np.where(np.arange(N)[:, None] % 2, rng.normal(size=(N, B)), rng.random((N, B)) < 0.5) * scale
    last = mask & (np.cumsum(mask[..., ::-1], axis=-1)[..., ::-1] == 1)
    return {
        "mask": mask, "m": mask * 1.0, "logp": logp, "old_logp": old_logp, "ref_logp": ref_logp,
        "advantages": rng.normal(size=(N, B, T)), "advantage": rng.normal(size=(N, B)), "rewards": rewards,
        "last": last, "token_rewards": last * rewards[..., None],
        "untied": (0.1 + rng.random((N, B))) * scale, "values": rng.normal(size=(N, B, T)),
        "old_values": rng.normal(size=(N, B, T)), "returns": rng.normal(size=(N, B, T)),
        "baseline": rng.normal(size=(N, B)), "parts": rng.normal(size=(N, B, 2)) * scale[..., None],
        "logits": 2.0 * rng.normal(size=(N, B, T, V)), "teacher_logits": 2.0 * rng.normal(size=(N, B, T, V)),
        "tokens": rng.integers(0, V, (N, B, T)), "chosen_score": rng.normal(size=(N, B)),
        "rejected_score": rng.normal(size=(N, B)), "margin": rng.random((N, B)), "desirable": rng.random((N, B)) < 0.5,
        "rejected_logp": ref_logp[:, ::-1], "ref_rejected_logp": old_logp[:, ::-1], "rejected_mask": mask[:, ::-1],
        "collision": -rng.exponential(1.0, (N, B, T)), "group": np.broadcast_to(GROUP, (N, B)),
    }  # fmt: skip


@cache
def extreme() -> dict[str, np.ndarray]:
    """As with holes; in every tenth batch the first place of one row, if it counts, is 25 nats off its old self."""
    x = dict(batches("holes"))
    x["logp"], x["old_logp"], x["ref_logp"] = (x[k].copy() for k in ("logp", "old_logp", "ref_logp"))
    for n in range(0, N, 10):
        low, high = ("logp", "old_logp") if n % 20 else ("old_logp", "logp")
        x[low][n, n % B, 0], x[high][n, n % B, 0] = -25.5, -0.5
    return x


# --- both sides on all batches


def outcome(value) -> dict:
    """Of a loss with metrics, the loss."""
    return value if isinstance(value, dict) else {"value": value[0] if isinstance(value, tuple) else value}


def scalar(values: dict):
    """What is differentiated: arrays are weighed, so that no entry hides behind another."""
    total = 0.0
    for x in values.values():
        weights = np.cos(np.arange(np.prod(x.shape, dtype=int))).reshape(x.shape) if x.ndim else 1.0
        total = total + (x * type_of(x)(weights)).sum()
    return total


def type_of(x):
    if isinstance(x, (jax.Array, jax.core.Tracer)):
        return lambda w: jnp.asarray(w, x.dtype)
    import torch

    return lambda w: torch.as_tensor(w, dtype=x.dtype)


def jax_side(function: Callable[[dict], Any], x: dict, wrt: tuple[str, ...]):
    """(values, gradients) [N,...] of a function of one batch."""

    def one(batch):
        def loss(moving):
            values = outcome(function({**batch, **moving}))
            return scalar(values), values

        moving = {k: batch[k] for k in wrt}
        if not wrt:
            return loss({})[1], {}
        (_, values), grads = jax.value_and_grad(loss, has_aux=True)(moving)
        return values, grads

    return jax.vmap(one)(x)


class Tensors(dict):
    """One batch, whose arrays become tensors when they are asked for."""

    def __init__(self, x: dict, n: int):
        self.arrays, self.n = x, n

    def __missing__(self, key: str):
        import torch

        self[key] = torch.tensor(self.arrays[key][self.n])
        return self[key]


def torch_side(function: Callable[[dict], Any], x: dict, wrt: tuple[str, ...]):
    import torch

    torch.set_num_threads(1)  # more of them only wait for each other on batches of this size
    results = []
    for n in range(len(x["mask"])):
        batch = Tensors(x, n)
        for k in wrt:
            batch[k].requires_grad_()
        values = {k: torch.as_tensor(v) for k, v in outcome(function(batch)).items()}
        if wrt:
            scalar(values).backward()
        grads = {k: torch.zeros_like(batch[k]) if batch[k].grad is None else batch[k].grad for k in wrt}
        results.append(jax.tree.map(lambda t: t.detach().numpy(), (values, grads)))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def data(case: Case, batch_count: int = N) -> dict:
    x = extreme() if case.masks == "extreme" else batches(case.masks)
    floats = np.float64 if case.dtype == "float64" else np.float32
    return {k: v[:batch_count].astype(floats if v.dtype.kind == "f" else v.dtype, order="C") for k, v in x.items()}


def disagreement(case: Case, ours, theirs) -> float:
    """The largest error over batches, relative to the batch's largest entry; of a float32 sum, to its terms."""
    worst = 0.0
    weight = sum(np.abs(g).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(theirs[1])) if case.dtype == "float32" else 0.0
    for side, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert sorted(mine) == sorted(other)
        for key in other:
            a, b = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (mine[key], other[key]))
            assert a.shape == b.shape, (key, a.shape, b.shape)
            size = np.abs(b).max(1) + (0 if side else weight)
            error = np.abs(a - b).max(1)
            worst = max(worst, np.max(np.where(error > 1e-12, error / np.maximum(size, 1e-30), 0.0)))
    return worst if np.isfinite(worst) else np.inf


# --- ours


def of_loss(row: Row, *, per_row: bool = False) -> Callable[..., Any]:
    """The row's loss and metrics at the batch's advantages, one a row or one a token."""

    def ours(x, **constants):
        mask = x["mask"]
        prompt_tokens = prompt_tokens_of(mask, jnp.asarray(GROUP))
        offered = {"ref_logp": x["ref_logp"], "prompt_tokens": prompt_tokens}
        extra = {k: v for k, v in offered.items() if k in row.needs}
        advantages = jnp.broadcast_to(x["advantage"][:, None], mask.shape) if per_row else x["advantages"]
        totals = totals_of(mask, prompt_tokens)
        return row.loss(x["logp"], x["old_logp"], advantages, mask, totals=totals, **extra, **constants)

    return ours


def of_prepare(row: Row, *wanted: str, reward: str = "rewards") -> Callable[..., Any]:
    """What the row makes of the batch's rewards: its advantages, and whatever else is wanted."""

    def ours(x, **constants):
        traj = bare_trajectory(
            jnp.zeros(x["mask"].shape, jnp.int32), x["mask"], reward=x[reward], group=jnp.asarray(GROUP),
            old_logp=x["old_logp"],
        )._replace(parts=x["parts"])
        ready = row.prepare(traj, ref_logp=x["ref_logp"], values=x["values"], baseline=x["baseline"], **constants)
        return {k: ready[k] for k in ("advantages", *wanted)}

    return ours
