"""Policy optimization: sample groups, score them, update; everything in one compiled step."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpt.models import ModelConfig, make_model
from jaxpt.objectives import get
from jaxpt.ops.masked import count, group_extreme
from jaxpt.ops.sampling import row_keys, sampler
from jaxpt.rollout import generate
from jaxpt.train import common
from jaxpt.train.budget import rollout_flops, scoring_flops, update_flops
from jaxpt.train.optim import OptimConfig
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.program import Program

@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    env: common.EnvConfig = field(default_factory=common.EnvConfig)
    model: ModelConfig
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=3e-4))
    objective: str = "grpo"  # a row of jaxpt.objectives
    prompts: int = 32  # P: tasks per update
    group: int = 8  # G: episodes per task
    temperature: float = 1.0
    reward_noise: float = 0.0  # share of episodes whose reward is replaced by a fair coin; 1 is a control
    eval: common.EvalConfig = field(default_factory=common.EvalConfig)

    def __post_init__(self):
        get(self.objective)
        common.check_positive(self, "prompts", "group", "temperature")
        common.check_vocab(self.model, self.env)


def make_policy(cfg: PolicyConfig, layout: Layout = ONE) -> Program:
    """Each step: P new tasks, G episodes each, one update. The reference is the policy at the start."""
    env, model, row = cfg.env.make(), make_model(cfg.model), get(cfg.objective)
    needs_reference = "ref_logp" in row.needs
    cost = policy_flops(cfg)

    def init(key, hyper, start=None):
        state = {**common.start_state(cfg, model, key, hyper, start), "generated": jnp.uint32(0)}
        # A copy: the state is donated, and one buffer must not be given away twice.
        reference = {"reference": jax.tree.map(jnp.copy, state["params"])} if needs_reference else {}
        return state | reference

    def rollout(state, step_key):
        task_keys = row_keys(jax.random.fold_in(step_key, common.TASK), layout.rows(cfg.prompts))
        tasks = common.draw_tasks(env, cfg.env.levels, task_keys)
        rows = layout.rows(cfg.prompts * cfg.group)
        keys = row_keys(jax.random.fold_in(step_key, common.ROW), rows)
        traj = generate(
            model, state["params"], env, layout.spread(tasks), keys, sampler(cfg.temperature), cfg.group
        )
        noise = row_keys(jax.random.fold_in(step_key, common.NOISE), rows)
        return traj._replace(reward=common.with_coins(traj.reward, noise, state["hyper"]["reward_noise"]))

    def step(state):
        traj = rollout(state, jax.random.fold_in(state["key"], state["step"]))
        hyper = {k: v for k, v in state["hyper"].items() if k in row.hyper}
        ready = row.prepare(traj, **hyper)
        ready["totals"] = layout.total(ready["totals"])
        extra = {}
        if needs_reference:
            reference = common.batch_stats(model, state["reference"], traj, ("logp",), cfg.temperature)
            extra["ref_logp"] = reference["logp"]
        loss, metrics, grads = common.loss_and_grad(
            model, row, state["params"], traj, ready, extra, hyper, cfg.temperature
        )
        metrics |= _episode_metrics(traj)
        generated = state["generated"] + layout.total(jnp.sum(traj.mask, dtype=jnp.uint32))
        state, out = common.finish_step(cfg, model, env, layout, cost, state, loss, metrics, grads)
        return {**state, "generated": generated}, {**out, "generated": generated}

    hyper = {"learning_rate": cfg.optim.learning_rate, "reward_noise": cfg.reward_noise, **row.hyper}
    return Program(init, step, hyper, lambda state: state["params"])


def policy_flops(cfg: PolicyConfig) -> int:
    """Product FLOPs of one update, evaluation left out."""
    spec, rows = cfg.env.make().spec, cfg.prompts * cfg.group
    reference = scoring_flops(cfg.model, spec, rows) if "ref_logp" in get(cfg.objective).needs else 0
    return rollout_flops(cfg.model, spec, cfg.prompts, cfg.group) + update_flops(cfg.model, spec, rows) + reference


def _episode_metrics(traj):
    """Means over episodes: reward, gold, response length, truncation, rows of groups with equal rewards."""
    rows = jnp.float32(traj.reward.shape[0])
    low, high = group_extreme(traj.reward, traj.group, jnp.isfinite(traj.reward))
    per_row = {
        "reward": traj.reward, "gold": traj.gold, "length": count(traj.mask, axis=1),
        "truncated": traj.truncated.astype(jnp.float32),
        "no_signal": (low >= high).astype(jnp.float32),
    }
    return {name: (jnp.sum(x), rows) for name, x in per_row.items()}
