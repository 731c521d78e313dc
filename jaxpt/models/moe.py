"""The mixture of experts that may stand in the place of a layer's SwiGLU: router, experts, shared experts.

What the layer measures on the way (`aux`), for the losses of ops.balance and for whoever watches:
    balance, sequence_balance, z   the three losses, not yet weighed
    load [E]                       share of the assignments of each expert
    dropped                        share of assignments without a place; of expert choice, tokens that nobody took
    largest_logit                  of the router
    routes [B,T,k]                 the experts of each token (not where experts choose)
    route_logp [B,T]               where routes are drawn, the log-probability of each token's

What a forward pass may be told (`routing`, a dict; all are optional):
    key                            for jitter and dropout, one typed key
    jitter                         the router reads x times uniform(1 - jitter, 1 + jitter) (Switch, arXiv:2101.03961)
    dropout                        each expert is off with this probability, for whole rows
    alive [L,E]                    which experts may be used at all
    routes [L,B,T,k]               the experts to use: a choice made earlier, replayed (Ma et al. 2025, arXiv:2510.11370);
                                   where negative, the token chooses
    bias [L,E]                     in the place of the parameters' own
    draw                           times Gumbel noise (from `key`) on the logits that choose: 1 draws routes as ops.routes does,
                                   for routers that train by REINFORCE
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpt.models.config import ModelConfig, MoeConfig
from jaxpt.models.mesh import in_use
from jaxpt.ops import balance, dispatch, routes, routing
from jaxpt.ops.attention import FILL
from jaxpt.ops.dots import dot, swiglu
from jaxpt.types import Array


def normal(fan_in: int, scale: float = 1.0):
    return nn.initializers.normal(scale * fan_in**-0.5)


def matrix(module: nn.Module, name: str, init: Any, shape: tuple[int, ...]) -> Any:
    """The parameter `name`, or an ops.dots.LowRank or Transposed in its place, whose shape Flax does not know."""
    return module.param(name, init, shape) if module.is_initializing() else in_use(name, module.get_variable("params", name))


class MoE(nn.Module):
    """y = sum over the chosen experts of gate * expert(x), plus the shared experts. x [B,T,D] -> (y [B,T,D], aux).

    told: this layer's part of `routing`, and tokens [B,T], positions [B,T], mask [B,T] bool (tokens that count; the
    others take no places). decoding: dropless whatever the dispatch, and experts choose among the tokens at hand.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: Array, told: dict[str, Any], decoding: bool) -> tuple[Array, dict[str, Array]]:
        cfg, moe = self.cfg, self.cfg.moe
        (B, T, D), E, F, out = x.shape, moe.experts, cfg.expert_ff, (2 * cfg.depth) ** -0.5
        experts = dispatch.Experts(
            matrix(self, "gate_up", normal(D), (E, D, 2 * F)), matrix(self, "down", normal(F, out), (E, F, D))
        )
        flat, mask = x.reshape(B * T, D), told["mask"].reshape(B * T)
        if moe.choice in ("token", "expert"):
            router = matrix(self, "router", normal(D), (D, E))
            logits = dot("nd,de->ne", _jittered(flat, told), router)  # float32 always: routes hang on small differences
        else:
            logits = jnp.zeros((B * T, E))
        scores = routing.scores_of(moe.score, logits, alive := _alive(told, (B, T), E, moe.top_k))
        if moe.choice == "expert":
            pool = "batch" if decoding else moe.pool
            y, aux = _by_experts(moe, pool, flat, scores, mask, experts, cfg.dots, (B, T))
        else:
            bias = told.get("bias", self.param("bias", nn.initializers.zeros, (E,)) if moe.bias else None)
            living = logits if alive is None else jnp.where(alive, logits, FILL)
            index = _chosen(moe, scores, living, bias, alive, told, (B, T))
            gates = (
                routing.weigh(scores, index, normalise=moe.normalise, scale=moe.scale)
                if moe.choice == "token" else jnp.full(index.shape, moe.scale / moe.top_k)
            )
            y, kept = _dispatch(moe, decoding, B * T)(flat, jnp.where(mask[:, None], index, E), gates, experts, cfg.dots)
            aux = _measures(scores, index, kept, mask, (B, T))
            if "draw" in told:
                aux["route_logp"] = routes.route_logp(living, index).reshape(B, T)
        y = y.reshape(B, T, D)
        if moe.shared:
            gate_up = matrix(self, "shared_gate_up", normal(D), (D, 2 * moe.shared * F))
            down = matrix(self, "shared_down", normal(moe.shared * F, out), (moe.shared * F, D))
            y = y + swiglu("btd,df->btf", "btf,fd->btd", x, gate_up, down, cfg.dots)
        return y, aux | {"z": balance.z_loss(logits, mask), "largest_logit": jnp.max(jnp.abs(logits))}


def _jittered(x: Array, told: dict) -> Array:
    if "jitter" not in told:
        return x
    return x * (1 + told["jitter"] * jax.random.uniform(told["key"], x.shape, minval=-1.0))


def _alive(told: dict, shape: tuple[int, int], experts: int, k: int) -> Array | None:
    """[N,E] bool, or None where every expert may be used."""
    B, T = shape
    alive = None
    if "dropout" in told:
        rows = routing.survivors(jax.random.fold_in(told["key"], 1), B, experts, k, told["dropout"])
        alive = jnp.repeat(rows, T, axis=0)
    if "alive" in told:
        alive = told["alive"][None] if alive is None else alive & told["alive"][None]
    return alive


def _chosen(moe: MoeConfig, scores: Array, logits: Array, bias: Array | None, alive: Array | None, told: dict,
            shape: tuple) -> Array:
    if "draw" in told:
        index = _drawn(moe, logits, told)
    elif moe.choice == "token":
        index = routing.choose(scores, moe.top_k, bias=bias, groups=moe.groups, top_groups=moe.top_groups, alive=alive)
    else:
        number = told["tokens"].reshape(-1)
        if moe.choice == "random":
            number = number + 65_537 * (1 + jnp.broadcast_to(told["positions"], shape).reshape(-1))
        index = routing.choose(routing.hashed(number, moe.experts), moe.top_k, alive=alive)
    if "routes" not in told:
        return index
    earlier = told["routes"].reshape(index.shape)
    return jnp.where(earlier >= 0, earlier, index)


def _drawn(moe: MoeConfig, logits: Array, told: dict) -> Array:
    if moe.choice != "token" or moe.bias or moe.groups != 1:
        raise ValueError("routing: got draw, expected it only where tokens choose, without bias and groups")
    noise = jax.random.gumbel(jax.random.fold_in(told["key"], 2), logits.shape)
    return routes.draw_route(logits, told["draw"] * noise, moe.top_k)


def _dispatch(moe: MoeConfig, decoding: bool, tokens: int):
    if moe.dispatch != "capacity":
        return dispatch.DROPLESS[moe.dispatch]
    factor = moe.experts / moe.top_k if decoding else moe.capacity
    each = routing.places_of(tokens, moe.top_k, moe.experts, factor)
    return partial(dispatch.capacity, places_each=each)


def _measures(scores: Array, index: Array, kept: Array, mask: Array, shape: tuple[int, int]) -> dict[str, Array]:
    rows = lambda x: x.reshape(*shape, x.shape[-1])  # noqa: E731
    probs = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    lost = jnp.sum(mask[:, None] & ~kept) / jnp.maximum(jnp.sum(mask) * index.shape[1], 1)
    return {
        "balance": balance.balance_loss(probs, index, mask),
        "sequence_balance": balance.sequence_balance_loss(rows(probs), rows(index), mask.reshape(shape)),
        "load": balance.load_of(index, scores.shape[-1], mask), "dropped": lost, "routes": rows(index),
    }


def _by_experts(
    moe: MoeConfig, pool: str, x: Array, scores: Array, mask: Array, experts: dispatch.Experts, dots: str,
    shape: tuple[int, int],
) -> tuple[Array, dict[str, Array]]:
    """Experts choose; every one has the same load by construction, so the balance losses are constant."""
    B, T = shape
    if pool == "batch":
        each = routing.places_of(B * T, moe.top_k, moe.experts, 1.0)
        token, gates = routing.expert_choice(scores, each, mask)
    else:  # one pool for each index in the row: tokens[pool] stand in row-major order
        each = routing.places_of(B, moe.top_k, moe.experts, 1.0)
        turn = lambda a: jnp.swapaxes(a.reshape(B, T, *a.shape[1:]), 0, 1)  # noqa: E731
        row, gates = jax.vmap(lambda s, m: routing.expert_choice(s, each, m))(turn(scores), turn(mask))
        token = row * T + jnp.arange(T)[:, None, None]
        token, gates = (jnp.moveaxis(a, 1, 0).reshape(moe.experts, -1) for a in (token, gates))
    y = dispatch.taken(x, token, moe.scale * gates, experts, dots)
    seen = jnp.zeros(B * T, bool).at[token].set(True)
    return y, {
        "balance": jnp.ones(()), "sequence_balance": jnp.ones(()),
        "load": jnp.full(moe.experts, 1 / moe.experts),
        "dropped": jnp.sum(mask & ~seen) / jnp.maximum(jnp.sum(mask), 1),
    }
