"""The best a budget can buy under the Chinchilla law, in closed form (Hoffmann et al. 2022, eq. 4).

Minimising E + A / N^alpha + B / D^beta subject to C = k N D gives, with a = beta / (alpha + beta), b = 1 - a,

    N* = G (C / k)^a      D* = (C / k)^b / G      G = (alpha A / (beta B))^(1 / (alpha + beta))
"""

from typing import NamedTuple

import numpy as np

from jaxpt.scaling.chinchilla import law


class Optimum(NamedTuple):
    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray


def exponent(params: np.ndarray) -> np.ndarray:
    """a of N* ~ C^a from params [...,5]."""
    return params[..., 4] / (params[..., 3] + params[..., 4])


def optimum(params: np.ndarray, C: np.ndarray, flop: float = 6.0) -> Optimum:
    """At budgets C (FLOPs, [...] broadcast against params [...,5]); flop: FLOPs per parameter and token.
    NaN where an exponent is not above 0 (then no optimum exists)."""
    A, B, _, alpha, beta = np.moveaxis(np.asarray(params, np.float64), -1, 0)
    with np.errstate(all="ignore"):
        log_G = (np.log(alpha) + np.log(A) - np.log(beta) - np.log(B)) / (alpha + beta)
        log_ND = np.log(np.asarray(C, np.float64) / flop)
        a = exponent(np.asarray(params))
        N, D = np.exp(log_G + a * log_ND), np.exp((1 - a) * log_ND - log_G)
        N, D = (np.where((alpha > 0) & (beta > 0), x, np.nan) for x in (N, D))
        return Optimum(N, D, law(params, N, D))
