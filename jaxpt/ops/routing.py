"""Which experts a token goes to, and with which weight.

Letters: N tokens, E experts, k experts of a token, C places of an expert. Scores are [N,E]; a choice is index [N,k],
the distinct experts of every token, best first; gates [N,k] are their weights.

Softmax before top-k or after it is one thing: the chosen probabilities, renormalised, are the softmax of the chosen
logits. So `normalise` is the whole of that question (Shazeer et al. 2017, arXiv:1701.06538, and Mixtral normalise;
Switch and GShard do not).
"""

import math

import jax
import jax.numpy as jnp

from jaxpt.ops.attention import FILL
from jaxpt.types import Array

SCORES = {"softmax": lambda logits: jax.nn.softmax(logits, axis=-1), "sigmoid": jax.nn.sigmoid}


def scores_of(kind: str, logits: Array, alive: Array | None = None) -> Array:
    """[N,E] softmax or sigmoid of logits [N,E]; experts that are not alive [N,E] score exactly 0 and get no gradient."""
    return SCORES[kind](logits if alive is None else jnp.where(alive, logits, FILL))


def choose(
    scores: Array, k: int, *, bias: Array | None = None, groups: int = 1, top_groups: int = 1, alive: Array | None = None
) -> Array:
    """Token choice: [N,k] int32, the k experts of largest score + bias; equal ones in order of number.

    bias [E]: decides the choice and nothing else (Wang et al. 2024, arXiv:2408.15664).
    groups: only the experts of a token's best `top_groups` of so many equal groups are eligible; a group is as good as
    its two best experts together (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    alive [N,E] bool: experts that may be chosen, at least k for each token.
    """
    ranked = jax.lax.stop_gradient(scores if bias is None else scores + bias[None])
    if alive is not None:
        ranked = jnp.where(alive, ranked, -jnp.inf)
    if top_groups < groups:
        ranked = jnp.where(_eligible(ranked, groups, top_groups), ranked, -jnp.inf)
    return jax.lax.top_k(ranked, k)[1]


def _eligible(ranked: Array, groups: int, top_groups: int) -> Array:
    N, E = ranked.shape
    best = jax.lax.top_k(ranked.reshape(N, groups, E // groups), min(2, E // groups))[0].sum(axis=-1)
    kept = jax.nn.one_hot(jax.lax.top_k(best, top_groups)[1], groups).sum(axis=1) > 0
    return jnp.repeat(kept, E // groups, axis=1)


def weigh(scores: Array, index: Array, *, normalise: bool, scale: float = 1.0) -> Array:
    """Gates [N,k]: the scores of the chosen experts; they sum to `scale` where normalised."""
    gates = jnp.take_along_axis(scores, index, axis=-1)
    if normalise:
        gates = gates / (gates.sum(axis=-1, keepdims=True) + 1e-20)  # sigmoids may all vanish
    return scale * gates


def expert_choice(scores: Array, places: int, mask: Array) -> tuple[Array, Array]:
    """Every expert takes the tokens that score it highest (Zhou et al. 2022, arXiv:2202.09368).

    scores [N,E], mask [N] bool (tokens that may be taken) -> token [E,C] int32, gates [E,C].
    A token may be taken by any number of experts, none included. Not causal: whether a token is taken depends on those
    behind it.
    """
    eligible = jnp.where(mask[:, None], scores, 0.0)
    gates, token = jax.lax.top_k(eligible.T, places)
    return token, gates


def hashed(number: Array, experts: int) -> Array:
    """[N,E] float32 in [0, 1): scores that depend on an integer alone, for routing that nothing learns (Roller et al.
    2021, arXiv:2106.04426). number [N] int32: the token, for routing by hash; the token and its place, for random."""
    x = number.astype(jnp.uint32)[:, None] * jnp.uint32(experts) + jnp.arange(experts, dtype=jnp.uint32)[None]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # MurmurHash3's finaliser
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return (x >> 8).astype(jnp.float32) / 2**24


def survivors(key: Array, rows: int, experts: int, k: int, rate: Array | float) -> Array:
    """[rows,E] bool for expert dropout: each expert is off with probability `rate`, and k always stay on."""
    u = jax.random.uniform(key, (rows, experts))
    return (u >= rate) | (u >= jax.lax.top_k(u, k)[0][:, -1:])


def places_of(tokens: int, k: int, experts: int, factor: float) -> int:
    """C, the places of an expert: `factor` times its fair share of the tokens, at most all of them."""
    return min(tokens, math.ceil(factor * tokens * k / experts))
