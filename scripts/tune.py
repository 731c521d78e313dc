#!/usr/bin/env python
"""Tunes an experiment's rates on seeds that no claim uses, and records what it found.

Command: .venv/bin/python scripts/tune.py first_light [--seeds 2] [--tier cpu]
Fields are tuned one after the other, in the order of the experiment's `sweep`, each with the best values of
those before it; the best value has the highest mean of the sweep's metric at the end of its stage. The table
goes to experiments/tuned/NAME.json; the values that it names belong into the experiment's Config.
"""

import argparse
import json
import tempfile
from pathlib import Path

from jaxpt.lab import identity
from jaxpt.lab.experiment import load
from jaxpt.lab.report import TUNING_SEEDS
from jaxpt.lab.run import run
from jaxpt.lab.statistics import last


def tune(name: str, tier: str, seeds: int, out: str) -> list[dict]:
    rows, best = [], {}
    for table in load(name).experiment.sweep:
        scores = {field: {} for field in table}
        for index in range(max(len(values) for values, _ in table.values())):
            chosen = {field: values[min(index, len(values) - 1)] for field, (values, _) in table.items()}
            result = run(name, tier, seeds, TUNING_SEEDS, out, True, {**best, **chosen})
            for field, (_, metric) in table.items():
                scores[field][chosen[field]] = [round(float(x), 4) for x in last(result.curves[metric])]
                print(f"{field} = {chosen[field]:g}: {metric} {scores[field][chosen[field]]}", flush=True)
        for field, (_, metric) in table.items():
            best[field] = max(scores[field], key=lambda value, of=scores[field]: sum(of[value]))
            rows.append({"field": field, "metric": metric, "best": best[field],
                         "scores": {f"{value:g}": score for value, score in scores[field].items()}})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tier", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        rows = tune(args.name, args.tier, args.seeds, out)
    seeds = list(range(TUNING_SEEDS, TUNING_SEEDS + args.seeds))
    record = {"command": f"scripts/tune.py {args.name} --seeds {args.seeds} --tier {args.tier}", "seeds": seeds,
              "versions": identity.versions(), "rows": rows}
    path = Path(__file__).parents[1] / "experiments" / "tuned" / f"{args.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
