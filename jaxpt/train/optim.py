"""Optimizers: AdamW, Lion or Muon, with clipping and a schedule. Shapes of the schedule are static, numbers are leaves."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxpt.train.muon import is_hidden_matrix, scale_by_muon
from jaxpt.types import Array, Params

SCHEDULES = ("constant", "linear", "cosine", "wsd")
METHODS = ("adamw", "muon", "lion")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023, arXiv:2302.06675) or Muon, global-norm clipping, warmup
    then a schedule."""

    learning_rate: float = 1e-3
    method: str = "adamw"  # muon: Muon for the matrices of layers, AdamW for the rest; lion
    schedule: str = "constant"  # after warmup: constant, linear or cosine to `floor` at `decay_steps`, or
    # wsd: constant until `decay_start`, then linear (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395)
    warmup: int = 0  # steps of linear warmup from 0
    decay_steps: int = 0  # step at which the floor is reached
    decay_start: int = 0  # of wsd
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
        if self.schedule == "wsd" and not self.warmup <= self.decay_start < self.decay_steps:
            raise ValueError(
                f"decay_start: got {self.decay_start}, expected a step from warmup = {self.warmup} to before decay_steps = "
                f"{self.decay_steps} for schedule 'wsd'"
            )
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
    start = cfg.decay_start if cfg.schedule == "wsd" else cfg.warmup
    done = jnp.clip((step - start) / (cfg.decay_steps - start), 0.0, 1.0)
    shape = 1 - done if cfg.schedule in ("linear", "wsd") else 0.5 * (1 + jnp.cos(jnp.pi * done))
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
    """Everything but the norms' scales (matrices only where layers are stacked), routers' biases, and what is frozen under
    adapters."""
    kept = ("scale", "bias", "base", "alpha", "rank")
    return jax.tree.map_with_path(lambda path, x: not {path[0].key, path[-1].key} & set(kept), params)


def _direction(cfg: OptimConfig) -> optax.GradientTransformation:
    if cfg.method == "lion":
        return optax.scale_by_lion(cfg.b1, cfg.b2)
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
    if cfg.method == "adamw":
        return adam
    return optax.partition({True: scale_by_muon(), False: adam}, is_hidden_matrix)


def apply_update(cfg: OptimConfig, rate: Array, grads: Params, opt_state, params: Params):
    """One update. -> (params, opt_state, gradient norm before clipping)."""
    updates, opt_state = make_optimizer(cfg, rate).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)
