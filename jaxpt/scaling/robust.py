"""Losses of a residual r, as one family: Huber's with a threshold delta (Huber 1964).

    rho(r) = r^2 / 2                       |r| <= delta
             delta (|r| - delta / 2)       otherwise

delta = inf is least squares. Least absolute deviation is the limit delta -> 0 of rho / delta.
"""

from typing import NamedTuple

import numpy as np

OBJECTIVES = ("huber", "lad", "lsq")
WIDEST = 1e-2  # continuation starts here: a loss that differs by 1% is no outlier to any law
NARROWEST = 1e-9  # what stands for 0 in least absolute deviation


class Parts(NamedTuple):
    """All of the residual's shape."""

    rho: np.ndarray
    psi: np.ndarray  # rho'
    curvature: np.ndarray  # rho''
    weight: np.ndarray  # psi / r, which makes least squares a majoriser of rho


def huber(r: np.ndarray, delta: float) -> Parts:
    psi = np.clip(r, -delta, delta)
    size = np.abs(r)
    return Parts(psi * (r - 0.5 * psi), psi, (size <= delta).astype(float),
                 np.minimum(1.0, delta / np.maximum(size, 1e-300)))


def value(r: np.ndarray, weight: np.ndarray, objective: str, delta: float) -> np.ndarray:
    """sum_i w_i rho(r_i) over the last axis; |r| for `lad`, r^2 / 2 for `lsq`."""
    if objective == "lad":
        return np.sum(weight * np.abs(r), axis=-1)
    return np.sum(weight * huber(r, np.inf if objective == "lsq" else delta).rho, axis=-1)


def continuation(objective: str, delta: float) -> list[float]:
    """Thresholds to solve for in turn, each from the last one's optimum. The wide ones have few minima."""
    if objective == "lsq":
        return [np.inf]
    last = NARROWEST if objective == "lad" else delta
    steps = [WIDEST]
    while steps[-1] > last * 1.001:
        steps.append(max(last, steps[-1] / 10))
    return steps if last < WIDEST else [last]
