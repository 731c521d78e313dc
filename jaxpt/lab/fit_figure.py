"""The figure of a fit: runs and fitted curves (for Chinchilla's law the frontier with its band), residuals."""

import io
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from jaxpt.lab.errors import UserError
from jaxpt.lab.points import Points
from jaxpt.scaling.chinchilla import law
from jaxpt.scaling.frontier import optimum
from jaxpt.scaling.study import Study
from jaxpt.scaling.uncertainty import spread

CURVES = 6  # drawn, at sizes or at values of a law's second column


def save(path: str, study: Study, points: Points) -> None:
    write(path, draw(study, points))


def write(path: str, fig: Figure) -> None:
    """PNG, PDF or SVG by the path's ending. UserError where it cannot be written."""
    out, ending = io.BytesIO(), Path(path).suffix[1:].lower()
    fig.savefig(out, format=ending, metadata={"Software": None} if ending == "png" else {})
    try:
        Path(path).write_bytes(out.getvalue())
    except OSError as error:
        raise UserError(f"--figure {path}: cannot be written: {error.strerror}") from None


def draw(study: Study, points: Points) -> Figure:
    fig = Figure(figsize=(10, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(fig)
    left, right = fig.subplots(1, 2)
    colour = (_frontier if study.exponent is not None else _curves)(study, points, left)
    x, shade = left.collections[-1].get_offsets().data[:, 0], left.collections[-1].get_array()
    residual = np.empty(points.y.size)
    residual[study.fit.data.order] = study.fit.residuals
    right.scatter(x, residual, c=shade, norm=colour.norm, cmap="viridis", s=10)
    right.axhline(0, color="k", lw=0.8)
    if study.fit.objective == "huber":
        right.axhspan(-study.fit.delta, study.fit.delta, color="k", alpha=0.12, lw=0)
    right.set(xscale=left.get_xscale(), xlabel=left.get_xlabel(), ylabel=points.residual)
    fig.colorbar(colour, ax=right, label=_shade(points))
    for ax in (left, right):
        ax.grid(alpha=0.25, lw=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    return fig


def _frontier(study: Study, points: Points, ax: Axes) -> ScalarMappable:
    """Loss against compute at several sizes, and the best that a budget buys."""
    N, D, params = points.N, points.D, study.fit.params
    C = study.flop * N * D
    colour = ScalarMappable(LogNorm(N.min(), N.max() * 1.0001), "viridis")
    for size in np.geomspace(N.min(), N.max(), CURVES):
        near = np.abs(np.log(N / size)) <= max(np.ptp(np.log(N)) / CURVES, 1e-9)
        if near.any():
            x = np.geomspace(C[near].min(), C[near].max() * 1.0001, 60)
            ax.plot(x, law(params, size, x / (study.flop * size)), color=colour.to_rgba(size), lw=1)
    x = np.geomspace(C.min(), max(C.max(), study.budget or 0) * 1.0001, 80)
    ax.plot(x, optimum(params, x, study.flop).loss, "k--", lw=1.2, label="best N and D")
    if study.refits is not None:
        band = spread(optimum(study.refits.params[:500, None], x, study.flop).loss)
        ax.fill_between(x, band.low, band.high, color="k", alpha=0.15, lw=0, label="its 95% interval")
    ax.scatter(C, points.loss, c=N, norm=colour.norm, cmap="viridis", s=10)
    ax.set(xscale="log", yscale="log", xlabel=f"C = {study.flop:g} N D [FLOPs]", ylabel="loss")
    ax.legend(fontsize=7, frameon=False)
    return colour


def _shade(points: Points) -> str:
    """The column that the colour shows: the law's second, where it has one."""
    return list(points.x)[min(1, len(points.x) - 1)]


def _curves(study: Study, points: Points, ax: Axes) -> ScalarMappable:
    """What was measured against the law's first column, with its fit at several values of the second; further
    columns at their medians."""
    names, fit = list(points.x), study.fit
    first, shade = points.x[names[0]], points.x[_shade(points)]
    low = shade[shade > 0].min(initial=np.inf)
    colour = ScalarMappable(LogNorm(low, max(shade.max(), low) * 1.0001), "viridis")
    x = np.geomspace(max(first.min(), first.max() / 1e12), first.max() * 1.0001, 120)
    for value in [None] if len(names) == 1 else np.geomspace(low, shade.max(), CURVES):
        columns = [np.full(x.size, np.median(points.x[name])) for name in names]
        columns[0] = x
        if value is not None:
            columns[1] = np.full(x.size, value)
        ax.plot(x, fit.predict(fit.params, columns), color="k" if value is None else colour.to_rgba(value), lw=1)
        if value is None and study.refits is not None:
            band = spread(fit.predict(study.refits.params[:500], columns))
            ax.fill_between(x, band.low, band.high, color="k", alpha=0.15, lw=0)
    ax.scatter(first, points.y, c=shade, norm=colour.norm, cmap="viridis", s=10)
    ax.set(xscale="log", yscale="log" if points.y.min() > 0 else "linear", xlabel=names[0], ylabel=points.output)
    return colour
