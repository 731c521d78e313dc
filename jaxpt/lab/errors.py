"""What goes wrong in a run, as sentences. Imports nothing heavy: the command line needs it early."""

import difflib
import math
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """Bad input: one sentence that names the argument, the value and what was expected."""


class RunFailed(Exception):
    """The experiment's own code failed; one sentence that says where the traceback is."""


def expected(value: str, choices: Iterable[str]) -> str:
    """The nearest name if one is near, else the whole list: 'did you mean grpo?' / 'expected one of a, b'."""
    choices = sorted(choices)
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"expected one of {', '.join(choices)}" if choices else "there are none"


def within(config: Any, low: float, high: float, *names: str) -> None:
    """ValueError, in the command line's words, unless every named field is a number from low to high."""
    for name in names:
        value = getattr(config, name)
        if not low <= value <= high:
            limit = f"at least {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected {limit}")


def multiples(config: Any, step: int, why: str, *names: str) -> None:
    """ValueError, in the command line's words, unless every named field is a multiple of `step`, above 0."""
    for name in names:
        value = getattr(config, name)
        if value < step or value % step:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected a multiple of {step}, {why}")
