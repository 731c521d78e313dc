"""The best a budget can buy under the Chinchilla law, in closed form (Hoffmann et al. 2022, eq. 4).

Minimising E + A / N^alpha + B / D^beta subject to C = k N D gives, with a = beta / (alpha + beta), b = 1 - a,

    N* = G (C / k)^a      D* = (C / k)^b / G      G = (alpha A / (beta B))^(1 / (alpha + beta))
    L* = E + (A G^-alpha + B G^beta) (C / k)^-gamma      gamma = alpha beta / (alpha + beta)

Other costs and limits have no closed form and are solved over log N: any count of FLOPs per token, tokens to be
served after training, and data that run out.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxpt.scaling.chinchilla import law

Cost = Callable[[np.ndarray], np.ndarray]  # parameters -> FLOPs per token


class Optimum(NamedTuple):
    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray


class Repeats(NamedTuple):
    """What repeated tokens and excess parameters are worth: Muennighoff et al. 2023 (arXiv 2305.16264), fitted."""

    tokens: float = 15.387756  # R_D*
    parameters: float = 5.309743  # R_N*


def exponent(params: np.ndarray) -> np.ndarray:
    """a of N* ~ C^a from params [...,5]."""
    return params[..., 4] / (params[..., 3] + params[..., 4])


def _log_G(params: np.ndarray) -> np.ndarray:
    A, B, _, alpha, beta = np.moveaxis(np.asarray(params, np.float64), -1, 0)
    return (np.log(alpha) + np.log(A) - np.log(beta) - np.log(B)) / (alpha + beta)


def optimum(params: np.ndarray, C: np.ndarray, flop: float = 6.0) -> Optimum:
    """At budgets C (FLOPs, [...] broadcast against params [...,5]); flop: FLOPs per parameter and token.
    NaN where an exponent is not above 0 (then no optimum exists)."""
    _, _, _, alpha, beta = np.moveaxis(np.asarray(params, np.float64), -1, 0)
    with np.errstate(all="ignore"):
        log_G = _log_G(params)
        log_ND = np.log(np.asarray(C, np.float64) / flop)
        a = exponent(np.asarray(params))
        N, D = np.exp(log_G + a * log_ND), np.exp((1 - a) * log_ND - log_G)
        N, D = (np.where((alpha > 0) & (beta > 0), x, np.nan) for x in (N, D))
        return Optimum(N, D, law(params, N, D))


def compute_for(params: np.ndarray, loss: np.ndarray, flop: float = 6.0) -> np.ndarray:
    """The least FLOPs that reach `loss`: L* inverted; inf at or below E."""
    A, B, E, alpha, beta = np.moveaxis(np.asarray(params, np.float64), -1, 0)
    with np.errstate(all="ignore"):
        log_G = _log_G(params)
        scale = A * np.exp(-alpha * log_G) + B * np.exp(beta * log_G)
        above = np.asarray(loss, np.float64) - E
        return np.where(above > 0, flop * (scale / above) ** ((alpha + beta) / (alpha * beta)), np.inf)


def lowest_over(f: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float:
    """x in [low, high] with the lowest f (array to array; inf where forbidden): a grid, refined 12 times."""
    for _ in range(12):
        x = np.linspace(low, high, 65)
        at = int(np.argmin(f(x)))
        low, high = x[max(at - 1, 0)], x[min(at + 1, 64)]
    return float((low + high) / 2)


@np.errstate(all="ignore")  # forbidden sizes are worth inf
def _solved(params: np.ndarray, tokens: Cost, value: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Optimum:
    """The N of 1 to 1e18 with the lowest value(N, D) at D = tokens(N)."""

    def f(log_N):
        N = np.exp(log_N)
        D = tokens(N)
        score = value(N, np.where(D > 0, D, np.nan))
        return np.where(np.isfinite(score), score, np.inf)

    N = np.exp(lowest_over(f, 0.0, np.log(1e18)))
    D = tokens(np.array(N))
    return Optimum(np.float64(N), np.float64(D), law(params, N, D))


def counted(params: np.ndarray, C: float, flops_per_token: Cost) -> Optimum:
    """The optimum where a token costs flops_per_token(N) and not k N: attention, embeddings and the last layer, or
    a user's own count (`jaxpt.scaling.flops`). params [5]."""
    return _solved(params, lambda N: C / flops_per_token(N), lambda N, D: law(params, N, D))


def served(params: np.ndarray, C: float, tokens: float, flop: float = 6.0, serve: float = 2.0) -> Optimum:
    """The lowest loss when C pays for training and for `tokens` tokens of inference, C = k N D + s N T
    (Sardana et al. 2024, arXiv 2401.00448, eq. 3 with the budget fixed instead of the loss)."""
    return _solved(params, lambda N: (C - serve * N * tokens) / (flop * N), lambda N, D: law(params, N, D))


def cheapest(params: np.ndarray, loss: float, tokens: float, flop: float = 6.0, serve: float = 2.0) -> Optimum:
    """The least k N D + s N T that reaches `loss` and serves T = `tokens` tokens (their eq. 3). A dearer FLOP of
    inference (lower utilisation) is a larger `serve`. NaN where the loss is not above E."""
    A, B, E, alpha, beta = np.asarray(params, np.float64)
    if not loss > E:
        return Optimum(*np.full(3, np.nan))

    def needed(N):
        left = loss - E - A * N**-alpha
        return np.where(left > 0, (B / np.where(left > 0, left, 1.0)) ** (1 / beta), np.nan)

    return _solved(params, needed, lambda N, D: np.log(N) + np.log(flop * D + serve * tokens))


def effective(params: np.ndarray, N: np.ndarray, D: np.ndarray, unique: float,
              repeats: Repeats = Repeats()) -> tuple[np.ndarray, np.ndarray]:
    """(N', D') of Muennighoff et al., eq. 5 and 6: D tokens drawn from `unique` ones, N parameters of which those
    beyond the best for that many tokens are in excess.

        D' = U + U R* (1 - exp(-R / R*))     U = min(D, unique)   R = D / U - 1,   the same for N
    """
    A, B, _, alpha, beta = np.asarray(params, np.float64)
    U = np.minimum(D, unique)
    G = np.exp(_log_G(params))
    base = np.minimum(N, (U * G) ** (beta / alpha) * G)  # their U_N: N* where D* = U
    out = []
    for x, u, scale in ((N, base, repeats.parameters), (D, U, repeats.tokens)):
        out.append(u + u * scale * -np.expm1(-(x / u - 1) / scale))
    return out[0], out[1]


def limited(params: np.ndarray, C: float, unique: float, flop: float = 6.0, repeats: Repeats = Repeats()) -> Optimum:
    """The optimum of C when only `unique` tokens exist: D / unique are the epochs. `loss` is that of the effective
    N' and D'."""
    value = lambda N, D: law(params, *effective(params, N, D, unique, repeats))  # noqa: E731
    found = _solved(params, lambda N: C / (flop * N), value)
    return found._replace(loss=value(found.N, found.D))
