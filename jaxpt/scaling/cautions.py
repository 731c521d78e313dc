"""What the numbers of a fit do not say by themselves, in sentences."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxpt.scaling.chinchilla import Fit
from jaxpt.scaling.frontier import exponent
from jaxpt.scaling.uncertainty import Refits, Spread, Without, spread

if TYPE_CHECKING:
    from jaxpt.scaling import general


def cautions(fit: Fit, refitted: Refits | None, limits: Spread | None, stability: list[Without],
             budget: float | None, flop: float) -> list[str]:
    """Warnings, the gravest first; limits: the parameters' 95% intervals."""
    said = [*_optimum(fit), *_design(fit)]
    if refitted is not None and limits is not None:
        said += [*_identified(fit, limits), *_refits(refitted), *_unstable(fit, refitted, stability)]
    if budget is not None:
        said += _extrapolation(fit, budget, flop)
    return said


def law_cautions(fit: "general.Fit", refitted: Refits | None, limits: Spread, stability: list[Without],
                 at: Mapping[str, float] | None) -> list[str]:
    """Warnings for any law: its optimum, its design, what is not identified, what a few runs decide."""
    said, law, x = _optimum(fit), fit.data.law, fit.data.x
    for name, column in zip(law.inputs, x, strict=True):
        if np.ptp(column) <= 1e-9 * np.max(column):
            said.append(f"{name} is the same in all runs: they do not say how {law.output} depends on it.")
    distinct, unknowns, n = np.unique(x, axis=1).shape[1], int(fit.free.sum()), x.shape[1]
    if distinct < unknowns:
        said.append(f"The runs have only {distinct} different ({', '.join(law.inputs)}); {unknowns} parameters need "
                    f"at least {unknowns}.")
    elif n < 2 * unknowns:
        said.append(f"{n} runs for {unknowns} parameters: intervals from so few are themselves guesses.")
    if refitted is not None:
        with np.errstate(invalid="ignore"):
            vague = [name for name, value, width in zip(law.names, fit.params, limits.high - limits.low, strict=True)
                     if not width <= 2 * abs(value)]
        if vague:
            said.append(f"Not identified by these runs: {', '.join(vague)}, with 95% intervals wider than twice the "
                        "value.")
        said += _refits(refitted)
        said += _most_moved(fit, limits, stability)
    for name, column in zip(law.inputs, x, strict=True):
        if at is not None and not column.min() / 10 <= at[name] <= column.max() * 10:
            said.append(f"{name} = {at[name]:g} is more than 10 times beyond the runs: the interval of the prediction "
                        "covers the law's parameters, not whether the law still holds there.")
    return said


def _most_moved(fit: "general.Fit", limits: Spread, stability: list[Without]) -> list[str]:
    said = []
    for without in stability:
        with np.errstate(invalid="ignore", divide="ignore"):
            moves = np.nan_to_num(np.abs(without.params - fit.params) / limits.se)
        k = int(np.argmax(moves))
        if moves[k] > 1:
            said.append(f"Without {without.what}, {fit.names[k]} is {without.params[k]:.4g} instead of "
                        f"{fit.params[k]:.4g}, a move of {moves[k]:.1f} standard errors.")
    return said


def _optimum(fit: "Fit | general.Fit") -> list[str]:
    proof, said = fit.certificate, []
    if proof.at_bounds:
        said.append(f"{' and '.join(proof.at_bounds)} ended at the edge of what the law can be: "
                    "the runs do not need that term.")
    if not proof.converged or not np.isfinite(proof.condition):
        said.append("No isolated optimum was found: the runs leave at least one direction of the parameters "
                    "free.")
    elif proof.condition > 1e8:
        said.append(f"The Hessian's condition is {proof.condition:.1e}: some combination of the parameters is "
                    "all but free.")
    if proof.second_minimum is not None and proof.second_minimum < 0.05:
        said.append(f"The starts found {proof.minima} minima; the second is only "
                    f"{100 * proof.second_minimum:.2g}% worse.")
    return said


def _design(fit: Fit) -> list[str]:
    n, d, said = fit.data.n, fit.data.d, []
    for name, log, pair in (("N", n, "A and alpha"), ("D", d, "B and beta")):
        if np.ptp(log) < 1e-9:
            said.append(f"{name} is the same in all runs: {pair} cannot be told from E.")
        elif np.ptp(log) < np.log(4):
            said.append(f"{name} spans only a factor {np.exp(np.ptp(log)):.2g}: {pair} rest on little.")
    ratio = d - n + fit.data.centre[1] - fit.data.centre[0]
    if np.ptp(ratio) < np.log(4) and np.ptp(n) > 1e-9:
        low, high = np.exp([ratio.min(), ratio.max()])
        middle = np.sqrt(low * high)
        said.append(f"All runs lie within a factor {np.sqrt(high / low):.3g} of D/N = {middle:.3g}: how loss "
                    "falls in N and how it falls in D cannot be told apart.")
    distinct = len({(x, y) for x, y in zip(n.round(9), d.round(9), strict=True)})
    if distinct < 5:
        said.append(f"The runs have only {distinct} different (N, D); 5 parameters need at least 5.")
    elif n.size < 10:
        said.append(f"{n.size} runs for 5 parameters: intervals from so few are themselves guesses.")
    return said


def sizes(log_N: np.ndarray) -> np.ndarray:
    """[n] labels of the model sizes: N to 3 digits, so that a size read off a figure is one size."""
    N = np.exp(log_N)
    unit = 10.0 ** (np.floor(np.log10(N)) - 2)
    return np.round(N / unit) * unit


def _refits(refitted: Refits) -> list[str]:
    lost = int(np.sum(~refitted.converged))
    if not lost:
        return []
    return [f"{lost} of {len(refitted.converged)} refits have no isolated optimum; they are counted where they "
            "ended."]


def shared_sizes(fit: Fit, kind: str) -> list[str]:
    """That runs of one size may belong together, where the resampling took them as independent."""
    count, n = len(np.unique(sizes(fit.data.n + fit.data.centre[0]))), fit.data.y.size
    if kind == "cluster" or count > n / 2:
        return []
    return [f"The {n} runs have {count} model sizes: if runs of one size share a training run, they are not "
            "independent; --cluster N resamples whole sizes."]


def _identified(fit: Fit, limits: Spread) -> list[str]:
    said = []
    for k, name in ((2, "E"), (3, "alpha"), (4, "beta")):
        value, low, high = fit.params[k], limits.low[k], limits.high[k]
        if not np.isfinite(high - low) or high - low > abs(value):
            said.append(f"{name} is not identified by these runs: its 95% interval is {low:.3g} to "
                        f"{high:.3g}.")
    return said


def _unstable(fit: Fit, refitted: Refits, stability: list[Without]) -> list[str]:
    a = exponent(fit.params)
    se = float(spread(exponent(refitted.params)).se)
    said = []
    for without in stability:
        moved = exponent(without.params)
        if abs(moved - a) > se:
            said.append(f"Without {without.what}, a in N* ~ C^a is {moved:.3f} instead of {a:.3f}, a move of "
                        f"{abs(moved - a) / se:.1f} standard errors.")
    return said


def _extrapolation(fit: Fit, budget: float, flop: float) -> list[str]:
    largest = flop * float(np.exp(np.max(fit.data.n + fit.data.d) + fit.data.centre.sum()))
    if budget <= 10 * largest:
        return []
    return [f"The budget is {budget / largest:.3g} times the largest run's compute: its interval covers the "
            "law's parameters, not whether the law still holds there."]
