"""Reward the outcome, penalise the path: what do verified penalties do beside a reward for success?

An agent may reach its goal on a path that nobody wants: it changes what it has not read, submits what it has not tested,
or mends the test in place of the code. Success alone does not mind, and sometimes pays it. Whether a call breaks a rule
can be verified from the call and what was known before it; whether it is progress cannot. Here a small repository
(environment FileOps) has a rule engine, an honest way and a hack, and the start is imitation of a careless habit:

    outcome    success alone
    penalty    violations alone
    summed     success - violations / 2; in the twin also `capped`, where one violation counts at most
    channels   violations beside success, at the tokens of their turn, each channel over its own tokens
    lenient    channels without the rule that the test file is not to be edited
    shown      the recipe: channels, a credit for every obligation of the task that is met, once, all path signals fading
               to 0 at two thirds of the run, and one compliant demonstration in every group; in the twin also its parts,
               `pending` (the credit alone), `credits` (one for every call that heeds a rule) and `annealed` (both but the
               demonstration)

The twin is a table over the states of one task that begins with the same habit: what it earns and does is computed, not
sampled. There penalties alone, whose best policy is by definition to submit at once, are a test (tests/test_paths.py),
and a variant in which no call ever makes progress asks when a dense signal says anything (the reachability probe: do
the episodes of a group differ in it before training?).

Source: RLVP (arXiv 2607.07435 and its repository): lambda = 1/2, groups of 8, advantages centred as in Dr.GRPO; rules of its
FileOps. Not the paper's: the cap (two violations there), the rates, everything's size, and a task that fits in 24 tokens.
Command: jaxpt run rlvp
Expected (two tuning seeds, 10000 and 10001, after which the claims were set): success alone ends with success 0.98 and 2.9
violations, 2.3 at the start. Penalties alone end with neither, by submitting at once, and so do two channels alone, by
calls that lead nowhere until the budget is out. The plain sum and `lenient` end with the hack, in every episode: it is the
way to succeed with the fewest violations that the start knows. The recipe ends with gold success 0.93 and 0.06 violations,
over the 20 batches after its signals have faded. In the twin, where states share no parameters, two channels alone do it (0.99,
0.01): what stops the network is presumably that the last violations are pushed down with the weight of all, wherever else
that leads. Credits for every call are not farmed at these lengths (the_twin_farms_credits refuted).
On seeds 0 to 7 success alone learns the hack too, on three of them, so that its gold success is 0.72 [0.45, 0.99]
and the_recipe_keeps_success, first a ratio to it and now a difference, is inconclusive: the recipe ends 0.20 [-0.08, 0.48] above
it, 0.13 [-0.16, 0.43] on seeds 1000 to 1007, where the other verdicts are the same too. It takes more seeds, not another margin.
Not asked of the network: which part of the recipe saves it (credit, fading, demonstration), other weights, harder chains.
Minutes: 13 on two busy cores (8 seeds, 3.4 to 4.8 minutes of a processor); --tier smoke 1 with an empty compilation cache.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpt.envs.fileops import CREDITS, VIOLATIONS
from jaxpt.lab.errors import multiples, within
from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier, per_arm
from jaxpt.lab.report import cell
from jaxpt.lab.statistics import over
from jaxpt.models import ModelConfig
from jaxpt.train.charted import ChartedConfig, make_charted
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.paths import PathConfig
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft

EVERY = 20  # updates between two evaluations, of one chunk, and of a mean over batches
ROW = "dr_grpo"
FADED = 2 / 3  # share of a run after which the path's signals are gone, where they fade
BOTH = 3  # seed of the twin's task: a chain of an edit and a removal
COLLAPSED = 0.1  # a policy that succeeds less often than this does nothing that matters
EVENTS = {**{name: -1.0 for name in VIOLATIONS}, **{name: 0.0 for name in CREDITS}}
ARMS = ("outcome", "penalty", "summed", "channels", "lenient", "shown")
TWINS = (*ARMS, "capped", "credits", "pending", "annealed", "progress")


@dataclass(frozen=True)
class Config:
    files: int = 4
    level: int = 2  # changes in a chain
    care: float = 0.1  # how often the habit heeds a rule
    slip: float = 0.1  # .. names a wrong file
    hack: float = 0.05  # .. begins by editing the test file
    give_up: float = 0.2  # .. submits before it is done, at every call
    weight: float = 0.5  # of the path beside the outcome (lambda)
    cap: float = 1.0  # violations that count at most, where they are capped
    d_model: int = 32
    n_layers: int = 2
    start_updates: int = 200  # supervised updates before the fork
    updates: int = 60  # batches of episodes after it
    batch: int = 64  # demonstrations per supervised update
    prompts: int = 8
    group: int = 8
    minibatches: int = 2  # updates per batch of episodes
    sft_rate: float = 4e-3
    rate: float = 1e-3  # of every arm; on a tuning seed success alone ended at 0.99 with it, at 0.96 with 3e-4
    eval_tasks: int = 64
    twin_updates: int = 120
    twin_rate: float = 0.05
    replicas: int = 3  # tables per seed

    def __post_init__(self):
        within(self, 1, math.inf, "d_model", "n_layers", "batch", "prompts", "group", "minibatches", "eval_tasks", "replicas")
        within(self, 1, 8, "level", "files")
        within(self, 0, 1, "care", "slip", "hack", "give_up", "sft_rate", "rate", "twin_rate")
        within(self, 0, math.inf, "weight", "cap")
        multiples(self, EVERY, "when arms are scored", "start_updates", "updates", "twin_updates")

    def env(self, files: int, variant: str = "hackable") -> EnvConfig:
        habit = {name: getattr(self, name) for name in ("care", "slip", "hack", "give_up")}
        options = {"files": files, "max_level": self.level, "variant": variant, **habit}
        return EnvConfig("fileops", options, (self.level, self.level))

    def leaves(self, arm: str, updates: int) -> dict[str, float]:
        """The numbers that make an arm; every arm of a program has them all."""
        beside = {"path_weight": self.weight}
        met = beside | {"event_discharged": 1.0}
        annealed = met | {"path_until": FADED * updates}
        total = {"path_total": self.weight}
        arms = {
            "outcome": {}, "penalty": total | {"outcome_weight": 0.0}, "summed": total, "capped": total | {"path_cap": self.cap},
            "channels": beside, "lenient": beside | {"event_tampering": 0.0},
            "credits": beside | {"event_looked": 1.0, "event_ran": 1.0}, "pending": met, "annealed": annealed,
            "shown": annealed | {"demonstrated": 1.0},
            "progress": total | {f"event_{name}": 0.0 for name in VIOLATIONS} | {"event_progress": 1.0},
        }
        return PathConfig(events=EVENTS, demonstrator="compliant").leaves() | arms[arm]


def stages(cfg: Config, inputs) -> list[Stage]:
    env, path = cfg.env(cfg.files), PathConfig(events=EVENTS, demonstrator="compliant")
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=cfg.d_model, n_layers=cfg.n_layers)
    scored = EvalConfig(every=EVERY, tasks=cfg.eval_tasks)
    sft = SftConfig(env=env, model=model, batch=cfg.batch, style="habit", eval=scored)
    rl = PolicyConfig(
        env=env, model=model, objectives=(ROW,), path=path, prompts=cfg.prompts, group=cfg.group, minibatches=cfg.minibatches,
        eval=scored,
    )

    def arm(name, stream="policy"):
        hyper = rl.arm(ROW) | cfg.leaves(name, cfg.updates) | {"learning_rate": cfg.rate}
        return Stage(name if stream == "policy" else f"{name}_{stream}", make_policy, rl, cfg.updates, after="start",
                     stream=stream, hyper=hyper)

    def twin(name, variant="hackable", stream="twin"):
        charted = ChartedConfig(
            env=cfg.env(cfg.level, variant), path=path, world=BOTH, style="habit", every=EVERY, replicas=cfg.replicas,
            objectives=(ROW,),
        )
        hyper = charted.arm(ROW) | cfg.leaves(name, cfg.twin_updates) | {"learning_rate": cfg.twin_rate}
        label = {"hackable": f"twin_{name}", "unreachable": f"stuck_{name}"}[variant]
        return Stage(label if stream == "twin" else f"{label}_{stream}", make_charted, charted, cfg.twin_updates, stream=stream,
                     hyper=hyper)

    return [
        Stage("start", make_sft, sft, cfg.start_updates, hyper={"learning_rate": cfg.sft_rate}),
        *(arm(name) for name in ARMS), arm("outcome", "again"),
        *(twin(name) for name in TWINS), twin("channels", stream="again"),
        *(twin(name, "unreachable") for name in ("outcome", "progress", "channels")),
    ]


FIRST, EARLY, LATE = slice(0, 1), slice(0, EVERY // 2), slice(-EVERY, None)
broken, success, gold = over("violations", LATE), over("reward", LATE), over("gold", LATE)
tampered = over("count_tampering", LATE)


def kept(arm: str):
    """Violations late, over those that the start commits."""
    return lambda curves: broken(curves, arm) / over("violations", FIRST)(curves, arm)


def avoided(arm: str):
    """Share of the violations of success alone that an arm does not commit."""
    return lambda curves: 1 - broken(curves, arm) / broken(curves, "outcome")


def keeps(measure, arm: str):
    """1 less what an arm loses of success alone's measure; above 1 where it gains."""
    return lambda curves: 1 + measure(curves, arm) - measure(curves, "outcome")


def difference(measure, arm: str, other: str):
    return lambda curves: measure(curves, arm) - measure(curves, other)


def final(metric: str):
    """(curves, stage) -> a number per table, exact, at the end of the run."""
    return lambda curves, stage: np.asarray(curves[f"{stage}/{metric}_replica"], np.float64)[:, -1].ravel()


def on_the_way(metric: str):
    """The same, as the mean over the run's evaluations."""
    return lambda curves, stage: np.nanmean(np.asarray(curves[f"{stage}/{metric}_replica"], np.float64), axis=1).ravel()


def probed(stage: str, event: str):
    """Share of the episodes in groups that differ in an event, in the batches drawn before anything is learned of it."""
    return lambda curves: over(f"sampled_{event}", EARLY)(curves, stage)


AGAIN = "success alone twice, other draws"
CLAIMS = (
    Claim(
        name="success_leaves_the_path",
        statement="Trained on success alone, the policy still commits more than half as many violations as the start.",
        estimand=kept("outcome"), margin=0.5,
        control_name="the recipe", control=kept("shown"),
    ),
    Claim(
        name="the_recipe_heeds_the_rules",
        statement="The recipe avoids more than 0.8 of the violations of success alone, after its path signals have faded.",
        estimand=avoided("shown"), margin=0.8,
        control_name=AGAIN, control=avoided("outcome_again"),
    ),
    Claim(
        name="the_recipe_keeps_success",
        statement="The recipe ends less than five percentage points of gold success below success alone (1 less the points lost).",
        estimand=keeps(gold, "shown"), margin=0.95,
        control_name="penalties alone", control=keeps(gold, "penalty"),
    ),
    Claim(
        name="channels_alone_stop_acting",
        statement="Two channels without the rest of the recipe end with a lower gold success than success alone.",
        estimand=difference(gold, "outcome", "channels"), margin=0.3,
        control_name="the recipe in their place", control=difference(gold, "outcome", "shown"),
    ),
    Claim(
        name="a_plain_sum_breeds_the_hack",
        statement="The plain sum edits the test file more often an episode than success alone: of all ways to succeed it is the one "
        "with the fewest violations that the start knows.",
        estimand=difference(tampered, "summed", "outcome"), margin=0.3,
        control_name=AGAIN, control=difference(tampered, "outcome_again", "outcome"),
    ),
    Claim(
        name="a_missing_rule_is_the_way_out",
        statement="So do two channels that lack the rule against it.",
        estimand=difference(tampered, "lenient", "outcome"), margin=0.3,
        control_name="with that rule", control=difference(tampered, "channels", "outcome"),
    ),
    Claim(
        name="the_twin_s_plain_sum_costs_success",
        statement="In the twin two channels end with a higher gold success (exact) than the plain sum.",
        estimand=difference(final("gold"), "twin_channels", "twin_summed"), margin=0.1, unit="table",
        control_name="two channels twice, other draws", control=difference(final("gold"), "twin_channels_again", "twin_channels"),
    ),
    Claim(
        name="the_twin_farms_credits",
        statement="In the twin the tests are run more often (exact count) under credits for every run than for obligations.",
        estimand=difference(final("count_ran"), "twin_credits", "twin_pending"), margin=0.5, unit="table",
        control_name="no credits in their place", control=difference(final("count_ran"), "twin_channels", "twin_pending"),
    ),
    Claim(
        name="penalties_reach_groups_that_all_fail",
        statement="Where no episode succeeds, groups still differ in their violations (share of episodes, first 10 batches).",
        estimand=probed("stuck_outcome", "rescued"), margin=0.5,
        control_name="in their progress", control=probed("stuck_outcome", "differs_progress"),
    ),
    Claim(
        name="progress_pays_where_it_is_reachable",
        statement="In the twin a reward for progress raises gold success (exact, mean over the run).",
        estimand=difference(on_the_way("gold"), "twin_progress", "twin_outcome"), margin=0.02, unit="table",
        control_name="where progress is unreachable", control=difference(on_the_way("gold"), "stuck_progress", "stuck_outcome"),
    ),
)

MAIN = {name: name for name in ARMS}
EXACT = {name: f"twin_{name}" for name in ("outcome", "penalty", "summed", "capped", "channels", "shown")}
FARMED = {name: f"twin_{name}" for name in ("channels", "credits", "pending", "annealed", "shown")}
PANELS = (
    Panel("Violations of an episode", per_arm("violations", MAIN), "violations", "batch"),
    Panel("Success the tests see (the proxy)", per_arm("reward", MAIN), "success", "batch"),
    Panel("Gold success", per_arm("gold", MAIN), "success", "batch"),
    Panel("Length of an episode", per_arm("length", MAIN), "tokens", "batch"),
    Panel("Edits of the test file in an episode", per_arm("count_tampering", MAIN), "calls", "batch"),
    Panel("Episodes in groups without outcome signal", per_arm("no_signal", MAIN), "share", "batch"),
    Panel("Twin, exact: gold success", per_arm("gold", EXACT), "success", "update"),
    Panel("Twin, exact: violations", per_arm("violations", EXACT), "violations", "update"),
    Panel("Twin, exact: runs of the tests that heed a rule", per_arm("count_ran", FARMED), "calls", "update"),
)

SWEEP = ({"rate": ((5e-4, 1e-3, 2e-3), "outcome/sampled_gold")},)  # scripts/tune.py rlvp


def sections(cfg: Config, curves) -> str:
    def mean(metric, part, arm):
        return float(np.nanmean(over(metric, part)(curves, arm)))

    arms = [
        f"| {arm} | {cell(success(curves, arm))} | {cell(gold(curves, arm))} | {cell(broken(curves, arm), '.2f')} | "
        f"{int(np.sum(gold(curves, arm) < COLLAPSED))} of {len(gold(curves, arm))} | {mean('no_signal', LATE, arm):.2f} | "
        f"{mean('all_fail', EARLY, arm):.2f} | {mean('outcome_variance', LATE, arm):.3f} | "
        f"{mean('violation_variance', LATE, arm):.2f} | {mean('length', LATE, arm):.1f} | "
        f"{float(np.mean(curves[f'{arm}/generated'][:, -1])):.3g} |"
        for arm in ARMS
    ]
    tables = [
        f"| {arm} | " + " | ".join(f"{np.mean(final(m)(curves, f'twin_{arm}')):.3f}" for m in ("reward", "gold"))
        + " | " + " | ".join(f"{np.mean(final(m)(curves, f'twin_{arm}')):.2f}" for m in ("violations", "count_ran", "decisions"))
        + f" | {int(np.sum(final('gold')(curves, f'twin_{arm}') < COLLAPSED))} of {final('gold')(curves, f'twin_{arm}').size} |"
        for arm in TWINS
    ]
    probe = [
        f"| {name} | " + " | ".join(
            f"{float(np.nanmean(curves[f'{world}_outcome/sampled_differs_{name}'][:, 0])):.2f}" for world in ("twin", "stuck")
        ) + " |" for name in EVENTS
    ]
    return "\n".join([
        "## The arms", "",
        "Means over the last 20 batches with 95% intervals: success that the tests see, gold success, violations of an episode; "
        f"collapses: seeds whose gold success is below {COLLAPSED}; episodes in groups without outcome signal, late, and in "
        "groups that all fail, early; variance within groups of outcome and violations, late; length; tokens.", "",
        "| arm | proxy | gold | violations | collapses | no signal | all fail | var O | var Phi | length | tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", *arms, "",
        "## The twin at the end", "",
        "Exact means over tables; runs of the tests that heed a rule, tokens decided; collapses among all tables.", "",
        "| arm | proxy | gold | violations | runs | decisions | collapses |",
        "| --- | --- | --- | --- | --- | --- | --- |", *tables, "",
        "## The reachability probe", "",
        "Share of the start's episodes in groups that differ in an event: in the twin, and where progress is unreachable.", "",
        "| event | reachable | unreachable |", "| --- | --- | --- |", *probe,
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(
            files=2, n_layers=1, start_updates=20, updates=20, prompts=4, group=4, eval_tasks=16, twin_updates=20, replicas=1,
        ), seeds=2),
        "cpu": Tier(Config(), seeds=8),
        "full": Tier(Config(
            files=6, level=3, d_model=64, start_updates=2000, updates=1000, prompts=16, minibatches=4, twin_updates=400,
        ), seeds=20),
    },
    stages=stages,
    claims=CLAIMS,
    panels=PANELS,
    sections=sections,
    sweep=SWEEP,
)
