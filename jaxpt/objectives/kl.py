"""KL(policy || reference) per token, from log-probabilities of sampled tokens (Schulman 2020,
joschu.net/blog/kl-approx.html): which value is reported, whose gradient pulls, and where it stands.

VALUE      k1 = log pi/ref, unbiased, either sign; k2 = k1^2 / 2, biased, >= 0; k3 = ref/pi - 1 - log ref/pi,
           unbiased while samples come from pi, >= 0; |k1|, biased, >= 0. Of the other direction, KL(ref || pi):
           `forward`, unbiased while samples come from pi, >= 0; between the two, `alpha` and `jensen_shannon`, likewise.
           A whole vocabulary at hand needs no estimator: its KL is given (`vocabulary`).
GRADIENT   as a loss on samples of pi, the expected gradient of k1 is exactly 0, of k3 that of KL(ref || pi), and
           of k2 that of KL(pi || ref) of each visited state; off-policy, `score` is that gradient, and so is that of
           any unbiased value times the importance ratio (`importance`).
PLACEMENT  in the loss, a token answers for its own state alone; in the reward, for all that follows, which is the
           gradient of the KL of whole sequences.
"""

import jax.numpy as jnp
from jax.nn import softplus

from jaxpt.ops.masked import bounded_exp, exp_excess, stop
from jaxpt.types import Array


def k1(logp: Array, ref_logp: Array) -> Array:
    """log pi - log ref."""
    return logp - ref_logp


def k2(logp: Array, ref_logp: Array) -> Array:
    """(log pi - log ref)^2 / 2, continued linearly beyond 1e3 nats."""
    size = jnp.abs(logp - ref_logp)
    near = jnp.minimum(size, 1e3)
    return near * size - 0.5 * near**2


def k3(logp: Array, ref_logp: Array) -> Array:
    """ref/pi - 1 - log(ref/pi). Its linear tail never saturates where the drift is worst."""
    return exp_excess(ref_logp - logp)


def absolute(logp: Array, ref_logp: Array) -> Array:
    """|log pi - log ref|, of gradient 0 where they are equal."""
    change = logp - ref_logp
    return change * stop(jnp.sign(change))


def forward(logp: Array, ref_logp: Array) -> Array:
    """r log r - (r - 1), r = ref/pi: KL(ref || pi) on samples of pi (Schulman 2020, last section). Tail as k3's."""
    d = ref_logp - logp
    near = jnp.abs(d) < 1.0
    small, large = jnp.where(near, d, 0.0), jnp.where(near, 1.0, d)
    return jnp.where(near, jnp.exp(small) * exp_excess(-small), bounded_exp(large) * (large - 1.0) + 1.0)


def alpha(logp: Array, ref_logp: Array, *, alpha: float) -> Array:
    """(alpha r + 1 - alpha - r^alpha) / (alpha (1 - alpha)), r = ref/pi, 0 < alpha < 1: on samples of pi the alpha
    divergence (Minka 2005), >= 0; alpha -> 0 is k3, KL(pi || ref), alpha -> 1 is `forward`. Linear beyond r = e^20."""
    d, steep = ref_logp - logp, (jnp.exp(20.0) - jnp.exp(20.0 * alpha)) / (1.0 - alpha)
    low = jnp.minimum(d, 20.0)
    near = jnp.abs(low) < 1.0  # there the parts of first order cancel, and elsewhere 1 - 1 in the slope would
    small, large = jnp.where(near, low, 0.0), jnp.where(near, 1.0, low)
    close = alpha * exp_excess(small) - exp_excess(alpha * small)
    far = alpha * jnp.exp(large) + (1.0 - alpha) - jnp.exp(alpha * large)
    return jnp.where(near, close, far) / (alpha * (1.0 - alpha)) + steep * jnp.maximum(d - 20.0, 0.0)


def jensen_shannon(logp: Array, ref_logp: Array) -> Array:
    """[r log r - (1 + r) log((1 + r) / 2)] / 2, r = ref/pi: on samples of pi the Jensen-Shannon divergence (Lin 1991), >= 0.

    Near equality by the half-angle h = log(r) / 2, as h (r - 1) - (r + 1) log cosh h, where nothing of first order
    cancels. It rises to log(2) / 2 only where pi leaves the reference, so far away it does not pull.
    """
    d = ref_logp - logp
    near = jnp.abs(d) < 1.0
    small, large = jnp.where(near, d, 0.0), jnp.where(near, 1.0, d)
    rise = jnp.expm1(small)
    close = 0.5 * (0.5 * small * rise - (rise + 2.0) * jnp.log1p(2.0 * jnp.sinh(0.25 * small) ** 2))
    log2 = jnp.log(2.0)
    far = 0.5 * (bounded_exp(large) * (log2 - softplus(-large)) - (softplus(large) - log2))
    return jnp.where(near, close, far)


def vocabulary(logp: Array, vocab_kl: Array) -> Array:
    """What is given: KL(pi || ref) of the decision's whole distribution, without the noise of a sample."""
    return vocab_kl


def own_gradient(value, logp: Array, old_logp: Array, ref_logp: Array) -> Array:
    """The value, differentiated as it stands."""
    return value(logp, ref_logp)


def k2_gradient(value, logp: Array, old_logp: Array, ref_logp: Array) -> Array:
    """The value, pulling by the gradient of k2: k1 grad log pi."""
    pull = k2(logp, ref_logp)
    return stop(value(logp, ref_logp)) + pull - stop(pull)


def score_gradient(value, logp: Array, old_logp: Array, ref_logp: Array) -> Array:
    """The value, pulling by pi/pi_old k1 grad log pi: the gradient of KL(pi || ref) of each visited state, on
    samples of pi_old."""
    weight = stop(bounded_exp(logp - old_logp) * k1(logp, ref_logp))
    return stop(value(logp, ref_logp)) + weight * (logp - stop(logp))


def importance_gradient(value, logp: Array, old_logp: Array, ref_logp: Array) -> Array:
    """pi/pi_old times the value, differentiated as it stands (DeepSeek-AI 2025, arXiv 2512.02556, section 3.1)."""
    return bounded_exp(logp - old_logp) * value(logp, ref_logp)


def adapted(beta: Array, kl: Array, *, kl_target: Array, kl_horizon: Array, rows: float) -> Array:
    """The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2): beta grows while the
    KL per sequence (nats) is above kl_target and falls while it is below, over some kl_horizon episodes."""
    error = jnp.clip(kl / kl_target - 1.0, -0.2, 0.2)
    return beta * (1.0 + error * rows / kl_horizon)
