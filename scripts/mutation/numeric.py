"""A traced program evaluated with numpy, operation by operation: nothing is compiled, so a changed program costs no more
than its tracing. What the table lacks is left to jax."""

import functools

import jax
import numpy as np
from jax.extend.core import Literal


def _along(ufunc):
    def scan(x, *, axis, reverse):
        turned = np.flip(x, axis) if reverse else x
        out = ufunc.accumulate(turned, axis, dtype=x.dtype)
        return np.flip(out, axis) if reverse else out

    return scan


def _slice(x, *, start_indices, limit_indices, strides):
    strides = strides or (1,) * x.ndim
    return x[tuple(slice(*at) for at in zip(start_indices, limit_indices, strides, strict=True))]


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    wide = [1] * len(shape)
    for size, axis in zip(np.shape(x), broadcast_dimensions, strict=True):
        wide[axis] = size
    return np.broadcast_to(np.reshape(x, wide), shape)


def _pad(x, fill, *, padding_config):
    inside = [n + (n > 0) * (n - 1) * gap for n, (_, _, gap) in zip(x.shape, padding_config, strict=True)]
    spread = np.full(inside, fill, x.dtype)
    spread[tuple(slice(None, None, gap + 1) for _, _, gap in padding_config)] = x
    for axis, (low, high, _) in enumerate(padding_config):
        spread = np.take(spread, range(max(-low, 0), spread.shape[axis] - max(-high, 0)), axis)
    return np.pad(spread, [(max(low, 0), max(high, 0)) for low, high, _ in padding_config], constant_values=fill)


def _sum(x, *, axes, **_):
    return np.sum(x, axis=axes, dtype=x.dtype)


def _logistic(x, **_):
    return (1 / (1 + np.exp(-x))).astype(x.dtype)


OPERATIONS = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "pow": np.power, "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "tanh": np.tanh,
    "log1p": np.log1p, "expm1": np.expm1, "cos": np.cos, "sin": np.sin, "floor": np.floor, "ceil": np.ceil,
    "square": np.square, "sign": np.sign, "is_finite": np.isfinite, "eq": np.equal, "ne": np.not_equal, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "logistic": _logistic, "pad": _pad, "slice": _slice,
    "broadcast_in_dim": _broadcast, "reduce_sum": _sum, "cumsum": _along(np.add), "cummax": _along(np.maximum),
    "cummin": _along(np.minimum), "cumprod": _along(np.multiply),
    "rsqrt": lambda x, **_: (1 / np.sqrt(x)).astype(x.dtype),
    "integer_pow": lambda x, y: (np.power(x, y) if y >= 0 else 1 / np.power(x, -y)).astype(x.dtype),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases),
    "reduce_max": lambda x, *, axes, **_: np.max(x, axis=axes), "reduce_min": lambda x, *, axes, **_: np.min(x, axis=axes),
    "reduce_and": lambda x, *, axes, **_: np.all(x, axis=axes), "reduce_or": lambda x, *, axes, **_: np.any(x, axis=axes),
    "reduce_prod": lambda x, *, axes, **_: np.prod(x, axis=axes, dtype=x.dtype),
    "reshape": lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, dimensions),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "iota": lambda *, dtype, shape, dimension, **_: np.broadcast_to(
        np.arange(shape[dimension], dtype=dtype).reshape([-1 if k == dimension else 1 for k in range(len(shape))]), shape
    ),
    "copy": lambda x: x, "copy_p": lambda x: x, "stop_gradient": lambda x: x, "optimization_barrier": lambda x: x,
    "div": lambda x, y: np.divide(x, y) if x.dtype.kind not in "iu" else np.trunc(np.divide(x, y)).astype(x.dtype),
}
INNER = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
STRUCTURAL = ("sharding", "accuracy", "out_sharding")  # of an operation's parameters, without meaning for numpy


@functools.cache
def element_wise(name: str) -> bool:
    return isinstance(OPERATIONS.get(name), np.ufunc)


def evaluate(jaxpr, consts, args) -> list[np.ndarray]:
    """What a program returns, as arrays of numpy (or of jax, where jax computed them last)."""
    with np.errstate(all="ignore"):
        return _evaluate(jaxpr, consts, args)


def _evaluate(jaxpr, consts, args):
    known = {}

    def value(v):
        return np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else known[v]

    known.update(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [value(v) for v in eqn.invars]
        if name in INNER:
            inner = eqn.params[INNER[name]]
            out = _evaluate(inner.jaxpr, inner.consts, inputs)
        elif element_wise(name):
            out = [OPERATIONS[name](*inputs)]
        elif name in OPERATIONS:
            out = [OPERATIONS[name](*inputs, **{k: x for k, x in eqn.params.items() if k not in STRUCTURAL})]
        else:
            out = eqn.primitive.bind(*map(jax.numpy.asarray, inputs), **eqn.params)
            out = [np.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]
        for v, x in zip(eqn.outvars, out, strict=True):
            known[v] = np.asarray(x, v.aval.dtype)
    return [value(v) for v in jaxpr.outvars]
