"""Which KL penalty regularises as KL(policy || reference) should: k1, k2 or k3, with which gradient, in which place?

Libraries differ: k3 in the loss (TRL's GRPO, after the paper), k1 in the loss (Tunix's GRPO), k2's gradient in the
loss, k1 in the reward (TRL's RLOO, InstructGPT), k3 in the reward (Tunix's PPO). In the reward only the value counts
and in the loss only whose gradient it is, so the table k1, k2, k3 x own gradient, k2's, score x loss, reward holds
seven penalties; on the sampler's own policy k2 and score are one.
On enumerable trees each is compared with the truth. Along the path of policies that are optimal at smaller and
smaller beta: bias and deviation of what a value reports, and what a penalty's expected update is, against the gradient
of the KL of whole sequences; both once more with samples of a policy that lags behind on the path. Then training:
RLOO with each penalty at one beta, rate tuned for the three that regularise, scored by the exact share of the possible
rise of J - beta KL that it reaches. For beta 0.5 (near the reference) and 0.1 (far); for 0.1 also with a tuned weight,
since a wrong scale is not a wrong penalty, and with eight updates per batch.

Source: Schulman 2020 (joschu.net/blog/kl-approx.html); Tang and Munos 2025 (arXiv 2506.09477) and Zhang et al. 2025
(arXiv 2505.17508) on gradients in the loss; Korbak et al. 2022 (arXiv 2205.11275) for the optimum.
Command: jaxpt run kl_estimators
Expected: all claims supported, every control refuted. On tuning seeds (128 worlds): one sequence's k1 deviates 8 times
as much as k3 at 0.03 nats, and k3's 20 times as much as k1's at 1.4 nats. With samples that lag (0.3), k1 reports 0.6
to 0.3 of the KL too little and k3 up to three times too much, while k2, the biased one, is nearest. In training, k1 in
the reward ends at 1.00 of the possible rise at both betas (at 0.5 it is the noisiest on the way); k2 in the loss at
0.98 and 0.95, with too large a KL; k3 in the loss at 0.95 and 0.90 (0.91 with a tuned weight), with too small a one.
k1 in the loss is no penalty, k2 and k3 in the reward hardly one. At the highest rate of the sweep k3 in the loss breaks
down at beta 0.5: its pull grows with reference / policy. Eight updates a batch change little.
Minutes: 1.5 on two cores (8 seeds); --tier smoke 1 with an empty compilation cache. k1's rates are best at the end of
the sweep's grid, which can only be in its disfavour.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpt.lab.errors import within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier
from jaxpt.train.kl_twin import PENALTIES, KlBiasConfig, KlLearningConfig, Worlds, make_kl_bias, make_kl_learning

CHUNK = 50
REUSE = 8  # updates per batch of the arms that use one more than once
TUNED = ("k1_reward", "k2_loss", "k3_loss")
RATE = {"k2_loss": "k2", "score_loss": "k2", "k3_loss": "k3"}  # whose rate a penalty takes; k1's if not here
NAMES = {name: " in the ".join(name.split("_")) for name in PENALTIES}


@dataclass(frozen=True)
class Config:
    depth: int = 3
    spread: float = 1.0  # deviation of the reference's logits
    worlds: int = 16  # of each seed
    path: int = 12  # measurements, at 1 / beta = 1, 2, ...
    lag: float = 0.3  # 1 / beta of the policy that lags behind is less by this share
    near_beta: float = 0.5
    far_beta: float = 0.1
    updates: int = 400
    groups: int = 4
    group: int = 8
    near_k1_rate: float = 16.0  # the rates and weights are tuned by SWEEP on seeds that no claim uses
    near_k2_rate: float = 4.0
    near_k3_rate: float = 4.0
    far_k1_rate: float = 16.0
    far_k2_rate: float = 8.0
    far_k3_rate: float = 8.0
    k1_weight: float = 1.0  # of the arms at far_beta whose strength is tuned, over beta
    k2_weight: float = 1.0
    k3_weight: float = 0.7

    def __post_init__(self):
        within(self, 1, 4, "depth")
        within(self, 1, math.inf, "worlds", "path", "groups")
        within(self, 2, math.inf, "group")
        within(self, 0, 1, "lag")
        within(self, 1e-3, 1e3, "spread", "near_beta", "far_beta")
        within(self, 0, 1e3, *(f"{place}_{k}_rate" for place in ("near", "far") for k in ("k1", "k2", "k3")))
        within(self, 0, 1e3, "k1_weight", "k2_weight", "k3_weight")
        if self.updates < REUSE * CHUNK or self.updates % (REUSE * CHUNK):
            raise ValueError(f"--updates {self.updates}: expected a multiple of {REUSE * CHUNK}")


def stages(cfg: Config, inputs) -> list[Stage]:
    worlds = Worlds(depth=cfg.depth, spread=cfg.spread, count=cfg.worlds)
    bias = KlBiasConfig(worlds=worlds)
    learning = KlLearningConfig(worlds=worlds, groups=cfg.groups, group=cfg.group, updates=cfg.updates)

    def arm(name, place, penalty, epochs=1, **hyper):
        beta, rate = getattr(cfg, f"{place}_beta"), getattr(cfg, f"{place}_{RATE.get(penalty, 'k1')}_rate")
        hyper = learning.arm(penalty) | {"beta": beta, "learning_rate": rate, "epochs": float(epochs)} | hyper
        return Stage(f"{place}_{name}", make_kl_learning, learning, cfg.updates // epochs, hyper=hyper, chunk=CHUNK,
                     stream="worlds")

    def all_arms(place):
        return [*(arm(name, place, name) for name in PENALTIES), arm("none", place, "k1_reward", weight=0.0)]

    return [
        Stage("here", make_kl_bias, bias, cfg.path, chunk=cfg.path, stream="worlds"),
        Stage("lagged", make_kl_bias, bias, cfg.path, hyper={"lag": cfg.lag}, chunk=cfg.path, stream="worlds"),
        *all_arms("near"),
        *all_arms("far"),
        arm("again", "far", "k1_reward", draws=1.0),
        *(arm(f"{name}_weighed", "far", name, weight=getattr(cfg, f"{name[:2]}_weight")) for name in TUNED),
        *(arm(f"{name}_reused", "far", name, epochs=REUSE) for name in (*TUNED, "score_loss")),
    ]


def world(curves, name, at=1.0):
    """One number per world of every seed, `at` a share of the stage's steps: 0 is the first, 1 the last."""
    values = curves[f"{name}_world"]
    return values[:, round(at * (values.shape[1] - 1))].astype(np.float64).ravel()


def lead(arm, over):
    """Share of the possible rise of J - beta KL that `arm` reaches beyond `over`."""
    return lambda curves: world(curves, f"{arm}/reached") - world(curves, f"{over}/reached")


def noisier(value, than, at):
    """Doublings from the deviation of one value's reports to that of another's, `at` a share of the path."""
    return lambda curves: np.log2(world(curves, f"here/sd_{value}", at) / world(curves, f"here/sd_{than}", at))


def more_biased(value, than, stage):
    """How much farther one value's mean report is from the KL, over the KL, than another's, half along the path."""
    off = lambda curves, name: np.abs(world(curves, f"{stage}/off_{name}", 0.5))  # noqa: E731
    return lambda curves: off(curves, value) - off(curves, than)


def kept_kl(penalty):
    """Share of the KL of an unpenalised policy that is still there under a penalty, at the stronger beta."""
    return lambda curves: world(curves, f"near_{penalty}/kl") / world(curves, "near_none/kl")


CLAIMS = (
    Claim(
        name="k3_reports_quietly_near",
        statement="At 1 / beta = 1, k1 of one sequence deviates more than twice as much as k3 (doublings).",
        estimand=noisier("k1", "k3", 0.0), margin=1.0,
        control_name="at the end of the path", control=noisier("k1", "k3", 1.0), unit="world",
    ),
    Claim(
        name="k3_reports_loudly_far",
        statement="At the end of the path, k3 of one sequence deviates more than twice as much as k1 (doublings).",
        estimand=noisier("k3", "k1", 1.0), margin=1.0,
        control_name="at 1 / beta = 1", control=noisier("k3", "k1", 0.0), unit="world",
    ),
    Claim(
        name="k2_reports_best_off_policy",
        statement="On lagging samples, half along the path, k1's mean report is farther from the KL than the biased k2's.",
        estimand=more_biased("k1", "k2", "lagged"), margin=0.1,
        control_name="on samples of the policy", control=more_biased("k1", "k2", "here"), unit="world",
    ),
    Claim(
        name="k1_in_the_reward_beats_k3_in_the_loss",
        statement="At beta 0.1, k1 in the reward reaches more of the rise of J - beta KL than k3 in the loss.",
        estimand=lead("far_k1_reward", "far_k3_loss"), margin=0.02,
        control_name="itself with other samples", control=lead("far_again", "far_k1_reward"), unit="world",
    ),
    Claim(
        name="k1_in_the_reward_beats_k2_in_the_loss",
        statement="At beta 0.1, it reaches more than k2 in the loss.",
        estimand=lead("far_k1_reward", "far_k2_loss"), margin=0.02,
        control_name="itself with other samples", control=lead("far_again", "far_k1_reward"), unit="world",
    ),
    Claim(
        name="a_tuned_weight_does_not_save_k3",
        statement="At beta 0.1, k1 in the reward reaches more than k3 in the loss with a tuned weight.",
        estimand=lead("far_k1_reward", "far_k3_loss_weighed"), margin=0.02,
        control_name="k1 in the reward with other samples, against itself with a tuned weight",
        control=lead("far_again", "far_k1_reward_weighed"), unit="world",
    ),
    Claim(
        name="k1_in_the_loss_is_no_penalty",
        statement="At beta 0.5, k1 in the loss keeps more than half of the KL of an unpenalised policy.",
        estimand=kept_kl("k1_loss"), margin=0.5,
        control_name="k2 in the loss", control=kept_kl("k2_loss"), unit="world",
    ),
    Claim(
        name="k3_in_the_reward_hardly_regularises",
        statement="At beta 0.5, k3 in the reward keeps more than half of the KL of an unpenalised policy.",
        estimand=kept_kl("k3_reward"), margin=0.5,
        control_name="k1 in the reward", control=kept_kl("k1_reward"), unit="world",
    ),
)

VALUES = ("k1", "k2", "k3")
LOSS = {NAMES[name]: name for name in ("k1_loss", "k2_loss", "k3_loss")}
REWARD = {NAMES[name]: name for name in ("k1_reward", "k2_reward", "k3_reward")}
SOUND = {NAMES[name]: name for name in TUNED}


def along(stage, metric, arms):
    return {
        "series": {label: f"{stage}/{metric}_{name}" for label, name in arms.items()},
        "xlabel": "KL(policy || reference), nats",
        "x": {label: f"{stage}/kl" for label in arms},
    }


def trained(place, metric, arms):
    return {label: f"{place}_{name}/{metric}" for label, name in arms.items()}


OF_VALUES = {name: name for name in VALUES}
PANELS = (
    Panel("Noise of a report, one sequence", ylabel="deviation / KL", **along("here", "sd", OF_VALUES)),
    Panel("Bias of a report, lagging samples", ylabel="mean / KL - 1", **along("lagged", "off", OF_VALUES)),
    Panel("Error of the expected update, 1: no penalty", ylabel="of the true gradient's length",
          **along("here", "error", LOSS | REWARD)),
    Panel("Training, beta 0.5", trained("near", "reached", SOUND), "share of the possible rise of J - beta KL", "update"),
    Panel("Training, beta 0.1", trained("far", "reached", LOSS | REWARD | {"no penalty": "none"}),
          "share of the possible rise of J - beta KL", "update"),
    Panel("KL in training, beta 0.1",
          trained("far", "kl", LOSS | REWARD | {"no penalty": "none"}) | {"the optimum": "far_none/kl_optimum"},
          "nats per sequence", "update"),
)

SWEEP = (  # scripts/tune.py kl_estimators
    {
        f"{place}_{name[:2]}_rate": ((4.0, 8.0, 16.0), f"{place}_{name}/reached")
        for place in ("near", "far") for name in TUNED
    },
    {f"{name[:2]}_weight": ((0.5, 0.7, 1.0), f"far_{name}_weighed/reached") for name in TUNED},
)


def middle(curves, name: str, at: float = 1.0) -> float:
    return float(np.median(world(curves, name, at)))


def table(first: str, columns: list[str], rows: dict[str, list[str]]) -> str:
    head = [f"| {first} | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    return "\n".join(head + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def places(cfg: Config, curves, shares: tuple[float, ...]) -> tuple[list[tuple[str, float]], list[str]]:
    """(stage, share of the path) for on-policy and lagging samples, and what to call them."""
    kl = [f"{middle(curves, 'here/kl', at):.2f} nats" for at in shares]
    names = [f"on-policy, {x}" for x in kl] + [f"lag {cfg.lag:g}, {x}" for x in kl]
    return [(stage, at) for stage in ("here", "lagged") for at in shares], names


def values_table(cfg: Config, curves) -> str:
    where, names = places(cfg, curves, (0.0, 0.5, 1.0))
    cell = lambda v, stage, at: " +- ".join(  # noqa: E731
        f"{middle(curves, f'{stage}/{metric}_{v}', at):.2f}" for metric in ("off", "sd")
    )
    return table("value", names, {v: [cell(v, *place) for place in where] for v in VALUES})


def pulls_table(cfg: Config, curves) -> str:
    where, names = places(cfg, curves, (0.0, 1.0))
    cell = lambda name, stage, at: ", ".join(  # noqa: E731
        f"{middle(curves, f'{stage}/{metric}_{name}', at):.2f}" for metric in ("pull", "error", "noise")
    )
    return table("penalty", names, {label: [cell(name, *place) for place in where] for name, label in NAMES.items()})


def ends_table(cfg: Config, curves) -> str:
    arms = NAMES | {"none": "no penalty", "again": "k1 in the reward, other samples"}
    arms |= {f"{name}_weighed": f"{NAMES[name]}, weight {getattr(cfg, f'{name[:2]}_weight'):g}" for name in TUNED}
    arms |= {f"{name}_reused": f"{NAMES[name]}, {REUSE} updates a batch" for name in (*TUNED, "score_loss")}

    def cell(name, place):
        if f"{place}_{name}/reached" not in curves:
            return ""
        return ", ".join(f"{middle(curves, f'{place}_{name}/{metric}'):.3f}" for metric in ("reached", "J", "kl"))

    rows = {label: [cell(name, place) for place in ("near", "far")] for name, label in arms.items()}
    return table("penalty", [f"beta {cfg.near_beta:g}", f"beta {cfg.far_beta:g}"], rows)


def sections(cfg: Config, curves) -> str:
    best = [f"{middle(curves, f'{place}_none/kl_optimum'):.2f}" for place in ("near", "far")]
    return "\n\n".join([
        "Numbers are medians over worlds.",
        "## What a value reports",
        "Bias +- deviation of one sequence's report, over the KL.",
        values_table(cfg, curves),
        "## Where a penalty pulls",
        "Expected update along the gradient of the KL, its error, and the deviation of one pair's update, in lengths of "
        "that gradient.",
        pulls_table(cfg, curves),
        "## Where training ends",
        f"Share of the possible rise of J - beta KL, J, KL. The optimum's KL is {best[0]} and {best[1]} nats.",
        ends_table(cfg, curves),
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(path=4, worlds=4), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(Config(depth=4, worlds=32, updates=4000), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
    sweep=SWEEP,
)
