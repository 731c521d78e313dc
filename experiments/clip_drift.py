"""What does a clip of importance ratios bound, when one batch is used for many updates?

A clip at 1 +- eps is often said to bound the ratio of every token, and so the drift of a sequence of T tokens by
(1 + eps)^T. It only takes an incentive away: a token outside the range gets no gradient of its own, and its
probability goes on moving with the others of its softmax and with shared parameters. Here nothing is estimated: trees
of T = 1 (a bandit), 2, 4 and 8 binary decisions, policies whose nodes share half of their features, one batch of
4 x 8 sequences, plain gradient descent on GRPO's loss with eps 0.2 in small steps, and after every update the ratios,
KL and J of all sequences. Arms at T = 8: no clip (once whole, once until 0.7 nats), a wide clip (eps 3), DAPO's
clip-higher (0.28), a clip of the sequence's mean ratio as in GSPO (at the same 0.2), eight times the rate, no sharing,
nothing but sharing, a KL penalty without clip, and an early stop at a small exact KL, the control of most claims.

Source: the clip of Schulman et al. 2017 (arXiv 1707.06347, eq. 7); that it bounds nothing: Wang, He, Tan 2020 (Truly
Proximal Policy Optimization, arXiv 1903.07940). Early stop: Spinning Up's PPO (target_kl).
Command: jaxpt run clip_drift
Expected: all claims supported, every control refuted. On tuning seeds, T = 8: the largest ratio of a trained token is
1.89 in the mean of 128 worlds, a third of the trained tokens lie outside the range, and KL still grows after 256
updates; sequences pass (1 + eps)^T by more than a twentieth of its power in 51, 63, 44 and 16% of the worlds at
T = 1, 2, 4, 8, so that the bound fails most where sequences are short; KL grows with T, by far less than T-fold (0.07
to 0.16 nats). Sharing is not needed for any of it: a table drifts as far. And yet the clip restrains: without it KL is
4.9 doublings larger, with a sequence's clip 2.1. At equal exact KL it has gained more J than no clip (0.02), perhaps
because a token that has had its share leaves the rest of the KL to others.
Minutes: 1.5 on two cores (8 seeds); --tier smoke 1 with an empty compilation cache. No rate is tuned: steps are small
so that nothing here is a single step's overshoot; the arm `fast` shows what larger ones add.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpt.lab.errors import within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier
from jaxpt.train.drift import DriftConfig, make_drift

CHUNK = 64
EPS = 0.2
DEPTHS = (1, 2, 4, 8)
LONG = DEPTHS[-1]
FREE = 1e9  # a clip range that nothing leaves
DRAWN_UNTIL = 0.7  # nats; where the free arm of one panel ends


@dataclass(frozen=True)
class Config:
    updates: int = 256  # on the one batch
    learning_rate: float = 0.25
    faster: float = 8.0  # the fast arm's rate over learning_rate
    beta: float = 1.0  # of the KL penalty
    kl_limit: float = 0.02  # nats; where the early stop ends
    groups: int = 4
    group: int = 8
    worlds: int = 16  # of each seed

    def __post_init__(self):
        within(self, 1, math.inf, "updates", "groups", "worlds", "faster")
        within(self, 2, math.inf, "group")
        within(self, 0, math.inf, "learning_rate", "beta", "kl_limit")
        if self.updates % CHUNK:
            raise ValueError(f"--updates {self.updates}: expected a multiple of {CHUNK}")


def stages(cfg: Config, inputs) -> list[Stage]:
    free, stop = {"eps_low": FREE, "eps_high": FREE}, {"kl_limit": cfg.kl_limit}

    def arm(name, depth=LONG, ratio="token", **hyper):
        drift = DriftConfig(
            ratio=ratio, depth=depth, groups=cfg.groups, group=cfg.group, worlds=cfg.worlds, edge=EPS,
        )
        hyper = {"learning_rate": cfg.learning_rate, "eps_low": EPS, "eps_high": EPS} | hyper
        return Stage(f"{name}_T{depth}", make_drift, drift, cfg.updates, hyper=hyper, chunk=CHUNK, stream=f"T{depth}")

    return [
        *(arm("clip", depth) for depth in DEPTHS),
        *(arm("stop", depth, **stop) for depth in (1, LONG)),
        arm("open", **free),
        arm("open_until", **free, kl_limit=DRAWN_UNTIL),
        arm("wide", eps_low=3.0, eps_high=3.0),
        arm("higher", eps_high=0.28),
        arm("fast", learning_rate=cfg.faster * cfg.learning_rate),
        arm("table", sharing=0.0),
        arm("shared", sharing=1.0),
        arm("penalty", **free, beta=cfg.beta),
        arm("sequence", ratio="sequence"),
        arm("sequence_stop", ratio="sequence", **stop),
    ]


def end(curves, arm, metric):
    """One number per world of every seed, after the last update."""
    return curves[f"{arm}/{metric}_world"][:, -1].astype(np.float64).ravel()


def farther(arm, over):
    """KL of one arm minus that of another; a batch without signal moves nothing, so there is no ratio to take."""
    return lambda curves: end(curves, arm, "kl") - end(curves, over, "kl")


def doublings(arm, over):
    """How often the KL of one arm must be doubled to be that of another in the same world, both at T = 8."""
    return lambda curves: np.log2(end(curves, f"{arm}_T{LONG}", "kl") / end(curves, f"{over}_T{LONG}", "kl"))


def beyond_the_clip(arm):
    """The largest ratio of a token of the batch, minus the clip's edge."""
    return lambda curves: end(curves, arm, "ratio") - (1 + EPS)


def passes_the_power(arm):
    """1 where a sequence of the batch has more than (1 + eps)^(1.05 T) times its old probability, else 0."""
    return lambda curves: (end(curves, arm, "power") > 1.05).astype(np.float64)


def path(curves, arm, metric):
    """[worlds of all seeds, updates + 1], from the old policy on, where both KL and gain are 0."""
    values = np.moveaxis(curves[f"{arm}/{metric}_world"], 1, -1)
    return np.pad(values.reshape(-1, values.shape[-1]).astype(np.float64), ((0, 0), (1, 0)))


def dearer(share):
    """Gain of the clipped arm minus that of the free one when that was as far from the old policy, by exact KL: where
    the clipped arm ends (share 1), or on the way there at this share of its KL."""

    def at(arm, target, curves):
        kl, gain = np.maximum.accumulate(path(curves, arm, "kl"), axis=1), path(curves, arm, "gain")
        return np.array([np.interp(x, k, g) for x, k, g in zip(target, kl, gain, strict=True)])

    def estimand(curves):
        target = share * path(curves, f"clip_T{LONG}", "kl").max(axis=1)
        return at(f"clip_T{LONG}", target, curves) - at(f"open_T{LONG}", target, curves)

    return estimand


STOP = "an early stop at a small exact KL"
CLAIMS = (
    Claim(
        name="ratios_pass_the_clip",
        statement=f"With eps 0.2 and small steps, T = {LONG}, the largest ratio of a trained token ends above 1.4.",
        estimand=beyond_the_clip(f"clip_T{LONG}"), margin=0.2,
        control_name=STOP, control=beyond_the_clip(f"stop_T{LONG}"), unit="world",
    ),
    Claim(
        name="sequences_pass_the_power",
        statement="At T = 4, in more than a tenth of the worlds a trained sequence gains more than (1 + eps)^(1.05 T).",
        estimand=passes_the_power("clip_T4"), margin=0.1,
        control_name=f"{STOP}, T = {LONG}", control=passes_the_power(f"stop_T{LONG}"), unit="world",
    ),
    Claim(
        name="drift_grows_with_length",
        statement=f"At one clip, the KL of whole sequences is larger at T = {LONG} than at T = 1 (nats).",
        estimand=farther(f"clip_T{LONG}", "clip_T1"), margin=0.03,
        control_name=STOP, control=farther(f"stop_T{LONG}", "stop_T1"), unit="world",
    ),
    Claim(
        name="the_clip_restrains",
        statement=f"Without the clip, the KL is more than twice as large at T = {LONG} (doublings).",
        estimand=doublings("open", "clip"), margin=1.0,
        control_name="a clip with eps 3", control=doublings("open", "wide"), unit="world",
    ),
    Claim(
        name="a_sequence_s_clip_restrains_less",
        statement=f"Clipping a sequence's mean ratio at the same 0.2 more than doubles the KL at T = {LONG} (doublings).",
        estimand=doublings("sequence", "clip"), margin=1.0,
        control_name=STOP, control=doublings("sequence_stop", "stop"), unit="world",
    ),
    Claim(
        name="the_clip_spends_its_kl_better",
        statement=f"At equal exact KL, T = {LONG}, the clipped arm has gained more J than the free one.",
        estimand=dearer(1.0), margin=0.005,
        control_name="at a tenth of that KL, before the clip binds", control=dearer(0.1), unit="world",
    ),
)

LENGTHS = {f"T = {depth}": f"clip_T{depth}" for depth in DEPTHS}
ARMS = {
    "clip": "clip", "no clip": "open", "clip-higher": "higher", "sequence clip": "sequence", "KL penalty": "penalty",
    "early stop": "stop", "wide clip": "wide", "fast": "fast", "table": "table", "shared only": "shared",
    "no clip, at first": "open_until",
}
DRAWN = ("clip", "clip-higher", "sequence clip", "KL penalty", "early stop")
BOUGHT = ("clip", "clip-higher", "sequence clip", "KL penalty", "no clip, at first")


def of_lengths(metric):
    return {label: f"{stage}/{metric}" for label, stage in LENGTHS.items()}


def of_arms(metric, *labels):
    return {label: f"{ARMS[label]}_T{LONG}/{metric}" for label in labels}


PANELS = (
    Panel("Largest ratio of a trained token, clip at 1.2", of_lengths("ratio"), "new / old probability", "update"),
    Panel("Trained tokens outside 1 +- 0.2", of_lengths("outside"), "share", "update"),
    Panel("Drift of sequences under one clip", of_lengths("kl"), "KL(old || new), nats", "update"),
    Panel(f"Largest ratio of a trained token, T = {LONG}", of_arms("ratio", *DRAWN), "new / old probability", "update"),
    Panel(f"Drift of sequences, T = {LONG}", of_arms("kl", *DRAWN), "KL(old || new), nats", "update"),
    Panel(f"What drift buys, T = {LONG}", of_arms("gain", *BOUGHT), "gain in J", "KL(old || new), nats",
          of_arms("kl", *BOUGHT)),
)


def sections(cfg: Config, curves) -> str:
    metrics = ("ratio", "ratio_any", "outside", "outside_all", "power", "kl", "estimate", "tv", "gain")
    named = {f"clip, {label}": stage for label, stage in LENGTHS.items()}
    named |= {f"{label}, T = {LONG}": f"{arm}_T{LONG}" for label, arm in ARMS.items() if arm != "clip"}
    lines = [
        f"| {label} | " + " | ".join(f"{np.median(end(curves, arm, metric)):.3f}" for metric in metrics) + " |"
        for label, arm in named.items()
    ]
    return "\n".join([
        "## After the last update", "",
        "Medians over worlds. Largest ratio of a trained token, and of any token of the tree; share of trained decisions, "
        "and of the old policy's, outside 1 +- eps; largest gain of a trained sequence, as a power of (1 + eps)^T; "
        "KL(old || new) of sequences, exact and as the batch estimates it; total variation; gain in J.", "",
        "| arm | ratio | any | outside | of all | power | KL | estimated | TV | gain |",
        "| --- |" + " --- |" * len(metrics), *lines,
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(updates=64, worlds=4), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(Config(updates=2048, worlds=32), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
)
