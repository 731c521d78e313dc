"""make_model: the transformer as pure functions over plain nested dicts."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.models.config import TARGETS, ModelConfig
from jaxpt.models.lora import adapted_params, attached, is_low_rank, merged
from jaxpt.models.mesh import ROWS, constrained, heads_axis, in_use
from jaxpt.models.transformer import LayerCache, Transformer
from jaxpt.ops.attention import cache_mask, causal_mask
from jaxpt.ops.dots import transposed
from jaxpt.types import Array, Key, Params

Cache = tuple[LayerCache, ...]  # one (k, v) per layer gone through, rows first
ADAPTER = 2**31 - 2  # what the key is folded with for adapters, so that a base starts as it does without them
PER_LAYER = ("alive", "routes", "bias")  # of `routing`, with a leading axis for layers with experts; so is the key split


class Model(NamedTuple):
    """A model. Logits are hidden @ unembed(params); the model never makes them, because [B,T,V] is
    the largest array of a step and most callers need a few numbers of it.

    init(key) -> params
        plain dicts: embed [V,D], layer_0, layer_1, ..., final_norm, and unembed [D,V] unless tied;
        with adapters: base (all of that), lora, alpha and rank
    forward(params, tokens [B,T], *, positions=None, segments=None, prefix=None, branches=None, routing=None,
            latent=None) -> (hidden [B,T,D], aux)
        positions [B,T] int: of the rotary embedding; default the index in the row
        segments [B,T], prefix [B], branches [B,T] int: see ops.attention.causal_mask
        routing: a dict that experts are told, see models.moe
        latent ([B,T,D], [B,T] bool): inputs that replace tokens' embeddings where True, for thoughts that are
        never put into words (Hao et al. 2024, arXiv:2412.06769)
        aux: what layers with experts measured on the way, each [L, ...] (models.moe; nothing, in a dense model)
    unembed(params) -> W [D,V]
    extend(params, tokens [B,k], cache, length [B]) -> (hidden [B,k,D], cache)
        row b's tokens stand at positions length[b] ... length[b]+k-1. k = 1 decodes, k = the prompt's
        length prefills: rows with a shorter prompt are padded, and go on at their own length, which
        overwrites the padding's slots before any query can see them. Slots past the end of the
        cache are not written: the caller leaves enough of them. For values only, not for gradients
        (ops.attention.attention_value).
    cache(batch, size) -> the empty cache for `size` tokens per row
    begin(key, params) -> params of this model from those that another stage ended with: adapters on them as a frozen
        base where this model has some and they do not; else as they are
    for_few_rows(params) -> what `extend` may be given for them: adapters attached, and large matrices of layers transposed
        (ops.dots.Transposed), a copy that pays where few rows are decoded for long
    """

    init: Callable[[Key], Params]
    forward: Callable[..., tuple[Array, dict[str, Array]]]
    unembed: Callable[[Params], Array]
    extend: Callable[[Params, Array, Cache, Array], tuple[Array, Cache]]
    cache: Callable[[int, int], Cache]
    begin: Callable[[Key, Params], Params]
    for_few_rows: Callable[[Params], Params]


def make_model(cfg: ModelConfig) -> Model:
    net = Transformer(cfg)
    plain = Transformer(replace(cfg, scan=False))  # draws the parameters, so that both layouts start alike
    weights = (lambda params: params) if cfg.lora is None else (lambda params: attached(cfg.lora, params))

    def init(key):
        one = jnp.zeros((1, 1), jnp.int32)
        told = () if cfg.moe is None else (None, {"tokens": one, "positions": one, "mask": jnp.ones((1, 1), bool)})
        params = plain.init(key, one, one, causal_mask(1), *told)["params"]
        return begin(key, stack_layers(params) if cfg.scan else params)

    def begin(key, params):
        if cfg.lora is None or "lora" in params:
            return params
        return adapted_params(cfg.lora, jax.random.fold_in(key, ADAPTER), params)

    def forward(params, tokens, *, positions=None, segments=None, prefix=None, branches=None, routing=None, latent=None):
        T = tokens.shape[1]
        if positions is None:
            positions = jnp.arange(T)[None]
        mask = causal_mask(
            T, segments=segments, prefix=prefix, branches=branches, window=cfg.window, positions=positions
        )
        counts = jnp.ones(tokens.shape, bool) if segments is None else segments >= 0
        told, own = _told(cfg, tokens, positions, counts, routing or {})
        hidden, _, aux = net.apply(
            {"params": weights(params)}, tokens, positions, mask, None, told, own, *(() if latent is None else latent)
        )
        return hidden, aux

    def unembed(params):
        name = "embed" if cfg.tied else "unembed"
        W = merged(in_use(name, weights(params)[name]))
        return W.T if cfg.tied else W

    def for_few_rows(params):
        def ready(path, leaf):
            if path[-1].key not in TARGETS["layers"] or path[-1].key == "widen":  # which every slot of the cache goes through
                return leaf
            return leaf._replace(w=transposed(leaf.w)) if is_low_rank(leaf) else transposed(leaf)

        return jax.tree_util.tree_map_with_path(ready, weights(params), is_leaf=is_low_rank)

    def extend(params, tokens, cache, length):
        positions = length[:, None] + jnp.arange(tokens.shape[1])[None]
        size = cache[0][0].shape[2]
        told, own = _told(cfg, tokens, positions, jnp.ones(tokens.shape, bool), {})
        mask = cache_mask(positions, size, cfg.window)
        ready = weights(params) if "base" in params else params  # those of for_few_rows are
        hidden, cache, _ = net.apply({"params": ready}, tokens, positions, mask, cache, told, own)
        return hidden, cache

    def cache(batch, size):
        empty = jnp.zeros((batch, cfg.kv_heads, size, cfg.head_dim))
        one = (empty, empty)
        if cfg.latent is not None:
            one = tuple(jnp.zeros((batch, 1, size, width)) for width in (cfg.latent, cfg.rope_dim))
        return (tuple(constrained(x, ROWS, heads_axis(x.shape[1])) for x in one),) * cfg.depth

    return Model(init, forward, unembed, extend, cache, begin, for_few_rows)


def _told(cfg: ModelConfig, tokens: Array, positions: Array, counts: Array, routing: dict) -> tuple[dict, dict]:
    """What all layers are told alike, and what each layer is told; nothing without experts."""
    if cfg.moe is None:
        if routing:
            raise ValueError(f"routing: got {', '.join(sorted(routing))}, expected nothing for a model without experts.")
        return {}, {}
    own = {name: x for name, x in routing.items() if name in PER_LAYER}
    told = {name: x for name, x in routing.items() if name not in (*PER_LAYER, "key")}
    if "key" in routing:
        own["key"] = jax.random.split(routing["key"], cfg.depth - cfg.dense_layers)
    return {**told, "tokens": tokens, "positions": positions, "mask": counts}, own


def stack_layers(params: Params) -> Params:
    """The layout of scan=True from the unrolled one: layer_0, layer_1, ... become layers [L, ...]."""
    names = sorted((n for n in params if n.startswith("layer_")), key=lambda n: int(n.split("_")[1]))
    rest = {name: value for name, value in params.items() if name not in names}
    return rest | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *(params[n] for n in names))}


def unstack_layers(params: Params) -> Params:
    """The inverse of `stack_layers`; a tree without layers (of adapters on the embedding) as it is."""
    if "layers" not in params:
        return params
    rest = {name: value for name, value in params.items() if name != "layers"}
    n_layers = len(jax.tree.leaves(params["layers"])[0])
    return rest | {f"layer_{i}": jax.tree.map(lambda x: x[i], params["layers"]) for i in range(n_layers)}


def unrolled(cfg: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same model without scan, which decodes faster: a scan's body would copy each layer's matrices and cache."""
    if not cfg.scan:
        return cfg, params
    apart = unstack_layers if cfg.lora is None else lambda params: params | {n: unstack_layers(params[n]) for n in ("base", "lora")}
    return replace(cfg, scan=False), apart(params)
