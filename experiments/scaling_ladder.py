"""Does a ladder of small transformers on real text foretell the largest one, and what does it say of the best size?

Byte-level decoders are trained on an isoFLOP grid: three budgets a factor 4 apart, five sizes a factor 2 apart around
a guess of each budget's best, tokens from C = 6 N D. The Chinchilla law is fitted per seed, and a run of four times the
largest budget, which no fit has seen, is predicted. Rivals: the same law without E, and the loss of the largest
budget's best run. No run sees more than one epoch.

Source: the isoFLOP design of Hoffmann et al. 2022 (arXiv 2203.15556); a warm-up in proportion to the run and a rate
that decays to 0 at its end, after Porian et al. 2024 (arXiv 2406.19146).
Command: jaxpt run scaling_ladder [--corpus FILE-OR-FOLDER]
    The default corpus is the source of Python's standard library, so its bytes depend on the Python that runs. The
    report ends with the ladder as CSV, for `jaxpt fit ladder.csv --isoflop`.
    Rates are those that scripts/tune_ladder.py found on seeds of its own. Seeds 0..5 ship as the table that `jaxpt fit`
    takes where no file is named.
Expected: the loss falls in N and D, but Chinchilla's law does not foretell the largest run: it says 5% too much (7% at
    seeds 1000..1005), the law without E 1.4% (3%), the last budget's best 12% (11%), where seeds differ by 0.5% (1%). At
    this scale the loss still falls faster with every budget, as no law with a floor does. Five seeds were run first; they
    are too few to decide three claims.
Minutes: 25 on two cores beside other work (6 seeds, 31 CPU-minutes); --tier smoke 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxpt.data import text
from jaxpt.lab.corpus import load, python_sources
from jaxpt.lab.errors import UserError, within
from jaxpt.lab.experiment import Claim, Curves, Experiment, Panel, Stage, Tier
from jaxpt.lab.markdown import table
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig
from jaxpt.scaling import chinchilla as ch
from jaxpt.scaling.approaches import compare
from jaxpt.scaling.frontier import exponent
from jaxpt.train.optim import OptimConfig
from jaxpt.train.pretrain import PretrainConfig
from jaxpt.train.rung import make_rung

CHUNK = 25  # updates of a compiled call; every run's length is a multiple
SPREAD = 2  # sizes on either side of a budget's guessed best
FACTOR = 4  # between budgets; sizes are sqrt(FACTOR) apart
VOCAB = 256
LARGEST = "largest"  # the held-out run


@dataclass(frozen=True)
class Config:
    corpus: str = ""  # a file or a folder; empty: the source of Python's standard library
    corpus_bytes: int = 12_000_000  # at most so much is read
    held_bytes: int = 60_000  # held out, about
    smallest: float = 2e10  # FLOPs of the smallest budget, 6 N D
    budgets: int = 3
    ratio: float = 10.0  # the guess of D / N at the best size
    window: int = 128  # bytes of a row
    batch: int = 4  # rows of an update
    learning_rate: float = 2.6e-2  # of the size `rated_N` on `rated_D` tokens
    rate_slope_N: float = -0.26  # eta ~ N^slope_N D^slope_D, as experiments/tuned/scaling_ladder.json has it
    rate_slope_D: float = -0.35
    rated_N: float = 3e4
    rated_D: float = 2.7e5
    weight_decay: float = 0.1

    def __post_init__(self):
        within(self, 50_000, math.inf, "corpus_bytes")
        within(self, 1_000, math.inf, "held_bytes")
        within(self, 1e7, 1e18, "smallest")
        within(self, 2, 8, "budgets")
        within(self, 0.1, 1e4, "ratio")
        within(self, 8, 4096, "window")
        within(self, 1, 4096, "batch")
        within(self, 0, 10, "learning_rate", "weight_decay")
        within(self, -2, 2, "rate_slope_N", "rate_slope_D")
        within(self, 1e3, 1e15, "rated_N", "rated_D")


class Rung(NamedTuple):
    name: str
    budget: int  # its number; `budgets` for the held-out run
    model: ModelConfig
    N: int  # parameters, embeddings among them
    updates: int
    D: int  # tokens, a batch an update


def shape(wanted: float) -> ModelConfig:
    """The decoder of about `wanted` parameters, 12 L d^2 + 256 d, deeper as it grows."""
    layers = 2 if wanted < 6e4 else 3 if wanted < 2e5 else 4
    width = 4 * max(2, round((math.sqrt(VOCAB**2 + 48 * layers * wanted) - VOCAB) / (24 * layers) / 4))
    heads = max(h for h in range(1, max(1, width // 16) + 1) if width % (2 * h) == 0)
    return ModelConfig(vocab=VOCAB, d_model=width, n_layers=layers, n_heads=heads, qk_norm=True)


def params(model: ModelConfig) -> int:
    """Of jaxpt's decoder with a tied embedding: matrices, and the scales of the norms."""
    d, head = model.d_model, model.head_dim
    layer = 4 * d * d + 3 * d * model.ff + 2 * d + 2 * head
    return model.n_layers * layer + VOCAB * d + d


def rungs(cfg: Config) -> list[Rung]:
    """The grid and, last, the held-out run at the guessed best size of FACTOR times the largest budget."""
    tokens, found = cfg.batch * (cfg.window - 1), []
    for b in range(cfg.budgets + 1):
        C = cfg.smallest * FACTOR**b
        best = math.sqrt(C / (6 * cfg.ratio))
        held_out = b == cfg.budgets
        for step in [0] if held_out else range(-SPREAD, SPREAD + 1):
            model = shape(best * FACTOR ** (step / 2))
            N = params(model)
            updates = CHUNK * max(1, round(C / (6 * N * tokens) / CHUNK))
            name = LARGEST if held_out else f"budget{b}_size{step + SPREAD}"
            found.append(Rung(name, b, model, N, updates, updates * tokens))
    return found


def inputs(cfg: Config) -> dict[str, np.ndarray]:
    _, parts = load(cfg.corpus, cfg.corpus_bytes, 0.2, cfg.held_bytes, python_sources)
    train, held = text.stream(parts.train), text.stream(parts.held)
    if len(held) < cfg.window:
        raise UserError(f"--corpus {cfg.corpus or '(default)'}: {len(held)} bytes could be held out, expected at least "
                        f"one window of {cfg.window}")
    ladder = rungs(cfg)
    longest = max(r.D for r in ladder)
    if longest > len(train):
        raise UserError(f"--corpus {cfg.corpus or '(default)'}: {len(train)} bytes of distinct train text, but the "
                        f"longest run reads {longest}: more than one epoch is another law; a smaller --smallest needs less")
    return {
        "train": train, "held": held, "N": np.array([float(r.N) for r in ladder]),
        "D": np.array([float(r.D) for r in ladder]), "budget": np.array([r.budget for r in ladder]),
        "width": np.array([r.model.d_model for r in ladder]), "layers": np.array([r.model.n_layers for r in ladder]),
    }


def stages(cfg: Config, inputs: Mapping[str, np.ndarray]) -> list[Stage]:
    windows = text.scoring_windows(inputs["held"], cfg.window, cfg.window // 2)
    make = partial(make_rung, train=inputs["train"], probe_tokens=windows.tokens, probe_counts=windows.position >= 0)
    out = []
    for rung in rungs(cfg):
        optim = OptimConfig(learning_rate=cfg.learning_rate, method="muon", weight_decay=cfg.weight_decay)
        size, length = rung.N / cfg.rated_N, rung.D / cfg.rated_D
        rate = cfg.learning_rate * size**cfg.rate_slope_N * length**cfg.rate_slope_D
        out.append(Stage(rung.name, make, PretrainConfig(rung.model, optim, cfg.window, cfg.batch), rung.updates,
                         hyper={"learning_rate": rate, "updates": rung.updates}, chunk=CHUNK, stream="ladder"))
    return out


def names(curves: Curves) -> list[str]:
    """Of the runs, in the inputs' order: the held-out one is last."""
    count = np.bincount(curves["inputs/budget"])[:-1]
    return [f"budget{b}_size{k}" for b in range(count.size) for k in range(count[b])] + [LARGEST]


def held(curves: Curves) -> np.ndarray:
    """[seeds, runs] held-out loss at the end, nats per byte."""
    return np.stack([last(curves[f"{name}/held"]) for name in names(curves)], axis=1)


def without_E(data: ch.Data) -> np.ndarray:
    """[5] A, B, 0, alpha, beta: the law with no floor, fitted like the whole one."""
    start = ch.starts(data, 1e-2)
    start[:, 2] = -40.0
    free = np.broadcast_to(np.arange(5) != 2, start.shape)
    found = ch.solve(data, start, [1e-2, 1e-3], free=free)
    return ch.parameters(found.theta[np.argmin(found.value)], data.centre)


def errors(curves: Curves, shuffled: bool = False) -> dict[str, np.ndarray]:
    """[seeds] |log predicted - log measured| of the held-out run: the law, the law without E, the lowest loss of the
    largest budget. shuffled: the law is fitted to losses that were dealt to the wrong runs."""
    loss, N, D = held(curves), curves["inputs/N"], curves["inputs/D"]
    top = curves["inputs/budget"] == curves["inputs/budget"][-1] - 1
    out: dict[str, list[float]] = {"law": [], "no_E": [], "last": []}
    for seed, y in enumerate(loss):
        seen = np.random.default_rng(seed).permutation(y[:-1]) if shuffled else y[:-1]
        data, plain = ch.prepare(N[:-1], D[:-1], seen), ch.prepare(N[:-1], D[:-1], y[:-1])
        with np.errstate(over="ignore", invalid="ignore"):  # a fit to shuffled losses may have no value out there
            for name, predicted in (("law", ch.law(ch.fit(data).params, N[-1], D[-1])),
                                    ("no_E", ch.law(without_E(plain), N[-1], D[-1])), ("last", y[top].min())):
                out[name].append(abs(np.log(predicted / y[-1])))
    return {name: np.array(x) for name, x in out.items()}


def drops(loss: np.ndarray, curves: Curves) -> np.ndarray:
    """[seeds]: the smaller of two mean drops of log loss: four times the tokens at one size, and four times the size at
    one number of tokens, over all such pairs of the grid."""
    budget = curves["inputs/budget"]
    count = int(np.sum(budget == 0))
    at = lambda b, k: b * count + k  # noqa: E731
    tokens, sizes = [], []
    for b in range(int(budget[-1]) - 1):
        tokens += [(at(b, k + 1), at(b + 1, k)) for k in range(count - 1)]
        sizes += [(at(b, k), at(b + 1, k + 1)) for k in range(count - 1)]
    logs = np.log(loss)
    mean = lambda pairs: np.mean([logs[:, i] - logs[:, j] for i, j in pairs], axis=0)  # noqa: E731
    return np.minimum(mean(tokens), mean(sizes))


def falls(curves: Curves) -> np.ndarray:
    return drops(held(curves), curves)


def falls_among_equals(curves: Curves) -> np.ndarray:
    loss = held(curves)
    rng = np.random.default_rng(0)
    return drops(np.stack([np.append(rng.permutation(y[:-1]), y[-1]) for y in loss]), curves)


def beats_rivals(curves: Curves, shuffled: bool = False) -> np.ndarray:
    found = errors(curves, shuffled)
    return np.minimum(found["no_E"], found["last"]) - found["law"]


def within_spread(curves: Curves, rival: str = "law") -> np.ndarray:
    logs = np.log(held(curves)[:, -1])
    spread = logs.std(ddof=1) if len(logs) > 1 else np.nan
    return 2 * spread - errors(curves)[rival]


CLAIMS = (
    Claim(
        name="loss_falls",
        statement="Four times the tokens at one size, and four times the size at one number of tokens, each lower the "
        "held-out loss by more than 2% on average.",
        estimand=falls, margin=0.02,
        control_name="losses dealt to the runs at random", control=falls_among_equals,
    ),
    Claim(
        name="the_largest_is_foretold",
        statement="The law's error on the held-out largest run is smaller than that of the law without E and that of "
        "the last budget's best loss, by more than 0.2%.",
        estimand=beats_rivals, margin=0.002,
        control_name="the law fitted to losses dealt at random", control=partial(beats_rivals, shuffled=True),
    ),
    Claim(
        name="within_twice_the_spread",
        statement="The law's error on the held-out largest run is less than twice the standard deviation between "
        "seeds, by more than 0.1%.",
        estimand=within_spread, margin=0.001,
        control_name="the last budget's best loss as a prediction", control=partial(within_spread, rival="last"),
    ),
)


def derived(cfg: Config, curves: Curves) -> dict[str, np.ndarray]:
    """Per budget the runs' loss and log10 N, [seeds, sizes]."""
    loss, N, budget = held(curves), curves["inputs/N"], curves["inputs/budget"]
    out = {}
    for b in range(3):  # the panels' budgets; a ladder may have others
        rows = budget[:-1] == b
        known = rows.any()
        out[f"loss{b}"] = loss[:, :-1][:, rows] if known else np.full((len(loss), 1), np.nan)
        out[f"N{b}"] = np.broadcast_to(np.log10(N[:-1][rows]) if known else np.nan, out[f"loss{b}"].shape)
    return out


LABELS = {"smallest budget": 0, "4 times": 1, "16 times": 2}
MIDDLE = {f"{label}, its middle size": f"budget{b}_size{SPREAD}" for label, b in list(LABELS.items())[:2]}
PANELS = (
    Panel("Loss of one budget's sizes", {label: f"derived/loss{b}" for label, b in LABELS.items()},
          "held-out nats per byte", "log10 of parameters", {label: f"derived/N{b}" for label, b in LABELS.items()}),
    Panel("Training", {**{label: f"{run}/loss" for label, run in MIDDLE.items()}, "the largest": f"{LARGEST}/loss"},
          "nats per byte", "bytes seen",
          {**{label: f"{run}/tokens" for label, run in MIDDLE.items()}, "the largest": f"{LARGEST}/tokens"}),
)


def as_csv(curves: Curves) -> str:
    """A row for each run and seed: what `jaxpt fit` reads."""
    loss, N, D = held(curves), curves["inputs/N"], curves["inputs/D"]
    lines = ["run,seed,N,D,width,layers,loss,held_out"]
    for i, name in enumerate(names(curves)):
        lines += [f"{name},{int(seed)},{N[i]:.0f},{D[i]:.0f},{curves['inputs/width'][i]},{curves['inputs/layers'][i]},"
                  f"{float(loss[s, i])!r},{int(i == len(N) - 1)}" for s, seed in enumerate(curves["seeds"])]
    return "\n".join(lines) + "\n"


def sections(cfg: Config, curves: Curves) -> str:
    loss, N, D = held(curves), curves["inputs/N"], curves["inputs/D"]
    found = errors(curves)
    rows = [[{"law": "Chinchilla's law", "no_E": "the law without E", "last": "last budget's best"}[name],
             f"{100 * x.mean():.2f}%", ", ".join(f"{100 * e:.2f}" for e in x)] for name, x in found.items()]
    parts = ["## The held-out largest run", table(["prediction", "mean error", "per seed [%]"], rows)]
    if len(loss) > 1:
        spread = np.log(loss[:, -1]).std(ddof=1)
        parts.append(f"Between seeds its loss has a standard deviation of {100 * spread:.2f}%.")
    both = compare(np.tile(N[:-1], len(loss)), np.tile(D[:-1], len(loss)), loss[:, :-1].ravel(), bootstrap=200)
    rows = [[r.name, f"{r.a:.3f}", f"[{r.a_spread.low:.3f}, {r.a_spread.high:.3f}]", f"{r.N:.4g}",
             "" if np.isnan(r.p) else f"{r.p:.2f}"] for r in both.approaches]
    law = dict(zip(ch.NAMES, both.fit.params, strict=True))
    largest = np.log(ch.law(both.fit.params, N[-1], D[-1]) / loss[:, -1]).mean()
    parts += ["## All seeds together", f"{', '.join(f'{name} = {x:.5g}' for name, x in law.items())}; "
              f"a = {exponent(both.fit.params):.3f}. It puts the held-out run {100 * abs(largest):.2f}% "
              f"{'above' if largest > 0 else 'below'} the mean of its log loss over seeds.",
              table(["approach", "a", "95%", f"N* at {both.target:.3g} FLOPs", "p against 3"], rows),
              *both.warnings]
    return "\n\n".join([*parts, "## The ladder", f"```csv\n{as_csv(curves)}```"])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(corpus_bytes=1_000_000, held_bytes=8_000, smallest=1e9, budgets=2, ratio=1.0, window=32),
                      seeds=2),
        "cpu": Tier(Config(), seeds=6),
        "full": Tier(Config(smallest=4e10, batch=8), seeds=8),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, inputs=inputs, sections=sections, derived=derived,
)
