"""From a table's columns to the arrays of a fit, and what was done on the way, in sentences."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpt.lab.errors import UserError, expected
from jaxpt.lab.tables import Table, find_column, number, positive, scale

MOST_ROWS = 100_000
KNOWN = {  # quantity -> well-known names besides its own, in tiers; lower case, spaces for _ and -
    "N": (("n",), ("params", "parameters", "model size", "n params", "num params", "model params", "size")),
    "D": (("d",), ("tokens", "train tokens", "training tokens", "n tokens", "num tokens")),
    "C": (("c",), ("flop", "flops", "compute", "training flop", "training flops", "train flops")),
    "U": (("u",), ("unique tokens", "unique", "data", "dataset tokens")),
    "S": (("s",), ("steps", "step", "updates", "training steps")),
    "E": (("e",), ("experts", "num experts", "n experts")),
    "G": (("g",), ("granularity",)),
    "B": (("b",), ("batch", "batch size", "bs", "batch tokens")),
    "L": (("l",), ("loss", "val loss", "validation loss", "eval loss", "task loss")),
    "T": (("t",), ("tokens", "test time tokens", "inference tokens", "thinking tokens")),
    "k": (("k",), ("samples", "n samples", "num samples", "attempts")),
    "KL": (("kl",), ("kl divergence",)),
    "C_inf": (("c inf",), ("inference flop", "inference flops", "test time flops")),
    "loss": (("loss",), ("val loss", "validation loss", "eval loss", "test loss", "final loss")),
    "accuracy": (("accuracy",), ("acc", "score")),
    "error": (("error",), ("err", "error rate", "top 1 error")),
    "coverage": (("coverage",), ("pass@k", "pass at k")),
    "reward": (("reward",), ("gold", "gold reward", "score")),
    "lr": (("lr",), ("learning rate", "peak lr")),
    "batch": (("batch",), ("batch size", "bs", "batch tokens")),
    "steps": (("steps",), ("s", "step", "updates")),
}
SHAPE = {  # the same of what `scaling.flops.Shape` has
    "layers": (("layers",), ("n layers", "num layers", "n layer", "depth")),
    "width": (("width",), ("d model", "hidden size", "n embd", "model dim")),
    "ff": (("ff",), ("d ff", "ffw size", "intermediate size", "ff width")),
    "heads": (("heads",), ("n heads", "num heads", "n head")),
    "head_width": (("head width",), ("head dim", "d head", "kv size")),
    "vocab": (("vocab",), ("vocab size", "vocabulary")),
    "context": (("context",), ("seq len", "sequence length", "context length", "block size")),
    "gated": (("gated",),),
}
MEANS = {"N": "parameters N", "D": "training tokens D", "C": "training FLOPs C", "U": "unique tokens U",
         "S": "steps S", "E": "experts E", "G": "granularity G", "B": "batch size B", "L": "the loss L",
         "T": "test-time tokens T", "k": "samples k", "C_inf": "test-time FLOPs C_inf", "loss": "the loss",
         "lr": "the learning rate", "batch": "the batch size"}
FLAGS = {"N": "--n ", "D": "--d ", "C": "--c ", "loss": "--loss ", "weight": "--weight "}  # others: --x NAME=


class Wanted(NamedTuple):
    """What a law takes from a table: Chinchilla's by default."""

    inputs: tuple[str, ...] = ("N", "D")
    output: str = "loss"
    residual: str = "log"  # "raw": what is measured may be 0 or negative
    nonnegative: tuple[str, ...] = ()  # inputs that may be 0
    least: int = 5  # runs, one for each parameter


class Points(NamedTuple):
    """Arrays [n], one entry per run that is used."""

    x: dict[str, np.ndarray]  # the law's inputs, by name
    y: np.ndarray  # what was measured
    C: np.ndarray | None  # as the table has it; never computed
    weight: np.ndarray | None
    cluster: np.ndarray | None
    places: np.ndarray  # line of each run
    place: str  # "line" or "row"
    notes: list[str]  # which columns, what was dropped by request
    left_out: list[tuple[int, str]]  # unreadable rows, where leaving them out was asked for
    warnings: list[str]
    output: str  # name of y
    residual: str  # what the fit compares, in words
    shape: dict[str, np.ndarray]  # of `SHAPE` what the table has, where it was asked for

    @property
    def N(self) -> np.ndarray:
        return self.x["N"]

    @property
    def D(self) -> np.ndarray:
        return self.x["D"]

    @property
    def loss(self) -> np.ndarray:
        return self.y


def read_points(
    table: Table, wanted: Wanted = Wanted(), *, columns: Mapping[str, str | None] | None = None,
    cluster: str | None = None, d_from: float | None = None, drop: tuple[str, int] | None = None,
    skip_bad: bool = False, shape: Mapping[str, str] | None = None,
) -> Points:
    """columns: names of the table's columns by quantity ("N", "loss", "weight", ...); well-known names where
    there is none. D from its column, or C / (d_from N). drop: ("highest" or "lowest", k) losses. shape: columns
    of the models' shapes, and well-known ones besides; None where they do not matter. UserError in one sentence, with
    the line, where something does not fit."""
    given = {name: column for name, column in (columns or {}).items() if column is not None}
    found = _columns(table, wanted, given, d_from)
    if shape is not None:
        named = {name: find_column(table, f"--shape {name}=", shape.get(name), SHAPE[name]) for name in SHAPE}
        found |= {name: column for name, column in named.items() if column is not None}
    if cluster is not None and not _same_as_n(cluster, found.get("N")):
        find_column(table, "--cluster ", cluster, ())
    if len(table.rows) > MOST_ROWS:
        raise UserError(f"{table.path} has {len(table.rows)} rows; at most {MOST_ROWS} are fitted, a row per run")
    kept, values, left_out = _values(table, wanted, found, skip_bad)
    arrays = {name: np.array([row[name] for row in values]) for name in found}
    if d_from is not None:
        arrays["D"] = arrays["C"] / (d_from * arrays["N"])
    points = Points(
        {name: arrays[name] for name in wanted.inputs}, arrays[wanted.output], arrays.get("C"), arrays.get("weight"),
        _labels(table, kept, cluster, found.get("N"), arrays.get("N")),
        np.array([table.places[i] for i in kept], int), table.place, _notes(found, d_from), left_out, [],
        wanted.output, "log residual" if wanted.residual == "log" else
        f"residual over the largest {wanted.output}",
        {name: arrays[name] for name in SHAPE if shape is not None and name in arrays})
    points = _drop(points, drop)
    if len(points.y) < wanted.least:
        left = f"one run ({table.place} {points.places[0]})" if len(points.y) == 1 else f"{len(points.y)} runs"
        raise UserError(f"{table.path}: {left} left to fit; the law has {wanted.least} parameters and needs at least "
                        f"{wanted.least} runs")
    return points._replace(warnings=_warnings(points, table, d_from))


def _columns(table: Table, wanted: Wanted, given: Mapping[str, str], d_from: float | None) -> dict[str, str]:
    """Column of each quantity: the law's, C where there is one beside N and D, weights where they are asked for."""
    if "D" in given and d_from is not None:
        raise UserError(f"--d {given['D']} and --d-from {d_from:g} are two sources of D: give one")
    needed = [name for name in (*wanted.inputs, wanted.output) if not (name == "D" and d_from is not None)]
    if d_from is not None:
        if not {"N", "D"} <= set(wanted.inputs):
            raise UserError(f"--d-from {d_from:g}: the law is a function of {', '.join(wanted.inputs)}: expected one "
                            "of N and D")
        needed.append("C")
    more = ["C"] if {"N", "D"} <= set(wanted.inputs) and "C" not in needed else []
    if "weight" in given:
        more.append("weight")
    flags = {name: FLAGS.get(name, f"--x {name}=") for name in (*needed, *more, *given)}
    for name in given:
        if name not in (*needed, *more):
            raise UserError(f"{flags[name]}{given[name]}: the law has no {name}: {expected(name, needed)}")
    found = {name: find_column(table, flags[name], given.get(name), KNOWN.get(name, ((name.lower(),),)))
             for name in (*needed, *more)}
    for name in needed:
        if found[name] is None:
            hint = " (or --d-from 6 takes D = C / (6 N))" if name == "D" and found.get("C") else ""
            raise UserError(f"{table.path} line 1: no column for {MEANS.get(name, name)} among "
                            f"{', '.join(table.columns)[:200]}: say {flags[name]}COLUMN{hint}")
    return {name: column for name, column in found.items() if column is not None}


def _values(table: Table, wanted: Wanted, columns: Mapping[str, str], skip_bad: bool,
            ) -> tuple[list[int], list[dict[str, float]], list[tuple[int, str]]]:
    """(rows that can be read, their values by quantity, the faults of the others)."""
    kept, values, faults = [], [], list(table.faults)
    scales = {column: scale(column) for column in columns.values()}
    free = [wanted.output] if wanted.residual == "raw" else []
    read_as = {name: number if name in free else _not_negative if name in (*wanted.nonnegative, "gated") else positive
               for name in columns}
    for i, row in enumerate(table.rows):
        read: dict[str, float] = {}
        try:
            for name, column in columns.items():
                read[name] = _cell(row, column, read_as[name]) * scales[column]
        except ValueError as error:
            faults.append((table.places[i], str(error)))
            continue
        kept.append(i)
        values.append(read)
    faults.sort()
    if faults and not (skip_bad and kept):
        place, why = faults[0]
        total = len(table.rows) + len(table.faults)
        remedy = "" if not kept else "; --skip-bad leaves such rows out"
        raise UserError(f"{table.path} {table.place} {place}: {why} ({len(faults)} of {total} rows cannot be "
                        f"read{remedy})")
    if not kept:
        raise UserError(f"{table.path} has a header and no rows")
    return kept, values, faults


def _not_negative(cell: Any) -> float:
    value = number(cell)
    if value < 0:
        raise ValueError(f"{str(cell).strip()[:40]!r} is below 0")
    return value


def _cell(row: dict[str, Any], column: str, read: Callable[[Any], float]) -> float:
    try:
        return read(row.get(column))
    except ValueError as error:
        raise ValueError(f"{column} {error}") from None


def _same_as_n(cluster: str, column: str | None) -> bool:
    return column is not None and cluster in ("N", column)


def _labels(table: Table, kept: list[int], cluster: str | None, column: str | None, N: np.ndarray | None,
            ) -> np.ndarray | None:
    """Cluster labels; for the column of N itself, sizes to 3 significant digits."""
    if cluster is None:
        return None
    if _same_as_n(cluster, column):
        return np.array([f"{x:.2e}" for x in N])
    return np.array([str(table.rows[i].get(cluster, "")).strip() for i in kept])


def _notes(columns: Mapping[str, str], d_from: float | None) -> list[str]:
    said = [f"{name} from {column!r}" for name, column in columns.items() if name != "C" or d_from is None]
    if "D" in columns and "C" in columns:
        said.remove(f"C from {columns['C']!r}")
    if d_from is not None:
        said.insert(1, f"D = C / ({d_from:g} N) with C from {columns['C']!r}")
    units = {c: scale(c) for c in columns.values() if scale(c) != 1}
    return [", ".join(said) + ".", *(f"{c!r} is read in units of {unit:g}." for c, unit in units.items())]


def _drop(points: Points, rule: tuple[str, int] | None) -> Points:
    if rule is None or rule[1] == 0:
        return points
    which, count = rule
    sign = -1 if which == "highest" else 1
    order = np.lexsort((*list(points.x.values())[::-1], sign * points.y))
    gone = np.sort(points.places[order[:count]])
    keep = np.sort(order[count:])
    values = {"loss": "losses"}.get(points.output, f"values of {points.output}")
    note = f"Dropped the {count} {which} {values} ({points.place}s {', '.join(map(str, gone))})."
    arrays = {name: None if (x := getattr(points, name)) is None else x[keep]
              for name in ("y", "C", "weight", "cluster", "places")}
    return points._replace(**arrays, x={name: x[keep] for name, x in points.x.items()},
                           shape={name: x[keep] for name, x in points.shape.items()}, notes=[*points.notes, note])


def _warnings(points: Points, table: Table, d_from: float | None) -> list[str]:
    said = []
    if points.left_out:
        named = "; ".join(f"{points.place} {place}: {why}" for place, why in points.left_out[:5])
        more = f"; and {len(points.left_out) - 5} more" if len(points.left_out) > 5 else ""
        total = len(table.rows) + len(table.faults)
        said.append(f"{len(points.left_out)} of {total} rows cannot be read and were left out "
                    f"({named}{more}).")
    said += _duplicates(points)
    if not {"N", "D"} <= set(points.x):
        return said
    if points.C is not None and d_from is None:
        ratio = points.C / (points.N * points.D)
        if ratio.min() < 5.4 or ratio.max() > 6.6:
            said.append(f"C is {ratio.min():.3g} to {ratio.max():.3g} times N D, not 6: the FLOP column is kept "
                        "as it is, and budgets are counted with --flop-constant.")
    ratio = float(np.median(points.D / points.N))
    if points.N.max() < 1e4 or not 1e-2 < ratio < 1e6:
        said.append(f"The median D/N is {ratio:.3g} and N goes up to {points.N.max():.3g}: are all columns in "
                    "single parameters and tokens (write 70M, or name the column 'params (M)')?")
    return said


def _duplicates(points: Points) -> list[str]:
    seen: dict[tuple[float, ...], int] = {}
    pairs = []
    for place, *run in zip(points.places, *points.x.values(), points.y, strict=True):
        first = seen.setdefault(tuple(run), int(place))
        if first != place:
            pairs.append((first, int(place)))
    if not pairs:
        return []
    named = ", ".join(f"{a} and {b}" for a, b in pairs[:5]) + (", ..." if len(pairs) > 5 else "")
    count = len(pairs)
    return [f"{count} row{'s'[:count > 1]} repeat{'s'[:count == 1]} another one's {', '.join(points.x)} and "
            f"{points.output} ({points.place}s {named}); all are counted."]
