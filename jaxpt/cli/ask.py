"""Flags of `jaxpt fit` that ask the fitted law about money, serving, data that run out and other counts of FLOPs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpt.cli.options import Option, one_of, pairs, positive
from jaxpt.lab.errors import UserError, expected

MACHINE = ("peak", "mfu", "price")


def share(text: str) -> float:
    value = positive(text)
    if not value < 1:
        raise ValueError("a share between 0 and 1 is expected, like 0.1")
    return value


OPTIONS = {
    "--count": Option(one_of("kaplan", "last-layer", "attention", "chinchilla", "table"), None,
                      "another count of FLOPs for --budget: kaplan, last-layer, attention, chinchilla, table (its own)"),
    "--shape": Option(pairs(str), (),
                      "layers=L,width=d_model,vocab=50257: the runs' shapes for --count, columns or numbers"),
    "--serve": Option(positive, None, "tokens of inference that --budget or --reach pays for too, at 2 N each"),
    "--unique": Option(positive, None, "tokens that exist: the best N and epochs of --budget when data repeat"),
    "--reach": Option(positive, None, "a loss: the least compute that gets there, and its N and D"),
    "--loss-drop": Option(share, None, "0.1: by what factor --budget must grow for a loss lower by that share"),
    "--machine": Option(pairs(positive), (),
                        "peak=989T,mfu=0.4,price=2.5: an accelerator's FLOP/s, the share used, money an hour"),
    "--money": Option(positive, None, "the budget in money of --machine instead of --budget"),
    "--better-mfu": Option(share, None, "what that utilisation instead of the --machine's is worth"),
}
OF_A_BUDGET = ("--count", "--unique", "--loss-drop", "--better-mfu")


def given(values: Mapping[str, Any]) -> list[str]:
    """The flags of this module that were used."""
    return [flag for flag, option in OPTIONS.items() if values[flag] != option.default]


def machine(values: Mapping[str, Any]) -> Any:
    """The `Machine` of --machine, or None. UserError where it or what rests on it is incomplete."""
    from jaxpt.scaling.costs import Machine

    parts = dict(values["--machine"])
    if not parts:
        for flag in ("--money", "--better-mfu"):
            if values[flag] is not None:
                raise UserError(f"{flag} {values[flag]:g}: --machine peak=FLOP/S,mfu=SHARE,price=MONEY is needed")
        return None
    for name in parts:
        if name not in MACHINE:
            raise UserError(f"--machine {name}={parts[name]:g}: {expected(name, MACHINE)}")
    missing = [name for name in MACHINE if name not in parts]
    if missing:
        raise UserError(f"--machine: {' and '.join(missing)} missing: peak=FLOP/S,mfu=SHARE,price=MONEY is expected")
    if parts["mfu"] > 1:
        raise UserError(f"--machine mfu={parts['mfu']:g}: a share of the peak is expected, at most 1")
    return Machine(parts["peak"], parts["mfu"], parts["price"])


def budget(values: Mapping[str, Any]) -> float | None:
    """FLOPs of --budget or of --money. UserError where both or neither is there and a flag needs one."""
    from jaxpt.scaling.costs import affordable

    paid = machine(values)
    if values["--money"] is not None:
        if values["--budget"] is not None:
            raise UserError(f"--money {values['--money']:g} and --budget {values['--budget']:g} are two budgets: give one")
        return affordable(values["--money"], paid)
    if values["--budget"] is None:
        for flag in OF_A_BUDGET:
            if values[flag] is not None:
                said = values[flag] if isinstance(values[flag], str) else f"{values[flag]:g}"
                raise UserError(f"{flag} {said}: --budget FLOPS is needed to say of which budget")
        for flag, said in (("--serve", values["--serve"]), ("--machine", paid)):
            if said is not None and values["--reach"] is None:
                raise UserError(f"{flag}: --budget FLOPS or --reach LOSS is needed to say of which runs")
    return values["--budget"]


def shape_columns(values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """(columns, numbers) of --shape by name. UserError for names that no shape has."""
    from jaxpt.lab.points import SHAPE
    from jaxpt.lab.tables import number

    columns, numbers = {}, {}
    for name, text in values["--shape"]:
        if name not in SHAPE:
            raise UserError(f"--shape {name}={text}: {expected(name, SHAPE)}")
        try:
            numbers[name] = number(text)
        except ValueError:
            columns[name] = text
    if values["--shape"] and values["--count"] in (None, "table"):
        raise UserError("--shape: only --count kaplan, last-layer, attention and chinchilla ask for the runs' shapes")
    return columns, numbers


def asked(values: Mapping[str, Any], points: Any, flop: float, C: float | None) -> Any:
    """The `Asked` of these flags; C: their `budget`."""
    from jaxpt.scaling.questions import Asked

    name = values["--count"]
    count = None if name is None else (name, _cost(values, points))
    if values["--serve"] is not None and C is not None and 2 * values["--serve"] >= C:
        raise UserError(f"--serve {values['--serve']:g}: serving so many tokens takes all of {C:.4g} FLOPs")
    return Asked(flop, C, count, values["--serve"], values["--unique"], values["--reach"], values["--loss-drop"],
                 machine(values), values["--better-mfu"])


def _cost(values: Mapping[str, Any], points: Any) -> Any:
    """FLOPs per token as a function of the table's N, under --count."""
    from jaxpt.scaling import flops
    from jaxpt.scaling.questions import COUNTS, NEEDS, shape_of

    name = values["--count"]
    if name == "table":
        if points.C is None:
            raise UserError("--count table: the table has no column of FLOPs: --c COLUMN names one")
        return flops.from_runs(points.N, points.D, points.C)
    shape = {**points.shape, **{key: np.full(points.N.size, x) for key, x in shape_columns(values)[1].items()}}
    for key in ("layers", "width", *NEEDS[name]):
        if key not in shape:
            raise UserError(f"--count {name}: no column for {key}: --shape {key}=COLUMN or {key}=NUMBER is expected")
        if not np.all(shape[key] > 0):
            raise UserError(f"--shape {key}: numbers above 0 are expected")
    return flops.from_runs(points.N, points.D, COUNTS[name](shape_of(shape)) * points.D)
