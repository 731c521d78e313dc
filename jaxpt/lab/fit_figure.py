"""The figure of a fit: runs and fitted curves, residuals; for Chinchilla's law also the best size with its band and how
well the runs tell the exponents."""

import io
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from jaxpt.lab.errors import UserError
from jaxpt.lab.figure import COLOURS
from jaxpt.lab.points import Points
from jaxpt.scaling.chinchilla import law
from jaxpt.scaling.frontier import optimum
from jaxpt.scaling.profile_map import profile_map
from jaxpt.scaling.study import Study
from jaxpt.scaling.uncertainty import CHI_SQUARE_95, spread

CURVES = 6  # drawn, at sizes or at values of a law's second column
SHOWN = 500  # refits


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


def above(ax: Axes) -> None:
    """The legend above the axes, where it covers nothing."""
    ax.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, numpoints=1, markerscale=1.2)


def draw(study: Study, points: Points) -> Figure:
    whole = study.exponent is not None
    fig = Figure(figsize=(10, 7.8 if whole else 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.subplots(2 if whole else 1, 2).ravel()
    left, right = axes[:2]
    colour = (_frontier if whole else _curves)(study, points, left)
    x, shade = left.collections[-1].get_offsets().data[:, 0], left.collections[-1].get_array()
    residual = np.empty(points.y.size)
    residual[study.fit.data.order] = study.fit.residuals
    right.scatter(x, residual, c=shade, norm=colour.norm, cmap="viridis", s=10)
    right.axhline(0, color="k", lw=0.8)
    if study.fit.objective == "huber":
        right.axhspan(-study.fit.delta, study.fit.delta, color="k", alpha=0.12, lw=0, label="within Huber's delta")
        right.legend(fontsize=7, frameon=False)
    if left.get_yscale() == "log":
        left.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        left.yaxis.set_major_formatter(LogFormatter())
    right.set(xscale=left.get_xscale(), xlabel=left.get_xlabel(), ylabel=points.residual)
    fig.colorbar(colour, ax=right, label=_shade(points) if not whole else "N [parameters]")
    if whole:
        _best_size(study, points, axes[2])
        _exponents(study, axes[3])
    for ax in axes:
        ax.grid(alpha=0.25, lw=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    return fig


def _best_size(study: Study, points: Points, ax: Axes) -> None:
    """N* and D* over compute, with what the refits say."""
    C = study.flop * points.N * points.D
    x = np.geomspace(C.min(), max(C.max(), study.budget or 0) * 1.0001, 60)
    best = optimum(study.fit.params, x, study.flop)
    drawn = None if study.refits is None else optimum(study.refits.params[:SHOWN, None], x, study.flop)
    for name, shade, style, runs in (("N", COLOURS[0], "-", points.N), ("D", COLOURS[1], "--", points.D)):
        ax.plot(x, getattr(best, name), style, color=shade, lw=1.4, label=f"{name}*")
        if drawn is not None:
            band = spread(getattr(drawn, name))
            ax.fill_between(x, band.low, band.high, color=shade, alpha=0.2, lw=0)
        ax.plot(C, runs, ".", color=shade, ms=3, alpha=0.35)
    if study.budget is not None:
        ax.axvline(study.budget, color="k", lw=0.8, ls=":", label="the budget")
    ax.set(xscale="log", yscale="log", xlabel=f"C = {study.flop:g} N D [FLOPs]",
           ylabel="parameters, tokens (dots: the runs)")
    ax.legend(fontsize=7, frameon=False)


def _exponents(study: Study, ax: Axes) -> None:
    """The profile over (alpha, beta), and the refits."""
    fit = study.fit
    found = profile_map(fit, study.profile[3:])
    ax.set(xlabel="alpha", ylabel="beta")
    if not np.isfinite(found.height).any() or not min(np.ptp(found.alpha), np.ptp(found.beta)) > 0:
        ax.text(0.5, 0.5, "the runs leave no profile over the exponents", ha="center", transform=ax.transAxes, fontsize=8)
        return
    drawn = study.samples[:SHOWN, 3:]
    low, high = (np.array([x[i] for x in (found.alpha, found.beta)]) for i in (0, -1))
    inside = drawn[np.all((drawn >= low) & (drawn <= high), axis=1)]
    ax.plot(*inside.T, ".", color="0.55", ms=2.5, alpha=0.5,
            label="refits" if len(drawn) else None)
    ax.contour(found.alpha, found.beta, np.sqrt(found.height.T), [1.0, np.sqrt(CHI_SQUARE_95)],
               colors=[COLOURS[2], COLOURS[0]], linestyles=["--", "-"], linewidths=1.3)
    for colour, style, words in ((COLOURS[2], "--", "profile, 68%"), (COLOURS[0], "-", "profile, 95%")):
        ax.plot([], [], style, color=colour, lw=1.3, label=f"{words} of either exponent")
    ax.plot(*fit.params[3:], "k+", ms=9, label="the fit")
    ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    above(ax)


def _frontier(study: Study, points: Points, ax: Axes) -> ScalarMappable:
    """Loss against compute at several sizes, and the best that a budget buys."""
    N, D, params = points.N, points.D, study.fit.params
    C = study.flop * N * D
    room = 1.0001 if N.max() > 2 * N.min() else 2.0  # a scale of colours needs some width
    colour = ScalarMappable(LogNorm(N.min() / room, N.max() * room), "viridis")
    for size in np.geomspace(N.min(), N.max(), CURVES):
        near = np.abs(np.log(N / size)) <= max(np.ptp(np.log(N)) / CURVES, 1e-9)
        if near.any():
            x = np.geomspace(C[near].min(), C[near].max() * 1.0001, 60)
            ax.plot(x, law(params, size, x / (study.flop * size)), color=colour.to_rgba(size), lw=1)
    x = np.geomspace(C.min(), max(C.max(), study.budget or 0) * 1.0001, 80)
    ax.plot(x, optimum(params, x, study.flop).loss, "k--", lw=1.2, label="best N and D")
    if study.refits is not None:
        band = spread(optimum(study.refits.params[:SHOWN, None], x, study.flop).loss)
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
            band = spread(fit.predict(study.refits.params[:SHOWN], columns))
            ax.fill_between(x, band.low, band.high, color="k", alpha=0.15, lw=0)
    ax.scatter(first, points.y, c=shade, norm=colour.norm, cmap="viridis", s=10)
    ax.set(xscale="log", yscale="log" if points.y.min() > 0 else "linear", xlabel=names[0], ylabel=points.output)
    return colour
