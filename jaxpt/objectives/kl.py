"""Estimators of KL(policy || reference) per token, from log-probabilities of the sampled tokens.

Schulman, "Approximating KL divergence" (2020). Log-ratios are bounded before exp, with a linear tail, so
the penalty never saturates where the drift is worst.
"""

from jaxpt.ops.masked import bounded_exp
from jaxpt.types import Array


def k1(logp: Array, ref_logp: Array) -> Array:
    """log(pi / ref): unbiased in value; as a loss its expected gradient is 0."""
    return logp - ref_logp


def k2(logp: Array, ref_logp: Array) -> Array:
    """(log(pi / ref))^2 / 2: biased in value; its on-policy expected gradient is the KL's."""
    return 0.5 * (logp - ref_logp) ** 2


def k3(logp: Array, ref_logp: Array) -> Array:
    """ref/pi - 1 - log(ref / pi) >= 0: unbiased in value; as a loss it pulls like KL(ref || pi)."""
    log_ratio = ref_logp - logp
    return bounded_exp(log_ratio) - 1.0 - log_ratio
