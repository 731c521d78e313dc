"""What goes wrong in a run, as sentences. Imports nothing heavy: the command line needs it early."""

import difflib
from collections.abc import Iterable


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
