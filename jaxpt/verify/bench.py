"""What a law is given: a way to run the target on batches of examples, and how far two results may lie apart.

A law is a function law(bench, x) of a batch of examples -> [Part, ...]: pairs of what was got and what the law wants.
Or -> {reading: [Part, ...]}: one reading has to hold on all examples, such as one of the ways to weigh rows.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxpt.verify import moves
from jaxpt.verify.adapters import ADAPTERS, Evaluation, Out
from jaxpt.verify.families import Family, masks
from jaxpt.verify.generators import Example
from jaxpt.verify.target import Target

DIFFERENCING = 1e-10  # of a central difference in float64, for each unit of the terms' size
EPS = float(np.finfo(np.float32).eps)  # in every framework: float64 code may hold guards such as 1e-8
JITTER = 4 * EPS
SIZES = ("advantage", "score", "near_score", "kept_score", "reward")  # kinds whose size is the size of a loss's terms


class NotApplied(Exception):
    """The law says nothing about this target: the reason."""


class Part(NamedTuple):
    place: str  # "value" or "gradient of NAME"
    got: np.ndarray  # [n, ...]
    want: np.ndarray  # the same, or a number
    tol: np.ndarray  # the same, or a number: how far apart they may be
    sense: str = "equal"  # or at_least, at_most, differs, finite
    call: Example | None = None  # the arguments that gave `got`, if they are not the example itself
    raised: str = ""

    def excess(self) -> np.ndarray:
        """[n, ...]: how many tolerances off; above 1 the law is broken there."""
        got, want, tol = np.broadcast_arrays(*(np.asarray(a, float) for a in (self.got, self.want, self.tol)))
        with np.errstate(all="ignore"):
            if self.sense == "finite":
                return np.where(np.isfinite(got), 0.0, np.inf)
            off = {"equal": np.abs(got - want), "at_least": want - got, "at_most": got - want}
            if self.sense == "differs":
                size = np.where(np.isfinite(got - want), np.abs(got - want), np.inf)
                return np.where(size > tol, 0.0, np.inf)
            d = off[self.sense]
            ratio = np.where(d <= 0, 0.0, np.where(tol > 0, d / np.where(tol > 0, tol, 1.0), np.inf))
            ratio = np.where(np.isnan(d) | ~np.isfinite(tol), np.where(np.isnan(want), 0.0, np.inf), ratio)
            same = (got == want) | (np.isnan(got) & np.isnan(want) & (not self.raised))  # to raise is no agreement
            return np.where(same, 0.0, np.where(np.isnan(got), np.inf, ratio))


Parts = list[Part]


def column(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """[n] -> [n, 1, ...], to stand beside an array of examples."""
    return np.reshape(x, (len(x), *(1,) * (like.ndim - 1)))


def over(x: np.ndarray, fn: Callable = np.max) -> np.ndarray:
    """[n, ...] -> [n]; 0 where there is nothing."""
    return fn(x.reshape(len(x), -1), axis=1) if x.size else np.zeros(len(x))


class Bench:
    def __init__(self, target: Target, family: Family, *, mask: str = "float", dtype: str = "float32"):
        self.target, self.family, self.takes = target, family, target.takes
        self.masks = masks(family)
        self.moving = tuple(name for name, arg in family.args.items() if arg.moving)
        yes_or_no = tuple(name for name, arg in family.args.items() if arg.kind in ("mask", "choice"))
        self.adapter = ADAPTERS[target.framework](target.fn, "key" in target.takes, dtype, mask, yes_or_no)
        self.memory: dict = {}
        self.made: dict[str, Bench] = {}  # other benches of the same function, by what is other in them
        self.settings = {"mask": mask, "dtype": dtype}

    def forget(self) -> None:
        self.memory = {}
        for bench in self.made.values():
            bench.forget()

    def other(self, what: str, fn: Callable | None = None, **settings: str) -> "Bench":
        """The bench of another function, or of this one under other settings; it keeps its programs."""
        if what not in self.made:
            target = self.target._replace(fn=fn or self.target.fn)
            self.made[what] = Bench(target, self.family, **{**self.settings, **settings})
        return self.made[what]

    def evaluation(self, x: Example, whole: Example | None = None, moving: tuple[str, ...] = ()) -> Evaluation:
        args = {name: x[name] for name in self.family.args}
        given = {name: x[name] for name in self.takes if name in x}
        if "totals" in self.takes:
            given["totals"] = totals(whole or x)
        if "prompt_tokens" in self.takes:
            given["prompt_tokens"] = prompt_tokens(x)  # of whole prompts: no law cuts one
        return Evaluation(args, given, moving)

    @functools.cached_property
    def signature(self) -> tuple[str, ...]:
        """Names of the function's parameters."""
        try:
            return tuple(inspect.signature(self.target.fn).parameters)
        except (TypeError, ValueError):
            return ()

    def run(self, x: Example, *, whole: Example | None = None, moving: tuple[str, ...] | None = None) -> Out:
        """Values and gradients of a batch of examples. whole: the batch whose totals are given in place of x's own."""
        moving = self.moving if moving is None else moving
        key = (id(x), id(whole), moving)
        if key not in self.memory:
            out = self.adapter.evaluate(self.evaluation(x, whole, moving))
            if out.nothing and self.family.returns != "?":  # laws look at the slots of a result
                shape = (len(out.value), *(moves.sizes(x, self.family)[axis] for axis in self.family.returns))
                out = out._replace(value=np.full(shape, np.nan))
            self.memory[key] = out, x, whole  # held, so that no other example gets their ids
        return self.memory[key][0]

    def tol(self, x: Example) -> Out:
        """How far rounding may move the results on x: 16 times what it takes to change every input by 4 units in its
        last place, plus 256 units of the size of the terms. [n] each, shaped to stand beside the results."""
        key = ("tol", id(x))
        if key not in self.memory:
            out, moved = self.run(x), self.run(_jittered(x, self.family))
            size = np.ones(len(out.value))
            for name, arg in self.family.args.items():
                if arg.kind in SIZES:
                    size = np.maximum(size, over(_finite(np.abs(x[name]))))
            with np.errstate(all="ignore"):
                off = lambda a, b: 16 * over(_finite(np.abs(a - b)))  # noqa: E731
                gradient = sum((over(_finite(np.abs(g)), np.sum) for g in out.grads.values()), np.zeros_like(size))
                steep = np.maximum.reduce([over(_finite(np.abs(g))) for g in out.grads.values()] or [size])
                value = off(moved.value,
                    out.value) + 256 * EPS * np.maximum.reduce([size, gradient, over(_finite(np.abs(out.value)))])
                noise = DIFFERENCING * size if self.target.framework == "numpy" else 1e-30
                grads = {k: column(off(moved.grads[k], g) + 256 * EPS * steep + noise, g) for k, g in out.grads.items()}
            self.memory[key] = Out(column(value, out.value), grads), x
        return self.memory[key][0]

    def same(self, x: Example, got: Out, want: Out, *, call: Example | None = None,
        kept: np.ndarray | None = None) -> Parts:
        """Values and gradients agree, up to the rounding on x. kept: where results of one a token are looked at."""
        tol = self.tol(x)
        value = (got.value, want.value) if kept is None else (np.where(kept, got.value, 0),
            np.where(kept, want.value, 0))
        parts = [Part("value", *value, tol.value, call=call, raised=got.raised)]
        return parts + [
            Part(f"gradient of {k}", g, want.grads[k], tol.grads[k], call=call, raised=got.raised) for k,
            g in got.grads.items()
        ]

    def kept(self, x: Example) -> np.ndarray | None:
        """Which slots of a result of one a token count."""
        return x["mask"] > 0 if self.family.returns == "BT" and "mask" in x else None

    def slots(self, x: Example, name: str) -> np.ndarray:
        """Which slots of an argument count, [n, ...]."""
        mask = self.family.arg(name).mask
        if not mask:
            return np.ones(x[name].shape, bool)
        kept = x[mask] > 0
        return kept.reshape(*kept.shape, *(1,) * (x[name].ndim - kept.ndim)) & np.ones(x[name].shape, bool)


def _finite(x: np.ndarray) -> np.ndarray:
    """Where a result is not finite, tolerances do not help: 0."""
    return np.where(np.isfinite(x), x, 0.0)


def _jittered(x: Example, family: Family) -> Example:
    rng = np.random.default_rng(0)
    sign = lambda v: rng.choice([-1.0, 1.0], v.shape)  # noqa: E731
    exact = ("mask", "choice", "discount", "share", "one", "limit", "buffer", "length")
    return {
        k: v * (1 + JITTER * sign(v)) if v.dtype.kind == "f" and family.arg(k).kind not in exact else v for k,
        v in x.items()
    }


def tokens_of(x: Example) -> np.ndarray:
    """[n, B] slots that count of every row."""
    return (x["mask"] > 0).sum(2).astype(float)


def totals(x: Example) -> Mapping[str, np.ndarray]:
    tokens = tokens_of(x)
    rows = (tokens > 0).sum(1).astype(float)
    return {"tokens": tokens.sum(1), "rows": rows, "all_rows": np.full(len(tokens), float(tokens.shape[1])),
        "prompts": rows}


def prompt_tokens(x: Example) -> np.ndarray:
    tokens = tokens_of(x)
    if "group" not in x:
        return tokens
    return np.einsum("nij,nj->ni", x["group"][:, :, None] == x["group"][:, None, :], tokens)

