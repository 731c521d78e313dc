"""Approaches 1, 2 and 3 side by side, as JSON and as tables."""

from typing import Any

import numpy as np

import jaxpt
from jaxpt.lab.fit_report import digits, interval, spread_of, strict
from jaxpt.lab.points import Points
from jaxpt.scaling.approaches import NAMES, Comparison


def record(found: Comparison, points: Points, seed: int) -> dict[str, Any]:
    """All digits; what is not finite is null."""
    rows = []
    for row in found.approaches:
        rows.append({
            "name": row.name, "minima": row.minima,
            "a": {**spread_of(row.a, row.a_spread), "bias_if_law_holds": row.a_bias},
            "N": {**spread_of(row.N, row.N_spread), "bias_if_law_holds": row.N_bias},
            "against_law": {"difference": row.a_minus_law, "expected": row.expected, "p": row.p},
            "resolved": row.resolved,
        })
    budgets = [
        {"C": float(C), "n": int(n), **{name: {"N": float(N), "loss": float(loss)} for name, N, loss in minima}}
        for C, n, minima in zip(found.budgets.C, found.counts, _minima(found), strict=True)
    ]
    fit = found.fit
    return strict({
        "law": "chinchilla", "n_points": fit.data.y.size,
        "params": dict(zip(fit.names, fit.params.tolist(), strict=True)),
        "target": found.target, "approaches": rows, "budgets": budgets,
        "method": {"flop_constant": found.flop, "seed": seed, "objective": fit.objective, "delta": fit.delta},
        "input": {"notes": points.notes}, "warnings": [*points.warnings, *found.warnings], "version": jaxpt.__version__,
    })


def _minima(found: Comparison) -> list[list[tuple[str, float, float]]]:
    return [[(name, np.exp(found.optima[name].log_N[0, b]), found.optima[name].loss[0, b]) for name in NAMES[1:]]
            for b in range(found.budgets.C.size)]


def sentences(entry: dict[str, Any]) -> list[str]:
    return [
        f"Best size for a budget from {entry['n_points']} runs, {len(entry['budgets'])} budgets: 1 from the envelope "
        "of the sizes' curves, 2 from the minimum over each budget's runs, 3 from the fitted law.",
        *entry["input"]["notes"],
        "Intervals are of resampled runs, the same for all. The bias is what an approach would be off on these runs if "
        "the fitted law were exact; p is that of its difference from the law's a under that law.",
    ]


def tables(entry: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    rows = []
    for row in entry["approaches"]:
        a, N, against = row["a"], row["N"], row["against_law"]
        share = "n/a" if N["bias_if_law_holds"] is None else f"{100 * N['bias_if_law_holds']:+.1f}%"
        rows.append([row["name"], str(row["minima"]), digits(a["value"], 4), interval(a["ci95"], 4),
                     digits(a["bias_if_law_holds"], 2), digits(N["value"], 4), interval(N["ci95"], 3), share,
                     digits(against["p"], 2)])
    header = ["approach", "minima", "a", "95%", "bias", f"N* at {entry['target']:.4g}", "95%", "bias", "p against 3"]
    out = [("", header, rows)]
    if entry["budgets"]:
        rows = [[f"{b['C']:.4g}", str(b["n"]), *(digits(b[name]["N"], 4) for name in NAMES[1:]),
                 digits(b[NAMES[1]]["loss"], 5), digits(b[NAMES[-1]]["loss"], 5)] for b in entry["budgets"]]
        out.append(("N* of each budget", ["FLOPs", "runs", *NAMES[1:], "loss* (2 parabola)", "loss* (3 law)"], rows))
    return out
