"""The figure of a fit: runs and fitted curves, the frontier with its band, and the residuals."""

import io
from pathlib import Path

import numpy as np
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

CURVES = 6  # sizes whose fitted loss is drawn


def save(path: str, study: Study, points: Points) -> None:
    """PNG, PDF or SVG by the path's ending. UserError where it cannot be written."""
    out, ending = io.BytesIO(), Path(path).suffix[1:].lower()
    draw(study, points).savefig(out, format=ending, metadata={"Software": None} if ending == "png" else {})
    try:
        Path(path).write_bytes(out.getvalue())
    except OSError as error:
        raise UserError(f"--figure {path}: cannot be written: {error.strerror}") from None


def draw(study: Study, points: Points) -> Figure:
    fig = Figure(figsize=(10, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(fig)
    left, right = fig.subplots(1, 2)
    N, D, params = points.N, points.D, study.fit.params
    C = study.flop * N * D
    norm = LogNorm(N.min(), N.max() * 1.0001)
    colour = ScalarMappable(norm, "viridis")
    for size in np.geomspace(N.min(), N.max(), CURVES):
        near = np.abs(np.log(N / size)) <= max(np.ptp(np.log(N)) / CURVES, 1e-9)
        if near.any():
            x = np.geomspace(C[near].min(), C[near].max() * 1.0001, 60)
            left.plot(x, law(params, size, x / (study.flop * size)), color=colour.to_rgba(size), lw=1)
    x = np.geomspace(C.min(), max(C.max(), study.budget or 0) * 1.0001, 80)
    left.plot(x, optimum(params, x, study.flop).loss, "k--", lw=1.2, label="best N and D")
    if study.refits is not None:
        band = spread(optimum(study.refits.params[:500, None], x, study.flop).loss)
        left.fill_between(x, band.low, band.high, color="k", alpha=0.15, lw=0, label="its 95% interval")
    left.scatter(C, points.loss, c=N, norm=norm, cmap="viridis", s=10)
    left.set(xscale="log", yscale="log", xlabel=f"C = {study.flop:g} N D [FLOPs]", ylabel="loss")
    left.legend(fontsize=7, frameon=False)
    residual = np.log(points.loss) - np.log(law(params, N, D))
    right.scatter(C, residual, c=N, norm=norm, cmap="viridis", s=10)
    right.axhline(0, color="k", lw=0.8)
    if study.fit.objective == "huber":
        right.axhspan(-study.fit.delta, study.fit.delta, color="k", alpha=0.12, lw=0)
    right.set(xscale="log", xlabel=left.get_xlabel(), ylabel="log loss - log L(N, D)")
    fig.colorbar(colour, ax=right, label="N")
    for ax in (left, right):
        ax.grid(alpha=0.25, lw=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    return fig
