"""One run of a scaling ladder: pre-training whose length is a number and no shape.

All lengths of one size share a compilation, which on a CPU costs more than many a rung.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.data.text import random_windows
from jaxpt.models import ModelConfig, make_model
from jaxpt.models.counts import forward_flops
from jaxpt.objectives.supervised import SFT
from jaxpt.ops.masked import masked_sum
from jaxpt.train import common
from jaxpt.train.learn import imitate
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.pretrain import BITS, PretrainConfig, as_trajectory, token_bits
from jaxpt.train.program import Program

WARMUP = 0.05  # share of the updates: a fixed number would be too long for the short runs (Porian et al. 2024)


def make_rung(cfg: PretrainConfig, layout: Layout = ONE, *, train: np.ndarray, probe_tokens: np.ndarray,
              probe_counts: np.ndarray) -> Program:
    """`updates` updates of maximum likelihood on random windows of train [N], the rate rising over the first 5% and
    falling linearly to 0 at the end; cfg.optim's schedule and cfg.every are not used.

    Metrics: loss (nats per byte of the batch), held (nats per byte where probe_counts [W,T] is True, after the last
    update, else NaN), tokens and flops (of the products, forward and backward) so far.
    """
    model, train = make_model(cfg.model), jnp.asarray(train)
    tokens = cfg.batch * (cfg.window - 1)
    flops = float(update_flops(cfg.model, cfg.batch, cfg.window))  # an int of more than 31 bits would be refused

    def init(key, hyper, start=None):
        return common.start_state(cfg, model, key, hyper, start)

    def held(params):
        bits = token_bits(model, params, jnp.asarray(probe_tokens))
        return {"held": masked_sum(bits, jnp.asarray(probe_counts)) / np.sum(probe_counts) / BITS}

    def step(state):
        key, hyper = jax.random.fold_in(state["key"], state["step"]), state["hyper"]
        traj = as_trajectory(layout.spread(random_windows(key, train, layout.rows(cfg.batch), cfg.window)))
        now = {**hyper, "learning_rate": hyper["learning_rate"] * share(state["step"], hyper["updates"])}
        state, loss, _, _ = imitate(cfg, model, SFT, layout, {**state, "hyper": now}, traj)
        done = state["step"] + 1
        metrics = {
            "loss": loss, "tokens": done.astype(jnp.float32) * tokens, "flops": done.astype(jnp.float32) * flops,
            **common.when_due(done, hyper["updates"].astype(jnp.int32), lambda: held(common.kept_params(cfg, state))),
        }
        return {**state, "hyper": hyper, "step": done}, metrics

    hyper = {"learning_rate": cfg.optim.learning_rate, "updates": 100.0}
    return Program(init, step, hyper, partial(common.kept_params, cfg))


def share(step: jax.Array, updates: jax.Array) -> jax.Array:
    """Of the peak rate, for update number `step` (0, 1, ...) of `updates`."""
    done = (step + 1) / updates
    return jnp.minimum(done / WARMUP, (1 - done + 1 / updates) / (1 - WARMUP)).clip(0, 1)


def update_flops(cfg: ModelConfig, batch: int, window: int) -> int:
    """FLOPs of the products of one update: a backward pass counts twice a forward one."""
    return 3 * (forward_flops(cfg, batch, window) + 2 * batch * window * cfg.d_model * cfg.vocab)
