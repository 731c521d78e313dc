"""The experiment's figure: small multiples, mean over seeds with a 95% t band."""

import io
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxpt.lab.experiment import Curves, Panel
from jaxpt.lab.statistics import band

# Okabe and Ito's palette, told apart by the colour-blind; line styles repeat the distinction in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", ":")


def figure(panels: Sequence[Panel], curves: Curves, title: str, footer: str) -> bytes:
    """A PNG with one axes per panel, at most three in a row."""
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    width, height = 4.4 * columns, 3.3 * rows + 1.0
    fig = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(fig)
    fig.get_layout_engine().set(rect=(0, 0.3 / height, 1, 1 - 0.3 / height))
    fig.suptitle("\n".join(textwrap.wrap(title, int(14 * width))), fontsize=10)
    fig.text(0.01, 0.08 / height, "\n".join(textwrap.wrap(footer, int(22 * width))), fontsize=6, color="0.35")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.series))
    look = {label: (COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]) for i, label in enumerate(labels)}
    for index, panel in enumerate(panels):
        draw(fig.add_subplot(rows, columns, index + 1), panel, curves, look)
    out = io.BytesIO()
    fig.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def draw(ax: Axes, panel: Panel, curves: Curves, look: Mapping[str, tuple[str, str]]) -> None:
    """One panel; a label has one colour and line style (`look`) in the whole figure."""
    for label, name in panel.series.items():
        curve = np.asarray(curves[name], np.float64)
        mean, low, high = band(curve)
        measured = np.isfinite(mean)
        x = np.arange(1, mean.size + 1) if panel.x is None else band(curves[panel.x[label]])[0]
        x, mean, low, high = (a[measured] for a in (x, mean, low, high))
        colour, style = look[label]
        few = mean.size <= 25
        ax.plot(x, mean, style, color=colour, lw=1.5, label=label,
                marker="o" if few else None, ms=3)
        ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
    n = len(curves["seeds"])
    ax.set_title(f"{panel.title} (n = {n})", fontsize=9)
    ax.set_xlabel(panel.xlabel, fontsize=8)
    ax.set_ylabel(panel.ylabel, fontsize=8)
    ax.tick_params(labelsize=7)
    ax.xaxis.get_offset_text().set_fontsize(7)
    ax.grid(alpha=0.25, lw=0.5)
    ax.spines[["top", "right"]].set_visible(False)
    if len(panel.series) > 1:
        ax.legend(fontsize=7, frameon=False)
