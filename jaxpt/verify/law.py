"""What a law of the catalogue is, and the words that many of them share. Imports nothing heavy."""

from typing import NamedTuple

from jaxpt.verify.families import FAMILIES, masks

MATH, CONTRACT = "mathematics", "contract"


class Law(NamedTuple):
    name: str
    group: str  # invariants_GROUP.py
    families: tuple[str, ...]
    kind: str  # MATH or CONTRACT
    where: str  # value, gradient, or both
    statement: str  # one sentence
    tolerance: str
    cause: str  # what usually breaks it
    prepare: str = ""  # what is done to the examples before: a function of generators.py


MASKED = tuple(name for name, family in FAMILIES.items() if masks(family))
LOSSES = tuple(name for name in MASKED if not FAMILIES[name].returns)
MOVING = tuple(name for name, family in FAMILIES.items() if any(arg.moving for arg in family.args.values()))
SEQUENCES = tuple(name for name in MASKED if masks(FAMILIES[name]) == ["mask"])
ROUNDING = "16 x the change under 4 ulp of every input + 256 ulp of the terms' size"
EXACT = "none"
