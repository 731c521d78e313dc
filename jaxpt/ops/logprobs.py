"""The functions that own shift, temperature, support and gather.

Objectives ask for statistics of the decisions in a batch. Logits of more than `chunk` positions are never
held: the vocabulary product runs over chunks, and the backward pass computes each of them again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpt.ops.masked import at_least_float32
from jaxpt.types import Array

STATISTICS = ("logp", "entropy", "logsumexp", "kl")


def token_stats(
    hidden: Array,
    W: Array,
    tokens: Array,
    *,
    want: Sequence[str] = ("logp",),
    temperature: float | Array = 1.0,
    support: Array | None = None,
    other: tuple[Array, Array] | None = None,
    chunk: int = 16384,
) -> dict[str, Array]:
    """Statistics [B,T] of the decisions behind `tokens`, in nats; index 0 is 0.

    hidden [B,T,D], W [D,V], tokens [B,T]: index t is decided by softmax(hidden[:, t-1] @ W / temperature),
    restricted to `support` ([B,T,ceil(V/8)] uint8, jnp.packbits along V) where it is given; a row of zeros,
    as rollouts store at slots that are no decisions, restricts nothing.
        logp       log-probability of tokens[t]; -inf for a token outside the support
        entropy    of the whole distribution
        logsumexp  of the tempered logits
        kl         KL(this || other), other = (hidden', W') with the same temperature and support
    `chunk` positions are computed at a time.
    """
    unknown = set(want) - set(STATISTICS)
    if unknown or ("kl" in want) != (other is not None):
        raise ValueError(f"want={tuple(want)}: expected names from {STATISTICS}, and other=(hidden, W) iff 'kl'")
    B, T = tokens.shape
    rows = B * (T - 1)
    flat = lambda x: x.reshape(rows, *x.shape[2:])  # noqa: E731
    inputs = {"hidden": flat(hidden[:, :-1]), "token": flat(tokens[:, 1:])}
    if support is not None:
        inputs["support"] = flat(support[:, 1:])
    if other is not None:
        inputs["other"] = flat(other[0][:, :-1])

    def stats(x: dict[str, Array], W: Array, W_other: Array | None) -> dict[str, Array]:
        kept = None if support is None else jnp.unpackbits(x["support"], axis=-1, count=W.shape[1]) > 0
        kept = None if kept is None else kept | ~jnp.any(kept, axis=-1, keepdims=True)
        logits = _logits(x["hidden"], W, temperature, kept)
        reference = None if other is None else _logits(x["other"], W_other, temperature, kept)
        return {name: _statistic(name, logits, x["token"], reference) for name in want}

    if rows > chunk:  # whole chunks in a checkpointed loop, so that the backward pass holds one at a time
        pad = -rows % chunk
        chunks = jax.tree.map(
            lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:]), inputs
        )
        body = jax.checkpoint(lambda x: stats(x, W, None if other is None else other[1]))
        out = jax.tree.map(lambda x: x.reshape(-1)[:rows], jax.lax.map(body, chunks))
    else:
        out = stats(inputs, W, None if other is None else other[1])
    return jax.tree.map(lambda x: jnp.pad(x.reshape(B, T - 1), ((0, 0), (1, 0))), out)


def decision_logits(hidden: Array, W: Array) -> Array:
    """[B,T,V]: those that decide tokens[:, t], for losses over whole distributions; index 0 is 0. hidden [B,T,D], W [D,V]."""
    return jnp.pad(hidden[:, :-1] @ W, ((0, 0), (1, 0), (0, 0)))


def _logits(hidden: Array, W: Array, temperature: float | Array, kept: Array | None) -> Array:
    """Tempered logits [N,V] in float32 (float64 stays float64); -inf outside the support."""
    logits = jnp.matmul(hidden, W)
    logits = at_least_float32(logits) / temperature
    return logits if kept is None else jnp.where(kept, logits, -jnp.inf)


def _statistic(name: str, logits: Array, token: Array, reference: Array | None) -> Array:
    logits, top = centred(logits)
    lse = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    if name == "logsumexp":
        return lse + top
    if name == "logp":
        return jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - lse
    # p log p is 0 where p is 0, although log p is -inf there: take such entries out before arithmetic.
    alive = logits > -jnp.inf
    logp = jnp.where(alive, logits, 0.0) - lse[:, None]
    p = jnp.where(alive, jnp.exp(logp), 0.0)
    if name == "entropy":
        return -jnp.sum(p * logp, axis=-1)
    reference, _ = centred(reference)
    absent = jnp.any(alive & ~(reference > -jnp.inf), axis=-1)  # mass where the other has none: KL = inf
    other = jnp.where(reference > -jnp.inf, reference, 0.0) - jnp.log(jnp.sum(jnp.exp(reference), axis=-1))[:, None]
    return jnp.where(absent, jnp.inf, jnp.sum(p * (logp - other), axis=-1))


def centred(logits: Array) -> tuple[Array, Array]:
    """Logits [...,V] less their largest, and it [...], which gets no gradient: the digits of large logits are lost here
    and not in a difference later."""
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    top = jnp.where(top > -jnp.inf, top, 0.0)
    return logits - top[..., None], top
