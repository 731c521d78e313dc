"""The figure of `--next`: where the runs to buy lie among those at hand, and what they do to the target's error."""

from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxpt.lab.figure import COLOURS
from jaxpt.lab.fit_figure import above
from jaxpt.lab.points import Points
from jaxpt.scaling.frontier import optimum


def draw(entry: dict[str, Any], points: Points) -> Figure:
    """entry: `plan_report.record`."""
    fig = Figure(figsize=(10, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(fig)
    left, right = fig.subplots(1, 2)
    flop, target = entry["flop_constant"], entry["target"]
    N, D, cost, after = (np.array([run[key] for run in entry["next"]]) for key in ("N", "D", "cost", "se_after"))
    left.plot(points.N, points.D, ".", color="0.55", ms=5, label="runs at hand")
    C = flop * np.append(points.N * points.D, N * D)
    best = optimum(np.array(list(entry["params"].values())), np.geomspace(C.min(), C.max(), 60), flop)
    left.plot(best.N, best.D, "k--", lw=1, label="best N and D of a budget")
    low, high = np.append(points.N, N).min() / 1.3, np.append(points.N, N).max() * 1.3
    bottom, top = np.append(points.D, D).min() / 1.5, np.append(points.D, D).max() * 1.5
    x = np.geomspace(low, high, 2)
    left.plot(x, entry["spend"] / flop / x, ":", color=COLOURS[2], lw=1.2, label="a run that takes all of --spend")
    places: dict[tuple[float, float], list[int]] = {}
    for k, place in enumerate(zip(N.tolist(), D.tolist(), strict=True), start=1):
        places.setdefault(place, []).append(k)
    left.plot(N, D, "o", color=COLOURS[1], ms=7, mfc="none", mew=1.4, label="to buy, in this order")
    for place, orders in places.items():
        left.annotate(", ".join(map(str, orders)), place, xytext=(6, 4), textcoords="offset points", fontsize=8,
                      color=COLOURS[1])
    left.set(xscale="log", yscale="log", xlabel="N [parameters]", ylabel="D [tokens]", xlim=(low, high),
             ylim=(bottom, top))
    right.plot(np.arange(len(after) + 1), np.append(target["se"], after), "o-", color=COLOURS[0], ms=4, lw=1.3)
    spent = np.append(0, np.cumsum(cost))
    for k, se in enumerate(np.append(target["se"], after)):
        right.annotate(f"{spent[k]:.2g}", (k, se), xytext=(4, 5), textcoords="offset points", fontsize=7, color="0.35")
    right.set(ylim=(0, target["se"] * 1.15), xlim=(-0.2, len(after) + 0.6), xlabel="runs bought (grey: FLOPs spent)",
              ylabel=f"standard error of {target['name']}")
    right.yaxis.label.set_fontsize(9)
    right.set_xticks(np.arange(len(after) + 1))
    above(left)
    for ax in (left, right):
        ax.grid(alpha=0.25, lw=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    return fig
