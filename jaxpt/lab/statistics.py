"""Paired one-sided t-tests of claims, Holm's correction, verdicts, and bands for curves.

With x_1..x_n the estimand on n paired units (seeds), mean m and standard deviation s (ddof 1):

    t          = (m - margin) / (s / sqrt(n)),   n - 1 degrees of freedom
    p_above    = P(T >= t), the one-sided p for "the mean exceeds the margin";   p_below = P(T <= t)
    ci95       = m -+ t_{.975, n-1} s / sqrt(n)
    mde        = (t_{1 - .05/m, n-1} + t_{.80, n-1}) s / sqrt(n)   (power .80 at Holm's hardest step of m claims)

Both p are floored at 2^-n: the n signs of exchangeable differences can say no more than that, so a
lucky variance (zero, say) cannot make two seeds a proof. It follows that m claims cannot be decided
with m 2^-n >= .05 under Holm's correction; the minimal detectable effect is then infinite.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

ALPHA = 0.05
POWER = 0.80


class Summary(NamedTuple):
    """One sample of n units against a margin. `note` says why a number is missing."""

    n: int
    mean: float
    low: float  # 95% two-sided interval of the mean
    high: float
    p_above: float  # one-sided, H1: mean > margin
    p_below: float  # one-sided, H1: mean < margin
    mde: float  # minimal detectable difference of the mean from the margin, among `family` claims
    note: str = ""


class Decision(NamedTuple):
    """A summary with Holm-adjusted p and the verdict over its family of claims."""

    summary: Summary
    p_above: float
    p_below: float
    verdict: str  # supported, refuted, inconclusive, underpowered


def summarize(values: np.ndarray, margin: float, family: int = 1) -> Summary:
    """values [n], one per unit; family: how many claims are decided together. Never raises on the values: n < 2 or a
    non-finite one is said in `note`."""
    x = np.asarray(values, np.float64).reshape(-1)
    n = x.size
    unknown = Summary(n, math.nan, math.nan, math.nan, 1.0, 1.0, math.inf)
    bad = int(np.sum(~np.isfinite(x)))
    if bad:
        return unknown._replace(note=f"{bad} of {n} values are not finite")
    if n < 2:
        return unknown._replace(mean=float(x[0]) if n else math.nan, note="fewer than two values")
    with np.errstate(all="ignore"):
        mean = float(np.mean(x))
        error = float(np.std(x, ddof=1) / math.sqrt(n))
        gap = mean - margin
    if not (math.isfinite(gap) and math.isfinite(error)):
        return unknown._replace(note="the values overflow")
    df, floor = n - 1, 2.0**-n
    if error > 0:
        t = gap / error
        above, below = float(stdtr(df, -t)), float(stdtr(df, t))
    else:
        above, below = (0.0 if gap > 0 else 1.0), (0.0 if gap < 0 else 1.0)
    half = float(stdtrit(df, 0.975)) * error
    mde = float(stdtrit(df, 1 - ALPHA / family) + stdtrit(df, POWER)) * error
    note = "" if error > 0 else "all values are equal"
    return Summary(n, mean, mean - half, mean + half, max(above, floor), max(below, floor), mde, note)


def holm(p: Sequence[float]) -> np.ndarray:
    """Adjusted p [m] (Holm 1979): sorted upwards, max over j <= i of (m - j) p_(j), capped at 1."""
    p = np.asarray(p, np.float64)
    order = np.argsort(p, kind="stable")
    factors = p.size - np.arange(p.size)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * p[order]), 1.0)
    return adjusted


def decide(samples: Sequence[np.ndarray], margins: Sequence[float]) -> list[Decision]:
    """Verdicts of one family of claims: sample i [n_i] against margin i, Holm in either direction."""
    summaries = [summarize(x, m, len(samples)) for x, m in zip(samples, margins, strict=True)]
    summaries = [_at_least_reachable(s, len(samples)) for s in summaries]
    above, below = holm([s.p_above for s in summaries]), holm([s.p_below for s in summaries])
    return [
        Decision(s, float(a), float(b), _verdict(s, a, b, m))
        for s, a, b, m in zip(summaries, above, below, margins, strict=True)
    ]


def _at_least_reachable(summary: Summary, family: int) -> Summary:
    if summary.n < 2 or family * 2.0**-summary.n < ALPHA:
        return summary
    needed = math.floor(math.log2(family / ALPHA)) + 1
    note = f"deciding {family} claim{'s'[: family > 1]} takes at least {needed} values each"
    return summary._replace(mde=math.inf, note="; ".join(filter(None, [summary.note, note])))


def _verdict(summary: Summary, above: float, below: float, margin: float) -> str:
    if above < ALPHA:
        return "supported"
    if below < ALPHA:
        return "refuted"
    return "underpowered" if summary.mde > margin else "inconclusive"


def last(curve: np.ndarray) -> np.ndarray:
    """[n, steps] -> [n]: each seed's last finite value (NaN is "not measured"); NaN if there is none."""
    curve = np.asarray(curve, np.float64)
    if curve.shape[1] == 0:
        return np.full(curve.shape[0], np.nan)
    finite = np.isfinite(curve)
    index = curve.shape[1] - 1 - np.argmax(finite[:, ::-1], axis=1)
    return np.where(finite.any(axis=1), np.take_along_axis(curve, index[:, None], axis=1)[:, 0], np.nan)


def band(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[n, steps] -> mean, low, high, each [steps]: 95% t band over the seeds that measured the step.

    Steps that no seed measured are NaN; where one seed measured, low and high are NaN.
    """
    curve = np.asarray(curve, np.float64)
    seen = np.isfinite(curve)
    n = seen.sum(axis=0)
    x = np.where(seen, curve, 0.0)
    with np.errstate(all="ignore"):
        mean = np.where(n > 0, x.sum(axis=0) / n, np.nan)
        deviation = np.where(seen, curve - mean[None, :], 0.0)
        error = np.sqrt((deviation**2).sum(axis=0) / (n - 1) / n)
        half = np.where(n > 1, stdtrit(np.maximum(n - 1, 1), 0.975) * error, np.nan)
    return mean, mean - half, mean + half


def estimate(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, low, high of one number per seed, [n]: `band` of a single step."""
    mean, low, high = (float(x[0]) for x in band(np.asarray(values)[:, None]))
    return mean, low, high


def over(metric: str, steps: slice) -> Callable[[Mapping[str, np.ndarray], str], np.ndarray]:
    """(curves, stage) -> [n]: the metric's mean over some steps of the stage; NaN is "not measured"."""
    return lambda curves, stage: np.nanmean(np.asarray(curves[f"{stage}/{metric}"], np.float64)[:, steps], axis=1)
