#!/usr/bin/env python
"""Tunes the rate of experiments/scaling_ladder.py by size, on seeds that no claim uses.

Command: .venv/bin/python scripts/tune_ladder.py [--seeds 2] [--budgets 2]
The ladder's smaller budgets (and the run beyond them) are trained at every rate of RATES, the same for all sizes. A
parabola through the best rate's log loss and its neighbours' says each run's best rate; least squares makes a power of
N and D of them. All losses and the rule go to experiments/tuned/scaling_ladder.json; it belongs into the experiment's
Config.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpt.experiments.scaling_ladder import names
from jaxpt.lab import identity
from jaxpt.lab.report import TUNING_SEEDS
from jaxpt.lab.run import run
from jaxpt.lab.statistics import last

RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
AT_N, AT_D = 3e4, 2.7e5


def losses(rates: Sequence[float], seeds: int, budgets: int, out: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """([rates, seeds, runs] log of the held-out loss, the ladder's inputs)."""
    found, curves = [], {}
    for rate in rates:
        fields = {"learning_rate": rate, "rate_slope_N": 0.0, "rate_slope_D": 0.0, "budgets": budgets}
        curves = run("scaling_ladder", "cpu", seeds, TUNING_SEEDS, out, True, fields).curves
        found.append(np.log(np.stack([last(curves[f"{name}/held"]) for name in names(curves)], axis=1)))
        print(f"rate {rate:g}: {np.round(np.exp(found[-1]).mean(0), 3)}", flush=True)
    return np.stack(found), {key: x for key, x in curves.items() if key.startswith("inputs/")}


def rule(logs: np.ndarray, rates: Sequence[float], N: np.ndarray, D: np.ndarray) -> dict[str, float | list[float]]:
    """best: each run's rate; rate, slope_N, slope_D: best = rate (N / AT_N)^slope_N (D / AT_D)^slope_D; rms of its log."""
    mean, x, best = logs.mean(axis=1), np.log(rates), []
    for loss in mean.T:
        k = slice((at := int(np.clip(loss.argmin(), 1, len(x) - 2))) - 1, at + 2)
        curvature, slope, _ = np.polyfit(x[k], loss[k], 2)
        best.append(-slope / (2 * curvature))
    terms = np.stack([np.ones_like(N), np.log(N / AT_N), np.log(D / AT_D)], axis=1)
    found = np.linalg.lstsq(terms, np.array(best))[0]
    return {"best": np.exp(best).tolist(), "rate": float(np.exp(found[0])), "slope_N": float(found[1]),
            "slope_D": float(found[2]), "rms": float(np.sqrt(np.mean((terms @ found - best) ** 2)))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budgets", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        logs, inputs = losses(RATES, args.seeds, args.budgets, out)
    N, D = inputs["inputs/N"], inputs["inputs/D"]
    record = {"command": f"scripts/tune_ladder.py --seeds {args.seeds} --budgets {args.budgets}",
              "seeds": list(range(TUNING_SEEDS, TUNING_SEEDS + args.seeds)), "versions": identity.versions(),
              "rates": RATES, "N": N.tolist(), "D": D.tolist(), "loss": np.round(np.exp(logs), 4).tolist(),
              "rule": rule(logs, RATES, N, D)}
    path = Path(__file__).parents[1] / "experiments" / "tuned" / "scaling_ladder.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["rule"], indent=1))


if __name__ == "__main__":
    main()
