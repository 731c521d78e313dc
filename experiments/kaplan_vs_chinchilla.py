"""Can one true law give Kaplan's exponent to one author and Chinchilla's to another?

A simulation, nothing is trained. The truth is a Chinchilla law whose best size grows as C^0.514. Synthetic isoFLOP
runs are made from it under recipes that differ in five habits (jaxpt/scaling/simulate.py): what is counted as a
parameter and as a FLOP, a warm-up of 1.6 billion tokens, a schedule much longer than the run, a batch of half a
million tokens and one learning rate for all sizes. Each seed adds seed noise to every loss and reads the exponent off
as Porian et al. do. They measured what this simulates: 0.834, 0.701, 0.604, 0.571, 0.497 as the habits go, one by
one, in the order of LADDER.

Source: Porian et al. 2024 (arXiv 2406.19146); Pearce & Song 2024 (arXiv 2406.12907); Kaplan et al. 2020 (arXiv
2001.08361) for the habits, Besiroglu et al. 2024 (arXiv 2404.10102) for the law. How much an undecayed or a wrong
learning rate costs is assumed, all else is the papers' own.
Command: jaxpt run kaplan_vs_chinchilla
Expected: 0.93, 0.68, 0.58, 0.58, 0.52 along the ladder; all claims supported, every control refuted. The length of
the schedule changes nothing here, and little in Porian's runs.
Minutes: 0.2.
"""

import math
from dataclasses import dataclass

import jax
import numpy as np

from jaxpt.lab.errors import within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier
from jaxpt.lab.markdown import table
from jaxpt.scaling import isoflop, simulate
from jaxpt.scaling.chinchilla import fit, prepare
from jaxpt.scaling.frontier import exponent
from jaxpt.train.program import Program

TRUTH = np.array([482.006, 2085.434, 1.81686, 0.34781, 0.36585])
SINGLE = {  # one habit at a time
    "none": simulate.Recipe(),
    "embeddings not counted": simulate.Recipe(embeddings=False),
    "last layer not counted": simulate.Recipe(last_layer=False),
    "neither counted": simulate.Recipe(embeddings=False, last_layer=False),
    "long warm-up": simulate.Recipe(warmup=simulate.HABITS.warmup),
    "long schedule": simulate.Recipe(schedule=simulate.HABITS.schedule),
    "large batch": simulate.Recipe(batch=simulate.HABITS.batch),
    "one rate": simulate.Recipe(tuned=False),
}
RECIPES = {**simulate.LADDER, **SINGLE}
MEASURED = (0.834, 0.701, 0.604, 0.571, 0.497)  # Porian et al. 2024, RefinedWeb


@dataclass(frozen=True)
class Config:
    smallest: float = 1.25e16  # FLOPs; budgets double from here
    budgets: int = 11
    sizes: int = 48  # from 3e5 to 3e9 parameters without embeddings
    noise: float = 0.002  # standard deviation of a loss between seeds, nats
    draws: int = 4  # synthetic studies per seed, averaged

    def __post_init__(self):
        within(self, 1e12, 1e24, "smallest")
        within(self, 2, 20, "budgets")
        within(self, 8, 200, "sizes")
        within(self, 0, 1, "noise")
        within(self, 1, math.inf, "draws")

    def compute(self) -> np.ndarray:
        return self.smallest * 2.0 ** np.arange(self.budgets)


def make_noise(cfg: Config) -> Program:
    """Each step: `draw`, standard normal noise for every run of one synthetic study; recipes share it."""

    def init(key, hyper, start=None):
        return {"params": {}, "key": key, "step": jax.numpy.int32(0)}

    def step(state):
        key = jax.random.fold_in(state["key"], state["step"])
        return {**state, "step": state["step"] + 1}, {"draw": jax.random.normal(key, (cfg.budgets * cfg.sizes,))}

    return Program(init, step, {}, lambda state: state["params"])


def inputs(cfg: Config) -> dict[str, np.ndarray]:
    sizes = np.geomspace(3e5, 3e9, cfg.sizes)
    runs = [simulate.isoflop_runs(TRUTH, recipe, cfg.compute(), sizes) for recipe in RECIPES.values()]
    rungs = len(simulate.LADDER)
    exact = np.array([slopes(r.N, r.C, r.loss[None])[0] for r in runs])
    middle = slice(cfg.budgets // 2 * cfg.sizes, (cfg.budgets // 2 + 1) * cfg.sizes)
    first, last = runs[0], runs[rungs - 1]
    return {
        "N": np.stack([r.N for r in runs]), "D": np.stack([r.D for r in runs]), "C": np.stack([r.C for r in runs]),
        "loss": np.stack([r.loss for r in runs]), "noise": np.float64(cfg.noise), "exact": exact,
        "truth": np.float64(simulate.true_exponent(TRUTH, cfg.compute())),
        "ladder": exact[None, :rungs], "measured": np.array([MEASURED]), "rung": np.arange(1.0, rungs + 1)[None],
        "first_N": np.log10(first.N)[None, middle], "last_N": np.log10(last.N)[None, middle],
        "first_loss": shown(first.loss[None, middle]), "last_loss": shown(last.loss[None, middle]),
    }


def shown(loss: np.ndarray) -> np.ndarray:
    """Without the sizes so large for the budget that nothing was learnt."""
    return np.where(loss < 6, loss, np.nan)


def slopes(N: np.ndarray, C: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """[R] exponents of N* ~ C^a by splines through the budgets of N, C [n], loss [R,n]."""
    at = isoflop.budgets(C, N)
    best = isoflop.spline(np.log(N), loss, np.ones_like(loss), at)
    return isoflop.power_law(np.log(at.C), best.log_N).exponent


def stages(cfg: Config, inputs) -> list[Stage]:
    return [Stage("study", make_noise, cfg, cfg.draws)]


def measured(curves, recipe: str) -> np.ndarray:
    """[seeds] exponents under a recipe, mean over draws."""
    at = list(RECIPES).index(recipe)
    draw = np.asarray(curves["study/draw"], np.float64)
    loss = curves["inputs/loss"][at] + curves["inputs/noise"] * draw.reshape(-1, draw.shape[2])
    found = slopes(curves["inputs/N"][at], curves["inputs/C"][at], loss)
    return found.reshape(draw.shape[:2]).mean(axis=1)


def above_truth(curves, recipe: str) -> np.ndarray:
    return measured(curves, recipe) - float(curves["inputs/truth"])


FIRST, COUNTED, SHORT, DECAYED, LAST = simulate.LADDER

CLAIMS = (
    Claim(
        name="kaplan_from_chinchilla",
        statement="Under all five habits the exponent is more than 0.2 above the law's own.",
        estimand=lambda curves: above_truth(curves, FIRST),
        margin=0.2,
        control_name="none of the habits",
        control=lambda curves: above_truth(curves, LAST),
    ),
    Claim(
        name="counts_matter",
        statement="Counting embeddings and the last layer lowers it by more than 0.1.",
        estimand=lambda curves: measured(curves, FIRST) - measured(curves, COUNTED),
        margin=0.1,
        control_name="a schedule of the run's length instead of a long one",
        control=lambda curves: measured(curves, SHORT) - measured(curves, DECAYED),
    ),
    Claim(
        name="warmup_matters",
        statement="A short warm-up lowers it by more than 0.05.",
        estimand=lambda curves: measured(curves, COUNTED) - measured(curves, SHORT),
        margin=0.05,
        control_name="a schedule of the run's length instead of a long one",
        control=lambda curves: measured(curves, SHORT) - measured(curves, DECAYED),
    ),
    Claim(
        name="tuning_matters",
        statement="A small batch and a rate for every size lower it by more than 0.03.",
        estimand=lambda curves: measured(curves, DECAYED) - measured(curves, LAST),
        margin=0.03,
        control_name="a rate for every size alone",
        control=lambda curves: measured(curves, "one rate") - measured(curves, "none"),
    ),
)

PANELS = (
    Panel("The exponent as habits go", {"simulated": "inputs/ladder", "measured": "inputs/measured"},
          "a in N* ~ C^a", "habits dropped, plus 1", {"simulated": "inputs/rung", "measured": "inputs/rung"}),
    Panel("One budget", {FIRST: "inputs/first_loss", LAST: "inputs/last_loss"}, "loss [nats]",
          "log10 of the parameters that are counted", {FIRST: "inputs/first_N", LAST: "inputs/last_N"}),
)


def sections(cfg: Config, curves) -> str:
    rows = []
    for at, name in enumerate(RECIPES):
        noisy = measured(curves, name)
        law = fit(prepare(*(curves[f"inputs/{x}"][at] for x in ("N", "D", "loss"))))
        paper = f"{MEASURED[at]:.3f}" if at < len(MEASURED) else ""
        title = name if at < len(simulate.LADDER) else f"alone: {name}"
        rows.append([title, f"{curves['inputs/exact'][at]:.3f}", f"{noisy.mean():.3f} (sd {noisy.std(ddof=1):.4f})",
                     f"{exponent(law.params):.3f}", paper])
    header = ["recipe", "a without noise", "a with noise", "a of a fitted law", "measured by Porian et al."]
    return "\n\n".join(["## Exponents", table(header, rows),
                        f"The law's own exponent over these budgets is {float(curves['inputs/truth']):.3f}."])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(draws=1, sizes=32), seeds=8),
        "cpu": Tier(Config(), seeds=20),
        "full": Tier(Config(draws=20, sizes=96), seeds=100),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, inputs=inputs, sections=sections,
)
