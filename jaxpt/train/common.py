"""What the supervised and the policy program share: tasks, statistics of a batch, evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.envs.protocol import Environment
from jaxpt.models import Model, ModelConfig
from jaxpt.models.lora import joined, moving
from jaxpt.ops.logprobs import token_stats
from jaxpt.ops.masked import at_least_float32, count, masked_sum
from jaxpt.ops.sampling import Chooser, greedy, row_keys, sampler
from jaxpt.rollout import generate
from jaxpt.train import experts
from jaxpt.train.optim import kept, start_optimizer
from jaxpt.train.parallel import Layout
from jaxpt.types import Array, Metrics, Params

# What a step key is folded with: new tasks, the rows' own draws, reward noise, evaluation; train.experts has one more.
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
    elsewhere: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # name -> further levels to be scored on

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
    params = model.init(key) if start is None else model.begin(key, jax.tree.map(jnp.copy, start))
    params, opt_state = start_optimizer(cfg.optim, params)
    counters = {"step": jnp.int32(0), "flops": jnp.float32(0)}
    return {"params": params, "opt": opt_state, "key": key, "hyper": hyper, **counters}


def kept_params(cfg: Any, state: Mapping[str, Any]) -> Params:
    """What evaluations and later stages see of a state."""
    return kept(cfg.optim, state["opt"], state["params"])


def level_leaves(cfg: EnvConfig) -> dict[str, float]:
    """The range of levels as leaves: a stage may train and score on another part of them."""
    return {"level_low": float(cfg.levels[0]), "level_high": float(cfg.levels[1])}


def levels_of(cfg: EnvConfig, hyper: Mapping[str, Array]) -> tuple[Array | int, Array | int]:
    """The range of levels: the leaves level_low and level_high where a program has them, else the config's."""
    if "level_low" not in hyper:
        return cfg.levels
    return hyper["level_low"].astype(jnp.int32), hyper["level_high"].astype(jnp.int32)


def draw_tasks(env: Environment, levels: tuple[Array | int, Array | int], keys: Array) -> Any:
    """One task per key, its level uniform on the closed range; a bound is one for all keys, or one per key."""

    def one(key, low, high):
        level_key, task_key = jax.random.split(key)
        return env.sample(task_key, jax.random.randint(level_key, (), low, high + 1))

    return jax.vmap(one)(keys, *(jnp.broadcast_to(jnp.asarray(bound), keys.shape) for bound in levels))


def with_coins(reward: Array, keys: Array, share: Array) -> Array:
    """Each row's reward, or with probability `share` a fair coin in its place. reward [B], keys [B]."""
    u = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    return jnp.where(u[:, 0] < share, (u[:, 1] < 0.5).astype(reward.dtype), reward)


def decision_stats(
    model: Model, params: Params, batch: Mapping[str, Array], want: tuple[str, ...], temperature: float | Array = 1.0
) -> dict[str, Array]:
    """token_stats of a batch's decisions under `params`, by one forward pass. batch: tokens [B,T], maybe support."""
    return measured_stats(model, params, batch, want, temperature)[0]


def measured_stats(
    model: Model, params: Params, batch: Mapping[str, Array], want: tuple[str, ...], temperature: float | Array = 1.0,
    routing: Mapping[str, Array] | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """decision_stats, and what layers with experts measured, being told `routing` (models.moe)."""
    hidden, aux = model.forward(params, batch["tokens"], routing=routing)
    return token_stats(
        hidden, model.unembed(params), batch["tokens"], want=want, temperature=temperature, support=batch.get("support")
    ), aux


def shares(batch: dict[str, Array], size: int) -> dict[str, Array]:
    """A batch's arrays [B, ...] as [n, size, ...]; rows of zeros, masked like everything there, fill the last share."""
    pad = -jax.tree.leaves(batch)[0].shape[0] % size
    widen = lambda x: jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    return jax.tree.map(lambda x: widen(x).reshape(-1, size, *x.shape[1:]), batch)


def accumulate(
    loss: Callable, params: Any, batch: dict[str, Array], micro: int, layout: Layout
) -> tuple[Array, Metrics, Any]:
    """Loss, metrics and gradient of `loss(params, batch) -> (loss, metrics)`, over shares of `micro` rows (0: all at
    once). A loss divides by the totals of the whole batch, so the shares' losses and gradients are summed, not
    averaged, and any size of share gives the same update. Every share is spread over all devices. Gradients are of
    the part of the parameters that moves (models.lora); shares' are summed in float32."""
    of_part = jax.value_and_grad(lambda moved, batch: loss(joined(params, moved), batch), has_aux=True)

    def once(part):
        (value, metrics), grads = of_part(moving(params), layout.tokens(part))
        return value, metrics, jax.tree.map(at_least_float32, grads)

    if micro == 0:
        return once(batch)
    parts = shares(batch, micro)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                        jax.eval_shape(lambda: once(jax.tree.map(lambda x: x[0], parts))))
    return jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, once(part)), None), zero, parts)[0]


def finish_step(
    cfg: Any, model: Model, env: Environment, layout: Layout, state: dict, cost: Array | float,
    loss: Array, norm: Array, metrics: Metrics,
) -> tuple[dict, dict[str, Array]]:
    """What ends every step: the count, the product FLOPs so far, the evaluation when it is due. cfg has env and
    eval; loss, norm and metrics are of the whole batch. -> (state, metrics)."""
    done = state["step"] + 1
    draws = jax.random.fold_in(jax.random.fold_in(state["key"], state["step"]), EVALUATION)
    scores = when_due(
        done, cfg.eval.every,
        lambda: evaluate(
            model, kept_params(cfg, state), env, cfg, levels_of(cfg.env, state["hyper"]), draws, layout, state.get("reference")
        ),
    )
    flops = state["flops"] + jnp.float32(cost)  # an int of more than 31 bits would be refused
    out = {"loss": loss, "grad_norm": norm, "flops": flops, **means(experts.watch(metrics)), **scores}
    return {**state, "step": done, "flops": flops}, out


def evaluate(
    model: Model, params: Params, env: Environment, cfg: Any, levels: tuple, key: Array, layout: Layout,
    reference: Params | None = None,
) -> dict[str, Array]:
    """Two episodes of each evaluation task, one greedy (greedy_*) and one drawn at temperature 1 (sampled_*):
    mean gold, response length and truncation, parts of the reward, and events per episode of every signal; with the
    suffix _name of as many tasks of each range of levels in cfg.eval.elsewhere. sampled_drift, where there is a
    reference: log policy / reference of the drawn responses, whose mean is the KL of whole sequences in nats.

    Tasks are the same in every run; draws come from the run's key, so that seeds do not share their errors.
    """
    ranges = {"": levels} | {f"_{name}": each for name, each in cfg.eval.elsewhere.items()}
    rows = layout.rows(cfg.eval.tasks)
    task_keys = row_keys(jax.random.fold_in(jax.random.key(EVALUATION), TASK), jnp.tile(rows, len(ranges)))
    bounds = [jnp.repeat(jnp.array(each), rows.size) for each in zip(*ranges.values(), strict=True)]
    tasks = layout.spread(draw_tasks(env, tuple(bounds), task_keys))
    rows = layout.rows(2 * cfg.eval.tasks)
    keys = row_keys(key, jnp.concatenate([2 * cfg.eval.tasks * i + rows for i in range(len(ranges))]))
    draw = sampler()

    def choose(noise, logits):
        best, drawn = greedy.choose((), logits), draw.choose(noise, logits)
        first = jnp.arange(logits.shape[0]) % 2 == 0
        return jnp.where(first, best[0], drawn[0]), jnp.where(first, best[1], drawn[1]), None

    traj = generate(model, params, env, tasks, keys, Chooser(draw.noise, choose), group=2)
    per_row = {
        "gold": traj.gold, "length": count(traj.mask, axis=1), "truncated": traj.truncated.astype(jnp.float32),
        **dict(zip(env.spec.parts, traj.parts.T, strict=True)),
        **dict(zip(env.spec.signals, jnp.sum(traj.signals, axis=1).T, strict=True)),
    }
    sums = {}
    for name, x in per_row.items():
        pairs = jnp.sum(x.reshape(len(ranges), -1, 2), axis=1)  # of each range, greedy and drawn
        sums |= {f"{kind}_{name}{suffix}": pairs[i, at] for i, suffix in enumerate(ranges)
                 for at, kind in enumerate(("greedy", "sampled"))}
    if reference is not None:
        drawn = {"tokens": traj.tokens, "mask": traj.mask, "logp": traj.old_logp}
        drawn = jax.tree.map(lambda x: x[1 : rows.size : 2], drawn)
        ref_logp = decision_stats(model, joined(params, reference), drawn, ("logp",))["logp"]
        sums["sampled_drift"] = masked_sum(drawn["logp"] - ref_logp, drawn["mask"])
    return {name: value / cfg.eval.tasks for name, value in layout.total(sums).items()}


def when_due(done: Array, every: int, run: Callable) -> dict[str, Array]:
    """run() after every `every` updates, NaN of the same shapes otherwise."""
    run = jax.jit(run)  # traced once for its shapes and its branch
    missing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), jax.eval_shape(run))
    return jax.lax.cond(done % every == 0, run, lambda: missing)


def means(metrics: Metrics) -> dict[str, Array]:
    """(sum, weight) pairs to means; NaN where nothing was weighed."""
    return {name: jnp.where(w > 0, s / jnp.where(w > 0, w, 1.0), jnp.nan) for name, (s, w) in metrics.items()}
