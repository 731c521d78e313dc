"""The best size for a budget without a law of two variables: Hoffmann et al. 2022 (arXiv 2203.15556), section 3.

Approach 1 interpolates the loss of each size over compute and takes the lowest at every level (`envelope`).
Approach 2 takes the minimum over log N of the runs of one budget, from a parabola (`parabola`) or from Akima's
spline through them (`spline`; Akima 1970, used for this by Porian et al. 2024, arXiv 2406.19146).
Both then fit log N* = log G + a log C. All work on batches: losses [R,n] of the same n runs, weights [R,n] of
resampled ones (weight 0: absent).
"""

from typing import NamedTuple

import numpy as np

LEVELS = 200  # of compute, at which approach 1 looks for the best size
LEAST = 5  # different sizes that a budget must have


class Budgets(NamedTuple):
    C: np.ndarray  # [b] FLOPs, rising
    group: np.ndarray  # [n] which of them a run belongs to, -1 for none


class Optima(NamedTuple):
    """Logarithms of the best size and the loss there, [R,b] over budgets or levels; NaN where there is none."""

    log_N: np.ndarray
    loss: np.ndarray


class PowerLaw(NamedTuple):
    """log y = level + exponent (log C - centre), by least squares."""

    exponent: np.ndarray  # [R]
    level: np.ndarray  # [R]
    centre: float

    def at(self, C: float) -> np.ndarray:
        """[R] y at C."""
        return np.exp(self.level + self.exponent * (np.log(C) - self.centre))


def budgets(C: np.ndarray, N: np.ndarray, width: float = 1.4) -> Budgets:
    """Runs of equal compute, from compute [n] that need not be exactly equal: neighbours are joined, nearest first,
    as long as the largest of a group stays below `width` times the smallest. Groups of fewer than 5 sizes are
    none."""
    order = np.argsort(C, kind="stable")
    logs = np.log(C[order])
    edges = [0, *(np.flatnonzero(np.diff(logs) > 1e-9) + 1), len(logs)]
    spans = list(zip(edges[:-1], edges[1:], strict=True))
    while len(spans) > 1:
        joined = np.array([logs[right[1] - 1] - logs[left[0]] for left, right in zip(spans, spans[1:], strict=False)])
        at = int(np.argmin(joined))
        if joined[at] > np.log(width):
            break
        spans[at:at + 2] = [(spans[at][0], spans[at + 1][1])]
    group, levels = np.full(len(C), -1), []
    for first, last in spans:
        rows = order[first:last]
        if len(np.unique(_sizes(N[rows]))) >= LEAST:
            group[rows] = len(levels)
            levels.append(np.exp(logs[first:last].mean()))
    return Budgets(np.array(levels), group)


def _sizes(N: np.ndarray) -> np.ndarray:
    """N rounded to 1%: a size read off a figure twice is one size."""
    return np.round(np.log(N) / 0.01).astype(int)


def vertex(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x*, y*) [...] of the parabola fitted to y [...,m] over x [m] with weights w [...,m]; NaN where it opens
    downwards, where fewer than 3 x have weight, or where x* lies outside those that have.

    In the polynomials orthogonal under w: q = x - mean, p = q^2 - q s3 / s2 - s2 with s_k = mean(q^k).
    """
    with np.errstate(all="ignore"):
        w = w / np.sum(w, axis=-1, keepdims=True)
        mean = lambda z: np.sum(w * z, axis=-1, keepdims=True)  # noqa: E731
        q = x - mean(x)
        s2, skew = mean(q**2), mean(q**3) / mean(q**2)
        p = q**2 - skew * q - s2
        slope, bend = mean(y * q) / s2, mean(y * p) / mean(p**2)
        at = (skew - slope / bend) / 2
        low = np.min(np.where(w > 0, q, np.inf), axis=-1, keepdims=True)
        high = np.max(np.where(w > 0, q, -np.inf), axis=-1, keepdims=True)
        good = (bend > 0) & (low < at) & (at < high) & (mean(p**2) > 1e-20 * s2**2)
        best = mean(y) + slope * at + bend * (at**2 - skew * at - s2)
        return tuple(np.where(good, z, np.nan)[..., 0] for z in (mean(x) + at, best))


def parabola(n: np.ndarray, y: np.ndarray, weight: np.ndarray, at: Budgets) -> Optima:
    """n [n] log N, y [R,n] losses, weight [R,n]."""
    found = [vertex(n[rows], y[:, rows], weight[:, rows]) for rows in _rows(at)]
    return Optima(*(np.stack(part, axis=1) for part in zip(*found, strict=True)))


def _rows(at: Budgets) -> list[np.ndarray]:
    return [np.flatnonzero(at.group == b) for b in range(at.C.size)]


def akima(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slopes [R,m] at the knots x [m] rising, m >= 3, of Akima's interpolant of y [R,m] (J. ACM 17, 1970)."""
    inner = np.diff(y, axis=1) / np.diff(x)
    before = 2 * inner[:, :1] - inner[:, 1:2]
    after = 2 * inner[:, -1:] - inner[:, -2:-1]
    s = np.concatenate([2 * before - inner[:, :1], before, inner, after, 2 * after - inner[:, -1:]], axis=1)
    bend = np.abs(np.diff(s, axis=1))
    left, right = bend[:, 2:], bend[:, :-2]  # a slope's weight is the bend on the other side
    total = left + right
    flat = total < 1e-9 * np.max(total, axis=1, keepdims=True, initial=1e-300)
    mixed = (left * s[:, 1:-2] + right * s[:, 2:-1]) / np.where(flat, 1.0, total)
    return np.where(flat, (s[:, 1:-2] + s[:, 2:-1]) / 2, mixed)


def lowest(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x*, y*) [R]: the minimum of Akima's interpolant; NaN where it is an end of x."""
    h, t = np.diff(x), akima(x, y)
    rise = np.diff(y, axis=1) / h
    c2, c3 = (3 * rise - 2 * t[:, :-1] - t[:, 1:]) / h, (t[:, :-1] + t[:, 1:] - 2 * rise) / h**2
    with np.errstate(all="ignore"):
        root = np.sqrt(c2**2 - 3 * c3 * t[:, :-1])
        u = -t[:, :-1] / (c2 + root)  # the stationary point with upward curvature, without cancellation
        u = np.where((u > 0) & (u < h), u, np.nan)
        trial = y[:, :-1] + u * (t[:, :-1] + u * (c2 + u * c3))
    values = np.concatenate([y, np.where(np.isfinite(trial), trial, np.inf)], axis=1)
    places = np.concatenate([np.broadcast_to(x, y.shape), x[:-1] + u], axis=1)
    best = np.argmin(values, axis=1)
    inside = (best != 0) & (best != len(x) - 1)
    rows = np.arange(len(y))
    return np.where(inside, places[rows, best], np.nan), np.where(inside, values[rows, best], np.nan)


def spline(n: np.ndarray, y: np.ndarray, weight: np.ndarray, at: Budgets) -> Optima:
    """As `parabola`. Of log loss over log N; runs of one size count by their mean."""
    out = Optima(*np.full((2, len(y), at.C.size), np.nan))
    for b, rows in enumerate(_rows(at)):
        x, loss, present = _means(n[rows], np.log(y[:, rows]), weight[:, rows])
        patterns, which = np.unique(present, axis=0, return_inverse=True)
        for k, there in enumerate(patterns):
            if there.sum() >= 4:
                some = np.flatnonzero(which.reshape(-1) == k)
                out.log_N[some, b], log_loss = lowest(x[there], loss[some][:, there])
                out.loss[some, b] = np.exp(log_loss)
    return out


def _means(n: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log N [s], weighted mean of y [R,s], whether any run has weight [R,s]) over the s sizes, rising."""
    _, first, which = np.unique(_sizes(np.exp(n)), return_index=True, return_inverse=True)
    member = np.eye(first.size)[which.reshape(-1)]  # [m,s]
    total = w @ member
    return n[first], (w * y) @ member / np.where(total > 0, total, 1.0), total > 0


def envelope(n: np.ndarray, log_C: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, Optima]:
    """(log C of the levels [K], the best size at each). A size's loss is interpolated linearly in logarithms over
    the compute of its runs; a level counts where at least 3 sizes reach it and the best is neither the smallest
    nor the largest of them. Interpolated at a chord, and the lowest of noisy curves: low losses are too low."""
    levels = np.linspace(log_C.min(), log_C.max(), LEVELS)
    codes = _sizes(np.exp(n))
    sizes = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    sizes = [rows[np.argsort(log_C[rows], kind="stable")] for rows in sizes if len(rows) > 1]
    if len(sizes) < 3:
        return levels, Optima(*np.full((2, len(y), LEVELS), np.nan))
    centre = np.array([n[rows].mean() for rows in sizes])
    log_loss, out = np.log(y), Optima(*np.full((2, len(y), LEVELS), np.nan))
    curves = np.empty((len(sizes), LEVELS))
    for r in range(len(y)):
        for curve, rows in zip(curves, sizes, strict=True):
            there = rows[weight[r, rows] > 0]
            curve[:] = np.inf if len(there) < 2 else np.interp(
                levels, log_C[there], log_loss[r, there], left=np.inf, right=np.inf)
        reached = np.isfinite(curves)
        best = np.argmin(curves, axis=0)
        first, last = np.argmax(reached, axis=0), len(sizes) - 1 - np.argmax(reached[::-1], axis=0)
        good = (reached.sum(axis=0) >= 3) & (best != first) & (best != last)
        out.log_N[r], out.loss[r] = np.where(good, centre[best], np.nan), np.where(good, curves.min(axis=0), np.nan)
    out.loss[:] = np.exp(out.loss)
    return levels, out


def power_law(log_C: np.ndarray, log_y: np.ndarray) -> PowerLaw:
    """Over the finite entries of each row of log_y [R,b]; NaN where there are fewer than 2."""
    seen = np.isfinite(log_y)
    y, count, centre = np.where(seen, log_y, 0.0), seen.sum(axis=1), float(np.mean(log_C))
    with np.errstate(all="ignore"):
        x = log_C - centre
        mean_x, mean_y = (seen * x).sum(axis=1) / count, y.sum(axis=1) / count
        q = seen * (x - mean_x[:, None])
        slope = np.where(count > 1, (q * y).sum(axis=1) / (q * q).sum(axis=1), np.nan)
    return PowerLaw(slope, mean_y - slope * mean_x, centre)
