"""What an experiment is: stages that run per seed, claims that are tested, panels that are drawn.

An experiment file (experiments/NAME.py) has a docstring (question, source, command, expected result,
minutes) and one EXPERIMENT = Experiment(...). Everything here is data; `lab.run` executes it.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpt.lab import catalogue
from jaxpt.lab.errors import UserError, expected
from jaxpt.train.program import Program

Curves = Mapping[str, np.ndarray]  # "stage/metric" -> [seeds, steps, ...]; "inputs/name" -> as given


@dataclass(frozen=True)
class Stage:
    """`steps` steps of `make(config)`, begun from the parameters that stage `after` ended with (a tuple of them where
    `after` names several, as a student and its teacher).

    `config` is a frozen dataclass of plain values: with make's name, steps, hyper and the parent's key it
    identifies the stage, which is computed once per seed. `hyper` overrides the program's numbers.
    Its key is fold_in(key(seed), crc32(stream or name)): arms that name one stream see the same draws.
    """

    name: str
    make: Callable[[Any], Program]
    config: Any
    steps: int
    after: str | tuple[str, ...] | None = None
    hyper: Mapping[str, float] = field(default_factory=dict)
    chunk: int = 20  # steps per compiled call: progress, checkpoints and resume happen between chunks
    stream: str | None = None  # the stage's stream of randomness, its name by default


@dataclass(frozen=True)
class Claim:
    """H: the mean of `estimand` over paired units exceeds `margin` (one-sided paired t-test).

    `estimand(curves)` gives one number per unit (seed, held-out document). `control(curves)` gives the
    same quantity in a setting of the same code in which the claim must come out refuted.
    """

    name: str
    statement: str
    estimand: Callable[[Curves], np.ndarray]  # -> [n]
    margin: float  # > 0, in the units of the estimand; the smallest effect that matters
    control_name: str  # the control in words
    control: Callable[[Curves], np.ndarray]  # -> [n]
    unit: str = "seed"


@dataclass(frozen=True)
class Panel:
    """One axes of the figure: a line per series, mean over seeds with a 95% band."""

    title: str
    series: Mapping[str, str]  # label -> "stage/metric"
    ylabel: str
    xlabel: str = "step"
    x: Mapping[str, str] | None = None  # label -> "stage/metric" used as abscissa instead of the step


def per_arm(metric: str, arms: Mapping[str, str]) -> dict[str, str]:
    """The series of a panel: label -> "arm/metric", from label -> arm."""
    return {label: f"{arm}/{metric}" for label, arm in arms.items()}


@dataclass(frozen=True)
class Tier:
    config: Any  # an instance of the experiment's Config
    seeds: int


@dataclass(frozen=True)
class Experiment:
    """tiers has the keys smoke, cpu, full; their configs are instances of one frozen dataclass.

    claims and panels may be functions of the config, where runs of one file ask different questions: `asked` calls them.
    """

    tiers: Mapping[str, Tier]
    stages: Callable[[Any, Mapping[str, np.ndarray]], Sequence[Stage]]  # (config, inputs) -> DAG
    claims: Sequence[Claim] | Callable[[Any], Sequence[Claim]]
    panels: Sequence[Panel] | Callable[[Any], Sequence[Panel]]
    inputs: Callable[[Any], Mapping[str, np.ndarray]] | None = None  # reads files, once, in the parent
    sections: Callable[[Any, Curves], str] | None = None  # further markdown for the report
    derived: Callable[[Any, Curves], Curves] | None = None  # name -> [seeds, points]; panels know it as "derived/name"
    # What scripts/tune.py chooses, one table after another: field -> (values, "stage/metric" to maximise). Fields of
    # one table do not influence each other's metrics and are swept together.
    sweep: Sequence[Mapping[str, tuple[Sequence[Any], str]]] = ()
    threads: int = 1  # threads of the process that runs one seed, part of the run's identity


def asked(experiment: Experiment, config: Any) -> Experiment:
    """The experiment with the claims and panels of this config."""
    of = lambda x: x(config) if callable(x) else x  # noqa: E731
    return replace(experiment, claims=of(experiment.claims), panels=of(experiment.panels))


class Loaded(NamedTuple):
    name: str
    reference: str  # what load() finds it by from anywhere
    path: Path
    doc: str
    experiment: Experiment


def load(name: str) -> Loaded:
    """The experiment called `name` (a file of jaxpt.experiments) or in the file `name` (path/to/file.py)."""
    entry = catalogue.find(name)
    try:
        from_file = name.endswith(".py")
        module = _import_file(entry) if from_file else importlib.import_module(f"jaxpt.experiments.{name}")
    except Exception as error:
        raise UserError(f"experiment {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise UserError(f"experiment {name!r} has no EXPERIMENT = Experiment(...)")
    reference = str(entry.path) if from_file else name
    return Loaded(entry.name, reference, entry.path, entry.doc, experiment)


def _import_file(entry: catalogue.Entry) -> Any:
    module_name = f"jaxpt_file_{entry.name}"
    known = sys.modules.get(module_name)
    if known is not None and known.__file__ == str(entry.path):
        return known
    spec = importlib.util.spec_from_file_location(module_name, entry.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look classes up by module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def begun(stage: Stage, known: Mapping[str | None, Any]) -> Any:
    """What is known of the stage that it comes after; a tuple where there are several. known[None]: of none."""
    return tuple(known[name] for name in stage.after) if isinstance(stage.after, tuple) else known[stage.after]


def lineage(stages: Sequence[Stage], name: str) -> list[Stage]:
    """The stage `name` and all that it comes after, itself last; stages in topological order."""
    wanted = {name}
    for stage in reversed(stages):
        if stage.name in wanted:
            wanted |= set(stage.after) if isinstance(stage.after, tuple) else {stage.after}
    return [stage for stage in stages if stage.name in wanted]


def topological(stages: Sequence[Stage]) -> list[Stage]:
    """Parents before children; UserError where the stages are not a forest with plain, unique names."""
    by_name = {stage.name: stage for stage in stages}
    parents = {s.name: set(s.after) if isinstance(s.after, tuple) else {s.after} for s in stages}
    if not stages or len(by_name) != len(stages):
        raise UserError("an experiment needs at least one stage, and each stage a name of its own")
    for stage in stages:
        who = f"stage {stage.name!r}"
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", stage.name) or stage.name == "inputs":
            raise UserError(f"{who}: a name is letters, digits, '_', '-', '.', and not 'inputs'")
        if stage.steps < 1 or stage.chunk < 1:
            raise UserError(f"{who}: steps {stage.steps} and chunk {stage.chunk} must be at least 1")
        for parent in parents[stage.name] - {None} - set(by_name):
            raise UserError(f"{who} comes after {parent!r}: {expected(parent, by_name)}")
    ordered: list[Stage] = []
    done: set[str | None] = {None}
    while len(ordered) < len(stages):
        ready = [s for s in stages if s.name not in done and parents[s.name] <= done]
        if not ready:
            raise UserError(f"stages {sorted(set(by_name) - done)} come after each other in a circle")
        ordered += ready
        done |= {s.name for s in ready}
    return ordered
