"""Counting parameters and the floating-point operations of matrix products."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxpt.models.config import TARGETS, ModelConfig
from jaxpt.ops.dispatch import BLOCK, block_count
from jaxpt.ops.routing import places_of
from jaxpt.types import Params

EMBEDDINGS = ("embed", "unembed")


def param_counts(params: Params) -> dict[str, int]:
    """Numbers of parameters: total, embedding (embed and unembed), non_embedding.

    Kaplan et al. 2020 (arXiv:2001.08361) fit with non_embedding, Hoffmann et al. 2022 (arXiv:2203.15556)
    with total; on small models the difference changes the exponents.
    """
    total = sum(x.size for x in jax.tree.leaves(params))
    embedding = sum(params[name].size for name in EMBEDDINGS if name in params)
    return {"total": total, "embedding": embedding, "non_embedding": total - embedding}


def active_params(params: Params, cfg: ModelConfig) -> int:
    """Parameters that one token meets: all but the experts that it is not sent to. Of a dense model, all."""
    total = sum(x.size for x in jax.tree.leaves(params))
    if cfg.moe is None:
        return total
    idle = cfg.moe.experts - cfg.moe.top_k
    return total - (cfg.n_layers - cfg.dense_layers) * idle * 3 * cfg.d_model * cfg.expert_ff


def forward_flops(cfg: ModelConfig, batch: int, seq: int) -> int:
    """FLOPs (2 per multiply-add) of the products of `forward`; logits cost 2 batch seq D V more.

    What the program computes is counted: masked scores, empty places of experts, adapters.
    """
    return _flops(cfg, batch, seq, seq, _expert_rows(cfg, batch, seq, decoding=False))


def extend_flops(cfg: ModelConfig, batch: int, new: int, size: int) -> int:
    """The same for `extend` by `new` tokens per row with a cache of `size` slots."""
    return _flops(cfg, batch, new, size, _expert_rows(cfg, batch, new, decoding=True))


def active_flops(cfg: ModelConfig, batch: int, seq: int) -> int:
    """`forward_flops` if every token cost exactly its own experts: the measure in which mixtures are compared."""
    return _flops(cfg, batch, seq, seq, 0 if cfg.moe is None else batch * seq * cfg.moe.top_k)


def _flops(cfg: ModelConfig, batch: int, new: int, size: int, expert_rows: int) -> int:
    """expert_rows: rows of the routed experts' products, in each layer."""
    rows, first = batch * new, cfg.dense_layers
    layers = [_matrices(replace(cfg, moe=None), rows, batch * size, 0)] * first
    layers += [_matrices(cfg, rows, batch * size, expert_rows)] * (cfg.n_layers - first)
    products = cfg.loops * sum(n * i * o for matrices in layers for n, _, i, o in matrices.values())
    widths = 2 * cfg.head_dim if cfg.latent is None else cfg.head_dim + cfg.rope_dim + cfg.value_dim  # key and value
    attention = cfg.depth * rows * size * cfg.n_heads * widths
    return 2 * (products + attention + _adapter_products(cfg, rows, layers))


def _matrices(cfg: ModelConfig, rows: int, slots: int, expert_rows: int) -> dict[str, tuple[int, int, int, int]]:
    """A layer's matrices: name -> (rows that go through, number of them, inputs, outputs). slots: of all rows' caches."""
    D, H, G, K, F = cfg.d_model, cfg.n_heads, cfg.kv_heads, cfg.head_dim, cfg.ff
    if cfg.latent is None:
        found = {"qkv": (rows, 1, D, (H + 2 * G) * K), "out": (rows, 1, H * K, D)}
    else:
        R, P, V, Q = cfg.latent, cfg.rope_dim, cfg.value_dim, cfg.latent_query
        found = {
            "query": (rows, 1, Q or D, H * (K + P)), "narrow": (rows, 1, D, R + P), "widen": (slots, 1, R, H * (K + V)),
            "out": (rows, 1, H * V, D),
        } | ({"narrow_query": (rows, 1, D, Q)} if Q else {})
    if cfg.moe is None:
        return found | {"gate_up": (rows, 1, D, 2 * F), "down": (rows, 1, F, D)}
    E, F = cfg.moe.experts, cfg.expert_ff
    found |= {"gate_up": (expert_rows, E, D, 2 * F), "down": (expert_rows, E, F, D)}
    if cfg.moe.choice in ("token", "expert"):
        found["router"] = (rows, 1, D, E)
    if S := cfg.moe.shared * F:
        found |= {"shared_gate_up": (rows, 1, D, 2 * S), "shared_down": (rows, 1, S, D)}
    return found


def _adapter_products(cfg: ModelConfig, rows: int, layers: list[dict[str, tuple[int, int, int, int]]]) -> int:
    """x a and then b, on every pass through a matrix; for dora also the lengths of its columns, once."""
    if cfg.lora is None:
        return 0
    r, targets = cfg.lora.rank, TARGETS[cfg.lora.targets]
    chosen = [matrix for matrices in layers for name, matrix in matrices.items() if name in targets]
    passes = cfg.loops * sum(n * r * (i + o) for n, _, i, o in chosen)
    tables = [(1, cfg.vocab, cfg.d_model)] + [(1, cfg.d_model, cfg.vocab)] * (not cfg.tied) if "embed" in targets else []
    if tables:
        passes += rows * r * cfg.d_model  # looked up, not multiplied, by the first of the two
    if cfg.lora.kind != "dora":
        return passes
    shapes = [matrix[1:] for matrix in chosen] + tables
    return passes + sum(number * (r * i * o + r * r * (i + o)) for number, i, o in shapes)


def _expert_rows(cfg: ModelConfig, batch: int, new: int, *, decoding: bool) -> int:
    """Rows of a layer's expert products, empty places included."""
    if cfg.moe is None:
        return 0
    moe, tokens = cfg.moe, batch * new
    E, k = moe.experts, moe.top_k
    if moe.choice == "expert":
        by_position = moe.pool == "position" and not decoding
        return E * (new * places_of(batch, k, E, 1.0) if by_position else places_of(tokens, k, E, 1.0))
    if moe.dispatch == "capacity":
        return E * places_of(tokens, k, E, E / k if decoding else moe.capacity)
    return {"dense": E * tokens, "ragged": k * tokens, "blocks": BLOCK * block_count(k * tokens, E)}[moe.dispatch]


def dot_flops(fn: Callable[..., Any], *args: Any, trips: int | None = None) -> int:
    """2 M N K of every dot_general that fn(*args) executes, on all devices of a shard_map together.

    args: arrays or jax.ShapeDtypeStruct; nothing is computed. A scan counts its body `length` times,
    a cond its dearest branch, a while_loop its body `trips` times.
    Raises ValueError on a while_loop when `trips` is None.
    """
    return _count(jax.make_jaxpr(fn)(*args).jaxpr, trips)


def _count(jaxpr: Any, trips: int | None) -> int:
    return sum(_count_equation(eqn, trips) for eqn in jaxpr.eqns)


def _count_equation(eqn: Any, trips: int | None) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        return _count_dot(eqn)
    if name == "ragged_dot_general":  # rows [M,K] times the matrix [G,K,N] of their group
        return 2 * eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1]
    if name == "while" and trips is None:
        raise ValueError("dot_flops met a while_loop with trips=None: expected the number of its trips.")
    if name == "while":
        return trips * _count(eqn.params["body_jaxpr"].jaxpr, trips)
    inner = [_count(jaxpr, trips) for value in eqn.params.values() for jaxpr in _jaxprs(value)]
    if name == "cond":
        return max(inner)
    times = 1
    if name == "scan":
        times = eqn.params["length"]
    if name == "shard_map":
        times = math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    return times * sum(inner)


def _count_dot(eqn: Any) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    left, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return 2 * out.size * math.prod(left.shape[axis] for axis in contracting)


def _jaxprs(value: Any) -> list[Any]:
    """The jaxprs held by an equation's parameter: itself, or the members of a tuple."""
    values = value if isinstance(value, tuple | list) else (value,)
    return [getattr(v, "jaxpr", v) for v in values if hasattr(getattr(v, "jaxpr", v), "eqns")]
