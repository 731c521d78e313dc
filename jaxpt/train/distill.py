"""A student learns from a teacher, from a verifier, or from one after the other, on texts that either has drawn.

Texts of the teacher make offline distillation (on its tokens: sequence_kd; on its distributions: forward_kl), texts of the
student make on-policy distillation (reverse_kl; opd with sampled tokens alone) and policy gradients. A teacher may read the
texts behind other prompts of the same tasks than the student's (`seen`): prompts that tell it the answer, say, so that the
student can be its own teacher.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from jaxpt.models import Model, ModelConfig, make_model
from jaxpt.objectives import get
from jaxpt.objectives.distillation import annealed
from jaxpt.ops.logprobs import decision_logits, token_stats
from jaxpt.ops.masked import weighed
from jaxpt.ops.sampling import row_keys, sampler
from jaxpt.rollout import generate
from jaxpt.train import common
from jaxpt.train.budget import rollout_flops, scoring_flops, update_flops
from jaxpt.train.optim import OptimConfig, apply_update
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.program import Program
from jaxpt.types import Array, Params

TEACHER = 2**31 - 2  # what a run's key is folded with for a teacher's fresh parameters; steps stay below it
COMPUTED = ("logp", "ref_logp", "entropy")  # of what rows of tokens need


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    env: common.EnvConfig = field(default_factory=common.EnvConfig)
    model: ModelConfig  # the student
    teacher: ModelConfig
    seen: common.EnvConfig | None = None  # whose prompts the teacher reads before a text; None: the student's
    optim: OptimConfig = field(default_factory=OptimConfig)
    objectives: tuple[str, ...] = ("reverse_kl",)  # rows whose losses are weighed and summed
    prompts: int = 32  # tasks per update
    group: int = 8  # texts of each
    micro: int = 0  # texts per share of a batch, whose gradients are summed; 0: all at once
    eval: common.EvalConfig = field(default_factory=common.EvalConfig)

    def __post_init__(self):
        for name in self.objectives:
            further = [what for what in get(name).needs if what not in COMPUTED]
            if further:
                raise ValueError(f"objectives: {name!r} needs {further[0]}, which this program does not compute")
        common.check_positive(self, "prompts", "group")
        for model in (self.model, self.teacher):
            common.check_vocab(model, self.env)
        if self.seen and self.seen.make().spec.response_len != self.env.make().spec.response_len:
            raise ValueError("seen: expected an environment with responses as long as those of env")

    def arm(self, start: Mapping[str, float], end: Mapping[str, float] | None = None, **leaves: float) -> dict[str, float]:
        """Leaves: the weights of rows at the first update, and of an arm that moves, at update `anneal` and beyond."""
        end = start if end is None else end
        for name in {*start, *end} - set(self.objectives):
            raise ValueError(f"arm: {name!r} is none of the program's rows, {', '.join(self.objectives)}")
        weights = {f"weight_{name}": start.get(name, 0.0) for name in self.objectives}
        return weights | {f"end_{name}": end.get(name, 0.0) for name in self.objectives} | leaves


def make_distill(cfg: DistillConfig, layout: Layout = ONE) -> Program:
    """Each step: tasks, texts, one update. Begins from (the student's parameters, the teacher's). What the teacher writes
    itself it writes behind the student's prompts, also where it reads others.

    Leaves: own (1: texts of the student, 0: of the teacher); pool (tasks in all, in turn, 0: new ones for every update; the
    teacher's texts of a pool are drawn once); anneal, weight_ROW, end_ROW (the rows' weights, on a straight line).
    """
    env, model, teacher = cfg.env.make(), make_model(cfg.model), make_model(cfg.teacher)
    seen = env if cfg.seen is None else cfg.seen.make()
    rows = [get(name) for name in cfg.objectives]
    of_distributions = [row for row in rows if row.family == "distillation"]
    of_tokens = [row for row in rows if row.family != "distillation"]

    def init(key, hyper, start=None):
        begun, master = (None, None) if start is None else start
        drawn = lambda: teacher.init(jax.random.fold_in(key, TEACHER))  # noqa: E731
        known = drawn() if master is None else jax.tree.map(jnp.copy, master)
        return {**common.start_state(cfg, model, key, hyper, begun), "teacher": known}

    def texts(state):
        hyper, key, numbers = state["hyper"], state["key"], layout.rows(cfg.prompts)
        pool, own = hyper["pool"].astype(jnp.int32), hyper["own"] > 0
        at = lambda once: jax.random.fold_in(key, jnp.where(once, 0, state["step"]))  # noqa: E731
        turn = lambda x: jnp.where(pool > 0, (state["step"] * cfg.prompts + x) % jnp.maximum(pool, 1), x)  # noqa: E731
        task_keys = row_keys(jax.random.fold_in(at(pool > 0), common.TASK), turn(numbers))
        tasks = layout.spread(common.draw_tasks(env, cfg.env.levels, task_keys))
        task, member = jnp.divmod(layout.rows(cfg.prompts * cfg.group), cfg.group)
        keys = row_keys(jax.random.fold_in(at((pool > 0) & ~own), common.ROW), turn(task) * cfg.group + member)
        drawn = lambda model, params: lambda: generate(model, params, env, tasks, keys, sampler(), cfg.group)  # noqa: E731
        return tasks, jax.lax.cond(own, drawn(model, state["params"]), drawn(teacher, state["teacher"]))

    def read(params, tasks, tokens):
        """What the teacher says of the responses in `tokens`, at the places of the student's rows."""
        if cfg.seen is None:
            return decisions(teacher, params, tokens)
        n = jax.vmap(env.prompt)(tasks)[1]
        other, m = jax.vmap(seen.prompt)(tasks)
        by_group = lambda x: jnp.repeat(x, cfg.group, axis=0)  # noqa: E731
        moved, at = behind(tokens, by_group(n), by_group(other), by_group(m), seen.spec.prompt_len + seen.spec.response_len)
        stats, logits = decisions(teacher, params, moved)
        back = lambda x: jnp.take_along_axis(x, at.reshape(at.shape + (1,) * (x.ndim - 2)), axis=1)  # noqa: E731
        return jax.tree.map(back, stats), back(logits)

    def step(state):
        hyper = state["hyper"]
        tasks, traj = texts(state)
        known, told = read(state["teacher"], tasks, traj.tokens)
        batch = {"tokens": traj.tokens, "mask": traj.mask, "old_logp": traj.old_logp, "ref_logp": known["logp"], "told": told}
        totals = {}
        for row in of_tokens:
            ready = row.prepare(traj, total=layout.total, ref_logp=known["logp"])
            totals[row.name] = ready["totals"]
            batch |= {f"{row.name}_{field}": ready[field] for field in ("advantages", "mask")}
        for row in of_distributions:
            totals[row.name] = row.prepare({"mask": traj.mask}, total=layout.total)["totals"]
        weight = {row.name: annealed(state["step"], hyper["anneal"], hyper[f"weight_{row.name}"], hyper[f"end_{row.name}"], 1.0)
                  for row in rows}

        def loss(params, part):
            now, logits = decisions(model, params, part["tokens"])
            metrics, value = {"entropy": weighed(now["entropy"], part["mask"])}, 0.0
            for row in of_tokens:
                advantages, mask = (part[f"{row.name}_{field}"] for field in ("advantages", "mask"))
                value += weight[row.name] * row.loss(
                    now["logp"], part["old_logp"], advantages, mask, totals=totals[row.name], ref_logp=part["ref_logp"],
                    entropy=now["entropy"],
                )[0]
            for row in of_distributions:
                divergence, measured = row.loss(logits, part["told"], part["mask"], totals=totals[row.name])
                value += weight[row.name] * divergence
                metrics |= {row.name: measured["divergence"], "agreement": measured["agreement"]}
            return value, metrics

        value, metrics, grads = layout.total(common.accumulate(loss, state["params"], batch, cfg.micro, layout))
        params, opt, norm = apply_update(cfg.optim, hyper["learning_rate"], grads, state["opt"], state["params"])
        state = {**state, "params": params, "opt": opt}
        return common.finish_step(cfg, model, env, layout, state, flops(hyper), value, norm, metrics)

    def flops(hyper):
        """Of one step: drawing, the teacher's reading where a row in use asks for it, the update."""
        spec, size = env.spec, cfg.prompts * cfg.group
        drawn = [float(rollout_flops(m, spec, cfg.prompts, cfg.group)) for m in (cfg.model, cfg.teacher)]
        reading = [row.name for row in rows if row in of_distributions or "ref_logp" in row.needs]
        read = sum(hyper[f"{part}_{name}"] for name in reading for part in ("weight", "end"))
        scored = jnp.where(read > 0, float(scoring_flops(cfg.teacher, seen.spec, size)), 0.0)
        return jnp.where(hyper["own"] > 0, *drawn) + scored + float(update_flops(cfg.model, spec, size))

    first = {cfg.objectives[0]: 1.0}
    hyper = {"learning_rate": cfg.optim.learning_rate, **cfg.arm(first, own=1.0, pool=0.0, anneal=1.0)}
    return Program(init, step, hyper, partial(common.kept_params, cfg))


def decisions(model: Model, params: Params, tokens: Array) -> tuple[dict[str, Array], Array]:
    """token_stats' logp and entropy [B,T], and the logits [B,T,V] that decide tokens[:, t]; 0 at index 0."""
    hidden, _ = model.forward(params, tokens)
    W = model.unembed(params)
    return token_stats(hidden, W, tokens, want=("logp", "entropy")), decision_logits(hidden, W)


def behind(tokens: Array, n: Array, prompts: Array, m: Array, width: int) -> tuple[Array, Array]:
    """Responses behind other prompts. tokens [B,T], a row's response beginning at n [B]; prompts [B,P], m [B] long
    -> rows [B,width], 0 where nothing stands, and where the response token at t of a row of `tokens` stands there [B,T]."""
    shift, last = (m - n)[:, None], tokens.shape[1] - 1
    at = jnp.arange(width)[None]
    response = jnp.take_along_axis(tokens, jnp.clip(at - shift, 0, last), axis=1)
    prompt = jnp.pad(prompts, ((0, 0), (0, width - prompts.shape[1])))
    moved = jnp.where(at < m[:, None], prompt, jnp.where(at - shift <= last, response, 0))
    return moved, jnp.clip(jnp.arange(last + 1)[None] + shift, 0, width - 1)
