"""Whether a counterexample of the verifier's is one: what the peer's function gives on it, called without the verifier,
and what it should give, by hand. Only entries of which both are known stand in the README's table."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from lens import Target

from jaxpt.verify.families import FAMILIES

LARGEST = float(np.finfo(np.float32).max)
STEP = 1e-6  # of central differences in float64, relative to the size of the number


class Finding(NamedTuple):
    target: str
    law: str
    kind: str
    where: str  # "value" or "gradient of NAME", with the position, [i][j]
    inputs: Mapping[str, Any]
    wrong: float | str  # NaN and infinities as words
    right: float  # by hand


def numbers(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The words nan, inf and -inf are numbers again."""
    return {k: np.array(v, float) for k, v in inputs.items()}


def place_of(where: str) -> tuple[str, str, tuple[int, ...]]:
    """what is looked at ("value" or "gradient"), of which argument, where in it"""
    words, _, rest = where.partition("[")
    position = tuple(int(i) for i in rest.rstrip("]").split("][")) if rest else ()
    what, _, name = words.partition(" of ")
    return what, name, position


def by_hand(target: Target, inputs: Mapping[str, Any], where: str) -> float:
    """By the loop in float64; its gradient by central differences. KeyError where the place is none of the two."""
    x, (what, name, position) = numbers(inputs), place_of(where)
    if what == "value":
        return float(np.asarray(target.by_hand(x, x))[position])
    if what != "gradient" or name not in x:
        raise KeyError(where)
    h = STEP * max(1.0, abs(x[name][position])) if np.isfinite(x[name][position]) else STEP
    ends = []
    for step in (h, -h):
        moved = {**x, name: x[name].copy()}
        moved[name][position] += step
        ends.append(float(np.sum(target.by_hand(moved, x))))
    return 0.0 if ends[0] == ends[1] else (ends[0] - ends[1]) / (2 * h)


def theirs(function: Callable, target: Target, inputs: Mapping[str, Any], where: str) -> float:
    """The peer's own number, in float32 where it works in a framework."""
    what, name, position = place_of(where)
    order = FAMILIES[target.family].args
    given = lambda x: function(*(x[k] for k in order), **{k: v for k, v in x.items() if k not in order})  # noqa: E731
    return of_framework[target.framework](given, arrays(inputs), name if what == "gradient" else "", position)


def arrays(inputs: Mapping[str, Any]) -> dict[str, Any]:
    exact = ("group", "tokens")
    return {k: v.astype(np.int64 if k in exact else np.float32) if v.ndim else float(v) for k, v in numbers(inputs).items()}


def first(out):
    return out[0] if isinstance(out, tuple) else out


def _torch(function, x, name, position):
    import torch

    x = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in x.items()}
    if not name:
        return float(torch.as_tensor(first(function(x)))[position])
    x[name].requires_grad_()
    first(function(x)).sum().backward()
    return float(x[name].grad[position]) if x[name].grad is not None else 0.0


def _jax(function, x, name, position):
    import jax
    import jax.numpy as jnp

    x = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in x.items()}
    if not name:
        return float(jnp.asarray(first(function(x)))[position])
    return float(jax.grad(lambda v: jnp.sum(first(function({**x, name: v}))))(x[name])[position])


def _numpy(function, x, name, position):
    x = {k: v.astype(np.float64) if k not in ("group", "tokens") and isinstance(v, np.ndarray) else v for k, v in x.items()}
    return float(np.asarray(first(function(x)))[position])


of_framework = {"torch": _torch, "jax": _jax, "numpy": _numpy}


def doubt(wrong: float, wanted: float | str, right: float) -> str:
    """Why this is not an entry; "" if it is one. wanted: what the law says."""
    if not np.isfinite(right) or abs(right) > LARGEST:
        return f"by hand it is {right:.4g}, which is no number of float32 either"
    if np.isfinite(wrong) and abs(wrong - right) <= 1e-4 * max(1.0, abs(right)) and not (right == 0 != wrong):
        return f"by hand it is {right:.6g} as well"
    if not meets(right, wanted):
        return f"by hand it is {right:.6g}, the law says {wanted}"
    return ""


def meets(right: float, wanted: float | str) -> bool:
    if wanted == "a finite number":
        return True
    sense, _, number = str(wanted).rpartition(" ")
    near = 1e-3 * max(1.0, abs(float(number)))
    off = right - float(number)
    return {"": abs(off) <= near, "at least": off >= -near, "at most": off <= near, "anything but": off != 0}[sense]
