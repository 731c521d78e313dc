"""Importance ratios, one per token [B,T], from log-probabilities already masked: pi / pi_old, which is trained, and
pi_old / sampler, a constant weight for what another engine (or an older policy) has drawn.

The weights of a sampler are called truncated where a large one is lowered to a cap, masked where it is thrown out; a
token or row that is thrown out stays in the denominators of the reduction.
"""

import jax.numpy as jnp

from jaxpt.ops.masked import bounded_exp, keep, masked_mean, masked_sum, stop
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


def token_truncated(old_logp: Array, mask: Array, sampler_logp: Array, *, is_high: float) -> Array:
    """min(pi_old / sampler, is_high) of each token. In logs, so that nothing overflows."""
    return jnp.exp(jnp.minimum(old_logp - sampler_logp, jnp.log(is_high)))


def token_masked(old_logp: Array, mask: Array, sampler_logp: Array, *, is_low: float, is_high: float) -> Array:
    """pi_old / sampler of each token, 0 outside [is_low, is_high]."""
    return _inside(old_logp - sampler_logp, is_low, is_high)


def sequence_truncated(old_logp: Array, mask: Array, sampler_logp: Array, *, is_high: float) -> Array:
    """min(product of the row's pi_old / sampler, is_high), at every token of the row."""
    return jnp.exp(jnp.minimum(_of_row(masked_sum, old_logp - sampler_logp, mask), jnp.log(is_high)))


def sequence_masked(old_logp: Array, mask: Array, sampler_logp: Array, *, is_high: float) -> Array:
    """The product of the row's pi_old / sampler, 0 above is_high, at every token of the row."""
    return _inside(_of_row(masked_sum, old_logp - sampler_logp, mask), 0.0, is_high)


def geometric_masked(old_logp: Array, mask: Array, sampler_logp: Array, *, is_low: float, is_high: float) -> Array:
    """1 for rows whose geometric mean of pi_old / sampler lies in [is_low, is_high], 0 for others."""
    log_mean = _of_row(masked_mean, old_logp - sampler_logp, mask)
    return ((log_mean >= jnp.log(is_low)) & (log_mean <= jnp.log(is_high))).astype(log_mean.dtype)


def _inside(log_weight: Array, low: float, high: float) -> Array:
    inside = (log_weight >= jnp.log(low)) & (log_weight <= jnp.log(high))
    return inside * jnp.exp(keep(log_weight, inside))


def _of_row(reduce, x: Array, mask: Array) -> Array:
    return jnp.broadcast_to(reduce(x, mask, axis=1)[:, None], x.shape)
