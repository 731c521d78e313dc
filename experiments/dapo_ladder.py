"""What is each of DAPO's five changes worth, and does it depend on the order in which they are made?

DAPO's table of ablations climbs from GRPO without KL by one change after another, one run each: overlong filtering +6,
clip-higher +2, the soft overlong penalty +3, the token-level loss +1, dynamic sampling +8; a re-implementation found +2
for the last. What a change is worth on the way up need not be what its removal from the top costs, so here it is
measured three ways: on the ladder, alone on top of GRPO, and taken out of DAPO. One supervised start per seed on chains
whose demonstrations ramble beyond the last step until the budget cuts some of them (environment Chain), then every arm
is numbers of one compiled program. The rungs below the token-level loss are DAPO with GRPO's reduction and its other
changes switched off. That differs from GRPO in one respect: groups without signal count in no denominator; GRPO proper
is drawn beside it.
Two constants cannot be the paper's: the buffer of the penalty is the two tokens behind the longest demonstration that
does not ramble, and the penalty is at most a half, because it is half the distance between right and wrong in the paper,
whose rewards are +-1. All arms have one learning rate, as in the paper, tuned for the lowest rung. Success is measured
on the episodes that training draws at temperature 1 (all of them, those that dynamic sampling rejects included), as the
mean over the last 20 batches; at equal tokens, over the last quarter of the tokens that the cheaper arm generates.
Claims are about the mean of the two ends: the change alone and the change taken out of DAPO.

Source: Yu et al. 2025 (arXiv 2503.14476), table 1; the re-implementation is verl's (recipe/dapo/README.md); the length of
wrong answers after Liu et al. 2025 (arXiv 2503.20783).
Command: jaxpt run dapo_ladder
Expected (from six tuning seeds): dynamic sampling is worth +0.04 at either end of the ladder, all of DAPO's gain over GRPO,
at 2.4 times the tokens: at equal tokens it is worth nothing (0.00), and dynamic_sampling_pays_per_token is not supported.
Clip-higher changes the entropy by less than 0.01 nats (refuted): fewer than 1% of tokens are clipped here, and taking the
upper bound away (eps_high 2) changes no more. Filter and penalty do to truncation what they should, in opposite directions
(+0.012, -0.017 of the episodes), and nothing for success; the token loss shortens wrong answers by 0.06 tokens, while
there are long ones. Order matters: the token loss is worth +0.03 where the ladder has it, behind the penalty, and nothing
at either end.
Minutes: 5 on two cores (12 seeds); --tier smoke 1 with an empty compilation cache.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import over
from jaxpt.models import ModelConfig
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft

EVERY = 20  # updates between two evaluations, of one chunk, and of a mean over batches
ROWS = ("dapo_sequence_mean", "dapo", "grpo_no_kl")
CHANGES = ("filter", "clip", "penalty", "token", "dynamic")  # in the order of the paper's table
PAPER = {"filter": 6, "clip": 2, "penalty": 3, "token": 1, "dynamic": 8}  # points of AIME 2024, one run each
LADDER = {"_".join(CHANGES[:n]) or "base": CHANGES[:n] for n in range(len(CHANGES))} | {"dapo": CHANGES}
ALONE = {change: (change,) for change in CHANGES[1:]}  # the filter alone is on the ladder
WITHOUT = {f"without_{change}": tuple(c for c in CHANGES if c != change) for change in CHANGES[:-1]}
ARMS = LADDER | ALONE | WITHOUT
# change -> what it is measured by: the arm that has it and the arm that lacks nothing else
ON_LADDER = dict(zip(CHANGES, zip(list(LADDER)[1:], LADDER), strict=False))
ON_GRPO = {change: (change, "base") for change in CHANGES}
OUT_OF_DAPO = {change: ("dapo", f"without_{change}") for change in CHANGES[:-1]} | {"dynamic": ON_LADDER["dynamic"]}


@dataclass(frozen=True)
class Config:
    p: int = 5  # modulus of the affine maps
    level: int = 4  # longest chain of maps
    corruption: float = 0.3  # share of wrong steps in the demonstrations
    ramble: float = 0.6  # probability of each needless step in them
    d_model: int = 32
    n_layers: int = 2
    start_updates: int = 240  # supervised updates before the fork
    updates: int = 80  # batches of episodes after it
    batch: int = 128  # demonstrations per supervised update
    prompts: int = 16
    group: int = 8
    minibatches: int = 4  # updates per batch of episodes
    rounds: int = 3  # dynamic sampling draws groups at most so many times per batch
    eps_high: float = 0.28  # of clip-higher; both sides are 0.2 without it
    penalty: float = 0.5  # the greatest soft overlong penalty
    buffer: float = 2.0  # tokens over which it grows
    sft_rate: float = 4e-3  # both rates are tuned by SWEEP on seeds that no claim uses
    rate: float = 5e-4
    eval_tasks: int = 256

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "batch", "prompts", "group", "minibatches", "rounds", "eval_tasks")
        within(self, 1, 32, "level")
        within(self, 0, 0.8, "corruption", "ramble")
        within(self, 0, 1, "sft_rate", "rate", "penalty", "eps_high")
        within(self, 0, math.inf, "buffer")
        multiples(self, EVERY, "when arms are scored", "start_updates", "updates")

    def env(self) -> EnvConfig:
        options = {
            "p": self.p, "generators": 4, "max_level": self.level, "corruption": self.corruption, "ramble": self.ramble,
        }
        return EnvConfig("chain", options, (1, self.level))

    def leaves(self, changes: tuple[str, ...]) -> dict[str, float]:
        """The numbers that switch these changes on and the others off; the token-level loss is a row, not a number."""
        on = {
            "filter": {"overlong_filter": 1.0}, "clip": {"eps_high": self.eps_high},
            "penalty": {"overlong_penalty": self.penalty}, "dynamic": {"max_rounds": float(self.rounds)}, "token": {},
        }
        off = {"overlong_filter": 0.0, "eps_high": 0.2, "overlong_penalty": 0.0, "max_rounds": 1.0, "buffer": self.buffer}
        return off | {name: x for change in changes for name, x in on[change].items()}


def stages(cfg: Config, inputs) -> list[Stage]:
    env = cfg.env()
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks)
    sft = SftConfig(env=env, model=model, batch=cfg.batch, style="think_noisy", eval=scored)
    rl = PolicyConfig(
        env=env, model=model, objectives=ROWS, prompts=cfg.prompts, group=cfg.group, minibatches=cfg.minibatches, eval=scored,
    )

    def arm(name, changes, stream="policy", **more):
        row = "dapo" if "token" in changes else "dapo_sequence_mean"
        hyper = rl.arm(row) | cfg.leaves(changes) | {"learning_rate": cfg.rate} | more
        return Stage(name, make_policy, rl, cfg.updates, after="start", stream=stream, hyper=hyper)

    proper = rl.arm("grpo_no_kl") | {"learning_rate": cfg.rate}
    return [
        Stage("start", make_sft, sft, cfg.start_updates, hyper={"learning_rate": cfg.sft_rate}),
        *(arm(name, changes) for name, changes in ARMS.items()),
        Stage("grpo", make_policy, rl, cfg.updates, after="start", stream="policy", hyper=proper),
        arm("base_again", (), stream="again"),
        arm("dapo_again", CHANGES, stream="again"),
        arm("coin", (), reward_noise=1.0),
    ]


# Every arm soon unlearns to ramble, so what is done about long answers is measured while they are there.
EARLY, LATE = slice(0, EVERY // 2), slice(-EVERY, None)
truncated, wrong_length = over("truncated", EARLY), over("wrong_length", EARLY)
success, entropy = over("gold", LATE), over("entropy", LATE)


def difference(measure):
    return lambda curves, arm, other: measure(curves, arm) - measure(curves, other)


def at_equal_tokens(curves, arm, other):
    """Success of `arm` over `other`'s, per seed, over the last quarter of the tokens that the cheaper one generates."""
    spent = {name: np.asarray(curves[f"{name}/generated"], np.float64) for name in (arm, other)}
    budget = np.minimum(spent[arm][:, -1], spent[other][:, -1])

    def reached(name):
        tokens = np.pad(spent[name], ((0, 0), (1, 0)))
        earned = np.pad(np.cumsum(np.asarray(curves[f"{name}/gold"], np.float64) * np.diff(tokens), axis=1), ((0, 0), (1, 0)))
        rows = list(zip(budget, tokens, earned, strict=True))
        return np.array([(np.interp(b, x, y) - np.interp(0.75 * b, x, y)) / (0.25 * b) for b, x, y in rows])

    return reached(arm) - reached(other)


def effect(compare, change: str, sign: int = 1):
    """What a change does, as the mean of what it does alone and what DAPO loses without it; per seed."""
    ends = ON_GRPO[change], OUT_OF_DAPO[change]
    return lambda curves: sign * np.mean([compare(curves, *pair) for pair in ends], axis=0)


def nothing(compare):
    """The same of no change: GRPO and DAPO twice, under other draws."""
    return lambda curves: np.mean([compare(curves, f"{arm}_again", arm) for arm in ("base", "dapo")], axis=0)


CLAIMS = (
    Claim(
        name="dapo_beats_grpo",
        statement="With all five changes the policy ends with a higher success at T = 1 than GRPO.",
        estimand=lambda curves: difference(success)(curves, "dapo", "base"), margin=0.01,
        control_name="GRPO with a fair coin for a reward", control=lambda curves: difference(success)(curves, "coin", "base"),
    ),
    Claim(
        name="dynamic_sampling_pays_per_update",
        statement="Dynamic sampling raises success at T = 1 at equal numbers of updates.",
        estimand=effect(difference(success), "dynamic"), margin=0.015,
        control_name="clip-higher in its place", control=effect(difference(success), "clip"),
    ),
    Claim(
        name="dynamic_sampling_pays_per_token",
        statement="Dynamic sampling raises success at T = 1 at equal numbers of generated tokens.",
        estimand=effect(at_equal_tokens, "dynamic"), margin=0.015,
        control_name="clip-higher in its place", control=effect(at_equal_tokens, "clip"),
    ),
    Claim(
        name="clip_higher_keeps_entropy",
        statement="Clip-higher leaves more entropy at the end, in nats per token.",
        estimand=effect(difference(entropy), "clip"), margin=0.01,
        control_name="GRPO and DAPO twice, other draws", control=nothing(difference(entropy)),
    ),
    Claim(
        name="the_token_loss_shortens_wrong_answers",
        statement="Over the first 10 batches, wrong answers are shorter, in tokens, under the mean over tokens than under "
        "GRPO's mean over sequences.",
        estimand=effect(difference(wrong_length), "token", -1), margin=0.03,
        control_name="clip-higher in its place", control=effect(difference(wrong_length), "clip", -1),
    ),
    Claim(
        name="the_penalty_prevents_truncation",
        statement="Over the first 10 batches, the soft penalty lowers the share of truncated episodes.",
        estimand=effect(difference(truncated), "penalty", -1), margin=0.005,
        control_name="clip-higher in its place", control=effect(difference(truncated), "clip", -1),
    ),
    Claim(
        name="the_filter_leaves_truncation",
        statement="Over the first 10 batches, the overlong filter raises the share of truncated episodes: what it does not "
        "train on, it does not unlearn.",
        estimand=effect(difference(truncated), "filter"), margin=0.005,
        control_name="clip-higher in its place", control=effect(difference(truncated), "clip"),
    ),
)


RUNGS = dict(zip(("GRPO", "+ filter", "+ clip-higher", "+ penalty", "+ token loss", "DAPO"), LADDER, strict=True))
TOP = {"DAPO": "dapo"} | {f"DAPO - {change}": OUT_OF_DAPO[change][1] for change in CHANGES}
ENDS = {"GRPO": "base", "GRPO + clip": "clip", "DAPO": "dapo", "DAPO - clip": "without_clip"}
LONG = {"GRPO": "base", "+ filter": "filter", "GRPO + penalty": "penalty", "GRPO + token": "token"}
SIGNAL = {"GRPO": "base", "DAPO": "dapo", "GRPO, coin": "coin"}
PANELS = (
    Panel("The ladder: success at T = 1", per_arm("sampled_gold", RUNGS), "success", "batch"),
    Panel(
        "The ladder: success at T = 1", per_arm("sampled_gold", RUNGS), "success", "generated tokens", per_arm("generated", RUNGS),
    ),
    Panel("DAPO without one change: success at T = 1", per_arm("sampled_gold", TOP), "success", "batch"),
    Panel("Entropy", per_arm("entropy", ENDS), "nats per token", "batch"),
    Panel("Truncated episodes", per_arm("truncated", LONG), "share", "batch"),
    Panel("Length of wrong answers", per_arm("wrong_length", LONG), "tokens", "batch"),
    Panel("Rows in groups without signal", per_arm("no_signal", SIGNAL), "share of those drawn", "batch"),
)

RATES = (2.5e-4, 5e-4, 1e-3)
SWEEP = (  # scripts/tune.py dapo_ladder
    {"sft_rate": ((4e-3, 8e-3, 1.6e-2), "start/sampled_gold")},
    {"rate": (RATES, "base/sampled_gold")},
)


def sections(cfg: Config, curves) -> str:
    rows = [
        f"| {change} | +{PAPER[change]} | " + " | ".join(
            cell(difference(success)(curves, *way[change]), "+.3f") for way in (ON_LADDER, ON_GRPO, OUT_OF_DAPO)
        ) + " | " + " | ".join(
            cell(at_equal_tokens(curves, *way[change]), "+.3f") for way in (ON_GRPO, OUT_OF_DAPO)
        ) + " |"
        for change in CHANGES
    ]
    arms = [
        f"| {name} | " + " | ".join(
            f"{float(np.mean(over(metric, LATE)(curves, name))):.3f}"
            for metric in ("gold", "entropy", "truncated", "wrong_length", "no_signal", "clip_fraction")
        ) + f" | {float(np.mean(curves[f'{name}/generated'][:, -1])):.3g} |"
        for name in (*ARMS, "grpo", "coin")
    ]
    return "\n".join([
        "## What a change is worth", "",
        "Success at T = 1 over the last batches with the change, minus without it, and the 95% interval over seeds: as the "
        "next rung of the ladder, alone on top of GRPO, and as what DAPO loses without it; then the last two at equal "
        "generated tokens. The paper's gains are points of AIME 2024, one run each.", "",
        "| change | paper | on the ladder | alone | out of DAPO | alone, equal tokens | out of DAPO, equal tokens |",
        "| --- | --- | --- | --- | --- | --- | --- |", *rows, "",
        "## The arms over the last batches", "",
        "| arm | success | entropy | truncated | length of wrong | without signal | clipped | tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |", *arms,
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(n_layers=1, start_updates=40, updates=20, prompts=8, group=4, eval_tasks=32), seeds=2),
        "cpu": Tier(Config(), seeds=12),
        "full": Tier(Config(level=6, d_model=64, start_updates=2000, updates=1000, rounds=10), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
    sweep=SWEEP,
)
