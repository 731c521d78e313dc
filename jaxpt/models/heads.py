"""A scalar read off a model's hidden states: of a state (value), of a whole row (reward), of the steps of a solution.

A head is {"w": [D], "b": []}. What objectives.reward and objectives.value take are these scalars.
"""

import jax.numpy as jnp

from jaxpt.types import Array, Params


def init_head(width: int) -> Params:
    """Says 0 everywhere, so that training begins from no opinion."""
    return {"w": jnp.zeros(width), "b": jnp.zeros(())}


def scores(head: Params, hidden: Array) -> Array:
    """[B,T]: what the head says behind each token of hidden [B,T,D]."""
    return hidden @ head["w"] + head["b"]


def at_end(behind: Array, length: Array) -> Array:
    """[B]: behind the last of `length` [B] tokens (the first token's, of an empty row): the reward of a row."""
    return jnp.take_along_axis(behind, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]


def at_steps(behind: Array, ends: Array, steps: int) -> tuple[Array, Array]:
    """(score [B,steps], mask [B,steps] bool): behind the tokens that end a step (ends [B,T] bool), in order; 0 where a row
    has fewer. Further steps are left out."""
    number = jnp.where(ends, jnp.cumsum(ends, axis=1) - 1, steps)  # `steps` is no place: dropped
    rows = jnp.arange(ends.shape[0])[:, None]
    empty = jnp.zeros((ends.shape[0], steps), behind.dtype)
    score = empty.at[rows, number].set(jnp.where(ends, behind, 0), mode="drop")
    return score, jnp.arange(steps)[None] < jnp.sum(ends, axis=1, keepdims=True)
