"""Exact expectations over an environment whose responses can be listed.

A tabular policy is a table of logits [nodes, V]: a node is what stands before a decision. Sums over all
leaves are expectations without sampling error, and jax.grad of them is the exact policy gradient:

    J(logits) = sum_leaf p(leaf) R(leaf),    p(leaf) = product over the policy's decisions of p(token | node)
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.envs.protocol import POLICY, Environment, Task
from jaxpt.types import Array, Key


class Leaves(NamedTuple):
    """All N responses of a task as one batch, which any loss over [N,T] arrays takes as it stands."""

    tokens: Array  # [N,T] int32, 0 behind `length`
    mask: Array  # [N,T] bool, True where the policy decides
    node: Array  # [N,T] int32, the row of the table for this decision; 0 where mask is False
    reward: Array  # [N] float32
    length: Array  # [N] int32


@partial(jax.jit, static_argnums=0)
def leaves(env: Environment, task: Task, key: Key) -> Leaves:
    """Replays every response of `env.enumerate(task)`; `key` is the environment's noise, one for all.

    Nodes are numbered 0, 1, ..; a table needs int(leaves.node.max()) + 1 rows.
    """
    tokens, length = env.enumerate(task)

    def replay(row: Array) -> tuple[Array, Array]:
        def read(state, token):
            return env.feed(task, state, token), env.pending(task, state) == POLICY

        state, decides = jax.lax.scan(read, env.init(task, key), row)
        return decides, env.outcome(task, state).reward

    decides, reward = jax.vmap(replay)(tokens)
    mask = decides & (jnp.arange(tokens.shape[1])[None] < length[:, None])
    return Leaves(tokens, mask, prefix_ids(tokens, mask), reward, length)


def prefix_ids(tokens: Array, mask: Array) -> Array:
    """[N,T]: one number for each distinct prefix tokens[n, :t] at which a decision stands; 0 off the mask.

    Costs N^2 T comparisons.
    """
    count, width = tokens.shape
    same = (tokens[:, None] == tokens[None]).astype(jnp.int32)  # [N,N,T]
    shared = jnp.cumprod(jnp.pad(same[:, :, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=1), axis=2)
    first = jnp.argmax(shared * mask[None], axis=1)  # the first row with a decision behind this prefix
    name = first * width + jnp.arange(width)[None]
    used = jnp.zeros(count * width, jnp.int32).at[name].max(mask.astype(jnp.int32))
    return jnp.where(mask, (jnp.cumsum(used) - 1)[name], 0).astype(jnp.int32)


def node_logp(logits: Array, leaves: Leaves) -> Array:
    """[nodes,V] log-probabilities at each node; -inf for a token that no response takes there.

    Such a token (the padding, an invalid one) has probability 0: its logit is ignored and gets no gradient, and
    the others are normalised without it.
    """
    support = jnp.zeros(logits.shape, bool).at[leaves.node, leaves.tokens].max(leaves.mask)
    support |= ~support.any(-1, keepdims=True)  # a row that no decision uses stays finite
    return jax.nn.log_softmax(jnp.where(support, logits, -jnp.inf), axis=-1)


def leaf_logp(logits: Array, leaves: Leaves) -> Array:
    """[N,T] log-probabilities of the decisions; 0 off the mask."""
    return jnp.where(leaves.mask, node_logp(logits, leaves)[leaves.node, leaves.tokens], 0.0)


def node_entropy(logits: Array, leaves: Leaves) -> Array:
    """[nodes] entropy of the policy at each node, in nats, over the tokens that some response takes there."""
    logp = node_logp(logits, leaves)
    taken = logp > -jnp.inf
    return -jnp.sum(jnp.where(taken, jnp.exp(logp) * jnp.where(taken, logp, 0.0), 0.0), axis=-1)


def leaf_prob(logits: Array, leaves: Leaves) -> Array:
    """[N] probability of each response; they sum to 1."""
    return jnp.exp(leaf_logp(logits, leaves).sum(-1))


@jax.jit
def value(logits: Array, leaves: Leaves) -> Array:
    """[] J, the expected reward of the tabular policy."""
    return leaf_prob(logits, leaves) @ leaves.reward


def node_values(logits: Array, leaves: Leaves) -> Array:
    """[nodes] V, the expected reward of the responses that pass a node: sum over them of what remains of their
    probability behind the node, times their reward. What a perfect critic says."""
    logp = leaf_logp(logits, leaves)
    onward = jnp.exp(jnp.cumsum(logp[:, ::-1], axis=1)[:, ::-1])
    worth = jnp.where(leaves.mask, onward * leaves.reward[:, None], 0.0)
    return jnp.zeros(logits.shape[0], worth.dtype).at[leaves.node].add(worth)
