"""A fit as JSON, as a plain table and as Markdown."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import jaxpt
from jaxpt.lab.markdown import table
from jaxpt.lab.points import Points
from jaxpt.scaling.chinchilla import NAMES
from jaxpt.scaling.frontier import exponent
from jaxpt.scaling.study import Study
from jaxpt.scaling.uncertainty import Spread

FORMULA = "L(N, D) = E + A / N^alpha + B / D^beta"
WORDS = {"huber": "Huber loss (delta {delta:g}) of the log residual", "lad": "absolute log residual",
         "lsq": "squared log residual"}


def record(study: Study, points: Points, seed: int) -> dict[str, Any]:
    """All digits, keys of the command's contract first; what is not finite is null."""
    fit, refits = study.fit, study.refits
    named = {"params": fit.params, "se": study.params.se}
    at = np.argsort(-study.leverage, kind="stable")[:5]
    entry = {
        "law": "chinchilla", "n_points": fit.data.y.size,
        **{key: dict(zip(NAMES, values.tolist(), strict=True)) for key, values in named.items()},
        "ci95": dict(zip(NAMES, np.stack([study.params.low, study.params.high], -1).tolist(), strict=True)),
        "objective": fit.value, "certificate": fit.certificate._asdict(),
        "warnings": [*points.warnings, *study.warnings], "version": jaxpt.__version__,
        "formula": FORMULA,
        "method": {"objective": fit.objective, "delta": fit.delta if fit.objective == "huber" else None,
                   "resample": refits.kind if refits else None, "refits": len(refits.params) if refits else 0,
                   "refits_converged": int(refits.converged.sum()) if refits else 0, "seed": seed,
                   "flop_constant": study.flop},
        "input": {"notes": points.notes,
                  "left_out": [{points.place: place, "why": why} for place, why in points.left_out]},
        "frontier": {"a": _spread(exponent(fit.params), study.exponent)},
        "profile95": dict(zip(NAMES, study.profile.tolist(), strict=True)),
        "correlation": {"of": ["log A", "log B", *NAMES[2:]], "matrix": study.correlation.tolist()},
        "leverage": [{points.place: int(points.places[i]), "leverage": float(study.leverage[i])} for i in at],
        "stability": [{"without": w.what, "n": w.n, "a": float(exponent(w.params)),
                       **dict(zip(NAMES, w.params.tolist(), strict=True))} for w in study.stability],
    }
    if study.optimum is not None:
        entry["budget"] = {"C": study.budget, "D_per_N": float(study.optimum.D / study.optimum.N),
                           **{name: _spread(value, spread) for name, value, spread in zip(
                               ("N", "D", "loss"), study.optimum, study.optimum_spread, strict=True)}}
    return _strict(entry)


def _spread(value: Any, spread: Spread) -> dict[str, Any]:
    return {"value": float(value), "se": float(spread.se), "ci95": [float(spread.low), float(spread.high)]}


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {key: _strict(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_json(entry: dict[str, Any]) -> str:
    return json.dumps(entry, indent=1, allow_nan=False)


def digits(x: float | None, count: int = 6) -> str:
    return "n/a" if x is None else f"{x:.{count}g}"


def interval(limits: Sequence[float | None], count: int = 5) -> str:
    known = any(x is not None for x in limits)
    return f"[{', '.join(digits(x, count) for x in limits)}]" if known else "n/a"


def tables(entry: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of everything that is a table."""
    a, method = entry["frontier"]["a"], entry["method"]
    kind = f"95% {method['resample']} bootstrap" if method["refits"] else "95% interval"
    rows = [[name, digits(entry["params"][name], 9), digits(entry["se"][name], 4),
             interval(entry["ci95"][name]), interval(entry["profile95"][name])] for name in NAMES]
    rows.append(["a in N* ~ C^a", digits(a["value"], 9), digits(a["se"], 4), interval(a["ci95"]), ""])
    out = [("", ["parameter", "estimate", "se", kind, "95% profile"], rows)]
    if "budget" in entry:
        budget = entry["budget"]
        rows = [[f"{name}*", digits(budget[name]["value"]), digits(budget[name]["se"], 3),
                 interval(budget[name]["ci95"])] for name in ("N", "D", "loss")]
        rows.append(["D*/N*", digits(budget["D_per_N"], 4), "", ""])
        out.append((f"Best use of C = {budget['C']:g} FLOPs with C = {method['flop_constant']:g} N D",
                    ["optimum", "estimate", "se", kind], rows))
    if entry["stability"]:
        rows = [[row["without"], str(row["n"]), *(digits(row[key], 4) for key in ("E", "alpha", "beta", "a"))]
                for row in entry["stability"]]
        header = ["without", "runs", "E", "alpha", "beta", "a"]
        out.append(("Fitted again without the extremes", header, rows))
    return out


def sentences(entry: dict[str, Any]) -> list[str]:
    """What was fitted, from what, and how good the optimum is."""
    proof, method = entry["certificate"], entry["method"]
    words = WORDS[method["objective"]].format(delta=method["delta"] or 0)
    condition = "infinite" if proof["condition"] is None else f"{proof['condition']:.2g}"
    top = entry["leverage"][:3]
    place = next(iter(top[0]))
    return [
        f"{entry['formula']}, {entry['n_points']} runs; minimised: sum of the {words}.",
        *entry["input"]["notes"],
        f"Objective {entry['objective']:.11g}; relative gradient {proof['gradient_norm']:.1e}, condition "
        f"{condition}; {100 * proof['share_at_optimum']:.0f}% of {proof['starts']} starts end here, distinct minima: "
        f"{proof['minima']}; at bounds: {', '.join(proof['at_bounds']) or 'none'}.",
        *([f"{method['refits_converged']} of {method['refits']} {method['resample']} refits converged, "
           f"seed {method['seed']}."] if method["refits"] else ["No refits: standard errors are n/a."]),
        "Most leverage: " + ", ".join(f"{place} {row[place]} ({row['leverage']:.2f})" for row in top) + ".",
        *_sloppy(entry),
    ]


def _sloppy(entry: dict[str, Any]) -> list[str]:
    matrix = entry["correlation"]["matrix"]
    pairs = [(i, j) for i, j in ((0, 3), (1, 4)) if (matrix[i][j] or 0) > 0.99]
    if not pairs:
        return []
    names = " and ".join(f"{NAMES[i]} with {NAMES[j]} ({matrix[i][j]:.4f})" for i, j in pairs)
    return [f"Over the refits log {names} move together: quote exponents and predictions, not A and B."]


def as_text(entry: dict[str, Any]) -> str:
    parts = ["\n".join(sentences(entry))]
    for title, header, rows in tables(entry):
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
                 for row in [header, *rows]]
        parts.append("\n".join([*([title + ":"] if title else []), *lines]))
    if entry["warnings"]:
        parts.append("\n".join(f"Warning: {sentence}" for sentence in entry["warnings"]))
    return "\n\n".join(parts)


def as_markdown(entry: dict[str, Any]) -> str:
    parts = ["## Chinchilla law", "\n".join(f"- {sentence}" for sentence in sentences(entry))]
    for title, header, rows in tables(entry):
        parts += [*([f"### {title}"] if title else []), table(header, rows)]
    if entry["warnings"]:
        parts += ["### Warnings", "\n".join(f"- {sentence}" for sentence in entry["warnings"])]
    return "\n\n".join(parts)
