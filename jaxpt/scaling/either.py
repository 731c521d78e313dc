"""Elementary functions of NumPy and JAX arrays alike: a law is written once, and evaluated without importing
jax where nothing is to be differentiated."""

import sys
from types import ModuleType
from typing import Any

import numpy as np

STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)  # B_2k / (2k (2k - 1))


def _of(*values: Any) -> ModuleType:
    jax = sys.modules.get("jax")
    return jax.numpy if jax is not None and any(isinstance(value, jax.Array) for value in values) else np


def exp(x: Any) -> Any:
    return _of(x).exp(x)


def log(x: Any) -> Any:
    return _of(x).log(x)


def log10(x: Any) -> Any:
    return _of(x).log10(x)


def power(x: Any, a: Any) -> Any:
    """x^a for x > 0 as exp(a log x): with its derivatives half the time of pow, and less to compile."""
    return exp(a * log(x))


def sqrt(x: Any) -> Any:
    return _of(x).sqrt(x)


def log1p(x: Any) -> Any:
    return _of(x).log1p(x)


def logaddexp(x: Any, y: Any) -> Any:
    return _of(x, y).logaddexp(x, y)


def minimum(x: Any, y: Any) -> Any:
    return _of(x, y).minimum(x, y)


def maximum(x: Any, y: Any) -> Any:
    return _of(x, y).maximum(x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    return _of(x, low, high).clip(x, low, high)


def where(condition: Any, x: Any, y: Any) -> Any:
    return _of(condition, x, y).where(condition, x, y)


def stack(*parts: Any) -> Any:
    """[k,...]: the parts, broadcast to one shape."""
    module = _of(*parts)
    return module.stack(module.broadcast_arrays(*parts))


def log_rise(x: Any, a: Any) -> Any:
    """log Gamma(x + a) - log Gamma(x) for x, a > 0 to about 1e-13, however large x is: Stirling's series at x + 8,
    and back by the recurrence."""
    up, both = x + 8.0, stack(x + a, x)
    rest = _stirling(both + 8.0) - log(_eight(both))
    return (up - 0.5) * log1p(a / up) + a * (log(up + a) - 1) + rest[0] - rest[1]


def _stirling(x: Any) -> Any:
    z, series = 1 / x, 0.0
    for b in STIRLING[::-1]:
        series = series * z * z + b
    return series * z


def _eight(x: Any) -> Any:
    """x (x + 1) ... (x + 7), by pairs."""
    q = x * (x + 7)
    return q * (q + 6) * (q + 10) * (q + 12)
