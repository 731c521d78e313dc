"""Optimizers: AdamW, Lion or Muon, with clipping, a schedule and averaged parameters. Shapes of the schedule are static,
numbers are leaves."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpt.train.muon import is_hidden_matrix, scale_by_muon
from jaxpt.train.spikes import clip_by_z_score
from jaxpt.types import Array, Params

SCHEDULES = ("constant", "linear", "cosine", "wsd", "free")
METHODS = ("adamw", "muon", "lion")
FROZEN = {"base", "alpha", "rank"}  # names in a tree of adapters (models.lora)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023, arXiv:2302.06675) or Muon, global-norm clipping, warmup
    then a schedule."""

    learning_rate: float = 1e-3
    method: str = "adamw"  # muon: Muon for the matrices of layers, AdamW for the rest; lion
    schedule: str = "constant"  # after warmup: constant, linear or cosine to `floor` at `decay_steps`, or
    # wsd: constant until `decay_start`, then linear (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395)
    # free: constant, and the averaged iterate is kept (Schedule-Free, Defazio et al. 2024, arXiv:2405.15682)
    warmup: int = 0  # steps of linear warmup from 0
    decay_steps: int = 0  # step at which the floor is reached
    decay_start: int = 0  # of wsd
    floor: float = 0.0  # share of the learning rate that remains at the end
    clip: float = 1.0  # largest global gradient norm
    z_clip: float = 0.0  # largest z-score of the norm among those before it (train.spikes), 2.5 in the paper; 0: any
    ema: float = 0.0  # decay of the average of the parameters that is kept in their place; 0: none
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0  # on matrices only

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"method: got {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: got {self.schedule!r}, expected one of {', '.join(SCHEDULES)}")
        if self.schedule == "wsd" and not self.warmup <= self.decay_start < self.decay_steps:
            raise ValueError(
                f"decay_start: got {self.decay_start}, expected a step from warmup = {self.warmup} to before decay_steps = "
                f"{self.decay_steps} for schedule 'wsd'"
            )
        if not 0 <= self.ema < 1 or self.ema and self.schedule == "free":
            raise ValueError(f"ema: got {self.ema!r}, expected a number from 0 to below 1, and 0 for schedule 'free', which averages")
        if not self.z_clip >= 0:
            raise ValueError(f"z_clip: got {self.z_clip!r}, expected a number of at least 0")
        if self.schedule == "free" and not (0 < self.b1 < 1 and self.method == "adamw"):
            raise ValueError(f"schedule: got 'free' with {self.method!r} and b1 = {self.b1!r}, expected 'adamw' and 0 < b1 < 1")
        if self.schedule not in ("constant", "free") and self.decay_steps <= self.warmup:
            raise ValueError(
                f"decay_steps: got {self.decay_steps}, expected more than warmup = {self.warmup} "
                f"for schedule {self.schedule!r}"
            )


def scale_at(cfg: OptimConfig, step: Array) -> Array:
    """Share of the learning rate used by update number `step` (0, 1, ...)."""
    step = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(1.0, (step + 1) / (cfg.warmup + 1))
    if cfg.schedule in ("constant", "free"):
        return warm
    start = cfg.decay_start if cfg.schedule == "wsd" else cfg.warmup
    done = jnp.clip((step - start) / (cfg.decay_steps - start), 0.0, 1.0)
    shape = 1 - done if cfg.schedule in ("linear", "wsd") else 0.5 * (1 + jnp.cos(jnp.pi * done))
    return warm * (cfg.floor + (1 - cfg.floor) * shape)


def make_optimizer(cfg: OptimConfig, learning_rate: float | Array | None = None) -> optax.GradientTransformation:
    """The optimizer; `learning_rate` (may be traced) replaces cfg's."""
    rate = cfg.learning_rate if learning_rate is None else learning_rate
    steps = [
        *([clip_by_z_score(cfg.z_clip)] if cfg.z_clip else []),
        optax.clip_by_global_norm(cfg.clip),
        _direction(cfg),
        optax.add_decayed_weights(cfg.weight_decay, mask=_is_matrix),
        optax.scale_by_schedule(lambda step: -rate * scale_at(cfg, step)),
    ]
    if cfg.schedule == "free":  # it counts from 1
        free = optax.contrib.schedule_free(optax.chain(*steps), lambda step: rate * scale_at(cfg, step - 1), b1=cfg.b1)
        return optax.masked(free, _moves)  # averaging would round what is frozen
    return optax.chain(*steps, *([optax.masked(average_params(cfg.ema), _moves)] if cfg.ema else []))


class Average(NamedTuple):
    count: Array
    params: Params  # sum of decay^k of the parameters k updates ago, times 1 - decay


def average_params(decay: float) -> optax.GradientTransformation:
    """Last of a chain: changes no update, averages the parameters that they lead to (Polyak and Juditsky 1992, with
    exponential weights)."""
    ema = optax.ema(decay, debias=False)

    def update(updates, state, params):
        _, moved = ema.update(optax.apply_updates(params, updates), optax.EmaState(*state))
        return updates, Average(*moved)

    return optax.GradientTransformation(lambda params: Average(*ema.init(params)), update)


def kept(cfg: OptimConfig, opt_state, params: Params) -> Params:
    """The parameters that evaluations and later stages see: averages where cfg asks for them, else those trained."""
    if cfg.schedule == "free":
        tree = opt_state.inner_state.z
        average = lambda z, y: (y - (1 - cfg.b1) * z) / cfg.b1  # noqa: E731
    elif cfg.ema:
        count, tree = opt_state[-1].inner_state
        weight = jnp.where(count > 0, 1 - cfg.ema**count, 1.0)
        average = lambda total, now: jnp.where(count > 0, (total / weight).astype(now.dtype), now)  # noqa: E731
    else:
        return params
    frozen = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda x, now: now if frozen(x) else average(x, now), tree, params, is_leaf=frozen)


def _moves(params: Params) -> Params:
    """Everything but what is frozen under adapters."""
    return jax.tree.map_with_path(lambda path, x: not {path[0].key, path[-1].key} & FROZEN, params)


def _is_matrix(params: Params) -> Params:
    """What moves, but for the norms' scales (matrices only where layers are stacked) and routers' biases."""
    return jax.tree.map_with_path(lambda path, moves: moves and path[-1].key not in ("scale", "bias"), _moves(params))


def _direction(cfg: OptimConfig) -> optax.GradientTransformation:
    if cfg.method == "lion":
        return optax.scale_by_lion(cfg.b1, cfg.b2)
    momentum = 0.0 if cfg.schedule == "free" else cfg.b1  # Schedule-Free interpolates in its place
    adam = optax.scale_by_adam(momentum, cfg.b2, cfg.eps)
    if cfg.method == "adamw":
        return adam
    return optax.partition({True: scale_by_muon(), False: adam}, is_hidden_matrix)


def apply_update(cfg: OptimConfig, rate: Array, grads: Params, opt_state, params: Params):
    """One update. -> (params, opt_state, gradient norm before clipping)."""
    updates, opt_state = make_optimizer(cfg, rate).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)
