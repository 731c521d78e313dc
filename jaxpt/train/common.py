"""What the supervised and the policy program share: tasks, statistics of a batch, evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.envs.protocol import Environment
from jaxpt.models import Model
from jaxpt.objectives.row import Row
from jaxpt.ops.logprobs import token_stats
from jaxpt.ops.masked import count, keep, masked_sum
from jaxpt.ops.sampling import Chooser, greedy, row_keys, sampler
from jaxpt.rollout import generate
from jaxpt.train.optim import apply_update
from jaxpt.train.parallel import Layout
from jaxpt.types import Array, Metrics, Params, Trajectory

TASK, ROW, NOISE = 0, 1, 2  # what a step key is folded with: new tasks, the rows' own draws, reward noise
EVALUATION = 0x5EED  # key of the evaluation tasks: the same in every run, arm and seed


@dataclass(frozen=True)
class EnvConfig:
    name: str = "chain"
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the environment's constructor
    levels: tuple[int, int] = (1, 1)  # every task draws its level uniformly from this closed range

    def __post_init__(self):
        limit = self.make().spec.max_level
        low, high = self.levels
        if not 1 <= low <= high <= limit:
            raise ValueError(f"levels: got {low} to {high}, expected 1 <= low <= high <= {limit} for {self.name!r}")

    def make(self) -> Environment:
        return envs.make(self.name, **self.options)


@dataclass(frozen=True)
class EvalConfig:
    every: int = 10  # updates between two evaluations; the last update of a stage should be one
    tasks: int = 256  # fixed tasks, the same in every run; one greedy and one sampled episode each


def draw_tasks(env: Environment, levels: tuple[int, int], keys: Array) -> Any:
    """One task per key, its level uniform on the closed range."""

    def one(key):
        level_key, task_key = jax.random.split(key)
        return env.sample(task_key, jax.random.randint(level_key, (), levels[0], levels[1] + 1))

    return jax.vmap(one)(keys)


def with_coins(reward: Array, keys: Array, share: Array) -> Array:
    """Each row's reward, or with probability `share` a fair coin in its place. reward [B], keys [B]."""
    u = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    return jnp.where(u[:, 0] < share, (u[:, 1] < 0.5).astype(reward.dtype), reward)


def batch_stats(
    model: Model, params: Params, traj: Trajectory, want: tuple[str, ...], temperature: float | Array = 1.0
) -> dict[str, Array]:
    """token_stats of a batch's decisions under `params`, by one forward pass."""
    hidden, _ = model.forward(params, traj.tokens)
    return token_stats(
        hidden, model.unembed(params), traj.tokens, want=want, temperature=temperature, support=traj.support
    )


def loss_and_grad(
    model: Model, row: Row, params: Params, traj: Trajectory, ready: dict, extra: dict, hyper: dict,
    temperature: float | Array = 1.0,
) -> tuple[Array, Metrics, Params]:
    """Loss of one row on one batch (its share of the totals), its metrics, and the gradient."""

    def loss(params):
        stats = batch_stats(model, params, traj, ("logp", "entropy"), temperature)
        value, metrics = row.loss(
            stats["logp"], traj.old_logp, ready["advantages"], traj.mask, totals=ready["totals"], **extra, **hyper
        )
        entropy = jax.lax.stop_gradient(keep(stats["entropy"], traj.mask))
        return value, {**metrics, "entropy": (masked_sum(entropy, traj.mask), count(traj.mask))}

    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, metrics, grads


def finish_step(
    cfg: Any, model: Model, env: Environment, layout: Layout, cost: int, state: dict,
    loss: Array, metrics: Metrics, grads: Params,
) -> tuple[dict, dict[str, Array]]:
    """What ends every step: sums over shards, the update, the evaluation when it is due. -> (state, metrics).

    cfg has optim, env and eval; cost is the step's product FLOPs.
    """
    loss, metrics, grads = layout.total((loss, metrics, grads))
    rate = state["hyper"]["learning_rate"]
    params, opt_state, norm = apply_update(cfg.optim, rate, grads, state["opt"], state["params"])
    scores = evaluate_when_due(
        state["step"], cfg.eval, lambda: evaluate(model, params, env, cfg.env.levels, cfg.eval, layout)
    )
    done = state["step"] + 1
    out = {"loss": loss, "grad_norm": norm, "flops": cost * done.astype(jnp.float32), **means(metrics), **scores}
    return {**state, "params": params, "opt": opt_state, "step": done}, out


def evaluate(
    model: Model, params: Params, env: Environment, levels: tuple[int, int], cfg: EvalConfig, layout: Layout
) -> dict[str, Array]:
    """Two episodes of each fixed evaluation task, one greedy (greedy_*) and one drawn at temperature 1
    (sampled_*): mean gold, response length and truncation."""
    task_keys = row_keys(jax.random.key(EVALUATION), layout.rows(cfg.tasks))
    keys = row_keys(jax.random.fold_in(jax.random.key(EVALUATION), ROW), layout.rows(2 * cfg.tasks))

    draw = sampler()

    def choose(noise, logits):
        best, drawn = greedy.choose((), logits), draw.choose(noise, logits)
        first = jnp.arange(logits.shape[0]) % 2 == 0
        return jnp.where(first, best[0], drawn[0]), jnp.where(first, best[1], drawn[1]), None

    tasks = layout.spread(draw_tasks(env, levels, task_keys))
    traj = generate(model, params, env, tasks, keys, Chooser(draw.noise, choose), group=2)
    per_row = {
        "gold": traj.gold, "length": count(traj.mask, axis=1), "truncated": traj.truncated.astype(jnp.float32),
    }
    sums = {}
    for at, kind in enumerate(("greedy", "sampled")):
        sums |= {f"{kind}_{name}": jnp.sum(x[at::2]) for name, x in per_row.items()}
    return {name: value / cfg.tasks for name, value in layout.total(sums).items()}


def evaluate_when_due(step: Array, cfg: EvalConfig, run) -> dict[str, Array]:
    """run() after every `cfg.every` updates, NaN of the same shapes otherwise."""
    missing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), jax.eval_shape(run))
    return jax.lax.cond((step + 1) % cfg.every == 0, run, lambda: missing)


def means(metrics: Metrics) -> dict[str, Array]:
    """(sum, weight) pairs to means; NaN where nothing was weighed."""
    return {name: jnp.where(w > 0, s / jnp.where(w > 0, w, 1.0), jnp.nan) for name, (s, w) in metrics.items()}
