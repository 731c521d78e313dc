"""Pre-training on an environment's corpus: its sub-skills, one document a row, fresh in every batch."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpt.models import ModelConfig, make_model
from jaxpt.objectives.supervised import SFT
from jaxpt.ops.sampling import row_keys
from jaxpt.train import common, experts
from jaxpt.train.budget import update_flops
from jaxpt.train.learn import imitate
from jaxpt.train.optim import OptimConfig
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.pretrain import as_trajectory
from jaxpt.train.program import Program


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig:
    env: common.EnvConfig = field(default_factory=common.EnvConfig)
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: int = 128  # documents per update
    micro: int = 0  # documents per share of a batch, whose gradients are summed; 0: all at once
    eval: common.EvalConfig = field(default_factory=common.EvalConfig)

    def __post_init__(self):
        if self.env.make().corpus is None:
            raise ValueError(f"env: {self.env.name!r} has no corpus")
        common.check_positive(self, "batch")
        common.check_vocab(self.model, self.env)


def make_documents(cfg: DocumentsConfig, layout: Layout = ONE) -> Program:
    """Each step: `batch` new documents, one update of maximum likelihood on every token that another one precedes."""
    env, model = cfg.env.make(), make_model(cfg.model)
    cost = update_flops(cfg.model, env.spec, cfg.batch)

    def init(key, hyper, start=None):
        return common.start_state(cfg, model, key, hyper, start)

    def step(state):
        key = jax.random.fold_in(jax.random.fold_in(state["key"], state["step"]), common.TASK)
        tokens = layout.spread(jax.vmap(env.corpus)(row_keys(key, layout.rows(cfg.batch))))
        traj = as_trajectory(tokens)
        traj = traj._replace(mask=traj.mask & (tokens > 0), length=jnp.sum(tokens > 0, axis=1))
        state, *learned = imitate(cfg, model, SFT, layout, state, traj)
        return common.finish_step(cfg, model, env, layout, state, cost, *learned)

    hyper = {"learning_rate": cfg.optim.learning_rate, **SFT.hyper, **experts.leaves(cfg.model)}
    return Program(init, step, hyper, lambda state: state["params"])
