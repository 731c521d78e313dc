#!/usr/bin/env python
"""Makes the table that `jaxpt fit` takes where no file is named, of a finished run of the ladder.

Command: .venv/bin/python scripts/ship_ladder.py runs/scaling_ladder/HASH
Writes experiments/data/scaling_ladder.csv, a row for each run and seed (the held-out largest among them), and beside
it scaling_ladder.json: the command, the versions and the fields that made them.
"""

import argparse
import json
from pathlib import Path

from jaxpt.experiments.scaling_ladder import as_csv
from jaxpt.lab import store

KEPT = ("config", "versions", "executor")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    record = json.loads((folder / "config.json").read_text())
    if record["experiment"] != "scaling_ladder" or not record["runs"][-1]["finished"]:
        raise SystemExit(f"{folder}: a finished run of scaling_ladder is expected")
    seeds = sorted({seed for entry in record["runs"] for seed in entry["seeds"]})
    made = {"command": f"jaxpt run scaling_ladder --seeds {len(seeds)}", "seeds": seeds}
    to = Path(__file__).parents[1] / "experiments" / "data"
    to.mkdir(exist_ok=True)
    (to / "scaling_ladder.csv").write_text(as_csv(store.read_arrays(folder / "curves.npz")))
    (to / "scaling_ladder.json").write_text(json.dumps(made | {key: record[key] for key in KEPT}, indent=1) + "\n")
    print(to / "scaling_ladder.csv")


if __name__ == "__main__":
    main()
