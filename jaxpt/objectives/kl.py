"""Estimators of KL(policy || reference) per token, from log-probabilities of the sampled tokens."""

from jaxpt.ops.masked import exp_excess
from jaxpt.types import Array


def k3(logp: Array, ref_logp: Array) -> Array:
    """ref/pi - 1 - log(ref/pi) >= 0 (Schulman 2020, joschu.net/blog/kl-approx.html): unbiased in value; as a
    loss it pulls like KL(ref || pi). Its linear tail never saturates where the drift is worst."""
    return exp_excess(ref_logp - logp)
