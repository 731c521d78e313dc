"""Does supervised fine-tuning memorise where reinforcement learning generalises?

A model that has learnt the sub-skills of a card game (what cards count under every rule, values of formulas, formulas for
numbers; environment Cards) is taught the format by a short SFT on single solutions, under the rule TEN. This start is
forked, at equal product FLOPs, into

    sft      more of the same SFT; `again` is a second run of it, on other draws
    diverse  SFT on hands under TEN and five other rules for the faces; COUNT is not among them
    rl       Dr.GRPO, whose reward is 1 for a right answer, on TEN
    raw      the same without the start: from the pre-trained model

and scored on hands as in training, on held-out hands, and under COUNT, where J, Q, K are 11, 12, 13 instead of 10: a rule
that all know from pre-training and none is trained on. One try, no feedback. Claims are on greedy answers, because RL
sharpens and would be ahead at T = 1 for that alone. Two cards. Rates are those of SWEEP, chosen by the success on held-out
hands, never by COUNT, on seeds 10000 and 10001; those of the start and of diverse rules lie at the end of what was tried.
Two further runs have the same rates, with arms and claims of their own:

    --retries 3       a failed attempt is answered by its verdict, and may be followed by another, three times at most. The
                      arm `once` is RL on the same hands with one try. Episodes are scored by all attempts, and by the first
                      alone: demonstrations never fail, so that what is compared by all attempts includes a format in which
                      RL alone has trained. A policy that does not listen has 1 - (1 - p)^n for its p with n attempts, whose
                      gradient is n (1 - p)^(n - 1) times that of p: more attempts weigh hard hands more. Cost is counted
                      on whole rows, so SFT pays for the room of attempts that its demonstrations do not need.
    --variant visual  cards are pictures of 6 x 4 pixels in the ink of their suits, as tokens of patches. All arms but `red`,
                      SFT on red hands, train on black ones; pre-training shows what pictures in either ink count. That is
                      the shift of the paper. Seeing is scored (cards read right) apart from reckoning (success over that).
                      Seen on seed 10000 before any run for claims: the start reads 0.98 of the cards in red, 1.00 in black,
                      and is right on 0.28 of the hands in red, 0.72 in black; a claim that RL reads better had no room.

Source: Chu et al. 2025 (arXiv 2501.17161; GeneralPoints); the counter-claim, that SFT fails for its frozen prompts, is
that of arXiv 2510.00237. Hands under COUNT have a face card, as there; `faces` is the same population under TEN, so that
what is harder about these hands can be told from what is another rule.
Command: jaxpt run sft_vs_rl; jaxpt run sft_vs_rl --retries 3 --seeds 8; jaxpt run sft_vs_rl --variant visual --seeds 8
Expected (seeds 0 to 15): all controls refuted. More SFT is at 1.00 on hands of training and 0.45 on held-out ones, RL at 0.83
and 0.47: that SFT memorises more is of the right sign and underpowered (0.18 [0.06, 0.30], margin 0.05). Under COUNT neither
differs from the start by the margins: start 0.05, SFT 0.03, RL 0.04, so that "SFT forgets", "RL gains" and "RL beats SFT" are
refuted here, while SFT on diverse rules is at 0.38: the counter-claim is supported. So is that RL needs the start: without it
no answer is ever right. The start is near the floor under COUNT, so little can be lost there; a first run with untuned rates
(1e-3 for SFT, a start at 0.08; seeds 0 to 7) had RL 0.08 [0.00, 0.15] ahead of SFT.
    visual (seeds 0 to 7): in red more SFT reads 0.79 of the cards, the start 0.89: it forgets, supported. RL is right on 0.24 of
    red hands, SFT on 0.14: underpowered, at seeds 1000 supported (0.31, 0.14). Reckoning loses more than seeing: refuted.
    retries (seeds 0 to 7): all refuted. Greedy second attempts are never right, drawn ones in 1 of 1000: no demonstration has one.
Minutes: 9 on two busy cores (16 seeds), visual 5, retries 22 (very busy); --tier smoke a minute.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxpt.envs.cards import LEVELS
from jaxpt.lab.errors import expected, multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.markdown import table
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
VARIANTS = ("text", "visual")
SCORED = {"text": ("seen", "held", "faces", "shift"), "retries": ("seen", "held", "shift"), "visual": ("seen", "held", "red")}


@dataclass(frozen=True)
class Config:
    variant: str = "text"  # text, or visual: cards are pictures in the ink of their suits
    k: int = 2  # cards in a hand
    retries: int = 0  # attempts after a failed one, each told what was wrong
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
        if self.variant not in VARIANTS:
            raise ValueError(f"--variant {self.variant}: {expected(self.variant, VARIANTS)}")
        within(self, 2, 4, "k")
        within(self, 0, math.inf, "retries")
        if self.retries and self.variant != "text":
            raise ValueError(f"--retries {self.retries}: expected 0 with --variant {self.variant}")
        within(self, 1, math.inf, "d_model", "n_layers", "prompts", "group", "minibatches", "eval_tasks")
        within(self, 0, 1, "pretrain_rate", "start_rate", "sft_rate", "diverse_rate", "rl_rate", "raw_rate")
        multiples(self, EVERY, "when arms are scored", "pretrain_updates", "start_updates", "updates")
        if self.prompts % self.minibatches:
            raise ValueError(f"--minibatches {self.minibatches}: expected a divisor of --prompts {self.prompts}")

    @property
    def run(self) -> str:
        """Which of the three: they differ in arms, in what these are scored on, in claims and panels."""
        return "retries" if self.retries else self.variant

    def env(self) -> EnvConfig:
        targets = (24, 24) if self.k == 4 else (6, 30)
        options = {"k": self.k, "targets": targets, "tries": 1 + self.retries}
        return EnvConfig("cards", options | ({"pictures": True} if self.variant == "visual" else {}), LEVEL["seen"])


def stages(cfg: Config, inputs) -> list[Stage]:
    env = cfg.env()
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks, elsewhere={name: LEVEL[name] for name in SCORED[cfg.run]})
    rl = PolicyConfig(env=env, model=model, objectives=("dr_grpo",), prompts=cfg.prompts, group=cfg.group,
                      minibatches=cfg.minibatches, eval=scored)
    batch = round(policy_flops(rl) / update_flops(model, env.make().spec, 1))  # demonstrations for the FLOPs of a batch of RL
    read = DocumentsConfig(env=env, model=model, batch=batch, eval=replace(scored, every=cfg.pretrain_updates),
                           optim=OptimConfig(schedule="linear", decay_steps=cfg.pretrain_updates))
    sft = SftConfig(env=env, model=model, batch=batch, style="canonical", eval=scored)

    def arm(name, make, config, rate, steps=cfg.updates, after="start", stream=None, level=None):
        on = {} if level is None else dict.fromkeys(("level_low", "level_high"), float(LEVEL[level][0]))
        return Stage(name, make, config, steps, after=after, stream=stream, chunk=EVERY, hyper={"learning_rate": rate, **on})

    further = {
        "text": [
            arm("diverse", make_sft, sft, cfg.diverse_rate, stream="fork", level="diverse"),
            arm("raw", make_policy, rl, cfg.raw_rate, after="pretrain", stream="fork"),
        ],
        "retries": [arm("once", make_policy, rl, cfg.rl_rate, stream="fork", level="once")],
        "visual": [arm("red", make_sft, sft, cfg.sft_rate, stream="fork", level="red")],
    }
    return [
        arm("pretrain", make_documents, read, cfg.pretrain_rate, cfg.pretrain_updates, after=None),
        arm("start", make_sft, sft, cfg.start_rate, cfg.start_updates, after="pretrain"),
        arm("sft", make_sft, sft, cfg.sft_rate, stream="fork"),
        arm("again", make_sft, sft, cfg.sft_rate),
        arm("rl", make_policy, rl, cfg.rl_rate, stream="fork"),
        *further[cfg.run],
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


def first(curves, arm, where):
    """Greedy success on the first attempt, where there are several."""
    return last(curves[f"{arm}/greedy_first_{where}"])


def ahead_at_first(arm, of):
    """By first attempts alone, on held-out hands."""
    return lambda curves: first(curves, arm, "held") - first(curves, of, "held")


def added(arm):
    """What further attempts add to greedy success on held-out hands."""
    return lambda curves: success(curves, arm, "held") - first(curves, arm, "held")


def less(one, other):
    """One estimand less another."""
    return lambda curves: one(curves) - other(curves)


def reads(arm, where="red"):
    """Of the cards of greedy answers that are read at all, the share that is read right."""

    def share(curves):
        right, wrong = (last(curves[f"{arm}/greedy_{what}_{where}"]) for what in ("read_right", "read_wrong"))
        return right / np.maximum(right + wrong, 1e-9)

    return share


def reckons(arm, where="red"):
    """Greedy success over the share of cards read right: what is lost of success for other reasons; 0 where none is."""
    return lambda curves: success(curves, arm, where) / np.maximum(reads(arm, where)(curves), 1e-9)


def blinder(arm, where="red"):
    """What reading loses from hands of training to others, above what reckoning loses."""
    return less(less(reads(arm, "seen"), reads(arm, where)), less(reckons(arm, "seen"), reckons(arm, where)))


AGAIN = "more SFT on other draws, in its place"
TEXT_CLAIMS = (
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

RETRIES_CLAIMS = (
    Claim(
        name="retries_better_the_first_try",
        statement="On held-out hands, RL with retries ends above RL with one try, by first attempts alone.",
        estimand=ahead_at_first("rl", "once"), margin=0.03, control_name=AGAIN, control=ahead_at_first("again", "sft"),
    ),
    Claim(
        name="retries_help_under_the_other_rule",
        statement="Under COUNT, RL with retries ends above RL with one try, where all attempts of both count.",
        estimand=ahead("rl", "once"), margin=0.03, control_name=AGAIN, control=ahead("again", "sft"),
    ),
    Claim(
        name="retrying_is_learnt",
        statement="On held-out hands, further attempts add more after RL with retries than after RL with one try.",
        estimand=less(added("rl"), added("once")), margin=0.05, control_name=AGAIN, control=less(added("again"), added("sft")),
    ),
    Claim(
        name="retries_widen_the_lead",
        statement="On held-out hands, RL with retries leads more SFT by more where all attempts count than by first attempts.",
        estimand=less(added("rl"), added("sft")), margin=0.05, control_name="RL with one try in its place",
        control=less(added("once"), added("sft")),
    ),
)
VISUAL_CLAIMS = (
    Claim(
        name="sft_forgets_red",
        statement="In red, more SFT on black hands ends below the start in reading cards.",
        estimand=less(reads("start"), reads("sft")), margin=0.03, control_name="SFT on red hands in its place",
        control=less(reads("start"), reads("red")),
    ),
    Claim(
        name="rl_gains_in_red",
        statement="In red, RL on black hands ends above the start in success.",
        estimand=ahead("rl", "start", "red"), margin=0.03, control_name="more SFT in RL's place",
        control=ahead("sft", "start", "red"),
    ),
    Claim(
        name="rl_beats_sft_in_red",
        statement="In red, RL ends above more SFT in success, for equal FLOPs.",
        estimand=ahead("rl", "sft", "red"), margin=0.05, control_name=AGAIN, control=ahead("again", "sft", "red"),
    ),
    Claim(
        name="the_shift_is_in_seeing",
        statement="From black to red, more SFT loses more in reading cards than in making the target of what it reads.",
        estimand=blinder("sft"), margin=0.05, control_name="held-out hands in black, in the place of red ones",
        control=blinder("sft", "held"),
    ),
)

def claims(cfg: Config) -> tuple[Claim, ...]:
    return {"text": TEXT_CLAIMS, "retries": RETRIES_CLAIMS, "visual": VISUAL_CLAIMS}[cfg.run]


ARMS = {
    "text": {"more SFT": "sft", "SFT, diverse rules": "diverse", "RL": "rl", "RL without a start": "raw"},
    "retries": {"more SFT": "sft", "RL, one try": "once", "RL": "rl"},
    "visual": {"more SFT": "sft", "SFT in red": "red", "RL": "rl"},
}
TITLES = {
    "seen": "Hands of training", "held": "Held-out hands", "faces": "With a face card", "shift": "Another rule", "red": "In red",
}


def shown(cfg: Config) -> dict[str, str]:
    """The arms of the report's table."""
    return {"the start": "start", **ARMS[cfg.run], "more SFT again": "again"}


def derived(cfg: Config, curves):
    """Cards read right, of those read at all, of the population that has shifted: one curve per arm."""
    def share(arm):
        right, wrong = (curves[f"{arm}/greedy_{what}_{SCORED[cfg.run][-1]}"] for what in ("read_right", "read_wrong"))
        return right / np.maximum(right + wrong, 1e-9)

    return {arm: share(arm) for arm in shown(cfg).values()}


def panels(cfg: Config) -> list[Panel]:
    arms, shifted = ARMS[cfg.run], SCORED[cfg.run][-1]
    asked = [(f"{TITLES[at]}: greedy success", f"greedy_gold_{at}") for at in ("seen", "held", shifted)]
    asked += [("Held-out hands: first attempts", "greedy_first_held")] if cfg.retries else []
    asked += [(f"{TITLES[shifted]}: success at T = 1", f"sampled_gold_{shifted}")]
    curves = [(title, "success", per_arm(metric, arms)) for title, metric in asked]
    curves += [(f"{TITLES[shifted]}: cards read right", "share", {label: f"derived/{arm}" for label, arm in arms.items()})]
    return [
        *(Panel(title, series, of, "product FLOPs", per_arm("flops", arms)) for title, of, series in curves),
        Panel("Loss of pre-training", {"documents": "pretrain/loss"}, "nats per token", "update"),
    ]


RATES = (5e-4, 1e-3, 2e-3)
SWEEP = (  # scripts/tune.py sft_vs_rl
    {"start_rate": (RATES, "start/greedy_gold_held")},
    {f"{arm}_rate": (RATES, f"{arm}/greedy_gold_held") for arm in ARMS["text"].values()},
)


def sections(cfg: Config, curves) -> str:
    where = SCORED[cfg.run]
    spent = {arm: float(np.mean(curves[f"{arm}/flops"][:, -1])) for arm in shown(cfg).values()}

    def row(label, arm):
        each = lambda of: ", ".join(f"{float(np.mean(of(at))):.3f}" for at in where)  # noqa: E731
        cells = [label, *(cell(success(curves, arm, at)) for at in where)]
        cells += [each(lambda at: first(curves, arm, at))] if cfg.retries else []
        cells += [each(lambda at: last(curves[f"{arm}/sampled_gold_{at}"]))]
        cells += [each(lambda at: of(arm, at)(curves)) for of in (reads, reckons)]
        cells += [f"{float(np.mean(read_as_ten(arm)(curves))):.2f}"] if "shift" in where else []
        form = float(np.mean(last(curves[f"{arm}/sampled_syntax_seen"])))
        return [*cells, f"{form:.3f}", f"{spent[arm] / spent['rl']:.2f}"]

    header = ["arm", *(TITLES[at].lower() for at in where), *["first attempts"][: cfg.retries], "at T = 1", "cards read",
              "targets made", *["misread as 10"][: "shift" in where], "well-formed", "FLOPs"]
    return "\n".join([
        "## The arms at the end", "",
        f"Greedy success with 95% intervals on {len(where)} populations; then on each of these: success at T = 1, cards read "
        "right of those read, success over that share (and before these, with several attempts, success by the first alone). "
        "Under the other rule: faces read as 10, of the cards read wrongly. Well-formed answers at T = 1 on hands of training; "
        "FLOPs over RL's.", "",
        table(header, [row(label, arm) for label, arm in shown(cfg).items()]),
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
    claims=claims,
    panels=panels,
    sections=sections,
    derived=derived,
    sweep=SWEEP,
)
