"""Generated tasks in the place of a file of prompts: reasoning-gym's questions, and its own verifiers of answers.

    reasoning_gym:NAME[,size=N][,seed=K][,PARAMETER=VALUE ...]

size: questions drawn to train on (500), less those that are held out; seed: of the first of them (0); a parameter is one of
the task's own, its value JSON or a word. Held-out questions are those of the seeds behind, no two alike, and a question that
is held out is not trained on.
"""

import dataclasses
import importlib.metadata
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxpt.lab.errors import UserError, expected
from jaxpt.lab.prompts import Verifier

PREFIX, SIZE, HELD = "reasoning_gym:", 500, 64
TRIES = 10  # questions drawn for each held-out one, which differ from each other
TEMPLATE = "{prompt}\n"  # of a question, where no other is given
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Tasks(NamedTuple):
    train: list[dict[str, Any]]  # {"prompt", "response", "task"}: the question, the right answer, a number
    held: list[dict[str, Any]]
    verifier: Verifier
    version: str  # of reasoning-gym


def answer_in(completion: str) -> str:
    """What stands in the last <answer>...</answer>, the whole text where there is none, without blanks at both ends."""
    marked = ANSWER.findall(completion)
    return (marked[-1] if marked else completion).strip()


def tasks(spec: str, held_out: int | None) -> Tasks:
    """The tasks that `spec` names. held_out: questions kept apart; None: a tenth of size, 64 at most. UserError for what is
    not there. The verifier gives score_answer's number for answer_in(completion), and 0 where that raises."""
    name, given = parsed(spec)
    size, seed = (_whole(spec, given.pop(key, default), key, least) for key, default, least in
                  (("size", SIZE, 1), ("seed", 0, 0)))
    apart_at_most = min(HELD, -(-size // 10)) if held_out is None else held_out
    if apart_at_most < 0:
        raise UserError(f"--held-out {held_out}: expected at least 0")
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise UserError(f"--tasks {spec}: the package reasoning-gym is not installed; pip install 'jaxpt[gym]' installs it") from None
    if name not in DATASETS:
        raise UserError(f"--tasks {spec}: the task {name!r} is unknown: {expected(name, DATASETS)}")
    known = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("size", "seed")]
    for parameter in given:
        if parameter not in known:
            raise UserError(f"--tasks {spec}: {name} has no parameter {parameter!r}: {expected(parameter, known)}")

    def drawn(first: int, count: int) -> Iterator[tuple[Any, dict]]:
        """(the data set, one of its questions), each time."""
        try:
            dataset = create_dataset(name, seed=first, size=max(count, 1), **given)
            for i in range(count):
                yield dataset, dataset[i]
        except Exception as error:  # whatever its checks raise
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"--tasks {spec}: reasoning-gym refuses ({words})") from None

    (dataset, *_), found = zip(*drawn(seed, size), strict=True)
    apart: dict[str, dict] = {}  # question -> its entry
    for _, entry in drawn(seed + size, TRIES * apart_at_most):
        apart.setdefault(entry["question"], entry)
        if len(apart) == apart_at_most:
            break
    if held_out is not None and len(apart) < held_out:
        raise UserError(f"--held-out {held_out}: among {TRIES * held_out} of {spec} are {len(apart)} different questions")
    everything = [entry for entry in found if entry["question"] not in apart] + list(apart.values())
    rows = [{"prompt": entry["question"], "response": entry["answer"], "task": number}
            for number, entry in enumerate(everything)]
    train = len(rows) - len(apart)
    if not train:
        raise UserError(f"--tasks {spec}: every question is also held out; expected a larger size, or harder parameters")

    def verifier(prompt: str, completion: str, row: dict[str, Any]) -> float:
        try:
            return dataset.score_answer(answer_in(completion), entry=everything[row["task"]])
        except Exception:  # some scorers parse what a model has written
            return 0.0

    return Tasks(rows[:train], rows[train:], verifier, importlib.metadata.version("reasoning-gym"))


def parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """(name, what is given for it). UserError where the spec is none."""
    name, *pairs = re.split(r",(?=[A-Za-z_]+=)", spec.removeprefix(PREFIX))  # a value may have commas
    if not spec.startswith(PREFIX) or not re.fullmatch(r"\w+", name):
        raise UserError(f"--tasks {spec}: {PREFIX}NAME is expected, and behind it ,size=N ,seed=K ,PARAMETER=VALUE")
    return name, {key: _value(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _whole(spec: str, value: Any, name: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise UserError(f"--tasks {spec}: {name}={value}: a whole number of at least {least} is expected")
    return value
