"""make_model: the transformer as four pure functions over plain nested dicts."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.models.config import ModelConfig
from jaxpt.models.transformer import LayerCache, Transformer
from jaxpt.ops.attention import cache_mask, causal_mask
from jaxpt.types import Array, Key, Params

Cache = tuple[LayerCache, ...]  # one (k, v) per layer, rows first


class Model(NamedTuple):
    """A model. Logits are hidden @ unembed(params); the model never makes them, because [B,T,V] is
    the largest array of a step and most callers need a few numbers of it.

    init(key) -> params
        plain dicts: embed [V,D], layer_0, layer_1, ..., final_norm, and unembed [D,V] unless tied
    forward(params, tokens [B,T], *, positions=None, segments=None, prefix=None) -> (hidden [B,T,D], aux)
        positions [B,T] int: of the rotary embedding; default the index in the row
        segments [B,T], prefix [B] int: see ops.attention.causal_mask
        aux: what layers measured on the way (nothing, in a dense model)
    unembed(params) -> W [D,V]
    extend(params, tokens [B,k], cache, length [B]) -> (hidden [B,k,D], cache)
        row b's tokens stand at positions length[b] ... length[b]+k-1. k = 1 decodes, k = the prompt's
        length prefills: rows with a shorter prompt are padded, and go on at their own length, which
        overwrites the padding's slots before any query can see them. Slots past the end of the
        cache are not written: the caller leaves enough of them. For values only, not for gradients
        (ops.attention.attention_value).
    cache(batch, size) -> the empty cache for `size` tokens per row
    """

    init: Callable[[Key], Params]
    forward: Callable[..., tuple[Array, dict[str, Array]]]
    unembed: Callable[[Params], Array]
    extend: Callable[[Params, Array, Cache, Array], tuple[Array, Cache]]
    cache: Callable[[int, int], Cache]


def make_model(cfg: ModelConfig) -> Model:
    net = Transformer(cfg)
    plain = Transformer(replace(cfg, scan=False))  # draws the parameters, so that both layouts start alike

    def init(key):
        one = jnp.zeros((1, 1), jnp.int32)
        params = plain.init(key, one, one, causal_mask(1))["params"]
        return stack_layers(params) if cfg.scan else params

    def forward(params, tokens, *, positions=None, segments=None, prefix=None):
        T = tokens.shape[1]
        if positions is None:
            positions = jnp.arange(T)[None]
        mask = causal_mask(T, segments=segments, prefix=prefix)
        hidden, _ = net.apply({"params": params}, tokens, positions, mask)
        return hidden, {}

    def unembed(params):
        return params["embed"].T if cfg.tied else params["unembed"]

    def extend(params, tokens, cache, length):
        positions = length[:, None] + jnp.arange(tokens.shape[1])[None]
        size = cache[0][0].shape[2]
        return net.apply({"params": params}, tokens, positions, cache_mask(positions, size), cache)

    def cache(batch, size):
        empty = jnp.zeros((batch, cfg.kv_heads, size, cfg.head_dim))
        return ((empty, empty),) * cfg.n_layers

    return Model(init, forward, unembed, extend, cache)


def stack_layers(params: Params) -> Params:
    """The layout of scan=True from the unrolled one: layer_0, layer_1, ... become layers [L, ...]."""
    names = sorted((n for n in params if n.startswith("layer_")), key=lambda n: int(n.split("_")[1]))
    rest = {name: value for name, value in params.items() if name not in names}
    return rest | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *(params[n] for n in names))}


def unstack_layers(params: Params) -> Params:
    """The inverse of `stack_layers`."""
    rest = {name: value for name, value in params.items() if name != "layers"}
    n_layers = len(jax.tree.leaves(params["layers"])[0])
    return rest | {f"layer_{i}": jax.tree.map(lambda x: x[i], params["layers"]) for i in range(n_layers)}
