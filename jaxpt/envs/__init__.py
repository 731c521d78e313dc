"""Environments: token automata with exact checkers. `make(name)` builds one of the table `ENVS`."""

import difflib
from collections.abc import Callable

from jaxpt.envs.bandit import bandit
from jaxpt.envs.cards import cards
from jaxpt.envs.chain import chain
from jaxpt.envs.fileops import fileops
from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, Spec, check_level
from jaxpt.envs.tree import tree

__all__ = ["DONE", "ENVS", "POLICY", "Environment", "Outcome", "Spec", "check_level", "make"]

ENVS: dict[str, Callable[..., Environment]] = {
    "bandit": bandit, "cards": cards, "chain": chain, "fileops": fileops, "tree": tree,
}


def make(name: str, **arguments) -> Environment:
    """ENVS[name](**arguments).

    Raises:
      ValueError: there is no such environment, or an argument is outside its range.
    """
    if name not in ENVS:
        near = difflib.get_close_matches(name, ENVS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no environment is named {name!r}; the nearest of {sorted(ENVS)} is {near!r}")
    return ENVS[name](**arguments)
