"""What fine-tuning saves, beside transformers; texts read by a real tokenizer."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.cli import main
from jaxpt.lab import checkpoint, prompts, tokenizer
from jaxpt.lab.errors import UserError
from jaxpt.lab.finetune import Settings, run
from jaxpt.models import make_model

pytestmark = pytest.mark.peers
WORDS = ("red", "green", "blue", "cyan", "grey")
ROWS = [{"prompt": f"Number {i % 5} is ", "response": WORDS[i % 5], "chosen": WORDS[i % 5], "rejected": WORDS[(i + 1) % 5]}
        for i in range(30)]


@pytest.fixture(scope="module")
def place(peer, tmp_path_factory):
    """A folder with a Qwen2 of byte pairs that transformers has saved, and rows.jsonl."""
    torch, transformers, tokenizers = peer("torch"), peer("transformers"), peer("tokenizers")
    place = tmp_path_factory.mktemp("finetune")
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    words.train_from_iterator([row["prompt"] + row["response"] for row in ROWS], trainer)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=304, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=0, pad_token_id=None)
    transformers.Qwen2ForCausalLM(config).save_pretrained(place / "base")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(place / "base")
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (place / "judge.py").write_text("def judge(prompt, completion, row):\n    return float('e' in completion)\n")
    return place


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_the_saved_folder_gives_transformers_the_same_logits(peer, place, tmp_path, method):
    torch, transformers = peer("torch"), peer("transformers")
    more = ["--verifier", f"{place}/judge.py:judge", "--new", 8, "--length", 32] if method == "grpo" else []
    full = ["--full"] if method == "dpo" else []
    words = ["run", "finetune", "--checkpoint", place / "base", "--data", place / "rows.jsonl", "--method", method,
             "--steps", 6, "--learning-rate", 1e-2, "--save", tmp_path / "saved", "--out", tmp_path / "runs", *more, *full]
    assert main(list(map(str, words))) == 0
    ours = checkpoint.read(tmp_path / "saved")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = [words(row["prompt"] + row["response"])["input_ids"] for row in ROWS[:5]]
    model, base = make_model(ours.cfg), checkpoint.read(place / "base")
    for text in ids:
        logits = [model.forward(p, jnp.asarray([text]))[0] @ model.unembed(p) for p in (ours.params, base.params)]
        with torch.no_grad():
            expected = theirs(torch.tensor([text])).logits.numpy()
        np.testing.assert_allclose(logits[0], expected, atol=1e-4)
        assert np.abs(logits[1] - expected).max() > 1e-2  # it has learned something


def test_answers_end_and_begin_where_the_tokenizer_says(peer, place):
    """A prompt's tokens are the same in training and in sampling, and decode to the row's own text."""
    words = tokenizer.read(place / "base", 304)
    texts = prompts.read(place / "rows.jsonl", "sft", words, 64, 1, False).kept
    for text, row in zip(texts, ROWS, strict=True):
        (answer,) = text.answers
        assert text.prompt == words.encode(row["prompt"]) and answer[-1] == 0
        assert words.decode(text.prompt + answer[:-1]) == row["prompt"] + row["response"]


def test_a_tokenizer_of_another_model(place, tmp_path):
    base = checkpoint.read(place / "base")
    small = base.cfg.__class__(vocab=200, d_model=16, n_layers=1, n_heads=2)
    checkpoint.write(tmp_path / "small", small, jax.jit(make_model(small).init)(jax.random.key(0)))
    (tmp_path / "small" / "tokenizer.json").write_bytes((place / "base" / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="expected numbers below 200"):
        run(Settings(checkpoint=str(tmp_path / "small"), data=str(place / "rows.jsonl")), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
