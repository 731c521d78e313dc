#!/usr/bin/env python
"""Are the tests of the objectives able to fail? Changes of their sources, one at a time, each against the tests.

Command: .venv/bin/python scripts/mutate.py --out FILE.jsonl [--count 300] [--seed 0] [--only advantages.py]

All sites of a fixed set of operators (mutation/sites.py) are enumerated and a fixed sample of them is drawn. A change is
executed in fresh modules, in one of a few processes, and the tests that reach it run without compilation
(mutation/numeric.py), cut down to the rows that reach it, with few examples, until the first that fails. What survives some
seconds of that is compared with the original on 10,000 corner inputs (mutation/corners.py): where they agree it counts as
equivalent, where they differ all tests that reach it run, then with as many examples as usual. Half of the sample is
marked as set aside: no law of a generic verifier may be written by looking at it. One line a change goes to FILE; a second
run goes on where the first one stopped; what survived is judged again when tests have changed, and all of it when the sources
have.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

from mutation import corners, world
from mutation.sites import ROOT, Site, digest, draw, files, mutated
from mutation.world import HELPERS, TESTS, Case, World, cases, failure

SLOW = 8.0  # CPU-seconds of a test from which on it comes last
SOON = 20.0  # CPU-seconds of tests before a change is compared with the original
MANY = 90.0  # CPU-seconds after which a change has survived many examples
FRESH = 25  # changes after which a worker starts anew: traces take memory
BASE: World  # of a worker
KNOWN: dict
VERDICTS: dict[tuple[str, frozenset], str] = {}


def sources() -> str:
    """Of what is changed, and of what it stands on."""
    return digest(*(ROOT / name for name in files()), *(ROOT / "jaxpt/ops").glob("*.py"), ROOT / "jaxpt/types.py")


def tests(*modules: str) -> str:
    """Of test modules; of all of them where none is named."""
    return digest(*(ROOT / "tests" / f"{name}.py" for name in (*(modules or TESTS), *HELPERS)))


def stands(record: dict) -> bool:
    """Whether the verdict still holds: one test's failure does whatever the others become, and agreement on corner inputs
    whatever tests there are."""
    if record["verdict"] == "equivalent":
        return record["sources"] == sources()
    by = [record["test"].split("::")[0]] if record["test"] != "import" else []
    return record["sources"] == sources() and record["tests"] == tests(*(by if record["verdict"] == "killed" else []))


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


def entered(base: World, name: str) -> list[str]:
    """The functions that a row's prepare, loss and gradient enter."""
    with Reached() as reached:
        corners.traced(base, base.rows()[name])
    return sorted(reached.entered)


def baseline(base: World, file: Path) -> dict:
    """Of the unchanged sources: tests with their CPU-seconds, those that fail here, and who reaches which function."""
    known = {"sources": sources(), "digests": {}, "tests": {}, "broken": {}, "modules": {}, "rows": {}}
    if file.exists() and (before := json.loads(file.read_text()))["sources"] == known["sources"]:
        known = before
    for module in [name for name in TESTS if known["digests"].get(name) != tests(name)]:
        known["broken"] = {case: said for case, said in known["broken"].items() if not case.startswith(f"{module}::")}
        seconds = {}
        with Reached() as reached:
            for case in cases(base, module):
                began = time.process_time()
                if said := failure(base, case):
                    known["broken"][str(case)] = said
                seconds[str(case)] = round(time.process_time() - began, 2)
        known["tests"][module], known["modules"][module] = seconds, sorted(reached.entered)
        known["digests"][module] = tests(module)
        file.write_text(json.dumps(known))
        print(f"{module}: {sum(seconds.values()):.1f} s", flush=True)
    for module in TESTS:
        base.get(module)
    for name in base.rows():
        if name not in known["rows"] and "." not in name:
            known["rows"][name] = entered(base, name)
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


def reaching(site: Site, other: World, known: dict, rows: frozenset[str] | None) -> Iterator[Case]:
    """The tests that reach the change, cheap modules first and the slow ones last."""
    at, waiting = f"{site.file}:{site.function}", []
    reached = [name for name in TESTS if not site.function or at in known["modules"][name]]
    for module in sorted(reached, key=lambda name: sum(known["tests"][name].values())):
        for case in cases(other, module):
            of_rows = {x for _, x in case.arguments if isinstance(x, str)} & {*known["names"]}
            if str(case) in known["broken"] or rows and of_rows and not of_rows & rows:
                continue
            if known["tests"][module].get(str(case), 0) > SLOW:
                waiting.append(case)
            else:
                yield case
    yield from waiting


def killer(listed: Iterator[Case], rows: frozenset[str] | None, other: World, profile: str, seconds: float) -> tuple[str, str]:
    """(test, what it says) of the first that the change makes fail; ("", "") where none does within the CPU-seconds. What is
    left of `listed` can be run later."""
    from hypothesis import settings

    settings.load_profile(profile)
    began = time.process_time()
    while time.process_time() - began < seconds:
        try:
            case = next(listed)
        except StopIteration:
            break
        except Exception as error:  # the tests cannot be imported
            return "import", f"{type(error).__name__}: {error}"[:120]
        said = failure(other, case, rows, KNOWN["names"])
        if said and rows is not None and on_original(case, rows):
            said = failure(other, case)
        if said:
            return str(case), said
    return "", ""


def on_original(case: Case, rows: frozenset) -> str:
    """What the test says where nothing is changed, cut down to `rows`: some need more rows, and are then run whole."""
    key = str(case), rows
    if key not in VERDICTS:
        VERDICTS[key] = failure(BASE, case, rows, KNOWN["names"])
    return VERDICTS[key]


def judge(drawn: tuple[Site, bool]) -> dict:
    """One change against the tests that reach it."""
    site, aside = drawn
    began, rows, compared = time.process_time(), None, ""
    other = World(site.file, mutated(site))
    try:
        other.get("jaxpt.objectives")
        rows = rows_of(site, BASE, other, KNOWN)
        test, said = "", ""
    except Exception as error:
        test, said = "import", f"{type(error).__name__}: {error}"[:120]
    if not test:
        listed = reaching(site, other, KNOWN, rows)
        test, said = killer(listed, rows, other, "few", SOON)
    if not test:
        compared = corners.compared(BASE, World(site.file, mutated(site)), rows)
    agree = compared.startswith("agree")
    if not test and not agree:
        test, said = killer(listed, rows, other, "few", math.inf)
    if not test and not agree:
        test, said = killer(reaching(site, other, KNOWN, rows), rows, other, "many", MANY)
    return {
        "id": site.id, "file": site.file, "line": site.line, "operator": site.operator, "set_aside": aside,
        "verdict": "killed" if test else "equivalent" if agree else "survived", "test": test, "said": said,
        "rows": len(rows or ()), "corners": compared, "cpu_s": round(time.process_time() - began, 2), "sources": KNOWN["sources"],
        "tests": tests(*([test.split("::")[0]] if "::" in test else [])),
    }


def ready(file: Path) -> list[str]:
    """Of a worker: the unchanged sources, and what is known of them. Tests that fail here on the original, in words."""
    global BASE, KNOWN
    world.start()
    from hypothesis import settings

    settings.load_profile("few")
    BASE = World()
    KNOWN = baseline(BASE, file)
    KNOWN["names"] = sorted(BASE.rows())
    return [f"not used, fails here on the original: {case}: {said}" for case, said in KNOWN["broken"].items()]


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
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    known = args.out.with_suffix(".baseline.json")
    spawned = get_context("spawn")  # jax's threads outlive no fork
    with spawned.Pool(1) as first:
        print(*first.apply(ready, (known,)), sep="\n")
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {r["id"]: r for r in done if stands(r)}
    drawn = draw(args.count, args.seed, args.only)
    left = [(site, aside) for site, aside in drawn if site.id not in done]
    with spawned.Pool(args.workers, ready, (known,), maxtasksperchild=FRESH) as workers:
        for record in workers.imap_unordered(judge, left):
            done[record["id"]] = record
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            said = f"{record['cpu_s']:>6.1f} s {record['verdict']:<10} {record['id'][:110]} | {record['test']}"
            print(f"{len(done)}/{len(drawn)} {said}", flush=True)
    print(table([done[site.id] for site, _ in drawn]))


if __name__ == "__main__":
    main()
