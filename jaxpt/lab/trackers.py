"""TensorBoard and Weights & Biases behind one `log(step, values)`.

What a tracker shows is derived, like the report: it is written when a run ends, from the merged curves, into
a folder of its own that replaces the one before. So a run that was killed and resumed, or extended by seeds,
shows every point once, and tracking cannot change a result. One tracked run per stage and seed, in RUN/KIND/.
"""

import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpt.lab import store
from jaxpt.lab.errors import UserError, expected
from jaxpt.lab.experiment import Curves
from jaxpt.lab.identity import digest

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # what a kind imports; its extra is the kind


class Tracker(NamedTuple):
    log: Callable[[int, Mapping[str, float]], None]  # (step, values by name)
    close: Callable[[], None]


def open_tracker(kind: str, folder: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    """A tracked run `name` (a relative path) with the facts `config`, kept in `folder`; kind is of KINDS."""
    return KINDS[kind](folder, name, config)


def _none(folder: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    return Tracker(lambda step, values: None, lambda: None)


def _tensorboard(folder: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder / name))
    writer.add_text("config", f"```json\n{json.dumps(store.jsonable(config), indent=1)}\n```")

    def log(step: int, values: Mapping[str, float]) -> None:
        for metric, value in values.items():
            writer.add_scalar(metric, value, step)

    return Tracker(log, writer.close)


def _wandb(folder: Path, name: str, config: Mapping[str, Any]) -> Tracker:
    """Offline, whatever the environment says: `wandb sync FOLDER/wandb/offline-run-*` uploads it later."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # or its service looks for a server even when offline
    import wandb

    folder.mkdir(parents=True, exist_ok=True)  # wandb takes a temporary folder where this one is missing
    run = wandb.init(
        mode="offline", dir=str(folder), project=config.get("experiment", "jaxpt"), group=config.get("stage"),
        name=name, id=digest([name, config])[:16], config=store.jsonable(config), reinit="create_new",
        settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
    )

    def close() -> None:
        run.finish()
        if wandb.run is None:  # else the caller has a run of its own open, which needs the service
            wandb.teardown()

    return Tracker(lambda step, values: run.log(dict(values), step=step), close)


KINDS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "none": _none, "tensorboard": _tensorboard, "wandb": _wandb,
}


def choose(kinds: Sequence[str]) -> list[str]:
    """The kinds that write something, each once; UserError where one is unknown or its package is missing."""
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"--track {kind!r} is unknown: {expected(kind, KINDS)}")
        package = PACKAGES.get(kind)
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(f"--track {kind}: the package {package} is not installed; "
                            f"pip install 'jaxpt[{kind}]' installs it")
    return [kind for kind in dict.fromkeys(kinds) if kind != "none"]


def points(curves: Curves, stage: str, row: int) -> Iterator[tuple[int, dict[str, float]]]:
    """(step from 1 on, what was measured there) of one stage and row of the curves.

    NaN means not measured. Metrics of several numbers per step stay in curves.npz alone.
    """
    metrics = {name.removeprefix(f"{stage}/"): x[row] for name, x in curves.items()
               if name.startswith(f"{stage}/") and x.ndim == 2}
    for step, numbers in enumerate(zip(*metrics.values(), strict=True), start=1):
        values = {name: float(x) for name, x in zip(metrics, numbers, strict=True) if not math.isnan(x)}
        if values:
            yield step, values


def write(kind: str, folder: Path, curves: Curves, stages: Sequence[str], facts: Mapping[str, Any]) -> Path:
    """Writes folder/KIND, whole or not at all, in place of what an earlier run wrote there; returns it."""
    aside = folder / f"{kind}.unfinished"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        for stage in stages:
            for row, seed in enumerate(curves["seeds"].tolist()):
                config = {**facts, "stage": stage, "seed": seed}
                tracker = open_tracker(kind, aside, f"{stage}/seed{seed}", config)
                try:
                    for step, values in points(curves, stage, row):
                        tracker.log(step, values)
                finally:
                    tracker.close()
        shutil.rmtree(folder / kind, ignore_errors=True)
        return aside.rename(folder / kind)
    except Exception as error:  # a tracker fails in ways of its own; the run's results are on disk by now
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"--track {kind}: {text}; the run is finished and kept: run the same command with "
                        "--resume to track it") from error
