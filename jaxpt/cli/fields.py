"""Words of a command line into the fields of a config, nested ones by dots."""

import contextlib
import dataclasses
import io
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpt.lab.errors import UserError, expected


def read_fields(default: Any, words: Sequence[str], options: Iterable[str]) -> dict[str, Any]:
    """The fields of `default` that the words change. options: flags beside the fields, for hints. Raises UserError."""
    known = field_flags(default, "--")
    groups = _groups(words)
    for group in groups:
        flag = group[0].partition("=")[0]
        if flag.replace("_", "-") not in known:
            hint = expected(flag.replace("_", "-"), [*known, *options])
            raise UserError(f"{'option' if flag.startswith('-') else 'argument'} {flag} is unknown: {hint}")
    read = _parse(default, words)
    if read is None:
        for group in groups:
            if _parse(default, group) is None:
                flag, _, value = " ".join(group).replace("=", " ", 1).partition(" ")
                raise UserError(f"{flag} {value}: {known[flag.replace('_', '-')]} is expected")
        raise UserError(f"{' '.join(words)}: these fields do not go together")
    return {name: value for name, value in read.items() if value != getattr(default, name)}


def print_fields(default: Any, prog: str) -> None:
    import tyro

    with contextlib.suppress(SystemExit):
        tyro.cli(type(default), default=default, prog=prog, args=["--help"])


def field_flags(config: Any, prefix: str) -> dict[str, str]:
    """Every flag of a config, nested ones by dots, with what it takes."""
    flags: dict[str, str] = {}
    for f in _fields(config):
        value, name = getattr(config, f.name), f.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            flags |= field_flags(value, f"{prefix}{name}.")
        else:
            kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
            flags[prefix + name] = f"a value of type {kind} (default {value!r})"
            if isinstance(value, bool):
                flags[prefix + name] = f"no value (default {value!r})"
                flags[f"{prefix}no-{name}"] = f"no value (default {value!r})"
    return flags


def _fields(config: Any) -> list[Any]:
    """All but configs that are absent, which words cannot make."""
    def absent(f):
        return getattr(config, f.name) is None and any(map(dataclasses.is_dataclass, typing.get_args(f.type)))

    return [f for f in dataclasses.fields(config) if not absent(f)]


def _groups(words: Sequence[str]) -> list[list[str]]:
    """[--a 1 2 --b] -> [[--a 1 2], [--b]]"""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _parse(default: Any, words: Sequence[str]) -> dict[str, Any] | None:
    """tyro's reading of the words; None where it finds a fault. A config's own ValueError is the user's: tyro
    would print it in a box, so the fields are read without the checks, which then run once on the whole."""
    import tyro

    bare, start = _bare(default)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read = tyro.cli(bare, default=start, args=list(words))
    except SystemExit:
        return None
    return {f.name: _checked(getattr(default, f.name), getattr(read, f.name)) for f in _fields(default)}


def _bare(config: Any) -> tuple[type, Any]:
    """A class with the fields of a config and none of its checks, and the config as one of it."""
    fields, values = [], {}
    for f in _fields(config):
        kind, values[f.name] = f.type, getattr(config, f.name)
        if dataclasses.is_dataclass(values[f.name]):
            kind, values[f.name] = _bare(values[f.name])
        fields.append((f.name, kind, dataclasses.field(default_factory=lambda value=values[f.name]: value)))
    space = {"__module__": type(config).__module__}
    bare = dataclasses.make_dataclass(type(config).__name__, fields, frozen=True, namespace=space)
    return bare, bare(**values)


def _checked(default: Any, read: Any) -> Any:
    """What was read as the config that it is of."""
    if not dataclasses.is_dataclass(default):
        return read
    values = {f.name: _checked(getattr(default, f.name), getattr(read, f.name)) for f in _fields(default)}
    try:
        return dataclasses.replace(default, **values)
    except ValueError as error:
        raise UserError(str(error)) from error
