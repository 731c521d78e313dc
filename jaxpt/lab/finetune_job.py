"""What a fine-tuning run is before it touches the disk: its settings, checked, and what they name, read."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxpt.lab import checkpoint, gym, identity, prompts, tokenizer
from jaxpt.lab.errors import UserError, expected, within
from jaxpt.lab.prompts import Text, Texts, Verifier
from jaxpt.models import LoraConfig, stack_layers
from jaxpt.train import finetune as tuning
from jaxpt.train.finetune import METHODS, FinetuneConfig
from jaxpt.train.optim import OptimConfig

STAGE = "finetune"
RATES = {True: 2e-4, False: 2e-5}  # of adapters; of everything, a tenth of it (models.lora.RATE_RATIO)
SPLIT, ORDER, DRAW, START, HELD = range(5)  # what a run's key is folded with
DEEP = 8  # layers beyond which one is compiled and scanned


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is a function of, beside the contents of its files. Raises ValueError, naming the flag."""

    checkpoint: str
    data: str | None = None
    tasks: str | None = None  # in the place of data: lab.gym
    method: str = "sft"
    objective: str | None = None  # None: the method's own name
    template: str | None = None  # a file: the text in which prompts stand
    verifier: str | None = None  # the name by which the verifier was found
    lora_rank: int | None = 8  # None: everything is trained
    learning_rate: float | None = None  # None: RATES
    steps: int = 100
    batch: int = 8  # rows of the file per step
    micro: int = 0
    group: int = 8
    new: int = 64
    length: int = 256
    temperature: float = 1.0
    held_out: int | None = None  # rows; None: a tenth, 64 at most
    every: int = 10  # steps between two saved states
    seed: int = 0
    offload: bool = False
    skip_bad: bool = False
    bytes: bool = False

    def __post_init__(self):
        within(self, 1, np.inf, "steps", "batch", "group", "new", "every")
        if self.lora_rank is not None:
            within(self, 1, np.inf, "lora_rank")
        within(self, 0, np.inf, "micro")
        within(self, 0, 2**31 - 1, "seed")
        within(self, 2, np.inf, "length")
        if self.method not in METHODS:
            raise ValueError(f"--method {self.method}: {expected(self.method, METHODS)}")
        if self.objective is not None and self.objective not in (known := tuning.objectives(self.method)):
            raise ValueError(f"--objective {self.objective} is none that --method {self.method} can follow: "
                             f"{expected(self.objective, known)}")
        if (self.data is None) == (self.tasks is None):
            raise ValueError("--data FILE.jsonl is missing: it, or --tasks reasoning_gym:NAME, is expected" if self.data is None
                             else f"--tasks {self.tasks}: expected without --data")
        if self.tasks is not None and (self.method == "dpo" or self.verifier is not None):
            raise ValueError(f"--tasks {self.tasks}: expected with --method sft or grpo, and without --verifier")
        if self.tasks is None and (self.method == "grpo") != (self.verifier is not None):
            needs = "is missing: module:function or file.py:function" if self.verifier is None else f"{self.verifier}: nothing"
            raise ValueError(f"--verifier {needs} is expected with --method {self.method}")
        if self.method == "grpo" and self.new >= self.length:
            raise ValueError(f"--new {self.new}: expected less than --length {self.length}, which prompts share")


class Job(NamedTuple):
    """A run before it touches the disk."""

    settings: Settings
    cfg: FinetuneConfig
    read: checkpoint.Checkpoint
    tokenizer: tokenizer.Tokenizer
    texts: Texts
    train: list[Text]
    held: list[Text]
    width: int  # tokens of a row; with grpo, of a prompt
    verifier: Verifier | None
    contents: dict[str, str]  # what was read -> its sha256
    key: jax.Array

    @property
    def start(self):
        """(what never changes, the first state)."""
        params = stack_layers(self.read.params) if self.cfg.model.scan else self.read.params
        frozen, state = tuning.begin(self.cfg, jax.random.fold_in(self.key, START), params)
        return (tuning.offloaded(frozen) if self.settings.offload else frozen), state


def make_job(settings: Settings, verifier: Verifier | None) -> Job:
    read = checkpoint.read(settings.checkpoint)
    words = (tokenizer.of_bytes if settings.bytes else tokenizer.read)(read.folder, read.cfg.vocab)
    key = jax.random.key(settings.seed)
    texts, train, held, contents, verifier = _texts(settings, words, verifier, jax.random.fold_in(key, SPLIT))
    lora = None if settings.lora_rank is None else LoraConfig(rank=settings.lora_rank)
    rate = RATES[lora is not None] if settings.learning_rate is None else settings.learning_rate
    try:
        cfg = FinetuneConfig(
            model=replace(read.cfg, lora=lora, scan=read.cfg.n_layers > DEEP),
            optim=OptimConfig(learning_rate=rate), method=settings.method, objective=settings.objective or settings.method,
            micro=settings.micro, group=settings.group, new=settings.new, temperature=settings.temperature, ends=words.ends,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    if settings.offload and (lora is not None or "ref_logp" not in cfg.row.needs):
        raise UserError("--offload: expected with --full and an objective with a reference, which is what the host would keep")
    longest = max(len(text.prompt) + max(map(len, text.answers), default=0) for text in texts.kept)
    if verifier is not None:  # a bad one is found before anything is computed
        prompts.judge(verifier, judge_of(settings), texts.kept[0], "")
    folder = sorted(path for path in read.folder.iterdir() if path.suffix in (".json", ".safetensors"))
    contents |= {path.name: _digest(path) for path in folder}
    return Job(settings, cfg, read, words, texts, train, held, -(-longest // 8) * 8, verifier, contents, key)


def _texts(settings: Settings, words: tokenizer.Tokenizer, verifier: Verifier | None, key: jax.Array
           ) -> tuple[Texts, list[Text], list[Text], dict[str, str], Verifier | None]:
    """(all texts, those to train on, those held out, what they are, who judges them)."""
    room = settings.new if settings.method == "grpo" else 1
    template = prompts.PROMPT if settings.tasks is None else gym.TEMPLATE
    if settings.template is not None:
        template = prompts.read_template(settings.template)
    how = (settings.method, words, settings.length, room, settings.skip_bad, template)
    contents = {"template": identity.digest(template)}
    if settings.tasks is None:
        texts = prompts.read(settings.data, *how)
        contents |= {"data": _digest(Path(settings.data).expanduser())}
        return texts, *_split(settings, texts.kept, key), contents, verifier
    tasks = gym.tasks(settings.tasks, settings.held_out)
    lines = [json.dumps(row).encode() for row in (*tasks.train, *tasks.held)]
    texts = prompts.of_lines(lines, f"--tasks {settings.tasks}", *how)
    train = [text for text in texts.kept if text.line <= len(tasks.train)]
    if not train:
        raise UserError(f"--tasks {settings.tasks}: no question to train on is left; see --length")
    judge = tasks.verifier if settings.method == "grpo" else None
    contents |= {"tasks": identity.digest(lines), "reasoning-gym": tasks.version}
    return texts, train, texts.kept[len(train) :], contents, judge


def judge_of(settings: Settings) -> str:
    """The flag that names who judges completions."""
    return f"--verifier {settings.verifier}" if settings.tasks is None else f"--tasks {settings.tasks}"


def _split(settings: Settings, texts: list[Text], key: jax.Array) -> tuple[list[Text], list[Text]]:
    count = min(64, -(-len(texts) // 10), len(texts) - 1) if settings.held_out is None else settings.held_out
    if not 0 <= count < len(texts):
        raise UserError(f"--held-out {count}: expected less than the {len(texts)} rows of {settings.data}")
    apart = {int(i) for i in np.asarray(tuning.shuffled(key, len(texts)))[:count]}
    return [t for i, t in enumerate(texts) if i not in apart], [t for i, t in enumerate(texts) if i in apart]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
