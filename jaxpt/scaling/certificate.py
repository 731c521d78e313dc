"""What shows that an optimum was found, for any law."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxpt.scaling.newton import Derivatives, Minimum


class Certificate(NamedTuple):
    gradient_norm: float  # worst unknown's |sum of pulls| over the sum of their sizes
    expected_gain: float  # share of F that one more Newton step could gain
    condition: float  # of the Hessian; inf where it is not positive definite
    starts: int
    share_at_optimum: float  # of the starts
    minima: int  # distinct values that the starts converged to
    second_minimum: float | None  # by how much, relatively, the next one is worse
    at_bounds: tuple[str, ...]  # parameters at the edge of what the law can be
    converged: bool


def best_of(found: Minimum) -> int:
    """Row of the lowest minimum; of equal ones, one that converged."""
    return int(np.argmin(np.where(found.converged, found.value, found.value * (1 + 1e-9))))


def certify(here: Derivatives, pulls: np.ndarray, rest: np.ndarray, at_bounds: tuple[str, ...], found: Minimum,
            best: int, tried: int, floor: float) -> Certificate:
    """here: derivatives of one problem at the optimum; pulls [p,n]: |w psi J|; rest [p] bool: unknowns that are
    neither held nor at an edge; floor: what rounding alone contributes to F."""
    hessian, slope = here.hessian[0][np.ix_(rest, rest)], here.gradient[0][rest]
    with np.errstate(divide="ignore", invalid="ignore"):
        gradient = np.nan_to_num(np.abs(slope) / pulls.sum(axis=1)[rest])
    eigenvalues = np.linalg.eigvalsh(hessian)
    definite = bool(rest.any()) and eigenvalues[0] > 1e-13 * eigenvalues[-1]
    gain = float(slope @ np.linalg.solve(hessian, slope) / 2) if definite else np.nan
    F = float(here.value[0])
    near = found.value <= F * (1 + 1e-8) + floor
    others = np.sort(found.value[found.converged & ~near])
    gaps = others / max(F, floor) - 1
    minima = 1 + int(np.sum(np.diff(others, prepend=0.0) > 1e-8 * others))
    return Certificate(
        float(gradient.max(initial=0.0)), gain / max(F, floor),
        float(eigenvalues[-1] / eigenvalues[0]) if definite else np.inf,
        tried, float(np.sum(near) / tried), minima, float(gaps[0]) if gaps.size else None, at_bounds,
        bool(found.converged[best]),
    )


def vertex(theta: np.ndarray, residual: Callable[[np.ndarray], np.ndarray],
           slopes: Callable[[np.ndarray], np.ndarray], weight: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Least absolute deviation passes through as many runs as it has unknowns: theta [p] moved onto the nearest
    ones, unless that is worse (the law is curved, so it need not pass through all of them).

    residual(theta) -> [n]; slopes(theta) -> [p,n], its derivatives; free [p] bool: unknowns that may move.
    """
    near = np.argsort(np.abs(residual(theta)), kind="stable")[:int(free.sum())]
    moved = theta.copy()
    for _ in range(4):
        J = slopes(moved)[np.ix_(free, near)]
        moved[free] -= np.linalg.lstsq(J.T, residual(moved)[near], rcond=1e-12)[0]
        if not np.all(np.abs(moved - theta) < 1.0):
            return theta
    before, after = (np.sum(weight * np.abs(residual(x))) for x in (theta, moved))
    return moved if after <= before else theta
