"""Can a router be trained by reinforcement, and is that better than differentiating through gates?

A layer of 8 linear experts of which each input is sent to 2, so small that the expected loss over all 56 routes, and its
gradient, are sums. The router is trained by that exact gradient, by REINFORCE with a leave-one-out baseline, without one,
and with the advantages of other inputs (a control), by straight-through Gumbel-softmax, by the usual top-k with softmax gates
(which has no expectation: its loss is that of its own choice), and not at all. All students start alike and see the same
batches.
That REINFORCE is unbiased is no claim here but a theorem, checked by enumeration in tests/test_routes.py.

Source: Williams 1992; Kool et al. 2019 ("Buy 4 REINFORCE samples, get a baseline for free"; arXiv 1903.06059); Jang et al.
2017 (arXiv 1611.01144).
Command: jaxpt run moe_rl_routing
Expected: not yet run at tier cpu; the rate is a guess until scripts/tune.py moe_rl_routing has been run.
Minutes: about 3 on two cores (12 seeds), estimated; --tier smoke under 1 with a warm compilation cache.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import estimate
from jaxpt.train.routing import ESTIMATORS, RoutingConfig, make_routing

EVERY = 20  # updates of one chunk, and between two measurements of gradients


@dataclass(frozen=True)
class Config:
    experts: int = 8
    top_k: int = 2
    samples: int = 4  # routes of an input and update
    clusters: int = 6
    updates: int = 400
    learning_rate: float = 0.3  # of gradient descent; tuned by SWEEP on seeds that no claim uses
    temperature: float = 1.0  # of straight-through

    def __post_init__(self):
        within(self, 2, 12, "experts")
        within(self, 1, 3, "top_k")
        within(self, 2, math.inf, "samples")
        within(self, 1, math.inf, "clusters")
        within(self, 0, 100, "learning_rate")
        multiples(self, EVERY, "when arms are scored", "updates")
        self.program()

    def program(self) -> RoutingConfig:
        return RoutingConfig(
            experts=self.experts, top_k=self.top_k, samples=self.samples, clusters=self.clusters, temperature=self.temperature,
            every=EVERY,
        )


def stages(cfg: Config, inputs) -> list[Stage]:
    return [
        Stage("students", make_routing, cfg.program(), cfg.updates, hyper={"learning_rate": cfg.learning_rate}, chunk=EVERY)
    ]


def loss(curves, name):
    """Exact expected loss, the mean over the last tenth of the updates, per seed."""
    values = np.asarray(curves[f"students/loss_{name}"], np.float64)
    return values[:, -max(1, values.shape[1] // 10):].mean(axis=1)


def quality(metric):
    def of(curves, name):
        return np.nanmean(np.asarray(curves[f"students/{metric}_{name}"], np.float64), axis=1)

    return of


noise, cosine = quality("noise"), quality("cosine")


CLAIMS = (
    Claim(
        name="a_baseline_halves_the_noise",
        statement="The leave-one-out baseline at least halves the variance of the router's gradient (log 2 of the ratio).",
        estimand=lambda curves: np.log2(noise(curves, "no_baseline") / noise(curves, "reinforce")), margin=1.0,
        control_name="other inputs' advantages in the place of none",
        control=lambda curves: np.log2(noise(curves, "shuffled") / noise(curves, "reinforce")),
    ),
    Claim(
        name="straight_through_is_quieter",
        statement="Straight-through has less than half the variance of REINFORCE with the baseline.",
        estimand=lambda curves: np.log2(noise(curves, "reinforce") / noise(curves, "straight_through")), margin=1.0,
        control_name="the reverse",
        control=lambda curves: np.log2(noise(curves, "straight_through") / noise(curves, "reinforce")),
    ),
    Claim(
        name="straight_through_points_elsewhere",
        statement="The mean of 64 straight-through estimates has a cosine below 0.95 with the exact gradient: it is biased.",
        estimand=lambda curves: 0.95 - cosine(curves, "straight_through"), margin=0.01,
        control_name="the exact gradient's own cosine", control=lambda curves: 0.95 - cosine(curves, "exact"),
    ),
    Claim(
        name="reinforcement_trains_the_router",
        statement="REINFORCE with the baseline ends with a lower expected loss than a router that is never trained.",
        estimand=lambda curves: loss(curves, "frozen") - loss(curves, "reinforce"), margin=0.05,
        control_name="other inputs' advantages", control=lambda curves: loss(curves, "frozen") - loss(curves, "shuffled"),
    ),
    Claim(
        name="gates_are_better_than_reinforcement",
        statement="The usual top-k with gates ends with a lower loss than REINFORCE with the baseline.",
        estimand=lambda curves: loss(curves, "reinforce") - loss(curves, "top_k"), margin=0.02,
        control_name="the reverse", control=lambda curves: loss(curves, "top_k") - loss(curves, "reinforce"),
    ),
)

NAMES = {
    "exact gradient": "exact", "REINFORCE, leave-one-out": "reinforce", "REINFORCE": "no_baseline", "shuffled": "shuffled",
    "straight-through": "straight_through", "top-k with gates": "top_k", "frozen": "frozen",
}
PANELS = tuple(
    Panel(title, {label: f"students/{metric}_{name}" for label, name in NAMES.items()}, unit, "update")
    for title, metric, unit in (
        ("Expected loss", "loss", "nats"), ("Noise of the router's gradient", "noise", "variance / squared length"),
        ("Cosine of the mean estimate", "cosine", "cosine"),
    )
)

SWEEP = ({"learning_rate": ((0.1, 0.3, 1.0), "students/fit")},)


def sections(cfg: Config, curves) -> str:
    head = ["| estimator | expected loss | noise of the router's gradient | cosine with the exact one |", "| --- | --- | --- | --- |"]
    rows = [
        f"| {name} | {cell(loss(curves, name), '.4f')} | {estimate(noise(curves, name))[0]:.3g} | "
        f"{estimate(cosine(curves, name))[0]:.3f} |"
        for name in ESTIMATORS
    ]
    return "\n".join(["## The estimators", "", *head, *rows])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(updates=40), seeds=2),
        "cpu": Tier(Config(), seeds=12),
        "full": Tier(replace(Config(), updates=4000), seeds=40),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, sections=sections, sweep=SWEEP,
)
