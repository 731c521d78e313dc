"""Which policy objective learns best from the same start, and what is known about why?

One supervised start per seed, from imperfect demonstrations of a reasoning chain (environment Chain), forked into
seven objectives that see the same tasks: REINFORCE, RLOO, PPO, GRPO, Dr.GRPO, DAPO and GSPO, each with the
constants of its paper and a learning rate tuned for it on other seeds. Every batch of 16 x 8 episodes is used for
four updates, on four whole groups each, so importance ratios move and clips bind. Two constants cannot be the papers',
because they measure a policy that moves a thousand times slower than ours: GSPO's clip range is tuned like a rate, and
DAPO's overlong buffer is the two tokens beyond the longest demonstration. Every arm makes the same number of
updates; DAPO generates more tokens for them (it draws again where a group has no signal), so success is drawn
against both. Two more arms run RLOO and GRPO at one rate that is too high for either, and a coin for GRPO's reward is
the control.
The twins are exact. On enumerable trees every row's gradient is averaged over all groups a policy can draw: its bias
is the angle to the gradient of J, its noise the deviation of one group's update over its mean. And the same rows train
tables on a tree whose J is a sum over leaves, again at tuned rates; trees have no budget, so DAPO's penalty is off there.

Source: the rows of jaxpt.objectives.policy, each with its paper; the question after Ahmadian et al. 2024 (arXiv
2402.14740) and Liu et al. 2025 (arXiv 2503.20783).
Command: jaxpt run objectives
Expected: six claims supported, two refuted, every control refuted. All seven gain some 0.3 over their start and, but for
DAPO, end within 0.02 of one another. DAPO is ahead by 0.05 per update, for 2.7 times the tokens, and level per token.
REINFORCE without a baseline is not behind RLOO, though its exact noise is nearly twice as large: with rewards of 0 and
1 it imitates its own right answers, and never pushes down. At four times the tuned rate RLOO loses three
quarters of its gain, GRPO a fifth.
Minutes: 4.5 on two cores (8 seeds, empty compilation cache); --tier smoke 1.5.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.critic import CriticConfig
from jaxpt.train.estimators import EstimatorConfig, make_estimators
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft
from jaxpt.train.tabular import TabularConfig, make_tabular

EVERY = 20  # updates between two evaluations, and of one chunk
ARMS = {
    "REINFORCE": "reinforce", "RLOO": "rloo", "PPO": "ppo", "GRPO": "grpo", "Dr.GRPO": "dr_grpo", "DAPO": "dapo",
    "GSPO": "gspo",
}
ROWS = tuple(ARMS.values())
NO_BUDGET = {"overlong_penalty": 0.0}  # of the twins: a tree's responses end by themselves


@dataclass(frozen=True)
class Config:
    p: int = 5  # modulus of the affine maps
    generators: int = 4  # number of maps
    level: int = 3  # longest chain of maps
    corruption: float = 0.25  # share of wrong steps in the demonstrations
    d_model: int = 32
    n_layers: int = 2
    start_updates: int = 240  # supervised updates before the fork
    updates: int = 80  # batches of episodes after it
    batch: int = 128  # demonstrations per supervised update
    prompts: int = 16
    group: int = 8
    minibatches: int = 4  # updates per batch of episodes
    rounds: int = 3  # DAPO draws groups at most so many times per batch
    sft_rate: float = 4e-3
    reinforce_rate: float = 0.00025  # these rates, and GSPO's clip, are tuned by SWEEP on seeds that no claim uses
    rloo_rate: float = 0.00025
    ppo_rate: float = 0.00025
    grpo_rate: float = 0.00025
    dr_grpo_rate: float = 0.00025
    dapo_rate: float = 0.0005
    gspo_rate: float = 0.00025
    critic_rate: float = 0.0005
    gspo_clip: float = 0.004  # eps_high; eps_low is 3/4 of it, as in the paper
    twin_reinforce_rate: float = 8
    twin_rloo_rate: float = 32
    twin_ppo_rate: float = 8
    twin_grpo_rate: float = 8
    twin_dr_grpo_rate: float = 32
    twin_dapo_rate: float = 16
    twin_gspo_rate: float = 16
    hot_rate: float = 1e-3  # of the two arms at a rate that is too high
    eval_tasks: int = 1024  # fixed tasks, on which every arm is scored
    twin_updates: int = 60

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "batch", "prompts", "group", "minibatches", "rounds", "eval_tasks",
               "twin_updates")
        within(self, 1, 32, "level")
        within(self, 0, 0.8, "corruption")
        within(self, 0, 1, "sft_rate", "critic_rate", "gspo_clip", "hot_rate", *(f"{row}_rate" for row in ROWS))
        within(self, 0, math.inf, *(f"twin_{row}_rate" for row in ROWS))
        multiples(self, EVERY, "when arms are scored", "start_updates", "updates")
        if self.prompts % self.minibatches:
            raise ValueError(f"--minibatches {self.minibatches}: expected a divisor of --prompts {self.prompts}")
        try:
            self.env()
        except ValueError as error:
            raise ValueError(f"--p {self.p} --generators {self.generators}: {error}") from None

    def env(self) -> EnvConfig:
        options = {
            "p": self.p, "generators": self.generators, "max_level": self.level, "corruption": self.corruption,
        }
        return EnvConfig("chain", options, (1, self.level))

    def changed(self, row: str) -> dict[str, float]:
        """What an arm sets beside its row's constants."""
        here = {
            "dapo": {"max_rounds": float(self.rounds), "buffer": 2.0},
            "gspo": {"eps_low": 0.75 * self.gspo_clip, "eps_high": self.gspo_clip},
            "ppo": {"critic_rate": self.critic_rate},
        }
        return {"learning_rate": getattr(self, f"{row}_rate"), **here.get(row, {})}


def stages(cfg: Config, inputs) -> list[Stage]:
    env = cfg.env()
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks)
    sft = SftConfig(env=env, model=model, batch=cfg.batch, style="think_noisy", eval=scored)
    rl = PolicyConfig(
        env=env, model=model, objectives=ROWS, critic=CriticConfig(), prompts=cfg.prompts, group=cfg.group,
        minibatches=cfg.minibatches, eval=scored,
    )
    demonstrated = TabularConfig(objectives=("sft",), source="demonstrator", corruption=0.3)
    table = TabularConfig(objectives=ROWS)

    def arm(name, row, **changed):
        return Stage(name, make_policy, rl, cfg.updates, after="start", stream="policy",
                     hyper=rl.arm(row) | cfg.changed(row) | changed)

    def twin(row):
        rate = {"learning_rate": getattr(cfg, f"twin_{row}_rate")}
        return Stage(f"twin_{row}", make_tabular, table, cfg.twin_updates, after="twin_start", stream="twin_policy",
                     hyper={k: NO_BUDGET.get(k, v) for k, v in table.arm(row).items()} | rate)

    return [
        Stage("start", make_sft, sft, cfg.start_updates, hyper={"learning_rate": cfg.sft_rate}),
        *(arm(row, row) for row in ROWS),
        arm("rloo_hot", "rloo", learning_rate=cfg.hot_rate),
        arm("grpo_hot", "grpo", learning_rate=cfg.hot_rate),
        arm("coin", "grpo", reward_noise=1.0),
        Stage("twin_start", make_tabular, demonstrated, cfg.twin_updates),
        *map(twin, ROWS),
        Stage("exact", make_estimators, EstimatorConfig(objectives=ROWS, changed=NO_BUDGET), 20),
    ]


def success(curves, arm):
    return last(curves[f"{arm}/sampled_gold"])


def gain(arm, over):
    return lambda curves: success(curves, arm) - success(curves, over)


def at_tokens_of(arm, other):
    """Success of an arm when it had generated as many tokens as `other` in all, between its evaluations."""

    def interpolated(curves):
        scores, tokens = curves[f"{arm}/sampled_gold"], curves[f"{arm}/generated"]
        spent = last(curves[f"{other}/generated"])
        seen = np.isfinite(scores)
        return np.array([np.interp(t, x[m], y[m]) for t, x, y, m in zip(spent, tokens, scores, seen, strict=True)])

    return interpolated


def least_gain(curves):
    return np.min([gain(row, "start")(curves) for row in ROWS], axis=0)


def exact(what, row, step):
    """One number per world of every seed."""
    return lambda curves: curves[f"exact/{what}_{row}_world"][:, step].ravel()


def extra_noise(row, over):
    return lambda curves: exact("noise", row, 0)(curves) / exact("noise", over, 0)(curves) - 1


def extra_bias(row, over):
    return lambda curves: exact("bias", row, -1)(curves) - exact("bias", over, -1)(curves)


COIN = "GRPO with a fair coin for a reward"
CLAIMS = (
    Claim(
        name="every_objective_learns",
        statement="The least of the seven ends more than 0.1 above the start in success at T = 1.",
        estimand=least_gain, margin=0.1, control_name=COIN, control=gain("coin", "start"),
    ),
    Claim(
        name="rloo_beats_reinforce",
        statement="With the other samples as a baseline, REINFORCE ends with a higher success.",
        estimand=gain("rloo", "reinforce"), margin=0.02, control_name=COIN, control=gain("coin", "reinforce"),
    ),
    Claim(
        name="dapo_beats_grpo",
        statement="At equal updates, DAPO ends with a higher success than GRPO.",
        estimand=gain("dapo", "grpo"), margin=0.02, control_name=COIN, control=gain("coin", "grpo"),
    ),
    Claim(
        name="dapo_beats_grpo_per_token",
        statement="When it has generated as many tokens as GRPO in all, DAPO's success is higher.",
        estimand=lambda curves: at_tokens_of("dapo", "grpo")(curves) - success(curves, "grpo"), margin=0.02,
        control_name=COIN, control=lambda curves: at_tokens_of("coin", "grpo")(curves) - success(curves, "grpo"),
    ),
    Claim(
        name="rloo_needs_no_critic",
        statement="RLOO ends at most 0.04 below PPO: the difference plus 0.05 exceeds 0.01.",
        estimand=lambda curves: gain("rloo", "ppo")(curves) + 0.05, margin=0.01, control_name=COIN,
        control=lambda curves: gain("coin", "ppo")(curves) + 0.05,
    ),
    Claim(
        name="a_clip_survives_a_hot_rate",
        statement="At a rate too high for both, GRPO with its clip and KL ends above RLOO, which has neither.",
        estimand=gain("grpo_hot", "rloo_hot"), margin=0.05, control_name="the same two at their own rates",
        control=gain("grpo", "rloo"),
    ),
    Claim(
        name="a_baseline_cuts_noise",
        statement="Exactly, at the uniform policy: one group's update is noisier in REINFORCE than in RLOO, by a fifth.",
        estimand=extra_noise("reinforce", "rloo"), margin=0.2, unit="world",
        control_name="Dr.GRPO, whose update is RLOO's but for a constant", control=extra_noise("dr_grpo", "rloo"),
    ),
    Claim(
        name="standardising_turns_the_update",
        statement="Exactly, at the end of the ascent: GRPO's expected update leaves the gradient of J by 1 - cosine.",
        estimand=extra_bias("grpo", "rloo"), margin=0.02, unit="world",
        control_name="Dr.GRPO, which neither standardises nor averages over a row", control=extra_bias("dr_grpo", "rloo"),
    ),
)


def per_arm(metric: str, *without: str) -> dict[str, str]:
    return {name: f"{row}/{metric}" for name, row in ARMS.items() if row not in without}


HOT = {"RLOO": "rloo_hot/sampled_gold", "GRPO": "grpo_hot/sampled_gold"}
PANELS = (
    Panel("Success at T = 1", per_arm("sampled_gold") | {"coin": "coin/sampled_gold"}, "success", "batch"),
    Panel("Success at T = 1", per_arm("sampled_gold"), "success", "generated tokens", per_arm("generated")),
    Panel("The same at a rate too high", HOT, "success", "batch"),
    Panel("Entropy of the policy", per_arm("entropy"), "nats per token", "batch"),
    Panel("Length of wrong answers", per_arm("wrong_length"), "tokens", "batch"),
    Panel("Groups without signal", per_arm("no_signal"), "share of groups", "batch"),
    Panel("Clipped tokens", per_arm("clip_fraction", "reinforce", "rloo"), "share", "batch"),
    Panel("Distance from the start", per_arm("sampled_drift"), "KL of sequences, nats", "batch"),
    Panel("Twin: exact J", {name: f"twin_{row}/J" for name, row in ARMS.items()}, "J", "update"),
    Panel("Twin: bias of the direction", {name: f"exact/bias_{row}" for name, row in ARMS.items()}, "1 - cosine", "step of exact ascent"),
    Panel("Twin: noise of a group of 3", {name: f"exact/noise_{row}" for name, row in ARMS.items()}, "sd / mean", "step of exact ascent"),
)

SWEEP = (  # scripts/tune.py objectives
    {f"{row}_rate": ((1.25e-4, 2.5e-4, 5e-4, 1e-3), f"{row}/sampled_gold") for row in ROWS}
    | {f"twin_{row}_rate": ((4.0, 8.0, 16.0, 32.0), f"twin_{row}/J") for row in ROWS},
    {
        "gspo_clip": ((4e-4, 4e-3, 4e-2), "gspo/sampled_gold"),
        "critic_rate": ((5e-4, 2e-3, 8e-3), "ppo/sampled_gold"),
    },
)


def sections(cfg: Config, curves) -> str:
    def mean_of(x, digits):
        return "n/a" if np.isnan(x).all() else f"{round(float(np.mean(x)), digits) + 0.0:.{digits}f}"  # no -0.000

    lines = []
    for name, row in ARMS.items():
        spread = np.std(success(curves, row), ddof=1) if len(curves["seeds"]) > 1 else np.nan
        at_end = {what: last(curves[f"{row}/{what}"]) for what in ("generated", "entropy", "sampled_drift", "clip_fraction")}
        exact_at = {what: [curves[f"exact/{what}_{row}"][:, at] for at in (0, -1)] for what in ("bias", "noise")}
        cells = [
            name, cell(success(curves, row)), mean_of(spread, 3), mean_of(at_end["generated"] / 1000, 0),
            mean_of(at_end["entropy"], 3), mean_of(at_end["sampled_drift"], 2), mean_of(at_end["clip_fraction"], 3),
            ", ".join(mean_of(x, 3) for x in exact_at["bias"]), ", ".join(mean_of(x, 2) for x in exact_at["noise"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([
        "## The arms at the end", "",
        "Success at T = 1 with its 95% interval and its standard deviation over seeds; thousands of tokens generated; entropy "
        "(nats per token); KL from the start (nats per sequence); share of clipped tokens in the last batch; exact bias and "
        "noise of one group of 3 on trees, at the uniform policy and at the end of the ascent.", "",
        "| arm | success | sd | tokens, k | entropy | KL | clipped | bias | noise |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |", *lines,
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(start_updates=40, updates=20, prompts=8, group=4, eval_tasks=32, twin_updates=20), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(Config(level=6, d_model=64, start_updates=2000, updates=1000, rounds=10), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
    sweep=SWEEP,
)
