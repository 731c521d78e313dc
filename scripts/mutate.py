#!/usr/bin/env python
"""Are the tests of the objectives able to fail? Changes of their sources, one at a time, each against the tests.

Command: .venv/bin/python scripts/mutate.py --out FILE.jsonl [--count 300] [--seed 0] [--only advantages.py]

All sites of a fixed set of operators (mutation/sites.py) are enumerated and a fixed sample of them is drawn. A change is
executed in fresh modules, in this process, and the tests that reach it run without compilation (mutation/numeric.py), cut
down to the rows that reach it, with few examples, until the first that fails. What survives is compared with the original
on 10,000 corner inputs (mutation/corners.py): where they agree it counts as equivalent, where they differ the tests get as
many examples as usual, for some minutes. Half of the sample is marked as set aside: no law of a generic verifier may be
written by looking at it. One line a change goes to FILE; a second run goes on where the first one stopped, unless the
sources have changed.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from mutation import corners, world
from mutation.sites import ROOT, Site, digest, draw, files, mutated
from mutation.world import HELPERS, TESTS, Case, World, cases, failure

SLOW = 8.0  # CPU-seconds of a test from which on it comes last
MANY = 180.0  # CPU-seconds after which a change has survived many examples


def sources() -> str:
    """Of all that a verdict depends on."""
    tests = [ROOT / "tests" / f"{name}.py" for name in (*TESTS, *HELPERS)]
    return digest(*(ROOT / name for name in files()), *(ROOT / "jaxpt/ops").glob("*.py"), ROOT / "jaxpt/types.py", *tests)


class Reached:
    """Which functions of the changed files are entered: {file:line}."""

    def __init__(self):
        self.entered: set[str] = set()
        self.root = str(ROOT) + "/"

    def __call__(self, frame, event, arg):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(self.root):
            self.entered.add(f"{file.removeprefix(self.root)}:{frame.f_code.co_firstlineno}")

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


def baseline(base: World, file: Path) -> dict:
    """Of the unchanged sources: tests with their CPU-seconds, those that fail here, and who reaches which function."""
    known = {"sources": sources(), "tests": {}, "broken": {}, "modules": {}, "rows": {}}
    if file.exists() and (before := json.loads(file.read_text()))["sources"] == known["sources"]:
        known = before
    for module in [name for name in TESTS if name not in known["tests"]]:
        seconds = {}
        with Reached() as reached:
            for case in cases(base, module):
                began = time.process_time()
                if said := failure(base, case):
                    known["broken"][str(case)] = said
                seconds[str(case)] = round(time.process_time() - began, 2)
        known["tests"][module], known["modules"][module] = seconds, sorted(reached.entered)
        file.write_text(json.dumps(known))
        print(f"{module}: {sum(seconds.values()):.1f} s", flush=True)
    for module in TESTS:
        base.get(module)
    for name, row in base.rows().items():
        if name not in known["rows"] and "." not in name:
            with Reached() as reached:
                corners.traced(base, row)
            known["rows"][name] = sorted(reached.entered)
    file.write_text(json.dumps(known))
    return known


def rows_of(site: Site, base: World, other: World, known: dict) -> frozenset[str] | None:
    """The rows that the change can move; None: not known."""
    if site.function:
        found = [name for name, entered in known["rows"].items() if f"{site.file}:{site.function}" in entered]
    else:
        before, after = (w.get("jaxpt.objectives").ROWS for w in (base, other))
        said = lambda row: [str(x) for x in row if not callable(x)]  # noqa: E731
        found = [name for name, row in before.items() if name not in after or said(row) != said(after[name])]
    return frozenset(found) or None


def killer(
    site: Site, base: World, known: dict, verdicts: dict, profile: str
) -> tuple[str, str, frozenset[str] | None]:
    """(test, what it says, rows) of the first test that the change makes fail; ("", "", rows) where there is none."""
    from hypothesis import settings

    other = World(site.file, mutated(site))
    try:
        other.get("jaxpt.objectives")
        rows = rows_of(site, base, other, known)
    except Exception as error:
        return "import", f"{type(error).__name__}: {error}"[:120], None
    at = f"{site.file}:{site.function}"
    reached = [name for name in TESTS if not site.function or at in known["modules"][name]]
    cost = {module: sum(known["tests"][module].values()) for module in reached}
    settings.load_profile(profile)
    began, waiting = time.process_time(), []
    for module in sorted(reached, key=cost.get):
        if profile == "many" and time.process_time() - began > MANY:
            break
        try:
            listed = cases(other, module)
        except Exception as error:
            return module, f"{type(error).__name__}: {error}"[:120], rows
        for case in listed:
            of_rows = {x for _, x in case.arguments if isinstance(x, str)} & {*known["names"]}
            if str(case) in known["broken"] or rows and of_rows and not of_rows & rows:
                continue
            if known["tests"][module].get(str(case), 0) > SLOW:
                waiting.append(case)
            elif said := failure(other, case, rows, known["names"]):
                if rows is None or on_original(case, base, rows, known, verdicts) == "":
                    return str(case), said, rows
                waiting.append(case)
    for case in waiting if profile == "few" else ():
        if said := failure(other, case):
            return str(case), said, rows
    return "", "", rows


def on_original(case: Case, base: World, rows: frozenset, known: dict, verdicts: dict) -> str:
    """What the test says where nothing is changed, cut down to `rows`: some need more rows, and are then run whole."""
    key = str(case), rows
    if key not in verdicts:
        verdicts[key] = failure(base, case, rows, known["names"])
    return verdicts[key]


def table(records: list[dict]) -> str:
    """Killed and survived, by operator; then the survivors."""
    lines = [f"{'operator':<12}{'killed':>8}{'survived':>10}{'equivalent':>12}"]
    counts = Counter((r["operator"], r["verdict"]) for r in records)
    for operator in [*sorted({r["operator"] for r in records}), "all"]:
        of = lambda verdict: sum(n for (o, v), n in counts.items() if v == verdict and operator in (o, "all"))  # noqa: E731, B023
        lines.append(f"{operator:<12}{of('killed'):>8}{of('survived'):>10}{of('equivalent'):>12}")
    judged = [r for r in records if r["verdict"] != "equivalent"]
    killed = sum(r["verdict"] == "killed" for r in records)
    seconds = sum(r["cpu_s"] for r in records) / max(len(records), 1)
    lines.append(f"{killed / max(len(judged), 1):.1%} killed of what is not equivalent; {seconds:.1f} CPU-s a change")
    for r in records:
        if r["verdict"] != "killed":
            lines.append(f"{r['verdict']}: {r['id']}\n    {r['corners']}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of a file's name")
    args = parser.parse_args()
    world.start()
    from hypothesis import settings

    settings.load_profile("few")
    base = World()
    known = baseline(base, args.out.with_suffix(".baseline.json"))
    known["names"] = sorted(base.rows())
    for case, said in known["broken"].items():
        print(f"not used, fails here on the original: {case}: {said}")
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {r["id"]: r for r in done if r["sources"] == known["sources"]}
    verdicts, drawn = {}, draw(args.count, args.seed, args.only)
    for k, (site, aside) in enumerate(drawn):
        if site.id in done:
            continue
        began = time.process_time()
        test, said, rows = killer(site, base, known, verdicts, "few")
        compared = "" if test else corners.compared(base, World(site.file, mutated(site)), rows)
        if not test and not compared.startswith("agree"):
            test, said, rows = killer(site, base, known, verdicts, "many")
        record = {
            "id": site.id, "file": site.file, "line": site.line, "operator": site.operator, "set_aside": aside,
            "verdict": "killed" if test else "equivalent" if compared.startswith("agree") else "survived", "test": test, "said": said,
            "rows": len(rows or ()), "corners": compared, "cpu_s": round(time.process_time() - began, 2), "sources": known["sources"],
        }
        done[site.id] = record
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{k + 1}/{len(drawn)} {record['cpu_s']:>6.1f} s {record['verdict']:<10} {site.id[:110]} | {test}", flush=True)
    print(table([done[site.id] for site, _ in drawn]))


if __name__ == "__main__":
    main()
