"""Reading text from disk: any file, any folder, or the documentation that comes with Python.

The only code that reads a corpus. What it returns is bytes; `jaxpt.data.text` does the rest.
"""

import ast
import os
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxpt.data.text import Split, split
from jaxpt.lab.errors import UserError

LIMIT = 8_000_000  # bytes read by default: twice what a run of ten minutes on two cores trains on
LEAST = 50_000  # bytes of distinct text; below, six held-out blocks would be a few sentences each
UNDECODABLE = 0.01  # share of bytes outside UTF-8 above which a file is not text
TESTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


Documents = Iterator[tuple[str, Callable[[], bytes]]]  # (name, what reads it)


class Corpus(NamedTuple):
    documents: list[tuple[str, bytes]]  # (name, text) in the order of the names
    skipped: Mapping[str, int]  # reason -> number of files


def read(path: str = "", limit: int = LIMIT, default: Callable[[], Documents] | None = None) -> Corpus:
    """The documents of a file or of all files below a folder; "" is `default`, Python's own documentation where
    that is not given.

    Hidden files and folders (.git among them) are not entered, a folder reached twice by links is read
    once, binary and empty files are skipped and counted, and reading ends after `limit` bytes.
    Raises UserError when nothing readable is there.
    """
    if not path:
        return _collect((default or python_documents)(), limit, "--corpus (default: the text that comes with Python)")
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(f"--corpus {path}: no such file or folder.")
    files = _walk(root, set()) if root.is_dir() else [root]
    return _collect(((str(file), partial(_head, file, limit)) for file in files), limit, f"--corpus {path}")


def _collect(sources: Iterable[tuple[str, Callable[[], bytes]]], limit: int, where: str) -> Corpus:
    documents: list[tuple[str, bytes]] = []
    skipped: Counter[str] = Counter()
    room = limit
    for name, get in sources:
        if room <= 0:
            skipped["over the limit"] += 1
            continue
        try:
            text = get()[:room]
        except OSError:
            skipped["unreadable"] += 1
            continue
        reason = "empty" if not text.strip() else "binary" if is_binary(text) else None
        if reason:
            skipped[reason] += 1
        else:
            documents.append((name, text))
            room -= len(text)
    if not documents:
        found = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "no files"
        raise UserError(f"{where}: expected UTF-8 text, found none ({found}).")
    return Corpus(documents, dict(skipped))


def _head(file: Path, size: int) -> bytes:
    if not file.is_file():  # reading a socket or a pipe would block
        raise OSError(f"{file} is not a regular file")
    with file.open("rb") as handle:
        return handle.read(size)


def is_binary(text: bytes) -> bool:
    """A NUL byte, or more than 1% of the bytes not valid UTF-8 (a stray Latin-1 letter is no harm)."""
    lost = len(text) - len(text.decode("utf-8", "ignore").encode())
    return b"\0" in text or lost > UNDECODABLE * len(text)


def _walk(folder: Path, entered: set[str]) -> Iterator[Path]:
    """Files below `folder`, level by level in the order of names. `entered`: real folders already seen."""
    real = os.path.realpath(folder)
    if real in entered or not os.access(folder, os.R_OK | os.X_OK):
        return
    entered.add(real)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path, entered)
        else:
            yield path


def python_sources() -> Documents:
    """The source files of Python's standard library, about 12 MB; tests are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - TESTS)
        for file in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            yield f"source {file.relative_to(root)}", file.read_bytes


def python_documents() -> Documents:
    """Python's help topics, then the docstrings of each standard module, all read from source files
    (nothing is imported); tests are left out. Which Python runs decides what the text is."""
    root = Path(sysconfig.get_path("stdlib"))
    topics = root / "pydoc_data" / "topics.py"
    for name, text in sorted(_topics(topics).items()):
        yield f"topic {name}", text.encode
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - TESTS)
        for file in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            if file != topics:
                yield f"module {file.relative_to(root)}", partial(_documentation, file)


def _topics(file: Path) -> dict[str, str]:
    """The dictionary in pydoc_data/topics.py; empty where Python comes without that file."""
    literals = [node for node in ast.walk(_parse(file)) if isinstance(node, ast.Dict)]
    return ast.literal_eval(literals[0]) if literals else {}


def _documentation(file: Path) -> bytes:
    return "\n\n".join(_docstrings(_parse(file))).encode("utf-8", "ignore")


def _parse(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules hold invalid escapes
        try:
            return ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, OSError):  # templates and deliberately broken files
            return ast.Module([], [])


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of the module, its classes and its functions, in the order of the source."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        statements = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        pending.extend(reversed(statements))


def load(path: str, limit: int, held_share: float, held_limit: int,
         default: Callable[[], Documents] | None = None) -> tuple[Corpus, Split]:
    """`read`, then `jaxpt.data.text.split`; at most about `held_limit` bytes are held out.

    UserError when less than LEAST bytes of distinct text remain.
    """
    corpus = read(path, limit, default)
    texts = [text for _, text in corpus.documents]
    parts = split(texts, min(held_share, held_limit / sum(map(len, texts))))
    distinct = sum(map(len, parts.train)) + sum(map(len, parts.held))
    if distinct < LEAST:
        raise UserError(
            f"--corpus {path or '(default)'}: {distinct} bytes of distinct text, expected at least {LEAST}."
        )
    return corpus, parts
