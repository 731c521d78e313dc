"""The functions of other libraries that `jaxpt verify` is asked about, scripts/verify_peers.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lens_losses import LOSSES
from lens_outcomes import OUTCOMES
from lens_target import Target

TARGETS = [*LOSSES, *OUTCOMES]


def function_of(target: Target, load: Callable[[str], Any]) -> Callable:
    """The family's function. load: a module's full name -> the module."""
    module, _, path = target.peer.partition(":")
    function = load(module)
    for name in path.split("."):
        function = getattr(function, name)
    return partial(target.call, function)
