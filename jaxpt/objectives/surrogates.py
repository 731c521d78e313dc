"""Surrogate losses per token, (logp, old_logp, ratio, advantages, mask, **hyper) -> (loss [B,T], {metric: [B,T]}).

Where a ratio is held constant, the loss is a score function and its value means nothing; its gradient does.
"""

import jax
import jax.numpy as jnp

from jaxpt.objectives.kl import absolute, k2
from jaxpt.ops.masked import bounded_exp, count, keep, largest, masked_mean, stop
from jaxpt.types import Array

Surrogate = tuple[Array, dict[str, Array]]


def score(logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array) -> Surrogate:
    """-A log pi: the score function estimator (Williams 1992). 0 where A is 0, even for log pi = -inf."""
    return -advantages * keep(logp, advantages != 0), {}


def clipped(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, eps_low: float, eps_high: float
) -> Surrogate:
    """-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A) (Schulman et al. 2017, eq. 7)."""
    free, bound = _free_and_bound(ratio, advantages, eps_low, eps_high)
    return -jnp.minimum(free, bound), _share(bound < free, ratio)


def dual_clip(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, eps_low: float, eps_high: float,
    dual_clip: float,
) -> Surrogate:
    """-max(min(ratio A, clip(ratio) A), dual_clip A) where A < 0, as `clipped` elsewhere (Ye et al. 2020)."""
    free, bound = _free_and_bound(ratio, advantages, eps_low, eps_high)
    least, floor = jnp.minimum(free, bound), dual_clip * advantages
    binds = (bound < free) | ((advantages < 0) & (floor > least))
    return -jnp.where(advantages < 0, jnp.maximum(least, floor), least), _share(binds, ratio)


def clipped_in_reach(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, eps_low: float, eps_high: float,
    drift_max: float,
) -> Surrogate:
    """As `clipped`, without the tokens of negative advantage in rows that are less likely now by more than drift_max nats
    a token on average (DeepSeek-AI 2025, arXiv 2512.02556, eq. 9)."""
    free, bound = _free_and_bound(ratio, advantages, eps_low, eps_high)
    left = masked_mean(old_logp - logp, mask, axis=1)[:, None] > drift_max
    out = left & (advantages < 0)
    return -keep(jnp.minimum(free, bound), ~out), _share((bound < free) | out, ratio)


def clipped_weight(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, eps_low: float, eps_high: float
) -> Surrogate:
    """-sg(clip(ratio, 1 - eps_low, 1 + eps_high)) A log pi: no token loses its gradient (MiniMax 2025, eq. 4-5)."""
    weight = stop(jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high))
    return -weight * advantages * keep(logp, advantages != 0), _share(weight != ratio, ratio)


def soft_gate(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, tau_pos: float, tau_neg: float
) -> Surrogate:
    """-4 / tau sigmoid(tau (ratio - 1)) A, tau_pos where A > 0, tau_neg elsewhere (Gao et al. 2025)."""
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    return -4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages, {}


def geometric(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, log_low: float, log_high: float
) -> Surrogate:
    """-A times the geometric mean of the row's ratios, each clipped against its own advantage to
    [e^-log_low, e^log_high] (Zhao et al. 2025). Where A varies in a row, its mean counts."""
    change, sign = logp - old_logp, jnp.sign(advantages)
    free, bound = sign * change, sign * jnp.clip(change, -log_low, log_high)
    mean = masked_mean(sign * jnp.minimum(free, bound), mask, axis=1)
    return -advantages * bounded_exp(mean)[:, None], _share(bound < free, ratio)


def tv_mask(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, tv_low: float, tv_high: float,
    ratio_cap: float,
) -> Surrogate:
    """-sg(min(ratio, ratio_cap)) A log pi, 0 for tokens whose probability has already moved by more than tv_high (up,
    A > 0) or tv_low (down): the total variation of "this token or another" (Qi et al. 2026)."""
    moved = stop(_probability(logp) - _probability(old_logp))
    inside = jnp.where(advantages > 0, moved <= tv_high, moved >= -tv_low)
    return _trusted(logp, ratio, advantages, inside, ratio_cap)


def kl_mask(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, kl_low: float, kl_high: float,
    ratio_cap: float,
) -> Surrogate:
    """As tv_mask, by KL(old || new) of "this token or another" in nats (Qi et al. 2026)."""
    p, q = stop(_probability(logp)), _probability(old_logp)
    log_p, log_q = (stop(jnp.minimum(x, 0.0)) for x in (logp, old_logp))
    moved = q * (log_q - log_p) + (1.0 - q) * (_log_rest(log_q) - _log_rest(log_p))
    inside = jnp.where(advantages > 0, (moved <= kl_high) | (p <= q), (moved <= kl_low) | (p >= q))
    return _trusted(logp, ratio, advantages, inside, ratio_cap)


def symmetric_tv_mask(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, tv_low: float, tv_high: float,
    old_coef: float,
) -> Surrogate:
    """-ratio A, 0 for tokens whose probability has moved outside [-tv_low, tv_high], whichever way A pulls; plus
    old_coef (log pi / pi_old)^2, which pulls them back."""
    moved = stop(_probability(logp) - _probability(old_logp))
    inside = (moved >= -tv_low) & (moved <= tv_high)
    return -keep(ratio, inside) * advantages + 2.0 * old_coef * k2(logp, old_logp), _share(~inside, ratio)


def clip_cov(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, eps_low: float, eps_high: float,
    cov_share: float, cov_low: float, cov_high: float,
) -> Surrogate:
    """As `clipped`, without a cov_share of the tokens, of those whose covariance of A and log pi lies in
    (cov_low, cov_high) and that the clip leaves free (Cui et al. 2025, section 4.2).

    The paper draws them at random from that band; here they are its largest, so a loss is a function of its inputs.
    The covariance is that of the rows given together: partial losses do not add up.
    """
    free, bound = _free_and_bound(ratio, advantages, eps_low, eps_high)
    cov = _covariance(logp, advantages, mask)
    band = (mask > 0) & (cov > cov_low) & (cov < cov_high) & (bound >= free)
    out = largest(cov, band, cov_share * count(mask))
    return -keep(jnp.minimum(free, bound), ~out), _share((bound < free) | out, ratio)


def kl_cov(
    logp: Array, old_logp: Array, ratio: Array, advantages: Array, mask: Array, *, cov_share: float, old_coef: float
) -> Surrogate:
    """-ratio A, plus old_coef |log pi / pi_old| for the cov_share of the tokens with the largest covariance of A and
    log pi (Cui et al. 2025, section 4.2, with the penalty of their code). A covariance of 0 or less is never chosen.

    The covariance is that of the rows given together: partial losses do not add up.
    """
    cov = _covariance(logp, advantages, mask)
    held = largest(cov, mask, cov_share * count(mask)) & (cov > 0)
    return -ratio * advantages + old_coef * keep(absolute(logp, old_logp), held), {}


def _free_and_bound(ratio: Array, advantages: Array, eps_low: float, eps_high: float) -> tuple[Array, Array]:
    return ratio * advantages, jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantages


def _trusted(logp: Array, ratio: Array, advantages: Array, inside: Array, ratio_cap: float) -> Surrogate:
    weight = stop(keep(jnp.minimum(ratio, ratio_cap), inside))
    return -weight * advantages * keep(logp, advantages != 0), _share(~inside, ratio)


def _share(binds: Array, ratio: Array) -> dict[str, Array]:
    return {"clip_fraction": binds.astype(ratio.dtype)}


def _probability(logp: Array) -> Array:
    return jnp.exp(jnp.minimum(logp, 0.0))


def _log_rest(logp: Array) -> Array:
    """log(1 - e^logp) for logp <= 0, at least log 1e-12."""
    return jnp.log(-jnp.expm1(jnp.minimum(logp, -1e-12)))


def _covariance(logp: Array, advantages: Array, mask: Array) -> Array:
    """[B,T]: (A - mean A)(log pi - mean log pi) over the kept tokens, exactly 0 where A differs by rounding alone."""
    spread = advantages - masked_mean(advantages, mask)
    rounding = 16 * jnp.finfo(advantages.dtype).eps * jnp.max(jnp.abs(keep(advantages, mask)), initial=0.0)
    logp = stop(logp)
    return keep(spread, jnp.abs(spread) > rounding) * (logp - masked_mean(logp, mask))
