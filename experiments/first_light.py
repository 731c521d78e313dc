"""Does reinforcement go beyond imperfect demonstrations, where more imitation at equal cost does not?

A small decoder learns to compose maps (environment Chain) from demonstrations in which some steps are
wrong. From that start, per seed, three arms of equal product FLOPs: more of the same demonstrations, GRPO on
the verifier's reward, and GRPO on a coin (the control). More imitation gets its updates rounded up, in its
favour. Success is measured on fixed tasks with one episode drawn at temperature 1, because the
demonstrator's errors live in the distribution and not in its mode; greedy success is drawn beside it. It is
success in distribution: the few hundred prompts of the default size all occur in training, and nothing here
says how either arm generalises. There is one update per batch, so GRPO's ratio is 1 and its clip never binds.
The tabular twin asks the same of an enumerable tree, where J is exact.

Source: the question of Chu et al. 2025 (arXiv 2501.17161) in its smallest form; GRPO of Shao et al. 2024
(arXiv 2402.03300), without KL.
Command: jaxpt run first_light
Expected: all three claims supported, every control refuted. Greedy success, of which nothing is claimed, has
the other order (seeds 0-7: 0.949 for more imitation, 0.877 for GRPO).
Minutes: 3 on two cores (8 seeds); --tier smoke 1 with an empty compilation cache.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpt.lab.errors import expected, multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.statistics import last
from jaxpt.models import ModelConfig
from jaxpt.objectives import policy
from jaxpt.train.budget import update_flops
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.train.policy import PolicyConfig, make_policy, policy_flops
from jaxpt.train.sft import SftConfig, make_sft
from jaxpt.train.tabular import TabularConfig, make_tabular

EVERY = 20  # updates between two evaluations, and of one chunk


@dataclass(frozen=True)
class Config:
    p: int = 5  # modulus of the affine maps
    generators: int = 4  # number of maps
    level: int = 3  # longest chain of maps
    corruption: float = 0.25  # share of wrong steps in the demonstrations
    d_model: int = 32
    n_layers: int = 2
    start_updates: int = 240  # supervised updates before the fork
    updates: int = 100  # GRPO updates; more SFT gets as many as the same FLOPs pay for
    batch: int = 128  # demonstrations per supervised update
    prompts: int = 32
    group: int = 8
    objective: str = "grpo_no_kl"  # the row that the policy arms follow
    sft_rate: float = 4e-3  # the three rates are tuned by SWEEP on seeds that no claim uses
    more_sft_rate: float = 2e-3
    policy_rate: float = 5e-4
    eval_tasks: int = 512  # fixed tasks, on which every arm is scored
    twin_updates: int = 100

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "batch", "prompts", "group", "eval_tasks", "twin_updates")
        within(self, 1, 32, "level")
        within(self, 0, 0.8, "corruption")
        within(self, 0, 1, "sft_rate", "more_sft_rate", "policy_rate")
        multiples(self, EVERY, "when arms are scored", "start_updates", "updates")
        if self.objective not in {row.name for row in policy.ROWS}:
            names = [row.name for row in policy.ROWS]
            raise ValueError(f"--objective {self.objective}: {expected(self.objective, names)}")
        try:
            self.env()
        except ValueError as error:
            raise ValueError(f"--p {self.p} --generators {self.generators}: {error}") from None

    def env(self) -> EnvConfig:
        options = {
            "p": self.p, "generators": self.generators, "max_level": self.level, "corruption": self.corruption,
        }
        return EnvConfig("chain", options, (1, self.level))


def stages(cfg: Config, inputs) -> list[Stage]:
    env = cfg.env()
    spec = env.make().spec
    model = ModelConfig(vocab=spec.vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks)
    sft = SftConfig(env=env, model=model, batch=cfg.batch, style="think_noisy", eval=scored)
    rl = PolicyConfig(
        env=env, model=model, objectives=(cfg.objective,), prompts=cfg.prompts, group=cfg.group, eval=scored,
        optim=OptimConfig(cfg.policy_rate),
    )
    paid_for = cfg.updates * policy_flops(rl) / update_flops(model, spec, cfg.batch)
    more = EVERY * math.ceil(paid_for / EVERY)

    twin = TabularConfig(objectives=("sft",), source="demonstrator", corruption=cfg.corruption)
    policy_twin = TabularConfig(objectives=(cfg.objective,))
    coin = {"reward_noise": 1.0}
    after, twin_after = {"after": "start", "stream": "policy"}, {"after": "twin_start", "stream": "twin_policy"}
    return [
        Stage("start", make_sft, sft, cfg.start_updates, hyper={"learning_rate": cfg.sft_rate}),
        Stage("sft", make_sft, sft, more, after="start", hyper={"learning_rate": cfg.more_sft_rate}),
        Stage("grpo", make_policy, rl, cfg.updates, **after),
        Stage("coin", make_policy, rl, cfg.updates, **after, hyper=coin),
        Stage("twin_start", make_tabular, twin, cfg.twin_updates),
        Stage("twin_sft", make_tabular, twin, cfg.twin_updates, after="twin_start"),
        Stage("twin_grpo", make_tabular, policy_twin, cfg.twin_updates, **twin_after),
        Stage("twin_coin", make_tabular, policy_twin, cfg.twin_updates, **twin_after, hyper=coin),
    ]


def demonstrator_success(cfg: Config) -> float:
    """Probability that a noisy demonstration ends right, averaged over levels.

    A step becomes another of p values with probability c, and maps are bijections, so the error of a chain of
    d steps mixes towards uniform: 1/p + (1 - 1/p) (1 - c p / (p - 1))^d.
    """
    keep = 1 - cfg.corruption * cfg.p / (cfg.p - 1)
    return float(np.mean([1 / cfg.p + (1 - 1 / cfg.p) * keep**d for d in range(1, cfg.level + 1)]))


def success(curves, arm):
    return last(curves[f"{arm}/sampled_gold"])


def beyond_demonstrator(curves, arm):
    return success(curves, arm) - float(curves["inputs/demonstrator"])


def twin_gain(curves, arm):
    """J of an arm minus J of more imitation, one number per replica of every seed."""
    return (curves[f"{arm}/J_replica"][:, -1] - curves["twin_sft/J_replica"][:, -1]).ravel()


CLAIMS = (
    Claim(
        name="grpo_beats_more_sft",
        statement="At equal FLOPs (imitation's rounded up), GRPO on the verifier ends with a higher success at "
        "T = 1 than more imitation.",
        estimand=lambda curves: success(curves, "grpo") - success(curves, "sft"),
        margin=0.02,
        control_name="GRPO with a fair coin for a reward",
        control=lambda curves: success(curves, "coin") - success(curves, "sft"),
    ),
    Claim(
        name="grpo_exceeds_its_demonstrator",
        statement="GRPO ends above the exact success rate of the demonstrations it started from.",
        estimand=lambda curves: beyond_demonstrator(curves, "grpo"),
        margin=0.02,
        control_name="more imitation",
        control=lambda curves: beyond_demonstrator(curves, "sft"),
    ),
    Claim(
        name="the_twin_agrees",
        statement="On the enumerable tree, J (exact) of GRPO exceeds J of more imitation.",
        estimand=lambda curves: twin_gain(curves, "twin_grpo"),
        margin=0.02,
        control_name="GRPO with a fair coin for a reward",
        control=lambda curves: twin_gain(curves, "twin_coin"),
        unit="replica",
    ),
)

ARMS = {"more SFT": "sft", "GRPO": "grpo", "GRPO, coin": "coin"}


SPENT = "product FLOPs after the fork"
PANELS = (
    Panel("Success at T = 1", per_arm("sampled_gold", ARMS), "success", SPENT, per_arm("flops", ARMS)),
    Panel("Greedy success", per_arm("greedy_gold", ARMS), "success", SPENT, per_arm("flops", ARMS)),
    Panel(
        "Groups without signal", {"GRPO": "grpo/no_signal", "GRPO, coin": "coin/no_signal"}, "share of rows", "update",
    ),
    Panel("Entropy of the policy", per_arm("entropy", ARMS), "nats per token", "update"),
    Panel("The start: imitation", {"T = 1": "start/sampled_gold", "greedy": "start/greedy_gold"}, "success", "update"),
    Panel(
        "Twin: exact J", {"more SFT": "twin_sft/J", "GRPO": "twin_grpo/J", "GRPO, coin": "twin_coin/J"}, "J", "update",
    ),
)

SWEEP = (  # scripts/tune.py first_light
    {"sft_rate": ((2e-3, 4e-3, 8e-3), "start/sampled_gold")},
    {
        "more_sft_rate": ((1e-3, 2e-3, 4e-3), "sft/sampled_gold"),
        "policy_rate": ((2.5e-4, 5e-4, 1e-3), "grpo/sampled_gold"),
    },
)


def sections(cfg: Config, curves) -> str:
    spent = {name: curves[f"{arm}/flops"][0, -1] for name, arm in ARMS.items()}
    lines = [f"| {name} | {flops:.3e} | {flops / spent['GRPO']:.3f} |" for name, flops in spent.items()]
    rate = float(curves["inputs/demonstrator"])
    return "\n".join([
        "## What the arms spent after the fork", "", "| arm | product FLOPs | of GRPO's |", "| --- | --- | --- |", *lines,
        "", f"The demonstrator's success rate is {rate:.4f} (exact).",
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(start_updates=60, updates=20, prompts=8, group=4, eval_tasks=32, twin_updates=40), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(Config(level=6, d_model=64, start_updates=2000, updates=1000), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
    sweep=SWEEP,
    inputs=lambda cfg: {"demonstrator": np.float64(demonstrator_success(cfg))},
)
