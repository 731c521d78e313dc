"""What laws do to examples: other rows, other columns, other things where nothing counts. Example in, example out."""

from collections.abc import Mapping

import numpy as np

from jaxpt.verify.families import Family
from jaxpt.verify.generators import Example

FILLER = {"logp": -1.25, "near": -0.75, "advantage": 1.75, "score": 2.25, "near_score": -1.5, "positive": 0.75,
    "logits": 0.5}


def axis_of(family: Family, name: str, letter: str) -> int | None:
    """Where the axis stands in an array [n, ...]; None if it has none."""
    axes = family.arg(name).axes
    return axes.index(letter) + 1 if letter in axes else None


def take(x: Example, family: Family, letter: str, index) -> Example:
    """Rows, columns, ... of every array that has the axis, in the order of index."""
    return {k: v if (a := axis_of(family, k, letter)) is None else np.take(v, index, axis=a) for k, v in x.items()}


def size(x: Example, family: Family, letter: str) -> int:
    return next(x[k].shape[axis_of(family, k, letter)] for k in x if axis_of(family, k, letter) is not None)


def sizes(x: Example, family: Family) -> dict[str, int]:
    """Of every axis; S is that of a result of one between two tokens."""
    found = {letter: n for k, v in x.items() for letter, n in zip(family.arg(k).axes, v.shape[1:], strict=True)}
    return {**found, "S": found.get("T", 1) - 1}


def joined(a: Example, b: Example, family: Family, letter: str) -> Example:
    """b behind a along an axis."""
    return {
        k: v if (at := axis_of(family, k, letter)) is None else np.concatenate([v, b[k]], axis=at) for k, v in a.items()
    }


def padded(x: Example, family: Family, columns: int, *, behind: bool = True) -> Example:
    """Masked columns, with ordinary numbers in them, behind or before the others."""
    width = size(x, family, "T")
    extra = filled(take(x, family, "T", np.zeros(columns, int) + width - 1), family, "T")
    return joined(x, extra, family, "T") if behind else joined(extra, x, family, "T")


def filled(x: Example, family: Family, letter: str) -> Example:
    """Every array with the axis: masks 0, what a mask stands over an ordinary number."""
    def fill(k, v):
        arg = family.arg(k)
        if letter not in arg.axes or arg.kind in ("label", "token"):
            return v
        return np.full_like(v, FILLER.get(arg.kind, 0.0))
    return {k: fill(k, v) for k, v in x.items()}


def with_empty_rows(x: Example, family: Family, letter: str, rows: int = 1) -> Example:
    """Rows in which nothing counts, behind the others."""
    last = size(x, family, letter) - 1
    return joined(x, filled(take(x, family, letter, np.full(rows, last)), family, letter), family, letter)


def doubled(x: Example, family: Family, letter: str) -> Example:
    """The batch twice; the second time, groups and micro-batches have labels of their own."""
    again = {
        k: v + v.max(axis=-1, keepdims=True) + 1 if family.arg(k).kind == "label" and k == "group" else v for k,
        v in x.items()
    }
    return joined(x, again, family, letter)


def compacted(x: Example, family: Family) -> tuple[Example, np.ndarray]:
    """In every row the slots that count first, in their order; and the order, [n, B, T]."""
    order = np.argsort(~(x["mask"] > 0), axis=2, kind="stable")
    moved = {}
    for k, v in x.items():
        axes = family.arg(k).axes
        moved[k] = v if "T" not in axes else np.take_along_axis(v, order.reshape(*order.shape, *(1,) * (v.ndim - 3)),
            axis=2)
    return moved, order


def poisoned(x: Example, family: Family, poison: float, spare: tuple[str, ...] = ()) -> Example:
    """`poison` wherever nothing counts."""
    def put(k, v):
        mask = family.arg(k).mask
        if not mask or k in spare or v.dtype.kind != "f":
            return v
        kept = x[mask] > 0
        return np.where(kept.reshape(*kept.shape, *(1,) * (v.ndim - kept.ndim)), v, poison)
    return {k: put(k, v) for k, v in x.items()}


def rows_letter(family: Family) -> str:
    """The axis along which a batch is cut."""
    return "N" if any("N" in arg.axes for arg in family.args.values()) else "B"


def stacked(examples: list[Mapping[str, np.ndarray]]) -> Example:
    """Single examples of one shape -> a batch."""
    return {k: np.stack([x[k] for x in examples]) for k in examples[0]}
