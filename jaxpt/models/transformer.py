"""The layers, in Flax Linen: a pre-norm decoder (RMSNorm, rotary grouped-query attention, SwiGLU).

Products are few and wide: one for queries, keys and values, one for gate and up.

Initialisation: every matrix is normal with variance 1/fan_in; the two that write into the residual
stream are scaled by 1/sqrt(2 n_layers) more (Radford et al. 2019), so that the stream keeps its size
whatever the depth; embedding rows have norm 1 on average, so that tied logits start with standard
deviation 1 at every width. Norm scales start at 1; there are no biases.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxpt.models.config import ModelConfig
from jaxpt.ops.attention import attention, attention_value, rope
from jaxpt.ops.dots import dot
from jaxpt.types import Array

LayerCache = tuple[Array, Array]  # keys and values [B,G,S,K]: head-major, as the products read them


def normal(fan_in: int, scale: float = 1.0):
    return nn.initializers.normal(scale * fan_in**-0.5)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return x * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))


class SwiGLU(nn.Module):
    """(silu(x W_gate) * x W_up) W_down (Shazeer 2020, arXiv:2002.05202)."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x):
        D, F, L = self.cfg.d_model, self.cfg.ff, self.cfg.n_layers
        gate_up = self.param("gate_up", normal(D), (D, 2 * F))
        down = self.param("down", normal(F, (2 * L) ** -0.5), (F, D))
        gate, up = jnp.split(dot("btd,df->btf", x, gate_up, self.cfg.dots), 2, axis=-1)
        return dot("btf,fd->btd", jax.nn.silu(gate) * up, down, self.cfg.dots)


class Attention(nn.Module):
    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, positions, mask, cache):
        D, H, G, K = self.cfg.d_model, self.cfg.n_heads, self.cfg.kv_heads, self.cfg.head_dim
        B, T, _ = x.shape
        qkv = self.param("qkv", normal(D), (D, (H + 2 * G) * K))
        out = self.param("out", normal(H * K, (2 * self.cfg.n_layers) ** -0.5), (H * K, D))

        heads = dot("btd,df->btf", x, qkv, self.cfg.dots).reshape(B, T, H + 2 * G, K)
        q, k, v = jnp.split(heads, [H, H + G], axis=2)
        if self.cfg.qk_norm:
            q, k = RMSNorm(name="q_norm")(q), RMSNorm(name="k_norm")(k)
        q, k = rope(q, positions, self.cfg.rope_theta), rope(k, positions, self.cfg.rope_theta)
        if cache is None:
            y = attention(q, k, v, mask, self.cfg.dots)
        else:
            cache = write(cache[0], k, positions), write(cache[1], v, positions)
            y = attention_value(q, *cache, mask, self.cfg.dots)
        return dot("btf,fd->btd", y.reshape(B, T, H * K), out, self.cfg.dots), cache


def write(cache: Array, new: Array, positions: Array) -> Array:
    """Puts new [B,k,G,K] into slots positions [B,k] of cache [B,G,S,K]; slots past the end are dropped."""
    rows = jnp.arange(cache.shape[0])[:, None]
    return cache.at[rows, :, positions].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)


class Block(nn.Module):
    cfg: ModelConfig

    @nn.compact
    def __call__(self, x, positions, mask, cache):
        y, cache = Attention(self.cfg, name="attn")(RMSNorm(name="attn_norm")(x), positions, mask, cache)
        x = x + y
        return x + SwiGLU(self.cfg, name="mlp")(RMSNorm(name="mlp_norm")(x)), cache


class Transformer(nn.Module):
    """tokens [B,T] -> hidden [B,T,D] after the final norm, and the caches when they were given."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, tokens, positions, mask, caches=None):
        cfg = self.cfg
        embed = self.param("embed", normal(cfg.d_model), (cfg.vocab, cfg.d_model))
        if not cfg.tied:
            self.param("unembed", normal(cfg.d_model), (cfg.d_model, cfg.vocab))
        layers = scanned if cfg.scan else unrolled
        # Equal layers share one trace. Not when parameters are drawn: nn.jit would draw others.
        block = Block if self.is_initializing() else nn.jit(Block)
        x, caches = layers(cfg, block, embed[tokens], positions, mask, caches)
        return RMSNorm(name="final_norm")(x), caches


def unrolled(cfg, block, x, positions, mask, caches):
    new = []
    for i in range(cfg.n_layers):
        x, cache = block(cfg, name=f"layer_{i}")(x, positions, mask, None if caches is None else caches[i])
        new.append(cache)
    return x, None if caches is None else tuple(new)


def scanned(cfg, block, x, positions, mask, caches):
    layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True},
                     in_axes=(nn.broadcast, nn.broadcast, 0), length=cfg.n_layers)(cfg, name="layers")
    if caches is None:
        return layers(x, positions, mask, None)
    x, stacked = layers(x, positions, mask, jax.tree.map(lambda *c: jnp.stack(c), *caches))
    return x, tuple(jax.tree.map(lambda c: c[i], stacked) for i in range(cfg.n_layers))
