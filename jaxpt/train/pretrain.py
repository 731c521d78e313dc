"""Pre-training on a stream of tokens (bytes of real text), scoring held-out text, and sampling.

Three programs over one model. The text itself is no part of a config: it is given to the `make_` functions
as arrays (functools.partial), so that configs stay plain values.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.data.text import random_windows
from jaxpt.models import ModelConfig, make_model
from jaxpt.objectives.supervised import SFT
from jaxpt.ops.logprobs import token_stats
from jaxpt.ops.masked import masked_mean, masked_sum
from jaxpt.ops.sampling import row_keys, sampler
from jaxpt.rollout.complete import complete
from jaxpt.train import common, experts
from jaxpt.train.learn import imitate
from jaxpt.train.optim import OptimConfig
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.program import Program
from jaxpt.types import Array, Params, Trajectory, bare_trajectory

BITS = 1 / np.log(2)  # bits per nat


@dataclass(frozen=True)
class PretrainConfig:
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    window: int = 256  # tokens of a row; the first is context only
    batch: int = 16  # rows of an update
    micro: int = 0  # rows per share of a batch, whose gradients are summed; 0: all at once
    every: int = 50  # updates between two looks at the held-out probe


def make_pretrain(cfg: PretrainConfig, layout: Layout = ONE, *, train: np.ndarray, probe_tokens: np.ndarray,
                  probe_counts: np.ndarray) -> Program:
    """Each step: `batch` windows at random places of `train` [N], one update of maximum likelihood.

    Metrics: bits (per byte of the batch), held_bits (per byte where probe_counts [W,T] is True, in the
    windows probe_tokens [W,T]), bytes (seen so far, with repeats), grad_norm.
    """
    if len(train) < cfg.window:
        raise ValueError(f"train: {len(train)} tokens, expected at least one window of {cfg.window}")
    model, train = make_model(cfg.model), jnp.asarray(train)

    def init(key, hyper, start=None):
        return common.start_state(cfg, model, key, hyper, start)

    def held_bits(params):
        bits = token_bits(model, params, jnp.asarray(probe_tokens))
        return {"held_bits": masked_sum(bits, jnp.asarray(probe_counts)) / np.sum(probe_counts)}

    def step(state):
        key = jax.random.fold_in(state["key"], state["step"])
        traj = as_trajectory(layout.spread(random_windows(key, train, layout.rows(cfg.batch), cfg.window)))
        state, loss, norm, measured = imitate(cfg, model, SFT, layout, state, traj)
        done = state["step"] + 1
        metrics = {
            "bits": experts.less_routers(loss, measured) * BITS, "grad_norm": norm,
            "bytes": done.astype(jnp.float32) * (cfg.batch * (cfg.window - 1)),
            **common.when_due(done, cfg.every, lambda: held_bits(common.kept_params(cfg, state))),
            **common.means(experts.watch({name: x for name, x in measured.items() if name.startswith("router_")})),
        }
        return {**state, "step": done}, metrics

    hyper = {"learning_rate": cfg.optim.learning_rate, **experts.leaves(cfg.model)}
    return Program(init, step, hyper, partial(common.kept_params, cfg))


def as_trajectory(tokens: Array) -> Trajectory:
    """Text as a batch of demonstrations: every token but a row's first is a decision to imitate."""
    mask = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :] > 0, tokens.shape)
    return bare_trajectory(tokens, mask)


def token_bits(model, params: Params, tokens: Array) -> Array:
    """[B,T] bits that each token costs given those before it in its row; 0 for a row's first."""
    hidden, _ = model.forward(params, tokens)
    return -BITS * token_stats(hidden, model.unembed(params), tokens)["logp"]


@dataclass(frozen=True)
class ScoreConfig:
    model: ModelConfig
    batch: int = 32  # windows of a step


def make_score(cfg: ScoreConfig, *, tokens: np.ndarray, unit: np.ndarray, units: int) -> Program:
    """Step i scores the i-th `batch` of the windows tokens [W,T]; ceil(W / batch) steps score them all.

    unit [W,T] says to which unit (0 ... units - 1) each token's bits are charged, -1 to none.
    Metrics: bits [units], which add up over the steps to the bits of each unit.
    """
    model = make_model(cfg.model)
    rows = [(0, -len(tokens) % cfg.batch), (0, 0)]
    tokens, unit = jnp.pad(tokens, rows), jnp.pad(unit, rows, constant_values=-1)

    def init(key, hyper, start=None):
        params = model.init(key) if start is None else start
        return {"params": params, "step": jnp.int32(0)}

    def step(state):
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, state["step"] * cfg.batch, cfg.batch)  # noqa: E731
        bits = token_bits(model, state["params"], take(tokens))
        charged = jnp.where(take(unit) < 0, units, take(unit))  # one bin more, for the tokens of no unit
        sums = jax.ops.segment_sum(bits.reshape(-1), charged.reshape(-1), units + 1)[:units]
        return {**state, "step": state["step"] + 1}, {"bits": sums}

    return Program(init, step, {}, lambda state: state["params"])


@dataclass(frozen=True)
class SampleConfig:
    model: ModelConfig
    length: int = 128  # tokens drawn after the prompt


def make_sample(cfg: SampleConfig, *, prompts: np.ndarray) -> Program:
    """Each step continues every row of prompts [R,Tp]. Metrics: tokens [R,Tp+length] (as drawn at
    `temperature`), logp: mean log-probability of the drawn tokens, in nats."""
    model, prompts = make_model(cfg.model), jnp.asarray(prompts, jnp.int32)
    whole = jnp.full(prompts.shape[0], prompts.shape[1])

    def init(key, hyper, start=None):
        params = model.init(key) if start is None else start
        return {"params": params, "key": key, "step": jnp.int32(0), "hyper": hyper}

    def step(state):
        keys = row_keys(jax.random.fold_in(state["key"], state["step"]), jnp.arange(prompts.shape[0]))
        draws = sampler(state["hyper"]["temperature"])
        drawn = complete(model, state["params"], prompts, whole, keys, draws, new=cfg.length)
        metrics = {"tokens": drawn.tokens, "logp": masked_mean(drawn.old_logp, drawn.mask)}
        return {**state, "step": state["step"] + 1}, metrics

    return Program(init, step, {"temperature": 1.0}, lambda state: state["params"])
