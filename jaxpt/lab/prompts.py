"""A JSONL of prompts, and of answers to them, as tokens; and who judges completions.

    sft   {"prompt", "response"}      dpo   {"prompt", "chosen", "rejected"}      grpo   {"prompt", and anything}

A prompt is taken as it stands, or inside a template that is given with the data; its answers and its judge know the row alone.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpt.lab.errors import UserError
from jaxpt.lab.tokenizer import Tokenizer

PROMPT = "{prompt}"  # what a template has in the prompt's place
ANSWERS = {"sft": ("response",), "dpo": ("chosen", "rejected"), "grpo": ()}
Verifier = Callable[[str, str, dict[str, Any]], float]  # (prompt, completion, the row) -> reward


class Text(NamedTuple):
    line: int  # of the file, from 1
    prompt: list[int]
    answers: tuple[list[int], ...]  # of ANSWERS; an end token is their last where the tokenizer has one
    row: dict[str, Any]


class Texts(NamedTuple):
    kept: list[Text]
    bad: dict[int, str]  # line -> what is wrong with it
    cut: int  # answers that lost their end, so that prompt and answer fit


def read(path: str | Path, method: str, tokenizer: Tokenizer, length: int, room: int, skip_bad: bool,
         template: str = PROMPT) -> Texts:
    """Every row of a file; the rest as of_lines."""
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}") from None
    return of_lines(lines, f"--data {path}", method, tokenizer, length, room, skip_bad, template)


def read_template(path: str | Path) -> str:
    """The text that prompts stand in: the file's, less one newline at its very end. UserError where it has no {prompt}."""
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--template {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--template {path}: expected a text in UTF-8") from None
    if PROMPT not in text:
        raise UserError(f"--template {path}: {PROMPT} is expected in it, where a row's prompt is to stand")
    return text.removesuffix("\n").removesuffix("\r")


def of_lines(lines: Sequence[bytes], where: str, method: str, tokenizer: Tokenizer, length: int, room: int,
             skip_bad: bool, template: str = PROMPT) -> Texts:
    """The rows of JSON lines, their prompts in `template`. length: tokens of prompt and answer at most, an answer is cut
    there; room: of these, those that a prompt must leave. UserError, beginning with `where`, for a bad row, unless those are
    skipped, or where none is left."""
    kept, bad, cut = [], {}, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text, shortened = _text(number, line, method, tokenizer, length, room, template)
        except ValueError as error:
            bad[number] = str(error)
            continue
        kept.append(text)
        cut += shortened
    if bad and not skip_bad:
        raise UserError(f"{where}: {_complaint(bad)}; mend it, or keep the other rows by --skip-bad.")
    if not kept:
        raise UserError(f"{where}: " + (f"no row is left: {_complaint(bad)}." if bad else "the file has no rows."))
    return Texts(kept, bad, cut)


def _complaint(bad: Mapping[int, str]) -> str:
    (first, words), *others = bad.items()
    lines = ", ".join(str(line) for line, _ in others[:5]) + (", ..." if len(others) > 5 else "")
    return f"line {first} {words}" + (f" (also bad: {lines})" if others else "")


def _text(number: int, line: bytes, method: str, tokenizer: Tokenizer, length: int, room: int, template: str
          ) -> tuple[Text, int]:
    """The text of a line, and how many of its answers were cut. ValueError says what is wrong."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise ValueError("is no JSON") from None
    if type(row) is not dict:
        raise ValueError("is no JSON object")
    for key in ("prompt", *ANSWERS[method]):
        if type(row.get(key)) is not str:
            wrong = f"has {key} = {json.dumps(row[key])[:60]}, expected a text" if key in row else f"has no {key!r}"
            raise ValueError(f"{wrong} (--method {method} reads prompt{', '.join(('', *ANSWERS[method]))})")
        try:
            row[key].encode()
        except UnicodeEncodeError:
            raise ValueError(f"has half a character in {key!r}") from None
    stands = template.replace(PROMPT, row["prompt"])
    prompt, most = tokenizer.encode(stands), length - room
    if len(prompt) > most:
        left = f"--length {length} less --new {room}" if method == "grpo" else f"--length {length}, less one for an answer"
        raise ValueError(f"has a prompt of {len(prompt)} tokens, expected at most {most}: {left}")
    if method == "grpo" and not prompt:
        raise ValueError("has a prompt without tokens")
    answers = [_answer(tokenizer, stands, prompt, row[key]) for key in ANSWERS[method]]
    for key, answer in zip(ANSWERS[method], answers, strict=True):
        if len(prompt) + len(answer) < 2 or not answer:
            raise ValueError(f"has nothing to learn in {key!r}")
    short = tuple(answer[: length - len(prompt)] for answer in answers)
    return Text(number, prompt, short, row), sum(len(a) < len(b) for a, b in zip(short, answers, strict=True))


def _answer(tokenizer: Tokenizer, prompt: str, before: list[int], answer: str) -> list[int]:
    """The tokens of an answer as they stand behind those of its prompt, which are what a completion begins from."""
    whole = tokenizer.encode(prompt + answer)
    same = whole[: len(before)] == before
    return (whole[len(before) :] if same else tokenizer.bare(answer)) + list(tokenizer.ends[:1])


def judge(verifier: Verifier, name: str, text: Text, completion: str) -> float:
    """The reward of the verifier `name`. UserError where it raises or gives no finite number."""
    row = copy.deepcopy(text.row)  # what a verifier does to it is forgotten
    try:
        value = verifier(row["prompt"], completion, row)
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{name} raised {words}, at line {text.line} and completion {completion!r:.60}.") from None
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name} gave {value!r:.60}, expected a finite number, at line {text.line} and completion "
                        f"{completion!r:.60}.")
    return number
