"""Importance ratios pi / pi_old, one per token [B,T], from log-probabilities already masked."""

import jax.numpy as jnp

from jaxpt.ops.masked import bounded_exp, masked_mean, stop
from jaxpt.types import Array


def no_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    """1: the samples are taken as drawn from the policy itself."""
    return jnp.ones_like(logp)


def token_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    """exp(logp - old_logp), continued linearly beyond e^20 (Schulman et al. 2017, eq. 6)."""
    return bounded_exp(logp - old_logp)


def sequence_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    """s_i = exp(mean over the row's tokens of logp - old_logp), at every token of the row (Zheng et al. 2025, eq. 7)."""
    return jnp.broadcast_to(bounded_exp(masked_mean(logp - old_logp, mask, axis=1))[:, None], logp.shape)


def sequence_token_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
    """s_it = sg(s_i) exp(logp - sg(logp)): the value of s_i, the gradient of the token (Zheng et al. 2025, eq. 14)."""
    return stop(sequence_ratio(logp, old_logp, mask)) * jnp.exp(logp - stop(logp))
