"""From a batch of episodes to updates: passes, minibatches, shares with exact totals, the critic beside the policy."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpt.models import Model
from jaxpt.objectives.reduction import totals_of
from jaxpt.objectives.row import Row
from jaxpt.objectives.value import clipped_value_loss
from jaxpt.ops.logprobs import token_stats
from jaxpt.ops.masked import weighed
from jaxpt.train import experts
from jaxpt.train.common import accumulate, measured_stats
from jaxpt.train.critic import critic_values
from jaxpt.train.optim import apply_update
from jaxpt.train.parallel import Layout
from jaxpt.train.rows import follow, own, when
from jaxpt.types import Array, Metrics, Trajectory


def imitate(
    cfg: Any, model: Model, row: Row, layout: Layout, state: dict, traj: Trajectory
) -> tuple[dict, Array, Array, Metrics]:
    """One update of a supervised row on a batch of demonstrations. -> (state, loss, gradient norm, metrics).

    cfg has optim and micro.
    """
    ready = row.prepare(traj, total=layout.total, **own(row, state["hyper"]))
    batch = {"tokens": traj.tokens, "mask": ready["mask"], "advantages": ready["advantages"]}
    told = experts.told(cfg.model, state)

    def loss(params, batch):
        now, aux = measured_stats(model, params, batch, ("logp", "entropy"), routing=told)
        value, metrics = row.loss(
            now["logp"], now["logp"], batch["advantages"], batch["mask"], totals=ready["totals"], **own(row, state["hyper"])
        )
        metrics = {**metrics, "entropy": weighed(now["entropy"], batch["mask"])}
        return experts.with_routers(value, metrics, state["hyper"], aux, batch["mask"], ready["totals"])

    loss, metrics, grads = layout.total(accumulate(loss, state["params"], batch, cfg.micro, layout))
    params, opt, norm = apply_update(cfg.optim, state["hyper"]["learning_rate"], grads, state["opt"], state["params"])
    params = experts.rebalanced(cfg.model, params, metrics, state["hyper"])
    return {**state, "params": params, "opt": opt}, loss, norm, metrics


def learn(
    cfg: Any, model: Model, rows: list[Row], layout: Layout, state: dict, traj: Trajectory, ready: dict, stats: dict,
    sampler_logp: Array,
) -> tuple[dict, Array, Array, Metrics]:
    """epochs x minibatches updates of the policy and, where a row needs one, the critic.

    ready, stats: what `prepare` made and what it was given; sampler_logp [B,T]: under whoever drew the episodes.
    -> (state, mean loss, mean gradient norm, metrics).
    """
    batch = {
        "tokens": traj.tokens, "length": traj.length, "old_logp": traj.old_logp, "sampler_logp": sampler_logp,
        "mask": ready["mask"], "advantages": ready["advantages"], "prompt_tokens": ready["prompt_tokens"],
    }
    batch |= {"support": traj.support} if traj.support is not None else {}
    batch |= {"ref_logp": stats["ref_logp"]} if "ref_logp" in stats else {}
    batch |= {"returns": ready["returns"], "old_values": stats["values"]} if "values" in stats else {}
    batch |= {"routes": stats["routes"]} if "routes" in stats else {}
    parts = _minibatches(batch, cfg.group, cfg.minibatches)

    def update(state, number):
        part = jax.tree.map(lambda x: x[number % cfg.minibatches], parts)
        totals = layout.total(totals_of(part["mask"], part["prompt_tokens"]))
        trained = {name: state[name] for name in ("params", "critic") if name in state}
        loss = lambda trained, part: _loss(cfg, model, rows, state["hyper"], totals, trained, part)  # noqa: E731
        loss, metrics, grads = layout.total(accumulate(loss, trained, part, cfg.micro, layout))
        new, norm = _descend(cfg, state, trained, grads, metrics)
        return {**state, **new}, (loss, norm, metrics)

    state, (loss, norm, metrics) = jax.lax.scan(update, state, jnp.arange(cfg.epochs * cfg.minibatches))
    return state, jnp.mean(loss), jnp.mean(norm), jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)


def _minibatches(batch: dict[str, Array], group: int, count: int) -> dict[str, Array]:
    """[B, ...] -> [count, B / count, ...] of whole groups: minibatch k has the groups k, k + count, ... Tasks are
    drawn anew for every batch, so any fixed choice is a random one; and this one is the same on any number of
    devices that keeps whole rounds of groups together."""

    def split(x):
        dealt = x.reshape(-1, count, group, *x.shape[1:])
        return jnp.swapaxes(dealt, 0, 1).reshape(count, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def _loss(cfg, model, rows, hyper, totals, trained, part) -> tuple[Array, Metrics]:
    """The followed row's loss on a share of a minibatch, plus value_coef times the critic's."""
    mask = part["mask"]
    hidden, aux = model.forward(trained["params"], part["tokens"], routing=experts.replayed(hyper, part))
    now = token_stats(
        hidden, model.unembed(trained["params"]), part["tokens"], want=("logp", "entropy"),
        temperature=cfg.temperature, support=part.get("support"),
    )

    def policy_loss(row):
        def run(logp, entropy, part, totals):
            return row.loss(
                logp, part["old_logp"], part["advantages"], mask, totals=totals, ref_logp=part.get("ref_logp"),
                entropy=entropy, sampler_logp=part["sampler_logp"], prompt_tokens=part["prompt_tokens"], **own(row, hyper),
            )

        return run

    value, metrics = follow(rows, hyper, policy_loss, now["logp"], now["entropy"], part, totals)
    metrics = {**metrics, "entropy": weighed(now["entropy"], mask), **experts.flips(aux, part, now["logp"])}
    value, metrics = experts.with_routers(value, metrics, hyper, aux, mask, totals)
    if "critic" not in trained:
        return value, metrics

    def critic_loss(trained, hidden):
        values, _ = critic_values(cfg.critic, model, trained["critic"], hidden, part["tokens"], part["length"])
        return clipped_value_loss(
            values, part["old_values"], part["returns"], mask, totals=totals, value_clip=hyper["value_clip"]
        )

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(critic_loss, trained, hidden))
    critic, critic_metrics = when(
        rows, hyper, lambda row: "values" in row.needs, critic_loss, lambda *_: nothing, trained, hidden
    )
    return value + hyper["value_coef"] * critic, {**metrics, **critic_metrics}


def _descend(cfg, state, trained, grads, metrics) -> tuple[dict, Array]:
    """One update of each tree by its own optimizer. -> (what changes in the state, the policy's gradient norm)."""
    params, opt, norm = apply_update(cfg.optim, state["hyper"]["learning_rate"], grads["params"], state["opt"], trained["params"])
    new = {"params": experts.rebalanced(cfg.model, params, metrics, state["hyper"]), "opt": opt}
    if "critic" in trained:
        new["critic"], new["critic_opt"], _ = apply_update(
            cfg.critic.optim, state["hyper"]["critic_rate"], grads["critic"], state["critic_opt"], trained["critic"]
        )
    return new, norm
