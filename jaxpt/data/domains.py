"""Text from several sources at once, whose entropy is known exactly: every row is a Markov chain of one of G domains.

All domains use one vocabulary, so a model must find out from what it has read which domain a row is of, and then has G
tables of V x V transitions to remember: what experts are said to divide among themselves.
"""

import jax
import jax.numpy as jnp

from jaxpt.types import Array, Key


def draw_tables(key: Key, domains: int, vocab: int, sharpness: float | Array) -> Array:
    """[G,V,V] transition probabilities, softmax of normal logits of deviation `sharpness`."""
    return jax.nn.softmax(sharpness * jax.random.normal(key, (domains, vocab, vocab)), axis=-1)


def draw_rows(tables: Array, keys: Array, length: int) -> tuple[Array, Array]:
    """tokens [B,length] int32 and domain [B]: for each key [B] a uniform domain, a uniform first token, then its chain."""
    G, V, _ = tables.shape

    def row(key):
        which, first, walk = jax.random.split(key, 3)
        domain = jax.random.randint(which, (), 0, G)
        logits = jnp.log(tables[domain])

        def step(token, noise):
            return jnp.argmax(logits[token] + noise), token

        noise = jax.random.gumbel(walk, (length, V))
        _, tokens = jax.lax.scan(step, jax.random.randint(first, (), 0, V), noise)
        return tokens.astype(jnp.int32), domain

    return jax.vmap(row)(keys)


def optimal_logp(tables: Array, tokens: Array) -> Array:
    """[B,T] log-probability of each token given those before it, for one who knows the tables but not the domain.

    With p(g | x_<t) proportional to prod_s<t P_g(x_s | x_s-1), the best prediction is their mixture. Index 0: -log V.
    """
    logp = jnp.log(tables)[:, tokens[:, :-1], tokens[:, 1:]]  # [G,B,T-1]
    whole = jax.nn.logsumexp(jnp.pad(jnp.cumsum(logp, axis=-1), ((0, 0), (0, 0), (1, 0))), axis=0)
    return jnp.pad(jnp.diff(whole, axis=-1), ((0, 0), (1, 0)), constant_values=-jnp.log(tables.shape[1]))
