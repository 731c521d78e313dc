"""The figure of `--isoflop`: each budget's runs with their parabola and the law, and the best size over compute."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from jaxpt.lab.figure import COLOURS
from jaxpt.lab.points import Points
from jaxpt.scaling.approaches import NAMES, REACH, Comparison
from jaxpt.scaling.chinchilla import law
from jaxpt.scaling.frontier import optimum


def draw(found: Comparison, points: Points) -> Figure:
    fig = Figure(figsize=(10, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(fig)
    left, right = fig.subplots(1, 2)
    C, group, N, loss = found.budgets.C, found.budgets.group, points.N, points.loss
    colour = ScalarMappable(LogNorm(C.min(), C.max() * 1.0001) if C.size else LogNorm(1, 10), "viridis")
    for b, budget in enumerate(C):
        rows, shade = group == b, colour.to_rgba(budget)
        left.plot(N[rows], loss[rows], ".", color=shade, ms=4)
        x = np.geomspace(N[rows].min(), N[rows].max(), 80)
        left.plot(x, law(found.fit.params, x, budget / (found.flop * x)), ":", color=shade, lw=0.9)
        best, lowest = (part[0, b] for part in found.optima["2 parabola"])
        near = np.abs(np.log(N[rows] / N[rows][np.argmin(loss[rows])])) <= np.log(REACH) + 1e-9
        if np.isfinite(best) and near.sum() > 2:
            fitted = np.polynomial.Polynomial.fit(np.log(N[rows][near]), loss[rows][near], 2)
            x = np.geomspace(N[rows][near].min(), N[rows][near].max(), 60)
            left.plot(x, fitted(np.log(x)), "-", color=shade, lw=1)
            left.plot(np.exp(best), lowest, "x", color=shade, ms=6)
    left.set(xscale="log", xlabel="N", ylabel="loss", title="points and parabolas of a budget; dotted: the law")
    if C.size:
        fig.colorbar(colour, ax=left, label="FLOPs")
        x = np.geomspace(C.min(), max(C.max(), found.target), 40)
        right.plot(x, optimum(found.fit.params, x, found.flop).N, "k-", lw=1.2, label=NAMES[-1])
    for name, marker, shade in zip(NAMES[1:4], "x+o", COLOURS, strict=False):
        right.plot(C, np.exp(found.optima[name].log_N[0]), marker, color=shade, ms=5, mfc="none", label=name)
    right.set(xscale="log", yscale="log", xlabel="FLOPs", ylabel="N*", title="best size")
    right.legend(fontsize=7, frameon=False)
    for ax in (left, right):
        ax.title.set_fontsize(9)
        ax.grid(alpha=0.25, lw=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    return fig
