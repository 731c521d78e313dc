"""Choosing a token from logits, one key per row, so that neither sharding nor batch order changes a draw."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.types import Array


class Chooser(NamedTuple):
    """noise(keys [B], vocab) -> noise, a pytree with leading axis B: all the randomness of one choice.
    choose(noise, logits [B,V]) -> (token [B] int32, logp [B], support [B,V] bool or None)

    logp is the one under which the token was really drawn, temperature and support included; support is None
    when every token may be drawn. Noise is apart so that a rollout can draw it for several steps at once.
    """

    noise: Callable
    choose: Callable


def row_keys(key: Array, rows: Array) -> Array:
    """Keys addressed by global row number: fold_in(key, rows[i]). rows [B] int -> keys [B]."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def top_k_support(logits: Array, k: int) -> Array:
    """The k largest logits of each row (ties at the edge are all kept). [B,V] -> bool [B,V]."""
    return logits >= jax.lax.top_k(logits, k)[0][:, -1:]


def top_p_support(logits: Array, p: float) -> Array:
    """The smallest set of most probable tokens whose mass reaches p (Holtzman et al. 2020); never empty.

    A token is kept while the mass strictly before it, in descending order, is below p.
    """
    probs = jax.nn.softmax(logits, axis=-1)
    order = jnp.argsort(-probs, axis=-1)
    ranked = jnp.take_along_axis(probs, order, axis=-1)
    kept = (jnp.cumsum(ranked, axis=-1) - ranked) < p
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)


def sampler(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Chooser:
    """Draws from softmax(logits / temperature) on the kept support. temperature > 0, may be traced.

    The token is the argmax of logits / temperature + Gumbel noise, which has exactly that distribution.
    """

    def noise(keys: Array, vocab: int) -> Array:
        return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,)))(keys)

    def choose(noise: Array, logits: Array) -> tuple[Array, Array, Array | None]:
        logits = logits.astype(jnp.float32) / temperature
        if top_k is not None:
            logits = jnp.where(top_k_support(logits, min(top_k, logits.shape[-1])), logits, -jnp.inf)
        if top_p is not None:
            logits = jnp.where(top_p_support(logits, top_p), logits, -jnp.inf)
        support = logits > -jnp.inf if top_k is not None or top_p is not None else None
        token = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
        return token, _logp(logits, token), support

    return Chooser(noise, choose)


def _greedy(noise: tuple, logits: Array) -> tuple[Array, Array, None]:
    logits = logits.astype(jnp.float32)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return token, _logp(logits, token), None


# The most probable token, the first of equals; its log-probability is the model's own at temperature 1.
greedy = Chooser(lambda keys, vocab: (), _greedy)


def _logp(logits: Array, token: Array) -> Array:
    return jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
