"""Program: a run as a pair of pure functions; a run is the scan of `step`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxpt.types import Array

ProgramState = Any  # a pytree of arrays; state["params"] are the policy's parameters


class Program(NamedTuple):
    """init(key, hyper, start=None) -> state; step(state) -> (state, {metric: scalar}).

    `hyper` are numbers that do not change shapes (leaves of the state, so programs that differ only in
    them share one compilation). `start` are parameters to begin from (a parent stage's); None draws
    fresh ones from the key. The state carries its key and step; step randomness is
    fold_in(run_key, step), row randomness fold_in(step_key, row), so neither chunking nor sharding
    changes a draw. A metric that is not measured at a step (an evaluation) is NaN there.
    """

    init: Callable[..., ProgramState]
    step: Callable[[ProgramState], tuple[ProgramState, dict[str, Array]]]
    hyper: Mapping[str, float]  # every leaf with its default
    params: Callable[[ProgramState], Any]  # what a later stage starts from
