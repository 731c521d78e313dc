"""Which rows make a pair: the best and the worst of a group; a prompt and a response written for another."""

import jax.numpy as jnp

from jaxpt.objectives.shaping import has_signal
from jaxpt.types import Array


def best_and_worst(reward: Array, group: Array) -> tuple[Array, Array, Array]:
    """Pairs of an online (iterative) DPO step: in every group the row of the highest reward against the lowest.

    reward, group [B] -> (chosen [B] int, rejected [B] int, exists [B] bool). Row i describes the pair of its
    group; exists is True on the group's first row only, so there is one pair a group in a fixed shape: gather by
    the indices and take what does not exist out of both masks. Among equals the first row is taken. A group whose
    rewards are equal (up to rounding) has no pair; missing rewards (not finite) take no part. Any preference row
    then gives the step: Xu et al. 2023, arXiv 2312.16682; Guo et al. 2024, arXiv 2402.04792.
    """
    same = group[:, None] == group[None, :]
    scored = same & jnp.isfinite(reward)[None, :]
    chosen = jnp.argmax(jnp.where(scored, reward[None, :], -jnp.inf), axis=1)
    rejected = jnp.argmin(jnp.where(scored, reward[None, :], jnp.inf), axis=1)
    first = jnp.argmax(same, axis=1) == jnp.arange(group.shape[0])
    return chosen, rejected, first & has_signal(reward, group)


def mismatched(group: Array) -> tuple[Array, Array]:
    """For every prompt a response that was written for another one: the pairs of KTO's KL estimate.

    group [B] int, rows with one value share a prompt -> (response [B] int, valid [B] bool): the response of row
    response[i] stands behind the prompt of row i. With distinct prompts this is the shift by one of Ethayarajh et
    al. 2024, arXiv 2402.01306, section 4.1, and valid for every B >= 2. Groups are kept apart by rotating the sorted
    rows by the size of the largest group, which leaves no row matched unless one group fills more than half of the
    batch; then, and at B = 1, the rows that stay matched are not valid and belong in no KL: leave them out of kl_mask.
    """
    order = jnp.argsort(group)
    largest = jnp.max(jnp.sum(group[:, None] == group[None, :], axis=1))
    places = (jnp.arange(group.shape[0]) + largest) % group.shape[0]
    response = jnp.zeros_like(order).at[order].set(order[places])
    return response, group[response] != group
