#!/usr/bin/env python
"""`jaxpt verify` over losses, advantages and KL estimators that other libraries ship, and a table of the laws they break.

Command: .venv-peers/bin/python scripts/verify_peers.py [--only verl] [--seed 0] [--write README.md]
Laws of mathematics are asked of every function (tests/peers/lens.py lists them), contracts where its own words claim
them. An entry of the table has the smallest counterexample and two numbers: the function's, and the right one by a
float64 loop (tests/peers/by_hand.py). What such a loop does not confirm is named on stderr and left out.
--write puts the table between its markers in FILE and the counterexamples into tests/peers/findings.json, which
tests/peers/test_verify_peers.py computes again. `scripts/test --peers` makes the environment.
"""

import argparse
import importlib
import importlib.util
import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

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
    return lambda name: wheels.load(name, patch) if name.split(".")[0] in wheels.STUBS else importlib.import_module(name)


def verified(target, load, seed: int) -> tuple[dict, list, list[str]]:
    """(what was asked, the findings that are confirmed, why others are not) of one function."""
    from confirming import Finding, by_hand, doubt
    from lens import function_of

    from jaxpt.verify import check, matrix

    function = function_of(target, load)
    contracts = {law.name for law in matrix.of_family(target.family) if law.kind == matrix.CONTRACT}
    only = [law.name for law in matrix.of_family(target.family) if law.name not in target.spared]
    report = check(function, target.family, claim=target.claims, framework=target.framework, examples=target.examples,
                   seed=seed, only=only, name=target.id)  # fmt: skip
    findings, doubts = [], []
    for law, outcome in report.broken.items():
        c = outcome.counterexample
        where = f"{outcome.where}{c['position']}"
        try:
            right = by_hand(target, c["inputs"], where)
            why = doubt(float(c["wrong"]), c["right"], right)
        except (KeyError, ValueError) as error:
            why = f"nothing by hand for {error}; {where} is {c['wrong']}, the law says {c['right']}"
        if why:
            doubts.append(f"{target.id}, {law}: {why} ({short(c['inputs'])})")
        else:
            findings.append(Finding(target.id, law, outcome.kind, where, c["inputs"], c["wrong"], float(f"{right:.6g}")))
    applied = sum(o.status != "not_applied" for o in report.outcomes)
    claims = [claim for claim in target.claims if claim in contracts]
    return {"target": target.id, "family": target.family, "laws": applied, "claims": claims}, findings, doubts


def short(x) -> str:
    if isinstance(x, dict):
        return ", ".join(f"{k} = {short(v)}" for k, v in x.items())
    if isinstance(x, list):
        return "[" + ", ".join(map(short, x)) + "]"
    return x if isinstance(x, str) else f"{x:.6g}"


def named(target: str, versions: dict[str, str]) -> str:
    package = target.partition(".")[0].partition(":")[0]
    return f"{package} {versions[package]} `{target.removeprefix(package)[1:].replace(':', '.')}`"


def markdown(record: dict) -> str:
    """The table and what it says about the rest, of what findings.json holds."""
    from jaxpt.lab.markdown import table

    of = {asked["target"]: asked for asked in record["asked"]}
    rows = [[named(f["target"], record["versions"]), of[f["target"]]["family"], f"{f['law']} ({f['kind']})",
             f"`{short(f['inputs'])}`", f"{f['where']}: {short(f['wrong'])}", short(f["right"])] for f in record["findings"]]
    broken = {f["target"] for f in record["findings"]}
    fine = [f"{named(target, record['versions'])} ({asked['laws']})" for target, asked in of.items() if target not in broken]
    functions, packages = len({target.partition("[")[0] for target in of}), len(record["versions"])
    parts = [
        f"{functions} functions of {packages} libraries, {len(of)} with their modes, were asked {sum(a['laws'] for a in of.values())} "
        f"laws on {record['examples']} examples each (seed {record['seed']}); {len(rows)} are broken in {len(broken)} of them:",
        table(HEADER, rows),
        f"No law that was asked (their number in brackets) is broken in {', '.join(fine)}." if fine else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", help="functions whose name holds WORD, such as verl or GAE")
    parser.add_argument("--seed", type=int, default=0, help="of the examples (0)")
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"the file in which {BEGIN} stands")
    args = parser.parse_args(argv)
    try:
        print(run(args), end="")
    except ValueError as error:
        print(f"verify_peers: {error}", file=sys.stderr)
        return 2
    return 0


def run(args) -> str:
    if why := missing():
        raise ValueError(why)
    if args.write and args.only:
        raise ValueError("--write takes the table of all functions, without --only")
    warnings.simplefilter("ignore")  # what a peer warns about is not ours to mend
    sys.path.insert(0, str(HERE))
    import torch
    from lens import EXAMPLES, TARGETS

    torch.set_num_threads(1)  # more of them only wait for each other on tensors of this size
    chosen = [target for target in TARGETS if not args.only or args.only.lower() in target.id.lower()]
    if not chosen:
        raise ValueError(f"--only {args.only}: no function's name holds it; packages are {', '.join(sorted({t.package for t in TARGETS}))}")
    load, asked, findings = loader(), [], []
    for i, target in enumerate(chosen):
        start = time.process_time()
        about, found, doubts = verified(target, load, args.seed)
        asked.append(about)
        findings += found
        for doubt in doubts:
            progress(f"left out {doubt}")
        spent = time.process_time() - start
        progress(f"[{i + 1}/{len(chosen)}] {target.id}: {len(found)} of {about['laws']} laws broken ({spent:.1f} CPU s)")
    record = {"seed": args.seed, "examples": EXAMPLES, "versions": versions(sorted({t.package for t in chosen})), "asked": asked,
              "findings": [finding._asdict() for finding in findings]}  # fmt: skip
    text = markdown(record)
    if args.write:
        write(args.write, text)
        FINDINGS.write_text(json.dumps(record, indent=1) + "\n")
    return text


def write(path: Path, text: str) -> None:
    """Replaces what stands between the two markers."""
    if not path.is_file():
        raise ValueError(f"--write {path}: there is no such file")
    before, marker, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise ValueError(f"--write {path}: a line {BEGIN} and, below it, a line {END} are expected")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
