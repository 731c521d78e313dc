"""Low-rank adapters on any matrices of any tree: W + scale a b with W frozen (Hu et al. 2021, arXiv:2106.09685).

Everything is a tree map. Adapters are a tree like the parameters, with {"a" [..., i, r], "b" [..., r, o]} at each matrix
that has one, and nothing elsewhere; stacked layers and experts keep their leading axes. `attach` puts an
ops.dots.LowRank in the place of each such matrix, so that the model multiplies by w, a and b one after the other and the
merged matrix never exists. One adapter belongs to one stored matrix: queries, keys and values share theirs.

lora     scale = alpha / r
rslora   scale = alpha / sqrt(r), so that learning does not stall at large ranks (Kalajdzievski 2023, arXiv:2312.03732)
dora     the columns of W + (alpha / r) a b are rescaled to lengths that are learned ("m"), and no gradient passes
         through the lengths that they had (Liu et al. 2024, arXiv:2402.09353, equation 5 and section 4.3)

The rank in use may be less than the columns stored: those beyond it are multiplied by 0, so ranks can be a batch axis.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpt.models.config import TARGETS, LoraConfig
from jaxpt.ops.dots import LowRank
from jaxpt.types import Array, Key, Params

RATE_RATIO = 10.0  # the best learning rate of an adapter over that of all weights, as Schulman et al. 2025 ("LoRA
# Without Regret", thinkingmachines.ai/blog/lora) found it for alpha 32, nearly whatever the rank


def init_lora(key: Key, params: Params, rank: int, *, targets: str = "layers", kind: str = "lora") -> Params:
    """Adapters that change nothing yet: b is 0, a uniform within 1/sqrt(i), as the rows of a fresh matrix are sized.

    Of a lookup table [V,D] the input is one row, so its a is uniform within 1/sqrt(D), as its own rows are.
    """
    found = [(path, w) for path, w in jax.tree_util.tree_leaves_with_path(params) if path[-1].key in TARGETS[targets]]

    def adapter(key, name, w):
        *stack, i, o = w.shape
        bound = (o if name == "embed" else i) ** -0.5
        ab = {"a": jax.random.uniform(key, (*stack, i, rank), minval=-bound, maxval=bound), "b": jnp.zeros((*stack, rank, o))}
        return ab | ({"m": _lengths(w)} if kind == "dora" else {})

    adapters: Params = {}
    for number, (path, w) in enumerate(found):
        where = adapters
        for step in path[:-1]:
            where = where.setdefault(step.key, {})
        where[path[-1].key] = adapter(jax.random.fold_in(key, number), path[-1].key, w)
    return adapters


def scale_of(kind: str, alpha: Array | float, rank: Array | float) -> Array | float:
    return alpha / rank**0.5 if kind == "rslora" else alpha / rank


def attach(params: Params, adapters: Params, alpha: Array | float, rank: Array | float, *, kind: str = "lora") -> Params:
    """The parameters with a LowRank wherever there is an adapter. alpha and rank may be traced."""
    return _where_adapted(lambda w, ab: _low_rank(w, ab, alpha, rank, kind), params, adapters)


def merge(params: Params, adapters: Params, alpha: Array | float, rank: Array | float, *, kind: str = "lora") -> Params:
    """Plain parameters that compute the same. What was merged is taken out again by `unmerge`."""
    return jax.tree.map(merged, attach(params, adapters, alpha, rank, kind=kind), is_leaf=is_low_rank)


def unmerge(params: Params, adapters: Params, alpha: Array | float, rank: Array | float, *, kind: str = "lora") -> Params:
    """The base that `merge` made `params` of, up to rounding. Raises ValueError for dora, which forgets it."""
    if kind == "dora":
        raise ValueError("unmerge: merged DoRA columns have lost their old lengths; keep the base.")
    return _where_adapted(lambda w, ab: w - _change(w, ab, alpha, rank, kind), params, adapters)


def merged(leaf: Array | LowRank) -> Array:
    """The matrix that a leaf stands for."""
    if not is_low_rank(leaf):
        return leaf
    whole = leaf.w + leaf.a @ leaf.b
    return whole if leaf.gain is None else whole * leaf.gain[..., None, :]


def is_low_rank(leaf: Any) -> bool:
    return isinstance(leaf, LowRank)


def adapted_params(cfg: LoraConfig, key: Key, base: Params) -> Params:
    """The parameters of a model with adapters: base (frozen), lora, and the numbers alpha and rank."""
    return {
        "base": base, "lora": init_lora(key, base, cfg.rank, targets=cfg.targets, kind=cfg.kind),
        "alpha": jnp.float32(cfg.alpha), "rank": jnp.float32(cfg.rank),
    }


def attached(cfg: LoraConfig, params: Params) -> Params:
    """What the layers of such a model read. Only adapters get gradients."""
    base, alpha, rank = jax.lax.stop_gradient((params["base"], params["alpha"], params["rank"]))
    return attach(base, params["lora"], alpha, rank, kind=cfg.kind)


def moving(params: Params) -> Params:
    """The part of a tree that training changes: everything, or, wherever there are adapters in it, those alone and, of their
    frozen base, routers' biases (which move without gradients). Optimizers, gradients and copies are of this part."""
    if "lora" not in params:
        return {name: moving(x) if isinstance(x, dict) else x for name, x in params.items()}
    biases = _biases(params.get("base", {}))
    return {"lora": params["lora"]} | ({"base": biases} if biases else {})


def joined(params: Params, part: Params) -> Params:
    """The tree with `part`, as `moving` takes it, in the place of its own."""
    return params | {name: joined(params[name], x) if isinstance(x, dict) else x for name, x in part.items()}


def _biases(tree: Params) -> Params:
    found = {name: _biases(x) if isinstance(x, dict) else x for name, x in tree.items() if isinstance(x, dict) or name == "bias"}
    return {name: x for name, x in found.items() if not isinstance(x, dict) or x}


def _where_adapted(fn: Any, params: Params, adapters: Params) -> Params:
    def walk(tree, ab):
        if isinstance(tree, dict):
            return {name: walk(x, ab[name]) if name in ab else x for name, x in tree.items()}
        return fn(tree, ab)

    return walk(params, adapters)


def _used(w: Array, ab: Params, alpha: Array | float, rank: Array | float, kind: str) -> Array:
    """scale times the rows of b within the rank. [..., r, o]"""
    columns = ab["b"].shape[-2]
    within = jnp.arange(columns) < rank
    scaled = jnp.where(within, scale_of(kind, alpha, rank), 0.0)
    return ab["b"] * scaled.reshape((1,) * (w.ndim - 2) + (columns, 1))


def _change(w: Array, ab: Params, alpha: Array | float, rank: Array | float, kind: str) -> Array:
    return ab["a"] @ _used(w, ab, alpha, rank, kind)


def _low_rank(w: Array, ab: Params, alpha: Array | float, rank: Array | float, kind: str) -> LowRank:
    a, b = ab["a"], _used(w, ab, alpha, rank, kind)
    if kind != "dora":
        return LowRank(w, a, b)
    # |w + a b|^2 of each column, without the sum: |w|^2 + 2 b'(a'w) + b'(a'a)b
    across, within = jnp.swapaxes(a, -1, -2) @ w, jnp.swapaxes(a, -1, -2) @ a
    square = jnp.sum(w * w, axis=-2) + jnp.sum(b * (2 * across + within @ b), axis=-2)
    return LowRank(w, a, b, ab["m"] * jax.lax.rsqrt(jax.lax.stop_gradient(jnp.maximum(square, 1e-30))))


def _lengths(w: Array) -> Array:
    return jnp.sqrt(jnp.sum(w * w, axis=-2))
