"""Hugging Face's layouts, and config.json to and from a ModelConfig. The tensors: jaxpt.models.tensors; disk:
jaxpt.lab.checkpoint. Errors are ValueErrors that name the key of config.json, or the field of the ModelConfig.
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple, fields, replace
from typing import Any, NamedTuple

from jaxpt.models.config import ModelConfig, MoeConfig, RopeScaling

LARGEST = 10_000_000  # of a size in config.json: more is a mistake or an attack
FIXED = {  # keys of config.json that could ask for arithmetic that is not here
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "partial_rotary_factor": 1.0, "quantization_config": None, "rope_interleave": True,
    "moe_layer_freq": 1,
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # fields of RopeScaling


class Experts(NamedTuple):
    """Where a layout keeps its experts."""

    module: str  # of a layer
    gate: str  # gate, up and down of one expert
    up: str
    down: str
    read: Callable[[Mapping], MoeConfig]
    write: Callable[[MoeConfig], dict[str, Any]]


class Layout(NamedTuple):
    """Where a folder keeps what, and what its config.json cannot say otherwise."""

    architecture: str
    theta: float = 10_000.0  # of rotary positions where config.json does not say
    shifted: bool = False  # queries, keys and values have a bias
    normed: bool = False  # queries and keys have a norm
    windowed: bool = False  # config.json's sliding_window counts for all layers
    latent: bool = False  # latent attention
    experts: Experts | None = None


def _mixtral(config: Mapping) -> MoeConfig:
    experts, width = _size(config, "num_local_experts"), _size(config, "intermediate_size")
    return MoeConfig(experts, _size(config, "num_experts_per_tok"), width)


def _qwen3_moe(config: Mapping) -> MoeConfig:
    experts = _size(config, "num_experts" if "num_experts" in config else "num_local_experts")  # older and newer folders
    width, normalise = _size(config, "moe_intermediate_size"), _flag(config, "norm_topk_prob")
    return MoeConfig(experts, _size(config, "num_experts_per_tok"), width, normalise=normalise)


def _deepseek_v2(config: Mapping) -> MoeConfig:
    for key, value in (("topk_method", "greedy"), ("norm_topk_prob", False), ("scoring_func", "softmax")):
        _only(config, key, value)
    return _deepseek(config, normalise=False)


def _deepseek_v3(config: Mapping) -> MoeConfig:
    for key, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        _only(config, key, value)
    groups, top_groups, normalise = _size(config, "n_group"), _size(config, "topk_group"), _flag(config, "norm_topk_prob")
    return _deepseek(config, score="sigmoid", bias=True, groups=groups, top_groups=top_groups, normalise=normalise)


def _deepseek(config: Mapping, **more: Any) -> MoeConfig:
    return MoeConfig(
        _size(config, "n_routed_experts"), _size(config, "num_experts_per_tok"), _size(config, "moe_intermediate_size"),
        shared=_size(config, "n_shared_experts"), scale=_number(config, "routed_scaling_factor"),
        first=_size(config, "first_k_dense_replace", 0, least=0), **more,
    )


def _deepseek_json(moe: MoeConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.d_ff,
        "n_shared_experts": moe.shared, "routed_scaling_factor": moe.scale, "first_k_dense_replace": moe.first,
        "norm_topk_prob": moe.normalise, "n_group": moe.groups, "topk_group": moe.top_groups,
        "topk_method": "noaux_tc" if moe.bias else "greedy", "scoring_func": moe.score,
    }


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
    "deepseek_v2": Layout("DeepseekV2ForCausalLM", latent=True, experts=Experts(
        "mlp", "gate_proj", "up_proj", "down_proj", _deepseek_v2, _deepseek_json,
    )),
    "deepseek_v3": Layout("DeepseekV3ForCausalLM", latent=True, experts=Experts(
        "mlp", "gate_proj", "up_proj", "down_proj", _deepseek_v3, _deepseek_json,
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
        _only(config, key, value)
    window = _window(config, layout)
    attends = "full_attention" if window is None else "sliding_attention"
    if any(kind != attends for kind in _part(config, "layer_types", list)):
        raise ValueError(f"config.json: layer_types names other kinds than {attends!r}: expected that for all layers.")
    d_model, n_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    theta, scaling = _rope(config, layout.theta)
    if layout.latent:
        heads = _latent(config, n_heads)
    else:
        heads = {"n_kv_heads": _size(config, "num_key_value_heads", n_heads),
                 "d_head": _size(config, "head_dim", d_model // n_heads)}
    return canonical(ModelConfig(
        vocab=_size(config, "vocab_size"), d_model=d_model, n_layers=_size(config, "num_hidden_layers"), n_heads=n_heads, **heads,
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
    kind = _kind(cfg)
    layout, scaling = LAYOUTS[kind], cfg.rope_scaling
    config = {
        "architectures": [layout.architecture], "model_type": kind, "vocab_size": cfg.vocab, "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers, "num_attention_heads": cfg.n_heads, "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim, "intermediate_size": cfg.ff, "hidden_act": "silu", "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta, "max_position_embeddings": context, "tie_word_embeddings": cfg.tied,
    }
    if scaling is not None:
        config["rope_scaling"] = {"rope_type": "llama3", **dict(zip(SCALING, astuple(scaling)))}
    if layout.latent:
        config |= {
            "head_dim": cfg.rope_dim, "kv_lora_rank": cfg.latent, "q_lora_rank": cfg.latent_query,
            "qk_nope_head_dim": cfg.head_dim, "qk_rope_head_dim": cfg.rope_dim, "v_head_dim": cfg.value_dim,
        }
    if layout.windowed:
        config["sliding_window"] = cfg.window
    if layout.experts is not None and cfg.moe is None:
        raise ValueError(f"ModelConfig.moe is None: a {kind} folder would be read with experts.")
    if layout.experts is not None:
        config |= layout.experts.write(cfg.moe)
    agree(cfg, config)
    return config


def _kind(cfg: ModelConfig) -> str:
    """The layout that has the model, if one has."""
    if cfg.latent is not None:
        return "deepseek_v3" if cfg.moe is not None and cfg.moe.bias else "deepseek_v2"
    if cfg.moe is not None:
        return "qwen3_moe" if cfg.qk_norm else "mixtral"
    return "qwen3" if cfg.qk_norm else "qwen2" if cfg.qkv_bias else "mistral" if cfg.window else "llama"


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
    heads = {"n_kv_heads": cfg.kv_heads, "d_head": cfg.head_dim}
    if cfg.latent is not None:
        heads = {"d_head": cfg.head_dim, "d_rope": cfg.rope_dim, "d_value": cfg.value_dim}
    return replace(
        cfg, **heads, d_ff=cfg.expert_ff if moe is not None and moe.first == 0 else cfg.ff, moe=moe, scan=False, remat=False,
        dots="float32", lora=None,
    )


def _window(config: Mapping, layout: Layout) -> int | None:
    if not layout.windowed or config.get("sliding_window") is None:
        return None
    return _size(config, "sliding_window")


def _latent(config: Mapping, n_heads: int) -> dict[str, int | None]:
    _only(config, "num_key_value_heads", n_heads)
    _only(config, "rms_norm_eps", 1e-6)  # that of the norms inside latent attention, whatever config.json says
    return {
        "latent": _size(config, "kv_lora_rank"), "d_head": _size(config, "qk_nope_head_dim"),
        "d_rope": _size(config, "qk_rope_head_dim"), "d_value": _size(config, "v_head_dim"),
        "latent_query": None if config.get("q_lora_rank") is None else _size(config, "q_lora_rank"),
    }


def _only(config: Mapping, key: str, value: Any) -> None:
    if config.get(key) not in (None, value):
        raise ValueError(f"config.json: {key} is {config[key]!r}: expected {value!r}, the only value that is supported.")


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


def _size(config: Mapping, key: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= LARGEST:
        raise ValueError(f"config.json: {key} is {value!r}: expected a whole number from {least} to {LARGEST}.")
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
