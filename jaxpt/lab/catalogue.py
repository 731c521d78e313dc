"""Which experiments there are, read without importing them (so without importing jax)."""

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple

from jaxpt.lab.errors import UserError, expected


class Entry(NamedTuple):
    name: str
    path: Path
    doc: str  # the file's docstring: question, source, command, expected result, minutes

    @property
    def question(self) -> str:
        """The docstring's first paragraph on one line."""
        return " ".join(self.doc.split("\n\n")[0].split())


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


def docstring(path: Path) -> str:
    try:
        return ast.get_docstring(ast.parse(path.read_bytes())) or ""
    except (SyntaxError, ValueError) as error:
        raise UserError(f"experiment {str(path)!r} is not a Python file: {error}") from None
    except OSError as error:
        raise UserError(f"experiment {str(path)!r} cannot be read: {error.strerror}") from None
