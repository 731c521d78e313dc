"""Chinchilla's law the usual way: L-BFGS-B from each of the 4500 starts of Hoffmann et al. 2022 (section D.2), on the
sum of Huber's loss of the log residual, with its exact gradient.

Command: python fit_scipy.py FILE    (columns N, D, loss); prints A, B, E, alpha, beta as JSON
"""

import json
import sys
from itertools import product

import numpy as np
from scipy import optimize

GRID = {"alpha": (0.0, 0.5, 1.0, 1.5, 2.0), "beta": (0.0, 0.5, 1.0, 1.5, 2.0), "e": (-1.0, -0.5, 0.0, 0.5, 1.0),
        "a": (0.0, 5.0, 10.0, 15.0, 20.0, 25.0), "b": (0.0, 5.0, 10.0, 15.0, 20.0, 25.0)}
DELTA = 1e-3
SCALE = 1e3  # of the objective: at its own size L-BFGS-B's tolerances end most searches too early


def main(file: str) -> None:
    N, D, loss = np.genfromtxt(file, delimiter=",", skip_header=1).T
    n, d, y = np.log(N), np.log(D), np.log(loss)

    def objective(theta):
        alpha, beta, e, a, b = theta
        terms = np.stack([a - alpha * n, b - beta * d, np.full_like(n, e)])
        total = np.logaddexp(np.logaddexp(terms[0], terms[1]), terms[2])  # special.logsumexp takes 14 times as long
        r, share = total - y, np.exp(terms - total)
        pull = np.clip(r, -DELTA, DELTA)
        slopes = np.stack([-n * share[0], -d * share[1], share[2], share[0], share[1]])
        return SCALE * np.sum(pull * (r - pull / 2)), SCALE * slopes @ pull

    found = [optimize.minimize(objective, start, jac=True, method="L-BFGS-B") for start in product(*GRID.values())]
    alpha, beta, e, a, b = min(found, key=lambda result: result.fun).x
    print(json.dumps([float(x) for x in (np.exp(a), np.exp(b), np.exp(e), alpha, beta)]))


if __name__ == "__main__":
    main(sys.argv[1])
