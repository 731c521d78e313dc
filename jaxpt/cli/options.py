"""Words of a command line into values, with errors that are one sentence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpt.lab.errors import UserError, expected


class Option(NamedTuple):
    parse: Callable[[str], Any] | None  # None: a flag
    default: Any  # a tuple: the option may be repeated, and what is read adds up
    words: str  # for --help

    def usage(self, name: str) -> str:
        return name if self.parse is None else f"{name} {name.lstrip('-').upper()}"


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number is expected") from None


def one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(expected(text, choices))
        return text
    return read


def positive(text: str) -> float:
    from jaxpt.lab.tables import positive as read

    try:
        return read(text)
    except ValueError:
        raise ValueError("a number above 0 is expected, like 6, 1e-3 or 70M") from None


def pairs(read: Callable[[str], Any]) -> Callable[[str], tuple[tuple[str, Any], ...]]:
    """NAME=VALUE[,NAME=VALUE ...]"""
    def parse(text: str) -> tuple[tuple[str, Any], ...]:
        parts = [part.partition("=") for part in text.split(",")]
        if not all(name and equals and value for name, equals, value in parts):
            raise ValueError("NAME=VALUE is expected, with commas between several")
        return tuple((name.strip(), read(value)) for name, _, value in parts)
    return parse


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def split(words: Sequence[str], options: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """(values of the known options, all other words in their order)."""
    values = {name: option.default for name, option in options.items()}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        option = options.get(name)
        if option is None:
            rest.append(word)
        elif option.parse is None:
            if equals:
                raise UserError(f"{name} takes no value, got {value!r}")
            values[name] = True
        else:
            if not equals:
                if not queue or queue[0].startswith("--"):
                    raise UserError(f"{name} needs a value: {option.words}")
                value = queue.pop(0)
            try:
                read = option.parse(value)
            except ValueError as error:
                raise UserError(f"{name} {value}: {error}") from None
            values[name] = values[name] + read if isinstance(option.default, tuple) else read
    return values, rest


def no_more(rest: Sequence[str], options: Mapping[str, Option]) -> None:
    """UserError if a word is left over."""
    if rest:
        word = rest[0].partition("=")[0]
        what = "option" if word.startswith("-") else "argument"
        raise UserError(f"{what} {word} is unknown: {expected(word, options)}")


def help_text(usage: str, what: str, options: Mapping[str, Option]) -> str:
    lines = [f"usage: {usage}", "", what, ""]
    width = max(len(o.usage(name)) for name, o in options.items())
    lines += [f"  {o.usage(name):{width}}  {o.words}" for name, o in options.items()]
    return "\n".join(lines)
