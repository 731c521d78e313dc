"""The Chinchilla law in closed form, and its fit (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3).

    L(N, D) = E + A / N^alpha + B / D^beta

is fitted by minimising sum_i w_i rho(log L(N_i, D_i) - log loss_i), rho from `robust` (their eq. 3: Huber,
delta 1e-3, a sum and not a mean). The five unknowns are theta = (a, b, e, alpha, beta) about the data's centre:

    log L = logsumexp(a - alpha n, b - beta d, e),   n = log N - mean, d = log D - mean

which takes the condition of the Hessian from about 1e7 to 1e4. Starts come from a grid over (alpha, beta), on
which the other three are a non-negative least-squares problem of size 3 (variable projection, Golub & Pereyra
1973); minima come from `newton` with the exact Hessian, through a sequence of falling delta.
"""

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from jaxpt.scaling.certificate import Certificate, best_of, certify, vertex
from jaxpt.scaling.newton import Derivatives, Minimum, minimise
from jaxpt.scaling.robust import Shape, continuation, penalty, value

NAMES = ("A", "B", "E", "alpha", "beta")
EXPONENTS = np.geomspace(0.05, 2.0, 24)  # the grid of starts in alpha and in beta
EDGES = (0.01, 3.0)  # an exponent outside is a term that is all but constant, or gone
CHUNK = 25_000  # residuals evaluated at a time: they stay in the cache
BLOCK = 1_000_000  # residuals of the problems that are minimised at a time


class Data(NamedTuple):
    """Runs as the fit sees them, in an order of their own: the same whatever the order of the file."""

    n: np.ndarray  # [n] log N - centre[0]
    d: np.ndarray  # [n] log D - centre[1]
    y: np.ndarray  # [n] log loss
    weight: np.ndarray  # [n]
    centre: np.ndarray  # [2]
    order: np.ndarray  # [n] row of the input that stands here


def prepare(N: np.ndarray, D: np.ndarray, loss: np.ndarray, weight: np.ndarray | None = None) -> Data:
    """Positive arrays [n]: parameters, tokens, loss (nats); weights of the residuals (1 by default)."""
    N, D, loss = (np.asarray(x, np.float64) for x in (N, D, loss))
    weight = np.ones_like(loss) if weight is None else np.asarray(weight, np.float64)
    if not all(np.all(np.isfinite(x) & (x > 0)) for x in (N, D, loss, weight)):
        raise ValueError("N, D, loss and weights must be finite and above 0")
    order = np.lexsort((weight, loss, D, N))
    logs = np.log(np.stack([N, D, loss])[:, order])
    centre = logs[:2].mean(axis=1)
    return Data(logs[0] - centre[0], logs[1] - centre[1], logs[2], weight[order], centre, order)


def parameters(theta: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """[..., 5] theta about `centre` -> [..., 5] A, B, E, alpha, beta."""
    a, b, e, alpha, beta = np.moveaxis(theta, -1, 0)
    with np.errstate(over="ignore"):
        A, B, E = np.exp(a + alpha * centre[0]), np.exp(b + beta * centre[1]), np.exp(e)
    return np.stack([A, B, E, alpha, beta], axis=-1)


def law(params: np.ndarray, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """Loss predicted by A, B, E, alpha, beta [..., 5] at N, D [...]."""
    A, B, E, alpha, beta = np.moveaxis(np.asarray(params, np.float64), -1, 0)
    return E + A * N ** -alpha + B * D ** -beta


def terms(theta: np.ndarray, n: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log L [R,m], shares of its three terms [R,3,m]) of theta [R,5] at n, d [m], [1,m] or [R,m]; inf or NaN
    where exp overflows."""
    a, b, e, alpha, beta = theta.T[:, :, None]
    parts = np.empty((len(theta), 3, n.shape[-1]))
    np.exp(a - alpha * n, out=parts[:, 0])
    np.exp(b - beta * d, out=parts[:, 1])
    parts[:, 2] = np.exp(e)
    total = parts[:, 0] + parts[:, 1] + parts[:, 2]
    parts *= (1 / total)[:, None]
    return np.log(total), parts


def jacobian(shares: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """[R,5,m]: d log L / d theta from the shares [R,3,m]."""
    J = np.empty((len(shares), 5, n.shape[-1]))
    J[:, :3] = shares
    np.multiply(shares[:, 0], -n, out=J[:, 3])
    np.multiply(shares[:, 1], -d, out=J[:, 4])
    return J


class Problems(NamedTuple):
    """The runs of R problems, [R,m] or [1,m] where all share them."""

    n: np.ndarray
    d: np.ndarray
    y: np.ndarray
    weight: np.ndarray

    def at(self, rows: np.ndarray) -> "Problems":
        return Problems(*(x if len(x) == 1 else x[rows] for x in self))


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # a wild trial is worth inf, and not taken
def derivatives(theta: np.ndarray, runs: Problems, delta: Shape) -> Derivatives:
    """Of F = sum_i w_i rho(r_i), r = log L - y, at theta [R,5].

    The Hessian of a log-sum-exp with features phi_k is sum_k p_k phi_k phi_k^T - J J^T, so

        H = sum_i w_i (rho'' - rho') J J^T + w_i rho' sum_k p_k phi_k phi_k^T

    whose second part, but for two sums, is made of entries of the gradient g = sum_i w_i rho' J.
    """
    fitted, shares = terms(theta, runs.n, runs.d)
    J = jacobian(shares, runs.n, runs.d)
    rho, psi, curvature, majoriser = penalty(fitted - runs.y, delta)
    pull = runs.weight * psi
    left = np.empty((len(theta), 13, runs.n.shape[1]))  # all sums over the runs in one product
    np.multiply(J, (runs.weight * curvature - pull)[:, None], out=left[:, :5])
    np.multiply(J, (runs.weight * majoriser)[:, None], out=left[:, 5:10])
    left[:, 10] = pull
    np.multiply(pull, runs.n, out=left[:, 11])
    np.multiply(pull, runs.d, out=left[:, 12])
    sums = left @ J.transpose(0, 2, 1)
    hessian, metric, gradient = sums[:, :5], sums[:, 5:10], sums[:, 10]
    for scale, exponent, second in ((0, 3, sums[:, 11, 3]), (1, 4, sums[:, 12, 4])):
        hessian[:, scale, scale] += gradient[:, scale]
        hessian[:, scale, exponent] += gradient[:, exponent]
        hessian[:, exponent, scale] += gradient[:, exponent]
        hessian[:, exponent, exponent] -= second
    hessian[:, 2, 2] += gradient[:, 2]
    F = np.einsum("rn,rn->r", np.broadcast_to(runs.weight, rho.shape), rho)
    return Derivatives(np.where(np.isfinite(F), F, np.inf), gradient, hessian, metric)


def problems(data: Data) -> Problems:
    return Problems(*(x[None] for x in (data.n, data.d, data.y, data.weight)))


def reweighted(data: Data, weight: np.ndarray) -> Problems:
    """One problem per row of weight [R,n]; runs of weight 0 are left out, up to the longest row's length."""
    width = int((weight > 0).sum(axis=1).max())
    index = np.argsort(weight == 0, axis=1, kind="stable")[:, :width]
    return Problems(data.n[index], data.d[index], data.y[index], np.take_along_axis(weight, index, axis=1))


def solve(
    data: Data, start: np.ndarray, deltas: list[Shape], *, y: np.ndarray | None = None,
    weight: np.ndarray | None = None, free: np.ndarray | None = None, tolerance: float = 1e-12,
) -> Minimum:
    """Minima of R problems from start [R,5], through the thresholds in turn. Problems may have log losses
    y [R,n] or weights [R,n] of their own; free [R,5] bool: the unknowns that may move."""
    size = max(1, BLOCK // data.y.size)
    parts = []
    for at in (slice(first, first + size) for first in range(0, len(start), size)):
        runs = problems(data) if weight is None else reweighted(data, weight[at])
        parts.append(_solve(runs if y is None else runs._replace(y=y[at]), start[at], deltas,
                            None if free is None else free[at], tolerance))
    return Minimum(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _solve(runs: Problems, start: np.ndarray, deltas: list[Shape], free: np.ndarray | None,
           tolerance: float) -> Minimum:
    size = max(1, CHUNK // runs.n.shape[1])

    def evaluate(theta: np.ndarray, rows: np.ndarray, delta: Shape) -> Derivatives:
        chunks = [slice(first, first + size) for first in range(0, len(rows), size)]
        parts = [derivatives(theta[at], runs.at(rows[at]), delta) for at in chunks]
        return parts[0] if len(parts) == 1 else Derivatives(*map(np.concatenate, zip(*parts, strict=True)))

    floor = np.broadcast_to(5e-31 * runs.weight.sum(axis=1), len(start))  # residuals of 1e-15 are rounding
    for delta in deltas:
        minimum = minimise(partial(evaluate, delta=delta), start, floor=floor, free=free, tolerance=tolerance)
        start = minimum.theta
    return minimum


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def grid(data: Data, delta: Shape) -> tuple[np.ndarray, np.ndarray]:
    """(theta [G,G,5], F [G,G]) over EXPONENTS x EXPONENTS: at each (alpha, beta) the E, A, B >= 0 that
    minimise sum_i w_i (L / loss_i - 1)^2, and the objective there."""
    G, loss, root = EXPONENTS.size, np.exp(data.y), np.sqrt(data.weight)
    u, v = (root / loss * np.exp(-EXPONENTS[:, None] * x) for x in (data.n, data.d))
    columns = np.concatenate([u, v, root[None] / loss])
    scale = np.sqrt(np.sum(columns**2, axis=1))
    columns /= scale[:, None]
    gram, moment = columns @ columns.T, columns @ root
    which = np.stack(np.broadcast_arrays(np.arange(G)[:, None], G + np.arange(G), 2 * G), axis=-1)  # [G,G,3]
    coefficients = nonnegative(gram[which[..., :, None], which[..., None, :]], moment[which]) / scale[which]
    least = 0.1 * loss.min()  # a term of zero has no logarithm, and a tiny one hardly any slope
    alpha, beta = np.meshgrid(EXPONENTS, EXPONENTS, indexing="ij")
    theta = np.concatenate([np.log(np.maximum(coefficients, least)), np.stack([alpha, beta], -1)], axis=2)
    F = np.stack([np.sum(data.weight * penalty(terms(row, data.n, data.d)[0] - data.y, delta).rho, axis=1)
                  for row in theta])
    return theta, np.where(np.isfinite(F), F, np.inf)


def nonnegative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """x >= 0 [...,3] that minimises x^T G x / 2 - m^T x, by trying every set of unknowns above zero."""
    best, most = np.zeros_like(moment), np.zeros(moment.shape[:-1])
    for chosen in product((True, False), repeat=3):
        on = np.array(chosen)
        reduced = np.where(on[:, None] & on, gram, 0.0) + np.diag(np.where(on, 1e-13, 1.0))
        x = np.linalg.solve(reduced, np.where(on, moment, 0.0)[..., None])[..., 0]
        explained = np.sum(x * moment, axis=-1)
        better = np.all(x >= 0, axis=-1) & (explained > most)
        best, most = np.where(better[..., None], x, best), np.where(better, explained, most)
    return best


def starts(data: Data, delta: Shape) -> np.ndarray:
    """[S,5]: the grid's local minima (the 8 lowest) and the best point of each of its 4 x 4 blocks."""
    theta, F = grid(data, delta)
    G = len(F)
    padded = np.pad(F, 1, constant_values=np.inf)
    around = [padded[i:i + G, j:j + G] for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    valleys = np.flatnonzero((F <= np.min(around, axis=0)) & np.isfinite(F))
    valleys = valleys[np.argsort(F.flat[valleys], kind="stable")][:8]
    numbers = np.arange(G * G).reshape(G, G)
    blocks = [block for band in np.split(numbers, 4) for block in np.split(band, 4, axis=1)]
    best = [block.flat[np.argmin(F.flat[block.ravel()])] for block in blocks]
    return theta.reshape(-1, 5)[np.unique([*valleys, *best])]


class Fit(NamedTuple):
    data: Data
    objective: str  # one of robust.OBJECTIVES
    delta: float
    theta: np.ndarray  # [5], about data.centre
    params: np.ndarray  # [5] A, B, E, alpha, beta
    value: float  # of the objective: a weighted sum over the runs
    certificate: Certificate

    # What `uncertainty` and the report ask of the fit of any law:
    law, formula, names = "chinchilla", "L(N, D) = E + A / N^alpha + B / D^beta", NAMES
    measured = ("loss", "losses")
    logged = (True, True, False, False, False)  # parameters that are compared on a logarithmic scale

    @property
    def deltas(self) -> list[Shape]:
        return continuation(self.objective, self.delta)

    @property
    def residuals(self) -> np.ndarray:
        """[n] log loss - log L, in data's order."""
        return -_residual(self.data, self.theta)

    @property
    def free(self) -> np.ndarray:
        """[p] bool: unknowns that were fitted."""
        return np.ones(5, bool)

    @property
    def slopes(self) -> np.ndarray:
        """[p,n]: derivatives of the fitted log loss in the unknowns."""
        return _slopes(self.data, self.theta)

    @property
    def size(self) -> tuple[str, np.ndarray]:
        """What runs are large or small in, and how much, [n]."""
        return "compute", self.data.n + self.data.d

    def solve(self, start: np.ndarray, deltas: list[Shape], **options: Any) -> Minimum:
        return solve(self.data, start, deltas, **options)

    def parameters(self, theta: np.ndarray) -> np.ndarray:
        return parameters(theta, self.data.centre)


def _residual(data: Data, theta: np.ndarray) -> np.ndarray:
    return terms(theta[None], data.n, data.d)[0][0] - data.y


def _slopes(data: Data, theta: np.ndarray) -> np.ndarray:
    return jacobian(terms(theta[None], data.n, data.d)[1], data.n, data.d)[0]


def fit(data: Data, objective: str = "huber", delta: float = 1e-3) -> Fit:
    """The best of all starts' minima, with its certificate. Needs at least 5 runs; degenerate ones give a fit
    whose certificate says so."""
    if data.y.size < 5:
        raise ValueError(f"the Chinchilla law has 5 parameters: {data.y.size} runs cannot determine it")
    deltas = continuation(objective, delta)
    found = solve(data, starts(data, deltas[0]), deltas[:1])
    tried, ended = len(found.value), found.converged | ~found.converged.any()
    found = solve(data, found.theta[ended], deltas)
    best = best_of(found)
    theta = found.theta[best]
    if objective == "lad":
        theta = vertex(theta, partial(_residual, data), partial(_slopes, data), data.weight, np.ones(5, bool))
    F = float(value(_residual(data, theta), data.weight, objective, delta))
    return Fit(data, objective, delta, theta, parameters(theta, data.centre), F,
               _certificate(data, found, best, deltas[-1], tried))


def _certificate(data: Data, found: Minimum, best: int, shape: Shape, tried: int) -> Certificate:
    theta = found.theta[best][None]
    fitted, shares = terms(theta, data.n, data.d)
    pulls = np.abs(jacobian(shares, data.n, data.d)[0] * (data.weight * penalty(fitted - data.y, shape).psi))
    gone = np.max(shares[0], axis=1) < 1e-6  # terms at the edge have neither slope nor curvature left
    exponents = theta[0, 3:]
    edges = [*gone, *((exponents < EDGES[0]) | (exponents > EDGES[1]))]
    return certify(derivatives(theta, problems(data), shape), pulls, ~gone[[0, 1, 2, 0, 1]],
                   tuple(name for name, edge in zip(NAMES, edges, strict=True) if edge), found, best, tried,
                   5e-31 * data.weight.sum())
