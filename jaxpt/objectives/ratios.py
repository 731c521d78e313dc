"""Importance ratios pi / pi_old per token, from log-probabilities already masked."""

import jax.numpy as jnp

from jaxpt.ops.masked import bounded_exp
from jaxpt.types import Array


def no_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    """1: the samples are taken as drawn from the policy itself."""
    return jnp.ones_like(logp)


def token_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    """exp(logp - old_logp), continued linearly beyond e^20 (Schulman et al. 2017, eq. 6)."""
    return bounded_exp(logp - old_logp)
