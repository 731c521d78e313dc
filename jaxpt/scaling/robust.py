"""Losses of a residual r, as one family: Huber's with a threshold delta (Huber 1964).

    rho(r) = r^2 / 2                       |r| <= delta
             delta (|r| - delta / 2)       otherwise

delta = inf is least squares. Least absolute deviation is the limit delta -> 0 of rho / delta. By name there are
also Student's t with 4 degrees of freedom and scale delta (fixed: a scale fitted along would turn Huber's loss
into absolute deviation), and Huber's loss with residuals above 0, the overestimates, counted 10 times.

A shape is what says which: a number is Huber's threshold, ("student", delta) and ("asymmetric", delta) the others.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxpt.scaling.either import clip, log1p, maximum, minimum, where

OBJECTIVES = ("huber", "lad", "lsq", "student", "asymmetric")
WIDEST = 1e-2  # continuation starts here: a loss that differs by 1% is no outlier to any law
NARROWEST = 1e-9  # what stands for 0 in least absolute deviation
FREEDOM = 4.0  # of Student's t
OVERESTIMATE = 10.0  # how much more the asymmetric loss counts a prediction that is too high
Shape = float | tuple[str, float]


class Parts(NamedTuple):
    """All of the residual's shape."""

    rho: Any
    psi: Any  # rho'
    curvature: Any  # rho''
    weight: Any  # psi / r, which makes least squares a majoriser of rho


def huber(r: Any, delta: Any) -> Parts:
    psi, size = clip(r, -delta, delta), abs(r)
    return Parts(psi * (r - 0.5 * psi), psi, where(size <= delta, 1.0, 0.0),
                 minimum(1.0, delta / maximum(size, 1e-300)))


def penalty(r: Any, shape: Shape) -> Parts:
    """Of residuals r = prediction - measurement, NumPy's or JAX's."""
    if not isinstance(shape, tuple):
        return huber(r, shape)
    kind, delta = shape
    if kind == "student":
        q = (r / delta) ** 2 / FREEDOM
        return Parts(FREEDOM * delta**2 / 2 * log1p(q), r / (1 + q), (1 - q) / (1 + q) ** 2, 1 / (1 + q))
    return Parts(*(where(r > 0, OVERESTIMATE, 1.0) * part for part in huber(r, delta)))


def threshold(shape: Shape) -> float:
    return shape[1] if isinstance(shape, tuple) else shape


def expected_curvature(r: np.ndarray, shape: Shape, window: float) -> np.ndarray:
    """rho'' of each residual, with the indicator |r| <= delta spread evenly over |r| <= window."""
    if isinstance(shape, tuple) and shape[0] == "student":
        return penalty(r, shape).curvature
    side = 1.0 if not isinstance(shape, tuple) else np.where(r > 0, OVERESTIMATE, 1.0)
    within = threshold(shape) / window if threshold(shape) < window else 1.0  # both may be infinite
    return side * (np.abs(r) <= window) * within


def location(r: np.ndarray, weight: np.ndarray, shape: Shape) -> float:
    """The m of sum_i w_i rho'(r_i - m) = 0, by bisection: what a fit of a constant to r would leave at 0."""
    low, high = float(np.min(r)), float(np.max(r))
    while low < (middle := (low + high) / 2) < high:
        above = np.sum(weight * penalty(r - middle, shape).psi) > 0
        low, high = (middle, high) if above else (low, middle)
    return middle


def value(r: np.ndarray, weight: np.ndarray, objective: str, delta: float) -> np.ndarray:
    """sum_i w_i rho(r_i) over the last axis; |r| for `lad`, r^2 / 2 for `lsq`."""
    if objective == "lad":
        return np.sum(weight * np.abs(r), axis=-1)
    return np.sum(weight * penalty(r, continuation(objective, delta)[-1]).rho, axis=-1)


def continuation(objective: str, delta: float) -> list[Shape]:
    """Shapes to solve for in turn, each from the last one's optimum. The wide ones have few minima."""
    if objective == "lsq":
        return [np.inf]
    last = NARROWEST if objective == "lad" else delta
    steps = [WIDEST]
    while steps[-1] > last * 1.001:
        steps.append(max(last, steps[-1] / 10))
    steps = steps if last < WIDEST else [last]
    return [(objective, step) for step in steps] if objective in ("student", "asymmetric") else steps
