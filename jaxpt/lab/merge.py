"""From chunk files to curves and decided claims. Only the parent of a run does this."""

import contextlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpt.lab import store
from jaxpt.lab.errors import UserError, expected
from jaxpt.lab.experiment import Claim, Curves, Experiment, Stage
from jaxpt.lab.identity import stage_identities
from jaxpt.lab.statistics import Decision, decide

Chunks = Mapping[tuple[str, int], Sequence[store.Chunk]]  # (stage, seed) -> its chunks


class Table(dict[str, np.ndarray]):
    """Curves whose unknown names raise a sentence with the nearest one."""

    def __missing__(self, name: str) -> np.ndarray:
        raise UserError(f"curve {name!r} is unknown: {expected(name, self)}")


def read_chunks(folder: Path, stages: Sequence[Stage], seeds: Sequence[int]) -> Chunks:
    identities = stage_identities(stages)
    return {
        (stage.name, seed): [
            store.load_own(store.chunk_path(folder, stage.name, seed, i), store.owner(identities[stage.name], seed), bound)
            for i, bound in enumerate(store.chunk_bounds(stage.steps, stage.chunk))
        ]
        for stage in stages for seed in seeds
    }


def curves(chunks: Chunks, stages: Sequence[Stage], seeds: Sequence[int], inputs: Curves) -> Table:
    """"stage/metric" -> [seeds, steps, ...], "inputs/name" as given, "seeds" [seeds]."""
    table = Table({"seeds": np.asarray(seeds)} | {f"inputs/{name}": x for name, x in inputs.items()})
    for stage in stages:
        for metric in chunks[stage.name, seeds[0]][0].metrics:
            rows = [np.concatenate([c.metrics[metric] for c in chunks[stage.name, s]]) for s in seeds]
            table[f"{stage.name}/{metric}"] = np.stack(rows)
    return table


def derive(experiment: Experiment, config: Any, table: Curves) -> dict[str, np.ndarray]:
    """What the experiment computes from its curves for its panels, as "derived/name"."""
    found = experiment.derived(config, table) if experiment.derived else {}
    return {f"derived/{name}": np.asarray(x) for name, x in found.items()}


def rehearse(experiment: Experiment, config: Any, stages: Sequence[Stage], seeds: int, inputs: Curves,
             shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
    """Evaluates claims, panels and sections on made-up curves of the right shapes before hours are spent.

    shapes: stage -> metric -> shape of one step. Only faults that no data excuse are raised.
    """
    rng = np.random.default_rng(0)
    table = Table({"seeds": np.arange(seeds)} | {f"inputs/{name}": x for name, x in inputs.items()})
    for stage in stages:
        for metric, shape in shapes[stage.name].items():
            table[f"{stage.name}/{metric}"] = rng.uniform(0.5, 1.5, (seeds, stage.steps, *shape))
    table |= derive(experiment, config, table)
    for panel in experiment.panels:
        for name in [*panel.series.values(), *(panel.x or {}).values()]:
            if table[name].ndim != 2:
                raise UserError(f"panel {panel.title!r}: curve {name!r} has more than one number per step")
    functions = [f for claim in experiment.claims for f in (claim.estimand, claim.control)]
    sections = [lambda curves: experiment.sections(config, curves)] if experiment.sections else []
    for function in [*functions, *sections]:
        with contextlib.suppress(ValueError, ArithmeticError, RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(table)


def metric_lines(chunks: Chunks) -> str:
    """metrics.jsonl: one line per stage, seed and chunk with each metric's mean over the measured steps."""
    lines = []
    for (stage, seed), rows in chunks.items():
        for index, chunk in enumerate(rows):
            means = {name: _mean(x) for name, x in chunk.metrics.items()}
            line = {"stage": stage, "seed": seed, "chunk": index, "first": chunk.first, "steps": chunk.steps,
                    "seconds": round(chunk.seconds, 4), "metrics": means}
            lines.append(json.dumps(store.jsonable(line), allow_nan=False))
    return "\n".join(lines) + "\n"


def _mean(x: np.ndarray) -> np.ndarray:
    """[steps, ...] -> [...]: over finite steps; NaN where there is none."""
    x = x.astype(np.float64)
    seen = np.isfinite(x)
    count = seen.sum(axis=0)
    return np.where(count > 0, np.where(seen, x, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)


def decide_claims(claims: Sequence[Claim], table: Curves) -> list[dict[str, Any]]:
    """The entries of claims.json. Controls are a family of their own under Holm's correction."""
    margins = [claim.margin for claim in claims]
    effects = decide([_estimate(c, "estimand", c.estimand, table) for c in claims], margins)
    controls = decide([_estimate(c, "control", c.control, table) for c in claims], margins)
    return [
        {
            "name": claim.name, "statement": claim.statement, **_numbers(effect), "margin": claim.margin,
            "unit": claim.unit, "control": {"name": claim.control_name, **_numbers(control)},
        }
        for claim, effect, control in zip(claims, effects, controls, strict=True)
    ]


def _estimate(claim: Claim, what: str, function: Callable[[Curves], np.ndarray], table: Curves) -> np.ndarray:
    values = np.asarray(function(table))
    if values.ndim != 1 or values.dtype.kind not in "fiub":
        raise UserError(f"claim {claim.name!r}: its {what} gave {values.dtype} of shape {values.shape}; "
                        "one number per unit, [n], is expected")
    return values


def _numbers(decision: Decision) -> dict[str, Any]:
    s = decision.summary
    return {
        "estimate": s.mean, "ci95": [s.low, s.high], "n": s.n, "mde": s.mde,
        "p_above": s.p_above, "p_above_holm": decision.p_above,
        "p_below": s.p_below, "p_below_holm": decision.p_below,
        "verdict": decision.verdict, "note": s.note,
    }
