"""Supervised objectives: maximum likelihood as rows of the same algebra."""

from jaxpt.objectives.algebra import compose

SFT = compose(
    "sft",
    "maximum likelihood of the kept tokens; the score function with advantage 1 on demonstrations",
    advantage="constant", ratio="none", surrogate="score", reduction="token_mean",
    claims=("additive",),
)

ROWS = (SFT,)
