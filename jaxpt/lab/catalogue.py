"""What there is: experiments, objectives, environments, read from their sources without importing them (so
without importing jax). A test holds the tables read against the tables imported."""

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
    """(name, paper) of every call, in the objectives' files, of a function that is declared to return a Row."""
    trees = _trees("objectives")
    makers = {f.name: [x.arg for x in f.args.args] for f in _functions(trees.values()) if _returns(f, "Row")}
    everywhere = {name: value for tree in trees.values() for name, value in _names(tree)}  # a file may import another's
    rows = []
    for tree in trees.values():
        words = everywhere | dict(_names(tree))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in makers:
                given = dict(zip(makers[call.func.id], call.args, strict=False)) | {k.arg: k.value for k in call.keywords}
                if isinstance(given.get("name"), ast.Constant) and "paper" in given:
                    rows.append((given["name"].value, _text(given["paper"], words)))
    return sorted(rows)


def _names(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    return [pair for node in tree.body if isinstance(node, ast.Assign) for pair in _named(node.targets[0], node.value)]


def _named(target: ast.AST, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that an assignment gives, with their expressions."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each in zip(target.elts, value.elts, strict=True):
            yield from _named(*each)


def _text(node: ast.AST, words: Mapping[str, ast.AST]) -> str:
    """The string that an expression of literals, sums, f-strings and names of the files stands for."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.BinOp():
            return _text(node.left, words) + _text(node.right, words)
        case ast.JoinedStr():
            return "".join(_text(part, words) for part in node.values)
        case ast.FormattedValue():
            return _text(node.value, words)
        case ast.Name() if node.id in words:
            return _text(words[node.id], words)
    raise ValueError(f"line {node.lineno}: expected a text that can be read without running it")


def environments() -> list[tuple[str, str]]:
    """(name, first paragraph of the constructor's docstring) of every entry of ENVS."""
    trees = _trees("envs")
    (table,) = (node.value for node in ast.walk(trees["__init__"]) if _assigns(node, "ENVS"))
    functions = {f.name: f for tree in trees.values() for f in tree.body if isinstance(f, ast.FunctionDef)}
    names = [(key.value, value.id) for key, value in zip(table.keys, table.values, strict=True)]
    return sorted((name, _paragraph(ast.get_docstring(functions[function]) or "")) for name, function in names)


def laws() -> list[tuple[str, str]]:
    """(name, formula and paper) of every scaling law that `jaxpt fit` knows. Their table needs no jax."""
    from jaxpt.scaling.laws import table

    return [(law.name, f"{law.output}: {law.formula}\n{law.paper}") for law in table().values()]


def law_records() -> list[dict[str, Any]]:
    """All that the table of laws says but its functions."""
    from jaxpt.scaling.laws import table

    return [{"name": law.name, "paper": law.paper, "formula": law.formula, "inputs": law.inputs, "output": law.output,
             "residual": law.residual, "values": dict(zip(law.names, law.values, strict=True)), "real": law.real}
            for law in table().values()]


def _functions(trees: Iterable[ast.Module]) -> Iterator[ast.FunctionDef]:
    return (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))


def _returns(function: ast.FunctionDef, what: str) -> bool:
    return isinstance(function.returns, ast.Name) and function.returns.id == what


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
