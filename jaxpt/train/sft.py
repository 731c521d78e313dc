"""Supervised training on the oracle's demonstrations."""

from dataclasses import dataclass, field
from functools import partial

import jax

from jaxpt.models import ModelConfig, make_model
from jaxpt.objectives import get
from jaxpt.ops.sampling import row_keys
from jaxpt.rollout import demonstrate
from jaxpt.train import common, experts
from jaxpt.train.budget import update_flops
from jaxpt.train.learn import imitate
from jaxpt.train.optim import OptimConfig
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.program import Program


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    env: common.EnvConfig = field(default_factory=common.EnvConfig)
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    objective: str = "sft"
    batch: int = 128  # demonstrations per update
    micro: int = 0  # demonstrations per share of a batch, whose gradients are summed; 0: all at once
    style: str = "think"  # one of the environment's styles
    eval: common.EvalConfig = field(default_factory=common.EvalConfig)

    def __post_init__(self):
        styles = self.env.make().spec.styles
        if self.style not in styles:
            raise ValueError(f"style: got {self.style!r}, expected one of {', '.join(styles)}")
        further = [what for what in get(self.objective).needs if what != "logp"]
        if further:
            raise ValueError(f"objective: {self.objective!r} needs {further[0]}, expected a supervised row such as 'sft'")
        common.check_positive(self, "batch")
        common.check_vocab(self.model, self.env)


def make_sft(cfg: SftConfig, layout: Layout = ONE) -> Program:
    """Each step: new tasks, one demonstration each, one update."""
    env, model, row = cfg.env.make(), make_model(cfg.model), get(cfg.objective)
    style = env.spec.styles.index(cfg.style)
    cost = float(update_flops(cfg.model, env.spec, cfg.batch))  # more than an int32 holds

    def init(key, hyper, start=None):
        return common.start_state(cfg, model, key, hyper, start)

    def step(state):
        step_key = jax.random.fold_in(state["key"], state["step"])
        rows = layout.rows(cfg.batch)
        task_keys = row_keys(jax.random.fold_in(step_key, common.TASK), rows)
        tasks = common.draw_tasks(env, common.levels_of(cfg.env, state["hyper"]), task_keys)
        keys = row_keys(jax.random.fold_in(step_key, common.ROW), rows)
        traj = demonstrate(env, layout.spread(tasks), keys, style)
        state, *learned = imitate(cfg, model, row, layout, state, traj)
        return common.finish_step(cfg, model, env, layout, state, cost, *learned)

    hyper = {"learning_rate": cfg.optim.learning_rate, **row.hyper, **common.level_leaves(cfg.env), **experts.leaves(cfg.model)}
    return Program(init, step, hyper, partial(common.kept_params, cfg))
