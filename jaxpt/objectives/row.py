"""Row: one objective of a table. Arrays in, arrays out; no row ever sees a model."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from jaxpt.types import Array, Metrics


class Row(NamedTuple):
    """An objective. Policy objectives (family "policy_loss"):

    prepare(traj, *, ref_logp=None, values=None, final_values=None, process=None, baseline=None, anchor=None,
            sampler_logp=None, total=identity, **hyper)
        -> {"advantages" [B,T], "returns" [B,T], "mask" [B,T] bool, "prompt_tokens" [B], "totals"}
        Once over the whole batch, outside the gradient: shaping of the reward, KL in the reward, credit,
        normalisation, and `mask`, the tokens that are trained on (selection and filters take some out).
        ref_logp, values [B,T]: as `needs` asks; final_values [B]: of the state behind the last token;
        process [B,T]: further rewards of single decisions; `total` sums a tree over the shards of a batch. Of what
        `needs` names: baseline [B], the reward of the greedy answer to the row's prompt; anchor [B,T] int, the state
        in which the decision's turn begins; parts, columns of traj.parts; sampler_logp as below.
    loss(logp, old_logp, advantages, mask, *, totals, ref_logp=None, entropy=None, vocab_kl=None, sampler_logp=None,
         weights=None, prompt_tokens=None, **hyper)
        -> (scalar, {metric: (sum, weight)}). With the totals (and prompt_tokens) of a whole batch, the losses of any
        partition of its rows add up to the loss of the whole when `additive` is True.
        What `needs` names has to be given: vocab_kl [B,T] KL(policy || reference) of each decision's whole distribution,
        differentiable; sampler_logp [B,T] of whoever drew the tokens, where that is not old_logp;
        weights [B,T], what each token is worth; prompt_tokens [B] as prepare made them.

    Other families:

    prepare(batch, *, total=identity, **hyper) -> further keywords of the loss, `totals` among them
        batch: {argument: array} of the family's arguments, the whole batch; what every share of it must agree on.
    loss(*, **batch, **prepared, **hyper) -> what the family returns
        of the whole batch or a share of it, its arguments named as in families.FAMILIES.
    """

    name: str
    family: str  # a key of families.FAMILIES: what the loss takes and gives back
    paper: str  # authors, year, arXiv id, equation
    formula: str  # the loss with {hyper} placeholders; describe() fills them
    needs: tuple[str, ...]  # what train must compute of every decision: logp, ref_logp, entropy, values
    hyper: Mapping[str, float]  # defaults, the paper's where it states them
    prepare: Callable[..., dict[str, Any]]
    loss: Callable[..., tuple[Array, Metrics]]
    additive: bool
    claims: tuple[str, ...]  # laws of the contract class that this row claims
    parts: Mapping[str, str]  # the algebra: advantage, credit, ratio, surrogate, reduction, kl, ... -> words
    alias_of: str = ""  # a row that is the same function under another name


def replaced(name: str, hyper: Mapping[str, float], overrides: Mapping[str, float]) -> dict[str, float]:
    """The row's constants with some replaced, by numbers or traced scalars. TypeError for one that it has not;
    ValueError for a negative number where the default is none."""
    for constant, value in overrides.items():
        if constant not in hyper:
            raise TypeError(f"row {name!r} has no constant {constant!r}, only {sorted(hyper)}")
        if isinstance(value, Real) and hyper[constant] >= 0 and not value >= 0:
            raise ValueError(f"row {name!r}: {constant} = {value}: expected a number of at least 0")
    return {**hyper, **overrides}
