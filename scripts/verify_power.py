#!/usr/bin/env python
"""Do the verifier's laws, which know no formula, see faults that nobody has shown them?

Command: .venv/bin/python scripts/verify_power.py --out FILE.jsonl [--half aside] [--count 150] [--seconds 1800]

The faults are the changes of the objectives' sources that mutate.py draws, sites.draw(300, 0): the half that it sets
aside, or the other one (--half seen). Each is executed in fresh modules, and what it reaches (mutation/targets.py: rows,
and functions that have a family) is checked by laws alone: nothing is compared with the table or with the unchanged
function. Asked are the laws of mathematics, and the contracts that the row or the docstring states, those that the
unchanged function obeys on the same examples; so no law complains without a change. `killed by more`: by nothing that is
stated, but by another contract that the unchanged function obeys, so that somebody could have claimed it.

Which targets are asked, and in what order, is found by a comparison with the unchanged function, which has no say in the
verdict: those whose results move, the most direct first, at most TARGETS. Where none moves a change is `equivalent` if
rows that reach it agree on corner inputs too, else `unmoved` (a metric, say). `no family`: nothing that a family can ask
reaches it. `import`: the sources' own checks stop it.

The laws of AFTERWARDS were written when both halves' changes had been read, `mirror` and `zero_off_mask` when it was
known what survives of the half set aside: what is killed without these is told apart. It is no experiment of `jaxpt run`,
because it needs the modules of mutation/ and trains nothing. One line a change, in a fixed random order; a second run
goes on where the first one stopped. What is hoped for: 0.90, as specification-based tests of whole reinforcement learning
are said to reach (Varshosaz et al. 2023, Formal Specification and Testing for Reinforcement Learning, ICFP).
"""

import argparse
import importlib
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from mutate import Reached
from mutation import corners, targets, world
from mutation.sites import Site, draw, mutated
from mutation.world import World

HOPED = 0.90
EXAMPLES, SEED = 24, 1
TARGETS = 4  # that are asked about one change
PROBED, CORNERED = 16, 2  # targets of which it is looked whether they move; rows that are compared on corner inputs
AFTERWARDS = (
    "gradient_of_value", "pulls_back", "never_against", "vocabulary_duplication", "unit_deviation", "highest_gains",
    "exchange_is_linear", "mirror", "zero_off_mask", "generalised_jsd", "gradient_of_kl_off_policy", "rejected_not_counted",
)
VERDICTS = ("killed", "killed by more", "survived", "equivalent", "unmoved", "no family", "import")


class Original(NamedTuple):
    """Of the unchanged sources."""

    base: World
    wired: dict[str, targets.Wired]
    entered: dict[str, frozenset[str]]  # by target: the functions that it enters, "file:line"
    results: dict[str, list]  # by target, where it was asked for
    held: dict[str, tuple[list[str], list[str]]]  # by target: the laws that it obeys, and which of them are stated


def bench_of(wired: targets.Wired):
    """Call it inside the target's World."""
    names = ("families", "target", "bench")
    families, target, bench = (importlib.import_module(f"jaxpt.verify.{name}") for name in names)
    family = families.FAMILIES[wired.family]
    takes = target.parameters(wired.fn, family, wired.family)
    return bench.Bench(target.Target(wired.fn, "", "jax", takes), family), takes


def inputs(family, takes) -> list[dict]:
    """Ordinary, extreme, and poisoned examples."""
    generators, moves = (importlib.import_module(f"jaxpt.verify.{part}") for part in ("generators", "moves"))
    drawn = [generators.draw(family, family.sizes[-1], EXAMPLES, SEED, takes)]
    found = [*drawn, *(generators.extreme(x, family, np.random.default_rng(SEED)) for x in drawn)]
    if any(arg.mask for arg in family.args.values()):
        found += [moves.poisoned(x, family, np.nan) for x in drawn]
    return found


def results(where: World, wired: targets.Wired) -> list[np.ndarray]:
    with where.inside():
        bench, takes = bench_of(wired)
        found = []
        for x in inputs(bench.family, takes):
            out = bench.run(x)
            found += [out.value, *out.grads.values()]
    return found


def differ(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return any(a.shape != b.shape or not np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def entered(where: World, wired: targets.Wired) -> frozenset[str]:
    """The functions of value and gradient, traced once."""
    with where.inside():
        bench, takes = bench_of(wired)
        generators = importlib.import_module("jaxpt.verify.generators")
        e = bench.evaluation(generators.draw(bench.family, bench.family.sizes[0], 1, SEED, takes), moving=bench.moving)
        first = lambda tree: jax.tree.map(lambda v: np.float32(v[0]) if v.dtype.kind == "f" else v[0], tree)  # noqa: E731
        with Reached() as reached:
            jax.eval_shape(lambda args, given: bench.adapter.single(bench.moving)(
                {k: args[k] for k in bench.family.args}, given), first(dict(e.args)), first(dict(e.given)))
    return frozenset(reached.entered)


def broken(where: World, wired: targets.Wired, only: list[str] | None = None) -> list[str]:
    """Laws that the target breaks there, contracts as well; an exception is a finding too."""
    with where.inside():
        names = ("checking", "matrix", "generators")
        checking, matrix, generators = (importlib.import_module(f"jaxpt.verify.{name}") for name in names)
        bench, takes = bench_of(wired)
        batches, found = [generators.draw(bench.family, bench.family.sizes[-1], EXAMPLES, SEED, takes)], []
        for law in matrix.of_family(wired.family):
            if only is not None and law.name not in only:
                continue
            try:
                bad = checking.examined(bench, batches, law, SEED).bad
            except checking.NotApplied:
                continue
            except Exception as error:  # such as a result of another shape
                found.append(f"{type(error).__name__}: {error}"[:120])
                break
            found += [law.name] if bad and min(bad.values()) else []
    return found


def held(known: Original, name: str) -> tuple[list[str], list[str]]:
    """(what the unchanged target obeys, which of it is mathematics or stated)."""
    if name not in known.held:
        wired, said = known.wired[name], broken(known.base, known.wired[name])
        with known.base.inside():
            matrix = importlib.import_module("jaxpt.verify.matrix")
            laws, waived = matrix.of_family(wired.family), matrix.waived(wired.family, wired.claims)
        fine = [law.name for law in laws if law.name not in said and law.name not in waived]
        stated = [law.name for law in laws if law.kind == matrix.MATH or law.name in wired.claims]
        unable = any(":" in law for law in said)
        known.held[name] = ([], []) if unable else (fine, [law for law in fine if law in stated])
    return known.held[name]


def reached(site: Site, known: Original, other: World) -> list[str]:
    """The targets that enter the changed function, or of which the change is a constant; the most direct first."""
    if site.function:
        found = [name for name, functions in known.entered.items() if f"{site.file}:{site.function}" in functions]
    else:
        before, after = (w.get("jaxpt.objectives").ROWS for w in (known.base, other))
        said = lambda row: [str(x) for x in row if not callable(x)]  # noqa: E731
        rows = {name for name, row in before.items() if name not in after or said(row) != said(after[name])}
        of_file = lambda functions: any(f.startswith(f"{site.file}:") for f in functions)  # noqa: E731
        inside = [name for name, functions in known.entered.items() if of_file(functions)]
        found = [name for name, wired in known.wired.items() if wired.row in rows] or inside
    return sorted(found, key=lambda name: len(known.entered[name]))


def spread(names: list[str], known: Original) -> list[str]:
    """One of every family before the second of any."""
    family = lambda name: known.wired[name].family  # noqa: E731
    place = {name: sum(family(x) == family(name) for x in names[:k]) for k, name in enumerate(names)}
    return sorted(names, key=place.get)


def judged(site: Site, known: Original) -> dict:
    began = time.process_time()
    record = {"id": site.id, "operator": site.operator, "laws": [], "stated": [], "target": ""}

    def verdict(what: str, **more) -> dict:
        return {**record, "verdict": what, **more, "cpu_s": round(time.process_time() - began, 1)}

    other = World(site.file, mutated(site))
    try:
        with other.inside():
            wired = targets.table()
    except Exception as error:  # seen without any law: no credit
        return verdict("import", laws=[f"{type(error).__name__}: {error}"[:120]])
    names = [name for name in spread(reached(site, known, other), known) if name in wired][:PROBED]
    if not names:
        return verdict("no family")
    moved = []
    for name in names:
        if name not in known.results:
            known.results[name] = results(known.base, known.wired[name])
        try:
            if differ(known.results[name], results(other, wired[name])):
                moved.append(name)
        except Exception:
            moved.append(name)
        if len(moved) == TARGETS:
            break
    if not moved:
        table = known.base.rows()
        rows = frozenset([known.wired[name].row for name in names if known.wired[name].row in table][:CORNERED])
        same = rows and corners.compared(known.base, other, rows).startswith("agree")
        return verdict("equivalent" if same else "unmoved")
    by_more = None
    asked = [name for name in moved if held(known, name)[0]]
    for name in asked:
        fine, stated = held(known, name)
        said = broken(other, wired[name], fine)
        by_stated = [law for law in said if law in stated or ":" in law]
        if by_stated:
            return verdict("killed", laws=said, stated=by_stated, target=name)
        by_more = by_more or (said and verdict("killed by more", laws=said, target=name))
    return by_more or verdict("survived" if asked else "no family", target=", ".join(asked))


def summary(records: list[dict]) -> str:
    kinds = Counter(r["verdict"] for r in records)
    of = lambda *names: sum(kinds[name] for name in names)  # noqa: E731
    faults, more = of("killed", "killed by more", "survived"), of("no family", "unmoved")
    earlier = sum(bool(set(r["stated"]) - set(AFTERWARDS)) for r in records if r["verdict"] == "killed")
    lines = [
        ", ".join(f"{kinds[v]} {v}" for v in VERDICTS),
        f"of the {faults} that move what a family can ask: {of('killed') / max(faults, 1):.2f} killed by what is stated, "
        f"{of('killed', 'killed by more') / max(faults, 1):.2f} by all that the unchanged obey; hoped for {HOPED:.2f}",
        f"without the laws written afterwards: {earlier / max(faults, 1):.2f} by what is stated",
        f"of these and the {more} that nothing sees: {of('killed') / max(faults + more, 1):.2f} by what is stated",
        "laws: " + ", ".join(f"{law} {n}" for law, n in Counter(x for r in records for x in r["laws"]).most_common()),
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--half", choices=("aside", "seen"), default="aside", help="of the sample of mutate.py")
    parser.add_argument("--count", type=int, default=150, help="changes, in a fixed random order")
    parser.add_argument("--only", default="", help="a part of a change's words")
    parser.add_argument("--seconds", type=float, default=1800, help="CPU-seconds after which no further change is begun")
    args = parser.parse_args()
    world.start()
    jax.config.update("jax_numpy_rank_promotion", "allow")  # what a strict mode finds is no law's
    base = World()
    with base.inside():
        wired = targets.table()
    known = Original(base, wired, {name: entered(base, w) for name, w in wired.items()}, {}, {})
    half = [site for site, apart in draw(300, 0) if apart == (args.half == "aside") and args.only in site.id]
    random.Random(SEED).shuffle(half)  # what there is time for is a sample of all
    chosen = half[: args.count]
    done = {r["id"]: r for r in map(json.loads, args.out.read_text().splitlines())} if args.out.exists() else {}
    for site in chosen:
        if site.id in done or time.process_time() > args.seconds:
            continue
        done[site.id] = record = judged(site, known)
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        said = f"{record['cpu_s']:>5.1f} s {record['verdict']:<14} {site.id[:110]} | {record['target']}"
        print(f"{said}: {', '.join(record['laws'][:4])}", flush=True)
    print(summary([done[site.id] for site in chosen if site.id in done]))
    unable = [name for name, (laws, _) in known.held.items() if not laws]
    print(f"unchanged, left out because they cannot be asked: {unable}")


if __name__ == "__main__":
    main()
