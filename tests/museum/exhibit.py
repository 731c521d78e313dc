"""What an exhibit is."""

from collections.abc import Callable
from typing import NamedTuple


class Exhibit(NamedTuple):
    fault: str  # what went wrong
    report: str  # where it was reported: repository and number, or the release in which it was found
    family: str
    law: str  # that has to reject the wrong one
    wrong: Callable
    right: Callable
    claim: tuple[str, ...] = ()  # what both are said to be
    framework: str = "numpy"
