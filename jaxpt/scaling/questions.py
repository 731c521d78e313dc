"""What a fitted law says of money, of serving, of data that run out, of another count of FLOPs: each answer at the
fit's parameters, with the spread over its refits.

What has no closed form is solved for the first `SOLVED` refits alone.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxpt.scaling import costs, flops, frontier
from jaxpt.scaling.frontier import Cost, Optimum
from jaxpt.scaling.uncertainty import Spread, spread

SOLVED = 200
FAR = 1e300  # stands for what is out of reach
STEP = 1.1  # factor of compute over which a slope is taken


class Answer(NamedTuple):
    name: str
    words: str  # the question, for a title
    values: dict[str, float]  # by quantity, at the fit's parameters; inf: out of reach at any compute
    spreads: dict[str, Spread]


class Asked(NamedTuple):
    """What was asked; None: that was not."""

    flop: float = 6.0  # k of C = k N D
    budget: float | None = None  # FLOPs
    count: tuple[str, Cost] | None = None  # name and FLOPs per token of another count
    serve: float | None = None  # tokens of inference
    unique: float | None = None  # tokens that exist
    reach: float | None = None  # a loss
    loss_drop: float | None = None  # a share of the loss
    machine: costs.Machine | None = None
    better: float | None = None  # utilisation to compare with


def answers(params: np.ndarray, samples: np.ndarray, asked: Asked) -> list[Answer]:
    """params [5] of the fit, samples [B,5] of its refits (B may be 0)."""
    return [_answer(name, words, ask, params, samples) for name, (words, ask) in _questions(asked).items()]


def _answer(name: str, words: str, ask: Callable[[np.ndarray], dict[str, float]], params: np.ndarray,
            samples: np.ndarray) -> Answer:
    values = ask(params)
    drawn = [ask(row) for row in samples[:SOLVED]]
    return Answer(name, words, values, {key: _spread(x, [row[key] for row in drawn]) for key, x in values.items()})


def _spread(value: float, drawn: list[float]) -> Spread:
    """About the value, so that what no refit changes has a standard error of exactly 0."""
    about = value if np.isfinite(value) else 0.0
    se, low, high = spread(np.minimum(drawn, FAR) - about)  # quantiles between infinities would be NaN
    return Spread(se, *(np.where(x > FAR / 1e100, np.inf, about + x) for x in (low, high)))


def _questions(asked: Asked) -> dict[str, tuple[str, Callable[[np.ndarray], dict[str, float]]]]:
    C, k, out = asked.budget, asked.flop, {}
    if asked.count is not None:
        name, cost = asked.count
        out["counted"] = (f"Best use of {C:.4g} FLOPs, counted as {name}", lambda p: _counted(p, C, cost))
    if asked.serve is not None and C is not None:
        out["served"] = (f"Best use of {C:.4g} FLOPs that also serve {asked.serve:.4g} tokens",
                         lambda p: _run(frontier.served(p, C, asked.serve, k), k))
    if asked.unique is not None:
        out["limited"] = (f"Best use of {C:.4g} FLOPs where only {asked.unique:.4g} tokens exist",
                          lambda p: _limited(p, C, asked))
    if asked.reach is not None:
        also = "" if asked.serve is None else f", {asked.serve:.4g} tokens served"
        out["reach"] = (f"The cheapest way to a loss of {asked.reach:g}{also}", lambda p: _reached(p, asked))
    if asked.loss_drop is not None:
        out["loss_drop"] = (f"A loss {100 * asked.loss_drop:g}% below the best of {C:.4g} FLOPs",
                            lambda p: _drop(p, C, asked.loss_drop, k))
    if asked.machine is not None and C is not None:
        out["bill"] = (f"What {C:.4g} FLOPs cost", lambda p: _bill(C, asked.machine))
    if asked.better is not None:
        out["utilisation"] = (f"Utilisation {asked.better:g} instead of {asked.machine.utilisation:g}",
                              lambda p: _utilisation(p, C, asked))
    return out


def _best(found: Optimum) -> dict[str, float]:
    return {"N": float(found.N), "D": float(found.D), "loss": float(found.loss)}


def _run(found: Optimum, flop: float) -> dict[str, float]:
    best = _best(found)
    return best | {"training_flops": flop * best["N"] * best["D"]}


def _counted(params: np.ndarray, C: float, cost: Cost) -> dict[str, float]:
    at, above, below = (frontier.counted(params, C * x, cost) for x in (1.0, STEP, 1 / STEP))
    a = np.log(above.N / below.N) / (2 * np.log(STEP))
    return _best(at) | {"a": float(a)}


def _limited(params: np.ndarray, C: float, asked: Asked) -> dict[str, float]:
    best = frontier.limited(params, C, asked.unique, asked.flop)
    return _best(best) | {"epochs": float(best.D / asked.unique)}


def _reached(params: np.ndarray, asked: Asked) -> dict[str, float]:
    k = asked.flop
    if not asked.reach > params[2]:
        return dict.fromkeys(("N", "D", "C", *(costs.Bill._fields if asked.machine else ())), np.inf)
    if asked.serve is None:
        C = float(frontier.compute_for(params, asked.reach, k))
        best = frontier.optimum(params, C, k)
    else:
        best = frontier.cheapest(params, asked.reach, asked.serve, k)
        C = float(k * best.N * best.D + 2 * best.N * asked.serve)
    return {"N": float(best.N), "D": float(best.D), "C": C} | (_bill(C, asked.machine) if asked.machine else {})


def _drop(params: np.ndarray, C: float, share: float, flop: float) -> dict[str, float]:
    """The factor in compute, and what it would be if E were 0 and the reducible part were all of the loss."""
    gamma = params[3] * params[4] / (params[3] + params[4])
    factor = costs.factor_for_drop(params, C, share, flop)
    return {"factor": factor, "factor_if_E_were_0": float((1 - share) ** (-1 / gamma)), "C": factor * C}


def _bill(C: float, machine: costs.Machine) -> dict[str, float]:
    return {name: float(x) for name, x in costs.bill(C, machine)._asdict().items()}


def _utilisation(params: np.ndarray, C: float, asked: Asked) -> dict[str, float]:
    money = float(costs.bill(C, asked.machine).money)
    worth = costs.value_of_utilisation(params, money, asked.machine, asked.better, asked.flop)
    return {"loss_drop": worth.loss_drop, "share_of_loss": worth.share, "money_saved": worth.money}


COUNTS = {"kaplan": flops.kaplan, "last-layer": flops.last_layer, "attention": flops.attention,
          "chinchilla": flops.chinchilla}
NEEDS = {"kaplan": (), "last-layer": ("vocab",), "attention": ("vocab", "context"),
         "chinchilla": ("vocab", "context", "heads")}


def shape_of(given: Mapping[str, np.ndarray]) -> flops.Shape:
    """Of the runs: layers and width [n], and of the rest what a count needs. ff is 4 widths and all heads together
    are as wide as the model unless said otherwise; gated: 1 or 0 for all."""
    width, heads = given["width"], given.get("heads", np.ones_like(given["width"]))
    return flops.Shape(given["layers"], width, given.get("ff", 4 * width), heads, given.get("head_width", width / heads),
                       given.get("vocab", 0.0), given.get("context", 0.0), bool(np.any(given.get("gated", 0.0))))
