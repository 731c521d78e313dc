"""A table of runs from folders that `jaxpt run` wrote: a row for each stage and seed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpt.lab.errors import UserError
from jaxpt.lab.tables import Table

FIRST = ("experiment", "run", "seed", "N", "D", "flops", "loss")


def read_runs(path: str) -> Table:
    """Of the finished runs at or below the folder `path`. N is the experiment's input of that name, with an entry for
    each stage that counts tokens; D and FLOPs are what the stage's metrics `tokens` and `flops` ended with, the loss
    its last `held`, or `loss` where nothing was held out. Further inputs of N's length are columns too. A run without
    N is a fault, named like a row; UserError where there is no finished run."""
    found = sorted(file.parent for file in Path(path).rglob("curves.npz"))
    if not found:
        raise UserError(f"{path} is a folder without a finished run of `jaxpt run` (no curves.npz): such a folder, or a "
                        "CSV, JSON-lines or Parquet file, is expected")
    rows: list[dict[str, Any]] = []
    places, faults = [], []
    for folder in found:
        try:
            more = _rows(folder)
        except Exception as error:  # damage raises whatever the damaged bytes mean to zip, npy and JSON
            faults.append((len(rows) + len(faults) + 1, f"{folder}: {error}"))
            continue
        places += range(len(rows) + len(faults) + 1, len(rows) + len(faults) + len(more) + 1)
        rows += more
    columns = dict.fromkeys(name for row in rows for name in row)
    if not rows:
        raise UserError(faults[0][1])
    return Table(path, tuple(columns), rows, places, faults, "row")


def _rows(folder: Path) -> list[dict[str, Any]]:
    """ValueError, in words, for a run that is no ladder of sizes."""
    config = json.loads((folder / "config.json").read_text())
    with open(folder / "curves.npz", "rb") as raw, np.load(raw, allow_pickle=False) as file:
        curves = {name: file[name] for name in file.files if name.count("/") < 2}
    stages = [name for name in config["stages"] if f"{name}/tokens" in curves]
    N = curves.get("inputs/N")
    if N is None or N.shape != (len(stages),) or not stages:
        raise ValueError(f"{config['experiment']} does not say the parameters of its {len(stages)} training stages: "
                         "an input N with one entry for each is expected")
    inputs = {name.removeprefix("inputs/"): x for name, x in curves.items() if name.startswith("inputs/")}
    columns = {name: x for name, x in inputs.items() if x.shape == N.shape and x.dtype.kind in "fiu"}
    return [
        dict(zip(FIRST, (config["experiment"], stage, int(seed), float(N[i]), *_ends(curves, stage, s)), strict=True))
        | {name: x[i].item() for name, x in columns.items() if name not in FIRST}
        for i, stage in enumerate(stages) for s, seed in enumerate(curves["seeds"])
    ]


def _ends(curves: Mapping[str, np.ndarray], stage: str, s: int) -> tuple[float | None, float | None, float | None]:
    """(tokens, FLOPs, loss) that the s-th seed's stage ended with; None for what it does not count."""
    loss = "held" if f"{stage}/held" in curves else "loss"
    return tuple(None if x is None else _last(x[s]) for x in (curves.get(f"{stage}/{name}")
                                                              for name in ("tokens", "flops", loss)))


def _last(x: np.ndarray) -> float:
    """The last value that was measured; NaN if none was."""
    known = x[np.isfinite(x)]
    return float(known[-1]) if known.size else float("nan")
