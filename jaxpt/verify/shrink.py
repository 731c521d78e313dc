"""A failing example made small: the fewest sequences, tokens and digits that still break the law, always in the same
way. Candidates are tried by the batch, since a batch costs no more than one.
"""

import itertools
from collections.abc import Callable

import numpy as np

from jaxpt.verify import moves
from jaxpt.verify.families import Arg, Family
from jaxpt.verify.generators import Example

Breaks = Callable[[Example], np.ndarray]  # a batch of candidates -> [n] bool
SIMPLE = {  # kind -> numbers to prefer, the first most
    "logp": (-1.0, -0.5, -2.0), "near": (-1.0, -0.5, -2.0), "advantage": (1.0, -1.0, 0.0),
    "score": (0.0, 1.0, -1.0, 2.0),
    "near_score": (0.0, 1.0, -1.0, 2.0), "kept_score": (0.0, 1.0), "positive": (1.0, 0.5), "mask": (1.0, 0.0),
    "reward": (0.0, 1.0), "label": (0, 1), "discount": (1.0, 0.5, 0.0), "share": (0.25,),
    "logits": (0.0, 1.0, -1.0), "token": (0, 1),
    "sum_logp": (-10.0, -5.0, -20.0), "near_sum": (-10.0, -5.0, -20.0), "choice": (1.0, 0.0),
    "length": (0.0, 10.0, 20.0),
    "limit": (20.0,), "buffer": (10.0, 5.0),
}
BATCH = 64


def smallest(x: Example, family: Family, breaks: Breaks) -> Example:
    """x: one example (no leading axis)."""
    x = _fewer(x, family, moves.rows_letter(family), breaks)
    if any("T" in arg.axes for arg in family.args.values()):
        x = _fewer(x, family, "T", breaks)
    for _ in range(3):
        before = x
        for name in list(x):
            x = _simpler(x, name, family.arg(name), breaks)
        if all(np.array_equal(x[k], before[k]) for k in x):
            break
    return x


def _first(candidates: list[Example], breaks: Breaks) -> Example | None:
    for start in range(0, len(candidates), BATCH):
        some = candidates[start : start + BATCH]
        found = np.flatnonzero(breaks(moves.stacked(some)))
        if len(found):
            return some[found[0]]
    return None


def _fewer(x: Example, family: Family, letter: str, breaks: Breaks) -> Example:
    """1, 2 or 3 of the rows (or columns), else as many as can be dropped one by one."""
    batch = lambda x, index: {k: v[0] for k,
        v in moves.take(moves.stacked([x]), family, letter, index).items()}  # noqa: E731
    total = moves.size(moves.stacked([x]), family, letter)
    least = 2 if letter == "T" and "S" in family.returns else 1
    for k in range(least, min(3, total - 1) + 1):
        found = _first([batch(x, list(some)) for some in itertools.combinations(range(total), k)], breaks)
        if found is not None:
            return found
    while total > 4:
        found = _first([batch(x, [j for j in range(total) if j != i]) for i in range(total)], breaks)
        if found is None:
            break
        x, total = found, total - 1
    return x


def _cost(value: float, simple: tuple) -> float:
    return simple.index(value) if value in simple else 10 + len(f"{abs(float(value)):.9g}")


def _options(value: float, simple: tuple) -> list[float]:
    """Simpler numbers than this one, the simplest first."""
    rounded = [round(float(value), digits) for digits in (0, 1)] if np.isfinite(value) and isinstance(value,
        float) else []
    options = [v for v in (*simple, *rounded) if _cost(v, simple) < _cost(value, simple)]
    return sorted(dict.fromkeys(options), key=lambda v: _cost(v, simple))


def _simpler(x: Example, name: str, arg: Arg, breaks: Breaks) -> Example:
    simple = SIMPLE.get(arg.kind)
    if simple is None:
        return x
    whole = [{**x, name: np.full_like(x[name], v)} for v in simple if np.any(x[name] != v)]
    if arg.like and not np.array_equal(x[name], x[arg.like]):
        whole.insert(0, {**x, name: x[arg.like]})
    found = _first(whole, breaks) if x[name].size > 1 else None
    if found is not None:
        return found
    for _ in range(3):
        moved = False
        tried = [(slot, v) for slot in np.ndindex(x[name].shape) for v in _options(x[name][slot].item(), simple)]
        if not tried:
            return x
        works = _works([_with(x, name, slot, v) for slot, v in tried], breaks)
        best = {}
        for (slot, v), ok in zip(tried, works, strict=True):
            if ok and slot not in best:
                best[slot] = v
        for count in (len(best), 1):  # all at once, else one
            together = x
            for slot, v in list(best.items())[:count]:
                together = _with(together, name, slot, v)
            if best and breaks(moves.stacked([together]))[0]:
                x, moved = together, True
                break
        if not moved:
            return x
    return x


def _with(x: Example, name: str, slot: tuple, value: float) -> Example:
    array = np.array(x[name])
    array[slot] = value
    return {**x, name: array}


def _works(candidates: list[Example], breaks: Breaks) -> np.ndarray:
    return np.concatenate([breaks(moves.stacked(candidates[i : i + BATCH])) for i in range(0, len(candidates), BATCH)])
