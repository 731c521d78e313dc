"""Array aliases, dimension letters, and the batch that every room passes on.

Dimension letters, used in names and shape comments throughout:
    B rows   T tokens of a row   V vocabulary   D model width   L layers   H heads   K key/value heads
    S cache slots   R signals   P prompts   G samples of one prompt (a group)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Key = jax.Array  # a typed PRNG key: jax.random.key(...)
Params = dict[str, Any]  # plain nested dicts of arrays, one subtree per layer
Metrics = dict[str, tuple[Array, Array]]  # name -> (sum, weight); the mean is sum / weight


class Trajectory(NamedTuple):
    """A batch of episodes. Every per-token array is [B,T]; index t describes the decision that
    produced tokens[t], computed from what stands before it; index 0 is 0 with mask 0.
    """

    tokens: Array  # [B,T] int32; prompt, response, then 0 behind `length`
    mask: Array  # [B,T] bool; True where the policy chose the token (not the environment)
    old_logp: Array  # [B,T] log-probability under the sampler; 0 where mask is False
    turn: Array  # [B,T] int32; number of the policy's turn (0, 1, ...); 0 where mask is False
    signals: Array  # [B,T,R] verifiable events of the decision
    reward: Array  # [B] the proxy reward the policy is trained on
    gold: Array  # [B] what is really wanted; hidden from training
    parts: Array  # [B,Q] the parts of the reward
    truncated: Array  # [B] bool; the budget ended the episode, not the environment
    group: Array  # [B] int32; rows with one value share a prompt
    length: Array  # [B] int32; tokens that stand in the row
    support: Array | None = None  # [B,T,ceil(V/8)] uint8, jnp.packbits of the tokens top-k or top-p kept


def bare_trajectory(
    tokens: Array, mask: Array, *, reward: Array | None = None, group: Array | None = None,
    old_logp: Array | None = None, length: Array | None = None,
) -> Trajectory:
    """A batch that no environment made: gold is the reward (0 by default), every row is a group of its own and
    fills its width unless said otherwise, and there are no signals, parts or truncations."""
    B, T = tokens.shape
    reward = jnp.zeros(B) if reward is None else reward
    return Trajectory(
        tokens=tokens, mask=mask, old_logp=jnp.zeros((B, T)) if old_logp is None else old_logp,
        turn=jnp.zeros((B, T), jnp.int32), signals=jnp.zeros((B, T, 0)), reward=reward, gold=reward,
        parts=jnp.zeros((B, 0)), truncated=jnp.zeros(B, bool), group=jnp.arange(B) if group is None else group,
        length=jnp.full(B, T, jnp.int32) if length is None else length,
    )
