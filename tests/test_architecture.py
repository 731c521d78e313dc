"""The import graph of the rooms, and the signatures that others rely on."""

import ast
import inspect
from pathlib import Path

import pytest

from jaxpt.envs.protocol import Environment, Outcome, Spec
from jaxpt.models import Model
from jaxpt.objectives import ROWS
from jaxpt.objectives.algebra import GIVEN
from jaxpt.objectives.families import FAMILIES
from jaxpt.objectives.row import Row
from jaxpt.train.program import Program

ROOT = Path(__file__).parents[1]
BELOW = {  # room -> what it may import besides itself
    "types": set(),
    "errata": set(),
    "ops": {"types"},
    "models": {"types", "ops"},
    "objectives": {"types", "ops"},
    "envs": {"types", "ops"},
    "data": {"types", "ops"},
    "scaling": {"types", "ops"},
    "rollout": {"types", "ops", "models", "objectives", "envs", "data"},
    "train": {"types", "ops", "models", "objectives", "envs", "data", "rollout"},
    "verify": {"types", "ops", "objectives"},
    "lab": {"types", "ops", "models", "objectives", "envs", "data", "scaling", "rollout", "train"},
    "experiments": {"types", "ops", "models", "objectives", "envs", "data", "scaling", "rollout", "train", "lab", "verify"},
    "cli": {"types", "ops", "models", "objectives", "envs", "data", "scaling", "rollout", "train", "lab", "experiments", "errata",
            "verify"},
}


def imports(path):
    """Modules of jaxpt that a file imports, anywhere in it; the bare package (its version) is no room."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "jaxpt" else [f"jaxpt.{a.name}" for a in node.names]
        yield from (n.split(".")[1] for n in names if n.startswith("jaxpt.") and n != "jaxpt.__version__")


def room_of(path):
    parts = path.relative_to(ROOT).parts
    return "experiments" if parts[0] == "experiments" else parts[1].removesuffix(".py")


FILES = [
    p for p in (*ROOT.glob("jaxpt/**/*.py"), *ROOT.glob("experiments/*.py"))
    if p.parent != ROOT / "jaxpt" or p.name in ("types.py", "errata.py")
]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_import_downwards_only(path):
    room = room_of(path)
    above = set(imports(path)) - BELOW[room] - {room}
    assert not above, f"{room} must not import {sorted(above)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small_and_only_lab_and_cli_touch_disk_or_print(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    if room_of(path) not in ("lab", "cli"):
        nodes = list(ast.walk(ast.parse(text)))
        calls = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not calls & {"print", "open", "input"}
        touched = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        assert not touched & {"load", "save", "savez", "tofile", "fromfile", "read_text", "write_text", "read_bytes"}
        modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        modules |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        assert not modules & {"os", "io", "pathlib", "shutil", "tempfile", "subprocess"}


def test_experiments_do_not_import_each_other():
    for path in ROOT.glob("experiments/*.py"):
        assert "experiments" not in set(imports(path))


def test_signatures():
    assert Model._fields[:4] == ("init", "forward", "unembed", "extend")
    assert Environment._fields[2:10] == ("sample", "prompt", "init", "pending", "feed", "signals", "outcome", "oracle")
    assert Outcome._fields == ("reward", "gold", "parts", "truncated")
    assert Spec._fields[:5] == ("vocab", "prompt_len", "response_len", "signals", "parts")
    assert Row._fields[:10] == (
        "name", "family", "paper", "formula", "needs", "hyper", "prepare", "loss", "additive", "claims",
    )
    assert Program._fields[:2] == ("init", "step")


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_the_contract_s_loss(name):
    """The family's arguments by name, those not for every row optional; more, and nothing else, is known by `needs`."""
    row, args = ROWS[name], FAMILIES[ROWS[name].family].args
    parameters = inspect.signature(row.loss).parameters
    required = [argument for argument, arg in args.items() if not arg.optional]
    assert list(parameters)[: len(required)] == required
    assert all(parameters[k].default is None for k, arg in args.items() if arg.optional and k in parameters)
    assert ("totals" in parameters) == (row.family != "length_shaping")
    assert name == name.lower() and set(row.needs) <= {"logp", "values", *(arg.optional for arg in args.values()), *GIVEN}


def test_test_files_have_names_of_their_own():
    """pytest imports them by name alone, so that of two with one name it collects one and stops at the other."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 50 and sorted(names) == sorted(set(names))
