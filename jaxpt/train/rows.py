"""Several rows in one compiled program: a number in the state chooses which one an arm follows.

Compiling a program costs more than running it for a minute; what differs between two objectives is a few lines.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxpt.envs.protocol import Spec
from jaxpt.objectives import get
from jaxpt.objectives.row import Row
from jaxpt.types import Array


def check_rows(objectives: Sequence[str], computed: Sequence[str]):
    """ValueError where a name is unknown or its row needs what a program does not compute."""
    for name in objectives:
        further = [what for what in get(name).needs if what not in computed]
        if further:
            raise ValueError(f"objectives: {name!r} needs {further[0]}, which this program does not compute")


def constants(row: Row, spec: Spec) -> dict[str, float]:
    """The row's constants, those in tokens scaled to the response budget of the environment."""
    own = dict(row.hyper)
    if "max_length" in own:
        scale = spec.response_len / own["max_length"]
        own |= {name: own[name] * scale for name in ("max_length", "buffer") if name in own}
    return own


def leaves(objectives: Sequence[str], spec: Spec) -> dict[str, float]:
    """Every constant of the rows, as the first row that has it sets it, and `row`, which of them is followed."""
    found = {"row": 0.0}
    for name in objectives:
        found = constants(get(name), spec) | found
    return found


def arm(objectives: Sequence[str], name: str, spec: Spec) -> dict[str, float]:
    """The leaves that make a program of `objectives` follow row `name` with its own constants."""
    if name not in objectives:
        raise ValueError(f"arm {name!r}: expected one of the program's rows, {', '.join(objectives)}")
    return {"row": float(list(objectives).index(name)), **constants(get(name), spec)}


def own(row: Row, hyper: Mapping[str, Array]) -> dict[str, Array]:
    return {name: hyper[name] for name in row.hyper}


def of_row(rows: Sequence[Row], hyper: Mapping[str, Array], what: Callable[[Row], float | bool]) -> Array:
    """what(row) of the row that is followed."""
    return jnp.asarray([what(row) for row in rows])[hyper["row"].astype(jnp.int32)]


def when(rows: Sequence[Row], hyper: Mapping[str, Array], what: Callable[[Row], bool], yes: Callable, no: Callable, *args):
    """yes(*args) where the followed row has `what`, else no(*args); decided at once where all rows agree."""
    if len({what(row) for row in rows}) == 1:
        return (yes if what(rows[0]) else no)(*args)
    return jax.lax.cond(of_row(rows, hyper, what), yes, no, *args)


def follow(rows: Sequence[Row], hyper: Mapping[str, Array], branch: Callable[[Row], Callable], *args):
    """branch(row)(*args) of the row that is followed; the others are compiled and not run."""
    if len(rows) == 1:
        return branch(rows[0])(*args)
    return jax.lax.switch(hyper["row"].astype(jnp.int32), [branch(row) for row in rows], *args)
