"""Many small minimisations at once: damped full Newton steps (Levenberg 1944, Marquardt 1963) on a batch.

Each problem minimises its own F(theta). With gradient g, Hessian H and a positive definite metric M (the
majoriser of iteratively reweighted least squares), a step solves

    (H + lam M) s = -g

and is taken if F falls; lam shrinks where the quadratic model was right and grows where it was not. Every
test compares F with F, so a constant factor on F changes nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

ROUNDS = 200  # of steps, for problems that wander off along a direction the data do not determine


class Derivatives(NamedTuple):
    """Of R problems in p parameters."""

    value: np.ndarray  # [R]
    gradient: np.ndarray  # [R,p]
    hessian: np.ndarray  # [R,p,p]
    metric: np.ndarray  # [R,p,p]

    def at(self, rows: np.ndarray) -> "Derivatives":
        return Derivatives(*(part[rows] for part in self))


class Minimum(NamedTuple):
    theta: np.ndarray  # [R,p]
    value: np.ndarray  # [R]
    converged: np.ndarray  # [R] bool: the last step could gain no more than `tolerance` of F


def minimise(
    derivatives: Callable[[np.ndarray, np.ndarray], Derivatives], start: np.ndarray, *,
    floor: np.ndarray, free: np.ndarray | None = None, tolerance: float = 1e-12, rounds: int = ROUNDS,
) -> Minimum:
    """derivatives(theta [r,p], rows [r]) evaluates the problems numbered `rows`; start [R,p].

    floor [R]: what rounding alone contributes to F, so that an exact fit (F = 0) converges.
    free [R,p] bool: parameters that may move (all by default).
    """
    theta = np.array(start, np.float64)
    count, p = theta.shape
    value, converged = np.full(count, np.inf), np.zeros(count, bool)
    rows, damping = np.arange(count), np.full(count, 0.1)
    free = np.ones((count, p), bool) if free is None else free
    here = derivatives(theta, rows)
    value[:] = here.value
    rows, here = rows[np.isfinite(value)], here.at(np.isfinite(value))
    for _ in range(rounds):
        if not rows.size:
            break
        step, promise, definite = _step(here, damping[rows], free[rows])
        trial = theta[rows] + step
        there = derivatives(trial, rows)
        gain = here.value - there.value
        better = gain > 0
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            ratio = np.where(better & definite, gain / promise, 0.0)
        small = definite & (promise <= tolerance * here.value + floor[rows]) & (damping[rows] <= 1.0)
        take = better | (small & (gain >= -1e-14 * here.value))
        theta[rows[take]], value[rows[take]] = trial[take], there.value[take]
        damping[rows] *= np.where(ratio > 0.7, 0.1, np.where(ratio > 0.2, 1.0, np.where(better, 4.0, 10.0)))
        converged[rows[small]] = True
        going = ~small & (damping[rows] < 1e12)
        here = Derivatives(*(np.where(take.reshape(-1, *[1] * (new.ndim - 1)), new, old)[going]
                             for new, old in zip(there, here, strict=True)))
        rows = rows[going]
    return Minimum(theta, value, converged)


def _step(
    here: Derivatives, damping: np.ndarray, free: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(step [R,p], decrease that the undamped quadratic model promises [R], whether it is a descent [R])."""
    p = free.shape[1]
    both = free[:, :, None] & free[:, None, :]
    gradient = np.where(free, here.gradient, 0.0)
    hessian = np.where(both, here.hessian, 0.0)
    scale = np.trace(np.abs(hessian) + here.metric, axis1=1, axis2=2)
    # The ridge is far below the curvature of anything the data determine; it keeps the rest solvable.
    ridge = np.where(free, 1e-14, 1.0) * (scale * (1 + damping))[:, None]
    damped = hessian + damping[:, None, None] * np.where(both, here.metric, 0.0)
    step = np.linalg.solve(damped + ridge[:, :, None] * np.eye(p), -gradient[:, :, None])[:, :, 0]
    slope = np.einsum("rp,rp->r", gradient, step)
    promise = -slope - 0.5 * np.einsum("rp,rpq,rq->r", step, hessian, step)
    return step, promise, (slope < 0) & (promise > 0) | (slope == 0)
