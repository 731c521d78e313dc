"""What the supervised and the policy program share: tasks, statistics of a batch, evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.envs.protocol import Environment
from jaxpt.models import Model, ModelConfig
from jaxpt.objectives.row import Row
from jaxpt.ops.logprobs import token_stats
from jaxpt.ops.masked import count, keep, masked_sum
from jaxpt.ops.sampling import Chooser, greedy, row_keys, sampler
from jaxpt.rollout import generate
from jaxpt.train.optim import apply_update, make_optimizer
from jaxpt.train.parallel import Layout
from jaxpt.types import Array, Metrics, Params, Trajectory

# What a step key is folded with: new tasks, the rows' own draws, reward noise, evaluation.
TASK, ROW, NOISE, EVALUATION = range(4)


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

    def __post_init__(self):
        check_positive(self, "every")


def check_positive(cfg: Any, *fields: str) -> None:
    """ValueError, naming the field, where one of them is not above 0."""
    for name in fields:
        if not getattr(cfg, name) > 0:
            raise ValueError(f"{name}: got {getattr(cfg, name)!r}, expected a number above 0")


def check_vocab(model: ModelConfig, env: EnvConfig) -> None:
    need = env.make().spec.vocab
    if model.vocab < need:
        raise ValueError(f"model.vocab: got {model.vocab}, expected at least {need}, the tokens of {env.name!r}")


def start_state(cfg: Any, model: Model, key: Array, hyper: Mapping[str, Array], start: Params | None) -> dict:
    """The state before the first update. `start` is copied: a state is donated, its parent's parameters are
    not."""
    params = model.init(key) if start is None else jax.tree.map(jnp.copy, start)
    opt_state = make_optimizer(cfg.optim).init(params)
    return {"params": params, "opt": opt_state, "key": key, "step": jnp.int32(0), "hyper": hyper}


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
    done = state["step"] + 1
    draws = jax.random.fold_in(jax.random.fold_in(state["key"], state["step"]), EVALUATION)
    scores = when_due(done, cfg.eval.every, lambda: evaluate(model, params, env, cfg, draws, layout))
    flops = float(cost) * done.astype(jnp.float32)
    out = {"loss": loss, "grad_norm": norm, "flops": flops, **means(metrics), **scores}
    return {**state, "params": params, "opt": opt_state, "step": done}, out


def evaluate(
    model: Model, params: Params, env: Environment, cfg: Any, key: Array, layout: Layout
) -> dict[str, Array]:
    """Two episodes of each evaluation task, one greedy (greedy_*) and one drawn at temperature 1 (sampled_*):
    mean gold, response length and truncation.

    Tasks are the same in every run; draws come from the run's key, so that seeds do not share their errors.
    """
    task_keys = row_keys(jax.random.fold_in(jax.random.key(EVALUATION), TASK), layout.rows(cfg.eval.tasks))
    tasks = layout.spread(draw_tasks(env, cfg.env.levels, task_keys))
    keys = row_keys(key, layout.rows(2 * cfg.eval.tasks))
    draw = sampler()

    def choose(noise, logits):
        best, drawn = greedy.choose((), logits), draw.choose(noise, logits)
        first = jnp.arange(logits.shape[0]) % 2 == 0
        return jnp.where(first, best[0], drawn[0]), jnp.where(first, best[1], drawn[1]), None

    traj = generate(model, params, env, tasks, keys, Chooser(draw.noise, choose), group=2)
    per_row = {
        "gold": traj.gold, "length": count(traj.mask, axis=1), "truncated": traj.truncated.astype(jnp.float32),
    }
    sums = {}
    for at, kind in enumerate(("greedy", "sampled")):
        sums |= {f"{kind}_{name}": jnp.sum(x[at::2]) for name, x in per_row.items()}
    return {name: value / cfg.eval.tasks for name, value in layout.total(sums).items()}


def when_due(done: Array, every: int, run: Callable) -> dict[str, Array]:
    """run() after every `every` updates, NaN of the same shapes otherwise."""
    missing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), jax.eval_shape(run))
    return jax.lax.cond(done % every == 0, run, lambda: missing)


def means(metrics: Metrics) -> dict[str, Array]:
    """(sum, weight) pairs to means; NaN where nothing was weighed."""
    return {name: jnp.where(w > 0, s / jnp.where(w > 0, w, 1.0), jnp.nan) for name, (s, w) in metrics.items()}
