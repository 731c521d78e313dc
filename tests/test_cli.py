"""The command line as its users meet it: words in, exit code and sentences out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpt
from jaxpt.cli import main
from jaxpt.cli.run import _Lines, _overrides

TOY = str(Path(__file__).with_name("toy_experiment.py"))


def call(*words, code="from jaxpt.cli import main; import sys; sys.exit(main())"):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "100"}
    words = [sys.executable, "-c", code, *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture
def say(capsys):
    """main in this process: (exit code, stdout, stderr)."""
    def run(*words):
        code = main(words)
        return code, *capsys.readouterr()
    return run


@pytest.mark.parametrize("words", [["--help"], ["list"], ["list", "objectives"], ["list", "envs"],
                                   ["list", "experiments", "--json"], ["run", "--help"], ["run", "finetune", "--help"],
                                   ["run", "nothing"], ["describe", "--help"], ["memory", "--help"], ["--version"]])
def test_no_jax_for_help_and_lists(words):
    code = ("import sys; from jaxpt.cli import main; code = main(); "
            "heavy = {'jax', 'numpy', 'scipy'} & set(sys.modules); "
            "print('heavy', sorted(heavy), file=sys.stderr); sys.exit(code)")
    done = call(*words, code=code)
    assert done.stderr.splitlines()[-1] == "heavy []"
    assert done.returncode == (2 if words == ["run", "nothing"] else 0)


def test_help_and_version(say):
    code, out, _ = say("--help")
    assert code == 0 and all(word in out for word in ("list", "run", "describe"))
    assert say() == say("-h")
    assert say("--version") == (0, f"jaxpt {jaxpt.__version__}\n", "")
    code, out, _ = say("run", "--help")
    assert code == 0
    assert all(word in out for word in ("--tier", "--seeds", "--seed0", "--out", "--resume", "--launcher"))
    for command in ("list", "describe"):
        assert say(command, "--help")[0] == 0


def test_run_help_shows_the_experiments_fields(say):
    code, out, _ = say("run", TOY, "--help", "--tier", "cpu")
    assert code == 0
    assert "--noise" in out and "steps of every stage" in out and "40" in out


@pytest.mark.parametrize("words, sentence", [
    (["rum"], "command 'rum' is unknown: did you mean run?"),
    (["run"], "NAME is missing"),
    (["run", "--seeds", "3"], "NAME is missing"),
    (["run", "no_such_thing"], "experiment 'no_such_thing' is unknown"),
    (["run", "nowhere.py"], "experiment 'nowhere.py': there is no such file"),
    (["run", TOY, "--seeds", "x"], "--seeds x: a whole number is expected"),
    (["run", TOY, "--seeds", "0"], "--seeds 0: a whole number of at least 1 is expected"),
    (["run", TOY, "--seeds"], "--seeds needs a value"),
    (["run", TOY, "--seeds", "--resume"], "--seeds needs a value"),
    (["run", TOY, "--resume=yes"], "--resume takes no value, got 'yes'"),
    (["run", TOY, "--tier", "fulll"], "--tier 'fulll' is unknown: did you mean full?"),
    (["run", TOY, "--nois", "3"], "option --nois is unknown: did you mean --noise?"),
    (["run", TOY, "--seed", "3"], "option --seed is unknown: did you mean --seed"),
    (["run", TOY, "extra"], "argument extra is unknown"),
    (["run", TOY, "--steps", "x"], "--steps x: a value of type int (default 40) is expected"),
    (["run", TOY, "--noise", "1", "--steps=x"], "--steps x: a value of type int"),
    (["run", TOY, "--out", "/dev/null"], "--out: cannot write"),
    (["list", "objetives"], "kind 'objetives' is unknown: did you mean objectives?"),
    (["list", "--jsn"], "option --jsn is unknown: did you mean --json?"),
    (["describe"], "ROW is missing"),
])
def test_errors_are_one_sentence(say, words, sentence):
    code, out, err = say(*words)
    assert code == 2 and out == ""
    assert err.startswith("jaxpt: ") and sentence in err
    assert len(err.splitlines()) == 1


def test_errors_without_a_traceback_from_a_shell():
    done = call("run", TOY, "--nois", "3")
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""


def test_fields_reach_the_config():
    assert _overrides(TOY, "cpu", ["--steps", "40", "--noise", "0.5"]) == {"noise": 0.5}
    assert _overrides(TOY, "cpu", ["--steps=3"]) == {"steps": 3}


def test_a_run_ends_with_its_claims(tmp_path):
    done = call("run", TOY, "--tier", "smoke", "--seeds", "1", "--steps", "4", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "faster" in done.stdout and "underpowered" in done.stdout
    report, figure = (line.split()[1] for line in done.stdout.splitlines()[-2:])
    assert Path(report).exists() and Path(figure).exists()
    assert "\njaxpt: 0/12 steps, seeds 1, workers 1" in done.stderr


def test_lists(say):
    names = [entry["name"] for entry in json.loads(say("list", "--json")[1])]
    assert names == sorted(names)
    for kind in ("objectives", "envs", "laws", "invariants", "errata"):
        code, out, _ = say("list", kind)
        assert code == 0 and out
        assert isinstance(json.loads(say("list", kind, "--json")[1]), list)


def test_a_closed_pipe_is_no_error():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-m", "jaxpt", "--help"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=env)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() in (0, 141)


def test_progress_counts_and_speaks(capsys):
    lines = _Lines(every=0.0)
    lines({"kind": "plan", "folder": "runs/x", "seeds": [0, 1], "steps": {"a": 4, "b": 6}, "workers": 2})
    lines({"kind": "progress", "seed": 1, "stage": "a", "steps": 4, "chunk": 0, "metrics": {"loss": 0.5}})
    lines({"kind": "done", "seed": 1})
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "jaxpt: 0/20 steps", "jaxpt: 4/20 steps", "jaxpt: 10/20 steps"]


def test_lists_read_from_the_sources_are_the_tables():
    from jaxpt.envs import ENVS
    from jaxpt.lab import catalogue
    from jaxpt.objectives import ROWS

    assert dict(catalogue.objectives()) == {row.name: row.paper for row in ROWS.values()}
    assert [name for name, _ in catalogue.environments()] == sorted(ENVS)
    assert all(summary for _, summary in catalogue.environments())
