#!/usr/bin/env python
"""The README's table of results, read from run folders: nothing in it is typed by hand.

Command: .venv/bin/python scripts/results.py [--runs runs runs-1000] [--tier cpu] [--write README.md]
Finished runs with the experiment's default fields count, and those with the fields that --fields names (as
--fields "--retries 3" "--variant visual"). One on seeds 0, 1, ... gives a row per claim; one of
the same configuration on seeds 1000, 1001, ..., which lives in another --out, is its replication. Of two runs
for one place the newer counts. Whatever is left out is named on stderr, with the reason.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpt.cli.options import split
from jaxpt.cli.run import OPTIONS
from jaxpt.lab import store
from jaxpt.lab.errors import UserError
from jaxpt.lab.markdown import table
from jaxpt.lab.report import interval, number, warnings

BEGIN, END = "<!-- results: made by scripts/results.py -->", "<!-- end of results -->"
REPLICATION = 1000  # the first seed of a replication
HEADER = ["command", "claim", "estimate", "95% interval", "n", "verdict (its control's)", "minutes",
          f"same side at `--seed0 {REPLICATION}`"]
LEGEND = (
    "A claim is that the mean exceeds the number behind `>`, its margin; n counts its units, seeds or "
    "held-out blocks. Minutes are wall time, the report included; `>=` where a part was killed, untimed. "
    f"The last column says whether the estimate on seeds from {REPLICATION} on, in brackets, lies on the "
    "same side of the margin."
)


class Run(NamedTuple):
    folder: Path
    name: str  # as the command names the experiment
    fields: tuple[str, ...]  # as the command has them
    config: dict[str, Any]  # config.json
    claims: list[dict[str, Any]]  # claims.json
    seeds: list[int]

    @property
    def written(self) -> float:
        return (self.folder / "report.md").stat().st_mtime

    @property
    def command(self) -> str:
        tier = self.config["tier"]
        words = ["jaxpt", "run", self.name, *(["--tier", tier] if tier != "cpu" else [])]
        return shlex.join([*words, *self.fields, "--seeds", str(len(self.seeds))])


def read(folder: Path, tier: str, counted: Sequence[tuple[str, ...]]) -> Run:
    """counted: the fields that a command may have. UserError says why the folder has no place in the table."""
    config = store.read_config(folder)
    if config is None or not config["runs"][-1]["finished"] or not (folder / "report.md").exists():
        raise UserError("unfinished")
    if config["tier"] != tier:
        raise UserError(f"tier {config['tier']}")
    last = config["runs"][-1]
    _, (name, *fields) = split(shlex.split(last["command"])[2:], OPTIONS)
    if tuple(fields) not in counted:
        raise UserError(f"fields of its own: {shlex.join(fields)}")
    first, seeds = last["seeds"][0], last["seeds"]
    if first not in (0, REPLICATION) or seeds != list(range(first, first + len(seeds))):
        raise UserError(f"seeds {', '.join(map(str, seeds))}")
    return Run(folder, name, tuple(fields), config, json.loads((folder / "claims.json").read_text()), seeds)


def collect(roots: list[Path], tier: str, counted: Sequence[tuple[str, ...]]
            ) -> tuple[list[tuple[Run, Run | None]], list[str]]:
    """([(run, its replication)] by name, [why a folder is left out])."""
    runs, left_out = [], []
    for root in roots:
        if not root.is_dir():
            raise UserError(f"--runs {root}: there is no such folder")
        for folder in sorted(path for path in root.glob("*/*") if path.is_dir()):
            try:
                runs.append(read(folder, tier, counted))
            except UserError as error:
                left_out.append(f"{folder}: {error}")
    originals: dict[tuple[str, ...], Run] = {}
    replications: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.written, reverse=True):
        place, key = (originals, (run.name, *run.fields)) if run.seeds[0] == 0 else (replications, run.folder.name)
        newer = place.setdefault(key, run)
        if newer is not run:
            left_out.append(f"{run.folder}: {newer.folder} is newer")
    pairs = [(run, replications.pop(run.folder.name, None)) for _, run in sorted(originals.items())]
    left_out += [f"{run.folder}: no run of this configuration on seeds from 0 on is in the table"
                 for run in replications.values()]
    return pairs, left_out


def minutes(history: list[dict[str, Any]]) -> str:
    known = [entry["seconds"] for entry in history if "seconds" in entry]
    if not known:
        return "n/a"
    return ("" if len(known) == len(history) else ">= ") + f"{sum(known) / 60:.1f}"


def same_side(claim: dict[str, Any], replication: Run | None) -> str:
    if replication is None:
        return "not run"
    (again,) = [other for other in replication.claims if other["name"] == claim["name"]]
    if claim["estimate"] is None or again["estimate"] is None:
        return "n/a"
    same = (claim["estimate"] > claim["margin"]) == (again["estimate"] > again["margin"])
    return f"{'yes' if same else 'no'} ({number(again['estimate'])})"


def rows(run: Run, replication: Run | None) -> list[list[str]]:
    made = [
        ["", f"{c['name']} > {number(c['margin'])}", number(c["estimate"]),
         interval([float("nan") if x is None else x for x in c["ci95"]]), str(c["n"]),
         f"{c['verdict']} ({c['control']['verdict']})", "", same_side(c, replication)]
        for c in run.claims
    ] or [["", "none", "", "", "", "", "", ""]]
    made[0][0], made[0][6] = f"`{run.command}`", minutes(run.config["runs"])
    return made


def origin(run: Run) -> str:
    versions, git = run.config["versions"], run.config["git"] or "no revision"
    revision = git[:11] + git[40:]  # 40 digits, and + where files differed from it
    return (f"jaxpt {versions['jaxpt']} at {revision}, jax {versions['jax']}, Python {versions['python']}, "
            f"on {run.config['executor']['kind']}")


def markdown(pairs: list[tuple[Run, Run | None]]) -> str:
    notes = [f"- `{run.command}`: {sentence}" for run, _ in pairs
             for sentence in warnings(run.claims, run.config["runs"])]
    origins = "; ".join(sorted({origin(run) for run, _ in pairs}))
    results = table(HEADER, [row for pair in pairs for row in rows(*pair)])
    parts = [results, "\n".join(notes), f"{LEGEND} Made with {origins}."]
    return "\n\n".join(filter(None, parts)) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=Path, nargs="+", default=[Path("runs")], help="their folders (runs)")
    parser.add_argument("--tier", default="cpu", help="the tier whose runs count (cpu)")
    parser.add_argument("--fields", nargs="+", default=[], help="further fields whose runs count, each like '--retries 3'")
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"the file in which {BEGIN} stands")
    args = parser.parse_args(argv)
    try:
        pairs, left_out = collect(args.runs, args.tier, [(), *(tuple(shlex.split(fields)) for fields in args.fields)])
        for sentence in left_out:
            print(f"left out {sentence}", file=sys.stderr)
        if not pairs:
            roots = " ".join(map(str, args.runs))
            raise UserError(f"--runs {roots}: no finished run of tier {args.tier} counts")
        text = markdown(pairs)
        if args.write is not None:
            store.write_between(args.write, BEGIN, END, text)
    except UserError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
