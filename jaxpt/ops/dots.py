"""Matrix products: float32, or bfloat16 inputs with float32 sums.

"float32" is float32 at the backend's default precision: exact on CPUs, possibly less on accelerators.
With "bfloat16" only the inputs of the products are rounded; sums, outputs and everything between products stay float32
(mixed precision as in Micikevicius et al. 2018, arXiv:1710.03740, without loss scaling because bfloat16
has float32's exponents).
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxpt.types import Array

DOTS = ("float32", "bfloat16")


def dot(spec: str, a: Array, b: Array, dots: str = "float32") -> Array:
    """einsum(spec, a, b) in float32, its inputs rounded to `dots`, in both backward products too.

    `spec` names every axis and each index stands in two of its three terms, so that a backward
    product is the same product with the terms exchanged.
    """
    return jnp.einsum(spec, a, b) if dots == "float32" else _rounded_dot(spec, a, b, dots)


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
