"""`jaxpt verify TARGET --family F`: a stranger's loss against the catalogue of laws, in a child process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from jaxpt.cli.options import Option, help_text, names, no_more, one_of, split, whole
from jaxpt.lab.compiling import QUICK_TO_COMPILE
from jaxpt.lab.errors import UserError, expected
from jaxpt.verify.families import FAMILIES
from jaxpt.verify.matrix import claimable, of_family


def _count(text: str) -> int:
    value = whole(text)
    if not 1 <= value <= 100_000:
        raise ValueError("a whole number from 1 to 100000 is expected")
    return value


OPTIONS = {
    "--family": Option(one_of(*FAMILIES), None, "what the function takes and gives back; the families are below"),
    "--claim": Option(names, (), "contract laws that the function is meant to obey, or waivers: a,b,..."),
    "--like": Option(str, None, "a row of the table: its claims, a comparison with it, and the nearest row"),
    "--framework": Option(one_of("jax", "numpy", "torch"), None, "jax, numpy or torch; guessed from the code"),
    "--mask": Option(one_of("float", "bool"), "float", "how masks and labels are given: float or bool"),
    "--dtype": Option(one_of("float32", "float64"), "float32", "float32 or float64 (numpy: always float64)"),
    "--examples": Option(_count, 200, "examples a law (200)"),
    "--seed": Option(whole, 0, "of the examples (0)"),
    "--law": Option(names, (), "only these laws: a,b,..."),
    "--limit": Option(_count, 300, "seconds after which the child process is ended (300)"),
    "--json": Option(None, False, "for machines; the same bytes for the same seed"),
    "--help": Option(None, False, "this text"),
}
USAGE = "jaxpt verify TARGET --family F [options]"
WHAT = ("Checks a function against the mathematical laws of its family and shows a small counterexample where one is\n"
        "broken. TARGET is module:function or path/file.py:function. Exit code 0 when every applied law holds, 1 when "
        "one\n"
        "is broken, 2 when the function cannot be checked. `jaxpt list invariants` shows the laws.")


def verify_command(words: Sequence[str]) -> int:
    values, rest = split(["--help" if word == "-h" else word for word in words], OPTIONS)
    if values["--help"]:
        print(help_text(USAGE, WHAT, OPTIONS), _families(), sep="\n\n")
        return 0
    if not rest or rest[0].startswith("-"):
        no_more(rest, OPTIONS)
        raise UserError(f"TARGET is missing: {USAGE} is expected")
    no_more(rest[1:], OPTIONS)
    family = values["--family"]
    if family is None:
        raise UserError(f"--family is missing: {expected('', FAMILIES)}")
    for claim in values["--claim"]:
        if claim not in claimable(family):
            raise UserError(f"--claim {claim}: {expected(claim, claimable(family))}")
    for law in values["--law"]:
        if law not in (known := [law.name for law in of_family(family)]):
            raise UserError(f"--law {law}: {expected(law, known)}")
    if values["--seed"] < 0:
        raise UserError(f"--seed {values['--seed']}: a number of at least 0 is expected")
    request = {
        "target": rest[0], "family": family, "claim": values["--claim"], "like": values["--like"],
        "mask": values["--mask"],
        "framework": values["--framework"], "dtype": values["--dtype"], "examples": values["--examples"],
        "seed": values["--seed"], "only": values["--law"] or None,
    }
    answer = _ask(request, values["--limit"])
    print(json.dumps(answer["record"], indent=1, allow_nan=False) if values["--json"] else answer["text"])
    return 0 if answer["ok"] else 1


def _families() -> str:
    lines = []
    for name, family in FAMILIES.items():
        more = f"; by name: {', '.join(family.optional)}" if family.optional else ""
        lines.append(f"  {name:17}  f({', '.join(family.args)}){more}")
    return "families:\n\n" + "\n".join(lines)


def _ask(request: dict, limit: int) -> dict:
    """The answer of a child process, which can be ended whatever the function does."""
    env = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **os.environ}
    # Compilation is most of the time, and the speed of the programs does not matter.
    env["XLA_FLAGS"] = " ".join([env.get("XLA_FLAGS", ""), *QUICK_TO_COMPILE]).strip()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    words = [sys.executable, "-m", "jaxpt.cli.verify_child"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(words, **pipes, env=env, start_new_session=True) as child:
        try:
            out, err = child.communicate(json.dumps(request), timeout=limit)
        except subprocess.TimeoutExpired:
            raise UserError(f"target {request['target']!r}: no verdict after {limit} seconds (--limit)") from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    try:
        answer = json.loads(out)
    except ValueError:
        last = (err.strip().splitlines() or ["nothing"])[-1]
        said = f"its process ended with code {child.returncode} and said: {last[:200]}"
        raise UserError(f"target {request['target']!r}: {said}") from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer
