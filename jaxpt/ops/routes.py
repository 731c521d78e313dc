"""Routers trained by reinforcement: routes that are drawn, their probabilities, and two estimators of the gradient.

A route is k distinct experts in the order in which they were drawn, each with probability proportional to exp(logit)
among those left (Plackett and Luce). The best k of logits plus Gumbel noise are such a draw (Kool et al. 2019,
arXiv:1903.06059).
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.ops.attention import FILL
from jaxpt.ops.masked import stop
from jaxpt.types import Array


def all_routes(experts: int, k: int) -> np.ndarray:
    """[R,k]: every ordered choice of k experts."""
    return np.array(list(itertools.permutations(range(experts), k)), np.int32)


def draw_route(logits: Array, noise: Array, k: int) -> Array:
    """[..., k] from logits [..., E] and standard Gumbel noise of that shape."""
    return jax.lax.top_k(logits + noise, k)[1]


def route_logp(logits: Array, route: Array) -> Array:
    """[...]: log-probability of the route [..., k] under logits [..., E]."""
    chosen = jnp.take_along_axis(logits, route, axis=-1)
    hot = jax.nn.one_hot(route, logits.shape[-1])
    gone = jnp.cumsum(hot, axis=-2) - hot > 0  # [..., k, E]: drawn before
    left = jax.nn.logsumexp(jnp.where(gone, FILL, logits[..., None, :]), axis=-1)
    return jnp.sum(chosen - left, axis=-1)


def leave_one_out(loss: Array) -> Array:
    """Each sample's loss [..., S] less the mean of the others; S >= 2."""
    S = loss.shape[-1]
    return (loss - jnp.mean(loss, axis=-1, keepdims=True)) * S / (S - 1)


def reinforced(loss: Array, logp: Array, baseline: bool = True) -> Array:
    """What to differentiate for an unbiased gradient of the expected loss, from S independent routes: loss, logp [..., S].

    mean_s [ stop(loss_s - mean of the others) logp_s + loss_s ] (Williams 1992; the baseline after Kool et al. 2019,
    "Buy 4 REINFORCE samples"). The second term is the part of a loss that depends on the parameters given the route.
    """
    weight = leave_one_out(loss) if baseline else loss
    return jnp.mean(stop(weight) * logp + loss, axis=-1)


def straight_through(logits: Array, noise: Array, k: int, temperature: float | Array = 1.0) -> Array:
    """[..., E]: 1 at the drawn experts, 0 elsewhere, with the gradient of k softmax((logits + noise) / temperature) (Jang et
    al. 2017, arXiv:1611.01144, section 2.2). Biased: the loss is differentiated as if it were linear in the choice."""
    hard = jax.nn.one_hot(draw_route(logits, noise, k), logits.shape[-1]).sum(axis=-2)
    soft = k * jax.nn.softmax((logits + noise) / temperature, axis=-1)
    return stop(hard - soft) + soft
