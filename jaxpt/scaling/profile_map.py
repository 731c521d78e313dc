"""How much worse the objective is at other exponents of Chinchilla's law: its profile over (alpha, beta)."""

from typing import NamedTuple

import numpy as np

from jaxpt.scaling.chinchilla import EDGES, Fit
from jaxpt.scaling.uncertainty import dispersion


class ProfileMap(NamedTuple):
    alpha: np.ndarray  # [m]
    beta: np.ndarray  # [m]
    height: np.ndarray  # [m,m] 2 (F - F_min) / s at alpha[i], beta[j], F minimised over A, B, E


def profile_map(fit: Fit, limits: np.ndarray, cells: int = 41, beyond: float = 1.8) -> ProfileMap:
    """limits [2,2]: the 95% profile intervals of alpha and beta, which the map goes `beyond` times as far as. Where
    one has no end it goes to half or twice the estimate. s is the mean of both unknowns' dispersions, so the contour
    of chi-square's 95% quantile has those intervals as its shadows, but for what the two differ in. An exact
    fit has axes of no width."""
    axes = []
    for value, (low, high) in zip(fit.theta[3:], limits, strict=True):
        low, high = (value + beyond * (x - value) if np.isfinite(x) else edge * value
                     for x, edge in ((low, 0.5), (high, 2.0)))
        axes.append(np.linspace(*np.clip((low, high), *EDGES), cells))
    start = np.tile(fit.theta, (cells * cells, 1))
    start[:, 3:] = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    free = np.broadcast_to(np.arange(5) < 3, start.shape)
    found = fit.solve(start, fit.deltas[-1:], free=free, tolerance=1e-8)
    s = dispersion(fit, fit.slopes)[0][3:].mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        height = 2 * np.maximum(found.value - fit.value, 0) / s
    return ProfileMap(*axes, np.where(np.isfinite(height), height, np.nan).reshape(cells, cells))
