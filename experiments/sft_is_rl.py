"""When is supervised fine-tuning reinforcement learning, and what is each missing piece worth?

Maximum likelihood is a policy gradient with advantage 1, under samples of whoever made the data. Three identities say
when it is more (tests/test_sft_is_rl.py, by enumeration). It climbs the likelihood of its sampler: on the policy's own
samples it goes nowhere (summed over tokens, on average), and on an expert's it is RL only with the reward expert / policy.
With the verifier as a filter, REINFORCE on 0/1 rewards is imitation of the own right answers, times their share, on every
batch. And it rests at the sampler given that the answer is right. What is not an identity is asked here. One imperfectly
supervised start per seed (environment Chain) is forked into arms that take equally many updates on equally many samples:

    arm        samples of      filter     baseline, negatives
    sft        the expert      none       no
    filtered   the expert      verifier   no
    stale      the start       verifier   no                     rejection-sampling fine-tuning, drawn once
    raft       the policy      verifier   no                     RAFT, expert iteration
    reinforce  the policy      verifier   no                     not divided by how many were right
    rloo       the policy      verifier   yes
    coin       the policy      a coin     no                     the control

The expert's steps are wrong with probability 1/4. The twins run the same arms on an enumerable tree with 0/1 rewards.

Source: the unification of SFT and RL as one policy gradient (Shao et al. 2024, arXiv 2402.03300, section 5.2); RAFT
against policy gradients after Xiong et al. 2025 (arXiv 2504.11343); stale samples as in Yuan et al. 2023 (arXiv
2308.01825). That an importance ratio of 1 makes SFT and RL equal, as is sometimes said, is wrong: the sampler decides.
Command: jaxpt run sft_is_rl
Expected: the filter, freshness and four fifths of RL's gain are supported, so is the twin; negatives_matter is refuted. On
tuning seeds (10002-10007) success at T = 1 was 0.52 for sft (demonstrator 0.596, start 0.45), 0.64 stale, 0.74 raft, 0.75
reinforce, 0.74 rloo, 0.23 coin: once the filter is there and samples are fresh, imitation is RL, and negatives and a
baseline show only in entropy (raft 0.08, rloo 0.10 nats). The best arm of all is no RL: the expert's own right answers
(0.81), which fresh tasks supply without end. In the twin stale samples are slow rather than bounded: at a rate 64
times as high they reach J = 1 too, as the fixed points say.
Minutes: 4 on two cores (8 seeds); --tier smoke 1 with an empty compilation cache.
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
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft
from jaxpt.train.tabular import TabularConfig, make_tabular

EVERY = 20  # updates between two evaluations, and of one chunk
ROWS = ("raft", "reinforce", "rloo")
OWN = {"stale": "raft", "raft": "raft", "reinforce": "reinforce", "rloo": "rloo"}  # arm -> row; samples of its own
EXPERT = {"sft": "sft", "filtered": "raft"}  # arm -> row; samples of the demonstrator
RATED = (*EXPERT, *OWN)


@dataclass(frozen=True)
class Config:
    p: int = 5  # modulus of the affine maps
    level: int = 3  # longest chain of maps
    corruption: float = 0.25  # share of wrong steps in the demonstrations
    d_model: int = 32
    n_layers: int = 2
    start_updates: int = 120  # supervised updates before the fork
    updates: int = 80  # updates of every arm after it, each on prompts x group samples
    prompts: int = 32
    group: int = 8
    start_rate: float = 4e-3  # the rates are tuned by SWEEP on seeds that no claim uses
    sft_rate: float = 1e-3
    filtered_rate: float = 2e-3
    stale_rate: float = 1e-3
    raft_rate: float = 5e-4
    reinforce_rate: float = 1e-3
    rloo_rate: float = 5e-4
    eval_tasks: int = 1024  # fixed tasks, on which every arm is scored
    winners: int = 4  # leaves of the twin's tree that earn 1
    twin_updates: int = 100
    twin_rate: float = 1.0  # of every arm of the twin

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "prompts", "group", "eval_tasks", "winners", "twin_updates")
        within(self, 1, 32, "level")
        within(self, 0, 0.8, "corruption")
        within(self, 0, math.inf, "twin_rate")
        within(self, 0, 1, "start_rate", *(f"{arm}_rate" for arm in RATED))
        multiples(self, EVERY, "when arms are scored", "start_updates", "updates")

    def env(self) -> EnvConfig:
        options = {"p": self.p, "generators": 4, "max_level": self.level, "corruption": self.corruption}
        return EnvConfig("chain", options, (1, self.level))


def stages(cfg: Config, inputs) -> list[Stage]:
    env = cfg.env()
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks)
    imitation = {
        row: SftConfig(env=env, model=model, objective=row, batch=cfg.prompts * cfg.group, style="think_noisy", eval=scored)
        for row in EXPERT.values()
    }
    own = PolicyConfig(
        env=env, model=model, objectives=ROWS, prompts=cfg.prompts, group=cfg.group, refresh=1, eval=scored
    )
    tree = {"winners": cfg.winners, "corruption": 0.5}
    of_expert = TabularConfig(objectives=("sft", "raft"), source="demonstrator", **tree)
    of_start = TabularConfig(objectives=("raft",), source="start", **tree)
    of_policy = TabularConfig(objectives=ROWS, **tree)

    def rate(arm):
        return {"learning_rate": getattr(cfg, f"{arm}_rate")}

    def imitator(arm):
        return Stage(arm, make_sft, imitation[EXPERT[arm]], cfg.updates, after="start", stream="expert", hyper=rate(arm))

    def learner(arm, name=None, **more):
        hyper = own.arm(OWN[arm]) | rate(arm) | more
        return Stage(name or arm, make_policy, own, cfg.updates, after="start", stream="own", hyper=hyper)

    def twin(arm, config, row, **more):
        hyper = config.arm(row) | {"learning_rate": cfg.twin_rate} | more
        return Stage(f"twin_{arm}", make_tabular, config, cfg.twin_updates, after="twin_start", stream="twin", hyper=hyper)

    return [
        Stage("start", make_sft, imitation["sft"], cfg.start_updates, hyper={"learning_rate": cfg.start_rate}),
        *map(imitator, EXPERT),
        learner("stale", refresh=float(cfg.updates)),
        learner("raft"), learner("reinforce"), learner("rloo"),
        learner("raft", "coin", reward_noise=1.0),
        Stage("twin_start", make_tabular, of_expert, cfg.twin_updates, hyper=of_expert.arm("sft")),
        *(twin(arm, of_expert, row) for arm, row in EXPERT.items()),
        twin("stale", of_start, "raft"),
        *(twin(row, of_policy, row) for row in ROWS),
        twin("coin", of_policy, "raft", reward_noise=1.0),
    ]


def demonstrator_success(cfg: Config) -> float:
    """Probability that a noisy demonstration ends right, averaged over levels (jaxpt.envs.chain states the formula)."""
    keep = 1 - cfg.corruption * cfg.p / (cfg.p - 1)
    return float(np.mean([1 / cfg.p + (1 - 1 / cfg.p) * keep**d for d in range(1, cfg.level + 1)]))


def success(curves, arm):
    return last(curves[f"{arm}/sampled_gold"])


def ahead(arm, of):
    return lambda curves: success(curves, arm) - success(curves, of)


def beyond_demonstrator(arm):
    return lambda curves: success(curves, arm) - float(curves["inputs/demonstrator"])


def gain(curves, arm):
    return success(curves, arm) - success(curves, "start")


def beyond_four_fifths(arm):
    """The gain of an arm over the start, less four fifths of RLOO's."""
    return lambda curves: gain(curves, arm) - 0.8 * gain(curves, "rloo")


def twin_ahead(arm, of):
    """One number per replica of every seed."""
    return lambda curves: (curves[f"twin_{arm}/J_replica"][:, -1] - curves[f"twin_{of}/J_replica"][:, -1]).ravel()


COIN = "a coin in the verifier's place"
CLAIMS = (
    Claim(
        name="the_filter_goes_beyond_the_demonstrator",
        statement="Imitation of the policy's own right answers ends above the exact success rate of the demonstrations "
        "it started from.",
        estimand=beyond_demonstrator("raft"), margin=0.05,
        control_name="imitation of the demonstrator, unfiltered", control=beyond_demonstrator("sft"),
    ),
    Claim(
        name="filtered_imitation_is_rl",
        statement="It gains more than four fifths of what RLOO gains, which has negatives and a baseline besides.",
        estimand=beyond_four_fifths("raft"), margin=0.01,
        control_name="right answers of the start", control=beyond_four_fifths("stale"),
    ),
    Claim(
        name="samples_must_be_fresh",
        statement="Right answers of the policy as it is teach more than as many of the policy as it was at the start.",
        estimand=ahead("raft", "stale"), margin=0.02,
        control_name=f"fresh samples with {COIN}", control=ahead("coin", "stale"),
    ),
    Claim(
        name="negatives_matter",
        statement="RLOO ends more than a tenth of its gain (0.03) above imitation of right answers.",
        estimand=ahead("rloo", "raft"), margin=0.03, control_name=f"imitation with {COIN}", control=ahead("coin", "raft"),
    ),
    Claim(
        name="the_twin_agrees_on_freshness",
        statement="On the enumerable tree, at one learning rate and after as many updates, J (exact) of imitation of fresh "
        "right answers exceeds that of stale ones.",
        estimand=twin_ahead("raft", "stale"), margin=0.02, unit="replica",
        control_name="right answers of the demonstrator, stale as well", control=twin_ahead("filtered", "stale"),
    ),
)

ARMS = {
    "SFT, expert's samples": "sft", "filtered, expert's": "filtered", "filtered, start's": "stale",
    "filtered, own (RAFT)": "raft", "REINFORCE": "reinforce", "RLOO": "rloo", "RAFT, coin": "coin",
}
VERIFIED = tuple(arm for arm in ARMS.values() if arm != "coin")
FRESH = ("stale", "raft", "reinforce", "rloo")


def per_arm(metric: str, arms=VERIFIED, of: str = "{}") -> dict[str, str]:
    return {name: f"{of.format(arm)}/{metric}" for name, arm in ARMS.items() if arm in arms}


PANELS = (
    Panel("Success at T = 1", per_arm("sampled_gold"), "success", "update"),
    Panel("Greedy success", per_arm("greedy_gold"), "success", "update"),
    Panel("Entropy on what is imitated", per_arm("entropy"), "nats per token", "update"),
    Panel("Right answers among the samples", per_arm("reward", FRESH), "share", "update"),
    Panel("A coin for a filter: success at T = 1", per_arm("sampled_gold", ("raft", "coin")), "success", "update"),
    Panel("Twin: exact J", per_arm("J", ARMS.values(), "twin_{}"), "J", "update"),
)

RATES = (2.5e-4, 5e-4, 1e-3)
SWEEP = (  # scripts/tune.py sft_is_rl
    {
        "sft_rate": ((5e-4, 1e-3, 2e-3), "sft/sampled_gold"),
        "filtered_rate": ((5e-4, 1e-3, 2e-3, 4e-3), "filtered/sampled_gold"),
        "stale_rate": ((*RATES, 2e-3), "stale/sampled_gold"),
        **{f"{row}_rate": (RATES, f"{row}/sampled_gold") for row in ROWS},
    },
)


def sections(cfg: Config, curves) -> str:
    lines = []
    for name, arm in ARMS.items():
        metrics = ("greedy_gold", "entropy", "sampled_length")
        greedy, entropy, length = (float(np.mean(last(curves[f"{arm}/{metric}"]))) for metric in metrics)
        lines.append(
            f"| {name} | {cell(success(curves, arm))} | {cell(gain(curves, arm))} | {greedy:.3f} | {entropy:.3f} | "
            f"{length:.2f} | {float(np.mean(last(curves[f'twin_{arm}/J']))):.3f} |"
        )
    return "\n".join([
        "## The arms at the end", "",
        "Success at T = 1 and its gain over the start, with 95% intervals; greedy success; entropy of the last batch (nats "
        "per token); length; J of the twin. The demonstrator succeeds with probability "
        f"{demonstrator_success(cfg):.4f} (exact).", "",
        "| arm | success | gain | greedy | entropy | length | twin J |",
        "| --- | --- | --- | --- | --- | --- | --- |", *lines,
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(start_updates=20, updates=20, prompts=8, group=4, eval_tasks=32, twin_updates=20), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(Config(level=6, d_model=64, start_updates=1000, updates=1000), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
    sweep=SWEEP,
    inputs=lambda cfg: {"demonstrator": np.float64(demonstrator_success(cfg))},
)
