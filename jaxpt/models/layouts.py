"""Hugging Face's layouts: config.json to and from a ModelConfig, tensors by name to and from parameters. No disk here.

A tensor of a folder is a `Piece` of one of our parameters, turned over where theirs is [o,i] and ours [i,o]; queries, keys
and values, gate and up, and the experts of a layer are slices of one. Nothing is computed, so that what is read and
written again is the same bit for bit, in float32 as in any narrower type.

Errors are ValueErrors that name the key of config.json, or the tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, fields, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpt.models.config import ModelConfig, MoeConfig, RopeScaling
from jaxpt.models.lora import merge
from jaxpt.models.make import make_model, unstack_layers
from jaxpt.types import Params

FLOATS = ("float32", "float16", "bfloat16")  # what weights may be stored as
LARGEST = 10_000_000  # of a size in config.json: more is a mistake or an attack
FIXED = {  # keys of config.json that could ask for arithmetic that is not here
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "partial_rotary_factor": 1.0, "quantization_config": None,
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # fields of RopeScaling
IGNORED = ("rotary_emb.inv_freq",)  # ends of the names of buffers that old folders hold and that follow from config.json


class Experts(NamedTuple):
    """Where a layout keeps its experts."""

    module: str  # of a layer
    gate: str  # gate, up and down of one expert
    up: str
    down: str
    read: Callable[[Mapping], MoeConfig]
    write: Callable[[MoeConfig], dict[str, Any]]


class Layout(NamedTuple):
    architecture: str
    theta: float = 10_000.0  # of rotary positions where config.json does not say
    shifted: bool = False  # queries, keys and values have a bias
    normed: bool = False  # queries and keys have a norm
    windowed: bool = False  # config.json's sliding_window counts for all layers
    experts: Experts | None = None


def _mixtral(config: Mapping) -> MoeConfig:
    experts, width = _size(config, "num_local_experts"), _size(config, "intermediate_size")
    return MoeConfig(experts, _size(config, "num_experts_per_tok"), width)


def _qwen3_moe(config: Mapping) -> MoeConfig:
    experts = _size(config, "num_experts" if "num_experts" in config else "num_local_experts")  # older and newer folders
    width, normalise = _size(config, "moe_intermediate_size"), _flag(config, "norm_topk_prob")
    return MoeConfig(experts, _size(config, "num_experts_per_tok"), width, normalise=normalise)


LAYOUTS = {  # config.json's model_type -> what is its own
    "llama": Layout("LlamaForCausalLM"),
    "mistral": Layout("MistralForCausalLM", windowed=True),
    "qwen2": Layout("Qwen2ForCausalLM", shifted=True),
    "qwen3": Layout("Qwen3ForCausalLM", normed=True),
    "mixtral": Layout("MixtralForCausalLM", 1e6, windowed=True, experts=Experts(
        "block_sparse_moe", "w1", "w3", "w2", _mixtral,
        lambda moe: {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k, "intermediate_size": moe.d_ff},
    )),
    "qwen3_moe": Layout("Qwen3MoeForCausalLM", normed=True, experts=Experts(
        "mlp", "gate_proj", "up_proj", "down_proj", _qwen3_moe,
        lambda moe: {"num_experts": moe.experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
                     "norm_topk_prob": moe.normalise, "decoder_sparse_step": 1, "mlp_only_layers": []},
    )),
}


def layout_of(config: Mapping[str, Any]) -> str:
    """The name of a config.json's layout."""
    kind = config.get("model_type")
    if type(kind) is not str or kind not in LAYOUTS:
        raise ValueError(f"config.json: model_type is {kind!r}: expected one of {', '.join(LAYOUTS)}.")
    return kind


def config_of(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes."""
    layout = LAYOUTS[layout_of(config)]
    for key, value in FIXED.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"config.json: {key} is {config[key]!r}: expected {value!r}, the only value that is supported.")
    window = _window(config, layout)
    attends = "full_attention" if window is None else "sliding_attention"
    if any(kind != attends for kind in _part(config, "layer_types", list)):
        raise ValueError(f"config.json: layer_types names other kinds than {attends!r}: expected that for all layers.")
    d_model, n_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    theta, scaling = _rope(config, layout.theta)
    return canonical(ModelConfig(
        vocab=_size(config, "vocab_size"), d_model=d_model, n_layers=_size(config, "num_hidden_layers"), n_heads=n_heads,
        n_kv_heads=_size(config, "num_key_value_heads", n_heads), d_head=_size(config, "head_dim", d_model // n_heads),
        d_ff=_size(config, "intermediate_size"), rope_theta=theta, rope_scaling=scaling,
        norm_eps=_number(config, "rms_norm_eps"), qkv_bias=layout.shifted, qk_norm=layout.normed,
        tied=_flag(config, "tie_word_embeddings"), window=window,
        moe=None if layout.experts is None else layout.experts.read(config),
    ))


def json_of(cfg: ModelConfig, context: int) -> dict[str, Any]:
    """The config.json of a model that did not come from a folder, trained on rows of at most `context` tokens.

    Raises ValueError, naming the field, where no layout has what the model has.
    """
    cfg = canonical(cfg)
    kind = ("qwen3_moe" if cfg.qk_norm else "mixtral") if cfg.moe else "qwen3" if cfg.qk_norm else (
        "qwen2" if cfg.qkv_bias else "mistral" if cfg.window else "llama")
    layout, scaling = LAYOUTS[kind], cfg.rope_scaling
    config = {
        "architectures": [layout.architecture], "model_type": kind, "vocab_size": cfg.vocab, "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers, "num_attention_heads": cfg.n_heads, "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim, "intermediate_size": cfg.ff, "hidden_act": "silu", "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta, "max_position_embeddings": context, "tie_word_embeddings": cfg.tied,
    }
    if scaling is not None:
        config["rope_scaling"] = {"rope_type": "llama3", **dict(zip(SCALING, astuple(scaling)))}
    if layout.windowed:
        config["sliding_window"] = cfg.window
    if layout.experts is not None:
        config |= layout.experts.write(cfg.moe)
    agree(cfg, config)
    return config


def agree(cfg: ModelConfig, config: Mapping[str, Any]) -> None:
    """ValueError, naming a field, unless config.json describes the model."""
    ours, theirs = canonical(cfg), config_of(config)
    for field in reversed([f.name for f in fields(ModelConfig)]):  # the rarest first
        mine, read = getattr(ours, field), getattr(theirs, field)
        if mine != read:
            raise ValueError(f"ModelConfig.{field} is {mine!r}: a {layout_of(config)} folder would be read with {read!r}.")


def canonical(cfg: ModelConfig) -> ModelConfig:
    """The model with every width written out, and without what changes how it is computed but not what."""
    moe = cfg.moe
    if moe is not None:
        usual = MoeConfig()
        moe = replace(moe, d_ff=cfg.expert_ff, dispatch=usual.dispatch, capacity=usual.capacity, pool=usual.pool)
    return replace(
        cfg, n_kv_heads=cfg.kv_heads if cfg.latent is None else None, d_head=cfg.head_dim,
        d_ff=cfg.ff if moe is None else cfg.expert_ff, moe=moe, scan=False, remat=False, dots="float32", lora=None,
    )


class Piece(NamedTuple):
    name: str  # of the tensor
    path: tuple[str, ...]  # of the parameter
    at: tuple = ()  # the part of the parameter
    turned: bool = False  # the tensor is that part transposed


def pieces(cfg: ModelConfig, kind: str) -> Iterator[Piece]:
    """Every tensor of a folder, once; they cover the parameters."""
    yield Piece("model.embed_tokens.weight", ("embed",))
    for i in range(cfg.n_layers):
        for piece in _layer(cfg, LAYOUTS[kind]):
            yield piece._replace(name=f"model.layers.{i}.{piece.name}", path=(f"layer_{i}", *piece.path))
    yield Piece("model.norm.weight", ("final_norm", "scale"))
    if not cfg.tied:
        yield Piece("lm_head.weight", ("unembed",), turned=True)


def _layer(cfg: ModelConfig, layout: Layout) -> Iterator[Piece]:
    yield Piece("input_layernorm.weight", ("attn_norm", "scale"))
    yield Piece("post_attention_layernorm.weight", ("mlp_norm", "scale"))
    ends = np.cumsum([0, cfg.n_heads, cfg.kv_heads, cfg.kv_heads]) * cfg.head_dim
    for name, start, end in zip("qkv", ends, ends[1:]):
        yield Piece(f"self_attn.{name}_proj.weight", ("attn", "qkv"), (..., slice(start, end)), True)
        if cfg.qkv_bias:
            yield Piece(f"self_attn.{name}_proj.bias", ("attn", "qkv_bias"), (slice(start, end),))
        if cfg.qk_norm and name != "v":
            yield Piece(f"self_attn.{name}_norm.weight", ("attn", f"{name}_norm", "scale"))
    yield Piece("self_attn.o_proj.weight", ("attn", "out"), turned=True)
    if layout.experts is None:
        yield from _swiglu("mlp", ("gate_proj", "up_proj", "down_proj"), "mlp", (), cfg.ff)
        return
    own = layout.experts
    yield Piece(f"{own.module}.gate.weight", ("moe", "router"), turned=True)
    for e in range(cfg.moe.experts):
        yield from _swiglu(f"{own.module}.experts.{e}", (own.gate, own.up, own.down), "moe", (e,), cfg.expert_ff)


def _swiglu(module: str, names: tuple[str, str, str], ours: str, at: tuple, width: int) -> Iterator[Piece]:
    gate, up, down = names
    yield Piece(f"{module}.{gate}.weight", (ours, "gate_up"), (*at, ..., slice(0, width)), True)
    yield Piece(f"{module}.{up}.weight", (ours, "gate_up"), (*at, ..., slice(width, 2 * width)), True)
    yield Piece(f"{module}.{down}.weight", (ours, "down"), at, True)


def check(cfg: ModelConfig, kind: str, tensors: Mapping[str, Any]) -> None:
    """ValueError where a tensor is missing, left over, of another shape or of a type that is no float."""
    wanted = {}
    for piece in pieces(cfg, kind):
        if piece.name not in tensors:
            raise ValueError(f"tensor {piece.name} is missing: config.json asks for it.")
        wanted[piece.name] = piece
    _no_more(cfg, tensors, wanted)
    shapes = _shapes(cfg)
    for piece in wanted.values():
        _check_tensor(piece, tensors[piece.name], _shape(piece, shapes))


def params_of(cfg: ModelConfig, kind: str, tensors: Mapping[str, Any]) -> Params:
    """Parameters from a layout's tensors, checked; leaves are float32 NumPy arrays."""
    check(cfg, kind, tensors)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), _shapes(cfg))
    for piece in pieces(cfg, kind):
        tensor = tensors[piece.name]
        _leaf(params, piece.path)[piece.at] = tensor.T if piece.turned else tensor
    return params


def tensors_of(cfg: ModelConfig, kind: str, params: Params) -> dict[str, np.ndarray]:
    """The inverse of `params_of`: a layout's tensors, as views of the parameters; adapters are merged."""
    if cfg.lora is not None:
        params = merge(params["base"], params["lora"], params["alpha"], params["rank"], kind=cfg.lora.kind)
    if cfg.scan:
        params = unstack_layers(params)
    tensors = {}
    for piece in pieces(cfg, kind):
        part = np.asarray(_leaf(params, piece.path))[piece.at]
        tensors[piece.name] = part.T if piece.turned else part
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


def _shapes(cfg: ModelConfig) -> Params:
    return jax.eval_shape(make_model(canonical(cfg)).init, jax.random.key(0))


def _shape(piece: Piece, shapes: Params) -> tuple[int, ...]:
    part = np.broadcast_to(np.float32(0), _leaf(shapes, piece.path).shape)[piece.at]  # holds one number
    return part.shape[::-1] if piece.turned else part.shape


def _leaf(params: Params, path: tuple[str, ...]) -> Any:
    for name in path:
        params = params[name]
    return params


def _window(config: Mapping, layout: Layout) -> int | None:
    if not layout.windowed or config.get("sliding_window") is None:
        return None
    return _size(config, "sliding_window")


def _rope(config: Mapping, theta: float) -> tuple[float, RopeScaling | None]:
    """Newer folders keep all in rope_parameters, older ones in rope_theta and rope_scaling."""
    said = {"rope_theta": config.get("rope_theta", theta)}
    said |= _part(config, "rope_parameters", dict) | _part(config, "rope_scaling", dict)
    theta, kind = _number(said, "rope_theta"), said.get("rope_type", said.get("type", "default"))
    known = {"rope_theta", "rope_type", "type"} | (set() if kind == "default" else set(SCALING))
    more = ", ".join(sorted(set(said) - known))
    if kind not in ("default", "llama3") or more:
        raise ValueError(f"config.json: rope_type is {kind!r} with {more or 'nothing more'}: expected 'default', or "
                         f"'llama3' with {', '.join(SCALING)}.")
    if kind == "default":
        return theta, None
    factor, low, high, length = SCALING
    return theta, RopeScaling(_number(said, factor), _number(said, low), _number(said, high), _size(said, length))


def _part(config: Mapping, key: str, kind: type) -> Any:
    value = config.get(key)
    if value is not None and type(value) is not kind:
        raise ValueError(f"config.json: {key} is {value!r}: expected {'an object' if kind is dict else 'a list'}.")
    return kind() if value is None else value


def _size(config: Mapping, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ValueError(f"config.json: {key} is {value!r}: expected a whole number from 1 to {LARGEST}.")
    return value


def _number(config: Mapping, key: str) -> float:
    value = config.get(key)
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"config.json: {key} is {value!r}: expected a number of at least 0.")
    return float(value)


def _flag(config: Mapping, key: str) -> bool:
    value = config.get(key, False)
    if type(value) is not bool:
        raise ValueError(f"config.json: {key} is {value!r}: expected true or false.")
    return value
