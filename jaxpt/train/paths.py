"""Reward the outcome, penalise the path: what verified events of an episode do to its reward and to its advantages.

An environment's rule engine marks decisions (`signals`); a weight below 0 makes an event a violation, one above 0 a
credit. Two ways to use them, which may be mixed, and which fade together where `path_until` says so:

    total    r_i := outcome_weight r_i + path_total clip(sum_t p_it, -path_cap, path_cap), one number an episode
    channel  A_it += path_weight tokens / (tokens of turns with an event) p_it, p_it that of the turn: beside the outcome's
             advantage, over its own tokens (jaxpt.objectives.credit.channels)

A compliant demonstration may take the last seat of every group (`demonstrated`). It is compared with the others and they
are not compared with it.

Source: RLVP (arXiv 2607.07435): lambda = mu = 1/2, violations and credits each capped at 2 in the sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpt.envs.protocol import Spec
from jaxpt.objectives import credit
from jaxpt.objectives.shaping import has_signal
from jaxpt.ops.masked import keep, safe_div
from jaxpt.types import Array, Metrics, Trajectory


@dataclass(frozen=True, kw_only=True)
class PathConfig:
    events: Mapping[str, float]  # signal of the environment -> weight, the default of the leaf event_NAME
    demonstrator: str | None = None  # style of the demonstration that may take the last seat of every group

    def check(self, spec: Spec) -> None:
        """ValueError for a signal or a style that the environment has not."""
        unknown = sorted(set(self.events) - set(spec.signals))
        if unknown:
            raise ValueError(f"path.events: {unknown[0]!r} is no signal, expected some of {', '.join(spec.signals)}")
        if self.demonstrator is not None and self.demonstrator not in spec.styles:
            raise ValueError(
                f"path.demonstrator: got {self.demonstrator!r}, expected one of {', '.join(spec.styles)}"
            )

    def leaves(self) -> dict[str, float]:
        """Every number that an arm may choose; by default the outcome alone is used."""
        own = {"outcome_weight": 1.0, "path_total": 0.0, "path_cap": 1e6, "path_weight": 0.0, "path_until": 0.0}
        seat = {"demonstrated": 0.0} if self.demonstrator is not None else {}
        return own | seat | {f"event_{name}": weight for name, weight in self.events.items()}


def events_of(cfg: PathConfig, spec: Spec, hyper: Mapping[str, Array], signals: Array) -> Array:
    """p [B,T]: the weights of the events of each decision. signals [B,T,R]."""
    weights = [hyper[f"event_{name}"] if name in cfg.events else jnp.float32(0) for name in spec.signals]
    return signals @ jnp.stack(weights)


def faded(hyper: Mapping[str, Array], step: Array) -> Array:
    """What is left of the path's weights at this step: linearly down to 0 at step path_until; all of it where that is 0."""
    return jnp.where(hyper["path_until"] > 0, jnp.clip(1 - safe_div(1.0 * step, hyper["path_until"]), 0.0, 1.0), 1.0)


def shaped(hyper: Mapping[str, Array], step: Array, traj: Trajectory, p: Array) -> Trajectory:
    """The trajectory with the reward of `total`."""
    total = jnp.clip(jnp.sum(keep(p, traj.mask), axis=1), -hyper["path_cap"], hyper["path_cap"])
    return traj._replace(reward=hyper["outcome_weight"] * traj.reward + faded(hyper, step) * hyper["path_total"] * total)


def channel(hyper: Mapping[str, Array], step: Array, traj: Trajectory, p: Array, total=lambda tree: tree) -> Array:
    """What `channel` adds to the advantages, [B,T]; `total` sums a tree over the shards of the batch."""
    nothing = lambda worth, group: jnp.zeros_like(worth)  # noqa: E731
    weight = faded(hyper, step) * hyper["path_weight"]
    return credit.channels(nothing, p, traj, outcome=traj.reward, process=p, total=total, path_weight=weight)


def seats(rows: int, group: int, taken: Array) -> Array:
    """[B] bool: the last row of every group, where `taken` is above 0."""
    return (jnp.arange(rows) % group == group - 1) & (taken > 0)


def seated(traj: Trajectory, demonstrations: Trajectory, where: Array, group: int) -> Trajectory:
    """The demonstrations, one a group, in the rows `where`. Both have the same columns, and no support is kept."""

    def put(row: Array, demonstrated: Array) -> Array:
        chosen = where.reshape(-1, *(1,) * (row.ndim - 1))
        return jnp.where(chosen, jnp.repeat(demonstrated, group, axis=0), row)

    keeps = {"group": traj.group, "support": None}
    fields = {name: getattr(traj, name) for name in traj._fields if name not in keeps}
    return Trajectory(**{name: put(x, getattr(demonstrations, name)) for name, x in fields.items()}, **keeps)


def lessons(reward: Array, where: Array, group: int) -> Array:
    """[B]: by how much each demonstration's reward exceeds the mean of the others of its group; 0 for these."""
    others = jnp.where(where, 0.0, reward).reshape(-1, group)
    mean = jnp.sum(others, axis=1) / jnp.maximum(jnp.sum(~where.reshape(-1, group), axis=1), 1)
    return jnp.where(where, reward - jnp.repeat(mean, group), 0.0)


def guided(
    cfg: PathConfig, spec: Spec, hyper: Mapping[str, Array], step: Array, traj: Trajectory, where: Array, group: int,
    total=lambda tree: tree,
) -> tuple[Trajectory, Array]:
    """The trajectory that a row is to prepare, in which the reward of the rows `where` is missing, and what is added to
    the advantages that it then has, [B,T]."""
    p = events_of(cfg, spec, hyper, traj.signals)
    traj = shaped(hyper, step, traj, p)
    further = channel(hyper, step, traj, p, total) + lessons(traj.reward, where, group)[:, None]
    return traj._replace(reward=jnp.where(where, jnp.nan, traj.reward)), keep(further, traj.mask)


def path_metrics(cfg: PathConfig, spec: Spec, traj: Trajectory) -> Metrics:
    """Per episode: count_NAME of every event in cfg, violations (the default weight is below 0). Shares of rows:
    differs_NAME, in groups whose counts differ (what the reachability probe asks of a policy before it is trained);
    all_fail, in groups of which none earns a reward, and rescued, of these, those whose violations differ.
    outcome_variance and violation_variance: the mean variance within groups."""
    rows = jnp.float32(traj.reward.shape[0])
    counts = jnp.sum(keep(traj.signals, jnp.broadcast_to(traj.mask[:, :, None], traj.signals.shape)), axis=1)
    of_event = {name: counts[:, spec.signals.index(name)] for name in cfg.events}
    bad = sum((of_event[name] for name, weight in cfg.events.items() if weight < 0), jnp.zeros_like(traj.reward))
    failed = jnp.where(traj.reward > 0, 1.0, 0.0)
    same = (traj.group[:, None] == traj.group[None]).astype(jnp.float32)
    size = jnp.sum(same, axis=1)
    mean = lambda x: same @ x / size  # noqa: E731
    variance = lambda x: jnp.maximum(mean(x * x) - mean(x) ** 2, 0.0)  # noqa: E731
    all_fail = (mean(failed) == 0).astype(jnp.float32)
    per_row = {"violations": bad, "all_fail": all_fail, "outcome_variance": variance(traj.reward),
               "violation_variance": variance(bad)}
    for name, x in of_event.items():
        per_row |= {f"count_{name}": x, f"differs_{name}": has_signal(x, traj.group).astype(jnp.float32)}
    rescued = all_fail * has_signal(bad, traj.group)
    return {**{name: (jnp.sum(x), rows) for name, x in per_row.items()}, "rescued": (jnp.sum(rescued), jnp.sum(all_fail))}
