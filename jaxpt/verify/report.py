"""What came out: one outcome a law, as a dict for machines and as text for readers."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Outcome(NamedTuple):
    law: str
    kind: str  # mathematics or contract
    status: str  # holds, broken, not_applied
    where: str  # what is looked at; of a broken law, what is wrong
    statement: str
    tolerance: str
    detail: str = ""  # the reading under which it holds, or why it was not applied
    cause: str = ""  # of a broken law: what usually is behind it
    counterexample: Mapping[str, Any] | None = None  # inputs, wrong, right, position, reproduce


class Report(NamedTuple):
    target: str
    family: str
    framework: str
    seed: int
    examples: int
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()
    like: str | None = None
    nearest: Mapping[str, Any] | None = None

    @property
    def broken(self) -> dict[str, Outcome]:
        return {o.law: o for o in self.outcomes if o.status == "broken"}

    @property
    def ok(self) -> bool:
        return not self.broken

    def assert_ok(self) -> None:
        """AssertionError with every broken law and its counterexample."""
        if not self.ok:
            raise AssertionError("\n" + self.text())

    def record(self) -> dict:
        laws = [
            {"law": o.law, "class": o.kind, "status": o.status, "where": o.where, "statement": o.statement,
             "tolerance": o.tolerance, "detail": o.detail or None, "cause": o.cause or None,
             "counterexample": None if o.counterexample is None else dict(o.counterexample)}
            for o in self.outcomes
        ]
        return {
            "target": self.target, "family": self.family, "framework": self.framework, "seed": self.seed,
            "examples": self.examples, "like": self.like,
            "nearest": None if self.nearest is None else dict(self.nearest),
            "notes": list(self.notes), "laws": laws,
        }

    def text(self) -> str:
        marks = {"holds": "holds", "broken": "BROKEN", "not_applied": "-"}
        width = max((len(o.law) for o in self.outcomes), default=0)
        lines = [f"{self.target}: {self.family}, {self.framework}, {self.examples} examples a law, seed {self.seed}",
            ""]
        silent = "a choice that was not claimed"
        for o in self.outcomes:
            if o.detail == silent:
                continue
            lines.append(f"  {o.law:{width}}  {marks[o.status]:7} {o.kind:11} {o.detail}".rstrip())
        unclaimed = [o.law for o in self.outcomes if o.detail == silent]
        lines += ["", f"  not claimed: {', '.join(unclaimed)}"] if unclaimed else []
        for o in self.broken.values():
            lines += ["", *explained(o)]
        if self.nearest is not None:
            lines += ["", f"nearest row: {self.nearest['words']}"]
        lines += ["", *self.notes] if self.notes else []
        broken, applied = len(self.broken), sum(o.status != "not_applied" for o in self.outcomes)
        return "\n".join([*lines, "", f"{broken} of {applied} laws broken" if broken else f"all {applied} laws hold"])


def explained(o: Outcome) -> list[str]:
    c = o.counterexample or {}
    lines = [f"{o.law}: {o.statement}",
        *(f"  {name} = {_numbers(value)}" for name, value in c.get("inputs", {}).items())]
    lines.append(f"  {o.where}{c.get('position', '')}: {c.get('wrong')}, expected {c.get('right')}")
    if c.get("reproduce"):
        lines.append(f"  {c['reproduce']}")
    return lines + [f"  usual cause: {o.cause}"]


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_numbers, value)) + "]"
    return str(value) if isinstance(value, str) else f"{value:.9g}"


def plain(x: Any, digits: int = 9) -> Any:
    """Numbers and arrays as JSON has them; NaN and infinities as words."""
    if isinstance(x, np.ndarray):
        return [plain(v, digits) for v in x] if x.ndim else plain(x.item(), digits)
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, float):
        if math.isfinite(x):
            return float(f"{x:.{digits}g}") + 0.0  # no -0.0
        return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
    return x


def literal(x: Any, framework: str) -> str:
    """A number or an array as code."""
    if isinstance(x, np.ndarray) and x.ndim:
        module = {"jax": "jnp.asarray", "numpy": "np.asarray", "torch": "torch.tensor"}[framework]
        return f"{module}({_list(x)})"
    return _list(np.asarray(x))


def _list(x: np.ndarray) -> str:
    if x.ndim:
        return "[" + ", ".join(map(_list, x)) + "]"
    value = x.item()
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{plain(value)}')"
    return f"{value:.9g}" if isinstance(value, int) or value != int(value) else f"{value:.1f}"
