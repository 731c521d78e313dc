"""Folders of models beside transformers: the same logits, the same greedy texts, and back again bit for bit."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.lab import checkpoint, safetensors
from jaxpt.models import LoraConfig, ModelConfig, MoeConfig, RopeScaling, make_model
from jaxpt.models.layouts import LAYOUTS

pytestmark = pytest.mark.peers
SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
DEEPSEEK = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4,
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 3,
            "topk_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
FOLDERS = {  # name -> model_type and what config.json says besides SMALL
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "llama, tied, slow pairs": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama, one kv head, wide heads": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16,
                                "norm_topk_prob": True}),
    "qwen3_moe, as scored": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "head_dim": 8,
                                           "norm_topk_prob": False}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": 20, "norm_topk_prob": True}),
    "deepseek_v3, as scored": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 0}),
}


@pytest.fixture(scope="module")
def folder(peer, tmp_path_factory):
    """folder(name, dtype="float32", shard=None) -> (path, transformers' model), parameters drawn, none of them at its start."""
    torch, transformers = peer("torch"), peer("transformers")

    def make(name, dtype="float32", **options):
        kind, more = FOLDERS[name]
        torch.manual_seed(sum(map(ord, name)))
        config = transformers.AutoConfig.for_model(kind, **SMALL | more, attn_implementation="eager")
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for path, weight in model.state_dict().items():
                weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if "norm" in path else 0.0))
        path = tmp_path_factory.mktemp(kind) / "folder"
        model.to(getattr(torch, dtype)).save_pretrained(path, **options)
        # Read again: what was rounded in memory has rounded rotary frequencies too.
        return path, transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="eager").eval()

    return make


def logits(read, tokens):
    model = make_model(read.cfg)
    hidden, _ = jax.jit(model.forward)(read.params, tokens)
    return np.asarray(hidden @ model.unembed(read.params))


def theirs(peer, model, tokens):
    torch = peer("torch")
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()


def greedy(read, tokens, new):
    """Cached decoding, one token a call."""
    model = make_model(read.cfg)
    extend, W, found = jax.jit(model.extend), model.unembed(read.params), []
    B, T = tokens.shape
    hidden, cache = extend(read.params, tokens, model.cache(B, T + new), jnp.zeros(B, jnp.int32))
    for step in range(new):
        found.append(jnp.argmax(hidden[:, -1] @ W, axis=-1))
        hidden, cache = extend(read.params, found[-1][:, None], cache, jnp.full(B, T + step))
    return np.stack(found, axis=1)


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 97, (3, 40)))


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_and_greedy_texts_are_theirs(peer, folder, name):
    path, model = folder(name)
    read = checkpoint.read(path)
    np.testing.assert_allclose(logits(read, TOKENS), theirs(peer, model, TOKENS), atol=1e-4)
    torch = peer("torch")
    text = model.generate(torch.tensor(np.asarray(TOKENS[:, :7]), dtype=torch.long), do_sample=False, max_new_tokens=20,
                          attention_mask=torch.ones(3, 7), pad_token_id=0)
    np.testing.assert_array_equal(greedy(read, TOKENS[:, :7], 20), text[:, 7:].numpy())


def weights(path):
    return {name: (str(x.dtype), x.tobytes()) for name, x in checkpoint._tensors(path).items()}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_written_again_it_is_the_same_bit_for_bit(folder, tmp_path, name, dtype):
    path, _ = folder(name, dtype)
    read = checkpoint.read(path)
    checkpoint.write(tmp_path / "again", read.cfg, read.params, like=read)
    assert weights(tmp_path / "again") == weights(path)
    assert {kind for kind, _ in weights(path).values()} == {dtype}
    config = [json.loads((p / "config.json").read_text()) for p in (path, tmp_path / "again")]
    assert config[0] == config[1]


@pytest.mark.parametrize("name", ["llama, tied, slow pairs", "mixtral"])
def test_many_files_of_bfloat16_both_ways(peer, folder, tmp_path, name):
    path, model = folder(name, "bfloat16", max_shard_size="8KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    read = checkpoint.read(path)
    np.testing.assert_allclose(logits(read, TOKENS), theirs(peer, model, TOKENS), atol=1e-4)
    checkpoint.write(tmp_path / "again", read.cfg, read.params, like=read, shard=10_000)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    again = peer("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="float32").state_dict()
    for weight, x in model.state_dict().items():
        np.testing.assert_array_equal(again[weight].numpy(), x.numpy())


OURS = {
    "llama": ModelConfig(vocab=31, d_model=16, n_heads=2, norm_eps=1e-5),
    "mistral": ModelConfig(vocab=31, d_model=16, n_heads=2, window=3, tied=False, scan=True),
    "qwen2": ModelConfig(vocab=31, d_model=16, n_heads=4, n_kv_heads=2, qkv_bias=True, rope_scaling=RopeScaling(length=9)),
    "qwen3": ModelConfig(vocab=31, d_model=16, n_heads=2, d_head=12, qk_norm=True, lora=LoraConfig(rank=2)),
    "mixtral": ModelConfig(vocab=31, d_model=16, n_heads=2, moe=MoeConfig(experts=4, dispatch="capacity", capacity=4.0)),
    "qwen3_moe": ModelConfig(vocab=31, d_model=16, n_heads=2, qk_norm=True, moe=MoeConfig(experts=4, top_k=1, normalise=False)),
    "deepseek_v2": ModelConfig(vocab=31, d_model=16, n_heads=2, latent=6, moe=MoeConfig(experts=4, shared=1, normalise=False)),
    "deepseek_v3": ModelConfig(vocab=31, d_model=16, n_heads=2, latent=6, latent_query=5, d_value=5, d_rope=6, moe=MoeConfig(
        experts=4, shared=1, score="sigmoid", bias=True, groups=2, top_groups=1, first=1)),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_our_own_models_load_in_transformers(peer, tmp_path, kind):
    cfg = OURS[kind]
    model = make_model(cfg)
    leaves, tree = jax.tree.flatten(jax.jit(model.init)(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = tree.unflatten([x + 0.1 * jax.random.normal(k, x.shape) if x.ndim else x for x, k in zip(leaves, keys)])
    checkpoint.write(tmp_path / "ours", cfg, params, context=64)
    tokens = TOKENS[:, :20] % 31
    hidden, _ = jax.jit(model.forward)(params, tokens)
    loaded = peer("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_allclose(hidden @ model.unembed(params), theirs(peer, loaded, tokens), atol=1e-4)
    back = checkpoint.read(tmp_path / "ours")
    np.testing.assert_allclose(logits(back, tokens), hidden @ model.unembed(params), atol=1e-4)


def test_files_are_the_librarys(peer, tmp_path):
    """What it writes is read, what is written it reads: names, shapes and bits, in every type that both know."""
    torch, library = peer("torch"), peer("safetensors.torch")
    draw = np.random.default_rng(0)
    tensors = {"a": draw.normal(size=(3, 4)), "empty": np.zeros((0, 5)), "number": np.array(2.5), "é": draw.normal(size=7)}
    for dtype in ("float32", "float16", "bfloat16"):
        safetensors.write(tmp_path / "ours", tensors, dict.fromkeys(tensors, dtype))
        same = partial(torch.testing.assert_close, rtol=0, atol=0)
        found = library.load_file(tmp_path / "ours")
        assert found.keys() == tensors.keys()
        for name, x in tensors.items():
            same(found[name], torch.tensor(x, dtype=torch.float32).to(getattr(torch, dtype)))
        library.save_file(found, tmp_path / "theirs")
        for name, x in safetensors.read(tmp_path / "theirs").items():
            assert str(x.dtype) == dtype and x.shape == tensors[name].shape
            np.testing.assert_array_equal(x.astype(np.float32), found[name].float().numpy())
