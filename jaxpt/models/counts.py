"""Counting parameters and the floating-point operations of matrix products."""

import math
from collections.abc import Callable
from typing import Any

import jax

from jaxpt.models.config import ModelConfig
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


def forward_flops(cfg: ModelConfig, batch: int, seq: int) -> int:
    """FLOPs (2 per multiply-add) of the products of `forward`; logits cost 2 batch seq D V more.

    Masked scores are counted, because they are computed.
    """
    return extend_flops(cfg, batch, seq, seq)


def extend_flops(cfg: ModelConfig, batch: int, new: int, size: int) -> int:
    """The same for `extend` by `new` tokens per row with a cache of `size` slots."""
    D, H, G, K, F = cfg.d_model, cfg.n_heads, cfg.kv_heads, cfg.head_dim, cfg.ff
    weights = D * (H + 2 * G) * K + H * K * D + 3 * D * F
    attention = 2 * size * H * K
    return 2 * batch * new * cfg.n_layers * (weights + attention)


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
