"""How far the parameters could be elsewhere: resampling, profiles, leverage, and fits without the extremes.

The inverse Hessian is no standard error here: most residuals lie on the linear part of Huber's loss, where it
counts curvature that is not there. Intervals are percentiles of refits (Efron & Tibshirani 1993) or profiles.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxpt.scaling import chinchilla
from jaxpt.scaling.robust import expected_curvature, location, penalty, threshold

if TYPE_CHECKING:
    from jaxpt.scaling import general

    Fit = chinchilla.Fit | general.Fit  # p unknowns: 5 of the closed form, or those of a law in the table

RESAMPLES = ("case", "cluster", "residual", "wild")
CHI_SQUARE_95 = 3.841458820694124  # 95% point, one degree of freedom


class Refits(NamedTuple):
    kind: str
    params: np.ndarray  # [B,p]
    value: np.ndarray  # [B] each refit's own objective
    converged: np.ndarray  # [B] bool


class Spread(NamedTuple):
    se: np.ndarray
    low: np.ndarray  # 2.5%
    high: np.ndarray  # 97.5%


def draws(
    fit: "Fit", kind: str, count: int, seed: int, cluster: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """`count` resampled data sets, as the arguments `weight` or `y` [count,n] of `solve`.

    case: runs with replacement; cluster: whole groups of runs (`cluster` [n], in the input's order).
    residual: the fit plus residuals drawn with replacement. They are centred where the fit's own loss puts their
    centre: about their mean, one outlier would move every resample's law.
    wild: the fit plus each run's own residual with a random sign (Rademacher; Wu 1986, Liu 1988), one sign
    for a whole cluster where there are any.
    """
    rng = np.random.default_rng(seed)
    n = fit.data.y.size
    groups, group = (n, np.arange(n)) if cluster is None else _groups(np.asarray(cluster)[fit.data.order])
    if kind in ("case", "cluster"):
        if kind == "case":
            groups, group = n, np.arange(n)
        elif cluster is None:
            raise ValueError("resampling clusters needs to know the clusters")
        counts = rng.multinomial(groups, np.full(groups, 1 / groups), size=count)
        return {"weight": counts[:, group] * fit.data.weight}
    residual = fit.residuals
    fitted = fit.data.y - residual
    if kind == "residual":
        centre = -location(-residual, fit.data.weight, fit.deltas[-1])
        return {"y": fitted + rng.choice(residual - centre, size=(count, n))}
    if kind == "wild":
        return {"y": fitted + rng.choice([-1.0, 1.0], size=(count, groups))[:, group] * residual}
    raise ValueError(f"resampling {kind!r} is unknown: expected one of {', '.join(RESAMPLES)}")


def _groups(labels: np.ndarray) -> tuple[int, np.ndarray]:
    names, codes = np.unique(labels, return_inverse=True)
    return names.size, codes.reshape(-1)


def refits(fit: "Fit", kind: str, count: int, seed: int, cluster: np.ndarray | None = None) -> Refits:
    """Every resampled data set fitted, from the optimum of all the data through the same thresholds. The way
    from the widest one's optimum to the next is foretold by that of all the data."""
    drawn = draws(fit, kind, count, seed, cluster)
    wide, rest = fit.deltas[:1], fit.deltas[1:]
    start = fit.solve(fit.theta[None], wide).theta
    found = fit.solve(np.repeat(start, count, axis=0), wide, **drawn, tolerance=0.1 if rest else 1e-10)
    if rest:
        found = fit.solve(found.theta + (fit.theta - start), rest, **drawn, tolerance=1e-10)
    return Refits(kind, fit.parameters(found.theta), found.value, found.converged)


def spread(samples: np.ndarray) -> Spread:
    """Standard error and 95% percentile interval over axis 0 of [B,...]; NaN without two finite samples."""
    with np.errstate(all="ignore"):
        if len(samples) < 2:
            none = np.full(samples.shape[1:], np.nan)
            return Spread(none, none, none)
        low, high = np.quantile(samples, [0.025, 0.975], axis=0)
        return Spread(np.std(samples, axis=0, ddof=1), low, high)


def dispersion(fit: "Fit", J: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s [p], se [p]) of the unknowns that J [p,n] belongs to: 2 (F(theta_k) - F_min) / s_k ~ chi^2 on one
    degree of freedom, F minimised over the others, whether or not all runs are equally noisy: se^2 is the sandwich's
    diagonal and s its ratio to the diagonal of H^-1."""
    inverse, covariance = sandwich(fit, J)
    variance = np.maximum(np.diag(covariance), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(variance / np.diag(inverse)), np.sqrt(variance)


def sandwich(fit: "Fit", J: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(H^-1, H^-1 K H^-1) [p,p] of the unknowns that J [p,n] belongs to (Huber 1967).

    H = sum w E[rho''] J J^T and K = sum w^2 rho'^2 J J^T. For Huber's loss E[rho''] is the share of residuals within
    delta; where a kernel's bandwidth is wider than delta, the share within that, taken as evenly spread (Powell 1984).
    """
    r, w, shape = -fit.residuals, fit.data.weight, fit.deltas[-1]
    window = max(threshold(shape), 1.06 * np.median(np.abs(r)) / 0.6745 * r.size ** -0.2, 1e-15)
    slope = w * expected_curvature(r, shape, window)
    noise = (w * penalty(r, shape).psi) ** 2 * r.size / max(r.size - int(np.sum(fit.free)), 1)
    inverse = np.linalg.pinv((J * slope) @ J.T, hermitian=True)
    return inverse, inverse @ (J * noise) @ J.T @ inverse


def information(fit: "Fit") -> tuple[np.ndarray, np.ndarray]:
    """(J [p,n], sum_i w_i J_i J_i^T [p,p]) at the optimum."""
    J = fit.slopes
    return J, (J * fit.data.weight) @ J.T


def leverage(fit: "Fit") -> np.ndarray:
    """[n] in data's order: w_i J_i^T (sum w J J^T)^-1 J_i; they add up to the number of parameters determined."""
    J, gram = information(fit)
    return fit.data.weight * np.einsum("pn,pq,qn->n", J, np.linalg.pinv(gram, hermitian=True), J)


def correlation(fit: "Fit", refitted: Refits) -> np.ndarray:
    """[p,p] over refits, of the logarithm of the parameters that `fit.logged` names, and of the others."""
    with np.errstate(all="ignore"):
        values = np.where(fit.logged, np.log(np.where(fit.logged, refitted.params, 1.0)), refitted.params)
        values = values[np.all(np.isfinite(values), axis=1)]
        p = len(fit.names)
        return np.corrcoef(values.T).reshape(p, p) if len(values) > 1 else np.full((p, p), np.nan)


class Without(NamedTuple):
    """One refit without some of the runs."""

    what: str
    n: int
    params: np.ndarray  # [p]


def stability(fit: "Fit") -> list[Without]:
    """Refits without the extreme runs: by what was measured, and by what `fit.size` names."""
    what, size = fit.size
    by_loss, by_size = (np.argsort(x, kind="stable") for x in (fit.data.y, size))
    n, (one, many) = by_loss.size, fit.measured
    tenth = max(1, n // 10)
    cases = [(f"the highest {one}", by_loss[-1:]), (f"the 5 highest {many}", by_loss[-5:]),
             (f"the 5 lowest {many}", by_loss[:5]), (f"the tenth with most {what}", by_size[-tenth:]),
             (f"the tenth with least {what}", by_size[:tenth])]
    cases = [(what, rows) for what, rows in cases if n - rows.size > fit.free.sum()]
    if not cases:
        return []
    weight = np.repeat(fit.data.weight[None], len(cases), axis=0)
    for row, (_, rows) in zip(weight, cases, strict=True):
        row[rows] = 0.0
    params = fit.parameters(fit.solve(np.repeat(fit.theta[None], len(cases), axis=0), fit.deltas, weight=weight).theta)
    return [Without(what, n - rows.size, p) for (what, rows), p in zip(cases, params, strict=True)]


def profile_intervals(fit: "Fit") -> np.ndarray:
    """[p,2]: the 95% profile-likelihood intervals of the parameters; 0, -inf or inf where the objective never
    rises enough."""
    if not isinstance(fit, chinchilla.Fit):
        ends = _profile(fit, tuple(np.flatnonzero(fit.free)))
        return np.sort(fit.parameters(ends.T), axis=0).T
    centre = fit.data.centre
    at_zero = fit.theta.copy()  # the same law about log N = log D = 0, where a = log A
    at_zero[:2] += fit.theta[3:] * centre
    plain = fit.data._replace(centre=np.zeros(2), n=fit.data.n + centre[0], d=fit.data.d + centre[1])
    limits = np.concatenate([_profile(fit._replace(data=plain, theta=at_zero), (0, 1))[:2],
                             _profile(fit, (2, 3, 4))[2:]])
    with np.errstate(over="ignore"):
        limits[:3] = np.exp(limits[:3])
    return limits


def _profile(fit: "Fit", unknowns: tuple[int, ...]) -> np.ndarray:
    """[p,2] limits of the unknowns: where sqrt(2 (F - F_min) / s) = 1.96, by a bracketed secant; infinite where that
    is not within 64 times what the sandwich says; where they are now for those that `unknowns` does not name."""
    limits, theta, deltas = np.repeat(fit.theta[:, None], 2, axis=1), fit.theta, fit.deltas[-1:]
    if np.max(np.abs(fit.residuals)) < 1e-12 or not unknowns:  # an exact fit has no width to show
        return limits
    F = np.sum(fit.data.weight * penalty(-fit.residuals, deltas[0]).rho)
    s, se = dispersion(fit, fit.slopes)
    which, sign = np.repeat(unknowns, 2), np.tile([-1.0, 1.0], len(unknowns))
    rows, s = np.arange(which.size), np.maximum(s, 1e-3 * s.max())[which]  # 0 where nothing depends on it
    free = np.repeat(fit.free[None], rows.size, axis=0)
    free[rows, which] = False
    warm = np.repeat(theta[None], rows.size, axis=0)

    def height(offset: np.ndarray, on: np.ndarray) -> np.ndarray:
        """sqrt(2 (F - F_min) / s) - 1.96 with the unknown held `offset` away, of the rows `on`; remembers where the
        others went."""
        start = warm[on]
        start[np.arange(on.size), which[on]] = theta[which[on]] + sign[on] * offset[on]
        found = fit.solve(start, deltas, free=free[on], tolerance=1e-6)
        warm[on] = np.where(found.converged[:, None], found.theta, start)
        return np.sqrt(2 * np.maximum(found.value - F, 0) / s[on]) - np.sqrt(CHI_SQUARE_95)

    low, f_low = np.zeros(rows.size), np.full(rows.size, -np.sqrt(CHI_SQUARE_95))
    high, f_high = np.maximum(np.sqrt(CHI_SQUARE_95) * se[which], 1e-12), np.empty(rows.size)
    f_high[:] = height(high, rows)
    for _ in range(6):
        on = np.flatnonzero(f_high < 0)
        if not on.size:
            break
        low[on], f_low[on], high[on] = high[on], f_high[on], 2 * high[on]
        f_high[on] = height(high, on)
    open_ended, middle = f_high < 0, high.copy()
    on = np.flatnonzero(~open_ended)
    for _ in range(12):
        if not on.size:
            break
        steep = f_high[on] > 20  # a secant from so high, or from where the law overflows, hardly moves: bisect
        middle[on] = low[on] + (high[on] - low[on]) * np.where(steep, 0.5, -f_low[on] / (f_high[on] - f_low[on]))
        f = height(middle, on)
        above, below = on[f > 0], on[f <= 0]
        f_low[above], f_high[above], high[above] = f_low[above] / 2, f[f > 0], middle[above]
        f_high[below], f_low[below], low[below] = f_high[below] / 2, f[f <= 0], middle[below]
        on = on[np.abs(f) >= 5e-4]
    limits[which, (sign > 0).astype(int)] = theta[which] + sign * np.where(open_ended, np.inf, middle)
    return limits
