"""Does supervised fine-tuning memorise where reinforcement learning generalises?

A model that has learnt the sub-skills of a card game (what cards count under every rule, values of formulas, formulas for
numbers; environment Cards) is taught the format by a short SFT on single solutions, under the rule TEN. This start is
forked, at equal product FLOPs, into

    sft      more of the same SFT; `again` is a second run of it, on other draws
    diverse  SFT on hands under TEN and five other rules for the faces; COUNT is not among them
    rl       Dr.GRPO, whose reward is 1 for a right answer, on TEN
    raw      the same without the start: from the pre-trained model

and scored on hands as in training, on held-out hands, and under COUNT, where J, Q, K are 11, 12, 13 instead of 10: a rule
that all know from pre-training and none is trained on. One try, no feedback: with retries (--tries 3) what is compared
includes a format that RL alone has trained on. Claims are on greedy answers, because RL sharpens and would be ahead at
T = 1 for that alone. Two cards. Rates are those of SWEEP, chosen by the success on held-out hands, never by COUNT, on seeds
10000 and 10001; those of the start and of diverse rules lie at the end of what was tried (2e-3).

Source: Chu et al. 2025 (arXiv 2501.17161; GeneralPoints); the counter-claim, that SFT fails for its frozen prompts, is
that of arXiv 2510.00237. Hands under COUNT have a face card, as there; `faces` is the same population under TEN, so that
what is harder about these hands can be told from what is another rule.
Command: jaxpt run sft_vs_rl
Expected (seeds 0 to 15): all controls refuted. More SFT is at 1.00 on hands of training and 0.45 on held-out ones, RL at 0.83
and 0.47: that SFT memorises more is of the right sign and underpowered (0.18 [0.06, 0.30], margin 0.05). Under COUNT neither
differs from the start by the margins: start 0.05, SFT 0.03, RL 0.04, so that "SFT forgets", "RL gains" and "RL beats SFT" are
refuted here, while SFT on diverse rules is at 0.38: the counter-claim is supported. So is that RL needs the start: without it
no answer is ever right. The start is near the floor under COUNT, so little can be lost there. With the untuned rates of a
first run (1e-3 for SFT, a start at 0.08 under COUNT; seeds 0 to 7) RL was 0.08 [0.00, 0.15] ahead of SFT there.
Minutes: 9 on two busy cores (16 seeds); --tier smoke a minute.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxpt.envs.cards import LEVELS
from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig
from jaxpt.train.budget import update_flops
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.documents import DocumentsConfig, make_documents
from jaxpt.train.optim import OptimConfig
from jaxpt.train.policy import PolicyConfig, make_policy, policy_flops
from jaxpt.train.sft import SftConfig, make_sft

EVERY = 20  # updates between two evaluations, and of one chunk
LEVEL = {name: (i, i) for i, name in enumerate(LEVELS, start=1)}
SCORED = ("seen", "held", "faces", "shift")


@dataclass(frozen=True)
class Config:
    k: int = 2  # cards in a hand
    tries: int = 1  # attempts per episode
    d_model: int = 32
    n_layers: int = 2
    pretrain_updates: int = 600
    start_updates: int = 20  # of the SFT before the fork
    updates: int = 100  # updates of SFT and batches of episodes of RL after it
    prompts: int = 16
    group: int = 8
    minibatches: int = 2  # updates per batch of episodes
    pretrain_rate: float = 4e-3
    start_rate: float = 0.002  # this and the rates below are tuned by SWEEP on seeds that no claim uses
    sft_rate: float = 0.0005
    diverse_rate: float = 0.002
    rl_rate: float = 0.0005
    raw_rate: float = 0.0005
    eval_tasks: int = 256  # fixed tasks of each population

    def __post_init__(self):
        within(self, 2, 4, "k")
        within(self, 1, math.inf, "tries", "d_model", "n_layers", "prompts", "group", "minibatches", "eval_tasks")
        within(self, 0, 1, "pretrain_rate", "start_rate", "sft_rate", "diverse_rate", "rl_rate", "raw_rate")
        multiples(self, EVERY, "when arms are scored", "pretrain_updates", "start_updates", "updates")
        if self.prompts % self.minibatches:
            raise ValueError(f"--minibatches {self.minibatches}: expected a divisor of --prompts {self.prompts}")

    def env(self) -> EnvConfig:
        targets = (24, 24) if self.k == 4 else (6, 30)
        return EnvConfig("cards", {"k": self.k, "targets": targets, "tries": self.tries}, LEVEL["seen"])


def stages(cfg: Config, inputs) -> list[Stage]:
    env = cfg.env()
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks, elsewhere={name: LEVEL[name] for name in SCORED})
    rl = PolicyConfig(env=env, model=model, objectives=("dr_grpo",), prompts=cfg.prompts, group=cfg.group,
                      minibatches=cfg.minibatches, eval=scored)
    batch = round(policy_flops(rl) / update_flops(model, env.make().spec, 1))  # demonstrations for the FLOPs of a batch of RL
    read = DocumentsConfig(env=env, model=model, batch=batch, eval=replace(scored, every=cfg.pretrain_updates),
                           optim=OptimConfig(schedule="linear", decay_steps=cfg.pretrain_updates))
    sft = SftConfig(env=env, model=model, batch=batch, style="canonical", eval=scored)

    def arm(name, make, config, rate, steps=cfg.updates, after="start", stream=None, **hyper):
        hyper = {"learning_rate": rate, **hyper}
        return Stage(name, make, config, steps, after=after, stream=stream, chunk=EVERY, hyper=hyper)

    diverse = float(LEVEL["diverse"][0])
    return [
        arm("pretrain", make_documents, read, cfg.pretrain_rate, cfg.pretrain_updates, after=None),
        arm("start", make_sft, sft, cfg.start_rate, cfg.start_updates, after="pretrain"),
        arm("sft", make_sft, sft, cfg.sft_rate, stream="fork"),
        arm("again", make_sft, sft, cfg.sft_rate),
        arm("diverse", make_sft, sft, cfg.diverse_rate, stream="fork", level_low=diverse, level_high=diverse),
        arm("rl", make_policy, rl, cfg.rl_rate, stream="fork"),
        arm("raw", make_policy, rl, cfg.raw_rate, after="pretrain", stream="fork"),
    ]


def success(curves, arm, where):
    """Greedy success at the end, on one of the populations that all arms are scored on."""
    return last(curves[f"{arm}/greedy_gold_{where}"])


def ahead(arm, of, where="shift"):
    return lambda curves: success(curves, arm, where) - success(curves, of, where)


def gap(curves, arm):
    """What hands of training are easier than held-out ones."""
    return success(curves, arm, "seen") - success(curves, arm, "held")


def wider(arm, of):
    return lambda curves: gap(curves, arm) - gap(curves, of)


def beyond_half_way(arm):
    """An arm's success under the other rule, above half way from SFT to RL."""
    return lambda curves: (ahead(arm, "sft")(curves) + ahead(arm, "rl")(curves)) / 2


def read_as_ten(arm):
    """Of the numbers read wrongly under the other rule, the share that is a face read as 10; 0 where none is wrong."""

    def share(curves):
        wrong, ten = (last(curves[f"{arm}/greedy_{what}_shift"]) for what in ("read_wrong", "read_as_ten"))
        return ten / np.maximum(wrong, 1e-9)

    return share


AGAIN = "more SFT on other draws, in its place"
CLAIMS = (
    Claim(
        name="sft_memorises_hands",
        statement="Under the rule of training, the success on seen hands exceeds that on held-out ones by more in SFT than in RL.",
        estimand=wider("sft", "rl"), margin=0.05,
        control_name="more SFT on other draws, in RL's place", control=wider("sft", "again"),
    ),
    Claim(
        name="sft_forgets_the_other_rule",
        statement="Under COUNT, more SFT ends below the start.",
        estimand=ahead("start", "sft"), margin=0.05, control_name="RL in SFT's place", control=ahead("start", "rl"),
    ),
    Claim(
        name="rl_gains_under_the_other_rule",
        statement="Under COUNT, RL ends above the start.",
        estimand=ahead("rl", "start"), margin=0.03, control_name="SFT in RL's place", control=ahead("sft", "start"),
    ),
    Claim(
        name="rl_beats_sft_under_the_other_rule",
        statement="Under COUNT, RL ends above more SFT, for equal FLOPs.",
        estimand=ahead("rl", "sft"), margin=0.05, control_name=AGAIN, control=ahead("again", "sft"),
    ),
    Claim(
        name="sft_s_errors_are_the_old_rule",
        statement="Under COUNT, more than half of the numbers that SFT reads wrongly are faces read as 10.",
        estimand=read_as_ten("sft"), margin=0.5, control_name="SFT on diverse rules", control=read_as_ten("diverse"),
    ),
    Claim(
        name="diverse_prompts_close_half_of_the_gap",
        statement="Under COUNT, SFT on diverse rules ends above half way from more SFT to RL.",
        estimand=beyond_half_way("diverse"), margin=0.01, control_name=AGAIN, control=beyond_half_way("again"),
    ),
    Claim(
        name="rl_needs_the_start",
        statement="Under the rule of training, RL from the start ends above RL from the pre-trained model.",
        estimand=ahead("rl", "raw", "seen"), margin=0.1, control_name="more SFT in the place of RL without a start",
        control=ahead("rl", "sft", "seen"),
    ),
)

ARMS = {"more SFT": "sft", "SFT, diverse rules": "diverse", "RL": "rl", "RL without a start": "raw"}
TABLE = {"the start": "start", **ARMS, "more SFT again": "again"}


def derived(cfg: Config, curves):
    """Cards read right, of those read at all, under the other rule: one curve per arm."""
    def share(arm):
        right, wrong = (curves[f"{arm}/greedy_{what}_shift"] for what in ("read_right", "read_wrong"))
        return right / np.maximum(right + wrong, 1e-9)

    return {arm: share(arm) for arm in TABLE.values()}


FLOPS = per_arm("flops", ARMS)
PANELS = (
    *(Panel(f"{title}: greedy success", per_arm(f"greedy_gold_{where}", ARMS), "success", "product FLOPs", FLOPS)
      for title, where in (("Hands of training", "seen"), ("Held-out hands", "held"), ("Another rule", "shift"))),
    Panel("Another rule: cards read right", {label: f"derived/{arm}" for label, arm in ARMS.items()}, "share",
          "product FLOPs", FLOPS),
    Panel("Another rule: success at T = 1", per_arm("sampled_gold_shift", ARMS), "success", "product FLOPs", FLOPS),
    Panel("Loss of pre-training", {"documents": "pretrain/loss"}, "nats per token", "update"),
)

RATES = (5e-4, 1e-3, 2e-3)
SWEEP = (  # scripts/tune.py sft_vs_rl
    {"start_rate": (RATES, "start/greedy_gold_held")},
    {f"{arm}_rate": (RATES, f"{arm}/greedy_gold_held") for arm in ARMS.values()},
)


def sections(cfg: Config, curves) -> str:
    spent = {arm: float(np.mean(curves[f"{arm}/flops"][:, -1])) for arm in TABLE.values()}
    lines = []
    for label, arm in TABLE.items():
        cells = [cell(success(curves, arm, where)) for where in SCORED]
        drawn = [float(np.mean(last(curves[f"{arm}/sampled_gold_{where}"]))) for where in ("seen", "held", "shift")]
        reads = float(np.mean(derived(cfg, curves)[arm][:, -1]))
        form = float(np.mean(last(curves[f"{arm}/sampled_syntax_seen"])))
        lines.append(
            f"| {label} | {' | '.join(cells)} | {', '.join(f'{x:.3f}' for x in drawn)} | {reads:.3f} | "
            f"{float(np.mean(read_as_ten(arm)(curves))):.2f} | {form:.3f} | {spent[arm] / spent['rl']:.2f} |"
        )
    return "\n".join([
        "## The arms at the end", "",
        "Greedy success with 95% intervals on hands of training, held-out hands, hands of training with a face card, and such "
        "hands under the other rule; success at T = 1 (training, held out, other rule); under the other rule, cards read "
        "right and, of those read wrongly, faces read as 10; well-formed answers at T = 1; FLOPs over RL's.", "",
        "| arm | training | held out | with a face | other rule | at T = 1 | read right | wrong: as 10 | well-formed | FLOPs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", *lines,
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(d_model=16, n_layers=1, pretrain_updates=20, updates=20, prompts=8, group=4,
                             eval_tasks=32), seeds=2),
        "cpu": Tier(Config(), seeds=16),
        "full": Tier(Config(k=3, d_model=128, n_layers=3, pretrain_updates=6000, start_updates=200, updates=1000,
                            prompts=32, group=16, eval_tasks=1024), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
    derived=derived,
    sweep=SWEEP,
)
