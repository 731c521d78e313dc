"""Matrix products: float32, or bfloat16 inputs with float32 sums; and by matrices plus a low-rank change, or transposed.

"float32" is float32 at the backend's default precision: exact on CPUs, possibly less on accelerators.
With "bfloat16" only the inputs of the products are rounded; sums, outputs and everything between products stay float32
(mixed precision as in Micikevicius et al. 2018, arXiv:1710.03740, without loss scaling because bfloat16
has float32's exponents).
"""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.types import Array

DOTS = ("float32", "bfloat16")
LARGE = 2**18  # numbers in a matrix that a core's own cache hardly holds: 1 MiB of float32


class Transposed(NamedTuple):
    """The matrix w^T. `dot` multiplies w by the few rows' transpose: XLA's CPU library packs the second matrix of a product
    anew at every call, which takes longer than the product itself where that one is large and the other has few rows."""

    w: Array  # [o, i]


class LowRank(NamedTuple):
    """The matrix (w + a b) gain, which `dot` and `take` multiply by without forming it (models.lora makes these)."""

    w: Array | Transposed  # [..., i, o]
    a: Array  # [..., i, r]
    b: Array  # [..., r, o]
    gain: Array | None = None  # [..., o], of each column; None: 1


Matrix = Array | LowRank | Transposed  # what `dot` multiplies by


def dot(spec: str, a: Array, b: Matrix, dots: str = "float32") -> Array:
    """einsum(spec, a, b) in float32, its inputs rounded to `dots`, in both backward products too.

    `spec` names every axis and each index stands in two of its three terms (or in all of them), so that a backward
    product is the same product with the terms exchanged. A LowRank b: its last two axes are the matrix's, and the
    last one is the product's last; a Transposed b is "io" of "...i,io->...o".
    """
    if isinstance(b, LowRank):
        return _low_rank_dot(spec, a, b, dots)
    if isinstance(b, Transposed):
        return _transposed_dot(spec, a, b.w, dots)
    return jnp.einsum(spec, a, b) if dots == "float32" else _rounded_dot(spec, a, b, dots)


def swiglu(inwards: str, outwards: str, x: Array, gate_up: Matrix, down: Matrix, dots: str = "float32") -> Array:
    """(silu(x W_gate) * x W_up) W_down (Shazeer 2020, arXiv:2002.05202), W_gate and W_up side by side in gate_up; the specs
    are those of the two products."""
    gate, up = jnp.split(dot(inwards, x, gate_up, dots), 2, axis=-1)
    return dot(outwards, jax.nn.silu(gate) * up, down, dots)


def transposed(matrix: Array) -> Array | Transposed:
    """What stands for a matrix [i, o] that few rows are multiplied by, many times over; a small one, or a stack, stays."""
    return Transposed(matrix.T) if matrix.ndim == 2 and matrix.size >= LARGE else matrix


def take(table: Array | LowRank, index: Array) -> Array:
    """table[index]: rows of a matrix [n,o]."""
    if not isinstance(table, LowRank):
        return table[index]
    rows = table.w[index] + table.a[index] @ table.b
    return rows if table.gain is None else rows * jnp.expand_dims(table.gain, tuple(range(index.ndim)))


def _low_rank_dot(spec: str, x: Array, matrix: LowRank, dots: str) -> Array:
    left, right, out = re.split(",|->", spec)
    stack, inner, outer = right[:-2], right[-2], right[-1]
    middle = left.replace(inner, "") + "".join(axis for axis in stack if axis not in left) + "z"
    narrow = dot(f"{left},{stack}{inner}z->{middle}", x, matrix.a, dots)
    y = dot(spec, x, matrix.w, dots) + dot(f"{middle},{stack}z{outer}->{out}", narrow, matrix.b, dots)
    if matrix.gain is None:
        return y
    return y * jnp.expand_dims(matrix.gain, [at for at, axis in enumerate(out) if axis not in stack + outer])


def _transposed_dot(spec: str, x: Array, w: Array, dots: str) -> Array:
    left, (inner, outer), out = re.split(",|->", spec)
    rows = left.replace(inner, "")
    y = dot(f"{outer}{inner},{inner}{rows}->{outer}{rows}", w, jnp.einsum(f"{left}->{inner}{rows}", x), dots)
    return jnp.einsum(f"{outer}{rows}->{out}", jax.lax.optimization_barrier(y))  # or the terms would be exchanged again


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _rounded_dot(spec: str, a: Array, b: Array, dots: str) -> Array:
    return _product(spec, a.astype(dots), b.astype(dots))


def _forward(spec, a, b, dots):
    a, b = a.astype(dots), b.astype(dots)
    return _product(spec, a, b), (a, b)


def _backward(spec, dots, saved, g):
    a, b = saved
    g = g.astype(dots)
    left, out = spec.split("->")
    left, right = left.split(",")
    return _product(f"{out},{right}->{left}", g, b), _product(f"{left},{out}->{right}", a, g)


_rounded_dot.defvjp(_forward, _backward)
