"""Approaches 1, 2 and 3 to the best size side by side (Hoffmann et al. 2022, section 3), and whether they disagree.

All are applied to the same resampled runs, so that their differences have intervals of their own. Three things
keep the comparison fair:

- runs of nearly one budget are moved to it along the fitted law, loss_i + L(N_i, C_b / (k N_i)) - L(N_i, D_i);
- a parabola sees only runs within a factor `REACH` in size of its budget's best one: a whole isoFLOP curve is none;
- `bias` is what an approach would be off on these very runs if the fitted law were exact. The corrected parabola
  has it taken off every minimum. (Parabolas are biased where alpha and beta differ: Czech et al. 2026, arXiv
  2603.22339.)

The disagreement test asks whether an approach's difference from approach 3 is more than the law explains, bias and
all: its null distribution is that difference on data of the fitted law plus the runs' own residuals with random
signs (wild bootstrap).
"""

from typing import NamedTuple

import numpy as np

from jaxpt.scaling import isoflop as iso
from jaxpt.scaling import uncertainty as un
from jaxpt.scaling.chinchilla import Fit, fit, law, prepare
from jaxpt.scaling.frontier import exponent, optimum

REACH = 8.0  # of a parabola: sizes within this factor of the lowest loss's
NAMES = ("1 envelope", "2 parabola", "2 parabola, corrected", "2 spline", "3 law")


class Approach(NamedTuple):
    """One row of the comparison; a: the exponent of N* ~ C^a; N: the best size for the target's compute."""

    name: str
    minima: int  # budgets (approach 1: levels of compute) with a minimum inside
    a: float
    N: float
    a_spread: un.Spread
    N_spread: un.Spread
    a_bias: float  # estimate minus truth, were the fitted law exact
    N_bias: float  # the same, as a share of N
    a_minus_law: float
    expected: float  # mean of that difference, were the fitted law exact
    p: float  # two-sided; NaN for the law itself
    resolved: float  # share of the resampled data sets in which the approach gave a number


class Comparison(NamedTuple):
    fit: Fit
    target: float  # FLOPs
    flop: float
    budgets: iso.Budgets  # group in the input's order
    counts: np.ndarray  # [b] runs
    optima: dict[str, iso.Optima]  # approach -> [1,b]; "3 law" too
    approaches: list[Approach]
    warnings: list[str]


class _Runs(NamedTuple):
    """What does not change between resamples, in the fit's own order."""

    n: np.ndarray
    log_C: np.ndarray
    shift: np.ndarray  # [n] added to a loss to move it to its budget
    near: np.ndarray  # [n] bool: inside its parabola
    at: iso.Budgets
    bias: np.ndarray  # [b] of log N* from the parabola, were the law exact


def compare(
    N: np.ndarray, D: np.ndarray, loss: np.ndarray, *, C: np.ndarray | None = None,
    weight: np.ndarray | None = None, objective: str = "huber", delta: float = 1e-3, flop: float = 6.0,
    width: float = 1.4, bootstrap: int = 400, seed: int = 0, target: float | None = None,
) -> Comparison:
    """Arrays [n] of runs; C: their FLOPs where those are not flop N D; target: FLOPs at which N* is compared (the
    largest budget by default). ValueError for fewer than 5 runs. Without budgets (runs of equal compute and at
    least 5 sizes), approach 2 has nothing to work on and is NaN."""
    found = fit(prepare(N, D, loss, weight), objective, delta)
    order = found.data.order
    compute = (flop * np.asarray(N, float) * D if C is None else np.asarray(C, float))[order]
    at = iso.budgets(compute, np.asarray(N, float)[order], width)
    target = float(target or (at.C.max() if at.C.size else compute.max()))
    runs = _prepare(found, compute, at, flop)
    y = np.exp(found.data.y)[None]
    base = np.minimum(found.data.weight[None], 1.0)  # present once; approach 3 alone knows weights
    point, optima = _estimate(runs, y, base, target)
    exact, _ = _estimate(runs, np.exp(found.data.y - found.residuals)[None], base, target)
    true = np.array([exponent(found.params), np.log(optimum(found.params, target, flop).N)])
    point = np.concatenate([point, true[None, :, None]], axis=2)[0]
    bias = np.concatenate([exact[0] - true[:, None], np.zeros((2, 1))], axis=1)
    case, wild = (_resampled(found, runs, kind, bootstrap, seed, target, flop) for kind in ("case", "wild"))
    law_optima = optimum(found.params, at.C, flop)
    optima[NAMES[-1]] = iso.Optima(np.log(law_optima.N)[None], law_optima.loss[None])
    counts = np.array([np.sum(at.group == b) for b in range(at.C.size)])
    rows = [_approach(k, optima, point, bias, case, wild) for k in range(len(NAMES))]
    group = np.full(len(order), -1)
    group[order] = at.group
    warnings = _warnings(runs, rows, optima)
    return Comparison(found, target, flop, at._replace(group=group), counts, optima, rows, warnings)


def _prepare(found: Fit, compute: np.ndarray, at: iso.Budgets, flop: float) -> _Runs:
    n = found.data.n + found.data.centre[0]
    N, D, loss = np.exp(n), np.exp(found.data.d + found.data.centre[1]), np.exp(found.data.y)
    grouped = at.group >= 0
    C = np.where(grouped, np.append(at.C, 1.0)[at.group], compute)
    shift = np.where(grouped, law(found.params, N, D * C / compute) - law(found.params, N, D), 0.0)
    near = np.zeros(n.size, bool)
    for b in range(at.C.size):
        rows = np.flatnonzero(at.group == b)
        best = rows[np.argmin((loss + shift)[rows])]
        near[rows] = np.abs(n[rows] - n[best]) <= np.log(REACH) + 1e-9
    runs = _Runs(n, np.log(compute), shift, near, at, np.zeros(at.C.size))
    if not at.C.size:
        return runs
    exact = law(found.params, N, D)[None]
    minima = iso.parabola(n, exact + shift, near[None] * 1.0, at).log_N[0]
    return runs._replace(bias=minima - np.log(optimum(found.params, at.C, flop).N))


def _estimate(runs: _Runs, y: np.ndarray, weight: np.ndarray, target: float) -> tuple[np.ndarray, dict]:
    """([R,2,4] exponent and log N at the target of approaches 1 and 2, their optima)."""
    levels, first = iso.envelope(runs.n, runs.log_C, y, weight)
    laws, optima = [iso.power_law(levels, first.log_N)], {NAMES[0]: first}
    none = iso.Optima(*np.full((2, len(y), 0), np.nan))
    moved = y + runs.shift
    second = iso.parabola(runs.n, moved, weight * runs.near, runs.at) if runs.at.C.size else none
    third = iso.spline(runs.n, moved, weight, runs.at) if runs.at.C.size else none
    for name, found in zip(NAMES[1:4], (second, second._replace(log_N=second.log_N - runs.bias), third), strict=True):
        optima[name] = found
        laws.append(iso.power_law(np.log(runs.at.C), found.log_N) if runs.at.C.size else
                    iso.PowerLaw(*np.full((2, len(y)), np.nan), 0.0))
    with np.errstate(over="ignore"):
        return np.stack([[x.exponent, x.level + x.exponent * (np.log(target) - x.centre)] for x in laws], -1
                        ).transpose(1, 0, 2), optima


def _resampled(found: Fit, runs: _Runs, kind: str, count: int, seed: int, target: float, flop: float) -> np.ndarray:
    """[B,2,5] of resampled data sets, the same for all approaches."""
    if count < 2:
        return np.empty((0, 2, len(NAMES)))
    drawn, refitted = un.draws(found, kind, count, seed), un.refits(found, kind, count, seed)
    y = np.exp(drawn["y"] if "y" in drawn else np.broadcast_to(found.data.y, (count, found.data.y.size)))
    weight = drawn["weight"] / found.data.weight if "weight" in drawn else np.ones(y.shape)
    rest, _ = _estimate(runs, y, weight, target)
    with np.errstate(divide="ignore", invalid="ignore"):
        third = np.stack([exponent(refitted.params), np.log(optimum(refitted.params, target, flop).N)], axis=1)
    return np.concatenate([rest, third[:, :, None]], axis=2)


def _approach(k: int, optima: dict, point: np.ndarray, bias: np.ndarray, case: np.ndarray,
              wild: np.ndarray) -> Approach:
    (a, log_N), draws = point[:, k], case[:, :, k]
    draws = draws[np.all(np.isfinite(draws), axis=1)]
    law = len(NAMES) - 1
    null = wild[:, 0, k] - wild[:, 0, law]
    null = null[np.isfinite(null)]
    observed, p = a - point[0, law], np.nan
    if k != law and np.isfinite(observed) and null.size > 1:
        tails = [np.sum(null <= observed), np.sum(null >= observed)]
        p = min(1.0, 2 * (1 + min(tails)) / (1 + null.size))
    with np.errstate(over="ignore"):
        return Approach(
            NAMES[k], int(np.isfinite(optima[NAMES[k]].log_N).sum()), float(a), float(np.exp(log_N)),
            un.spread(draws[:, 0]), un.spread(np.exp(draws[:, 1])), float(bias[0, k]), float(np.expm1(bias[1, k])),
            float(observed), float(null.mean()) if null.size else np.nan, float(p),
            len(draws) / len(case) if len(case) else np.nan)


def _warnings(runs: _Runs, rows: list[Approach], optima: dict) -> list[str]:
    at, said = runs.at, []
    if not at.C.size:
        return [f"No {iso.LEAST} runs of different sizes share a budget: approach 2 has nothing to work on."]
    lost = [f"{c:.3g}" for c, x in zip(at.C, optima["2 parabola"].log_N[0], strict=True) if not np.isfinite(x)]
    if lost:
        said.append(f"The parabola of {len(lost)} of {at.C.size} budgets has no minimum among the runs' sizes "
                    f"({', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''} FLOPs); they are left out.")
    spans = [np.ptp(runs.log_C[at.group == b]) for b in range(at.C.size)]
    if max(spans) > 0.02:
        said.append(f"Compute differs by up to a factor {np.exp(max(spans)):.3g} within a budget; runs were moved to "
                    "the budget's middle along the fitted law.")
    if np.sum(at.group < 0):
        said.append(f"{np.sum(at.group < 0)} of {at.group.size} runs belong to no budget; approach 2 leaves them out.")
    for row in rows[:-1]:
        if row.p < 0.01:
            said.append(f"Approach {row.name} gives a = {row.a:.3f}, {row.a_minus_law:+.3f} from the law's; its bias "
                        f"on these runs explains {row.expected:+.3f} (p = {row.p:.2g}): the law, or what the runs have "
                        "in common besides N and D, is in doubt.")
        if np.isfinite(row.resolved) and row.resolved < 0.9:
            said.append(f"Approach {row.name} gave a number in only {100 * row.resolved:.0f}% of the resampled data "
                        "sets.")
    return said
