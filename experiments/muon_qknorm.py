"""Do Muon and normalised queries and keys train a small decoder three times as fast, each tuned for itself?

The claim under test was made from one run in which both changes were made at once and no learning rate was tuned. Here it is
two by two: AdamW or Muon, with or without QK-norm, each of the four at its own best rate, on text of four domains whose
entropy is known (data.domains). Speed is the number of updates that a cell needs to reach the excess at which plain AdamW
ends, as the log of a ratio. Rates are constant, so the end is no special moment of a schedule. What QK-norm is for, larger
rates, is asked of AdamW with and without it, each at eight times its own rate.

Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Dehghani et al. 2023 (arXiv 2302.05442) for QK-norm; the
claim of a factor of three was made for MiniMind 2 (github.com/jingyaogong/minimind), with both changes at once.
Command: jaxpt run muon_qknorm
Expected (seeds 0 to 7, in brackets 1000 to 1007): all controls refuted. Rates 4e-3 for AdamW and 8e-3 for Muon, with and
without QK-norm. Muon gets where AdamW ends 1.18 (1.35) times as fast, which leaves "in less than four fifths" undecided
(supported); with QK-norm 1.15 (1.31) times: "three times as fast" is refuted. Muon ends lower, by 0.044 (0.043) of 0.266 nats.
QK-norm changes nothing at the tuned rates, and going to eight times the rate costs 0.22 (0.22) nats more without it.
Minutes: 3 to 4 on two busy cores (8 seeds); --tier smoke under 1 with a warm compilation cache.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig
from jaxpt.train.domains import DomainsConfig, make_domains
from jaxpt.train.optim import OptimConfig

EVERY = 20  # updates of one chunk, and between two evaluations: what speed is measured in
CELLS = {"adamw": ("adamw", False), "adamw_qk": ("adamw", True), "muon": ("muon", False), "muon_qk": ("muon", True)}


@dataclass(frozen=True)
class Config:
    vocab: int = 16
    domains: int = 4
    d_model: int = 32
    n_layers: int = 2
    n_heads: int = 2
    updates: int = 300
    batch: int = 16
    window: int = 32
    adamw_rate: float = 0.004  # the four rates are tuned by SWEEP on seeds that no claim uses
    adamw_qk_rate: float = 0.004
    muon_rate: float = 0.008
    muon_qk_rate: float = 0.008
    hot: float = 8.0  # times the tuned rate
    eval_rows: int = 128

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "n_heads", "batch", "eval_rows", "domains", "hot")
        within(self, 2, math.inf, "vocab", "window")
        within(self, 0, 1, *(f"{name}_rate" for name in CELLS))
        multiples(self, EVERY, "when arms are scored", "updates")
        self.program("adamw")

    def program(self, name: str) -> DomainsConfig:
        method, qk_norm = CELLS[name]
        model = ModelConfig(self.vocab, self.d_model, self.n_layers, self.n_heads, qk_norm=qk_norm)
        return DomainsConfig(
            model=model, optim=OptimConfig(method=method), domains=self.domains, batch=self.batch, window=self.window,
            every=EVERY, eval_rows=self.eval_rows,
        )


def stages(cfg: Config, inputs) -> list[Stage]:
    def arm(name, cell, factor=1.0, stream="text"):
        hyper = {"learning_rate": factor * getattr(cfg, f"{cell}_rate")}
        return Stage(name, make_domains, cfg.program(cell), cfg.updates, stream=stream, hyper=hyper, chunk=EVERY)

    hot = [arm(f"{name}_hot", name, cfg.hot) for name in ("adamw", "adamw_qk")]
    return [*(arm(name, name) for name in CELLS), *hot]


def held(curves, arm):
    return last(curves[f"{arm}/held"])


def cost_of_heat(curves, arm):
    return held(curves, f"{arm}_hot") - held(curves, arm)


def speed(curves, arm):
    """log of AdamW's updates over those that the arm needs to get where AdamW ends, per seed; 0 or less where it does not
    get there in time."""
    measured = np.asarray(curves[f"{arm}/held"], np.float64)
    goal = held(curves, "adamw")
    found = np.isfinite(measured) & (measured <= goal[:, None])
    total = measured.shape[1]
    needed = np.where(found.any(axis=1), np.argmax(found, axis=1) + 1, total)
    return np.log(total / needed)


CLAIMS = (
    Claim(
        name="muon_is_faster",
        statement="Muon gets where AdamW ends in less than four fifths of the updates (log of the ratio).",
        estimand=lambda curves: speed(curves, "muon"), margin=math.log(1.25),
        control_name="AdamW against itself", control=lambda curves: speed(curves, "adamw"),
    ),
    Claim(
        name="both_together_are_three_times_as_fast",
        statement="Muon with QK-norm gets there in less than a third.",
        estimand=lambda curves: speed(curves, "muon_qk"), margin=math.log(3),
        control_name="AdamW against itself", control=lambda curves: speed(curves, "adamw"),
    ),
    Claim(
        name="muon_ends_lower",
        statement="Muon ends with a lower excess than AdamW.",
        estimand=lambda curves: held(curves, "adamw") - held(curves, "muon"), margin=0.005,
        control_name="the reverse", control=lambda curves: held(curves, "muon") - held(curves, "adamw"),
    ),
    Claim(
        name="qk_norm_bears_hot_rates",
        statement="Going to eight times the tuned rate costs AdamW more excess without QK-norm than with it.",
        estimand=lambda curves: cost_of_heat(curves, "adamw") - cost_of_heat(curves, "adamw_qk"), margin=0.02,
        control_name="the reverse", control=lambda curves: cost_of_heat(curves, "adamw_qk") - cost_of_heat(curves, "adamw"),
    ),
)

NAMES = {"AdamW": "adamw", "AdamW, QK-norm": "adamw_qk", "Muon": "muon", "Muon, QK-norm": "muon_qk"}
HOT = {"AdamW, hot": "adamw_hot", "AdamW, QK-norm, hot": "adamw_qk_hot"}


PANELS = (
    Panel("Excess on held-out text", per_arm("held", NAMES), "nats per token", "update"),
    Panel("Excess at eight times the rate", per_arm("held", HOT), "nats per token", "update"),
    Panel("Gradient norm", per_arm("grad_norm", NAMES | HOT), "before clipping", "update"),
)

RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
SWEEP = ({f"{name}_rate": (RATES, f"{name}/fit") for name in CELLS},)


def sections(cfg: Config, curves) -> str:
    rows = [
        f"| {label} | {cell(held(curves, arm), '.4f')} | {cell(np.exp(speed(curves, arm)), '.2f')} |"
        for label, arm in (NAMES | HOT).items()
    ]
    return "\n".join(["## Speed", "", "| arm | excess at the end | times as fast as AdamW |", "| --- | --- | --- |", *rows])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(updates=40, eval_rows=32, n_layers=1, batch=8), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(replace(Config(), vocab=64, d_model=128, n_layers=6, n_heads=4, updates=5000), seeds=20),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, sections=sections, sweep=SWEEP,
)
