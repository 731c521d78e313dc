"""A fit with everything that qualifies it: intervals, frontier, stability, warnings."""

from typing import NamedTuple

import numpy as np

from jaxpt.scaling import uncertainty as un
from jaxpt.scaling.cautions import cautions, shared_sizes
from jaxpt.scaling.chinchilla import Fit, fit, prepare
from jaxpt.scaling.frontier import Optimum, exponent, optimum

RESIDUALS = 8_000_000  # resampled ones at most: 4000 refits of up to 2000 runs


class Study(NamedTuple):
    fit: Fit
    refits: un.Refits | None  # None: none were asked for
    params: un.Spread  # [5]
    profile: np.ndarray  # [5,2]
    correlation: np.ndarray  # [5,5] of log A, log B, E, alpha, beta
    leverage: np.ndarray  # [n] in the input's order
    stability: list[un.Without]
    exponent: un.Spread  # [] of a in N* ~ C^a
    flop: float  # FLOPs per parameter and token
    budget: float | None
    optimum: Optimum | None  # of the budget
    optimum_spread: Optimum | None  # a Spread for each of N, D, loss
    warnings: list[str]


def study(
    N: np.ndarray, D: np.ndarray, loss: np.ndarray, *, weight: np.ndarray | None = None,
    cluster: np.ndarray | None = None, objective: str = "huber", delta: float = 1e-3, resample: str = "case",
    bootstrap: int = 4000, seed: int = 0, budget: float | None = None, flop: float = 6.0,
) -> Study:
    """Arrays [n] of runs; cluster: labels of runs that belong together. The same bytes for the same seed and
    runs, in whatever order; ValueError for fewer than 5 runs."""
    found = fit(prepare(N, D, loss, weight), objective, delta)
    n = found.data.y.size
    count = min(bootstrap, max(100, RESIDUALS // n))
    refitted = un.refits(found, resample, count, seed, cluster) if count > 1 else None
    samples = np.empty((0, 5)) if refitted is None else refitted.params
    limits = un.spread(samples)
    stability = un.stability(found)
    warnings = cautions(found, refitted, limits if refitted else None, stability, budget, flop)
    if refitted is not None:
        warnings += shared_sizes(found, resample)
        if count < bootstrap:
            warnings.append(f"{count} refits instead of {bootstrap}: the table has {n} runs.")
    leverage = np.empty(n)
    leverage[found.data.order] = un.leverage(found)
    return Study(
        found, refitted, limits, un.profile_intervals(found),
        np.full((5, 5), np.nan) if refitted is None else un.correlation(refitted), leverage, stability,
        un.spread(exponent(samples)), flop, budget,
        None if budget is None else optimum(found.params, budget, flop),
        None if budget is None else Optimum(*map(un.spread, optimum(samples, budget, flop))), warnings,
    )
