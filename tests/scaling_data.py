"""Public tables of training runs, where a folder of them is at hand: JAXPT_DATA, or shared/data beside the
checkout. They are not part of this repository; tests that need one skip, and say so, where it is absent."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from jaxpt.scaling.general import cube
from jaxpt.scaling.laws import predict

FOLDER = Path(os.environ.get("JAXPT_DATA", Path(__file__).parents[2] / "shared" / "data"))
EPOCH = "chinchilla_epoch_svg.csv"  # epoch-research/analyzing-chinchilla, data/svg_extracted_data.csv
KYO_TAKANO = "chinchilla_kyo_takano.csv"  # kyo-takano/chinchilla, examples/llm/df.csv
RANGES = {"N": (1e7, 1e10), "D": (1e9, 3e11), "C": (1e17, 1e22), "S": (1e3, 1e6), "U": (1e9, 3e10), "E": (1, 512),
          "G": (1, 32), "L": (1.8, 4.0), "B": (1e4, 1e8), "T": (1e2, 1e6), "k": (1, 1e4), "KL": (0.05, 60),
          "x": (1e3, 1e9), "C_inf": (1e9, 1e14)}


def table(name):
    """Path of a table; skips the test where it is absent."""
    if not (FOLDER / name).exists():
        pytest.skip(f"{name} is not in {FOLDER}: set JAXPT_DATA to a folder that has it")
    return FOLDER / name


def epoch(drop=5):
    """(N, D, loss) of Epoch's reading of Chinchilla's figure 4, without the `drop` highest losses."""
    with table(EPOCH).open(newline="") as file:
        rows = list(csv.DictReader(file))
    N, C, loss = (np.array([float(row[name]) for row in rows]) for name in ("Model Size", "Training FLOP", "loss"))
    keep = np.sort(np.argsort(loss, kind="stable")[:len(loss) - drop])
    return N[keep], (C / (6 * N))[keep], loss[keep]


def law_runs(law, noise=0.0, seed=0, count=48):
    """(columns, what is measured) of runs that fill RANGES evenly, with noise of Student's t."""
    u = cube(count, len(law.inputs) + 1)
    x = {name: RANGES[name][0] * (RANGES[name][1] / RANGES[name][0]) ** u[i] for i, name in enumerate(law.inputs)}
    if "U" in x:
        x["U"] = np.minimum(x["U"], x["D"])
    y = predict(law, np.array(law.values), list(x.values()))
    return x, y * np.exp(noise * np.random.default_rng(seed).standard_t(4, count))
