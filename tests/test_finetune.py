"""Fine-tuning of a folder of a small model of bytes: what is learned, what stays as it was, what a killed run leaves, and
every kind of bad input."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest

import running
from jaxpt.cli import main
from jaxpt.lab import checkpoint, prompts, store, tokenizer
from jaxpt.lab.errors import RunFailed, UserError
from jaxpt.lab.finetune import Settings, make_job, run
from jaxpt.models import ModelConfig, make_model
from jaxpt.models.tensors import tensors_of

END = 258
CFG = ModelConfig(vocab=259, d_model=16, n_layers=1, n_heads=2)
WORDS = ("red", "green", "blue", "cyan", "grey")
ROWS = [{"prompt": f"{i % 5}: ", "response": WORDS[i % 5], "chosen": WORDS[i % 5], "rejected": WORDS[(i + 1) % 5]}
        for i in range(30)]
FOLDERS = {"config.json", "chunks", "metrics.jsonl", "curves.npz", "figure.png", "report.md", "model", "lock"}
GRPO = {"method": "grpo", "verifier": "e", "new": 8, "length": 16}


JUDGE = """import os, signal
calls = 0

def count_e(prompt, completion, row):
    global calls
    calls += 1
    if str(calls) == os.environ.get("KILLED_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    return completion.count("e")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with tiny/ and rows.jsonl."""
    place = tmp_path_factory.mktemp("finetune")
    checkpoint.write(place / "tiny", CFG, jax.jit(make_model(CFG).init)(jax.random.key(0)))
    (place / "tiny" / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (place / "judge.py").write_text(JUDGE)
    return place


def settings(place, **more):
    usual = dict(checkpoint=str(place / "tiny"), data=str(place / "rows.jsonl"), bytes=True, steps=20, learning_rate=1e-2)
    return Settings(**usual | more)


def by_hand(read, texts):
    """The negative log-likelihood of every response's bytes and its end, one row at a time, in float64."""
    model, found = make_model(read.cfg), []
    run = jax.jit(lambda params, tokens: model.forward(params, tokens)[0] @ model.unembed(params))
    for row in texts:
        ids = [*row["prompt"].encode(), *row["response"].encode(), END]
        tokens = np.zeros((1, 16), int)
        tokens[0, : len(ids)] = ids
        logits = np.asarray(run(read.params, tokens), np.float64)[0]
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found += [-logp[t - 1, ids[t]] for t in range(len(row["prompt"]), len(ids))]
    return np.array(found)


@pytest.fixture(scope="module")
def sft(place, tmp_path_factory):
    return run(settings(place, lora_rank=2), out=tmp_path_factory.mktemp("sft"))


def test_sft_learns_and_the_saved_folder_has_what_was_measured(place, sft):
    assert set(os.listdir(sft.folder)) == FOLDERS
    assert sft.after["loss"] < sft.before["loss"] - 1
    record = json.loads((sft.folder / "config.json").read_text())
    assert record["rows"] == {"training": 27, "held out": 3} and record["runs"][-1]["finished"]
    key = jax.random.fold_in(jax.random.key(0), 0)
    held = [ROWS[i] for i in np.asarray(jax.random.permutation(key, 30))[:3]]
    for folder, measured in ((place / "tiny", sft.before), (sft.model, sft.after)):
        assert measured["loss"] == pytest.approx(by_hand(checkpoint.read(folder), held).mean(), abs=1e-4)
    report = (sft.folder / "report.md").read_text()
    assert "| loss |" in report and f"{sft.after['loss']:.4g}" in report
    assert len((sft.folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_adapters_change_matrices_by_their_rank_and_nothing_else(place, sft):
    before, after = (tensors_of(CFG, "llama", checkpoint.read(f).params) for f in (place / "tiny", sft.model))
    for name, tensor in before.items():
        change = np.asarray(after[name] - tensor, np.float64)
        size = np.linalg.svd(change, compute_uv=False) if "_proj" in name else np.abs(change)
        if "_proj" in name:
            assert size[0] > 0.01 and size[2:].max() < 1e-4 * size[0], name
        else:
            assert size.max() == 0, name
    for file in ("generation_config.json", "config.json"):
        assert json.loads((sft.model / file).read_text()).items() >= json.loads((place / "tiny" / file).read_text()).items()


def test_dpo_begins_at_log_2_and_prefers_what_was_chosen(place, tmp_path):
    found = run(settings(place, method="dpo", micro=3, batch=7, steps=15), out=tmp_path, save=tmp_path / "saved")
    assert found.before["loss"] == pytest.approx(np.log(2), abs=1e-6)  # the policy is its own reference
    assert found.after["loss"] < 0.6 and found.after["accuracy"] == 1.0
    assert found.curves["finetune/loss"][0, 0] == pytest.approx(np.log(2), abs=1e-6)
    assert found.model == tmp_path / "saved" and not (found.folder / "model").exists()


def test_a_reference_in_the_host_s_memory_says_the_same(place, tmp_path):
    full = dict(method="dpo", lora_rank=None, steps=3, batch=4, learning_rate=1e-3)
    held = {False: [], True: []}  # copies of the embedding on the device: trained, two moments, and the reference

    def runs(offload):
        live = lambda _: held[offload].append(sum(x.shape == (259, 16) and x.sharding.memory_kind != "pinned_host"  # noqa: E731
                                                  for x in jax.live_arrays()))
        return run(settings(place, **full, offload=offload), out=tmp_path / str(offload), on_progress=live)

    here, there = runs(False), runs(True)
    assert held[True][-1] < held[False][-1]
    assert (here.folder / "curves.npz").read_bytes() == (there.folder / "curves.npz").read_bytes()
    frozen, state = make_job(settings(place, **full, offload=True), None).start
    kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}  # noqa: E731
    assert kinds(frozen) == {"pinned_host"} and "pinned_host" not in kinds(state)


def test_grpo_raises_the_reward(place, sft, tmp_path):
    seen = []

    def verifier(prompt, completion, row):
        assert row == next(r for r in ROWS if r["prompt"] == prompt)
        seen.append(completion)
        row.clear()  # what it does to its row is forgotten
        return completion.count("e")

    found = run(settings(place, **GRPO, steps=25, checkpoint=str(sft.model)), verifier, out=tmp_path)
    reward = found.curves["finetune/reward"][0]
    assert reward[-5:].mean() > reward[:5].mean() + 1
    assert found.after["reward"] > found.before["reward"] + 1
    assert max(map(len, seen)) <= 8 and len(seen) == 1 + 25 * 64 + 2 * 6
    held = [json.loads(line) for line in (found.folder / "held_out.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in held] == [ROWS[row["line"] - 1]["prompt"] for row in held]
    for stage, means, said in (("before", found.before, seen[1:7]), ("after", found.after, seen[-6:])):
        assert [row[stage][how]["completion"] for row in held for how in ("greedy", "drawn")] == said
        assert [row[stage][how]["reward"] for row in held for how in ("greedy", "drawn")] == [text.count("e") for text in said]
        assert means["reward"] == pytest.approx(np.mean([text.count("e") for text in said[1::2]]))
        assert means["greedy"] == pytest.approx(np.mean([text.count("e") for text in said[::2]]))
    assert "| greedy |" in found.report.read_text()


def test_held_out_rows_are_judged_in_looks_that_are_alike(place, tmp_path):
    seen, plan = [], []

    def verifier(prompt, completion, row):
        seen.append((prompt, completion))
        return len(seen) % 2

    few = GRPO | {"batch": 2, "group": 2, "held_out": 3}
    found = run(settings(place, **few, steps=1), verifier, out=tmp_path, on_progress=lambda told: plan.append(told.get("steps")))
    assert plan[0] == {"before": 2, "finetune": 1, "after": 2} and len(seen) == 1 + 4 + 2 * 6
    held = [json.loads(line) for line in (found.folder / "held_out.jsonl").read_text().splitlines()]
    for stage, said in (("before", seen[1:7]), ("after", seen[-6:])):
        assert [(row["prompt"], row[stage][how]["completion"]) for row in held for how in ("greedy", "drawn")] == said


def test_prompts_stand_in_a_template(place, tmp_path):
    """A verifier has the row's own prompt; training is that on rows which have the template in them."""
    (tmp_path / "chat.txt").write_text("<u>{prompt}</u>\n<a>\n")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"prompt": f"<u>{row['prompt']}</u>\n<a>"}) for row in ROWS))
    ours = run(settings(place, steps=3, template=str(tmp_path / "chat.txt")), out=tmp_path / "a")
    theirs = run(settings(place, steps=3, data=str(tmp_path / "rows.jsonl")), out=tmp_path / "b")
    assert ours.before == theirs.before and ours.after == theirs.after
    plain = {row["prompt"] for row in ROWS}
    seen = []
    run(settings(place, **GRPO | {"length": 40}, steps=1, template=str(tmp_path / "chat.txt")),
        lambda prompt, completion, row: seen.append((prompt, row["prompt"])) or 0.0, out=tmp_path / "c")
    assert all(one == two and one in plain for one, two in seen)


def test_nothing_need_be_held_out(place, tmp_path):
    found = run(settings(place, lora_rank=2, held_out=0, steps=2), out=tmp_path)
    assert found.before == found.after == {} and "| loss | n/a | n/a |" in found.report.read_text()


# --- killed and resumed


def words_of(place, method, steps=12):
    more = ["--method", "grpo", "--verifier", str(place / "judge.py:count_e"), "--new", "8", "--length", "16"]
    return ["finetune", "--checkpoint", str(place / "tiny"), "--data", str(place / "rows.jsonl"), "--bytes", "--every", "1",
            "--steps", str(steps), "--learning-rate", "1e-2", *(more if method == "grpo" else ["--method", method])]


def start(words, out, **variables):
    """Nobody reads what it says."""
    variables["JAXPT_CACHE"] = jax.config.jax_compilation_cache_dir
    return running.start(words, out, variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def same(a, b):
    (one,), (two,) = (list((out / "finetune").iterdir()) for out in (a, b))
    for name in ("curves.npz", "model/model.safetensors", "model/config.json", "figure.png"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_killed_and_resumed_is_bit_for_bit_the_same(place, tmp_path, capsys):
    words = words_of(place, "grpo")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main([*words, "--out", str(whole)]) == 0
    assert start(words, broken, KILLED_AT="300").wait() == -signal.SIGKILL  # in the fifth update: one call, 3 held out, 64 each
    (folder,) = (broken / "finetune").iterdir()
    assert len(list(folder.glob("chunks/finetune/0*"))) == 4
    assert not (folder / "report.md").exists() and not (folder / "model").exists()
    (folder / f"{store.TEMPORARY}1-model").mkdir()  # as a run leaves it that is killed while it saves
    (folder / f"{store.TEMPORARY}1-model" / "config.json").touch()
    capsys.readouterr()
    assert main([*words, "--out", str(broken)]) == 2 and "add --resume" in capsys.readouterr().err
    assert main([*words, "--out", str(broken), "--resume"]) == 0
    same(whole, broken)
    assert set(os.listdir(folder)) == FOLDERS | {"held_out.jsonl"}
    assert main([*words, "--out", str(broken), "--resume"]) == 0  # finished: all is there already
    same(whole, broken)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_killed_at_many_random_moments(place, tmp_path, method):
    words, rng = words_of(place, method, 40), random.Random(method)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    started = time.monotonic()
    assert start(words, whole).wait() == 0
    seconds = time.monotonic() - started
    for _ in range(10):
        process = start([*words, "--resume"], broken)
        time.sleep(rng.uniform(0, seconds))
        process.kill()
        process.wait()
    assert start([*words, "--resume"], broken).wait() == 0
    same(whole, broken)


# --- bad input


@pytest.fixture
def refused(place, tmp_path, capsys):
    """refused(*words) -> the sentence; the exit code is 2 and nothing has been written."""
    def call(*words):
        usual = {"--checkpoint": place / "tiny", "--data": place / "rows.jsonl", "--out": tmp_path / "out", "--steps": 1}
        given = [str(word) for pair in usual.items() if pair[0] not in words for word in pair]
        code = main(["run", "finetune", "--bytes", *given, *map(str, words)])
        *before, said = capsys.readouterr().err.splitlines()
        assert code == 2 and said.startswith("jaxpt: ") and all("steps, seeds 1" in line for line in before)
        assert not list(tmp_path.glob("out/finetune/*/model")) and not list(tmp_path.glob("out/finetune/*/report.md"))
        return said
    return call


BROKEN = {
    b'{"prompt": "a"': "is no JSON", b"[1]": "is no JSON object", b'{"prompt": "a"}': "has no 'response'",
    b'{"prompt": 5, "response": "b"}': "has prompt = 5", b'{"prompt": "\xff", "response": "b"}': "is no JSON",
    b'{"prompt": "a", "response": "\\ud800"}': "has half a character in 'response'",
    json.dumps({"prompt": "a" * 300, "response": "b"}).encode(): "has a prompt of 300 tokens, expected at most 255",
    b"[" * 100_000: "is no JSON",
}


@pytest.mark.parametrize("line", BROKEN, ids=BROKEN.values())
def test_bad_lines_are_told_by_number(refused, place, tmp_path, line):
    file, good = tmp_path / "bad.jsonl", json.dumps(ROWS[0]).encode()
    file.write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n{\n")
    said = refused("--data", file)
    assert f"line 3 {BROKEN[line]}" in said and "(also bad: 5)" in said and "--skip-bad" in said
    words = tokenizer.of_bytes(place / "tiny", 259)
    kept = prompts.read(file, "sft", words, 256, 1, True)
    assert [t.line for t in kept.kept] == [1, 4] and set(kept.bad) == {3, 5}
    file.write_bytes(line)
    assert "no row is left" in refused("--data", file, "--skip-bad")


def test_bad_files_folders_and_words(refused, place, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    assert "the file has no rows" in refused("--data", empty)
    assert "No such file" in refused("--data", tmp_path / "none.jsonl")
    assert "--template" in (said := refused("--template", tmp_path / "none.txt")) and "No such file" in said
    assert "{prompt} is expected in it" in refused("--template", empty)
    assert "--offload: expected with --full" in refused("--offload") and "--offload" in refused("--offload", "--full")
    assert "did you mean grpo" in refused("--method", "grpp")
    assert "none that --method dpo can follow" in refused("--method", "dpo", "--objective", "grpo")
    assert "did you mean" in refused("--objective", "sff")
    assert "--steps 0: expected at least 1" in refused("--steps", 0)
    assert "--held-out 30: expected less than the 30 rows" in refused("--held-out", 30)
    assert "expected without --full" in refused("--full", "--lora-rank", 4)
    assert "with --method grpo only" in refused("--new", 5)
    assert "is there already" in refused("--save", place)
    assert "config.json" in refused("--checkpoint", tmp_path / "nowhere")
    bare = shutil.copytree(place / "tiny", tmp_path / "small")
    small = ModelConfig(vocab=200, d_model=16, n_layers=1, n_heads=2)
    shutil.rmtree(bare)
    checkpoint.write(bare, small, jax.jit(make_model(small).init)(jax.random.key(0)))
    assert "expected at least 256 for a model of bytes" in refused("--checkpoint", bare)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_is_asked_for(place, tmp_path):
    with pytest.raises(UserError, match="has no tokenizer.json"):
        run(settings(place, bytes=False), out=tmp_path)
    assert not list(tmp_path.iterdir())


VERIFIERS = {
    "lambda p, c, r: 1 / 0": "raised ZeroDivisionError: division by zero", "lambda p, c, r: float('nan')": "gave nan",
    "lambda p, c, r: 'much'": "gave 'much'", "lambda p, c, r: None": "gave None", "lambda p: 1": "raised TypeError",
    "lambda p, c, r: r['answer']": "raised KeyError: 'answer'", "lambda p, c, r: 10**400": "expected a finite number",
    "lambda p, c, r: float('inf') if c else 0": "gave inf",
}


@pytest.mark.parametrize("code", VERIFIERS)
def test_bad_verifiers_are_told(refused, tmp_path, code):
    (tmp_path / "judge.py").write_text(f"judge = {code}\n")
    said = refused("--method", "grpo", "--verifier", f"{tmp_path}/judge.py:judge", "--new", 8, "--length", 16)
    assert VERIFIERS[code] in said and "at line" in said
    assert (tmp_path / "out").exists() == ("if c" in code)  # the others are found before anything begins


def test_a_verifier_that_is_not_there(refused, tmp_path):
    assert "--verifier is missing" in refused("--method", "grpo")
    assert "with --method sft" in refused("--verifier", "a:b")
    assert "no module named 'nowhere'" in refused("--method", "grpo", "--verifier", "nowhere:f")
    (tmp_path / "judge.py").write_text("def judge(p, c, r): return 1\n")
    assert "did you mean judge" in refused("--method", "grpo", "--verifier", f"{tmp_path}/judge.py:judgf")


def test_a_loss_that_is_no_number_ends_the_run(place, tmp_path):
    with pytest.raises(RunFailed, match="smaller --learning-rate"):
        run(settings(place, lora_rank=None, learning_rate=1e30, steps=9), out=tmp_path)
    assert not list(tmp_path.glob("*/*/report.md"))


def test_a_taken_folder_is_kept(place, sft, tmp_path):
    """A resumed run takes a folder as its own only if it holds its own model."""
    out = shutil.copytree(sft.folder.parents[1], tmp_path / "out")
    before = checkpoint.read(place / "tiny").params
    with pytest.raises(UserError, match="holds another model"):
        run(settings(place, lora_rank=2), out=out, save=place / "tiny", resume=True)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, checkpoint.read(place / "tiny").params))
    assert store.read_config(out / "finetune" / sft.folder.name)["runs"][-1]["finished"] is False
