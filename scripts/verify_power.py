#!/usr/bin/env python
"""Do the verifier's laws, which know no formula, see faults that nobody has shown them?

Command: .venv/bin/python scripts/verify_power.py --out FILE.jsonl [--count 20] [--seconds 600]

The faults are the changes of the objectives' sources that mutate.py sets aside: half of sites.draw(300, 0). Each is
executed in fresh modules, and the losses of the rows that reach it are checked under what the unchanged row claims, by
laws alone: nothing is compared with the table. A change that survives is compared with the original on corner inputs, and
left out of the share where the two agree; one that cannot be imported counts for nothing. The control: the unchanged
sources, row by row, of which no law may complain; rows of which one does are not used. It is no experiment of `jaxpt run`,
because it needs the modules of mutation/ and trains nothing. One line a change; a second run goes on where the first one
stopped. What is hoped for: 0.90, as specification-based tests of whole reinforcement learning are said to reach (Varshosaz
et al. 2023, Formal Specification and Testing for Reinforcement Learning, ICFP).
"""

import argparse
import importlib
import json
import time
from pathlib import Path

from mutate import entered
from mutation import corners, world
from mutation.sites import Site, draw, mutated
from mutation.world import World

HOPED = 0.90
EXAMPLES, SEED = 24, 1
ROWS = 3  # of those that reach a change, spread evenly: a fault that all of them have is seen in few


def targets(base: World) -> list[tuple[str, str]]:
    """(row, family) of our own rows that have a family of the verifier's."""
    table, families_of = base.rows(), base.get("jaxpt.verify.rows").families_of
    return [(name, families_of(row)[0]) for name, row in table.items()
            if "." not in name and not row.alias_of and row.family != "length_shaping" and families_of(row)]


def broken(where: World, name: str, family: str, claims: tuple[str, ...]) -> list[str]:
    """Laws that the row breaks there; an exception is a finding too."""
    with where.inside():
        rows, verify = (importlib.import_module(f"jaxpt.verify{part}") for part in (".rows", ""))
        table = importlib.import_module("jaxpt.objectives").ROWS
        try:
            fn = rows.function(table[name], family)
            report = verify.check(fn, family, claim=claims, framework="jax", examples=EXAMPLES, seed=SEED)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"[:120]]
        return list(report.broken)


def judged(site: Site, base: World, rows: list[tuple[str, str]], claims: dict) -> dict:
    began = time.process_time()
    other, laws, verdict = World(site.file, mutated(site)), [], "survived"
    try:
        other.get("jaxpt.objectives")
    except Exception as error:  # seen without any law: no credit
        return {"id": site.id, "verdict": "import", "laws": [f"{type(error).__name__}: {error}"[:120]], "rows": len(rows)}
    for name, family in rows[:: max(len(rows) // ROWS, 1)][:ROWS]:
        if laws := broken(other, name, family, claims[name]):
            verdict = "killed"
            break
    if verdict == "survived":
        names = frozenset(name for name, _ in rows)
        verdict = "equivalent" if corners.compared(base, other, names).startswith("agree") else verdict
    return {"id": site.id, "verdict": verdict, "laws": laws, "rows": len(rows),
        "cpu_s": round(time.process_time() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20, help="changes, spread over the files")
    parser.add_argument("--seconds", type=float, default=600, help="CPU-seconds after which no further change is begun")
    args = parser.parse_args()
    world.start()
    base = World()
    known = targets(base)
    aside = [site for site, apart in draw(300, 0) if apart and site.function]
    chosen = aside[:: max(len(aside) // args.count, 1)][: args.count]
    done = {r["id"]: r for r in map(json.loads, args.out.read_text().splitlines())} if args.out.exists() else {}
    enters, control, claims = {name: entered(base, name) for name, _ in known}, {}, {}
    for site in chosen:
        if site.id in done or time.process_time() > args.seconds:
            continue
        rows = [(name, family) for name, family in known if f"{site.file}:{site.function}" in enters[name]]
        for name, family in rows[:: max(len(rows) // ROWS, 1)][:ROWS]:
            if name not in control:
                with base.inside():  # claims are looked up in the table
                    claims[name] = importlib.import_module("jaxpt.verify.rows").claims_of(name, family)
                control[name] = broken(base, name, family, claims[name])
        rows = [(name, family) for name, family in rows if not control.get(name)]
        record = judged(site, base, rows, claims) if rows else {"id": site.id, "verdict": "no row", "laws": [], "rows": 0}
        done[site.id] = record
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{record['verdict']:<10} {site.id[:100]} | {', '.join(record['laws'][:3])}", flush=True)
    counted = [done[site.id] for site in chosen if site.id in done]
    verdicts = ("killed", "survived", "equivalent", "import", "no row")
    kinds = {verdict: sum(r["verdict"] == verdict for r in counted) for verdict in verdicts}
    share = kinds["killed"] / max(kinds["killed"] + kinds["survived"], 1)
    print(kinds, f"killed {share:.2f} of what is not equivalent, hoped for {HOPED:.2f}")
    print(f"control: {sum(map(bool, control.values()))} of {len(control)} unchanged rows break a law", control)


if __name__ == "__main__":
    main()
