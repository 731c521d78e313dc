"""`jaxpt list` and `jaxpt describe`: what there is, and what a row says."""

import json
from collections.abc import Sequence

from jaxpt import errata
from jaxpt.cli.options import Option, help_text, no_more, split
from jaxpt.lab import catalogue
from jaxpt.lab.errors import UserError, expected
from jaxpt.verify import matrix

KINDS = {  # kind -> () -> [(name, summary)]; a kind without a room yet is empty
    "experiments": lambda: [(entry.name, entry.question) for entry in catalogue.experiments()],
    "objectives": catalogue.objectives,
    "envs": catalogue.environments,
    "laws": catalogue.laws,
    "invariants": lambda: [(row["name"], matrix.words(row)) for row in matrix.records()],
    "errata": lambda: [(row.name, errata.words(row)) for row in errata.ERRATA],
}
LIST = {"--json": Option(None, False, "for machines"), "--help": Option(None, False, "this text")}
DESCRIBE = {
    "--vs": Option(str, None, "another row: say how the two differ"),
    "--json": Option(None, False, "for machines"), "--help": Option(None, False, "this text"),
}


def list_command(words: Sequence[str]) -> int:
    values, rest = split(["--help" if word == "-h" else word for word in words], LIST)
    if values["--help"]:
        print(help_text("jaxpt list [KIND] [--json]", f"Lists one kind of things: {', '.join(KINDS)}.", LIST))
        return 0
    kind, rest = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else ("experiments", rest)
    no_more(rest, LIST)
    if kind not in KINDS:
        raise UserError(f"kind {kind!r} is unknown: {expected(kind, KINDS)}")
    if values["--json"]:
        print(json.dumps(_records(kind), indent=1))
        return 0
    rows = KINDS[kind]()
    if not rows:
        print(f"{kind}: none yet")
    else:
        _print_table(kind, rows)
    return 0


def _records(kind: str) -> list[dict]:
    """For machines. Objectives come with all that their rows say, which takes importing jax."""
    if kind == "objectives":
        from jaxpt.objectives import ROWS
        from jaxpt.objectives.describe import record

        return [record(row) for row in ROWS.values()]
    if kind == "errata":
        return [errata.record(row) for row in errata.ERRATA]
    if kind == "invariants":
        return matrix.records()
    if kind == "laws":
        return catalogue.law_records()
    return [{"name": name, "summary": summary} for name, summary in KINDS[kind]()]


def _print_table(kind: str, rows: Sequence[tuple[str, str]]) -> None:
    import shutil
    import textwrap

    width = max(len(name) for name, _ in rows)
    room = max(30, shutil.get_terminal_size((110, 24)).columns - width - 2)
    for name, summary in rows:
        lines = [line for text in summary.split("\n") for line in textwrap.wrap(text, room)] or [""]
        print(f"{name:{width}}  " + f"\n{'':{width}}  ".join(lines))


def describe_command(words: Sequence[str]) -> int:
    values, rest = split(["--help" if word == "-h" else word for word in words], DESCRIBE)
    if values["--help"]:
        print(help_text("jaxpt describe ROW [--vs ROW] [--json]",
                        "An objective's formula with all its constants, or how two rows differ.", DESCRIBE))
        return 0
    if not rest or rest[0].startswith("-"):
        no_more(rest, DESCRIBE)
        raise UserError("ROW is missing: jaxpt describe ROW is expected; "
                        "`jaxpt list objectives` shows the rows")
    name, other = rest[0], values["--vs"]
    no_more(rest[1:], DESCRIBE)
    from jaxpt.objectives import ROWS
    from jaxpt.objectives.describe import describe, difference

    for row in filter(None, (name, other)):
        if row not in ROWS:
            raise UserError(f"row {row!r} is unknown: {expected(row, ROWS)}")
    try:
        text = describe(name) if other is None else difference(name, other)
    except ValueError as error:
        raise UserError(str(error)) from error
    print(json.dumps({"row": name, "vs": other, "text": text}) if values["--json"] else text)
    return 0
