"""What training adds to a model with experts: the losses of its routers, the bias that balances, what to watch.

Leaves (numbers that may differ between arms of one compiled program):
    balance, sequence_balance, z   weights of the three losses, summed over layers
    bias_rate                      step of the loss-free bias after each update
    jitter, expert_dropout         noise while training (models.moe)
A balance loss is not a mean over tokens, so it is taken of every share of a batch and weighed by the tokens of it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpt.models import ModelConfig
from jaxpt.ops.balance import alert, evenness, moved_bias, violation
from jaxpt.ops.masked import count, safe_div, stop, weighed
from jaxpt.types import Array, Metrics, Params

ROUTER = 4  # what a step key is folded with for routers' noise; train.common has the others
LOSSES = ("balance", "sequence_balance", "z")


def leaves(cfg: ModelConfig) -> dict[str, float]:
    """Every leaf with its default; none for a dense model."""
    if cfg.moe is None:
        return {}
    used = {"balance": 0.01 if cfg.moe.choice == "token" and not cfg.moe.bias else 0.0}
    return {
        **dict.fromkeys(LOSSES, 0.0), **used, "bias_rate": 1e-3 if cfg.moe.bias else 0.0, "jitter": 0.0, "expert_dropout": 0.0,
    }


def told(cfg: ModelConfig, state: Mapping[str, Any]) -> dict[str, Array]:
    """The `routing` of a training pass: its noise. state: key, step and hyper."""
    if cfg.moe is None:
        return {}
    key = jax.random.fold_in(jax.random.fold_in(state["key"], state["step"]), ROUTER)
    return {"key": key, "jitter": state["hyper"]["jitter"], "dropout": state["hyper"]["expert_dropout"]}


def replayed(hyper: Mapping[str, Array], part: Mapping[str, Array]) -> dict[str, Array]:
    """The `routing` of an update: the routes [B,L,T,k] of the batch where it has them and the leaf `replay` says so."""
    if "routes" not in part:
        return {}
    return {"routes": jnp.where(hyper["replay"] > 0, jnp.moveaxis(part["routes"], 1, 0), -1)}


def flips(aux: Mapping[str, Array], part: Mapping[str, Array], logp: Array) -> Metrics:
    """How far an update's policy has drifted from the one that sampled, where routes are known: the share of choices of
    experts that are others now, and the mean square of tokens' log-ratios."""
    if "routes" not in part:
        return {}
    then, now = jnp.moveaxis(part["routes"], 1, 0), aux["routes"]
    stayed = jnp.any(then[..., None] == now[..., None, :], axis=-1)
    return {
        "route_flips": weighed(1 - jnp.mean(stayed, axis=(0, -1), dtype=jnp.float32), part["mask"]),
        "log_ratio_square": weighed((logp - part["old_logp"]) ** 2, part["mask"]),
    }


def with_routers(
    value: Array, metrics: Metrics, hyper: Mapping[str, Array], aux: Mapping[str, Array], mask: Array, totals: Mapping[str, Array]
) -> tuple[Array, Metrics]:
    """A share's loss and metrics, with the weighed losses of the routers, times the share's part of the batch's tokens, and
    what they measured. As they are for a dense model."""
    if not aux:
        return value, metrics
    tokens = count(mask)
    routers = sum(hyper[name] * jnp.sum(aux[name]) for name in LOSSES)
    seen = {f"router_{name}": (stop(aux[name]) * tokens, tokens) for name in (*LOSSES, "dropped", "load")}
    share = safe_div(tokens, totals["tokens"])
    seen["router_total"] = (stop(share * routers), share)
    return value + share * routers, {**metrics, **seen}


def less_routers(loss: Array, metrics: Metrics) -> Array:
    """The loss of a whole batch without what with_routers added."""
    return loss - metrics["router_total"][0] if "router_total" in metrics else loss


def rebalanced(cfg: ModelConfig, params: Params, metrics: Metrics, hyper: Mapping[str, Array]) -> Params:
    """The parameters after the biases' own update, where there are biases. Layers' passes (loops) count together."""
    if cfg.moe is None or not cfg.moe.bias:
        return params
    if "lora" in params:
        return params | {"base": rebalanced(cfg, params["base"], metrics, hyper)}
    load, tokens = metrics["router_load"]
    load = _of_layers(load / jnp.maximum(tokens, 1), cfg.n_layers - cfg.dense_layers)
    names = ["layers"] if cfg.scan else [f"layer_{i}" for i in range(cfg.dense_layers, cfg.n_layers)]
    new = {}
    for name, own in zip(names, [load] if cfg.scan else load, strict=True):
        moe = params[name]["moe"]
        new[name] = params[name] | {"moe": moe | {"bias": moved_bias(moe["bias"], own, hyper["bias_rate"])}}
    return params | new


def _of_layers(load: Array, layers: int) -> Array:
    return load.reshape(-1, layers, load.shape[-1]).mean(axis=0)


def watch(metrics: Metrics) -> Metrics:
    """The metrics of a batch with loads turned into numbers: the worst layer's evenness and violation, and the alert."""
    if "router_load" not in metrics:
        return metrics
    rest = {name: x for name, x in metrics.items() if name != "router_load"}
    total, tokens = metrics["router_load"]
    load, one = total / jnp.maximum(tokens, 1), jnp.float32(1)
    rest = {name: (jnp.sum(s) / len(load) if s.ndim else s, w) for name, (s, w) in rest.items()}
    return rest | {
        "load_evenness": (jnp.min(evenness(load)), one), "load_violation": (jnp.max(violation(load)), one),
        "load_alert": (jnp.any(alert(load)).astype(jnp.float32), one),
    }
