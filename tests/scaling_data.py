"""Public tables of training runs, where a folder of them is at hand: JAXPT_DATA, or shared/data beside the
checkout. They are not part of this repository; tests that need one skip, and say so, where it is absent."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(os.environ.get("JAXPT_DATA", Path(__file__).parents[2] / "shared" / "data"))
EPOCH = "chinchilla_epoch_svg.csv"  # epoch-research/analyzing-chinchilla, data/svg_extracted_data.csv
KYO_TAKANO = "chinchilla_kyo_takano.csv"  # kyo-takano/chinchilla, examples/llm/df.csv


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
