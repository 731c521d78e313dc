"""Does training with experts switched off at random make a model survive the loss of one, and what does that cost?

A small decoder with 8 experts, 2 for each token, learns text of four domains (data.domains). Expert dropout switches each
expert off with some probability for whole rows; a token then goes to its best two of those left. What an expert's death
costs is the excess with that expert dead in every layer, the mean over experts, less the excess with all alive.

Source: gating dropout, Liu et al. 2022 (arXiv 2205.14336), is a close relative.
Command: jaxpt run expert_dropout
Expected (seeds 0 to 7, in brackets 1000 to 1007): without dropout a death costs 0.110 (0.094) nats of excess, with a tenth of the
experts off 0.023 (0.024), with three tenths 0.009 (0.009): dropout softens a death, but its control, jitter, is not refuted on
the first seeds (it saves 0.011, -0.003). All alive, three tenths off cost 0.051 (0.049) on top of 0.204; with one dead they
gain 0.050 (0.036). Rates 4e-3, with three tenths off 8e-3, each tuned for all alive.
Minutes: 4 on two busy cores (8 seeds); --tier smoke under 1 with a warm compilation cache.
"""

import math
from dataclasses import dataclass, replace

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig, MoeConfig
from jaxpt.train.domains import DomainsConfig, make_domains

EVERY = 20  # updates of one chunk
ARMS = {"none off": "all", "a tenth off": "tenth", "three tenths off": "third", "jitter": "jitter"}
SHARES = {"all": 0.0, "tenth": 0.1, "third": 0.3}  # arm -> probability that an expert is off


@dataclass(frozen=True)
class Config:
    vocab: int = 16
    domains: int = 4
    d_model: int = 32
    n_layers: int = 2
    experts: int = 8
    updates: int = 400
    batch: int = 16
    window: int = 32
    all_rate: float = 0.004  # the four rates are tuned by SWEEP on seeds that no claim uses, all experts alive
    tenth_rate: float = 0.004
    third_rate: float = 0.008
    jitter_rate: float = 0.004
    jitter: float = 0.3  # of the control
    every: int = 100  # updates between two evaluations
    eval_rows: int = 64

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "batch", "eval_rows", "domains")
        within(self, 2, math.inf, "vocab", "window")
        within(self, 3, 1024, "experts")
        within(self, 0, 1, "jitter", *(f"{arm}_rate" for arm in ARMS.values()))
        multiples(self, EVERY, "when arms are scored", "updates", "every")


def stages(cfg: Config, inputs) -> list[Stage]:
    model = ModelConfig(
        cfg.vocab, cfg.d_model, cfg.n_layers, d_ff=2 * cfg.d_model, moe=MoeConfig(experts=cfg.experts, top_k=2)
    )
    program = DomainsConfig(
        model=model, domains=cfg.domains, batch=cfg.batch, window=cfg.window, every=cfg.every, eval_rows=cfg.eval_rows, kill=True
    )

    def arm(name, **hyper):
        hyper = {"learning_rate": getattr(cfg, f"{name}_rate"), "balance": 0.01} | hyper
        return Stage(name, make_domains, program, cfg.updates, stream="text", hyper=hyper, chunk=EVERY)

    return [*(arm(name, expert_dropout=share) for name, share in SHARES.items()), arm("jitter", jitter=cfg.jitter)]


def held(curves, arm):
    return last(curves[f"{arm}/held"])


def price_of_a_death(curves, arm):
    return last(curves[f"{arm}/killed"]) - held(curves, arm)


CLAIMS = (
    Claim(
        name="dropout_softens_a_death",
        statement="Trained with three experts in ten off, the death of one expert costs less excess.",
        estimand=lambda curves: price_of_a_death(curves, "all") - price_of_a_death(curves, "third"), margin=0.01,
        control_name="jitter of the router's input in its place",
        control=lambda curves: price_of_a_death(curves, "all") - price_of_a_death(curves, "jitter"),
    ),
    Claim(
        name="dropout_has_a_price",
        statement="With all experts alive, it has a higher excess than training without dropout.",
        estimand=lambda curves: held(curves, "third") - held(curves, "all"), margin=0.005,
        control_name="the reverse", control=lambda curves: held(curves, "all") - held(curves, "third"),
    ),
    Claim(
        name="it_pays_where_an_expert_dies",
        statement="With one expert dead, the excess is lower for having trained with dropout.",
        estimand=lambda curves: last(curves["all/killed"]) - last(curves["third/killed"]), margin=0.005,
        control_name="all experts alive", control=lambda curves: held(curves, "all") - held(curves, "third"),
    ),
)

PANELS = (
    Panel("Excess, all alive", per_arm("held", ARMS), "nats per token", "update"),
    Panel("Excess, one expert dead", per_arm("killed", ARMS), "nats per token", "update"),
    Panel("Violation of the worst layer", per_arm("load_violation", ARMS), "MaxVio", "update"),
)

RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
SWEEP = ({f"{arm}_rate": (RATES, f"{arm}/fit") for arm in ARMS.values()},)


def sections(cfg: Config, curves) -> str:
    rows = [
        f"| {label} | {cell(held(curves, arm), '.4f')} | {cell(last(curves[f'{arm}/killed']), '.4f')} | "
        f"{cell(price_of_a_death(curves, arm), '.4f')} |"
        for label, arm in ARMS.items()
    ]
    head = ["| arm | excess, all alive | one dead | price of a death |", "| --- | --- | --- | --- |"]
    return "\n".join(["## What a death costs", "", *head, *rows])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(updates=40, every=20, eval_rows=32, n_layers=1, batch=8), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(replace(Config(), vocab=64, d_model=64, updates=5000), seeds=20),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, sections=sections, sweep=SWEEP,
)
