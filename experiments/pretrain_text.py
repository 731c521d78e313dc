"""Does a byte-level decoder model real text better than counting pairs, and better than xz?

Source: the comparison of a small language model with n-grams and a dictionary coder on one held-out
text; compression as prediction: Deletang et al. 2023 (arXiv 2309.10668), who also condition the coder.

Command: jaxpt run pretrain_text [--corpus FILE-OR-FOLDER]
    The default corpus is the documentation that comes with Python (help topics and docstrings, about
    2 MB), so its bytes depend on the Python that runs. At most `corpus_bytes` are read, and a short text
    is passed over `passes` times at most.

Data: duplicates are removed before the split, documents are held out by hash, near-duplicates are
dropped from the held-out side (rules in jaxpt/data/text.py). Every held-out byte, separators included,
is scored exactly once by each of the four: unigram, bigram, xz given the train text, and the decoder.

Unit of replication: the held-out block, a run of whole documents, paired over the
models. Documents stand in the order of their hashes, so blocks are exchangeable samples of the corpus.
A single document is too short to charge a coder for, and one xz costs seconds per megabyte of train
text, hence blocks and not documents. There is one seed: the claims are about this trained decoder on new
text, not about retraining.

Expected result (default corpus of Python 3.11, all held-out bytes): bigram 3.852, xz 1.966 and the decoder 1.930
bits per byte. The decoder passes bigram after 0.2 MB of training and xz after 3.3 MB; a shorter run, such as
`--steps 800` (1.6 MB), is behind xz. Blocks differ: on tables and other repetitions xz stays ahead.
The optimizer's settings were compared on held-out windows of another split of the default corpus (and the size
of a document's pieces was settled then), never on what is held out here.
Minutes: about 12 on two cores.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jaxpt.data import ngram, text
from jaxpt.lab.corpus import LIMIT, load
from jaxpt.lab.errors import UserError, within
from jaxpt.lab.experiment import Claim, Curves, Experiment, Panel, Stage, Tier
from jaxpt.models import ModelConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.train.pretrain import (
    PretrainConfig, SampleConfig, ScoreConfig, make_pretrain, make_sample, make_score,
)

THREADS = 2
LEAST_BLOCKS = 6  # two claims on fewer blocks cannot be decided under Holm's correction
SCORE_STEPS = 60  # whole chunks of 20, so that every scoring stage compiles one program


@dataclass(frozen=True)
class Config:
    corpus: str = ""  # a file or a folder; empty: the documentation that comes with Python
    corpus_bytes: int = LIMIT  # at most so much is read
    held_share: float = 0.1  # of the bytes
    held_bytes: int = 250_000  # at most about so much is held out: scoring it takes time
    blocks: int = 16  # held-out blocks, the units of the claims
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    dots: str = "float32"  # or bfloat16, faster where the processor has it
    window: int = 256  # bytes of a row
    stride: int = 64  # a scored byte sees between window - stride and window - 1 bytes
    batch: int = 8  # rows of an update
    steps: int = 2000  # updates
    passes: int = 8  # over the train text at most: of a short text fewer updates are made, not to memorise it
    early_steps: int = 60  # the control stops the same run here
    learning_rate: float = 8e-3
    weight_decay: float = 0.1
    every: int = 50  # updates between two looks at the held-out probe
    probe: int = 64  # windows of the held-out probe
    sample_rows: int = 4
    sample_prompt: int = 64
    sample_length: int = 160

    def __post_init__(self):
        within(self, 1, math.inf, "corpus_bytes", "held_bytes", "d_model", "n_layers", "n_heads", "batch", "steps",
               "passes", "early_steps", "every", "probe", "sample_rows", "sample_prompt", "sample_length")
        within(self, LEAST_BLOCKS, math.inf, "blocks")
        within(self, 2, math.inf, "window")
        within(self, 1, self.window - 1, "stride", "sample_prompt")
        within(self, 1, self.window - self.sample_prompt, "sample_length")
        within(self, 0.001, 0.9, "held_share")
        within(self, 0, 10, "learning_rate", "weight_decay")
        self.model()

    def model(self) -> ModelConfig:
        return ModelConfig(vocab=256, d_model=self.d_model, n_layers=self.n_layers, n_heads=self.n_heads,
                           qk_norm=True, tied=False, dots=self.dots)

    def updates(self, train_bytes: int) -> int:
        return max(1, min(self.steps, self.passes * train_bytes // (self.batch * self.window)))

    def pretrain(self, steps: int) -> PretrainConfig:
        optim = OptimConfig(learning_rate=self.learning_rate, method="muon", schedule="cosine",
                            warmup=steps // 20, decay_steps=steps, weight_decay=self.weight_decay)
        return PretrainConfig(self.model(), optim, self.window, self.batch, self.every)


def inputs(cfg: Config) -> dict[str, np.ndarray]:
    """The streams, and what the three baselines need for each held-out block, in bits."""
    found, parts = load(cfg.corpus, cfg.corpus_bytes, cfg.held_share, cfg.held_bytes)
    train, held = text.stream(parts.train), text.stream(parts.held)
    block = text.blocks(parts.held, cfg.blocks) if parts.held else np.zeros(0, np.int32)
    units = len(np.unique(block))
    if units < LEAST_BLOCKS or len(train) < cfg.window or len(held) < cfg.window:
        raise UserError(f"--corpus {cfg.corpus or '(default)'}: {units} held-out blocks of whole documents, "
                        f"expected at least {LEAST_BLOCKS}; a longer text has more.")
    unigram = ngram.unigram_bits(ngram.unigram_logp(train), held)
    bigram = ngram.bigram_bits(ngram.fit_bigram(train), held)
    texts = [held[block == b].tobytes() for b in range(units)] + [held.tobytes()]
    with ThreadPoolExecutor(THREADS) as pool:  # lzma lets go of the interpreter's lock
        *xz, xz_whole = ngram.xz_bits(train.tobytes(), texts, pool.map)
    return {
        "train": train, "held": held, "block": block, "block_bytes": np.bincount(block),
        "unigram": np.bincount(block, unigram), "bigram": np.bincount(block, bigram),
        "xz": np.array(xz), "xz_whole": np.array(xz_whole),
        "bigram_line": np.full((1, cfg.updates(len(train))), bigram.mean()),  # for the figure
        "xz_line": np.full((1, cfg.updates(len(train))), sum(xz) / len(held)),
        "documents": np.array([len(found.documents), len(parts.train), len(parts.held)]),
        "removed": np.array([parts.duplicates, parts.overlapping]),
        "skipped": np.array(sum(found.skipped.values())),
    }


def stages(cfg: Config, inputs: Mapping[str, np.ndarray]) -> list[Stage]:
    held, block = inputs["held"], inputs["block"]
    steps = cfg.updates(len(inputs["train"]))
    windows = text.scoring_windows(held, cfg.window, cfg.stride)
    one_byte = text.scoring_windows(held, window=2, stride=1)
    probe = np.linspace(0, len(windows.tokens) - 1, min(cfg.probe, len(windows.tokens))).astype(int)
    pretrain = partial(make_pretrain, train=inputs["train"], probe_tokens=windows.tokens[probe],
                       probe_counts=windows.position[probe] >= 0)

    def score(name: str, after: str, windows: text.Windows) -> Stage:
        unit = np.where(windows.position < 0, -1, block[windows.position])
        make = partial(make_score, tokens=windows.tokens, unit=unit, units=int(block[-1]) + 1)
        batch = -(-len(unit) // SCORE_STEPS)
        return Stage(name, make, ScoreConfig(cfg.model(), batch), SCORE_STEPS, after)

    first = np.searchsorted(block, np.arange(cfg.sample_rows) % (block[-1] + 1))  # where blocks begin
    first = np.minimum(first, len(held) - cfg.sample_prompt)
    sample = partial(make_sample, prompts=held[first[:, None] + np.arange(cfg.sample_prompt)[None, :]])
    return [
        Stage("early", pretrain, cfg.pretrain(steps), min(cfg.early_steps, steps), stream="pretrain"),
        score("early_score", "early", windows),
        Stage("pretrain", pretrain, cfg.pretrain(steps), steps),
        score("score", "pretrain", windows),
        score("one_byte_score", "pretrain", one_byte),
        Stage("sample", sample, SampleConfig(cfg.model(), cfg.sample_length), 1, "pretrain"),
    ]


def decoder(curves: Curves, stage: str = "score") -> np.ndarray:
    """[blocks] bits per byte, mean over seeds."""
    return curves[f"{stage}/bits"].sum(axis=1).mean(axis=0) / curves["inputs/block_bytes"]


def baseline(curves: Curves, name: str) -> np.ndarray:
    """[blocks] bits per byte."""
    return curves[f"inputs/{name}"] / curves["inputs/block_bytes"]


def bigram_minus_decoder(curves: Curves) -> np.ndarray:
    return baseline(curves, "bigram") - decoder(curves)


def bigram_minus_one_byte(curves: Curves) -> np.ndarray:
    return baseline(curves, "bigram") - decoder(curves, "one_byte_score")


def xz_minus_decoder(curves: Curves) -> np.ndarray:
    return baseline(curves, "xz") - decoder(curves)


def xz_minus_early(curves: Curves) -> np.ndarray:
    return baseline(curves, "xz") - decoder(curves, "early_score")


CLAIMS = [
    Claim(
        "beats_bigram",
        "On held-out text the decoder needs fewer bits than the bigram model, by more than 0.1 bit per byte.",
        bigram_minus_decoder, 0.1,
        "the same trained decoder when it sees the previous byte only", bigram_minus_one_byte,
        unit="held-out block",
    ),
    Claim(
        "beats_xz",
        "On held-out text the decoder needs fewer bits than xz that has read the train text, by more than "
        "0.02 bit per byte.",
        xz_minus_decoder, 0.02,
        "the same run stopped after `early_steps` updates", xz_minus_early,
        unit="held-out block",
    ),
]

PANELS = [
    Panel(
        "bits per byte",
        {"decoder, train": "pretrain/bits", "decoder, held-out probe": "pretrain/held_bits",
         "bigram, held-out": "inputs/bigram_line", "xz given train, held-out": "inputs/xz_line"},
        ylabel="bits per byte", xlabel="update",
    ),
]


def sections(cfg: Config, curves: Curves) -> str:
    return "\n\n".join([_table(curves), _crossings(curves), _samples(cfg, curves)])


def _table(curves: Curves) -> str:
    size = curves["inputs/block_bytes"]
    rows = {
        "unigram": baseline(curves, "unigram"),
        "bigram": baseline(curves, "bigram"),
        "xz given train, block by block": baseline(curves, "xz"),
        "decoder": decoder(curves),
        "decoder, one byte of context": decoder(curves, "one_byte_score"),
        "decoder, stopped early": decoder(curves, "early_score"),
    }
    read, in_train, in_held = curves["inputs/documents"]
    repeats, overlapping = curves["inputs/removed"]
    return "\n".join([
        "## Held-out bits per byte", "",
        f"{read} documents read, {int(curves['inputs/skipped'])} files skipped, {repeats} bytes of "
        f"duplicates removed. Train: {len(curves['inputs/train'])} bytes in {in_train} documents. Held out: "
        f"{size.sum()} bytes in {in_held} documents and {len(size)} blocks, after {overlapping} bytes were "
        "dropped that overlap with train.", "",
        "| model | all bytes | best to worst block |", "| --- | --- | --- |",
        *(f"| {name} | {np.average(bits, weights=size):.4f} | {bits.min():.3f} to {bits.max():.3f} |"
          for name, bits in rows.items()),
        f"| xz given train, all blocks at once | {float(curves['inputs/xz_whole']) / size.sum():.4f} | |",
    ])


def _crossings(curves: Curves) -> str:
    """Where the probe's curve passes the baselines. The probe is a sample of the held-out text: the curve
    is shifted by what the sample differs at the end."""
    held, seen = (curves[f"pretrain/{name}"].mean(axis=0) for name in ("held_bits", "bytes"))
    measured = np.isfinite(held)
    held, seen = held[measured], seen[measured]
    if not held.size:
        return "## Crossings\n\nNot measured: `every` is larger than `steps`."
    size = curves["inputs/block_bytes"]
    offset = np.average(decoder(curves), weights=size) - held[-1]
    lines = ["## Crossings", "",
             f"The held-out probe's curve, shifted by {offset:+.4f} to end where the held-out text does:", ""]
    for label, name in (("bigram", "bigram"), ("xz given train", "xz")):
        level = np.average(baseline(curves, name), weights=size)
        below = np.nonzero(held + offset < level)[0]
        where = f"passes {{}} after {seen[below[0]]:,.0f}" if below.size else f"does not pass {{}} within {seen[-1]:,.0f}"
        lines.append(f"- the decoder {where.format(f'{label} ({level:.4f})')} bytes of training.")
    return "\n".join(lines)


def _samples(cfg: Config, curves: Curves) -> str:
    lines = ["## Samples", "", "The beginning of a held-out block; behind >>>, what the decoder draws."]
    for row in np.asarray(curves["sample/tokens"])[0, 0].astype(np.uint8):
        prompt, drawn = (part.tobytes().replace(b"\0", b"\n~~~\n").decode("utf-8", "replace")
                         for part in np.split(row, [cfg.sample_prompt]))
        lines += ["", *(f"    {line}" for line in f"{prompt}>>>{drawn}".splitlines())]
    return "\n".join(lines)


CPU = Config()
SMOKE = replace(
    CPU, corpus_bytes=400_000, blocks=8, d_model=32, n_layers=2, n_heads=2, window=64, stride=32, batch=8,
    steps=60, early_steps=20, every=20, probe=16, sample_rows=2, sample_prompt=16, sample_length=32,
)
FULL = replace(
    CPU, d_model=384, n_layers=8, n_heads=6, window=512, stride=128, batch=32, steps=10_000,
    learning_rate=4e-3,
)

EXPERIMENT = Experiment(
    tiers={"smoke": Tier(SMOKE, 1), "cpu": Tier(CPU, 1), "full": Tier(FULL, 4)},
    stages=stages, claims=CLAIMS, panels=PANELS, inputs=inputs, sections=sections, threads=THREADS,
)
