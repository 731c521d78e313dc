"""Pre-training on text of several domains (data.domains), fresh in every batch, measured against the exact optimum.

What is reported is excess: nats per token above one who knows the tables. On the same tokens, so most of the noise of the
text cancels. With experts: how loads and domains go together, and what is lost when experts are killed.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxpt.data.domains import draw_rows, draw_tables, optimal_logp
from jaxpt.models import Model, ModelConfig, make_model
from jaxpt.objectives.supervised import SFT
from jaxpt.ops.balance import information
from jaxpt.ops.sampling import row_keys
from jaxpt.train import common, experts
from jaxpt.train.learn import imitate
from jaxpt.train.optim import OptimConfig
from jaxpt.train.parallel import ONE, Layout
from jaxpt.train.pretrain import as_trajectory
from jaxpt.train.program import Program
from jaxpt.types import Array, Params

WORLD = 2**31 - 3  # what a run's key is folded with for its tables; steps stay below it


@dataclass(frozen=True, kw_only=True)
class DomainsConfig:
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    domains: int = 6
    sharpness: float = 2.0  # deviation of the transitions' logits
    world: int = 0  # which tables of a run's key: a second stage may go to another world
    window: int = 32  # tokens of a row; the first is context only
    batch: int = 16
    micro: int = 0
    every: int = 50  # updates between two evaluations
    eval_rows: int = 64  # fixed for a run
    kill: bool = False  # also evaluate with each expert dead in turn
    other: int | None = None  # also evaluate in that world: what was forgotten

    def __post_init__(self):
        common.check_positive(self, "domains", "sharpness", "batch", "every", "eval_rows")
        if self.window < 2:
            raise ValueError(f"window: got {self.window!r}, expected at least 2")
        if self.kill and (self.model.moe is None or self.model.moe.experts <= self.model.moe.top_k):
            raise ValueError("kill: expected a model with more experts than a token uses")


def make_domains(cfg: DomainsConfig, layout: Layout = ONE) -> Program:
    """Each step: `batch` rows, one update of maximum likelihood.

    Metrics: excess of the batch; router_*, load_* (train.experts); and when due, on rows never trained on:
      held        excess; of expert choice, with the pool that a decoder has; fit is -held, for sweeps
      held_leaky  the same with the pool of training (the same number where tokens choose)
      information of domains and experts, in nats, of the layer that has most
      killed      excess, the mean over experts, each dead in all layers
      held_other  excess in the world `other`
    """
    model = make_model(cfg.model)
    causal = model
    if cfg.model.moe is not None and cfg.model.moe.choice == "expert":
        causal = make_model(replace(cfg.model, moe=replace(cfg.model.moe, pool="position")))

    def tables(key: Array, world: int) -> Array:
        return draw_tables(jax.random.fold_in(jax.random.fold_in(key, WORLD), world), cfg.domains, cfg.model.vocab, cfg.sharpness)

    def init(key, hyper, start=None):
        return common.start_state(cfg, model, key, hyper, start)

    def held(state, world):
        rows = row_keys(jax.random.fold_in(jax.random.fold_in(state["key"], WORLD), 1_000 + world), jnp.arange(cfg.eval_rows))
        known = tables(state["key"], world)
        tokens, domain = draw_rows(known, rows, cfg.window)
        return tokens, domain, optimal_logp(known, tokens)[:, 1:]

    def evaluate(state):
        params, (tokens, domain, best) = common.kept_params(cfg, state), held(state, cfg.world)
        logp, aux = token_logp(causal, params, tokens)
        out = {"held": jnp.mean(best - logp)}
        out["fit"] = -out["held"]
        out["held_leaky"] = out["held"] if causal is model else jnp.mean(best - token_logp(model, params, tokens)[0])
        if "routes" in aux:
            counts = jax.vmap(lambda r: joint_counts(domain, r, cfg.domains, cfg.model.moe.experts))(aux["routes"])
            out["information"] = jnp.max(jax.vmap(information)(counts))
        if cfg.kill:
            def without(expert):
                alive = jnp.broadcast_to(jnp.arange(cfg.model.moe.experts) != expert, (cfg.model.depth, cfg.model.moe.experts))
                return jnp.mean(best - token_logp(causal, params, tokens, {"alive": alive})[0])

            out["killed"] = jnp.mean(jax.lax.map(without, jnp.arange(cfg.model.moe.experts)))
        if cfg.other is not None:
            tokens, _, best = held(state, cfg.other)
            out["held_other"] = jnp.mean(best - token_logp(causal, params, tokens)[0])
        return out

    def step(state):
        world, step_key = tables(state["key"], cfg.world), jax.random.fold_in(state["key"], state["step"])
        tokens, _ = draw_rows(world, row_keys(jax.random.fold_in(step_key, common.TASK), layout.rows(cfg.batch)), cfg.window)
        state, loss, norm, measured = imitate(cfg, model, SFT, layout, state, as_trajectory(layout.spread(tokens)))
        best = layout.total(jnp.sum(optimal_logp(world, tokens)[:, 1:])) / (cfg.batch * (cfg.window - 1))
        routers = {name: x for name, x in measured.items() if name.startswith("router_")}
        metrics = {"excess": experts.less_routers(loss, measured) + best, "grad_norm": norm, **common.means(experts.watch(routers))}
        done = state["step"] + 1
        return {**state, "step": done}, {**metrics, **common.when_due(done, cfg.every, lambda: evaluate(state))}

    hyper = {"learning_rate": cfg.optim.learning_rate, **experts.leaves(cfg.model)}
    return Program(init, step, hyper, partial(common.kept_params, cfg))


def token_logp(model: Model, params: Params, tokens: Array, routing: dict | None = None) -> tuple[Array, dict]:
    """[B,T-1] log-probability of each token but the first of a row, and what the layers measured."""
    stats, aux = common.measured_stats(model, params, {"tokens": tokens}, ("logp",), routing=routing)
    return stats["logp"][:, 1:], aux


def joint_counts(domain: Array, routes: Array, domains: int, count: int) -> Array:
    """[G,E]: how often tokens of each domain [B] went to each expert, routes [B,T,k]."""
    used = jax.nn.one_hot(routes, count).sum(axis=(1, 2))
    return jax.nn.one_hot(domain, domains).T @ used
