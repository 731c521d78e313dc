"""Where a model lies on a mesh of devices, by one rule from a leaf's name.

A mesh has four axes, of which most have size 1:
    data       rows; parameters and the optimizer's state are cut over it too (FSDP; Zhao et al. 2023, arXiv:2304.11277)
    tensor     heads and hidden units: a product is cut by columns, the next one by rows (Shoeybi et al. 2019, 1909.08053)
    expert     experts of a layer; for all that is not an expert it is more of `data`
    sequence   tokens of a row; for parameters it is more of `data`

We tell the compiler how arrays lie and let it place the collectives (GSPMD, Xu et al. 2021, arXiv:2105.04663), rather than
write each of them in a shard_map: the model stays the one that a laptop runs, every mesh runs the same program, and all
that a mesh may change is the order of sums. The price is that the compiler may move more than a hand would: queries, keys
and values (gate and up) stand side by side in one matrix, so that its cut over `tensor` crosses their borders, and tokens
get to their experts by whatever exchange the compiler finds.

Layers read their mesh from jax's own context (jax.sharding.use_abstract_mesh, which train.parallel enters); without one,
and inside a shard_map or pmap, nothing here does anything.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxpt.ops.dots import LowRank, Transposed
from jaxpt.types import Array

AXES = DATA, TENSOR, EXPERT, SEQUENCE = "data", "tensor", "expert", "sequence"
ROWS = (DATA, EXPERT)  # the axes over which rows lie
MATRICES = {  # leaf -> which axis cuts its rows, and which its columns
    "embed": (TENSOR, DATA), "unembed": (DATA, TENSOR), "router": (DATA, None),
    **dict.fromkeys(("narrow", "narrow_query"), (DATA, None)),
    **dict.fromkeys(("qkv", "query", "widen", "gate_up", "shared_gate_up"), (DATA, TENSOR)),
    **dict.fromkeys(("out", "down", "shared_down"), (TENSOR, DATA)),
}
STACKED = ("gate_up", "down")  # of experts, which stand before rows and columns


def spec_of(path: tuple, shape: tuple[int, ...], sizes: Mapping[str, int]) -> P:
    """Where a leaf rests between steps: parameters, and whatever else has their names in its path, as gradients, moments,
    references and adapters do. All else is on every device.

    sizes: of the mesh's axes. `tensor` and `expert` must divide what they cut; what `data` (with `expert` and
    `sequence`, for all but experts) does not divide is cut by fewer of them. Raises ValueError.
    """
    names = [step.key for step in path if isinstance(getattr(step, "key", None), str)]
    matrix, adapter = (names[:-1], names[-1]) if names[-1:] in (["a"], ["b"]) else (names, None)
    if not matrix or matrix[-1] not in MATRICES or len(shape) < 2:
        return P()
    stacked = "moe" in names and matrix[-1] in STACKED
    cuts = [None] * (len(shape) - 2) + list(_cuts(matrix[-1], adapter))
    if stacked:
        cuts[-3] = EXPERT
    data = [axis for axis in (DATA, EXPERT, SEQUENCE) if not (stacked and axis == EXPERT)]

    def settled(cut, size):
        if cut == DATA:
            fits = [n for n in range(len(data), 0, -1) if size % math.prod(sizes[axis] for axis in data[:n]) == 0]
            return tuple(data[: fits[0]]) if fits else None
        if cut is not None and size % sizes[cut]:
            where = f"{'/'.join(names)} {list(shape)}"
            raise ValueError(f"mesh: {cut}={sizes[cut]} does not divide {size} of {where}, expected a divisor")
        return cut

    return P(*map(settled, cuts, shape))


def in_use(name: str, leaf: Any) -> Any:
    """A matrix (or an ops.dots.LowRank or Transposed) as a layer multiplies by it: whole but for `tensor` and `expert`. The
    compiler gathers what FSDP has cut, layer by layer; left alone, it would rather cut rows of hidden states at every layer."""

    def whole(w, adapter):
        if isinstance(w, Transposed):
            return Transposed(whole(w.w.T, adapter).T)
        if w.ndim < 2:
            return w
        rows, columns = (None if cut == DATA else cut for cut in _cuts(name, adapter))
        return constrained(w, *([EXPERT] if w.ndim == 3 else []), rows, columns)

    if not isinstance(leaf, LowRank):
        return whole(leaf, None)
    return leaf._replace(w=whole(leaf.w, None), a=whole(leaf.a, "a"), b=whole(leaf.b, "b"))


def constrained(x: Array, *axes: Any) -> Array:
    """x, and the compiler is told which axes of the mesh cut its axes; x as it is where there is no mesh."""
    auto = jax.sharding.get_abstract_mesh().auto_axes
    return jax.lax.with_sharding_constraint(x, P(*axes)) if set(AXES) <= set(auto) else x


def heads_axis(heads: int) -> str | None:
    """The axis that cuts so many heads: `tensor` where it divides them (a latent's one "head" is whole)."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return TENSOR if heads > 1 and heads % sizes.get(TENSOR, 1) == 0 else None


def _cuts(name: str, adapter: str | None) -> tuple[str | None, str | None]:
    rows, columns = MATRICES[name]
    if adapter is None:
        return rows, columns
    return (rows, None) if adapter == "a" else (None, columns)  # the low rank is not cut
