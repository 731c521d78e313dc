"""The critic's side: generalized advantage estimation and the value loss."""

import chex
import jax
import jax.numpy as jnp

from jaxpt.objectives.reduction import Totals, token_mean
from jaxpt.ops.masked import count, keep, safe_div, stop, weighed
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


def whiten(x: Array, mask: Array, total=lambda tree: tree, *, std_eps: float = 0.0) -> Array:
    """(x - mean) / sqrt(var + std_eps^2) over the kept tokens of the whole batch, var over n; 0 where x varies by
    rounding alone.

    std_eps is in the units of x. With 0 the result is exactly invariant to affine maps; but where x holds a KL that
    ought to be 0, the last digits in which a sampler's log-probabilities differ from a trainer's would be blown up to 1.
    `total` sums a tree over the shards of the batch. x, mask [B,T].
    """
    x = keep(x, mask)
    n = total(count(mask))

    def centre(x):
        return keep(x - safe_div(total(jnp.sum(x)), n), mask)

    centred = centre(centre(x))  # twice: the rounding error of a long sum is no spread
    squares, size = total((jnp.sum(centred**2), jnp.sum(x**2)))
    rounding = 16 * jnp.finfo(x.dtype).eps
    varies = squares > rounding**2 * size
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
