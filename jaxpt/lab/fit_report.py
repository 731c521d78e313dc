"""A fit as JSON, as a plain table and as Markdown."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import jaxpt
from jaxpt.lab.markdown import table
from jaxpt.lab.points import Points
from jaxpt.scaling.frontier import exponent
from jaxpt.scaling.questions import SOLVED, Answer
from jaxpt.scaling.study import Study
from jaxpt.scaling.uncertainty import Spread

WORDS = {"huber": "Huber loss (delta {delta:g}) of the {what}", "lad": "absolute {what}", "lsq": "squared {what}",
         "student": "Student-t loss (4 degrees of freedom, scale {delta:g}) of the {what}",
         "asymmetric": "Huber loss (delta {delta:g}) of the {what}, overestimates 10 times"}
LABELS = {"training_flops": "FLOPs of training", "a": "a in N* ~ C^a here", "epochs": "epochs D/unique",
          "C": "FLOPs", "factor": "times the compute", "factor_if_E_were_0": "the same if E were 0",
          "hours": "hours of one accelerator", "loss_drop": "lower loss at equal money",
          "share_of_loss": "as a share of it", "money_saved": "money saved at equal loss"}


def record(study: Study, points: Points, seed: int, answers: Sequence[Answer] = ()) -> dict[str, Any]:
    """All digits, keys of the command's contract first; what is not finite is null."""
    fit, refits, names = study.fit, study.refits, study.fit.names
    at = np.argsort(-study.leverage, kind="stable")[:5]
    entry = {
        "law": fit.law, "n_points": fit.data.y.size, "params": _named(names, fit.params),
        "se": _named(names, study.params.se),
        "ci95": _named(names, np.stack([study.params.low, study.params.high], -1)),
        "objective": fit.value, "certificate": fit.certificate._asdict(),
        "warnings": [*points.warnings, *study.warnings], "version": jaxpt.__version__,
        "formula": fit.formula,
        "method": {"objective": fit.objective, "delta": None if fit.objective in ("lad", "lsq") else fit.delta,
                   "residual": points.residual, "resample": refits.kind if refits else None,
                   "refits": len(refits.params) if refits else 0,
                   "refits_converged": int(refits.converged.sum()) if refits else 0, "seed": seed,
                   "fixed": [name for name, free in zip(names, fit.free, strict=True) if not free]},
        "input": {"notes": points.notes,
                  "left_out": [{points.place: place, "why": why} for place, why in points.left_out]},
        "profile95": _named(names, study.profile),
        "correlation": {"of": [f"log {name}" if log else name for name, log in zip(names, fit.logged, strict=True)],
                        "matrix": study.correlation.tolist()},
        "leverage": [{points.place: int(points.places[i]), "leverage": float(study.leverage[i])} for i in at],
        "stability": [{"without": w.what, "n": w.n, **_named(names, w.params)} for w in study.stability],
    }
    if study.exponent is not None:
        entry["method"]["flop_constant"] = study.flop
        entry["frontier"] = {"a": spread_of(exponent(fit.params), study.exponent)}
        for row, without in zip(entry["stability"], study.stability, strict=True):
            row["a"] = float(exponent(without.params))
    if study.optimum is not None:
        entry["budget"] = {"C": study.budget, "D_per_N": float(study.optimum.D / study.optimum.N),
                           **{name: spread_of(value, spread) for name, value, spread in zip(
                               ("N", "D", "loss"), study.optimum, study.optimum_spread, strict=True)}}
    if study.at is not None:
        entry["prediction"] = {"at": dict(study.at), points.output: spread_of(study.predicted, study.predicted_spread)}
    if answers:
        entry["answers"] = {a.name: {"of": a.words} | {key: spread_of(a.values[key], a.spreads[key]) for key in a.values}
                            for a in answers}
        entry["warnings"] += _out_of_sight(answers, points, float(fit.params[2]))
    return strict(entry)


def _out_of_sight(answers: Sequence[Answer], points: Points, E: float) -> list[str]:
    said = [f"{a.words}: no compute gets there, E is {E:.4g}." for a in answers if np.inf in a.values.values()]
    for a in answers:
        if a.name == "counted" and not points.N.min() <= a.values["N"] <= points.N.max():
            said.append(f"{a.words}: N* is beyond the runs' sizes, and so is the count, a parabola in log N.")
    return said


def _named(names: Sequence[str], values: np.ndarray) -> dict[str, Any]:
    return dict(zip(names, values.tolist(), strict=True))


def spread_of(value: Any, spread: Spread) -> dict[str, Any]:
    return {"value": float(value), "se": float(spread.se), "ci95": [float(spread.low), float(spread.high)]}


def strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {key: strict(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
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
    method, names = entry["method"], list(entry["params"])
    kind = f"95% {method['resample']} bootstrap" if method["refits"] else "95% interval"
    rows = [[name, digits(entry["params"][name], 9), digits(entry["se"][name], 4),
             interval(entry["ci95"][name]), interval(entry["profile95"][name])] for name in names]
    if "frontier" in entry:
        rows.append(["a in N* ~ C^a", *_estimate(entry["frontier"]["a"], 9, 4), ""])
    out = [("", ["parameter", "estimate", "se", kind, "95% profile"], rows)]
    if "budget" in entry:
        budget = entry["budget"]
        rows = [[f"{name}*", *_estimate(budget[name])] for name in ("N", "D", "loss")]
        rows.append(["D*/N*", digits(budget["D_per_N"], 4), "", ""])
        out.append((f"Best use of C = {budget['C']:g} FLOPs with C = {method['flop_constant']:g} N D",
                    ["optimum", "estimate", "se", kind], rows))
    if "prediction" in entry:
        where = ", ".join(f"{name} = {x:g}" for name, x in entry["prediction"]["at"].items())
        rows = [[name, *_estimate(value)] for name, value in entry["prediction"].items() if name != "at"]
        out.append((f"Predicted at {where}", ["prediction", "estimate", "se", kind], rows))
    for answer in entry.get("answers", {}).values():
        rows = [[LABELS.get(name, name), *_estimate(value)] for name, value in answer.items() if name != "of"]
        out.append((answer["of"], ["quantity", "estimate", "se", kind], rows))
    if entry["stability"]:
        columns = ["E", "alpha", "beta", "a"] if "frontier" in entry else names
        rows = [[row["without"], str(row["n"]), *(digits(row[key], 4) for key in columns)]
                for row in entry["stability"]]
        out.append(("Fitted again without the extremes", ["without", "runs", *columns], rows))
    return out


def _estimate(value: dict[str, Any], count: int = 6, se: int = 3) -> list[str]:
    return [digits(value["value"], count), digits(value["se"], se), interval(value["ci95"])]


def sentences(entry: dict[str, Any]) -> list[str]:
    """What was fitted, from what, and how good the optimum is."""
    proof, method = entry["certificate"], entry["method"]
    words = WORDS[method["objective"]].format(delta=method["delta"] or 0, what=method["residual"])
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
        *([f"Intervals of answers are of the first {min(SOLVED, method['refits'])} refits."]
          if "answers" in entry and method["refits"] else []),
        "Most leverage: " + ", ".join(f"{place} {row[place]} ({row['leverage']:.2f})" for row in top) + ".",
        *_sloppy(entry),
    ]


def _sloppy(entry: dict[str, Any]) -> list[str]:
    matrix, of = entry["correlation"]["matrix"], entry["correlation"]["of"]
    pairs = [(i, j) for i in range(len(of)) for j in range(i + 1, len(of)) if abs(matrix[i][j] or 0) > 0.99]
    if not pairs:
        return []
    named = " and ".join(f"{of[i]} with {of[j]} ({matrix[i][j]:.4f})" for i, j in pairs[:4])
    return [f"Over the refits {named} move together: quote exponents and predictions, not scales."]


def as_text(entry: dict[str, Any]) -> str:
    return plain(sentences(entry), tables(entry), entry["warnings"])


def plain(said: Sequence[str], shown: Sequence[tuple[str, list[str], list[list[str]]]], warnings: Sequence[str]) -> str:
    parts = ["\n".join(said)]
    for title, header, rows in shown:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
                 for row in [header, *rows]]
        parts.append("\n".join([*([title + ":"] if title else []), *lines]))
    if warnings:
        parts.append("\n".join(f"Warning: {sentence}" for sentence in warnings))
    return "\n\n".join(parts)


def as_markdown(entry: dict[str, Any]) -> str:
    return f"## Law {entry['law']}\n\n" + marked(sentences(entry), tables(entry), entry["warnings"])


def marked(said: Sequence[str], shown: Sequence[tuple[str, list[str], list[list[str]]]], warnings: Sequence[str]) -> str:
    parts = ["\n".join(f"- {sentence}" for sentence in said)]
    for title, header, rows in shown:
        parts += [*([f"### {title}"] if title else []), table(header, rows)]
    if warnings:
        parts += ["### Warnings", "\n".join(f"- {sentence}" for sentence in warnings)]
    return "\n\n".join(parts)
