"""The layers, in Flax Linen: a pre-norm decoder (RMSNorm, rotary grouped-query attention, SwiGLU or experts).

Products are few and wide: one for queries, keys and values, one for gate and up.

Initialisation: every matrix is normal with variance 1/fan_in; the two that write into the residual
stream are scaled by 1/sqrt(2 depth) more (Radford et al. 2019), so that the stream keeps its size
whatever the depth (layers times loops); embedding rows have norm 1 on average, so that tied logits start with standard
deviation 1 at every width. Norm scales start at 1, biases (of queries, keys
and values, where a config asks for them) at 0.
"""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpt.models.config import ModelConfig
from jaxpt.models.moe import MoE, matrix, normal
from jaxpt.models.rotary import turned
from jaxpt.ops.attention import attention, attention_value
from jaxpt.ops.dots import dot, swiglu, take
from jaxpt.ops.masked import at_least_float32
from jaxpt.types import Array

LayerCache = tuple[Array, Array]  # keys and values [B,G,S,K], head-major, as the products read them; or LatentAttention's


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


class SwiGLU(nn.Module):
    """ops.dots.swiglu, x [B,T,D] -> [B,T,D]."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x):
        D, F, L = self.cfg.d_model, self.cfg.ff, self.cfg.depth
        gate_up = matrix(self, "gate_up", normal(D), (D, 2 * F))
        down = matrix(self, "down", normal(F, (2 * L) ** -0.5), (F, D))
        return swiglu("btd,df->btf", "btf,fd->btd", x, gate_up, down, self.cfg.dots)


class Attention(nn.Module):
    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, positions, mask, cache):
        D, H, G, K = self.cfg.d_model, self.cfg.n_heads, self.cfg.kv_heads, self.cfg.head_dim
        (B, T, _), qkv_width = x.shape, (H + 2 * G) * K
        qkv = matrix(self, "qkv", normal(D), (D, qkv_width))
        out = matrix(self, "out", normal(H * K, (2 * self.cfg.depth) ** -0.5), (H * K, D))

        heads = dot("btd,df->btf", x, qkv, self.cfg.dots)
        if self.cfg.qkv_bias:
            heads = heads + self.param("qkv_bias", nn.initializers.zeros, (qkv_width,))[None, None]
        q, k, v = jnp.split(heads.reshape(B, T, H + 2 * G, K), [H, H + G], axis=2)
        if self.cfg.qk_norm:
            q, k = RMSNorm(self.cfg.norm_eps, name="q_norm")(q), RMSNorm(self.cfg.norm_eps, name="k_norm")(k)
        q, k = turned(q, positions, self.cfg), turned(k, positions, self.cfg)
        if cache is None:
            y = attention(q, k, v, mask, self.cfg.dots, self.cfg.softcap)
        else:
            cache = write(cache[0], k, positions), write(cache[1], v, positions)
            y = attention_value(q, *cache, mask, self.cfg.dots, self.cfg.softcap)
        return dot("btf,fd->btd", y.reshape(B, T, H * K), out, self.cfg.dots), cache


class LatentAttention(nn.Module):
    """Keys and values of all heads are made of one narrow vector per token, and that is what the cache keeps (multi-head
    latent attention, DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A head's query and key have K entries without positions and P with; the latter part of the key is one for all heads.
    Queries may be made of a narrow vector too. The cache: the normalised latent [B,1,S,R] and that part [B,1,S,P].
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, positions, mask, cache):
        cfg = self.cfg
        (B, T, D), H, K, R, P, V = x.shape, cfg.n_heads, cfg.head_dim, cfg.latent, cfg.rope_dim, cfg.value_dim
        Q = D if cfg.latent_query is None else cfg.latent_query
        query = matrix(self, "query", normal(Q), (Q, H * (K + P)))
        narrow = matrix(self, "narrow", normal(D), (D, R + P))
        widen = matrix(self, "widen", normal(R), (R, H * (K + V)))
        out = matrix(self, "out", normal(H * V, (2 * cfg.depth) ** -0.5), (H * V, D))

        asking = x
        if cfg.latent_query is not None:
            asking = dot("btd,df->btf", x, matrix(self, "narrow_query", normal(D), (D, Q)), cfg.dots)
            asking = RMSNorm(cfg.norm_eps, name="query_norm")(asking)
        q, q_turned = jnp.split(dot("btd,df->btf", asking, query, cfg.dots).reshape(B, T, H, K + P), [K], axis=-1)
        latent, k_turned = jnp.split(dot("btd,df->btf", x, narrow, cfg.dots), [R], axis=-1)
        latent = RMSNorm(cfg.norm_eps, name="latent_norm")(latent)
        q_turned, k_turned = (turned(a, positions, cfg) for a in (q_turned, k_turned[:, :, None]))
        if cache is not None:
            cache = write(cache[0], latent[:, :, None], positions), write(cache[1], k_turned, positions)
            latent, k_turned = cache[0][:, 0], jnp.swapaxes(cache[1], 1, 2)
        k, v = jnp.split(dot("btd,df->btf", latent, widen, cfg.dots), [H * K], axis=-1)
        k, v = k.reshape(B, -1, H, K), v.reshape(B, -1, H, V)
        k = jnp.concatenate([k, jnp.broadcast_to(k_turned, (*k.shape[:3], P))], axis=-1)
        y = attention(jnp.concatenate([q, q_turned], axis=-1), k, v, mask, cfg.dots, cfg.softcap)
        return dot("btf,fd->btd", y.reshape(B, T, H * V), out, cfg.dots), cache


def write(cache: Array, new: Array, positions: Array) -> Array:
    """Puts new [B,k,G,K] into slots positions [B,k] of cache [B,G,S,K]; slots past the end are dropped."""
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, :, positions].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)


class Block(nn.Module):
    """x [B,T,D], cache or None -> (x, (cache, aux)); aux is {} without experts. told, own: see Transformer."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, positions, mask, cache, told, own):
        cfg = self.cfg
        normed = RMSNorm(cfg.norm_eps, name="attn_norm")(x)
        attend = Attention if cfg.latent is None else LatentAttention
        y, new = attend(cfg, name="attn")(normed, positions, mask, cache)
        if not cfg.parallel:
            x = x + y
            normed = RMSNorm(cfg.norm_eps, name="mlp_norm")(x)
        if cfg.moe is None:
            z, aux = SwiGLU(cfg, name="mlp")(normed), {}
        else:
            z, aux = MoE(cfg, name="moe")(normed, {**told, **own}, cache is not None)
        return x + y + z if cfg.parallel else x + z, (new, aux)


class Transformer(nn.Module):
    """tokens [B,T] -> hidden [B,T,D] after the final norm, the caches when they were given, and each layer's aux.

    told, own: what experts are told (models.moe), alike for all layers, and with a leading axis for the layers with experts
    that are gone through.
    latent [B,T,D] and seen [B,T] bool: where seen, the input is `latent` and not the token's embedding.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, tokens, positions, mask, caches=None, told=None, own=None, latent=None, seen=None):
        cfg, told, own = self.cfg, told or {}, own or {}
        embed = matrix(self, "embed", normal(cfg.d_model), (cfg.vocab, cfg.d_model))
        if not cfg.tied:
            matrix(self, "unembed", normal(cfg.d_model), (cfg.d_model, cfg.vocab))
        x = at_least_float32(take(embed, tokens))
        if latent is not None:
            x = jnp.where(seen[..., None], latent, x)
        # Equal layers share one trace. Not when parameters are drawn: nn.jit would draw others.
        block = Block if self.is_initializing() else nn.jit(nn.remat(Block) if cfg.remat else Block)
        layers = (scanned if cfg.scan else in_turn)(cfg, block)
        new, aux = (), []
        for loop in range(1 if self.is_initializing() else cfg.loops):
            here = slice(loop * cfg.n_layers, (loop + 1) * cfg.n_layers)
            mine = jax.tree.map(lambda a: a[here], own)  # noqa: B023
            x, kept, measured = layers(x, positions, mask, None if caches is None else caches[here], told, mine)
            new, aux = (*new, *kept), [*aux, measured]
        aux = aux[0] if len(aux) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *aux)
        return RMSNorm(cfg.norm_eps, name="final_norm")(x), None if caches is None else new, aux


def in_turn(cfg, block):
    first, dense = cfg.dense_layers, replace(cfg, moe=None)
    blocks = [block(dense if i < first else cfg, name=f"layer_{i}") for i in range(cfg.n_layers)]

    def layers(x, positions, mask, caches, told, own):
        new, aux = [], []
        for i, layer in enumerate(blocks):
            cache = None if caches is None else caches[i]
            mine = {} if i < first else jax.tree.map(lambda a: a[i - first], own)
            x, (cache, measured) = layer(x, positions, mask, cache, told, mine)
            new.append(cache)
            aux.append(measured)
        return x, new, jax.tree.map(lambda *a: jnp.stack(a), *aux[first:])

    return layers


def scanned(cfg, block):
    scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True},
                   in_axes=(nn.broadcast, nn.broadcast, 0, nn.broadcast, 0), length=cfg.n_layers)(cfg, name="layers")

    def layers(x, positions, mask, caches, told, own):
        stacked = None if caches is None else jax.tree.map(lambda *c: jnp.stack(c), *caches)
        x, (stacked, aux) = scan(x, positions, mask, stacked, told, own)
        return x, () if caches is None else [jax.tree.map(lambda c: c[i], stacked) for i in range(cfg.n_layers)], aux

    return layers
