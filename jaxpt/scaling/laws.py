"""Scaling laws as pure functions, in one table.

A law is a function `predict(*columns, **parameters)`: its positional arguments are columns of a table of runs,
its keyword arguments the parameters to fit. It is written with operators and the functions of `either`, so that
one text serves NumPy, JAX and its derivatives. A row of the table adds where the law comes from, which of its
parameters may be negative, and `guess`, which turns points of the unit cube into parameters that suit the data:
the search starts from the best of many.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Law(NamedTuple):
    name: str
    paper: str  # authors, year, arXiv, equation
    formula: str
    predict: Callable[..., Any]  # (*columns, **parameters) -> what is measured
    guess: Callable[..., Sequence[np.ndarray]]  # (u [m,S], y [n], *columns [n]) -> the parameters [S], in order
    values: tuple[float, ...]  # of the parameters: the paper's, or ours where it prints none
    output: str = "loss"
    residual: str = "log"  # "log": log prediction - log measured; "raw": their difference over the largest |y|
    real: tuple[str, ...] = ()  # parameters of either sign; the others are above 0
    nonnegative: tuple[str, ...] = ()  # columns that may hold 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns the law is a function of."""
        return tuple(p.name for p in _arguments(self.predict) if p.kind is not p.KEYWORD_ONLY)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple(p.name for p in _arguments(self.predict) if p.kind is p.KEYWORD_ONLY)

    @property
    def positive(self) -> np.ndarray:
        """[p] bool: parameters above 0, which are searched on a logarithmic scale."""
        return np.array([name not in self.real for name in self.names])


def _arguments(function: Callable) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def parameters(law: Law, theta: np.ndarray) -> np.ndarray:
    """[...,p] unknowns of the search -> [...,p] parameters: exp of those that are above 0."""
    return np.where(law.positive, np.exp(np.where(law.positive, theta, 0.0)), theta)


def predict(law: Law, params: np.ndarray, columns: Sequence[np.ndarray]) -> np.ndarray:
    """params [p] (or [S,p]) at columns [n] -> [n] (or [S,n])."""
    named = dict(zip(law.names, np.moveaxis(params, -1, 0)[..., None], strict=True))
    return law.predict(*(x.reshape((1,) * (params.ndim - 1) + x.shape) for x in columns), **named)


def span(u: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """From `low` at u = 0 to `high` at u = 1, evenly in the logarithm."""
    return low * (high / low) ** u


def middle(x: np.ndarray) -> float:
    return float(np.exp(np.mean(np.log(x))))


def floor_and_shares(u: np.ndarray, y: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(E [S] between 0 and the lowest y, [count,S] terms that add up to what is left at the mean). Uses the first
    1 + count rows of u."""
    E = y.min() * u[0]
    weights = -np.log(np.clip(u[1:1 + count], 1e-12, 1 - 1e-12))
    return E, weights / weights.sum(axis=0) * (middle(y) - E)


def user_law(function: Callable, name: str) -> Law:
    """The law of a function `f(N, D, *, A=400.0, alpha=0.3, shift=-1.0)`: columns, then parameters by keyword,
    each with a default near which the search begins; a default at or below 0 lets the parameter have either
    sign. ValueError, in words, for any other function."""
    arguments = _arguments(function)
    columns = [p for p in arguments if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unknowns = [p for p in arguments if p.kind is p.KEYWORD_ONLY]
    if len(columns) + len(unknowns) < len(arguments) or not columns or not unknowns:
        raise ValueError("expected def law(N, D, *, A=400.0, alpha=0.3): columns, a star, parameters")
    for p in unknowns:
        if isinstance(p.default, bool) or not isinstance(p.default, (int, float)) or not np.isfinite(p.default):
            raise ValueError(f"parameter {p.name} needs a number as its default: the search begins near it")
    near = np.array([float(p.default) for p in unknowns])

    def guess(u: np.ndarray, y: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
        spread = 2 * u[:near.size] - 1
        spread[:, 0] = 0.0  # the defaults themselves
        return [x * np.exp(2 * s) if x > 0 else x + 2 * max(abs(x), 1.0) * s
                for x, s in zip(near, spread, strict=True)]

    doc = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    formula = doc or f"{function.__name__}({', '.join(p.name for p in columns)})"
    return Law(name, "a function of yours", formula, function, guess, tuple(near.tolist()),
               real=tuple(p.name for p in unknowns if p.default <= 0))


def table() -> Mapping[str, Law]:
    """All laws by name."""
    from jaxpt.scaling import laws_dense, laws_experts, laws_use

    rows = [*laws_dense.ROWS, *laws_experts.ROWS, *laws_use.ROWS]
    return {row.name: row for row in rows}
