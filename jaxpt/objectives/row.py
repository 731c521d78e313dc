"""Row: one objective of a table. Arrays in, arrays out; no row ever sees a model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxpt.types import Array, Metrics


class Row(NamedTuple):
    """An objective.

    prepare(traj, *, ref_logp=None, values=None, final_values=None, process=None, total=identity, **hyper)
        -> {"advantages" [B,T], "returns" [B,T], "mask" [B,T] bool, "totals"}
        Once over the whole batch, outside the gradient: shaping of the reward, KL in the reward, credit,
        normalisation, and `mask`, the tokens that are trained on (selection and filters take some out).
        ref_logp, values [B,T]: as `needs` asks; final_values [B]: of the state behind the last token;
        process [B,T]: further rewards of single decisions; `total` sums a tree over the shards of a batch.
    loss(logp, old_logp, advantages, mask, *, totals, ref_logp=None, entropy=None, **hyper)
        -> (scalar, {metric: (sum, weight)}). With the totals of a whole batch, the losses of any partition
        of its rows add up to the loss of the whole when `additive` is True.
    """

    name: str
    paper: str  # authors, year, arXiv id, equation
    formula: str  # the loss with {hyper} placeholders; describe() fills them
    needs: tuple[str, ...]  # what train must compute of every decision: logp, ref_logp, entropy, values
    hyper: Mapping[str, float]  # defaults, the paper's where it states them
    prepare: Callable[..., dict[str, Any]]
    loss: Callable[..., tuple[Array, Metrics]]
    additive: bool
    claims: tuple[str, ...]  # laws of the contract class that this row claims
    parts: Mapping[str, str]  # the algebra: advantage, credit, ratio, surrogate, reduction, kl, ... -> words
