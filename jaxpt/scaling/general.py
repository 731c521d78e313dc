"""The fit of any law of the table, or of a user's own: as `chinchilla` fits its one, with derivatives by JAX.

sum_i w_i rho(r_i) is minimised, with r = log prediction - log measurement (or their difference over the largest
measurement, for laws of quantities that may be 0 or negative). The search runs over the logarithms of parameters
that are above 0. It begins at the best of 4096 points that the law guesses from the data, goes down by least
squares, and then through the shapes of `robust.continuation`, by the batched Newton steps of `newton` with exact
Hessians: one compiled program evaluates value, gradient, Hessian and metric of as many problems as it is told to.
Everything is in double precision, inside this module alone.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.scaling.certificate import Certificate, best_of, certify, vertex
from jaxpt.scaling.laws import Law, parameters, predict
from jaxpt.scaling.newton import Derivatives, Minimum, minimise
from jaxpt.scaling.robust import Shape, continuation, penalty, threshold, value

GUESSES, STARTS = 4096, 16  # points tried, and Newton searches: one from the best of each block of points
SAMPLE = 64  # runs that the points are tried on
BLOCK = 16384  # residuals given to a call
ROUNDS, LONG = 60, 500  # of steps: from every start, and from the best one where it has not arrived


class Data(NamedTuple):
    """Runs as the fit sees them, in an order of their own: the same whatever the order of the file."""

    law: Law
    x: np.ndarray  # [k,n] the law's columns
    y: np.ndarray  # [n] log measurement, or measurement / scale
    weight: np.ndarray  # [n]
    order: np.ndarray  # [n] row of the input that stands here
    scale: float
    held: np.ndarray  # [p] unknowns that are given; NaN for those to fit


def prepare(law: Law, columns: Mapping[str, np.ndarray], y: np.ndarray, weight: np.ndarray | None = None,
            fixed: Mapping[str, float] | None = None) -> Data:
    """columns: [n] by the law's names of them; y [n]: what was measured; fixed: parameters that are given."""
    y = np.asarray(y, np.float64)
    x = np.stack([np.asarray(columns[name], np.float64) for name in law.inputs])
    weight = np.ones_like(y) if weight is None else np.asarray(weight, np.float64)
    for name, column in zip(law.inputs, x, strict=True):
        good = column >= 0 if name in law.nonnegative else column > 0
        if not np.all(np.isfinite(column) & good):
            raise ValueError(f"{name} must be finite and {'not below' if name in law.nonnegative else 'above'} 0")
    if not np.all(np.isfinite(y) & (weight > 0)) or law.residual == "log" and not np.all(y > 0):
        raise ValueError(f"{law.output} and weights must be finite and above 0")
    order = np.lexsort((weight, y, *x[::-1]))
    scale = float(np.abs(y).max()) or 1.0
    held = np.full(len(law.names), np.nan)
    for name, number in (fixed or {}).items():
        i = law.names.index(name)
        held[i] = np.log(number) if law.positive[i] else number
    return Data(law, x[:, order], (np.log(y) if law.residual == "log" else y / scale)[order], weight[order], order,
                scale, held)


def response(law: Law, scale: float, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What is compared with `Data.y`: [n] for theta [p], [S,n] for [S,p]."""
    return _compared(law, scale, predict(law, parameters(law, theta), x), np)


def _compared(law: Law, scale: Any, predicted: Any, module: Any) -> Any:
    return predicted / scale if law.residual == "raw" else module.log(predicted)


@partial(jax.jit, static_argnums=(0, 1))
def _derivatives(law: Law, kind: str | None, scale: Any, count: Any, theta: Any, x: Any, y: Any, weight: Any,
                 delta: Any) -> tuple:
    """(F [R], gradient [R,p], Hessian [R,p,p], metric [R,p,p]) of the first `count` of R problems, one after the other,
    and the Jacobian [p,n] of the last of them; theta [R,p], y and weight [R,n]."""
    positive, (R, p) = law.positive.tolist(), theta.shape

    def fitted(unknowns: Sequence[Any]) -> Any:
        params = [jnp.exp(t) if above else t for t, above in zip(unknowns, positive, strict=True)]
        return _compared(law, scale, law.predict(*x, **dict(zip(law.names, params, strict=True))), jnp)

    def one(row: Any, so_far: tuple) -> tuple:
        unknowns, *own = (jax.lax.dynamic_index_in_dim(x, row, keepdims=False) for x in (theta, y, weight))
        *found, J = problem(list(unknowns), *own)
        return *(jax.lax.dynamic_update_index_in_dim(x, part, row, 0)
                 for x, part in zip(so_far[:-1], found, strict=True)), J

    def problem(unknowns: Sequence[Any], y: Any, weight: Any) -> tuple:
        z, push = jax.linearize(fitted, unknowns)
        basis = np.eye(p)
        J = jax.vmap(lambda e: push(list(e)))(basis)
        rho, psi, curvature, majoriser = penalty(z - y, delta if kind is None else (kind, delta))
        pull = weight * psi
        slope = jax.grad(lambda t: jnp.vdot(pull, fitted(t)))
        bend = jax.vmap(lambda e: jnp.stack(jax.jvp(slope, (unknowns,), (list(e),))[1]))(basis)
        return (jnp.vdot(weight, rho), J @ pull, (J * (weight * curvature)[None]) @ J.T + bend,
                (J * (weight * majoriser)[None]) @ J.T, J)

    empty = (jnp.zeros(R), jnp.zeros((R, p)), *[jnp.zeros((R, p, p))] * 2, jnp.zeros((p, x.shape[1])))
    return jax.lax.fori_loop(0, count, one, empty)


def evaluate(data: Data, theta: np.ndarray, y: np.ndarray, weight: np.ndarray, shape: Shape,
             ) -> tuple[Derivatives, np.ndarray]:
    """Of the problems theta [R,p], y and weight [R,n] or [1,n]; and the Jacobian [p,n] of the last. Of what is not
    finite F is inf."""
    kind, size, parts = shape[0] if isinstance(shape, tuple) else None, block(data), []
    for at in range(0, len(theta), size):
        own = [x if len(x) == 1 else x[at:at + size] for x in (theta, y, weight)]
        count = min(size, len(theta) - at)
        padded = [x[np.minimum(np.arange(size), len(x) - 1)] for x in own]  # one program, whatever the number
        with jax.enable_x64(True):
            *out, J = _derivatives(data.law, kind, data.scale, count, padded[0], data.x, *padded[1:], threshold(shape))
        parts.append([np.asarray(part)[:count] for part in out])
    F, g, H, M = (np.concatenate(part) for part in zip(*parts, strict=True))
    sound = np.isfinite(F) & np.isfinite(g).all(axis=1) & np.isfinite(H).all(axis=(1, 2))
    return Derivatives(np.where(sound, F, np.inf), g, H, M), np.asarray(J)


def block(data: Data) -> int:
    """Problems that one call evaluates."""
    return int(np.clip(BLOCK // data.y.size, 1, 64))


def solve(data: Data, start: np.ndarray, deltas: Sequence[Shape], *, y: np.ndarray | None = None,
          weight: np.ndarray | None = None, free: np.ndarray | None = None, tolerance: float = 1e-12,
          rounds: int = ROUNDS) -> Minimum:
    """As `chinchilla.solve`: minima of R problems from start [R,p], each with its own y, weight [R,n] or none."""
    y, weight = (x if given is None else given for given, x in ((y, data.y[None]), (weight, data.weight[None])))
    free = np.broadcast_to(np.isnan(data.held) if free is None else free, start.shape)

    def derivatives(theta: np.ndarray, rows: np.ndarray, shape: Shape) -> Derivatives:
        return evaluate(data, theta, *(x if len(x) == 1 else x[rows] for x in (y, weight)), shape)[0]

    floor = np.broadcast_to(5e-31 * weight.sum(axis=1), len(start))
    for shape in deltas:
        found = minimise(partial(derivatives, shape=shape), start, floor=floor, free=free, tolerance=tolerance,
                         rounds=rounds)
        start = found.theta
    return found


def cube(count: int, dimensions: int) -> np.ndarray:
    """[dimensions,count] points that fill the unit cube evenly (Roberts 2018, the R sequence)."""
    root = 2.0
    for _ in range(60):
        root = (1 + root) ** (1 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return (0.5 + steps[:, None] * np.arange(count)) % 1.0


@np.errstate(all="ignore")
def starts(data: Data) -> np.ndarray:
    """[STARTS,p]: of each block of the law's guesses the one with the smallest mean |r|, residuals above 1 counted
    as 1. The guesses are tried on SAMPLE of the runs."""
    law = data.law
    rows = np.arange(data.y.size)
    if rows.size > SAMPLE:
        rows = np.sort(np.random.default_rng(0).permutation(rows.size)[:SAMPLE])
    x, y = data.x[:, rows], data.y[rows]
    measured = np.exp(y) if law.residual == "log" else data.scale * y
    with jax.enable_x64(True):
        guessed = law.guess(cube(GUESSES, max(12, len(law.names))), measured, *x)
        theta = np.stack([np.broadcast_to(np.asarray(v, np.float64), GUESSES) for v in guessed], axis=1)
        theta = np.where(law.positive, np.log(np.maximum(theta, 1e-300)), theta)
        theta = np.where(np.isnan(data.held), theta, data.held)
        off = np.abs(np.asarray(response(law, data.scale, theta, x)) - y)
    badness = np.mean(np.minimum(np.where(np.isfinite(off), off, 1.0), 1.0), axis=1).reshape(STARTS, -1)
    badness[0, 0] -= law.paper == "a function of yours"  # its own defaults are always tried
    best = np.argmin(badness, axis=1) + np.arange(STARTS) * badness.shape[1]
    return theta[best]


class Fit(NamedTuple):
    data: Data
    objective: str  # one of robust.OBJECTIVES
    delta: float
    theta: np.ndarray  # [p] unknowns
    params: np.ndarray  # [p]
    value: float  # of the objective: a weighted sum over the runs
    certificate: Certificate

    @property
    def law(self) -> str:
        return self.data.law.name

    @property
    def formula(self) -> str:
        return self.data.law.formula

    @property
    def names(self) -> tuple[str, ...]:
        return self.data.law.names

    @property
    def measured(self) -> tuple[str, str]:
        """What was measured: one, many."""
        one = self.data.law.output
        return one, {"loss": "losses", "accuracy": "accuracies", "batch": "batches"}.get(one, f"{one} values")

    @property
    def logged(self) -> np.ndarray:
        return self.data.law.positive

    @property
    def free(self) -> np.ndarray:
        return np.isnan(self.data.held)

    @property
    def deltas(self) -> list[Shape]:
        return continuation(self.objective, self.delta)

    @property
    def residuals(self) -> np.ndarray:
        """[n] measured minus fitted, on the law's scale of residuals, in data's order."""
        return -_residual(self.data, self.theta)

    @property
    def slopes(self) -> np.ndarray:
        """[p,n]: derivatives of the fitted response in the unknowns."""
        return _slopes(self.data, self.theta)

    @property
    def size(self) -> tuple[str, np.ndarray]:
        return self.data.law.inputs[0], self.data.x[0]

    def solve(self, start: np.ndarray, deltas: Sequence[Shape], **options: Any) -> Minimum:
        return solve(self.data, start, deltas, **options)

    def parameters(self, theta: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return parameters(self.data.law, theta)

    def predict(self, params: np.ndarray, columns: Sequence[np.ndarray]) -> np.ndarray:
        """What the law says for params [p] or [S,p] at columns [n]."""
        with np.errstate(all="ignore"), jax.enable_x64(True):
            return np.asarray(predict(self.data.law, params, columns))


@np.errstate(all="ignore")
def _residual(data: Data, theta: np.ndarray) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(response(data.law, data.scale, theta, data.x)) - data.y


def _slopes(data: Data, theta: np.ndarray) -> np.ndarray:
    _, J = evaluate(data, theta[None], data.y[None], data.weight[None], np.inf)
    return np.where(np.isnan(data.held)[:, None], J, 0.0)


def fit(data: Data, objective: str = "huber", delta: float = 1e-3) -> Fit:
    """The best of all starts' minima, with its certificate. ValueError for fewer runs than unknowns."""
    free, deltas = np.isnan(data.held), continuation(objective, delta)
    if data.y.size < free.sum():
        raise ValueError(f"the law has {free.sum()} parameters to fit: {data.y.size} runs cannot determine them")
    found = solve(data, starts(data), [np.inf], tolerance=1e-8)
    tried, ended = len(found.value), np.flatnonzero(np.isfinite(found.value))
    if not ended.size:
        raise ValueError(f"{data.law.name} has no value or no derivative at any point that was tried")
    one, again = _distinct(found.theta[ended], found.value[ended])
    found = Minimum(*(part[again] for part in solve(data, found.theta[ended[one]], deltas)))
    best = best_of(found)
    if not found.converged[best]:  # a long valley
        last = solve(data, found.theta[best][None], deltas, rounds=LONG)
        found = Minimum(*(np.concatenate([some, more]) for some, more in zip(found, last, strict=True)))
        best = best_of(found)
    theta = found.theta[best]
    if objective == "lad":
        theta = vertex(theta, partial(_residual, data), partial(_slopes, data), data.weight, free)
    F = float(value(_residual(data, theta), data.weight, objective, delta))
    with np.errstate(over="ignore"):
        params = parameters(data.law, theta)
    return Fit(data, objective, delta, theta, params, F, _certificate(data, found, best, deltas[-1], tried))


def _distinct(theta: np.ndarray, F: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows that no earlier one equals, for each row its place among those): from one place there is one way on."""
    near = np.abs(F[:, None] - F) <= 1e-6 * np.minimum(F[:, None], F) + 1e-25
    first = np.argmax(near & (np.abs(theta[:, None] - theta).max(axis=2) < 1e-3), axis=1)
    return np.unique(first, return_inverse=True)


def _certificate(data: Data, found: Minimum, best: int, shape: Shape, tried: int) -> Certificate:
    theta, free = found.theta[best], np.isnan(data.held)
    here, slopes = evaluate(data, theta[None], data.y[None], data.weight[None], shape)
    gone = free & (np.max(np.abs(slopes), axis=1) * np.where(data.law.positive, 1.0, 1 + np.abs(theta)) < 1e-6)
    pulls = np.abs(slopes * (data.weight * penalty(_residual(data, theta), shape).psi))
    names = tuple(name for name, edge in zip(data.law.names, gone, strict=True) if edge)
    return certify(_in_units_of_curvature(here), pulls, free & ~gone, names, found, best, tried,
                   5e-31 * data.weight.sum())


def _in_units_of_curvature(here: Derivatives) -> Derivatives:
    """The Hessian's condition depends on the unknowns' units; here each has curvature 1."""
    unit = np.sqrt(np.maximum(np.abs(np.diagonal(here.hessian, axis1=1, axis2=2)), 1e-300))
    return here._replace(gradient=here.gradient / unit, hessian=here.hessian / unit[:, :, None] / unit[:, None, :])
