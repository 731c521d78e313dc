"""Tables of runs from files: CSV, JSON lines, Parquet, folders of runs. Nothing is dropped without its line being named."""

import csv
import gzip
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpt.lab.errors import UserError, expected

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "|"}
MOST_BYTES = 64 * 2**20
UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


class Table(NamedTuple):
    path: str
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]  # cells as read: text from CSV, values from JSON and Parquet
    places: list[int]  # line number of each row (row number in Parquet and of runs)
    faults: list[tuple[int, str]]  # (line, why it is no row)
    place: str = "line"


def read_table(path: str) -> Table:
    """A folder: the runs in it. Else by the file's ending: .jsonl or .ndjson, .parquet, else CSV (or JSON lines, if it
    starts with a brace); .gz in addition. UserError, one sentence with the line, for a file that is no table."""
    file = Path(path)
    endings = [ending.lower() for ending in file.suffixes]
    if not file.exists():
        raise UserError(f"{path}: there is no such file")
    if file.is_dir():
        from jaxpt.lab.run_tables import read_runs  # which is made of what is defined here

        return read_runs(path)
    if ".parquet" in endings:
        return _parquet(path)
    text = _text(file, zipped=endings[-1:] == [".gz"])
    if not text.strip():
        raise UserError(f"{path} is empty")
    if text.lstrip().startswith("{") or {".jsonl", ".ndjson"} & set(endings):
        return _json_lines(path, text)
    return _csv(path, text)


def _text(file: Path, zipped: bool) -> str:
    try:
        with gzip.open(file) if zipped else file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    if len(data) > MOST_BYTES:
        raise UserError(f"{file} is larger than {MOST_BYTES >> 20} MB: a table with a line per run is expected")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} line {data.count(10, 0, error.start) + 1}: not UTF-8 text") from None
    if "\0" in text:
        raise UserError(f"{file} line {text[:text.index(chr(0))].count(chr(10)) + 1}: a zero byte; "
                        "CSV, JSON lines or Parquet is expected")
    return text


def _csv(path: str, text: str) -> Table:
    """The delimiter is the one of DELIMITERS that the header line has most of."""
    first = text.lstrip().splitlines()[0]
    delimiter = max(DELIMITERS, key=first.count)
    if not first.count(delimiter):
        raise UserError(f"{path} line 1: a header of several columns is expected, separated by "
                        f"{', '.join(DELIMITERS.values())}; got {first[:60]!r}")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    rows, places, faults, columns = [], [], [], ()
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not columns:
                columns = tuple(cell.strip() for cell in cells)
                if all(_is_number(cell) for cell in columns):
                    raise UserError(f"{path} line {reader.line_num}: a header with the columns' names is "
                                    "expected, got numbers")
            elif len(cells) != len(columns):
                cells_are = f"{len(cells)} cell{'s'[:len(cells) > 1]}"
                faults.append((reader.line_num, f"{cells_are} where the header has {len(columns)}"))
            else:
                rows.append(dict(zip(columns, cells, strict=True)))
                places.append(reader.line_num)
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num}: {error}") from None
    return Table(path, columns, rows, places, faults)


def _is_number(cell: str) -> bool:
    try:
        return bool(number(cell)) or True
    except ValueError:
        return False


def _json_lines(path: str, text: str) -> Table:
    rows, places, faults = [], [], []
    columns: dict[str, None] = {}
    for place, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
            places.append(place)
            columns |= dict.fromkeys(row)
        else:
            faults.append((place, "not a JSON object on one line"))
    if not rows:
        raise UserError(f"{path} line {faults[0][0]}: {faults[0][1]}")
    return Table(path, tuple(columns), rows, places, faults)


def _parquet(path: str) -> Table:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet takes pyarrow: pip install 'jaxpt[parquet]'") from None
    import pyarrow

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None
    places = list(range(1, table.num_rows + 1))
    return Table(path, tuple(table.column_names), table.to_pylist(), places, [], "row")


def number(cell: Any) -> float:
    """70e6, 70M and 70000000 alike. ValueError, in words, for what is no finite number."""
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        raise ValueError("is empty")
    if isinstance(cell, str):
        match = re.fullmatch(r"\s*(\S+?)\s*([kKMBGT]?)\s*", cell)
        try:
            value = float(match[1]) * UNITS.get(match[2], 1.0)
        except (TypeError, ValueError):
            raise ValueError(f"{cell.strip()[:40]!r} is not a number") from None
    elif isinstance(cell, bool) or not isinstance(cell, (int, float)):
        raise ValueError(f"{str(cell)[:40]!r} is not a number")
    else:
        value = float(cell)
    if not math.isfinite(value):
        raise ValueError(f"{str(cell).strip()[:40]!r} is not a finite number")
    return value


def positive(cell: Any) -> float:
    value = number(cell)
    if value <= 0:
        raise ValueError(f"{str(cell).strip()[:40]!r} is not above 0")
    return value


def scale(column: str) -> float:
    """1e6 for a column called 'params (M)', 1 for one without a unit in brackets."""
    match = re.search(r"[(\[]([kKMBGT])[)\]]\s*$", column)
    return UNITS[match[1]] if match else 1.0


def find_column(table: Table, flag: str, wanted: str | None, known: Sequence[Sequence[str]]) -> str | None:
    """The column `wanted`, else the first of the well-known names that the table has (letter case, _ and - do
    not matter); None if there is none. flag: "--n " or "--x U=", for messages. UserError for a wanted one that is
    missing, and where two would do."""
    if wanted is not None:
        if wanted not in table.columns:
            hint = expected(wanted, table.columns)
            raise UserError(f"{flag}{wanted}: {table.path} has no such column: {hint}")
        names = [wanted]
    else:
        plain = [(re.sub(r"[\s_-]+", " ", re.sub(r"\s*[(\[]\w+[)\]]\s*$", "", c)).strip().lower(), c)
                 for c in table.columns]
        tiers = ([column for name, column in plain if name in tier] for tier in known)
        names = next((found for found in tiers if found), [])
    if len(set(names)) > 1:
        both = " and ".join(map(repr, names))
        raise UserError(f"{table.path}: {both} could both be meant: say {flag}COLUMN")
    if names and table.columns.count(names[0]) > 1:
        raise UserError(f"{table.path}: {table.columns.count(names[0])} columns are called {names[0]!r}")
    return names[0] if names else None
