"""A learned critic or the mean of a group: which baseline, and what are the critic's difficulties?

GRPO and RLOO owe their popularity to doing without PPO's critic. Three things are said against a critic: it is wrong at
first, and its errors are noise in the gradient (cold start); it needs about as much capacity as the policy; and a trunk
shared with the policy, which would save that, lets the value loss disturb the policy. Each is asked here by itself. One
supervised start per seed (environment Chain) is forked into arms that draw equally many episodes, so equal generated
tokens but for their lengths, and use every batch for four updates:

    arm         baseline
    ppo         a critic with a trunk of its own, begun from the policy's parameters and a head that says 0; lam 0.95
    ppo_lam1    the same, lam 1
    ppo_spread  the same, one answer to each of 128 prompts: only groups need several answers to a prompt
    small       a critic of one layer and a quarter of the width, begun at random
    shared      a head on the policy's trunk, which the value loss trains too
    unlearned   the same, with the value loss off: a critic that says 0, and so the mean of the batch (whitening)
    group       the mean of a group of 8, everything else as in ppo: whitening, ratio, clip (REINFORCE++ with baseline)
    rloo, grpo_no_kl, dr_grpo   a group's mean too, each with its own weights; rloo has no ratio and so no clip

KL and entropy bonus are off in all, so that ppo and group differ in the baseline alone. All PPO arms have the
rate that is best for ppo, because their updates are of one size; the other rows and the critics have their own. Success
is that of the episodes that training draws at temperature 1.
The twins are exact. On trees of depth 4, the noise of the update per episode as a function of how wrong the critic is,
against groups of 2 and 3: where they cross, a group is as good as a critic. And tables of logits and of values on a
deeper tree, whose J is a sum over leaves.

Source: PPO of Schulman et al. 2017 (arXiv 1707.06347); doing without a critic after Ahmadian et al. 2024 (arXiv
2402.14740) and Shao et al. 2024 (arXiv 2402.03300); the cold critic after Yuan et al. 2025 (arXiv 2503.01491).
Command: jaxpt run critic_or_group
Expected (from two to four tuning seeds): the critic, the group's mean and the mean of the batch learn equally fast here,
and so do a small critic and a shared trunk, so that the first two claims and the two on capacity and sharing are refuted.
What a critic gives is freedom from groups: 128 prompts with one answer each are worth +0.04. In the twins the critic does
win: on trees of depth 4 its true values have a quarter less noise than a group of 3, and a group is as good as a critic that is
off by one standard deviation of the reward (a pair, 1.2); and a table of values learns faster than the group's mean.
Minutes: 6 on two cores (12 seeds); --tier smoke 1 with an empty compilation cache.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import over
from jaxpt.models import ModelConfig
from jaxpt.train.baselines import BaselineConfig, make_baselines
from jaxpt.train.budget import value_flops
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.critic import CriticConfig
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft
from jaxpt.train.tabular import TabularConfig, make_tabular

EVERY = 20  # updates between two evaluations, of one chunk, and batches that count as early
GROUPS = {"group": "reinforce_plus_plus_baseline", "rloo": "rloo", "grpo_no_kl": "grpo_no_kl", "dr_grpo": "dr_grpo"}  # arm -> row
NO_PULL = {"beta": 0.0, "entropy_coef": 0.0}
LAMBDAS = {"1": 1.0, "0.95": 0.95, "0": 0.0}


@dataclass(frozen=True)
class Config:
    p: int = 5  # modulus of the affine maps
    level: int = 4  # longest chain of maps
    corruption: float = 0.3  # share of wrong steps in the demonstrations
    d_model: int = 32
    n_layers: int = 2
    small_d_model: int = 8  # of the small critic, which has one layer
    start_updates: int = 240  # supervised updates before the fork
    updates: int = 80  # batches of episodes after it
    batch: int = 128  # demonstrations per supervised update
    prompts: int = 16
    group: int = 8
    minibatches: int = 4  # updates per batch of episodes
    lam: float = 0.95
    # The rates, and the weight of a shared trunk's value loss, are tuned by SWEEP on seeds that no claim uses.
    sft_rate: float = 4e-3
    rate: float = 2.5e-4  # of PPO, whatever its baseline
    rloo_rate: float = 1.25e-4
    grpo_no_kl_rate: float = 2.5e-4
    dr_grpo_rate: float = 5e-4
    own_critic_rate: float = 2e-3
    small_critic_rate: float = 5e-4
    head_rate: float = 2e-3  # of a head on a shared trunk
    value_coef: float = 0.5  # of the value loss there
    eval_tasks: int = 256
    worlds: int = 8  # trees of the exact curves, per seed
    twin_updates: int = 40
    twin_critic_rate: float = 1.0

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "small_d_model", "batch", "prompts", "group", "minibatches",
               "eval_tasks", "worlds", "twin_updates")
        within(self, 1, 32, "level")
        within(self, 0, 0.8, "corruption")
        within(self, 0, 1, "lam", "sft_rate", "rate", "rloo_rate", "grpo_no_kl_rate", "dr_grpo_rate", "own_critic_rate",
               "small_critic_rate", "head_rate", "value_coef")
        multiples(self, EVERY, "when arms are scored", "start_updates", "updates")

    def env(self) -> EnvConfig:
        options = {"p": self.p, "generators": 4, "max_level": self.level, "corruption": self.corruption}
        return EnvConfig("chain", options, (1, self.level))


def stages(cfg: Config, inputs) -> list[Stage]:
    env = cfg.env()
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    narrow = ModelConfig(vocab=model.vocab, d_model=cfg.small_d_model, n_layers=1)
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks)
    sft = SftConfig(env=env, model=model, batch=cfg.batch, style="think_noisy", eval=scored)

    def program(critic, *rows):
        # Groups are a number here (`repeats`): with one episode per prompt of the program, a group of 1 is a choice too.
        return PolicyConfig(
            env=env, model=model, objectives=rows, critic=critic, prompts=cfg.prompts * cfg.group, group=1, repeats=cfg.group,
            minibatches=cfg.minibatches, eval=scored,
        )

    own = program(CriticConfig(), "ppo", *GROUPS.values())
    small, shared = program(CriticConfig(model=narrow), "ppo"), program(CriticConfig(trunk="shared"), "ppo")

    def arm(name, rl, row, rate, **more):
        hyper = rl.arm(row) | {"learning_rate": rate, "repeats": float(cfg.group)} | more
        hyper |= {name: x for name, x in NO_PULL.items() if name in hyper}
        return Stage(name, make_policy, rl, cfg.updates, after="start", stream="policy", hyper=hyper)

    def ppo(name, rl, critic_rate, **more):
        return arm(name, rl, "ppo", cfg.rate, **{"lam": cfg.lam, "critic_rate": critic_rate, **more})

    table = TabularConfig(objectives=("ppo", GROUPS["group"]), vocab=3, depth=6, winners=4, replicas=16)

    def twin(name, row, **more):
        hyper = table.arm(row) | more
        hyper |= {name: x for name, x in NO_PULL.items() if name in hyper}
        return Stage(f"twin_{name}", make_tabular, table, cfg.twin_updates, stream="twin", hyper=hyper)

    baselines = BaselineConfig(worlds=cfg.worlds)
    return [
        Stage("start", make_sft, sft, cfg.start_updates, hyper={"learning_rate": cfg.sft_rate}),
        ppo("ppo", own, cfg.own_critic_rate),
        ppo("ppo_lam1", own, cfg.own_critic_rate, lam=1.0),
        ppo("ppo_spread", own, cfg.own_critic_rate, repeats=1.0),
        ppo("small", small, cfg.small_critic_rate),
        ppo("shared", shared, cfg.head_rate, value_coef=cfg.value_coef),
        ppo("unlearned", shared, 0.0, value_coef=0.0, lam=1.0),
        arm("group", own, GROUPS["group"], cfg.rate),
        *(arm(row, own, row, getattr(cfg, f"{row}_rate")) for row in ("rloo", "grpo_no_kl", "dr_grpo")),
        again(ppo("ppo", own, cfg.own_critic_rate), "ppo_again"),
        twin("ppo", "ppo", critic_rate=cfg.twin_critic_rate),
        twin("unlearned", "ppo", critic_rate=0.0, lam=1.0),
        twin("group", GROUPS["group"]),
        *(Stage(f"exact_lam{name}", make_baselines, baselines, 17, stream="exact", hyper={"lam": lam}) for name, lam in LAMBDAS.items()),
    ]


def again(stage: Stage, name: str) -> Stage:
    """The same arm under other draws."""
    return Stage(name, stage.make, stage.config, stage.steps, stage.after, stage.hyper, stream=name)


EARLY, LATE = slice(0, EVERY), slice(-2 * EVERY, None)
early, late, entropy = over("gold", EARLY), over("gold", LATE), over("entropy", LATE)


def difference(measure, arm, other):
    return lambda curves: measure(curves, arm) - measure(curves, other)


def less_noise(error: float, group: int, lam: str = "1"):
    """By how much (a share) a critic that is off by so many deviations of the reward is less noisy than a group, per world."""

    def share(curves):
        exact = f"exact_lam{lam}"
        at = int(np.argmin(np.abs(curves[f"{exact}/error"][0] - error)))
        critic, groups = (curves[f"{exact}/noise_{who}_world"][:, at] for who in ("critic", f"group_{group}"))
        return (1 - critic / groups).ravel()

    return share


def twin_gain(arm: str):
    """Mean J over the run, above that of the group's mean; one number per replica of every seed."""
    return lambda curves: np.mean(curves[f"twin_{arm}/J_replica"] - curves["twin_group/J_replica"], axis=1).ravel()


AGAIN = "PPO twice, other draws"
CLAIMS = (
    Claim(
        name="a_cold_critic_costs",
        statement="Over the first 20 batches the group's mean has a higher success than the critic, which begins by saying 0.",
        estimand=difference(early, "group", "ppo"), margin=0.02,
        control_name=AGAIN, control=difference(early, "ppo_again", "ppo"),
    ),
    Claim(
        name="the_group_beats_the_critic",
        statement="Over the last 40 batches the group's mean has a higher success than the critic.",
        estimand=difference(late, "group", "ppo"), margin=0.02,
        control_name=AGAIN, control=difference(late, "ppo_again", "ppo"),
    ),
    Claim(
        name="prompts_in_place_of_answers_pay",
        statement="A critic needs no groups: PPO with one answer to each of 128 prompts ends with a higher success than with "
        "8 answers to each of 16.",
        estimand=difference(late, "ppo_spread", "ppo"), margin=0.02,
        control_name=AGAIN, control=difference(late, "ppo_again", "ppo"),
    ),
    Claim(
        name="a_small_critic_costs",
        statement="A critic as large as the policy ends with a higher success than a small one.",
        estimand=difference(late, "ppo", "small"), margin=0.02,
        control_name=AGAIN, control=difference(late, "ppo_again", "ppo"),
    ),
    Claim(
        name="a_shared_trunk_costs",
        statement="A critic with a trunk of its own ends with a higher success than one on the policy's.",
        estimand=difference(late, "ppo", "shared"), margin=0.02,
        control_name=AGAIN, control=difference(late, "ppo_again", "ppo"),
    ),
    Claim(
        name="a_true_critic_is_quieter_than_a_group",
        statement="On trees of depth 4 the update under the true values (lam 1) is less noisy, per episode, than under the "
        "mean of a group of 3 (a share of the group's noise).",
        estimand=less_noise(0.0, 3), margin=0.1, unit="world",
        control_name="a critic that is off by one and a half deviations of the reward", control=less_noise(1.5, 3),
    ),
    Claim(
        name="a_rough_critic_is_quieter_than_a_group",
        statement="The same of a critic that is off by half a standard deviation of the reward at every node.",
        estimand=less_noise(0.5, 3), margin=0.1, unit="world",
        control_name="a critic that is off by one and a half deviations of the reward", control=less_noise(1.5, 3),
    ),
    Claim(
        name="the_twin_learns_faster_with_a_critic",
        statement="On an enumerable tree J (exact, mean over the run) is higher with a learned table of values than with the "
        "group's mean.",
        estimand=twin_gain("ppo"), margin=0.03, unit="replica",
        control_name="no critic in its place", control=twin_gain("unlearned"),
    ),
)

ARMS = {
    "PPO": "ppo", "PPO, lam 1": "ppo_lam1", "PPO, spread": "ppo_spread", "PPO, small critic": "small",
    "PPO, shared trunk": "shared", "PPO, no critic": "unlearned",
    "PPO, group": "group", "RLOO": "rloo", "GRPO": "grpo_no_kl", "Dr.GRPO": "dr_grpo",
}
CRITICS = ("ppo", "ppo_lam1", "ppo_spread", "small", "shared")


def per_arm(metric: str, *arms: str) -> dict[str, str]:
    return {label: f"{arm}/{metric}" for label, arm in ARMS.items() if not arms or arm in arms}


SOME = ("ppo", "unlearned", "group", "rloo", "grpo_no_kl")
NOISE = {f"critic, lam {name}": f"exact_lam{name}/noise_critic" for name in LAMBDAS}
ERROR = {label: source.rsplit("/", 1)[0] + "/error" for label, source in NOISE.items()}
PANELS = (
    Panel("Critic or group: success at T = 1", per_arm("sampled_gold", *SOME), "success", "generated tokens", per_arm("generated", *SOME)),
    Panel("Among critics: success at T = 1", per_arm("sampled_gold", *CRITICS), "success", "batch"),
    Panel("Among groups: success at T = 1", per_arm("sampled_gold", *GROUPS), "success", "batch"),
    Panel("Squared error of the critic", per_arm("value_error", *CRITICS), "of the return", "batch"),
    Panel("Entropy of the policy", per_arm("entropy", *SOME), "nats per token", "batch"),
    Panel("Success at T = 1 by cost", per_arm("sampled_gold", *SOME), "success", "product FLOPs", per_arm("flops", *SOME)),
    Panel(
        "Exact: noise of the update per episode",
        {**NOISE, "group of 2": "exact_lam1/noise_group_2", "group of 3": "exact_lam1/noise_group_3"}, "deviation / |gradient|",
        "error of the critic, in deviations of the reward",
        {**ERROR, "group of 2": "exact_lam1/error", "group of 3": "exact_lam1/error"},
    ),
    Panel(
        "Exact: bias of the direction", {label: source.replace("noise", "bias") for label, source in NOISE.items()}, "1 - cosine",
        "error of the critic, in deviations of the reward", ERROR,
    ),
    Panel("Twin: exact J", {"PPO": "twin_ppo/J", "PPO, no critic": "twin_unlearned/J", "PPO, group": "twin_group/J"}, "J", "update"),
)

RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3)
SWEEP = (  # scripts/tune.py critic_or_group
    {"sft_rate": ((2e-3, 4e-3, 8e-3), "start/sampled_gold")},
    {
        "rate": (RATES, "ppo/sampled_gold"), "rloo_rate": (RATES, "rloo/sampled_gold"),
        "grpo_no_kl_rate": (RATES, "grpo_no_kl/sampled_gold"), "dr_grpo_rate": (RATES, "dr_grpo/sampled_gold"),
    },
    {
        "own_critic_rate": ((5e-4, 2e-3, 8e-3), "ppo/sampled_gold"),
        "small_critic_rate": ((5e-4, 2e-3, 8e-3), "small/sampled_gold"),
        "value_coef": ((0.1, 0.5, 1.0), "shared/sampled_gold"),
    },
)


def crossing(curves, group: int, lam: str) -> float:
    """The error of the critic, in deviations of the reward, at which a group of this size is as noisy; NaN beyond the grid."""
    exact = f"exact_lam{lam}"
    gap = np.mean(curves[f"{exact}/noise_critic"] - curves[f"{exact}/noise_group_{group}"], axis=0)
    return float(np.interp(0.0, gap, curves[f"{exact}/error"][0], left=np.nan, right=np.nan))


def sections(cfg: Config, curves) -> str:
    rl = next(stage.config for stage in stages(cfg, {}) if stage.name == "ppo")
    spec, episodes = rl.env.make().spec, cfg.prompts * cfg.group
    narrow = ModelConfig(vocab=rl.model.vocab, d_model=cfg.small_d_model, n_layers=1)
    critics = {"ppo": rl.model, "ppo_lam1": rl.model, "ppo_spread": rl.model, "small": narrow}
    spent = {arm: float(np.mean(curves[f"{arm}/flops"][:, -1])) for arm in ARMS.values()}
    lines = []
    for label, arm in ARMS.items():
        cells = [cell(measure(curves, arm)) for measure in (early, late)]
        critic = 4 * value_flops(critics[arm], spec, episodes) * cfg.updates / spent[arm] if arm in critics else 0.0
        has = arm in CRITICS
        explained = ", ".join(
            f"{1 - float(np.mean(over('value_error', part)(curves, arm) / variance(curves, arm, part))):.2f}" for part in (EARLY, LATE)
        ) if has else "-"
        lines.append(
            f"| {label} | {cells[0]} | {cells[1]} | {float(np.mean(entropy(curves, arm))):.3f} | {explained} | "
            f"{float(np.mean(curves[f'{arm}/generated'][:, -1])):.4g} | {spent[arm] / spent['rloo']:.2f} | {critic:.0%} |"
        )
    errors = [
        f"| {lam} | " + " | ".join(f"{crossing(curves, group, lam):.2f}" for group in (2, 3)) + " |" for lam in LAMBDAS
    ]
    return "\n".join([
        "## The arms", "",
        "Success at T = 1 over the first 20 and the last 40 batches, with 95% intervals; entropy late; 1 - "
        "the critic's squared error over the reward's variance, early and late (its target, and so this number, depends on "
        "lam); tokens; product FLOPs over RLOO's and, of these, the "
        "critic's (PPO's row also scores a reference, whose pull is off here).", "",
        "| arm | early | late | entropy | explained | tokens | FLOPs / RLOO's | critic's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |", *lines, "",
        "## How wrong a critic may be", "",
        "The error at every node, in standard deviations of the reward, at which groups are as noisy per episode (exact).", "",
        "| lam | group of 2 | group of 3 |", "| --- | --- | --- |", *errors,
    ])


def variance(curves, arm, batches):
    """Of a batch's rewards, 0 or 1: what is left of the return where nothing is known."""
    p = over("reward", batches)(curves, arm)
    return p * (1 - p)


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(n_layers=1, start_updates=20, updates=20, prompts=8, group=4, eval_tasks=32, worlds=2), seeds=2),
        "cpu": Tier(Config(), seeds=12),
        "full": Tier(Config(level=6, d_model=64, start_updates=2000, updates=1000), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
    sweep=SWEEP,
)
