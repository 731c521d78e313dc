"""Rotary positions at the frequencies that a config asks for."""

import jax.numpy as jnp
import numpy as np

from jaxpt.models.config import ModelConfig, RopeScaling
from jaxpt.ops.attention import frequencies, rope
from jaxpt.types import Array


def turned(x: Array, positions: Array, cfg: ModelConfig) -> Array:
    """x [B,T,H,K] (K even) at integer positions [B,T] or [1,T], as ops.attention.rope pairs the entries."""
    if cfg.rope_scaling is None:
        return rope(x, positions, frequencies(cfg.rope_theta, x.shape[-1]))
    return rope(x, positions, jnp.asarray(slowed(cfg.rope_theta, x.shape[-1], cfg.rope_scaling), jnp.float32))


def slowed(theta: float, width: int, scaling: RopeScaling) -> np.ndarray:
    """[width / 2] float64: radians per position of each pair, theta^(-2i/width) before it is slowed down.

    A pair that turns at most `low` times within `length` positions is slowed by `factor`, one that turns at least `high`
    times is not, and between the two the frequency is a straight line in the number of turns. The rule is that of the
    released code of Llama 3.1 (meta-llama/llama-models).
    """
    frequency = theta ** (-np.arange(0, width, 2) / width)
    turns = scaling.length * frequency / (2 * np.pi)
    kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)
