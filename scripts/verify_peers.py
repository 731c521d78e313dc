#!/usr/bin/env python
"""`jaxpt verify` over losses, advantages and KL estimators of other libraries, and a table of the laws they break.

Command: .venv-peers/bin/python scripts/verify_peers.py [--only verl] [--seed 0] [--write README.md]
Laws of mathematics are asked of every function (tests/peers/lens.py has them), contracts where its own words
claim them. An entry of the table has the smallest counterexample and two numbers: the function's, and the right
one by a float64 loop (tests/peers/by_hand.py). What the loop does not confirm is named on stderr and left out.
--write puts the table between its markers in FILE and the counterexamples into tests/peers/findings.json, which
tests/peers/test_verify_peers.py computes again; with --only, other functions' entries stay as they are there.
`scripts/test --peers` makes the environment.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

from jaxpt.lab import store
from jaxpt.lab.compiling import QUICK_TO_COMPILE
from jaxpt.lab.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "peers"
FINDINGS = HERE / "findings.json"
BEGIN, END = "<!-- peers: made by scripts/verify_peers.py -->", "<!-- end of peers -->"
NEEDED = ("pytest", "jax", "torch", "trl", "rlax", "optax", "tunix")
DISTRIBUTIONS = {"tunix": "google-tunix"}
HEADER = ["function", "family", "law", "smallest input found", "its number", "by hand"]


def missing() -> str:
    """What of the peers' environment is not there, in one sentence; "" if all is."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    absent = absent or [] if (Path(sys.prefix) / "wheels").is_dir() else [*absent, "the wheels' files"]
    how = "run scripts/test --peers once, then .venv-peers/bin/python scripts/verify_peers.py"
    return f"the peers' environment is not complete here (no {', '.join(absent)}): {how}" if absent else ""


def versions(packages: list[str]) -> dict[str, str]:
    of_wheels = dict(word.split("==") for word in (Path(sys.prefix) / "wheels" / "stamp").read_text().split())
    return {name: of_wheels.get(name) or version(DISTRIBUTIONS.get(name, name)) for name in packages}


def loader():
    """load(module's full name) -> the module, installed or out of a wheel."""
    import pytest
    import wheels

    patch = pytest.MonkeyPatch()

    def load(name: str):
        return wheels.load(name, patch) if name.split(".")[0] in wheels.STUBS else importlib.import_module(name)

    return load


def verified(target, load, seed: int) -> tuple[dict, list, list[str]]:
    """(what was asked, the findings that are confirmed, why others are not) of one function."""
    from confirming import Finding, by_hand, doubt
    from lens import function_of

    from jaxpt.verify import check, matrix

    function = function_of(target, load)
    contracts = {law.name for law in matrix.of_family(target.family) if law.kind == matrix.CONTRACT}
    only = [law.name for law in matrix.of_family(target.family) if law.name not in target.spared]
    report = check(
        function, target.family, claim=target.claims, framework=target.framework, examples=target.examples, seed=seed,
        only=only, name=target.id,
    )  # fmt: skip
    findings, doubts = [], {}
    for law, outcome in report.broken.items():
        c = outcome.counterexample
        where = f"{outcome.where}{c['position']}"
        try:
            right = by_hand(target, c["inputs"], where)
            why = doubt(float(c["wrong"]), c["right"], right)
        except (KeyError, IndexError, ValueError) as error:
            why = f"nothing by hand ({error}); {where} is {c['wrong']}, the law says {c['right']}"
        if why:
            doubts[law] = f"{target.id}, {law}: {why} ({short(c['inputs'])})"
        else:
            right = float(f"{right:.6g}")
            findings.append(Finding(target.id, law, outcome.kind, where, c["inputs"], c["wrong"], right))
    applied = sum(o.status != "not_applied" for o in report.outcomes)
    claims = [claim for claim in target.claims if claim in contracts]
    asked = {"target": target.id, "family": target.family, "laws": applied, "claims": claims, "left_out": list(doubts)}
    return asked, findings, list(doubts.values())


def short(x) -> str:
    if isinstance(x, dict):
        return ", ".join(f"{k} = {short(v)}" for k, v in x.items())
    if isinstance(x, list):
        return "[" + ", ".join(map(short, x)) + "]"
    return x if isinstance(x, str) else f"{x:.6g}"


def package_of(target: str) -> str:
    return target.partition(".")[0].partition(":")[0]


def named(target: str, versions: dict[str, str]) -> str:
    package = package_of(target)
    return f"{package} {versions[package]} `{target.removeprefix(package)[1:].replace(':', '.')}`"


def markdown(record: dict) -> str:
    """The table and what it says about the rest, of what findings.json holds."""
    from jaxpt.lab.markdown import table

    of, versions = {asked["target"]: asked for asked in record["asked"]}, record["versions"]
    rows = [
        [named(f["target"], versions), of[f["target"]]["family"], f"{f['law']} ({f['kind']})",
         f"`{short(f['inputs'])}`", f"{f['where']}: {short(f['wrong'])}", short(f["right"])]
        for package in versions for f in record["findings"] if package_of(f["target"]) == package
    ]  # fmt: skip
    broken = {f["target"] for f in record["findings"]}
    left = [f"{', '.join(asked['left_out'])} in {named(target, versions)}" for target, asked in of.items() if asked["left_out"]]
    fine = [package_of(target) for target, asked in of.items() if target not in broken and not asked["left_out"]]
    counted = ", ".join(f"{fine.count(package)} of {package}" for package in dict.fromkeys(fine))
    functions, laws = len({target.partition("[")[0] for target in of}), sum(asked["laws"] for asked in of.values())
    parts = [
        f"{functions} functions of {len(versions)} libraries, {len(of)} with their modes, were asked {laws} laws on 24 to 60 "
        f"examples each (seed {record['seed']}). {len(rows)} are broken, in {len(broken)} of them:",
        table(HEADER, rows),
        "Left out, because on the counterexample the loop gives the same number, or none: "
        f"{'; '.join(left)}." if left else "",
        f"No law is broken in {len(fine)} others: {counted} (`{FINDINGS.relative_to(ROOT)}` names them)." if fine else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", help="a package, or a part of the functions' names, such as gae")
    parser.add_argument("--seed", type=int, default=0, help="of the examples (0)")
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"the file in which {BEGIN} stands")
    args = parser.parse_args(argv)
    try:
        print(run(args), end="")
    except (UserError, ValueError) as error:
        print(f"verify_peers: {error}", file=sys.stderr)
        return 2
    return 0


def run(args) -> str:
    if why := missing():
        raise ValueError(why)
    if args.write:
        store.between(args.write, BEGIN, END)  # or all would be for nothing
    warnings.simplefilter("ignore")  # what a peer warns about is not ours to mend
    sys.path.insert(0, str(HERE))
    os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_TO_COMPILE))  # programs are small, and of many shapes
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's: more only wait for each other on tensors of this size
    from lens import TARGETS

    from jaxpt.verify import TargetError

    packages = sorted({target.package for target in TARGETS})
    holds = lambda target: args.only in (target.package if args.only in packages else target.id)  # noqa: E731
    chosen = [target for target in TARGETS if args.only is None or holds(target)]
    if not chosen:
        raise ValueError(f"--only {args.only}: no package ({', '.join(packages)}), and no part of a function's name")
    load, asked, findings = loader(), [], []
    for i, target in enumerate(chosen):
        start = time.process_time()
        try:
            about, found, doubts = verified(target, load, args.seed)
        except TargetError as error:
            progress(f"left out {target.id}: {error}")
            continue
        asked.append(about)
        findings += found
        for doubt in doubts:
            progress(f"left out {doubt}")
        result = f"{len(found)} of {about['laws']} laws broken ({time.process_time() - start:.1f} CPU s)"
        progress(f"[{i + 1}/{len(chosen)}] {target.id}: {result}")
    record = {"seed": args.seed, "asked": asked, "findings": [finding._asdict() for finding in findings]}
    if args.write and args.only:
        record = renewed(record, [target.id for target in TARGETS])
    record = {"versions": versions(sorted({package_of(about["target"]) for about in record["asked"]})), **record}
    text = markdown(record)
    if args.write:
        store.write_between(args.write, BEGIN, END, text)
        FINDINGS.write_text(lines(record))
    return text


def lines(record: dict) -> str:
    """JSON with an entry a line."""
    one_a_line = lambda entries: "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]"  # noqa: E731
    values = {k: one_a_line(v) if isinstance(v, list) else json.dumps(v) for k, v in record.items()}
    return "{\n" + ",\n".join(f'"{k}": {v}' for k, v in values.items()) + "\n}\n"


def renewed(new: dict, order: list[str]) -> dict:
    """What findings.json holds of other functions, and the new entries, in the order of the table of functions."""
    old = json.loads(FINDINGS.read_text())
    if old["seed"] != new["seed"]:
        raise ValueError(f"--seed {new['seed']}: {FINDINGS.name} was found with seed {old['seed']}; leave --only away")
    renewing = {about["target"] for about in new["asked"]}
    stays = lambda entry: entry["target"] in order and entry["target"] not in renewing  # noqa: E731
    sort = lambda entries: sorted(entries, key=lambda entry: order.index(entry["target"]))  # noqa: E731
    return {"seed": new["seed"], **{k: sort([*filter(stays, old[k]), *new[k]]) for k in ("asked", "findings")}}


if __name__ == "__main__":
    sys.exit(main())
