"""Attention: rotary positions, masks, and the masked softmax average of values."""

import jax
import jax.numpy as jnp

from jaxpt.ops.dots import dot
from jaxpt.types import Array

FILL = jnp.finfo(jnp.float32).min  # a masked score; finite, so that FILL - FILL is 0 and not NaN


def frequencies(theta: float, width: int) -> Array:
    """[width / 2] radians per position of each pair, theta^(-2i/width)."""
    half = width // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rope(x: Array, positions: Array, frequency: Array) -> Array:
    """Rotary embedding of x [B,T,H,K] (K even) at integer positions [B,T] (or [1,T]).

    Pair i, made of the entries i and i + K/2, turns by the angle position * frequency[i], so
    that scores of rotated queries and keys depend on differences of positions only
    (Su et al. 2021, arXiv:2104.09864; the pairing of halves is GPT-NeoX's).
    """
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def causal_mask(
    T: int, *, segments: Array | None = None, prefix: Array | None = None, branches: Array | None = None,
    window: int | None = None, positions: Array | None = None,
) -> Array:
    """[B,T,T] bool ([1,T,T] without arguments): True where the token at index t sees the one at s.

    A token sees itself and what stands before it in the row, with `window` itself and at most window - 1 before it,
    by `positions` [B,T] (of which nothing else depends; by default the indices).
    segments [B,T] int: it sees only its own segment; negative segments are padding, which sees
    nothing and is seen by nothing.
    prefix [B] int: the first prefix[b] tokens of the row also see each other forwards.
    branches [B,T] int: it sees only branch 0, the trunk, and its own.
    """
    t, s = jnp.arange(T)[None, :, None], jnp.arange(T)[None, None, :]
    mask = s <= t
    if window is not None:
        at = jnp.arange(T)[None] if positions is None else positions
        mask &= at[:, :, None] - at[:, None, :] < window
    if prefix is not None:
        mask |= (t < prefix[:, None, None]) & (s < prefix[:, None, None])
    if segments is not None:
        mask &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] >= 0)
    if branches is not None:
        mask &= (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    return mask


def cache_mask(positions: Array, size: int, window: int | None = None) -> Array:
    """[B,k,size] bool: a query at positions [B,k] sees the cache slots up to its own position, or the last `window`."""
    slot = jnp.arange(size)[None, None, :]
    seen = slot <= positions[:, :, None]
    return seen if window is None else seen & (positions[:, :, None] - slot < window)


def attention(q: Array, k: Array, v: Array, mask: Array, dots: str = "float32", softcap: float | None = None) -> Array:
    """softmax(q k' / sqrt(K)) v over the slots that the mask allows, [B,T,H,K].

    q [B,T,H,K]; k, v [B,S,G,K] with G dividing H: H/G neighbouring query heads share a key head
    (Ainslie et al. 2023, arXiv:2305.13245); the values' width may be another. mask [B,T,S] bool, or [1,T,S] for all rows alike.
    The softmax is float32; `dots` is the input type of the two products; with `softcap` c scores s become c tanh(s / c).

    A query that sees nothing gives exactly 0 and passes no gradient. A slot that no query sees and
    a query that sees nothing may hold NaN or inf: neither reaches a value or a gradient, because
    they are replaced before any arithmetic (a weight of 0 would still make 0 * NaN).
    """
    seen = mask.any(axis=1)[:, :, None, None]
    q = jnp.where(mask.any(axis=2)[:, :, None, None], q, 0)
    k, v = (jnp.swapaxes(jnp.where(seen, x, 0), 1, 2) for x in (k, v))
    return attention_value(q, k, v, mask, dots, softcap)


def attention_value(q: Array, k: Array, v: Array, mask: Array, dots: str = "float32", softcap: float | None = None) -> Array:
    """`attention` on a cache, k and v [B,G,S,K], whose slots are finite: the same value without the passes over k
    and v that replace what nobody sees, which cost a third of a decode step. For values, not for gradients.
    """
    B, T, H, K = q.shape
    G = k.shape[1]
    scores = dot("btgrk,bgsk->bgrts", q.reshape(B, T, G, H // G, K) * K**-0.5, k, dots)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None], scores, FILL)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    # Dividing the average and not the weights saves a pass over [T,S].
    out = dot("bgrts,bgsk->bgrtk", weights, v, dots) / weights.sum(axis=-1)[..., None]
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(B, T, H, v.shape[-1])
    return jnp.where(mask.any(axis=2)[:, :, None, None], out, 0)
