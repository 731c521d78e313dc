"""The next runs to buy, as JSON and as tables."""

from typing import Any

import numpy as np

import jaxpt
from jaxpt.lab.errors import UserError
from jaxpt.lab.fit_report import digits, strict
from jaxpt.lab.points import Points
from jaxpt.scaling import planning
from jaxpt.scaling.chinchilla import fit, prepare
from jaxpt.scaling.uncertainty import refits

WANTED = (0.5, 0.2, 0.1)  # shares of the present interval, for which the runs needed are counted
WORDS = {"a": "a in N* ~ C^a", "loss": "log loss* at {:.4g} FLOPs", "N": "log N* at {:.4g} FLOPs"}


def record(points: Points, count: int, target: str, budget: float | None, spend: float | None, flop: float,
           bootstrap: int, seed: int, objective: str, delta: float) -> dict[str, Any]:
    found = fit(prepare(points.N, points.D, points.loss, points.weight), objective, delta)
    paid = flop * points.N * points.D if points.C is None else points.C
    spend = float(paid.sum() / 10 if spend is None else spend)
    wanted = {"a": planning.allocation, "loss": planning.best_loss(budget or 1.0, flop),
              "N": planning.best_size(budget or 1.0, flop)}[target]
    value = float(wanted(found.params)[0])
    if not np.isfinite(value):
        raise UserError(f"--next {count}: the fitted law has no best size (an exponent is not above 0), so there is no "
                        "target to plan for")
    N, D = planning.candidates(found, spend, flop)
    if not N.size:
        raise UserError(f"--spend {spend:.4g}: no run of these sizes and lengths is that cheap")
    se, warnings = None, []
    if bootstrap > 1:
        drawn = wanted(refits(found, "case", bootstrap, seed).params)[:, 0]
        drawn = drawn[np.isfinite(drawn)]
        se = float(drawn.std(ddof=1)) if drawn.size > 1 else None
    try:
        plan = planning.plan(found, wanted, N, D, flop * N * D, count, spend, se=se, seed=seed)
    except ValueError as error:
        raise UserError(f"--next {count}: {error}") from None
    if not plan.N.size:
        warnings.append("Nothing was bought.")
    if found.certificate.at_bounds or not found.certificate.converged:
        warnings.append("The fit has no isolated optimum: a plan that rests on it is a guess.")
    warnings.append("The plan holds near the fitted law; fit again after each purchase.")
    return strict({
        "law": "chinchilla", "n_points": found.data.y.size,
        "params": dict(zip(found.names, found.params.tolist(), strict=True)),
        "target": {"name": WORDS[target].format(budget or 0), "value": value, "se": plan.before},
        "spend": spend, "flop_constant": flop,
        "next": [{"N": float(n), "D": float(d), "cost": float(c), "se_after": float(s)}
                 for n, d, c, s in zip(plan.N, plan.D, plan.cost, plan.after, strict=True)],
        "runs_needed": [{"share_of_interval": x, "half_width": 1.96 * plan.before * x,
                         "runs": planning.points_needed(found.data.y.size, 1.0, x)} for x in WANTED],
        "input": {"notes": points.notes}, "warnings": [*points.warnings, *warnings], "version": jaxpt.__version__,
    })


def sentences(entry: dict[str, Any]) -> list[str]:
    target = entry["target"]
    used = sum(run["cost"] for run in entry["next"])
    return [
        f"{len(entry['next'])} runs to buy next for {target['name']} = {target['value']:.5g} (standard error "
        f"{target['se']:.3g} from {entry['n_points']} runs); {used:.4g} of {entry['spend']:.4g} FLOPs.",
        *entry["input"]["notes"],
    ]


def tables(entry: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    bought = [[digits(run[key], 4) for key in ("N", "D", "cost", "se_after")] for run in entry["next"]]
    needed = [[f"{row['share_of_interval']:g}", digits(row["half_width"], 3), digits(row["runs"], 4)]
              for row in entry["runs_needed"]]
    return [("", ["N", "D", "FLOPs", "standard error then"], bought),
            ("Runs in all, placed like those at hand, for a narrower interval",
             ["share of today's", "95% half-width", "runs"], needed)]
