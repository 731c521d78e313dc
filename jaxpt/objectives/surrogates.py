"""Surrogate losses per token, (logp, ratio, advantages, **hyper) -> (loss [B,T], {metric: [B,T]})."""

import jax.numpy as jnp

from jaxpt.ops.masked import keep
from jaxpt.types import Array


def score(logp: Array, ratio: Array, advantages: Array) -> tuple[Array, dict[str, Array]]:
    """-A log pi: the score function estimator (Williams 1992). 0 where A is 0, even for log pi = -inf."""
    return -advantages * keep(logp, advantages != 0), {}


def clipped(
    logp: Array, ratio: Array, advantages: Array, *, eps_low: float, eps_high: float
) -> tuple[Array, dict[str, Array]]:
    """-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A) (Schulman et al. 2017, eq. 7)."""
    free = ratio * advantages
    bound = jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantages
    return -jnp.minimum(free, bound), {"clip_fraction": (bound < free).astype(free.dtype)}
