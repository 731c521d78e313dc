"""The tokenizer of a folder: its tokenizer.json by the package tokenizers (extra [hub])."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxpt.lab.errors import UserError


class Tokenizer(NamedTuple):
    encode: Callable[[str], list[int]]  # with what the tokenizer puts around every text
    decode: Callable[[Sequence[int]], str]  # special tokens are words too
    ends: tuple[int, ...]  # tokens that end a text, as generation_config.json or else config.json names them
    bare: Callable[[str], list[int]]  # encode, with nothing around


def read(path: str | Path, vocab: int) -> Tokenizer:
    """The tokenizer of a folder whose model has `vocab` tokens. UserError where there is none, or one of another model."""
    folder = Path(path).expanduser()
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder} has no tokenizer.json, which is how its texts would be read.")
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise UserError(f"{file}: reading it needs a package: pip install 'jaxpt[hub]' or pip install tokenizers.") from None
    try:
        found = Library.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"{file} is no tokenizer ({error}).") from None
    largest = max(found.get_vocab().values(), default=-1)
    ends = _ends(folder)
    if max((largest, *ends)) >= vocab:
        raise UserError(f"{file} has token {max((largest, *ends))}: expected numbers below {vocab}, the model's vocabulary.")
    return Tokenizer(
        lambda text: found.encode(text).ids, lambda ids: found.decode(list(ids), skip_special_tokens=False), ends,
        lambda text: found.encode(text, add_special_tokens=False).ids,
    )


def of_bytes(path: str | Path, vocab: int) -> Tokenizer:
    """UTF-8 bytes, for a folder whose model reads those; tokens beyond 255 are no text."""
    ends = _ends(Path(path).expanduser())
    need = max((255, *ends)) + 1
    if vocab < need:
        raise UserError(f"{path}: its model has {vocab} tokens: expected at least {need} for a model of bytes.")
    encode = lambda text: list(text.encode())  # noqa: E731
    return Tokenizer(encode, lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"), ends, encode)


def _ends(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        try:
            said = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        ends = said if type(said) is list else [] if said is None else [said]
        if not all(type(end) is int and end >= 0 for end in ends):
            raise UserError(f"{folder / name}: eos_token_id is {said!r}: expected a token's number, or several.")
        if ends:
            return tuple(ends)
    return ()
