"""Tensors of Hugging Face's folders by name, to and from parameters. What a layout is: jaxpt.models.layouts.

A tensor of a folder is a `Piece` of one of our parameters, turned over where theirs is [o,i] and ours [i,o]; queries, keys
and values, gate and up, and the experts of a layer are slices of one. Nothing is computed, so that what is read and
written again is the same bit for bit, in float32 as in any narrower type. Errors are ValueErrors that name the tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpt.models.config import ModelConfig
from jaxpt.models.layouts import LAYOUTS, Layout, canonical
from jaxpt.models.lora import merge
from jaxpt.models.make import make_model, unstack_layers
from jaxpt.types import Params

FLOATS = ("float32", "float16", "bfloat16")  # what weights may be stored as
IGNORED = ("rotary_emb.inv_freq",)  # ends of the names of buffers that old folders hold and that follow from config.json


class Piece(NamedTuple):
    name: str  # of the tensor
    path: tuple[str, ...]  # of the parameter
    at: tuple = ()  # the part of the parameter
    transposed: bool = False  # the tensor is that part turned over


def pieces(cfg: ModelConfig, kind: str) -> Iterator[Piece]:
    """Every tensor of a folder, once; they cover the parameters."""
    yield Piece("model.embed_tokens.weight", ("embed",))
    for i in range(cfg.n_layers):
        for piece in _layer(replace(cfg, moe=None) if i < cfg.dense_layers else cfg, LAYOUTS[kind]):
            yield piece._replace(name=f"model.layers.{i}.{piece.name}", path=(f"layer_{i}", *piece.path))
    yield Piece("model.norm.weight", ("final_norm", "scale"))
    if not cfg.tied:
        yield Piece("lm_head.weight", ("unembed",), transposed=True)


def _layer(cfg: ModelConfig, layout: Layout) -> Iterator[Piece]:
    yield Piece("input_layernorm.weight", ("attn_norm", "scale"))
    yield Piece("post_attention_layernorm.weight", ("mlp_norm", "scale"))
    yield from _attention(cfg) if cfg.latent is None else _latent_attention(cfg)
    yield Piece("self_attn.o_proj.weight", ("attn", "out"), transposed=True)
    if cfg.moe is None:
        yield from _swiglu("mlp", ("gate_proj", "up_proj", "down_proj"), "mlp", "", (), cfg.ff)
        return
    own = layout.experts
    names = own.gate, own.up, own.down
    yield Piece(f"{own.module}.gate.weight", ("moe", "router"), transposed=True)
    if cfg.moe.bias:
        yield Piece(f"{own.module}.gate.e_score_correction_bias", ("moe", "bias"))
    for e in range(cfg.moe.experts):
        yield from _swiglu(f"{own.module}.experts.{e}", names, "moe", "", (e,), cfg.expert_ff)
    if cfg.moe.shared:
        yield from _swiglu(f"{own.module}.shared_experts", names, "moe", "shared_", (), cfg.moe.shared * cfg.expert_ff)


def _attention(cfg: ModelConfig) -> Iterator[Piece]:
    ends = np.cumsum([0, cfg.n_heads, cfg.kv_heads, cfg.kv_heads]) * cfg.head_dim
    for name, start, end in zip("qkv", ends, ends[1:]):
        yield Piece(f"self_attn.{name}_proj.weight", ("attn", "qkv"), (..., slice(start, end)), True)
        if cfg.qkv_bias:
            yield Piece(f"self_attn.{name}_proj.bias", ("attn", "qkv_bias"), (slice(start, end),))
        if cfg.qk_norm and name != "v":
            yield Piece(f"self_attn.{name}_norm.weight", ("attn", f"{name}_norm", "scale"))


def _latent_attention(cfg: ModelConfig) -> Iterator[Piece]:
    """DeepSeek's rotary entries turn with their neighbours, ours with those half the width away; and its keys and values
    stand head by head, ours all keys before all values."""
    H, K, P, V, R = cfg.n_heads, cfg.head_dim, cfg.rope_dim, cfg.value_dim, cfg.latent
    halves = np.arange(P) // 2 + np.arange(P) % 2 * (P // 2)
    query = (np.arange(H)[:, None] * (K + P) + np.concatenate([np.arange(K), K + halves])).reshape(-1)
    keys, values = np.arange(H * K).reshape(H, K), H * K + np.arange(H * V).reshape(H, V)
    if cfg.latent_query is None:
        yield Piece("self_attn.q_proj.weight", ("attn", "query"), (..., query), True)
    else:
        yield Piece("self_attn.q_a_proj.weight", ("attn", "narrow_query"), transposed=True)
        yield Piece("self_attn.q_a_layernorm.weight", ("attn", "query_norm", "scale"))
        yield Piece("self_attn.q_b_proj.weight", ("attn", "query"), (..., query), True)
    narrow, widen = np.concatenate([np.arange(R), R + halves]), np.concatenate([keys, values], axis=1).reshape(-1)
    yield Piece("self_attn.kv_a_proj_with_mqa.weight", ("attn", "narrow"), (..., narrow), True)
    yield Piece("self_attn.kv_a_layernorm.weight", ("attn", "latent_norm", "scale"))
    yield Piece("self_attn.kv_b_proj.weight", ("attn", "widen"), (..., widen), True)


def _swiglu(module: str, names: tuple[str, str, str], ours: str, kind: str, at: tuple, width: int) -> Iterator[Piece]:
    gate, up, down = names
    yield Piece(f"{module}.{gate}.weight", (ours, f"{kind}gate_up"), (*at, ..., slice(0, width)), True)
    yield Piece(f"{module}.{up}.weight", (ours, f"{kind}gate_up"), (*at, ..., slice(width, 2 * width)), True)
    yield Piece(f"{module}.{down}.weight", (ours, f"{kind}down"), at, True)


def check(cfg: ModelConfig, kind: str, tensors: Mapping[str, Any]) -> Params:
    """The shapes of the parameters. ValueError where a tensor is missing, left over, of another shape or no float."""
    wanted = {}
    for piece in pieces(cfg, kind):
        if piece.name not in tensors:
            raise ValueError(f"tensor {piece.name} is missing: config.json asks for it.")
        wanted[piece.name] = piece
    _no_more(cfg, tensors, wanted)
    shapes = jax.eval_shape(make_model(canonical(cfg)).init, jax.random.key(0))
    for piece in wanted.values():
        _check_tensor(piece, tensors[piece.name], _shape(piece, shapes))
    return shapes


def params_of(cfg: ModelConfig, kind: str, tensors: Mapping[str, Any]) -> Params:
    """Parameters from a layout's tensors, checked; leaves are float32 NumPy arrays."""
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), check(cfg, kind, tensors))
    for piece in pieces(cfg, kind):
        tensor = tensors[piece.name]
        _leaf(params, piece.path)[piece.at] = tensor.T if piece.transposed else tensor
    return params


def tensors_of(cfg: ModelConfig, kind: str, params: Params) -> dict[str, np.ndarray]:
    """The inverse of `params_of`, on parameters as the model has them: adapters are merged, stacked layers taken apart."""
    if cfg.lora is not None:
        params = merge(params["base"], params["lora"], params["alpha"], params["rank"], kind=cfg.lora.kind)
    if cfg.scan:
        params = unstack_layers(params)
    tensors = {}
    for piece in pieces(cfg, kind):
        part = np.asarray(_leaf(params, piece.path))[piece.at]
        tensors[piece.name] = part.T if piece.transposed else part
    return tensors


def _no_more(cfg: ModelConfig, tensors: Mapping[str, Any], wanted: Mapping[str, Piece]) -> None:
    extra = [name for name in tensors if name not in wanted and not name.endswith(IGNORED)]
    if cfg.tied and "lm_head.weight" in extra:
        if not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            raise ValueError("tensor lm_head.weight is not the embedding, though config.json says tie_word_embeddings: "
                             "expected equal ones, or tie_word_embeddings false.")
        extra.remove("lm_head.weight")
    if extra:
        more = f" and {len(extra) - 1} more are" if len(extra) > 1 else " is"
        raise ValueError(f"tensor {extra[0]}{more} left over: config.json does not ask for it.")


def _check_tensor(piece: Piece, tensor: Any, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"tensor {piece.name} has shape {list(tensor.shape)}: config.json asks for {list(shape)}.")
    if str(tensor.dtype) not in FLOATS:
        raise ValueError(f"tensor {piece.name} is {tensor.dtype}: expected {' or '.join(FLOATS)}.")


def _shape(piece: Piece, shapes: Params) -> tuple[int, ...]:
    part = np.broadcast_to(np.float32(0), _leaf(shapes, piece.path).shape)[piece.at]  # holds one number
    return part.shape[::-1] if piece.transposed else part.shape


def _leaf(params: Params, path: tuple[str, ...]) -> Any:
    for name in path:
        params = params[name]
    return params
