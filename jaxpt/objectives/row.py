"""Row: one objective of a table. Arrays in, arrays out; no row ever sees a model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxpt.types import Array, Metrics


class Row(NamedTuple):
    """An objective.

    prepare(traj, **hyper) -> {"advantages": [B,T], "totals": {...}, ...}
        Once over the whole batch, outside the gradient: advantages and the global denominators.
    loss(logp, old_logp, advantages, mask, *, totals, ref_logp=None, **hyper)
        -> (scalar, {metric: (sum, weight)}). With the totals of the whole batch, the losses of any
        partition of its rows add up to the loss of the whole when `additive` is True.
    """

    name: str
    paper: str  # authors, year, arXiv id, equation
    formula: str  # the loss with {hyper} placeholders; describe() fills them
    needs: tuple[str, ...]  # log-probabilities train must compute: logp, ref_logp
    hyper: Mapping[str, float]  # defaults, the paper's where it states them
    prepare: Callable[..., dict[str, Any]]
    loss: Callable[..., tuple[Array, Metrics]]
    additive: bool
    claims: tuple[str, ...]  # laws of the contract class that this row claims
    parts: Mapping[str, str]  # the algebra: advantage, ratio, surrogate, reduction, kl -> words

