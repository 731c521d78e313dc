"""`jaxpt verify` as its users meet it: a target's name in, a verdict, exit code and sentences out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpt.cli import main
from jaxpt.verify import TargetError, check, load
from jaxpt.verify.families import FAMILIES
from jaxpt.verify.matrix import LAWS

FILE = str(Path(__file__).with_name("verify_targets.py"))


@pytest.fixture
def say(capsys):
    def run(*words):
        code = main(("verify", *words))
        return code, *capsys.readouterr()
    return run


def test_a_verdict_is_the_same_bytes_twice_and_a_json_of_the_contract(say):
    """numpy, so that the child imports no jax."""
    words = (f"{FILE}:times_mask", "--family", "policy_loss", "--framework", "numpy", "--examples", "12", "--json")
    code, out, err = say(*words)
    assert (code, err) == (1, "") and say(*words)[1] == out
    record = json.loads(out)
    assert (record["family"], record["framework"], record["seed"]) == ("policy_loss", "numpy",
        0) and record["target"].endswith(":times_mask")
    assert {law["class"] for law in record["laws"]} == {"mathematics", "contract"}
    assert {law["status"] for law in record["laws"]} == {"holds", "broken", "not_applied"}
    (broken,) = (law for law in record["laws"] if law["status"] == "broken")
    assert broken["law"] == "mask_poison" and set(broken["counterexample"]) >= {"inputs", "wrong", "right", "position"}
    assert list(broken["counterexample"]["inputs"]) == list(FAMILIES["policy_loss"].args)


@pytest.mark.parametrize("framework", ["jax", "numpy"])
def test_a_report_is_a_function_of_the_seed_in_whichever_process(monkeypatch, say, framework):
    """Every verdict is a child's, and its hashes are others."""
    words = (f"{FILE}:squares", "--family", "router_balance", "--framework", framework, "--claim", "probabilities_alone",
             "--law", "probabilities_alone,duplication", "--examples", "8", "--json")
    outs = []
    for salt, seed in (("1", "0"), ("2", "0"), ("1", "7")):
        monkeypatch.setenv("PYTHONHASHSEED", salt)
        code, out, err = say(*words, "--seed", seed)
        assert (code, err) == (1, "")
        outs.append(out)
    one, again, other = outs
    assert one == again
    broken = [next(law for law in json.loads(out)["laws"] if law["status"] == "broken") for out in (one, other)]
    assert broken[0]["counterexample"] != broken[1]["counterexample"]


def test_text_for_readers_and_only_some_laws(say):
    code, out, _ = say(f"{FILE}:token_mean", "--family", "aggregate", "--framework", "numpy", "--examples", "6",
        "--law", "linear,padding")
    assert code == 0 and "all 2 laws hold" in out


@pytest.mark.parametrize("name, words", [
    ("nothing", "has no 'nothing'"), ("paddin", "has no 'paddin'"), ("NUMBER", "of type int, not a function"),
    ("two_arguments", "takes 2 positional arguments, family policy_loss gives 4"),
        ("needs_more", "'temperature' has no default"),
    ("wrong_shape", "returns shape (2, 3), expected a scalar"), ("raises", "raised KeyError: 'no such thing'"),
    ("all_nan", "gives NaN on every ordinary input"),
])
def test_bad_targets_are_one_sentence(name, words):
    with pytest.raises(TargetError) as error:
        check(load(f"{FILE}:{name}"), "policy_loss", framework="numpy", examples=4)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name, family, law", [
    ("raises_on_an_empty_row", "aggregate", "finite"), ("raises_when_wide", "gae", "padding"),
    ("raises_when_narrow", "aggregate", "unit_loss"),
])
def test_what_raises_on_some_inputs_breaks_a_law(name, family, law):
    """The exception is what the counterexample shows."""
    report = check(load(f"{FILE}:{name}"), family, framework="numpy", examples=24)
    assert report.broken[law].counterexample["wrong"] == "raised RuntimeError: not this one"
    assert {o.law for o in report.outcomes if o.status == "holds"} >= {"same_twice", "inputs_untouched"}


def test_what_raises_on_some_inputs_has_exit_code_1(say):
    code, out, err = say(f"{FILE}:raises_on_an_empty_row", "--family", "aggregate", "--framework", "numpy",
        "--examples", "24", "--law", "all_masked,linear")
    assert (code, err) == (1, "") and "raised RuntimeError: not this one, expected 0.0" in out


@pytest.mark.parametrize("target, words", [
    ("no_such_file.py:f", "there is no file"), ("no_such_module:f", "no module named 'no_such_module'"),
        ("json", "module:function"),
    (f"{FILE}:ppo", "--family"),
])
def test_targets_that_are_not_found(say, target, words):
    code, out, err = say(target, *(() if words == "--family" else ("--family", "policy_loss")))
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize("name, words", [("slow", "no verdict after 2 seconds"), ("dies", "ended with code 7")])
def test_a_target_that_hangs_or_dies(say, name, words):
    code, _, err = say(f"{FILE}:{name}", "--family", "policy_loss", "--framework", "numpy", "--limit",
        "2" if name == "slow" else "60")
    assert code == 2 and words in err and err.count("\n") == 1


@pytest.mark.parametrize("words, hint", [
    (("--family", "policy"), "policy_loss"), (("--family", "kl", "--claim", "unbias"), "did you mean unbiased"),
    (("--family", "kl", "--law", "kl_zer"), "did you mean kl_zero"), (("--family", "kl", "--examples", "0"), "from 1"),
    (("--family", "kl", "--seed", "-1"), "at least 0"), (("--family", "kl", "--colour", "red"), "unknown"),
        ((), "--family is missing"),
])
def test_bad_options(say, words, hint):
    code, _, err = say(f"{FILE}:k1", *words)
    assert code == 2 and hint in err and err.count("\n") == 1


def test_help_and_the_list_import_no_jax(say, capsys):
    code, out, _ = say("--help")
    assert code == 0 and all(family in out for family in FAMILIES)
    assert main(["list", "invariants", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in records[: len(LAWS)]] == [law.name for law in LAWS]
    code = ("import sys; from jaxpt.cli import main; main(['list', 'invariants']); main(['verify', '--help']); "
            "sys.exit(bool({'jax', 'numpy', 'torch'} & set(sys.modules)))")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, env=env).returncode == 0


@pytest.mark.parametrize("name, framework", [
    ("token_mean", "numpy"), ("branches", "jax"), ("says_numpy", "numpy"), ("jax_and_numpy", "jax"),
    ("numpy_and_jax", "numpy"), ("imports_for_itself", "jax"),
])
def test_the_framework_is_that_of_the_function_not_of_its_file(name, framework):
    fn = load(f"{FILE}:{name}")
    assert check(fn, "aggregate", examples=4, only=("linear",)).framework == framework
    assert check(fn, "aggregate", examples=4, only=("linear",), framework="numpy").framework == "numpy"
