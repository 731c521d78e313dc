"""Chinchilla's law by the package `chinchilla`, from the same starts and with the same loss.

Command: python fit_chinchilla.py FILE    (columns N, D, loss); prints A, B, E, alpha, beta as JSON
"""

import json
import sys
import tempfile
from functools import partial

import numpy as np
from chinchilla import Chinchilla
from chinchilla._metrics import log_huber
from fit_scipy import DELTA, GRID


def main(file: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fitter = Chinchilla(folder, param_grid={name: GRID[name] for name in ("e", "a", "b", "alpha", "beta")},
                            loss_fn=partial(log_huber, delta=DELTA), log_level=50)
        for N, D, loss in np.genfromtxt(file, delimiter=",", skip_header=1).tolist():
            fitter.append(N=N, D=D, loss=loss)
        fitter.fit()
        print(json.dumps([float(getattr(fitter, name)) for name in ("A", "B", "E", "alpha", "beta")]))


if __name__ == "__main__":
    main(sys.argv[1])
