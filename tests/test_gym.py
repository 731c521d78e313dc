"""Tasks of reasoning-gym in the place of a file: what is read off a spec and off an answer, what is told where something is
missing; and, where the package is installed, its questions and scores against our own arithmetic."""

import json
import re
import sys

import pytest

from jaxpt.cli import main
from jaxpt.lab import checkpoint, gym
from jaxpt.lab.errors import UserError
from test_finetune import place  # noqa: F401

NEEDED = "reasoning-gym is not installed: pip install 'jaxpt[gym]'"
SHORT = "reasoning_gym:chain_sum,size=40,seed=3,min_terms=2,max_terms=3,min_digits=1,max_digits=1"


@pytest.mark.parametrize("completion, answer", [
    (" 12\n", "12"), ("so <answer> 7 </answer> it is", "7"), ("<answer>1</answer> no, <answer>\n2\n</answer>", "2"),
    ("<answer>3", "<answer>3"), ("", ""), ("<answer></answer>", ""),
])
def test_what_counts_as_an_answer(completion, answer):
    assert gym.answer_in(completion) == answer


def test_a_spec_has_a_name_and_parameters():
    assert gym.parsed("reasoning_gym:chain_sum") == ("chain_sum", {})
    name, given = gym.parsed("reasoning_gym:a_b,size=9,words=[1, 2],flag=true,kind=x,y,rate=0.5")
    assert name == "a_b" and given == {"size": 9, "words": [1, 2], "flag": True, "kind": "x,y", "rate": 0.5}
    for spec in ("chain_sum", "gym:chain_sum", "reasoning_gym:", "reasoning_gym:a b", "reasoning_gym:a,9"):
        with pytest.raises(UserError, match="reasoning_gym:NAME is expected"):
            gym.parsed(spec)


@pytest.fixture
def refused(place, tmp_path, capsys):  # noqa: F811
    """refused(*words) -> the sentence; the exit code is 2 and nothing has been written."""
    def call(*words):
        usual = ["run", "finetune", "--checkpoint", place / "tiny", "--bytes", "--out", tmp_path / "out"]
        assert main([*map(str, usual), *words]) == 2
        assert not (tmp_path / "out").exists()
        (said,) = capsys.readouterr().err.splitlines()
        return said
    return call


def test_what_does_not_go_together(refused, place):  # noqa: F811
    assert "--data is missing" in refused()
    assert "expected without --data" in refused("--tasks", SHORT, "--data", str(place / "rows.jsonl"))
    assert "expected with --method sft or grpo" in refused("--tasks", SHORT, "--method", "dpo")
    assert "without --verifier" in refused("--tasks", SHORT, "--method", "grpo", "--verifier", f"{place}/judge.py:count_e")
    assert "size=0: a whole number of at least 1" in refused("--tasks", "reasoning_gym:chain_sum,size=0")
    assert "seed=x: a whole number" in refused("--tasks", "reasoning_gym:chain_sum,seed=x")
    assert "--held-out -1: expected at least 0" in refused("--tasks", SHORT, "--held-out", "-1")


def test_a_missing_package_is_told(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    assert "the package reasoning-gym is not installed; pip install 'jaxpt[gym]' installs it" in refused("--tasks", SHORT)


# ------------------------------------------------------------------ with the package


@pytest.fixture
def installed():
    pytest.importorskip("reasoning_gym", reason=NEEDED)


def test_questions_are_of_their_seeds_and_scores_are_those_of_arithmetic(installed):
    found, again = gym.tasks(SHORT, None), gym.tasks(SHORT, None)
    assert (found.train, found.held) == (again.train, again.held)
    assert len(found.held) == 4 and 0 < len(found.train) <= 40
    assert not {row["prompt"] for row in found.train} & {row["prompt"] for row in found.held}
    behind = gym.tasks(SHORT.replace("seed=3", "seed=43").replace("size=40", "size=4"), 0)
    assert [row["prompt"] for row in found.held] == [row["prompt"] for row in behind.train]  # of the seeds behind
    assert len({row["prompt"] for row in gym.tasks(SHORT, 300).held}) == 300
    for row in (*found.train, *found.held):
        sum_ = eval(re.search(r"[-+ \d]+(?= =)", row["prompt"])[0])  # noqa: S307
        assert row["prompt"].endswith("=") and int(row["response"]) == sum_
        assert found.verifier(row["prompt"], f"hm <answer>{sum_}</answer>", row) == 1
        assert found.verifier(row["prompt"], str(sum_), row) == 1
        assert found.verifier(row["prompt"], f"<answer>{sum_ + 1}</answer> {sum_}", row) < 0.1
        assert found.verifier(row["prompt"], "", row) == 0


def test_what_reasoning_gym_does_not_have_is_told(installed, refused):
    assert "the task 'chain_sun' is unknown: did you mean chain_sum?" in refused("--tasks", "reasoning_gym:chain_sun")
    assert "chain_sum has no parameter 'min_term': did you mean min_terms?" in refused("--tasks", "reasoning_gym:chain_sum,min_term=2")
    assert "reasoning-gym refuses (AssertionError" in refused("--tasks", "reasoning_gym:chain_sum,min_terms=0")
    few = "reasoning_gym:chain_sum,size=1,seed={},min_terms=2,max_terms=2,min_digits=1,max_digits=1"
    said = refused("--tasks", few.format(0), "--held-out", "3000")  # a + b and a - b of ten digits
    assert int(re.search(r"are (\d+) different questions", said)[1]) == 200
    assert "every question is also held out" in refused("--tasks", few.format(0), "--held-out", "200")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_model_is_tuned_on_tasks(installed, place, tmp_path, method, capsys):  # noqa: F811
    more = ["--method", "grpo", "--new", "8"] if method == "grpo" else []
    words = ["run", "finetune", "--checkpoint", str(place / "tiny"), "--bytes", "--tasks", SHORT, "--steps", "6", "--every", "2",
             "--learning-rate", "1e-2", "--out", str(tmp_path), *more]
    assert main(words) == 0
    (folder,) = (tmp_path / "finetune").iterdir()
    record = json.loads((folder / "config.json").read_text())
    assert record["rows"]["held out"] == 4 and "--tasks" in record["runs"][0]["command"] and "--data" not in record["runs"][0]["command"]
    assert {"tasks", "reasoning-gym", "model.safetensors"} <= record["contents"].keys()
    assert checkpoint.read(folder / "model").cfg.vocab == 259
    before = (folder / "curves.npz").read_bytes()
    for path in folder.glob("chunks/finetune/*-00002.npz"):
        path.unlink()
    (folder / "report.md").unlink()
    assert main([*words, "--resume"]) == 0 and (folder / "curves.npz").read_bytes() == before
