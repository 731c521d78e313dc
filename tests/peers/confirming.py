"""Whether a counterexample of the verifier's is one: what the peer's function gives on it, called without the verifier,
and what it should give, by hand. Only entries of which both are known stand in the README's table."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from lens_target import Target

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


def place_of(where: str) -> tuple[str, tuple[int, ...]]:
    """(what is looked at, where in it)"""
    words, _, rest = where.partition("[")
    return words, tuple(int(i) for i in rest.rstrip("]").split("][")) if rest else ()


GRADIENT = "gradient of "
MEASURES = {  # (the result, the inputs, the position) -> a number
    "value": lambda out, x, at: out[at],
    "advantage of the larger reward less that of the smaller": lambda out, x, at: out[at[0]] - out[at[1]],
    "sum over the group": lambda out, x, at: out[x["group"] == x["group"][at]].sum(),
}


def by_hand(target: Target, inputs: Mapping[str, Any], where: str) -> float:
    """By the loop in float64; its gradient by central differences. KeyError where the place is neither."""
    x, (words, position) = numbers(inputs), place_of(where)
    if not words.startswith(GRADIENT):
        return float(MEASURES[words](np.asarray(target.by_hand(x, x)), x, position))
    name = words.removeprefix(GRADIENT)
    h = STEP * max(1.0, abs(x[name][position])) if np.isfinite(x[name][position]) else STEP
    ends = []
    for step in (h, -h):
        moved = {**x, name: x[name].copy()}
        moved[name][position] += step
        ends.append(float(np.sum(target.by_hand(moved, x))))
    return 0.0 if ends[0] == ends[1] else (ends[0] - ends[1]) / (2 * h)


def theirs(function: Callable, target: Target, inputs: Mapping[str, Any], where: str) -> float:
    """The peer's own number, in float32 where it works in a framework."""
    (words, position), order = place_of(where), FAMILIES[target.family].args
    given = lambda x: first(function(*(x[k] for k in order), **{k: v for k, v in x.items() if k not in order}))  # noqa: E731
    result_of, gradient_of = FRAMEWORKS[target.framework]
    if words.startswith(GRADIENT):
        return float(gradient_of(given, arrays(inputs), words.removeprefix(GRADIENT))[position])
    return float(MEASURES[words](result_of(given, arrays(inputs)), numbers(inputs), position))


def arrays(inputs: Mapping[str, Any]) -> dict[str, Any]:
    exact = ("group", "tokens")
    return {k: v.astype(np.int64 if k in exact else np.float32) if v.ndim else float(v) for k, v in numbers(inputs).items()}


def first(out):
    return out[0] if isinstance(out, tuple) else out


def _tensors(x):
    import torch

    return {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in x.items()}


def _torch_result(function, x):
    import torch

    return torch.as_tensor(function(_tensors(x))).detach().numpy()


def _torch_gradient(function, x, name):
    x = _tensors(x)
    x[name].requires_grad_()
    function(x).sum().backward()
    return np.zeros(x[name].shape) if x[name].grad is None else x[name].grad.numpy()


def _jax_arrays(x):
    import jax.numpy as jnp

    return {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in x.items()}


def _jax_result(function, x):
    return np.asarray(function(_jax_arrays(x)))


def _jax_gradient(function, x, name):
    import jax

    x = _jax_arrays(x)
    return np.asarray(jax.grad(lambda v: function({**x, name: v}).sum())(x[name]))


FRAMEWORKS = {
    "torch": (_torch_result, _torch_gradient), "jax": (_jax_result, _jax_gradient),
    "numpy": (lambda function, x: np.asarray(function(x)), None),
}


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
