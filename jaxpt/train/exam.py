"""Scores a policy on levels of its own choice, and trains nothing."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpt.models import ModelConfig, make_model
from jaxpt.train import common
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.program import Program


@dataclass(frozen=True, kw_only=True)
class ExamConfig:
    env: common.EnvConfig = field(default_factory=common.EnvConfig)
    model: ModelConfig
    eval: common.EvalConfig = field(default_factory=common.EvalConfig)  # `every` is not used


def make_exam(cfg: ExamConfig, layout: Layout = ONE) -> Program:
    """Each step scores the parameters it began with, by common.evaluate. Leaves: level_low, level_high."""
    env, model = cfg.env.make(), make_model(cfg.model)

    def init(key, hyper, start=None):
        params = model.init(key) if start is None else jax.tree.map(jnp.copy, start)
        return {"params": params, "key": key, "step": jnp.int32(0), "hyper": hyper}

    def step(state):
        key = jax.random.fold_in(jax.random.fold_in(state["key"], state["step"]), common.EVALUATION)
        scores = common.evaluate(model, state["params"], env, cfg, common.levels_of(cfg.env, state["hyper"]), key, layout)
        return {**state, "step": state["step"] + 1}, scores

    low, high = cfg.env.levels
    return Program(init, step, {"level_low": float(low), "level_high": float(high)}, lambda state: state["params"])
