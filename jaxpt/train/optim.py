"""Optimizers: AdamW, Lion or Muon, with clipping, a schedule and averaged parameters. Shapes of the schedule are static,
numbers are leaves."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpt.models.lora import joined, moving
from jaxpt.ops.dots import DOTS
from jaxpt.train.muon import NO_MATRIX, is_hidden_matrix, scale_by_muon
from jaxpt.train.spikes import clip_by_z_score
from jaxpt.types import Array, Params

SCHEDULES = ("constant", "linear", "cosine", "wsd", "free")
METHODS = ("adamw", "muon", "lion")


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
    weights: str = "float32"  # or bfloat16: the model reads matrices rounded from float32 masters that the optimizer keeps
    # (Micikevicius et al. 2018, arXiv:1710.03740), because small steps would be lost in 8 bits; frozen ones have no master

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"method: got {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.weights not in DOTS:
            raise ValueError(f"weights: got {self.weights!r}, expected one of {', '.join(DOTS)}")
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
        return optax.masked(free, _has_gradient)
    return optax.chain(*steps, *([average_params(cfg.ema)] if cfg.ema else []))


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
    if cfg.schedule != "free" and not cfg.ema:
        return params
    masters, inner = _trained(cfg, opt_state, params)
    if cfg.schedule == "free":
        tree = inner.inner_state.z
        average = lambda z, y: y if isinstance(z, optax.MaskedNode) else (y - (1 - cfg.b1) * z) / cfg.b1  # noqa: E731
    else:
        count, tree = inner[-1]
        weight = jnp.where(count > 0, 1 - cfg.ema**count, 1.0)
        average = lambda total, now: jnp.where(count > 0, total / weight, now)  # noqa: E731
    averaged = jax.tree.map(average, tree, masters, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return joined(params, rounded(cfg, averaged))


def _has_gradient(params: Params) -> Params:
    """Everything but routers' biases, which somebody else moves (train.experts)."""
    return jax.tree.map_with_path(lambda path, x: path[-1].key != "bias", params)


def _is_matrix(params: Params) -> Params:
    """Everything but norms' scales and biases (matrices only where layers are stacked), and what is frozen under adapters."""
    frozen = {"base", "alpha", "rank"}
    moves = lambda path: not {path[0].key, path[-1].key} & frozen and not path[-1].key.endswith(NO_MATRIX)  # noqa: E731
    return jax.tree.map_with_path(lambda path, x: moves(path), params)


def _direction(cfg: OptimConfig) -> optax.GradientTransformation:
    if cfg.method == "lion":
        return optax.scale_by_lion(cfg.b1, cfg.b2)
    momentum = 0.0 if cfg.schedule == "free" else cfg.b1  # Schedule-Free interpolates in its place
    adam = optax.scale_by_adam(momentum, cfg.b2, cfg.eps)
    if cfg.method == "adamw":
        return adam
    return optax.partition({True: scale_by_muon(), False: adam}, is_hidden_matrix)


def start_optimizer(cfg: OptimConfig, params: Params) -> tuple[Params, Any]:
    """The parameters as the model reads them, and the optimizer's state, which is of the part that moves (models.lora)."""
    part = moving(params)
    inner = make_optimizer(cfg).init(part)
    if cfg.weights == "float32":
        return params, inner
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), part)  # norm scales are not rounded: no buffer twice
    return rounded(cfg, params), {"masters": masters, "inner": inner}


def apply_update(cfg: OptimConfig, rate: Array, grads: Params, opt_state, params: Params):
    """One update; `grads` (float32) and `opt_state` are of the part of `params` that moves.
    -> (params, opt_state, gradient norm before clipping)."""
    masters, inner = _trained(cfg, opt_state, params)
    updates, inner = make_optimizer(cfg, rate).update(grads, inner, masters)
    masters = optax.apply_updates(masters, updates)
    state = inner if cfg.weights == "float32" else {"masters": masters, "inner": inner}
    return joined(params, rounded(cfg, masters)), state, optax.tree.norm(grads)


def _trained(cfg: OptimConfig, opt_state: Any, params: Params) -> tuple[Params, Any]:
    """The part that moves, in float32, and the state of what moves it."""
    return (moving(params), opt_state) if cfg.weights == "float32" else (opt_state["masters"], opt_state["inner"])


def rounded(cfg: OptimConfig, params: Params) -> Params:
    """Matrices in the type that the model reads; norms' scales, biases and numbers stay as they are."""
    if cfg.weights == "float32":
        return params
    fits = lambda path, x: x.ndim > 1 and not path[-1].key.endswith(NO_MATRIX)  # noqa: E731
    return jax.tree.map_with_path(lambda path, x: x.astype(cfg.weights) if fits(path, x) else x, params)
