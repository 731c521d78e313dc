"""Which runs to buy next, and how many it takes.

With equally noisy runs a fit's parameters have a covariance in proportion to H^-1, H = sum_i w_i J_i J_i^T over the
runs (J = d log L / d theta). A target with gradient c in theta then has a variance in proportion to c^T H^-1 c, which
a run at (N, D) lowers by

    (c^T H^-1 J)^2 / (1 + J^T H^-1 J)        (Sherman and Morrison 1950)

`plan` buys, one after the other, the affordable run that lowers it most, and the one that lowers it most per FLOP;
the better of the two lists is kept, and its members are then exchanged for candidates as long as that helps (greedy
and exchange algorithms for c-optimal designs: Fedorov 1972; the cost-benefit pair: Leskovec et al. 2007). A fit from
few runs knows J and c badly: what is lowered is the mean logarithm of the variance over refits of resampled runs
(a pseudo-Bayesian design: Chaloner and Verdinelli 1995). The target's present standard error sets the scale. All of
this holds near the fitted law: where that is wrong, so is the plan. Several targets (columns of c) are summed.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxpt.scaling.chinchilla import Fit, jacobian, parameters, terms
from jaxpt.scaling.frontier import exponent, optimum
from jaxpt.scaling.uncertainty import information, refits, sandwich

Target = Callable[[np.ndarray], np.ndarray]  # params [...,5] -> [...,m]


class Plan(NamedTuple):
    rows: np.ndarray  # [k] candidates to buy, in the order bought
    N: np.ndarray  # [k]
    D: np.ndarray
    cost: np.ndarray  # [k] FLOPs
    before: float  # standard error of the target (root mean square over its columns)
    after: np.ndarray  # [k] with the first, the first two, ... of them


def loss_at(N: np.ndarray, D: np.ndarray) -> Target:
    """log L at runs [m]."""
    def target(params: np.ndarray) -> np.ndarray:
        A, B, E, alpha, beta = (x[..., None] for x in np.moveaxis(params, -1, 0))
        return np.log(E + A * N**-alpha + B * D**-beta)
    return target


def best_loss(C: float, flop: float = 6.0) -> Target:
    """log L* of a budget."""
    return lambda params: np.log(optimum(params, C, flop).loss)[..., None]


def best_size(C: float, flop: float = 6.0) -> Target:
    """log N* of a budget."""
    return lambda params: np.log(optimum(params, C, flop).N)[..., None]


def allocation(params: np.ndarray) -> np.ndarray:
    """The exponent a of N* ~ C^a."""
    return exponent(params)[..., None]


@np.errstate(all="ignore")  # a term that is all but gone overflows; what is not finite is left out below
def gradient(theta: np.ndarray, centre: np.ndarray, target: Target) -> np.ndarray:
    """[S,5,m] of the target at theta [S,5] about `centre`, by central differences."""
    step = 1e-5 * np.eye(5)
    up, down = (target(parameters(theta[:, None] + sign * step, centre)) for sign in (1, -1))
    return (up - down) / 2e-5


def steepness(theta: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """[S,m,5]: J of runs at n, d [m] about the centre, under theta [S,5]."""
    return jacobian(terms(theta, n, d)[1], n, d).transpose(0, 2, 1)


def standard_error(fit: Fit, target: Target) -> float:
    """Of the target, by the sandwich (root mean square over its columns)."""
    c = gradient(fit.theta[None], fit.data.centre, target)[0]
    _, covariance = sandwich(fit, information(fit)[0])
    return float(np.sqrt(np.sum(c * (covariance @ c)) / c.shape[1]))


def candidates(fit: Fit, most: float, flop: float = 6.0, per_axis: int = 24, beyond: float = 2.0,
               ) -> tuple[np.ndarray, np.ndarray]:
    """(N, D) of a grid over the runs' own sizes and lengths, `beyond` times more at the upper ends, with D / N within
    a factor `beyond` of theirs (the law was never seen elsewhere) and k N D at most `most`."""
    axes = []
    for x, centre in zip((fit.data.n, fit.data.d), fit.data.centre, strict=True):
        axes.append(np.exp(centre + np.linspace(x.min(), x.max() + np.log(beyond), per_axis)))
    N, D = (x.ravel() for x in np.meshgrid(*axes, indexing="ij"))
    ratio, seen = np.log(D / N), fit.data.d - fit.data.n + fit.data.centre[1] - fit.data.centre[0]
    keep = (flop * N * D <= most * (1 + 1e-9)) & (ratio >= seen.min() - np.log(beyond))
    keep &= ratio <= seen.max() + np.log(beyond)
    return N[keep], D[keep]


def plan(fit: Fit, target: Target, N: np.ndarray, D: np.ndarray, cost: np.ndarray, count: int, budget: float,
         *, again: bool = True, se: float | None = None, others: int = 24, seed: int = 0) -> Plan:
    """At most `count` of the candidates N, D [m] for at most `budget` of their costs [m]; again: a candidate may be
    bought more than once; se: the target's present standard error (`standard_error` by default); others: how many
    refits stand for what the parameters could be. Empty where none is affordable; ValueError where the runs do not
    determine the target."""
    theta = _plausible(fit, target, others, seed)
    n, d = np.log(N) - fit.data.centre[0], np.log(D) - fit.data.centre[1]
    own = steepness(theta, fit.data.n, fit.data.d)
    gram = np.einsum("snp,n,snq->spq", own, fit.data.weight, own)
    ridge = 1e-13 * np.trace(gram, axis1=1, axis2=2)[:, None, None] * np.eye(5)
    H = np.linalg.inv(gram + ridge)
    c, A = gradient(theta, fit.data.centre, target), steepness(theta, n, d)
    lists = [_greedy(H, c, A, cost, count, budget, again, power) for power in (0.0, 1.0)]
    chosen = min(lists, key=lambda rows: _score(H, c, A, rows))
    chosen = _exchanged(H, c, A, cost, chosen, budget, again)
    before = standard_error(fit, target) if se is None else se
    left = np.array([_score(H, c, A, chosen[:k]) for k in range(len(chosen) + 1)])
    after = before * np.exp((left[1:] - left[0]) / 2)
    return Plan(np.array(chosen, int), N[chosen], D[chosen], cost[chosen], before, after)


def _plausible(fit: Fit, target: Target, count: int, seed: int) -> np.ndarray:
    """[S,5]: those of the fit and of `count` refits of resampled runs that are optima with a slope in the target."""
    theta = fit.theta[None]
    if count:
        found = refits(fit, "case", count, seed)
        with np.errstate(all="ignore"):
            more = np.concatenate([np.log(found.params[:, :3]), found.params[:, 3:]], axis=1)
            more[:, :2] -= more[:, 3:] * fit.data.centre
        theta = np.concatenate([theta, more[found.converged]])
    c = gradient(theta, fit.data.centre, target)
    good = np.all(np.abs(np.nan_to_num(theta, nan=np.inf)) < 30, axis=1) & np.all(np.isfinite(c), axis=(1, 2))
    good &= np.any(c != 0, axis=(1, 2))
    if not good.any():
        raise ValueError("the runs do not determine the target: neither the fit nor a refit of resampled runs has a "
                         "slope in it")
    return theta[good]


def _variances(H: np.ndarray, c: np.ndarray) -> np.ndarray:
    """[S]: trace(c^T H c), H the inverse information."""
    return np.einsum("spm,spq,sqm->s", c, H, c)


def _score(H: np.ndarray, c: np.ndarray, A: np.ndarray, rows: list[int]) -> float:
    """Mean log variance with the candidates `rows` bought."""
    for row in rows:
        H = _bought(H, A[:, row])
    return float(np.mean(np.log(_variances(H, c))))


def _gains(H: np.ndarray, c: np.ndarray, A: np.ndarray) -> np.ndarray:
    """[m]: by how much each candidate lowers the mean log variance."""
    AH = A @ H
    share = np.sum((AH @ c) ** 2, axis=2) / (1 + np.sum(AH * A, axis=2)) / _variances(H, c)[:, None]
    return -np.mean(np.log1p(-np.minimum(share, 1 - 1e-12)), axis=0)


def _bought(H: np.ndarray, J: np.ndarray) -> np.ndarray:
    """H [S,5,5] after a run with slopes J [S,5]."""
    HJ = np.einsum("spq,sq->sp", H, J)
    return H - HJ[:, :, None] * HJ[:, None, :] / (1 + np.sum(J * HJ, axis=1))[:, None, None]


def _greedy(H: np.ndarray, c: np.ndarray, A: np.ndarray, cost: np.ndarray, count: int, budget: float,
            again: bool, power: float) -> list[int]:
    """power 0: the largest gain, 1: the largest gain per FLOP."""
    chosen: list[int] = []
    for _ in range(count):
        allowed = cost <= budget * (1 + 1e-9)
        if not again:
            allowed[chosen] = False
        if not allowed.any():
            break
        best = int(np.argmax(np.where(allowed, _gains(H, c, A) / cost**power, -np.inf)))
        H, budget = _bought(H, A[:, best]), budget - cost[best]
        chosen.append(best)
    return chosen


def _exchanged(H: np.ndarray, c: np.ndarray, A: np.ndarray, cost: np.ndarray, chosen: list[int], budget: float,
               again: bool, rounds: int = 3) -> list[int]:
    """Each bought run in turn is replaced by the best affordable candidate, given the others."""
    for _ in range(rounds):
        before = list(chosen)
        for k in range(len(chosen)):
            rest, without = chosen[:k] + chosen[k + 1:], H
            for row in rest:
                without = _bought(without, A[:, row])
            allowed = cost <= (budget - cost[rest].sum()) * (1 + 1e-9)
            if not again:
                allowed[rest] = False
            gains = np.where(allowed, _gains(without, c, A), -np.inf)
            best = int(np.argmax(gains))
            if gains[best] > gains[chosen[k]] * (1 + 1e-9):
                chosen[k] = best
        if chosen == before:
            break
    return chosen


def points_needed(n: int, half_width: float, wanted: float) -> float:
    """Runs for an interval of +- wanted where n runs, placed alike, give +- half_width: widths fall with the square
    root of their number."""
    return n * (half_width / wanted) ** 2
