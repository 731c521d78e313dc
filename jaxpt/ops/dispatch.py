"""Experts applied to the tokens that chose them: four ways that agree to float rounding, and what each is for.

dense      every expert on every token: the reference, E / k times too much work
capacity   an expert has C places; assignments beyond are dropped, all first choices before any second one, earlier
           tokens first (GShard, Lepikhin et al. 2020, arXiv:2006.16668). The fast one on CPUs
blocks     assignments sorted by expert and padded to whole blocks of 64 rows: none is dropped (after Gale et al. 2022,
           MegaBlocks, arXiv:2211.15841). The dropless one on CPUs
ragged     sorted, then lax.ragged_dot: dropless, for accelerators (4 to 25 times slower than capacity on CPUs)

x [N,D]; index [N,k] int32, E where an assignment is void; gates [N,k]; gate_up [E,D,2F], down [E,F,D] of SwiGLU.
Each returns y [N,D] and kept [N,k] bool.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.ops.dots import LowRank, swiglu
from jaxpt.types import Array

BLOCK = 64  # rows: fewer waste no padding but feed the products too little


class Experts(NamedTuple):
    gate_up: Array | LowRank  # [E,D,2F]
    down: Array | LowRank  # [E,F,D]

    @property
    def count(self) -> int:
        return jax.tree.leaves(self.down)[0].shape[0]


def each_through_its_own(rows: Array, experts: Experts, dots: str = "float32") -> Array:
    """rows [R,S,D] through expert r each -> [R,S,D]."""
    return swiglu("rsd,rdf->rsf", "rsf,rfd->rsd", rows, *experts, dots)


def dense(x: Array, index: Array, gates: Array, experts: Experts, dots: str = "float32") -> tuple[Array, Array]:
    E = experts.count
    weights = jnp.sum(jax.nn.one_hot(index, E) * gates[..., None], axis=1)
    y = swiglu("nd,edf->enf", "enf,efd->end", x, *experts, dots)
    return jnp.sum(weights.T[:, :, None] * y, axis=0), index < E


def places(index: Array, experts: int) -> tuple[Array, Array]:
    """position [N,k] of each assignment among those of its expert, and size [E]: how many those are."""
    N, k = index.shape
    flat = index.T.reshape(-1)  # first choices first
    order = jnp.argsort(flat, stable=True)
    size = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    start = jnp.pad(jnp.cumsum(size), (1, 0))  # of E too: what is void stands last
    position = jnp.zeros_like(flat).at[order].set(jnp.arange(N * k) - start[flat[order]])
    return position.reshape(k, N).T, size


def gathered(
    x: Array, place: Array, kept: Array, gates: Array, experts: Experts, rows: int, dots: str
) -> Array:
    """Tokens to their places [R * rows], each run of `rows` through its expert of R, and back, weighed.
    place [N,k], all different where kept."""
    N, k = place.shape
    R = experts.count
    place = jnp.where(kept, place, R * rows)
    token = jnp.broadcast_to(jnp.arange(N)[:, None], (N, k))
    table = jnp.full(R * rows, N, jnp.int32).at[place].set(token, mode="drop")
    y = each_through_its_own(x.at[table].get(mode="fill", fill_value=0).reshape(R, rows, -1), experts, dots).reshape(R * rows, -1)
    back = y.at[place].get(mode="fill", fill_value=0)
    return weighed(gates, kept, back)


def weighed(gates: Array, kept: Array, y: Array) -> Array:
    """sum_k gates [N,k] y [N,k,D] over what was kept."""
    return jnp.sum(jnp.where(kept, gates, 0)[..., None] * y, axis=1)


def capacity(
    x: Array, index: Array, gates: Array, experts: Experts, dots: str = "float32", *, places_each: int
) -> tuple[Array, Array]:
    position, _ = places(index, experts.count)
    kept = (position < places_each) & (index < experts.count)
    return gathered(x, index * places_each + position, kept, gates, experts, places_each, dots), kept


def block_count(assignments: int, experts: int) -> int:
    """Blocks that suffice whatever the loads: sum of ceil(n_e / BLOCK) over experts with sum n_e = assignments."""
    busy = min(experts, assignments)
    return busy + (assignments - busy) // BLOCK


def blocks(x: Array, index: Array, gates: Array, experts: Experts, dots: str = "float32") -> tuple[Array, Array]:
    E, count = experts.count, block_count(index.size, experts.count)
    position, size = places(index, E)
    ends = jnp.cumsum(-(-size // BLOCK))  # in blocks
    owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(count), side="right"), E - 1)
    start = jnp.pad(ends, (1, 0))[index] * BLOCK
    kept = index < E
    mine = jax.tree.map(lambda w: w[owner], experts)
    return gathered(x, start + position, kept, gates, mine, BLOCK, dots), kept


def ragged(x: Array, index: Array, gates: Array, experts: Experts, dots: str = "float32") -> tuple[Array, Array]:
    if isinstance(experts.gate_up, LowRank) or dots != "float32":
        raise ValueError("dispatch 'ragged' multiplies plain float32 matrices: merge adapters, or use 'blocks'.")
    (N, k), E = index.shape, experts.count
    position, size = places(index, E)
    place = jnp.pad(jnp.cumsum(size), (1, 0))[index] + position
    token = jnp.zeros(N * k, jnp.int32).at[place].set(jnp.broadcast_to(jnp.arange(N)[:, None], (N, k)))
    gate, up = jnp.split(jax.lax.ragged_dot(x[token], experts.gate_up, size), 2, axis=-1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts.down, size)
    kept = index < E
    return weighed(gates, kept, jnp.where(kept[..., None], y[place], 0)), kept


def taken(x: Array, token: Array, gates: Array, experts: Experts, dots: str = "float32") -> Array:
    """Expert choice: token [E,C], gates [E,C] -> y [N,D]; a token that nobody takes gets 0."""
    y = each_through_its_own(x[token], experts, dots) * gates[..., None]
    return jnp.zeros_like(x).at[token].add(y)


DROPLESS = {"dense": dense, "blocks": blocks, "ragged": ragged}
