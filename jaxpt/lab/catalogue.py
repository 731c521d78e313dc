"""What there is: experiments, objectives, environments, read from their sources without importing them (so
without importing jax). A test holds the tables read against the tables imported."""

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple

import jaxpt
from jaxpt.lab.errors import UserError, expected


class Entry(NamedTuple):
    name: str
    path: Path
    doc: str  # the file's docstring: question, source, command, expected result, minutes

    @property
    def question(self) -> str:
        return _paragraph(self.doc)


def experiments() -> list[Entry]:
    """All files of the package's experiments folder, by name."""
    spec = importlib.util.find_spec("jaxpt.experiments")
    folders = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    files = sorted(p for folder in folders for p in folder.glob("*.py") if not p.stem.startswith("_"))
    return [Entry(path.stem, path, docstring(path)) for path in files]


def find(name: str) -> Entry:
    """The experiment called `name`, or the file that `name` is a path of."""
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"experiment {name!r}: there is no such file")
        return Entry(path.stem, path.resolve(), docstring(path))
    table = {entry.name: entry for entry in experiments()}
    if name not in table:
        hint = expected(name, table) if table else "the package has none; a path/to/file.py is expected"
        raise UserError(f"experiment {name!r} is unknown: {hint}")
    return table[name]


def objectives() -> list[tuple[str, str]]:
    """(name, paper) of every `compose(name, paper, ...)` in the objectives' files."""
    calls = [node for tree in _trees("objectives").values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    rows = [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id == "compose"]
    return sorted((args[0].value, args[1].value) for args in rows)


def environments() -> list[tuple[str, str]]:
    """(name, first paragraph of the constructor's docstring) of every entry of ENVS."""
    trees = _trees("envs")
    (table,) = (node.value for node in ast.walk(trees["__init__"]) if _assigns(node, "ENVS"))
    functions = {f.name: f for tree in trees.values() for f in tree.body if isinstance(f, ast.FunctionDef)}
    names = [(key.value, value.id) for key, value in zip(table.keys, table.values, strict=True)]
    return sorted((name, _paragraph(ast.get_docstring(functions[function]) or "")) for name, function in names)


def _trees(room: str) -> dict[str, ast.Module]:
    folder = Path(jaxpt.__file__).parent / room
    return {path.stem: ast.parse(path.read_bytes()) for path in sorted(folder.glob("*.py"))}


def _assigns(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name


def _paragraph(doc: str) -> str:
    """The first paragraph on one line."""
    return " ".join(doc.split("\n\n")[0].split())


def docstring(path: Path) -> str:
    try:
        return ast.get_docstring(ast.parse(path.read_bytes())) or ""
    except (SyntaxError, ValueError) as error:
        raise UserError(f"experiment {str(path)!r} is not a Python file: {error}") from None
    except OSError as error:
        raise UserError(f"experiment {str(path)!r} cannot be read: {error.strerror}") from None
