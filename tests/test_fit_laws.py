"""`jaxpt fit` with the laws of the table and with a user's own, and `jaxpt list laws`."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxpt.cli import main
from jaxpt.scaling.laws import predict, table

LAWS = table()


def text(law, x, noise=0.01, names=None):
    y = predict(law, np.array(law.values), list(x.values()))
    y = y * np.exp(noise * np.random.default_rng(0).normal(size=y.size))
    rows = zip(*(column.tolist() for column in (*x.values(), y)), strict=True)
    return "\n".join([",".join(names or (*x, law.output)), *(",".join(map(repr, row)) for row in rows)]) + "\n"


ENVELOPE = text(LAWS["envelope"], {"C": np.geomspace(1e17, 1e22, 20)})


@pytest.fixture
def fit(tmp_path, capsys):
    """Writes a file and fits it: (exit code, stdout, stderr)."""
    def run(content, *words):
        (tmp_path / "runs.csv").write_text(content)
        code = main(["fit", str(tmp_path / "runs.csv"), "--bootstrap", "20", *words])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(tmp_path) + os.sep, "")
    return run


def test_the_contract_s_keys(fit):
    code, out, err = fit(ENVELOPE, "--law", "envelope", "--json", "--at", "C=1e23")
    entry = json.loads(out, parse_constant=pytest.fail)
    assert code == 0 and err == ""
    assert list(entry)[:9] == ["law", "n_points", "params", "se", "ci95", "objective", "certificate", "warnings",
                               "version"]
    assert entry["law"] == "envelope" and entry["n_points"] == 20 and entry["certificate"]["converged"]
    assert list(entry["params"]) == list(entry["se"]) == list(entry["ci95"]) == ["E", "A", "alpha"]
    assert "frontier" not in entry and entry["correlation"]["of"] == ["log E", "log A", "log alpha"]
    low, high = entry["prediction"]["loss"]["ci95"]
    assert low < entry["prediction"]["loss"]["value"] < high and entry["prediction"]["at"] == {"C": 1e23}
    assert fit(ENVELOPE, "--law", "envelope", "--json", "--at", "C=1e23")[1] == out  # the same bytes
    code, out, _ = fit(ENVELOPE, "--law", "envelope", "--fix", "E=1.7", "--at", "C=1e23")
    assert code == 0 and "Predicted at C = 1e+23" in out and "of the log residual" in out
    assert "## Law envelope" in fit(ENVELOPE, "--law", "envelope", "--markdown")[1]


def test_columns_by_well_known_names_and_by_flag(fit):
    kl = {"KL": np.linspace(0, 40, 15)}
    law = LAWS["overoptimisation_bon"]
    for names, words in ((("kl", "gold reward"), ()), (("a", "b"), ("--x", "KL=a,reward=b"))):
        code, out, err = fit(text(law, kl, names=names), "--law", "overoptimisation_bon", "--json", *words)
        assert code == 0, err
        entry = json.loads(out)
        assert entry["method"]["residual"] == "residual over the largest reward"
        assert entry["params"]["alpha"] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("law, x", [("envelope", {"C": np.geomspace(1e17, 1e22, 20)}),
                                    ("step_lr", {"N": np.geomspace(1e7, 1e9, 20), "D": np.geomspace(1e11, 1e9, 20)})])
def test_a_figure(fit, tmp_path, law, x):
    pytest.importorskip("matplotlib")
    assert fit(text(LAWS[law], x), "--law", law, "--figure", str(tmp_path / "x.png"))[0] == 0
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_a_law_of_one_s_own(fit, tmp_path):
    file = tmp_path / "my.py"
    file.write_text('def mine(C, *, A=50.0, alpha=0.1, E=1.5):\n    """E plus a power of C."""\n    return E + A / C**alpha\n'
                    "def sour(C, *, A=1.0):\n    import numpy\n    return A * numpy.exp(C)\n"
                    "def bare(C, *, A):\n    return A\nnothing = 3\n")
    code, out, err = fit(ENVELOPE, "--law", f"{file}:mine", "--json")
    assert code == 0, err
    entry = json.loads(out)
    assert entry["law"] == "mine" and entry["formula"] == "E plus a power of C."
    assert entry["params"]["alpha"] == pytest.approx(0.09, rel=0.2)
    for name, words in ((":mime", "did you mean mine?"), (":bare", "parameter A needs a number as its default"),
                        (":nothing", "has no such function"), (":sour", "with jax.numpy")):
        code, out, err = fit(ENVELOPE, "--law", f"{file}{name}")
        assert code == 2 and out == "" and words in err and len(err.splitlines()) == 1, err
    assert "there is no file" in fit(ENVELOPE, "--law", "absent.py:mine")[2]
    (tmp_path / "broken.py").write_text("1 +")
    assert "cannot be imported: SyntaxError" in fit(ENVELOPE, "--law", f"{tmp_path / 'broken.py'}:mine")[2]


@pytest.mark.parametrize("words, sentence", [
    (["--law", "enveloppe"], "--law enveloppe: did you mean envelope?"),
    (["--law", "kaplan_n"], "line 1: no column for parameters N among C, loss: say --n COLUMN"),
    (["--law", "coverage"], "no column for samples k among C, loss: say --x k=COLUMN"),
    (["--law", "envelope", "--x", "U=loss"], "--x U=loss: the law has no U: expected one of C, loss"),
    (["--law", "envelope", "--x", "C"], "--x C: NAME=VALUE is expected"),
    (["--law", "envelope", "--x", "C=flop"], "--c flop: runs.csv has no such column"),
    (["--law", "envelope", "--fix", "B=1"], "--fix B=1: the law has no such parameter"),
    (["--law", "envelope", "--fix", "E=-1"], "--fix E=-1: E is above 0"),
    (["--law", "envelope", "--at", "N=1e9"], "--at: a value for each of C is expected, got N"),
    (["--law", "envelope", "--budget", "1e21"], "--budget 1e+21: only --law chinchilla"),
    (["--law", "envelope", "--d-from", "6"], "--d-from 6: the law is a function of C"),
    (["--law", "envelope", "--drop", "highest:18"], "2 runs left to fit; the law has 3 parameters"),
])
def test_bad_input_is_one_sentence(fit, words, sentence):
    code, out, err = fit(ENVELOPE, *words)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and sentence in err, err


def test_laws_are_listed_without_jax():
    code = ("import sys; from jaxpt.cli import main; main(['list', 'laws']); main(['list', 'laws', '--json']); "
            "assert 'jax' not in sys.modules")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout[done.stdout.index("\n["):])
    assert [record["name"] for record in records] == list(LAWS)
    assert all(name in done.stdout for name in ("Muennighoff", "overoptimisation_rl", "log10 E^"))
