"""A fit with everything that qualifies it: intervals, frontier, stability, warnings."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxpt.scaling import uncertainty as un
from jaxpt.scaling.cautions import cautions, law_cautions, shared_sizes
from jaxpt.scaling.chinchilla import fit, prepare
from jaxpt.scaling.frontier import Optimum, exponent, optimum

if TYPE_CHECKING:
    from jaxpt.scaling import chinchilla, general

RESIDUALS = 8_000_000  # resampled ones at most: 4000 refits of up to 2000 runs


class Study(NamedTuple):
    fit: "chinchilla.Fit | general.Fit"
    refits: un.Refits | None  # None: none were asked for
    params: un.Spread  # [p]
    profile: np.ndarray  # [p,2]
    correlation: np.ndarray  # [p,p], of logarithms where `fit.logged`
    leverage: np.ndarray  # [n] in the input's order
    stability: list[un.Without]
    warnings: list[str]
    flop: float | None = None  # FLOPs per parameter and token; from here on Chinchilla's law alone
    exponent: un.Spread | None = None  # [] of a in N* ~ C^a
    budget: float | None = None
    optimum: Optimum | None = None  # of the budget
    optimum_spread: Optimum | None = None  # a Spread for each of N, D, loss
    at: Mapping[str, float] | None = None  # columns of a run to predict; from here on the table's laws alone
    predicted: float | None = None
    predicted_spread: un.Spread | None = None

    @property
    def samples(self) -> np.ndarray:
        """[B,p] parameters of the refits, B = 0 without any."""
        return np.empty((0, len(self.fit.names))) if self.refits is None else self.refits.params


def _examine(found: "chinchilla.Fit | general.Fit", cluster: np.ndarray | None, resample: str, bootstrap: int,
             seed: int, residuals: int) -> Study:
    """All of a study but its warnings and what is one law's own."""
    n = found.data.y.size
    count = min(bootstrap, max(100, residuals // n))
    refitted = un.refits(found, resample, count, seed, cluster) if count > 1 else None
    p = len(found.names)
    leverage = np.empty(n)
    leverage[found.data.order] = un.leverage(found)
    few = [] if refitted is None or count == bootstrap else [
        f"{count} refits instead of {bootstrap}: the table has {n} runs."]
    return Study(
        found, refitted, un.spread(np.empty((0, p)) if refitted is None else refitted.params),
        un.profile_intervals(found),
        np.full((p, p), np.nan) if refitted is None else un.correlation(found, refitted), leverage,
        un.stability(found), few)


def study(
    N: np.ndarray, D: np.ndarray, loss: np.ndarray, *, weight: np.ndarray | None = None,
    cluster: np.ndarray | None = None, objective: str = "huber", delta: float = 1e-3, resample: str = "case",
    bootstrap: int = 4000, seed: int = 0, budget: float | None = None, flop: float = 6.0,
) -> Study:
    """Of Chinchilla's law. Arrays [n] of runs; cluster: labels of runs that belong together. The same bytes for
    the same seed and runs, in whatever order; ValueError for fewer than 5 runs."""
    found = fit(prepare(N, D, loss, weight), objective, delta)
    result = _examine(found, cluster, resample, bootstrap, seed, RESIDUALS)
    warnings = cautions(found, result.refits, result.params if result.refits else None, result.stability, budget,
                        flop)
    if result.refits is not None:
        warnings += shared_sizes(found, resample)
    result = result._replace(warnings=warnings + result.warnings, flop=flop, exponent=un.spread(exponent(result.samples)))
    if budget is None:
        return result
    return result._replace(
        budget=budget, optimum=optimum(found.params, budget, flop),
        optimum_spread=Optimum(*map(un.spread, optimum(result.samples, budget, flop))))


def study_law(
    found: "general.Fit", *, cluster: np.ndarray | None = None, resample: str = "case",
    bootstrap: int | None = None, seed: int = 0, at: Mapping[str, float] | None = None,
) -> Study:
    """Of a law of the table, fitted; bootstrap: by default as many refits, 200 to 1000, as a second or two allows;
    at: the columns of a run to predict."""
    if bootstrap is None:
        bootstrap = int(np.clip(2_000_000 // (found.data.y.size * (len(found.names) + 3) ** 2), 200, 1000))
    result = _examine(found, cluster, resample, bootstrap, seed, bootstrap * found.data.y.size)
    warnings = law_cautions(found, result.refits, result.params, result.stability, at)
    result = result._replace(warnings=warnings + result.warnings)
    if at is None:
        return result
    columns = [np.array([at[name]]) for name in found.data.law.inputs]
    samples = result.samples
    spread = un.spread(found.predict(samples, columns)[:, 0] if len(samples) else np.empty(0))
    return result._replace(at=at, predicted=float(found.predict(found.params, columns)[0]), predicted_spread=spread)
