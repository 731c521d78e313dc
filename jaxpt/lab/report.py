"""report.md: the question, the command, the verdicts beside their controls, the final values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpt.lab.experiment import Curves, Stage
from jaxpt.lab.markdown import table
from jaxpt.lab.statistics import estimate, last

TUNING_SEEDS = 10000  # seeds from here on are for tuning: no claim may rest on them


def number(x: float | None) -> str:
    return "n/a" if x is None or not np.isfinite(x) else f"{x:.4g}"


def interval(ci: Sequence[float]) -> str:
    return "n/a" if not np.all(np.isfinite(ci)) else f"[{number(ci[0])}, {number(ci[1])}]"


def cell(values: np.ndarray, form: str = ".3f") -> str:
    """One number per seed as "mean [low, high]", with the 95% t interval."""
    mean, low, high = estimate(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def claim_row(claim: Mapping[str, Any]) -> list[str]:
    """The cells that the report and the terminal show: CLAIM_HEADER names them."""
    control = claim["control"]
    return [
        claim["name"], claim["verdict"], number(claim["estimate"]), interval(claim["ci95"]), str(claim["n"]),
        number(claim["margin"]), number(claim["mde"]),
        f"{control['verdict']} ({number(control['estimate'])})",
    ]


CLAIM_HEADER = ["claim", "verdict", "estimate", "95% CI", "n", "margin", "MDE", "control"]


def warnings(claims: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences that a reader of the verdicts must know."""
    said = []
    if any(seed >= TUNING_SEEDS for run in runs for seed in run["seeds"]):
        said.append(f"Seeds from {TUNING_SEEDS} on are for tuning: these verdicts are not evidence.")
    for claim in claims:
        if claim["note"]:
            said.append(f"{claim['name']}: {claim['note']}.")
        control = claim["control"]
        if control["verdict"] != "refuted":
            said.append(f"{claim['name']}: its control ({control['name']}) is {control['verdict']}, not "
                        "refuted, so the verdict does not show that this test can fail.")
    looks = [str(len(run["seeds"])) for run in runs if run["finished"]]
    if len(set(looks)) > 1:
        said.append(f"Seeds were added after a verdict had been seen ({', then '.join(looks)}): "
                    "the p-values do not account for that look.")
    return said


def claims_section(claims: Sequence[Mapping[str, Any]]) -> str:
    if not claims:
        return "This experiment makes no claims."
    statements = "\n".join(
        f"- **{c['name']}** ({c['unit']}s, margin {number(c['margin'])}): {c['statement']} "
        f"Control: {c['control']['name']}. Holm-adjusted p: above the margin {number(c['p_above_holm'])}, "
        f"below it {number(c['p_below_holm'])}." for c in claims)
    return table(CLAIM_HEADER, [claim_row(c) for c in claims]) + "\n\n" + statements


def final_values(curves: Curves, stages: Sequence[Stage]) -> str:
    """Each scalar metric's last measured value, mean over seeds with its 95% t interval."""
    rows = []
    for name in sorted(curves):
        stage, _, metric = name.partition("/")
        if stage in {s.name for s in stages} and curves[name].ndim == 2:
            values = last(curves[name])
            mean, low, high = estimate(values)
            n = int(np.isfinite(values).sum())
            rows.append([stage, metric, number(mean), interval([low, high]), str(n)])
    return table(["stage", "metric", "last value", "95% CI", "n"], rows)


def report(name: str, doc: str, config: Mapping[str, Any], claims: Sequence[Mapping[str, Any]],
           curves: Curves, stages: Sequence[Stage], seconds: float, sections: str) -> str:
    run = config["runs"][-1]
    notes = "\n".join(f"- {sentence}" for sentence in warnings(claims, config["runs"]))
    facts = {
        "seeds": ", ".join(str(int(s)) for s in curves["seeds"]), "tier": config["tier"],
        "executor": ", ".join(f"{k} {v}" for k, v in config["executor"].items()),
        "compute": f"{seconds:.0f} s in all chunks, {seconds / len(curves['seeds']):.1f} s per seed",
        "git": config["git"] or "no revision",
        "versions": ", ".join(f"{k} {v}" for k, v in config["versions"].items()),
    }
    parts = [
        f"# {name}", doc.strip(), f"    {run['command']}", "## Claims", claims_section(claims),
        *([notes] if notes else []), "![curves](figure.png)", "## Final values", final_values(curves, stages),
        *([sections.strip()] if sections.strip() else []),
        "## Run", "\n".join(f"- {k}: {v}" for k, v in facts.items()),
        "```json\n" + json.dumps(config["config"], indent=1) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"
