"""One experiment, start to report."""

import contextlib
import dataclasses
import shlex
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxpt
from jaxpt.lab import identity, launch, merge, pool, programs, store, trackers
from jaxpt.lab.compiling import cache_folder
from jaxpt.lab.errors import RunFailed, UserError, expected
from jaxpt.lab.experiment import Experiment, Loaded, Stage, Tier, asked, load, topological
from jaxpt.lab.report import TUNING_SEEDS, report, warnings


class RunResult(NamedTuple):
    folder: Path
    claims: list[dict[str, Any]]  # as in claims.json
    curves: dict[str, np.ndarray]
    report: Path
    figure: Path
    warnings: list[str]  # sentences that a reader of the verdicts must know
    tracked: Sequence[Path] = ()  # what trackers wrote


class Plan(NamedTuple):
    """A run before it touches the disk."""

    loaded: Loaded
    config: Any
    stages: list[Stage]  # in topological order
    inputs: dict[str, np.ndarray]
    executor: pool.Executor
    seeds: list[int]
    folder: Path
    record: dict[str, Any]  # config.json without the history of its runs
    command: str

    @property
    def chunks(self) -> dict[str, int]:
        return {s.name: len(store.chunk_bounds(s.steps, s.chunk)) for s in self.stages}


def run(name: str, tier: str = "cpu", seeds: int | None = None, seed0: int = 0, out: str | Path = "runs",
        resume: bool = False, overrides: Mapping[str, Any] | None = None, launcher: str = "local",
        address: str | None = None, track: Sequence[str] = (),
        on_progress: Callable[[pool.Message], None] = lambda message: None) -> RunResult:
    """Runs experiment `name` (or path/to/file.py) on seeds seed0, ..., seed0 + seeds - 1 and reports.

    overrides: fields of the experiment's Config. launcher, address: as in lab.launch. track: kinds of lab.trackers.
    on_progress receives
    {"kind": "inputs"} before inputs are read, {"kind": "plan", steps, ...} once, then "progress" and "done"
    messages of workers. A resumed run reports on the seeds that were ever asked for here and are finished.
    Errors: UserError for bad input, RunFailed where the experiment's own code fails.
    """
    started = time.perf_counter()
    kinds = trackers.choose(track)
    launch.check(launcher, address)
    plan = make_plan(name, tier, seeds, seed0, out, overrides or {}, on_progress)
    must_agree = identity.must_agree(plan.loaded.path)
    with store.locked(plan.folder):
        earlier = store.read_config(plan.folder)
        store.check_resumable(plan.folder, earlier, must_agree, resume)
        history = earlier["runs"] if earlier else []
        record = (earlier or plan.record) | {"must_agree": must_agree}
        record["runs"] = history + [_entry(plan, finished=False)]
        asked = _one_side({seed for entry in record["runs"] for seed in entry["seeds"]})
        store.write_json(plan.folder / "config.json", record)
        (plan.folder / "report.md").unlink(missing_ok=True)  # its seeds are about to be others
        if earlier is None or not (plan.folder / "inputs.npz").exists():
            store.write_inputs(plan.folder, plan.inputs)
        with _blame(plan.folder):
            _compute(plan, must_agree, launcher, address, on_progress)
        finished = [s for s in sorted(asked) if store.complete(plan.folder, plan.chunks, s)]
        record["runs"][-1] = _entry(plan, finished=True) | {"seeds": finished}
        store.write_json(plan.folder / "config.json", record)  # a look at the claims is on record before it is taken
        with _blame(plan.folder):
            result = _publish(plan, record, finished)
        record["runs"][-1]["seconds"] = round(time.perf_counter() - started, 1)  # of this entry alone
        store.write_json(plan.folder / "config.json", record)
        facts = {name: record[name] for name in ("experiment", "tier", "config")} | {"run": plan.folder.name}
        stages = [stage.name for stage in plan.stages]
        tracked = [trackers.write(kind, plan.folder, result.curves, stages, facts) for kind in kinds]
        return result._replace(tracked=tracked)


def make_plan(name: str, tier: str, seeds: int | None, seed0: int, out: str | Path,
              overrides: Mapping[str, Any], on_progress: Callable[[pool.Message], None]) -> Plan:
    loaded = load(name)
    chosen = _tier(loaded.experiment, tier)
    numbers = _seeds(chosen.seeds if seeds is None else seeds, seed0)
    config = configure(chosen.config, overrides)
    experiment = asked(loaded.experiment, config)
    store.make_folder(Path(out))
    if experiment.inputs is not None:
        on_progress({"kind": "inputs", "experiment": loaded.name})
    inputs = _inputs(experiment, config)
    stages = _stages(experiment, config, inputs)
    executor = pool.executor(experiment.threads, optimised=tier != "smoke")  # a smoke run is mostly compilation
    _check_claims(experiment)
    claims = identity.claim_records(experiment.claims)
    same_run = {
        "config": config, "tier": tier, "executor": executor._asdict(),
        "stages": identity.stage_identities(stages),
        "claims_hash": identity.digest(claims), "inputs_hash": identity.hash_arrays(inputs),
    }
    record = {
        "experiment": loaded.name, **same_run, "config": identity.canonical(dataclasses.asdict(config)),
        "claims": claims, "versions": identity.versions(), "git": identity.git_revision(loaded.path.parent),
    }
    folder = Path(out) / loaded.name / identity.digest(same_run)[:12]
    command = _command(name, tier, numbers, out, flags(config, chosen.config))
    return Plan(loaded._replace(experiment=experiment), config, stages, inputs, executor, numbers, folder, record, command)


def _check_claims(experiment: Experiment) -> None:
    names = [claim.name for claim in experiment.claims]
    if len(set(names)) != len(names):
        raise UserError(f"claims {names}: each needs a name of its own")
    for claim in experiment.claims:
        if not 0 < claim.margin < float("inf"):
            raise UserError(f"claim {claim.name!r}: margin {claim.margin} must be a number above 0")


def _tier(experiment: Experiment, tier: str) -> Tier:
    if tier not in experiment.tiers:
        raise UserError(f"--tier {tier!r} is unknown: {expected(tier, experiment.tiers)}")
    return experiment.tiers[tier]


def _seeds(count: int, first: int) -> list[int]:
    for argument, value, least in (("--seeds", count, 1), ("--seed0", first, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"{argument} {value}: a whole number of at least {least} is expected")
    if first < TUNING_SEEDS < first + count:
        raise UserError(f"--seed0 {first} --seeds {count}: seeds from {TUNING_SEEDS} on are for tuning; a range "
                        f"on one side of {TUNING_SEEDS} is expected")
    return list(range(first, first + count))


def _one_side(seeds: set[int]) -> set[int]:
    if min(seeds) < TUNING_SEEDS <= max(seeds):
        raise UserError(f"--seed0: this folder would hold seeds on both sides of {TUNING_SEEDS}, from where on they "
                        "are for tuning; choose another --out")
    return seeds


def configure(config: Any, overrides: Mapping[str, Any]) -> Any:
    """The tier's config with fields replaced; the config's own ValueError becomes a UserError."""
    fields = [f.name for f in dataclasses.fields(config)]
    for name in overrides:
        if name not in fields:
            raise UserError(f"--{name} is not a field of this experiment: {expected(name, fields)}")
    try:
        return dataclasses.replace(config, **overrides)
    except ValueError as error:
        raise UserError(str(error)) from error


def _inputs(experiment: Experiment, config: Any) -> dict[str, np.ndarray]:
    try:
        inputs = {} if experiment.inputs is None else experiment.inputs(config)
    except OSError as error:
        raise UserError(f"the experiment's inputs cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    inputs = {name: np.asarray(x) for name, x in inputs.items()}
    if any(x.dtype.hasobject for x in inputs.values()):
        raise UserError("the experiment's inputs must be arrays of numbers or strings")
    return inputs


def _stages(experiment: Experiment, config: Any, inputs: Mapping[str, np.ndarray]) -> list[Stage]:
    try:
        return topological(experiment.stages(config, inputs))
    except (ValueError, ZeroDivisionError, IndexError) as error:
        raise UserError(f"the experiment cannot be laid out: {error}") from error


def flags(config: Any, default: Any, prefix: str = "--") -> list[str]:
    """The command-line flags that turn `default` into `config`."""
    words: list[str] = []
    for f in dataclasses.fields(config):
        value, before, word = getattr(config, f.name), getattr(default, f.name), f.name.replace("_", "-")
        if value == before:
            continue
        if dataclasses.is_dataclass(value) and type(value) is type(before):
            words += flags(value, before, f"{prefix}{word}.")
        elif isinstance(value, bool):
            words.append(f"{prefix}{word}" if value else f"{prefix}no-{word}")
        else:
            words += [prefix + word, *map(str, value if isinstance(value, (tuple, list)) else [value])]
    return words


def _command(name: str, tier: str, seeds: Sequence[int], out: str | Path, fields: Sequence[str]) -> str:
    words = ["jaxpt", "run", name, "--tier", tier, "--seeds", str(len(seeds))]
    words += ["--seed0", str(seeds[0])] if seeds[0] else []
    words += ["--out", str(out)] if str(out) != "runs" else []
    return shlex.join([*words, *fields])


def _entry(plan: Plan, finished: bool) -> dict[str, Any]:
    return {"command": plan.command, "seeds": plan.seeds, "finished": finished}


def _compute(plan: Plan, must_agree: Mapping[str, str], launcher: str, address: str | None,
             on_progress: Callable[[pool.Message], None]) -> None:
    missing = [s for s in plan.seeds if not store.complete(plan.folder, plan.chunks, s)]
    on_progress({
        "kind": "plan", "folder": plan.folder, "seeds": missing, "executor": plan.executor,
        "steps": {s.name: s.steps for s in plan.stages},
        "workers": pool.workers(plan.executor, len(missing)) if launcher == "local" else launcher,
    })
    if missing:
        def listen(message: pool.Message) -> None:
            if message["kind"] == "metrics":
                merge.rehearse(plan.loaded.experiment, plan.config, plan.stages, len(plan.seeds),
                               plan.inputs, message["shapes"])
            else:
                on_progress(message)

        # A file of somebody's own may import others, whose changes nobody would see: its programs are not kept.
        cache = None if plan.loaded.reference.endswith(".py") else cache_folder()
        place = programs.place(cache, plan.folder, {**must_agree, **plan.executor._asdict()})
        setup = pool.setup_of(plan.folder, plan.loaded.reference, plan.config, plan.executor, place)
        if launcher == "local":
            pool.compute(setup, plan.executor, missing, listen)
        else:
            work = launch.work_of(setup, plan.executor, must_agree)
            launch.compute(work, launcher, address, plan.stages, missing, listen)


@contextlib.contextmanager
def _blame(folder: Path) -> Iterator[None]:
    """Errors of the experiment's own functions become RunFailed, with the traceback in error.txt."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        store.write(folder / "error.txt", lambda f: f.write(traceback.format_exc().encode()))
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunFailed(f"{text} (traceback in {folder / 'error.txt'})") from error


def _publish(plan: Plan, record: Mapping[str, Any], seeds: Sequence[int]) -> RunResult:
    """Merges and writes everything that is derived; report.md last, whose presence means finished."""
    from jaxpt.lab.figure import figure  # matplotlib takes a second to import

    folder, experiment = plan.folder, plan.loaded.experiment
    chunks = merge.read_chunks(folder, plan.stages, seeds)
    curves = merge.curves(chunks, plan.stages, seeds, plan.inputs)
    curves |= merge.derive(experiment, plan.config, curves)
    claims = merge.decide_claims(experiment.claims, curves)
    seconds = sum(chunk.seconds for rows in chunks.values() for chunk in rows)
    footer = f"{record['runs'][-1]['command']}   jaxpt {jaxpt.__version__}, {folder.name}"
    question = " ".join(plan.loaded.doc.split("\n\n")[0].split()) or plan.loaded.name
    sections = experiment.sections(plan.config, curves) if experiment.sections else ""
    text = report(plan.loaded.name, plan.loaded.doc, record, claims, curves, plan.stages, seconds, sections)
    image = figure(experiment.panels, curves, question, footer)
    store.write_arrays(folder / "curves.npz", curves)
    store.write(folder / "metrics.jsonl", lambda f: f.write(merge.metric_lines(chunks).encode()))
    store.write_json(folder / "claims.json", claims)
    store.write(folder / "figure.png", lambda f: f.write(image))
    store.write(folder / "report.md", lambda f: f.write(text.encode()))
    (folder / "error.txt").unlink(missing_ok=True)
    shutil.rmtree(folder / store.COMPILING, ignore_errors=True)
    return RunResult(folder, claims, dict(curves), folder / "report.md", folder / "figure.png",
                     warnings(claims, record["runs"]))
