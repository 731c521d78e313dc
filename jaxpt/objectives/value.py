"""Advantages of single decisions from rewards and a critic, whitening, and the value loss."""

import chex
import jax
import jax.numpy as jnp

from jaxpt.objectives.reduction import Totals, token_mean
from jaxpt.ops.masked import beyond_rounding, bounded_exp, count, keep, less_mean, safe_div, stop, weighed
from jaxpt.types import Array, Metrics


def gae(
    rewards: Array, values: Array, mask: Array, gamma: float, lam: float, final_values: Array | None = None
) -> Array:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t (Schulman et al. 2015, eq. 16).

    Steps are the trainable tokens alone: what the environment writes in between is no step, neither discounted
    nor valued, so deleting masked tokens changes nothing. rewards, values, mask [B,T]; rewards count on the mask.
    final_values [B]: V behind the last step; 0 (the episode ended there) when None. -> [B,T], 0 off the mask.
    """
    chex.assert_equal_shape([rewards, values, mask])
    dtype = jnp.result_type(rewards, values, jnp.float32)
    rewards, values = keep(rewards.astype(dtype), mask), keep(values.astype(dtype), mask)
    final = jnp.zeros(rewards.shape[0], dtype) if final_values is None else final_values.astype(dtype)

    def back(carry, step):
        next_value, next_advantage = carry
        reward, value, kept = step
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = jnp.where(kept, value, next_value), jnp.where(kept, advantage, next_advantage)
        return carry, jnp.where(kept, advantage, 0.0)

    steps = (rewards.T, values.T, (mask > 0).T)
    return jax.lax.scan(back, (final, jnp.zeros_like(final)), steps, reverse=True)[1].T


def n_step(
    rewards: Array, values: Array, mask: Array, gamma: float, n: float, final_values: Array | None = None
) -> Array:
    """A_t = sum_{k<n} gamma^k r_{t+k} + gamma^n V_{t+n} - V_t (Mnih et al. 2016, arXiv 1602.01783, section 4).

    Steps, arguments and the value behind the last step are those of `gae`; where fewer than n steps are left, all of
    them. n = 1 is gae with lam = 0; n >= T is lam = 1.
    """
    chex.assert_equal_shape([rewards, values, mask])
    dtype = jnp.result_type(rewards, values, jnp.float32)
    steps_first = jnp.argsort(~(mask > 0), axis=1, stable=True)
    rewards, values = (
        jnp.take_along_axis(keep(x.astype(dtype), mask), steps_first, axis=1) for x in (rewards, values)
    )
    steps, t = jnp.sum(mask > 0, axis=1)[:, None], jnp.arange(mask.shape[1])[None, :]
    ahead = t - t.T
    discount = jnp.where((ahead >= 0) & (ahead < n), jnp.power(jnp.asarray(gamma, dtype), jnp.maximum(ahead, 0)), 0.0)
    end = jnp.minimum(t + jnp.asarray(n, jnp.int32), steps)
    final = jnp.zeros_like(steps, dtype) if final_values is None else final_values.astype(dtype)[:, None]
    behind = jnp.take_along_axis(values, jnp.minimum(end, mask.shape[1] - 1), axis=1)
    behind = jnp.where(end < steps, behind, final) * jnp.power(jnp.asarray(gamma, dtype), jnp.maximum(end - t, 0))
    advantages = jnp.matmul(rewards, discount.T, precision="highest") + behind - values
    place = jnp.maximum(jnp.cumsum(mask > 0, axis=1) - 1, 0)
    return keep(jnp.take_along_axis(advantages, place, axis=1), mask)


def v_trace(
    rewards: Array, values: Array, log_ratio: Array, mask: Array, gamma: float, final_values: Array | None = None, *,
    rho_bar: float = 1.0, c_bar: float = 1.0, lam: float = 1.0,
) -> tuple[Array, Array]:
    """Off-policy value targets and advantages (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2), [B,T]:

        v_s = V_s + rho_s (r_s + gamma V_{s+1} - V_s) + gamma c_s (v_{s+1} - V_{s+1})
        A_s = rho_s (r_s + gamma v_{s+1} - V_s),   rho = min(rho_bar, pi/mu), c = lam min(c_bar, pi/mu)

    log_ratio [B,T]: log pi - log mu of each decision. Steps, arguments and the value behind the last step are those of
    `gae`. On-policy and unclipped, A is gae with lam = 1 and v = V + A; with lam < 1, v - V is gae with that lam.
    """
    chex.assert_equal_shape([rewards, values, log_ratio, mask])
    dtype = jnp.result_type(rewards, values, jnp.float32)
    rewards, values, log_ratio = (keep(x.astype(dtype), mask) for x in (rewards, values, log_ratio))
    ratio = bounded_exp(log_ratio)
    final = jnp.zeros(rewards.shape[0], dtype) if final_values is None else final_values.astype(dtype)

    def back(carry, step):
        next_value, next_target = carry
        reward, value, ratio, kept = step
        rho, c = jnp.minimum(rho_bar, ratio), lam * jnp.minimum(c_bar, ratio)
        target = value + rho * (reward + gamma * next_value - value) + gamma * c * (next_target - next_value)
        advantage = rho * (reward + gamma * next_target - value)
        carry = jnp.where(kept, value, next_value), jnp.where(kept, target, next_target)
        return carry, (jnp.where(kept, target, 0.0), jnp.where(kept, advantage, 0.0))

    steps = (rewards.T, values.T, ratio.T, (mask > 0).T)
    targets, advantages = jax.lax.scan(back, (final, final), steps, reverse=True)[1]
    return targets.T, advantages.T


def whiten(x: Array, mask: Array, total=lambda tree: tree, *, std_eps: float = 0.0) -> Array:
    """(x - mean) / sqrt(var + std_eps^2) over the kept tokens of the whole batch, var over n; 0 where x varies by
    rounding alone.

    std_eps is in the units of x. With 0 the result is exactly invariant to affine maps; but where x holds a KL that
    ought to be 0, the last digits in which a sampler's log-probabilities differ from a trainer's would be blown up to 1.
    `total` sums a tree over the shards of the batch. x, mask [B,T].
    """
    x = keep(x, mask)
    n = total(count(mask))
    centred = less_mean(less_mean(x, mask, n, total), mask, n, total)  # twice: the rounding error of a long sum is no spread
    squares, size = total((jnp.sum(centred**2), jnp.sum(x**2)))
    varies = beyond_rounding(squares, size)
    variance = safe_div(jnp.where(varies, squares, 1.0), n)
    return centred * jnp.where(varies & (n > 0), jax.lax.rsqrt(jnp.where(n > 0, variance, 1.0) + std_eps**2), 0.0)


def clipped_value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, *, totals: Totals, value_clip: float
) -> tuple[Array, Metrics]:
    """Token mean of max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2: pessimistic, as PPO's policy clip
    (Schulman et al. 2017 in the form of the authors' baselines code, ppo2). All arrays [B,T].
    """
    chex.assert_equal_shape([values, old_values, returns, mask])
    values, old_values, returns = (keep(x, mask) for x in (values, stop(old_values), stop(returns)))
    free = (values - returns) ** 2
    bound = (old_values + jnp.clip(values - old_values, -value_clip, value_clip) - returns) ** 2
    per_token = 0.5 * jnp.maximum(free, bound)
    metrics = {"value_error": free, "value_clip_fraction": (bound > free).astype(free.dtype)}
    return token_mean(per_token, mask, totals), {k: weighed(x, mask) for k, x in metrics.items()}
