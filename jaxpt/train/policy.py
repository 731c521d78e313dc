"""Policy optimization: sample groups, score them, update; everything in one compiled step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from jaxpt.models import ModelConfig, make_model
from jaxpt.models.lora import joined, moving
from jaxpt.objectives import entropy, get
from jaxpt.objectives.kl import adapted
from jaxpt.ops.masked import keep, masked_sum, safe_div
from jaxpt.ops.sampling import row_keys, sampler
from jaxpt.rollout import demonstrate, generate
from jaxpt.train import common, experts, learn, paths
from jaxpt.train.budget import rollout_flops, scoring_flops, update_flops, value_flops
from jaxpt.train.collect import collect
from jaxpt.train.critic import CriticConfig, critic_values, init_critic
from jaxpt.train.optim import OptimConfig, start_optimizer
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.program import Program
from jaxpt.train.rows import arm, check_rows, follow, leaves, of_row, own, when

COMPUTED = ("logp", "ref_logp", "entropy", "values", "sampler_logp", "prompt_tokens")  # of what rows need
DEMONSTRATION = 5  # what a step key is folded with for demonstrations; 0 to 4 are of train.common and train.experts
CRITIC = 2**31 - 1  # what a run's key is folded with for a critic's fresh parameters; steps stay below it


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    env: common.EnvConfig = field(default_factory=common.EnvConfig)
    model: ModelConfig
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=3e-4))
    objectives: tuple[str, ...] = ("grpo",)  # rows of jaxpt.objectives that share the program; the leaf `row` picks one
    critic: CriticConfig = field(default_factory=CriticConfig)  # where a row needs values
    prompts: int = 32  # P: tasks per batch
    group: int = 8  # G: episodes per task
    repeats: int | None = None  # a leaf: so many prompts in a row are one task and one group (with group = 1: its size)
    minibatches: int = 1  # updates per pass over a batch, each on P / minibatches whole groups
    epochs: int = 1  # passes over a batch
    micro: int = 0  # rows per share of a minibatch, whose gradients are summed; 0: all at once
    temperature: float = 1.0
    signal_rewards: Mapping[str, float] = field(default_factory=dict)  # signal of the environment -> reward at its token
    path: paths.PathConfig | None = None  # what verified events do beside the outcome
    reward_noise: float = 0.0  # share of episodes whose reward is replaced by a fair coin; 1 is a control
    refresh: int | None = None  # a leaf: the sampler is a copy of the policy, made anew every so many batches; None: no copy
    replay: float | None = None  # a leaf, of experts: 1: updates use the routes that sampled tokens took; None: not measured
    eval: common.EvalConfig = field(default_factory=common.EvalConfig)

    def __post_init__(self):
        spec = self.env.make().spec
        check_rows(self.objectives, COMPUTED)
        if not self.objectives:
            raise ValueError("objectives: expected at least one row")
        common.check_positive(self, "prompts", "group", "temperature", "minibatches", "epochs")
        for name in ("refresh", "repeats"):
            if getattr(self, name) is not None:
                common.check_positive(self, name)
        selects = any("max_rounds" in get(name).hyper for name in self.objectives)
        if self.repeats is not None and selects:
            raise ValueError("repeats: a row that draws groups again must know their size; set group instead")
        if self.replay is not None and (self.model.moe is None or self.model.moe.choice != "token"):
            raise ValueError("replay: expected None for a model in which no token chooses experts")
        if self.prompts % self.minibatches:
            raise ValueError(f"minibatches: got {self.minibatches}, expected a divisor of prompts = {self.prompts}")
        unknown = sorted(set(self.signal_rewards) - set(spec.signals))
        if unknown:
            raise ValueError(f"signal_rewards: {unknown[0]!r} is no signal of {self.env.name!r}, which has {spec.signals}")
        if self.path is not None:
            self.path.check(spec)
            if self.path.demonstrator is not None and (selects or self.repeats is not None):
                raise ValueError("path.demonstrator: expected None with `repeats`, or with a row that draws groups again")
        common.check_vocab(self.model, self.env)

    def arm(self, name: str) -> dict[str, float]:
        """The leaves that make this program follow row `name` with its own constants: Stage(..., hyper=cfg.arm(name))."""
        return arm(self.objectives, name, self.env.make().spec)


def make_policy(cfg: PolicyConfig, layout: Layout = ONE) -> Program:
    """Each step: P new tasks, G episodes each, epochs x minibatches updates. The reference is the policy at the start."""
    env, model, rows = cfg.env.make(), make_model(cfg.model), [get(name) for name in cfg.objectives]
    needed = {what for row in rows for what in row.needs}
    selects = any("max_rounds" in row.hyper for row in rows)
    adapts = any("kl_target" in row.hyper for row in rows)
    adapts_entropy = any("entropy_target" in row.hyper for row in rows)
    weights = jnp.asarray([cfg.signal_rewards.get(name, 0.0) for name in env.spec.signals], jnp.float32)

    def init(key, hyper, start=None):
        state = {**common.start_state(cfg, model, key, hyper, start), "generated": jnp.float32(0)}
        state |= {"sampler": jax.tree.map(jnp.copy, moving(state["params"]))} if cfg.refresh is not None else {}
        # A copy: the state is donated, and one buffer must not be given away twice.
        reference = {"reference": jax.tree.map(jnp.copy, moving(state["params"]))} if "ref_logp" in needed else {}
        if "values" not in needed:
            return state | reference
        critic = init_critic(cfg.critic, cfg.model, state["params"], jax.random.fold_in(key, CRITIC))
        critic, critic_opt = start_optimizer(cfg.critic.optim, critic)
        return {**state, **reference, "critic": critic, "critic_opt": critic_opt}

    def sampled_by(state):
        return joined(state["params"], state.get("sampler", {}))

    def tasks_of(state, key, repeats=1):
        drawn = row_keys(jax.random.fold_in(key, common.TASK), layout.rows(cfg.prompts) // repeats)
        return common.draw_tasks(env, common.levels_of(cfg.env, state["hyper"]), drawn)

    def rollout(state, key):
        repeats = state["hyper"]["repeats"].astype(jnp.int32) if cfg.repeats is not None else 1
        tasks = tasks_of(state, key, repeats)
        numbers = layout.rows(cfg.prompts * cfg.group)
        keys = row_keys(jax.random.fold_in(key, common.ROW), numbers)
        traj = generate(
            model, sampled_by(state), env, layout.spread(tasks), keys, sampler(cfg.temperature), cfg.group
        )
        coins = row_keys(jax.random.fold_in(key, common.NOISE), numbers)
        reward = common.with_coins(traj.reward, coins, state["hyper"]["reward_noise"])
        return traj._replace(reward=reward, group=traj.group // repeats)

    def score(state, traj):
        """What `prepare` asks for beyond the episodes; zeros where the followed row does not need it."""
        hyper, zeros = state["hyper"], jnp.zeros(traj.mask.shape)
        stats = {"process": traj.signals @ weights} if cfg.signal_rewards else {}

        def logp_under(params):
            batch = {"tokens": traj.tokens} | ({} if traj.support is None else {"support": traj.support})
            return common.decision_stats(model, params, batch, ("logp",), cfg.temperature)["logp"]

        if "ref_logp" in needed:
            referred = lambda: logp_under(joined(state["params"], state["reference"]))  # noqa: E731
            stats["ref_logp"] = when(rows, hyper, lambda r: "ref_logp" in r.needs, referred, lambda: zeros)
        if "sampler_logp" in needed:  # the policy that is trained is old_logp then, whoever has drawn the episodes
            own_logp = lambda: logp_under(state["params"])  # noqa: E731
            stats["old_logp"] = when(rows, hyper, lambda r: "sampler_logp" in r.needs, own_logp, lambda: traj.old_logp)
        if "values" in needed:
            def valued():
                hidden = model.forward(state["params"], traj.tokens)[0] if cfg.critic.trunk == "shared" else None
                return critic_values(cfg.critic, model, state["critic"], hidden, traj.tokens, traj.length)

            nothing = lambda: (zeros, zeros[:, 0])  # noqa: E731
            values, final_values = when(rows, hyper, lambda r: "values" in r.needs, valued, nothing)
            stats |= {"values": values, "final_values": final_values}
        return stats

    def seat(state, key, traj):
        """The batch with demonstrations of its tasks in their seats, as likely as the policy has them, and which rows."""
        if cfg.path.demonstrator is None:
            return traj, jnp.zeros(traj.reward.shape, bool)
        keys = row_keys(jax.random.fold_in(key, DEMONSTRATION), layout.rows(cfg.prompts))
        style = env.spec.styles.index(cfg.path.demonstrator)
        shown = demonstrate(env, layout.spread(tasks_of(state, key)), keys, style)
        logp = common.decision_stats(model, state["params"], {"tokens": shown.tokens}, ("logp",), cfg.temperature)["logp"]
        where = paths.seats(traj.reward.shape[0], cfg.group, state["hyper"]["demonstrated"])
        return paths.seated(traj, shown._replace(old_logp=keep(logp, shown.mask)), where, cfg.group), where

    def step(state):
        hyper = state["hyper"]
        limit = None
        if selects:
            chooses = of_row(rows, hyper, lambda r: "max_rounds" in r.hyper)
            limit = jnp.where(chooses, hyper["max_rounds"], 1.0)
        key = jax.random.fold_in(state["key"], state["step"])
        if "sampler" in state:
            due = state["step"] % hyper["refresh"].astype(jnp.int32) == 0
            renew = lambda new, old: jnp.where(due, new, old)  # noqa: E731
            state = {**state, "sampler": jax.tree.map(renew, moving(state["params"]), state["sampler"])}
        traj, episodes = collect(lambda key: rollout(state, key), key, cfg.group, limit, layout.total)
        if cfg.path is not None:
            episodes |= paths.path_metrics(cfg.path, env.spec, traj)
            traj, where = seat(state, key, traj)
            traj, further = paths.guided(cfg.path, env.spec, hyper, state["step"], traj, where, cfg.group, layout.total)
        stats = score(state, traj)
        sampler_logp, traj = traj.old_logp, traj._replace(old_logp=stats.pop("old_logp", traj.old_logp))
        given = {**stats, "sampler_logp": sampler_logp}
        ready = follow(
            rows, hyper, lambda r: lambda traj, given: r.prepare(traj, total=layout.total, **given, **own(r, hyper)), traj, given
        )
        if cfg.path is not None:
            ready["advantages"] += keep(further, ready["mask"])
        if cfg.replay is not None:
            _, aux = model.forward(sampled_by(state), traj.tokens)
            stats["routes"] = jnp.moveaxis(aux["routes"], 0, 1)
        state, loss, norm, metrics = learn.learn(cfg, model, rows, layout, state, traj, ready, stats, sampler_logp)
        episodes = layout.total(episodes)
        drawn, _ = episodes.pop("generated")
        rounds = episodes["rounds"][0] / layout.shards if selects else 1.0
        if selects:
            episodes["rounds"] = (rounds, jnp.float32(1))
        if adapts:
            state, metrics["beta"] = _adapt_beta(state, traj, ready, stats)
        if adapts_entropy:
            state, metrics["entropy_coef"] = _adapt_entropy(state, *metrics["entropy"])
        state = {**state, "generated": state["generated"] + drawn}
        once, each = (of_row(rows, hyper, lambda r, part=part: float(_flops(cfg, r)[part])) for part in (0, 1))
        state, out = common.finish_step(
            cfg, model, env, layout, state, once + each * rounds, loss, norm, {**metrics, **episodes}
        )
        return state, {**out, "generated": state["generated"]}

    def _adapt_beta(state, traj, ready, stats):
        """The controller's next beta, where the followed row has one; KL per sequence by k1 on the sampler's logp."""
        hyper, mask = state["hyper"], ready["mask"]
        nats = keep(traj.old_logp, mask) - keep(stats["ref_logp"], mask)
        nats, count = layout.total(masked_sum(nats, mask)), ready["totals"]["rows"]
        moved = adapted(
            hyper["beta"], safe_div(nats, count), kl_target=hyper["kl_target"], kl_horizon=hyper["kl_horizon"], rows=count
        )
        beta = jnp.where(of_row(rows, hyper, lambda r: "kl_target" in r.hyper), moved, hyper["beta"])
        return {**state, "hyper": {**hyper, "beta": beta}}, (beta, jnp.float32(1))

    def _adapt_entropy(state, total, count):
        """The controller's next coefficient, and the entropy of this batch's updates, which decides if it is at work. A
        batch that trained on nothing changes neither."""
        hyper, mean = state["hyper"], safe_div(total, count)
        moved = entropy.adapted(
            hyper["entropy_coef"], mean, entropy_target=hyper["entropy_target"], entropy_step=hyper["entropy_step"]
        )
        follows = of_row(rows, hyper, lambda r: "entropy_target" in r.hyper) & (count > 0)
        new = {"entropy_coef": moved, "entropy_last": mean}
        hyper = {**hyper, **{name: jnp.where(follows, x, hyper[name]) for name, x in new.items()}}
        return {**state, "hyper": hyper}, (hyper["entropy_coef"], jnp.float32(1))

    hyper = {"learning_rate": cfg.optim.learning_rate, "reward_noise": cfg.reward_noise, **leaves(cfg.objectives, env.spec),
             **common.level_leaves(cfg.env), **experts.leaves(cfg.model)}
    hyper |= cfg.path.leaves() if cfg.path is not None else {}
    for name in ("refresh", "repeats", "replay"):
        if getattr(cfg, name) is not None:
            hyper[name] = float(getattr(cfg, name))
    if "values" in needed:
        hyper |= {"critic_rate": cfg.critic.optim.learning_rate, "value_coef": 1.0}
    return Program(init, step, hyper, partial(common.kept_params, cfg))


def policy_flops(cfg: PolicyConfig) -> int:
    """Product FLOPs of one step of the first row, with one round of episodes and evaluation left out."""
    return sum(_flops(cfg, get(cfg.objectives[0])))


def _flops(cfg: PolicyConfig, row) -> tuple[int, int]:
    """Product FLOPs of a step: what is done once, and what every round of episodes costs."""
    spec, rows = cfg.env.make().spec, cfg.prompts * cfg.group
    once = cfg.epochs * update_flops(cfg.model, spec, rows)
    once += sum(scoring_flops(cfg.model, spec, rows) for what in ("ref_logp", "sampler_logp") if what in row.needs)
    if "values" in row.needs and cfg.critic.trunk == "own":
        once += (1 + 3 * cfg.epochs) * value_flops(cfg.critic.model or cfg.model, spec, rows)
    return once, rollout_flops(cfg.model, spec, cfg.prompts, cfg.group)
