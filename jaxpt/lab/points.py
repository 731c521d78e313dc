"""From a table's columns to the arrays of a fit, and what was done on the way, in sentences."""

from typing import Any, NamedTuple

import numpy as np

from jaxpt.lab.errors import UserError
from jaxpt.lab.tables import Table, find_column, positive, scale

MOST_ROWS = 100_000
KNOWN = {  # flag -> well-known names, in tiers; lower case, spaces for _ and -
    "n": (("n",), ("params", "parameters", "model size", "n params", "num params", "model params", "size")),
    "d": (("d",), ("tokens", "train tokens", "training tokens", "n tokens", "num tokens")),
    "c": (("c",), ("flop", "flops", "compute", "training flop", "training flops", "train flops")),
    "loss": (("loss",), ("val loss", "validation loss", "eval loss", "test loss", "final loss")),
}
MEANS = {"n": "parameters N", "d": "training tokens D", "c": "training FLOPs C", "loss": "the loss"}


class Points(NamedTuple):
    """Arrays [n], one entry per run that is used."""

    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray
    C: np.ndarray | None  # as the table has it; never computed
    weight: np.ndarray | None
    cluster: np.ndarray | None
    places: np.ndarray  # line of each run
    place: str  # "line" or "row"
    notes: list[str]  # which columns, what was dropped by request
    left_out: list[tuple[int, str]]  # unreadable rows, where leaving them out was asked for
    warnings: list[str]


def read_points(
    table: Table, *, n: str | None = None, d: str | None = None, c: str | None = None,
    loss: str | None = None, weight: str | None = None, cluster: str | None = None,
    d_from: float | None = None, drop: tuple[str, int] | None = None, skip_bad: bool = False, least: int = 5,
) -> Points:
    """Columns by name, or by well-known names; D from its column, or C / (d_from N). drop: ("highest" or
    "lowest", k) losses. UserError in one sentence, with the line, where something does not fit."""
    columns = _columns(table, {"n": n, "d": d, "c": c, "loss": loss, "weight": weight}, d_from)
    if cluster is not None and not _same_as_n(cluster, columns["n"]):
        find_column(table, "--cluster", cluster, ())
    if len(table.rows) > MOST_ROWS:
        raise UserError(f"{table.path} has {len(table.rows)} rows; at most {MOST_ROWS} are fitted, a row per run")
    kept, values, left_out = _values(table, columns, skip_bad)
    places = np.array([table.places[i] for i in kept], int)
    N, y = (np.array([row[key] for row in values]) for key in ("n", "loss"))
    C = np.array([row["c"] for row in values]) if columns["c"] else None
    D = np.array([row["d"] for row in values]) if d_from is None else C / (d_from * N)
    points = Points(
        N, D, y, C, np.array([row["weight"] for row in values]) if columns["weight"] else None,
        _labels(table, kept, cluster, columns["n"], N), places, table.place, _notes(columns, d_from), left_out,
        warnings=[])
    points = _drop(points, drop)
    if len(points.N) < least:
        one = len(points.N) == 1
        left = f"one run ({table.place} {points.places[0]})" if one else f"{len(points.N)} runs"
        raise UserError(f"{table.path}: {left} left to fit; the law has {least} parameters and needs at least "
                        f"{least} runs")
    return points._replace(warnings=_warnings(points, table, d_from))


def _columns(table: Table, wanted: dict[str, str | None], d_from: float | None) -> dict[str, str | None]:
    if wanted["d"] is not None and d_from is not None:
        raise UserError(f"--d {wanted['d']} and --d-from {d_from:g} are two sources of D: give one")
    found = {flag: find_column(table, f"--{flag}", name, KNOWN.get(flag, ())) for flag, name in wanted.items()
             if not (flag == "d" and d_from is not None)}
    found.setdefault("d", None)
    needed = ["n", "loss", "d" if d_from is None else "c"]
    for flag in needed:
        if found[flag] is None:
            hint = " (or --d-from 6 takes D = C / (6 N))" if flag == "d" and found["c"] else ""
            names = ", ".join(table.columns)[:200]
            raise UserError(f"{table.path} line 1: no column for {MEANS[flag]} among {names}: say --{flag} COLUMN"
                            f"{hint}")
    return found


def _values(table: Table, columns: dict[str, str | None], skip_bad: bool,
            ) -> tuple[list[int], list[dict[str, float]], list[tuple[int, str]]]:
    """(rows that can be read, their values by flag, the faults of the others)."""
    kept, values, faults = [], [], list(table.faults)
    scales = {column: scale(column) for column in columns.values() if column}
    for i, row in enumerate(table.rows):
        read: dict[str, float] = {}
        try:
            for flag, column in columns.items():
                if column is not None:
                    read[flag] = _cell(row, column) * scales[column]
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


def _cell(row: dict[str, Any], column: str) -> float:
    try:
        return positive(row.get(column))
    except ValueError as error:
        raise ValueError(f"{column} {error}") from None


def _same_as_n(cluster: str, column: str | None) -> bool:
    return cluster in ("N", column)


def _labels(table: Table, kept: list[int], cluster: str | None, column: str | None, N: np.ndarray,
            ) -> np.ndarray | None:
    """Cluster labels; for the column of N itself, sizes to 3 significant digits."""
    if cluster is None:
        return None
    if _same_as_n(cluster, column):
        return np.array([f"{x:.2e}" for x in N])
    return np.array([str(table.rows[i].get(cluster, "")).strip() for i in kept])


def _notes(columns: dict[str, str | None], d_from: float | None) -> list[str]:
    computed = d_from is not None
    said = [f"N from {columns['n']!r}",
            f"D = C / ({d_from:g} N) with C from {columns['c']!r}" if computed else f"D from {columns['d']!r}"]
    said += [f"{flag} from {columns[flag]!r}" for flag in ("loss", "weight") if columns[flag]]
    units = {c: scale(c) for c in columns.values() if c and scale(c) != 1}
    return [", ".join(said) + ".", *(f"{c!r} is read in units of {unit:g}." for c, unit in units.items())]


def _drop(points: Points, rule: tuple[str, int] | None) -> Points:
    if rule is None or rule[1] == 0:
        return points
    which, count = rule
    sign = -1 if which == "highest" else 1
    order = np.lexsort((points.D, points.N, sign * points.loss))
    gone = np.sort(points.places[order[:count]])
    keep = np.sort(order[count:])
    note = f"Dropped the {count} {which} losses ({points.place}s {', '.join(map(str, gone))})."
    arrays = {name: None if x is None else x[keep] for name, x in points._asdict().items()
              if name in ("N", "D", "loss", "C", "weight", "cluster", "places")}
    return points._replace(**arrays, notes=[*points.notes, note])


def _warnings(points: Points, table: Table, d_from: float | None) -> list[str]:
    said = []
    if points.left_out:
        named = "; ".join(f"{points.place} {place}: {why}" for place, why in points.left_out[:5])
        more = f"; and {len(points.left_out) - 5} more" if len(points.left_out) > 5 else ""
        total = len(table.rows) + len(table.faults)
        said.append(f"{len(points.left_out)} of {total} rows cannot be read and were left out "
                    f"({named}{more}).")
    said += _duplicates(points)
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
    seen: dict[tuple[float, float, float], int] = {}
    pairs = []
    for place, *run in zip(points.places, points.N, points.D, points.loss, strict=True):
        first = seen.setdefault(tuple(run), int(place))
        if first != place:
            pairs.append((first, int(place)))
    if not pairs:
        return []
    named = ", ".join(f"{a} and {b}" for a, b in pairs[:5]) + (", ..." if len(pairs) > 5 else "")
    count = len(pairs)
    return [f"{count} row{'s'[:count > 1]} repeat{'s'[:count == 1]} another one's N, D and loss "
            f"({points.place}s {named}); all are counted."]
