"""Does a larger step bring a noisy descent nearer to its target?

A test's experiment: five numbers, noisy gradient steps, seconds to run.
"""

import os
import signal
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.lab.experiment import Claim, Experiment, Panel, Stage, Tier
from jaxpt.lab.statistics import last
from jaxpt.train.program import Program

TRACES: list[str] = []  # one entry per trace of a step: the tests count compilations with it


@dataclass(frozen=True)
class Config:
    steps: int = 12
    """steps of every stage"""
    chunk: int = 5
    """steps per compiled call"""
    size: int = 5
    """numbers to learn"""
    noise: float = 0.1
    """standard deviation of the gradient's noise"""
    fail: str = ""
    """what goes wrong: program, memory"""


@dataclass(frozen=True)
class Descent:
    size: int
    noise: float
    fail: str = ""


def make_descent(cfg: Descent) -> Program:
    if cfg.fail == "program":
        raise RuntimeError("the program is broken")
    if cfg.fail == "memory":
        os.kill(os.getpid(), signal.SIGKILL)
    print("a program prints")

    def init(key, hyper, start=None):
        params = {"x": jnp.zeros(cfg.size)} if start is None else start
        return {"params": params, "first": params, "half": jnp.zeros(2, jnp.bfloat16), "key": key,
                "step": jnp.asarray(0), "hyper": hyper}

    def step(state):
        TRACES.append("step")
        key = jax.random.fold_in(state["key"], state["step"])
        gradient = state["params"]["x"] - 1 + cfg.noise * jax.random.normal(key, (cfg.size,))
        x = state["params"]["x"] - state["hyper"]["lr"] * gradient
        measured = jnp.where(state["step"] % 4 == 3, jnp.mean((x - 1) ** 2), jnp.nan)
        metrics = {"loss": jnp.mean((x - 1) ** 2), "eval": measured, "x": x[:2], "half": jnp.bfloat16(x[0])}
        return {**state, "params": {"x": x}, "half": state["half"] + 1, "step": state["step"] + 1}, metrics

    return Program(init, step, {"lr": 0.05}, lambda state: state["params"])


def stages(cfg, inputs):
    descent = Descent(cfg.size, cfg.noise, cfg.fail)
    return [
        Stage("fast", make_descent, descent, cfg.steps, "base", {"lr": 0.2}, cfg.chunk, stream="arm"),
        Stage("base", make_descent, descent, cfg.steps, chunk=cfg.chunk),
        Stage("slow", make_descent, descent, cfg.steps, "base", {"lr": 0.05}, cfg.chunk, stream="arm"),
    ]


def gain(slow, fast):
    return lambda curves: np.log(last(curves[slow])) - np.log(last(curves[fast]))


def inputs(cfg):
    return {"numbers": np.arange(3)}


EXPERIMENT = Experiment(
    tiers={"smoke": Tier(Config(), 2), "cpu": Tier(Config(steps=40), 8), "full": Tier(Config(steps=400), 20)},
    stages=stages,
    claims=[
        Claim("faster", "A larger step ends nearer to the target.", gain("slow/loss", "fast/loss"), 0.05,
              "the same arm twice", gain("slow/loss", "slow/loss")),
    ],
    panels=[
        Panel("distance", {"slow": "slow/loss", "fast": "fast/loss"}, "mean squared distance"),
        Panel("evaluation", {"base": "base/eval", "slow": "slow/eval"}, "mean squared distance",
              "loss of base", x={"base": "base/loss", "slow": "base/loss"}),
    ],
    inputs=inputs,
    sections=lambda cfg, curves: f"## Remarks\n\nNoise was {cfg.noise}.",
)
