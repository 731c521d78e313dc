"""Are experts worth their parameters, and are many small ones better than few large ones?

Small decoders learn text of four domains (data.domains), all with the same active parameters and products but for the
router's: a dense layer; 8 experts, 2 for each token; the same experts cut into 4 (fine-grained), without and with one of a
token's experts shared by all. Two twins frame them: the dense layer at equal products, and a dense layer with all the
parameters of the experts, whose feed-forward part costs four times as much. The control takes learned choice away: experts
of the same number and size are chosen by a hash of the token and its place, which nothing learns.
Mixtures have the auxiliary loss with weight 0.01; every arm, the control too, has a learning rate of its own.

Source: Dai et al. 2024 (arXiv 2401.06066), sections 3 and 4.
Command: jaxpt run moe_granularity
Expected (seeds 0 to 11): all controls are refuted. Eight experts end at an excess of 0.203 nats, the dense layer of equal
products at 0.256: experts are worth 0.053. All else is underpowered, at differences under a hundredth: a dense layer with
all the parameters ends at 0.197, cut experts at 0.209, with one of them shared at 0.215. What finer experts gain is at most
0.015 (95% -0.027 to 0.015). Experts that a hash chooses end at 0.326, above the dense layer. Rates 8e-3, of the uncut
experts 4e-3, of the dense layer with all parameters 2e-3.
Minutes: 3 on two cores (5 CPU-minutes, 12 seeds); --tier smoke under 1 with a warm compilation cache.
"""

import math
from dataclasses import dataclass, replace

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig, MoeConfig, fine_grained
from jaxpt.models.counts import active_flops
from jaxpt.train.domains import DomainsConfig, make_domains

EVERY = 20  # updates of one chunk
SHARED = 1  # of a token's experts, in the arm that shares one
NAMES = {
    "dense, equal products": "dense", "dense, equal parameters": "wide", "8 experts": "m1", "cut into 4": "m4",
    "cut into 4, one shared": "m4_shared", "8 experts, hash": "random",
}
MIXTURES = {label: arm for label, arm in NAMES.items() if arm.startswith("m")}


@dataclass(frozen=True)
class Config:
    vocab: int = 16
    domains: int = 4
    d_model: int = 32
    n_layers: int = 2
    d_ff: int = 64  # hidden units that a token meets in a layer
    experts: int = 8
    top_k: int = 2
    updates: int = 400
    batch: int = 16
    window: int = 32
    dense_rate: float = 0.008  # the six rates are tuned by SWEEP on seeds that no claim uses
    wide_rate: float = 0.002
    m1_rate: float = 0.004
    m4_rate: float = 0.008
    m4_shared_rate: float = 0.008
    random_rate: float = 0.008
    every: int = 100  # updates between two evaluations
    eval_rows: int = 128

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "batch", "eval_rows", "domains")
        within(self, 2, math.inf, "vocab", "window", "top_k")
        within(self, 2, 1024, "experts")
        within(self, 0, 1, *(f"{arm}_rate" for arm in NAMES.values()))
        multiples(self, 4 * self.top_k, "so that experts can be cut into 4", "d_ff")
        multiples(self, EVERY, "when arms are scored", "updates", "every")
        self.coarse()

    def coarse(self) -> MoeConfig:
        return MoeConfig(experts=self.experts, top_k=self.top_k, d_ff=self.d_ff // self.top_k)

    def models(self) -> dict[str, ModelConfig]:
        """arm -> its model."""
        coarse = self.coarse()
        fine = fine_grained(coarse, coarse.d_ff, 4)
        mixtures = {
            "m1": coarse, "m4": fine, "random": replace(coarse, choice="random"),
            "m4_shared": replace(fine, experts=fine.experts - SHARED, top_k=fine.top_k - SHARED, shared=SHARED),
        }
        plain = ModelConfig(self.vocab, self.d_model, self.n_layers, d_ff=self.d_ff)
        dense = {"dense": plain, "wide": replace(plain, d_ff=self.d_ff * self.experts // self.top_k)}
        return dense | {name: replace(plain, moe=moe) for name, moe in mixtures.items()}


def stages(cfg: Config, inputs) -> list[Stage]:
    def arm(name, model):
        program = DomainsConfig(
            model=model, domains=cfg.domains, batch=cfg.batch, window=cfg.window, every=cfg.every, eval_rows=cfg.eval_rows
        )
        hyper = {"learning_rate": getattr(cfg, f"{name}_rate")} | ({} if model.moe is None else {"balance": 0.01})
        return Stage(name, make_domains, program, cfg.updates, stream="text", hyper=hyper, chunk=EVERY)

    return [arm(name, model) for name, model in cfg.models().items()]


def held(curves, arm):
    return last(curves[f"{arm}/held"])


def less(arm, other):
    return lambda curves: held(curves, other) - held(curves, arm)


CLAIMS = (
    Claim(
        name="experts_beat_dense_at_equal_products",
        statement="Eight experts, two for each token, end with a lower excess than the dense layer of equal products.",
        estimand=less("m1", "dense"), margin=0.02,
        control_name="experts that a hash chooses", control=less("random", "dense"),
    ),
    Claim(
        name="dense_with_all_parameters_beats_experts",
        statement="A dense layer with as many parameters, whose feed-forward part costs four times as much, ends lower still.",
        estimand=less("wide", "m1"), margin=0.01,
        control_name="the dense layer of equal products in its place", control=less("dense", "m1"),
    ),
    Claim(
        name="finer_experts_are_better",
        statement="Experts cut into four, four times as many for each token, end lower than uncut ones.",
        estimand=less("m4", "m1"), margin=0.01,
        control_name="uncut experts that a hash chooses in the place of the cut ones", control=less("random", "m1"),
    ),
    Claim(
        name="a_shared_expert_helps",
        statement="Of experts cut into four, one shared in the place of one routed lowers the excess.",
        estimand=less("m4_shared", "m4"), margin=0.005,
        control_name="experts that a hash chooses in the place of the shared arm", control=less("random", "m4"),
    ),
)

PANELS = (
    Panel("Excess on held-out text", per_arm("held", NAMES), "nats per token", "update"),
    Panel("Information of domain and expert", per_arm("information", MIXTURES), "nats", "update"),
    Panel("Violation of the worst layer", per_arm("load_violation", MIXTURES), "MaxVio", "update"),
)

RATES = (2e-3, 4e-3, 8e-3)
FURTHER = {"wide": (1e-3, *RATES), "m1": RATES}
SWEEP = ({f"{arm}_rate": (FURTHER.get(arm, (*RATES, 1.6e-2)), f"{arm}/fit") for arm in NAMES.values()},)


def sections(cfg: Config, curves) -> str:
    models = cfg.models()
    flops = {arm: active_flops(model, 1, cfg.window) / cfg.window for arm, model in models.items()}
    rows = [
        f"| {label} | {cell(held(curves, arm), '.4f')} | {flops[arm]:.0f} | {flops[arm] / flops['dense']:.3f} |"
        for label, arm in NAMES.items()
    ]
    head = ["| arm | excess | active FLOPs per token, forward | of dense |", "| --- | --- | --- | --- |"]
    return "\n".join(["## Excess against cost", "", *head, *rows])


SMOKE = Config(updates=40, every=20, eval_rows=32, n_layers=1, batch=8)
EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(SMOKE, seeds=2),
        "cpu": Tier(Config(), seeds=12),
        "full": Tier(replace(Config(), vocab=64, d_model=64, d_ff=128, updates=5000), seeds=20),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, sections=sections, sweep=SWEEP,
)
