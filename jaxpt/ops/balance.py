"""How evenly experts are used: losses that push towards balance, the bias that needs none, and what to watch.

Letters as in ops.routing. `mask` [N] bool says which tokens count (None: all). A load [E] is each expert's share of the
assignments; it sums to 1.
"""

import jax
import jax.numpy as jnp

from jaxpt.ops.masked import count, keep, masked_mean, safe_div
from jaxpt.types import Array


def load_of(index: Array, experts: int, mask: Array | None = None) -> Array:
    """[E] from index [N,k]; 0 everywhere where nothing counts. No gradient: it is a count."""
    mask = jnp.ones(len(index), bool) if mask is None else mask
    counted = jnp.broadcast_to(mask[:, None], index.shape).astype(jnp.float32)
    number = jnp.zeros(experts).at[index.reshape(-1)].add(counted.reshape(-1), mode="drop")
    return safe_div(number, number.sum())


def balance_loss(probs: Array, index: Array, mask: Array | None = None) -> Array:
    """E sum_e load_e mean_n probs_ne (Switch, Fedus et al. 2021, arXiv:2101.03961, equation 4).

    1 where either the load or the mean probability is uniform. That is not its minimum: it is below 1 wherever loads
    and mean probabilities are out of step, so its value says nothing about balance. Its gradient reaches probs only, and
    pushes down the experts that have more than their share. probs [N,E] sum to 1 for each token.
    """
    E = probs.shape[-1]
    mask = jnp.ones(len(index), bool) if mask is None else mask
    mean = safe_div(keep(probs, jnp.broadcast_to(mask[:, None], probs.shape)).sum(axis=0), count(mask))
    return E * jnp.sum(load_of(index, E, mask) * mean)


def sequence_balance_loss(probs: Array, index: Array, mask: Array) -> Array:
    """The mean over rows of each row's own balance_loss (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).
    probs [B,T,E], index [B,T,k], mask [B,T]; rows without a token that counts are left out."""
    return masked_mean(jax.vmap(balance_loss)(probs, index, mask), mask.any(axis=1))


def z_loss(logits: Array, mask: Array) -> Array:
    """mean_n (log sum_e exp logits_ne)^2, which keeps logits small (ST-MoE, Zoph et al. 2022, arXiv:2202.08906,
    equation 5)."""
    logits = keep(logits, jnp.broadcast_to(mask[:, None], logits.shape))
    return masked_mean(jax.nn.logsumexp(logits, axis=-1) ** 2, mask)


def moved_bias(bias: Array, load: Array, rate: Array | float) -> Array:
    """The bias [..., E] of ops.routing.choose after a batch: up by `rate` for experts below their fair share, down for
    those above it (Wang et al. 2024, arXiv:2408.15664, algorithm 1)."""
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def violation(load: Array) -> Array:
    """MaxVio: how far the largest load [..., E] is above the fair share, as a multiple of it; 0 at balance, E - 1 when one
    expert has all (same source)."""
    return load.shape[-1] * jnp.max(load, axis=-1) - 1


def evenness(load: Array) -> Array:
    """Entropy of the load [..., E] over log E: 1 at balance, 0 when one expert has all."""
    return jnp.sum(jax.scipy.special.entr(load), axis=-1) / jnp.log(load.shape[-1])


def information(number: Array) -> Array:
    """Mutual information in nats of a joint count number [G,E], say of domains and experts."""
    joint = number / jnp.maximum(number.sum(), 1e-30)
    entropy = lambda p: jnp.sum(jax.scipy.special.entr(p))  # noqa: E731
    return entropy(joint.sum(axis=0)) + entropy(joint.sum(axis=1)) - entropy(joint)


def alert(load: Array, least_evenness: float = 0.9, most_violation: float = 1.0) -> Array:
    """Whether loads [..., E] leave their band, bool [...]: too uneven on the whole, or one expert too busy."""
    return (evenness(load) < least_evenness) | (violation(load) > most_violation)
