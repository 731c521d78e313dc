"""`jaxpt run NAME`: an experiment with live progress, then its claims."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpt.cli.fields import print_fields, read_fields
from jaxpt.cli.options import Option, help_text, names, split, whole
from jaxpt.lab.errors import UserError, expected

OPTIONS = {
    "--tier": Option(str, "cpu", "smoke (a minute or two), cpu (the default), full (too much for a laptop)"),
    "--seeds": Option(whole, None, "how many seeds; the tier's number by default"),
    "--seed0": Option(whole, 0, "the first seed (0); seeds from 10000 on are for tuning"),
    "--out": Option(str, "runs", "the folder of run folders (runs)"),
    "--resume": Option(None, False, "go on with an unfinished run, or add seeds to a finished one"),
    "--track": Option(names, (), "tensorboard, wandb (offline) or both, by comma: kept in the run folder"),
    "--launcher": Option(str, "local", "where stages and seeds are computed: local (this machine), ray or slurm"),
    "--address": Option(str, None, "ray: of its cluster (RAY_ADDRESS, or one of this machine alone); slurm: local, to try it"),
    "--help": Option(None, False, "this text; with NAME also the experiment's own fields"),
}
USAGE = "jaxpt run NAME [options] [--field value ...]"
WHAT = ("Runs one experiment (a name from `jaxpt list`, or path/to/file.py) and ends with its claims.\n"
        "The folder OUT/NAME/<hash>/ holds report.md, figure.png, curves.npz, claims.json and config.json.")


def run_command(words: Sequence[str]) -> int:
    if words[:1] == ["finetune"]:
        from jaxpt.cli.finetune import finetune_command

        return finetune_command(words[1:])
    values, fields = split(["--help" if word == "-h" else word for word in words], OPTIONS)
    name = fields.pop(0) if fields and not fields[0].startswith("-") else None
    if values.pop("--help"):
        print(help_text(USAGE, WHAT, OPTIONS))
        if name is not None:
            _print_fields(name, values["--tier"])
        return 0
    if name is None:
        raise UserError(f"NAME is missing: {USAGE} is expected; `jaxpt list` shows the names")
    from jaxpt.lab import catalogue

    catalogue.find(name)  # a misspelt name is answered before jax is imported
    from jaxpt.lab.run import run

    overrides = _overrides(name, values["--tier"], fields) if fields else {}
    with progress() as on_progress:
        result = run(name, overrides=overrides, on_progress=on_progress,
                     **{option.lstrip("-"): value for option, value in values.items()})
    _print_result(result)
    return 0


def _config(name: str, tier: str) -> Any:
    from jaxpt.lab.experiment import load

    tiers = load(name).experiment.tiers
    if tier not in tiers:
        raise UserError(f"--tier {tier!r} is unknown: {expected(tier, tiers)}")
    return tiers[tier].config


def _print_fields(name: str, tier: str) -> None:
    config = _config(name, tier)
    print(f"\nFields of {name} with the values of tier {tier}:\n", flush=True)
    print_fields(config, f"jaxpt run {name}")


def _overrides(name: str, tier: str, words: list[str]) -> dict[str, Any]:
    """Fields of the experiment's Config that the words change."""
    return read_fields(_config(name, tier), words, OPTIONS)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """What to do with messages: a live bar on a terminal, a line every ten seconds elsewhere; on stderr."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
               TimeRemainingColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting workers", total=None)
        count = _Count()

        def show(message: dict[str, Any]) -> None:
            count(message)
            bar.update(task, total=count.total or None, completed=count.done, description=count.sentence)

        yield show


class _Count:
    """Steps done of all that are to do, and the newest message as a sentence."""

    def __init__(self) -> None:
        self.total, self.done, self.sentence = 0, 0, ""
        self.seen: dict[tuple[int, str], int] = {}

    def __call__(self, message: dict[str, Any]) -> None:
        if message["kind"] == "inputs":
            self.sentence = f"reading the inputs of {message['experiment']}"
        elif message["kind"] == "plan":
            self.steps = message["steps"]
            self.total = len(message["seeds"]) * sum(self.steps.values())
            many = f"seeds {len(message['seeds'])}, workers {message['workers']}"
            self.sentence = f"{many if message['seeds'] else 'nothing to compute'}, {message['folder']}"
        elif message["kind"] == "progress":
            seed, stage = message["seed"], message["stage"]
            self.seen[seed, stage] = message["steps"]
            numbers = [f"{k} {v:.4g}" for k, v in message["metrics"].items() if v == v][:3]
            place = f"seed {seed} {stage} {message['steps']}/{self.steps[stage]}"
            self.sentence = " ".join([place, *numbers])
        elif message["kind"] == "done":
            self.seen |= {(message["seed"], stage): steps for stage, steps in self.steps.items()}
        self.done = sum(self.seen.values())


class _Lines:
    """The first message and then one line every ten seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self.count, self.every, self.next = _Count(), every, 0.0

    def __call__(self, message: dict[str, Any]) -> None:
        self.count(message)
        if message["kind"] in ("inputs", "plan") or time.monotonic() >= self.next:
            self.next = time.monotonic() + self.every
            count = self.count
            steps = f"{count.done}/{count.total} steps, " if count.total else ""
            print(f"jaxpt: {steps}{count.sentence}", file=sys.stderr, flush=True)


def _print_result(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from jaxpt.lab.report import CLAIM_HEADER, claim_row

    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140)
    if result.claims:
        table = Table()
        for name in CLAIM_HEADER:
            table.add_column(name, overflow="fold", no_wrap=name in ("verdict", "estimate", "n"))
        for claim in result.claims:
            table.add_row(*claim_row(claim))
        console.print(table)
    else:
        console.print("this experiment makes no claims")
    for sentence in result.warnings:
        console.print(f"note: {sentence}", markup=False)
    print(f"report {result.report}\nfigure {result.figure}", flush=True)
    for path in result.tracked:
        print(f"tracked {path}", flush=True)
