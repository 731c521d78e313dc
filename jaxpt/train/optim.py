"""Optimizers: AdamW with clipping and a schedule. Shapes of the schedule are static, numbers are leaves."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxpt.train.muon import is_hidden_matrix, scale_by_muon
from jaxpt.types import Array, Params

SCHEDULES = ("constant", "linear", "cosine")
METHODS = ("adamw", "muon")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019), global-norm clipping, warmup then a schedule."""

    learning_rate: float = 1e-3
    method: str = "adamw"  # muon: Muon for the matrices of layers, AdamW for the rest
    schedule: str = "constant"  # after warmup: constant, linear or cosine to `floor` at `decay_steps`
    warmup: int = 0  # steps of linear warmup from 0
    decay_steps: int = 0  # step at which linear and cosine reach the floor
    floor: float = 0.0  # share of the learning rate that remains at the end
    clip: float = 1.0  # largest global gradient norm
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0  # on matrices only

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"method: got {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: got {self.schedule!r}, expected one of {', '.join(SCHEDULES)}")
        if self.schedule != "constant" and self.decay_steps <= self.warmup:
            raise ValueError(
                f"decay_steps: got {self.decay_steps}, expected more than warmup = {self.warmup} "
                f"for schedule {self.schedule!r}"
            )


def scale_at(cfg: OptimConfig, step: Array) -> Array:
    """Share of the learning rate used by update number `step` (0, 1, ...)."""
    step = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(1.0, (step + 1) / (cfg.warmup + 1))
    if cfg.schedule == "constant":
        return warm
    done = jnp.clip((step - cfg.warmup) / (cfg.decay_steps - cfg.warmup), 0.0, 1.0)
    shape = 1 - done if cfg.schedule == "linear" else 0.5 * (1 + jnp.cos(jnp.pi * done))
    return warm * (cfg.floor + (1 - cfg.floor) * shape)


def make_optimizer(cfg: OptimConfig, learning_rate: float | Array | None = None) -> optax.GradientTransformation:
    """The optimizer; `learning_rate` (may be traced) replaces cfg's."""
    rate = cfg.learning_rate if learning_rate is None else learning_rate
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip),
        _direction(cfg),
        optax.add_decayed_weights(cfg.weight_decay, mask=_is_matrix),
        optax.scale_by_schedule(lambda step: -rate * scale_at(cfg, step)),
    )


def _is_matrix(params: Params) -> Params:
    """Everything but the norms' scales, which are matrices only where layers are stacked."""
    return jax.tree.map_with_path(lambda path, x: path[-1].key != "scale", params)


def _direction(cfg: OptimConfig) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
    if cfg.method == "adamw":
        return adam
    return optax.partition({True: scale_by_muon(), False: adam}, is_hidden_matrix)


def apply_update(cfg: OptimConfig, rate: Array, grads: Params, opt_state, params: Params):
    """One update. -> (params, opt_state, gradient norm before clipping)."""
    updates, opt_state = make_optimizer(cfg, rate).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)
