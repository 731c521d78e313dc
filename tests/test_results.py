"""The table of results says what the run folders say, and no more."""

import importlib.util
import json
import os
import shutil
from pathlib import Path

import jax
import pytest

import toy_experiment
from jaxpt.lab.run import run

TOY = str(Path(toy_experiment.__file__).resolve())
SCRIPT = Path(__file__).parents[1] / "scripts" / "results.py"
spec = importlib.util.spec_from_file_location("results", SCRIPT)
results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results)


@pytest.fixture(scope="module")
def made(compile_cache, tmp_path_factory):
    """Two folders of runs: three seeds of the toy, and two more from 1000 on."""
    first, second = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("again")
    run(TOY, "smoke", seeds=3, out=first)
    run(TOY, "smoke", seeds=2, seed0=1000, out=second)
    return first, second


@pytest.fixture
def folders(made, tmp_path):
    """Copies to edit: (out, replication's out), each with one run folder."""
    copies = tmp_path / "runs", tmp_path / "again"
    for source, copy in zip(made, copies, strict=True):
        shutil.copytree(source, copy)
    return copies


@pytest.fixture
def say(capsys):
    """main in this process: (exit code, stdout, stderr)."""
    def call(*words):
        code = results.main([*map(str, words), "--tier", "smoke"])
        return code, *capsys.readouterr()
    return call


def only(out):
    (folder,) = out.glob("*/*")
    return folder


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def cells(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_the_table_is_what_the_folders_hold(made, say):
    code, out, err = say("--runs", *made)
    assert (code, err) == (0, "")
    header, row = cells(out)
    row = dict(zip(header, row, strict=True))
    (claim,) = json.loads((only(made[0]) / "claims.json").read_text())
    (again,) = json.loads((only(made[1]) / "claims.json").read_text())
    assert row["command"] == f"`jaxpt run {TOY} --tier smoke --seeds 3`" and row["n"] == "3"
    assert row["claim"] == "faster > 0.05" and row["verdict (its control's)"] == (
        f"{claim['verdict']} ({claim['control']['verdict']})")
    numbers = [row["estimate"], *row["95% interval"].strip("[]").split(",")]
    assert [float(x) for x in numbers] == pytest.approx([claim["estimate"], *claim["ci95"]], rel=1e-3)
    word, estimate = row["same side at `--seed0 1000`"].split()
    assert word == ("yes" if (claim["estimate"] > 0.05) == (again["estimate"] > 0.05) else "no")
    assert float(estimate.strip("()")) == pytest.approx(again["estimate"], rel=1e-3)
    seconds = json.loads((only(made[0]) / "config.json").read_text())["runs"][0]["seconds"]
    assert 1 < seconds < 600 and float(row["minutes"]) == pytest.approx(seconds / 60, abs=0.051)
    assert "its control (the same arm twice)" in out or claim["control"]["verdict"] == "refuted"
    assert f"jax {jax.__version__}" in out


@pytest.mark.parametrize("original, again, answer", [
    (0.06, 0.5, "yes"), (0.06, 0.04, "no"), (0.04, 0.06, "no"), (0.04, -1.0, "yes"), (None, 1.0, "n/a")])
def test_a_replication_on_either_side(folders, say, original, again, answer):
    for out, value in zip(folders, (original, again), strict=True):
        edit(only(out) / "claims.json", lambda claims: claims[0].update(estimate=value, ci95=[None, None]))
    row = cells(say("--runs", *folders)[1])[1]
    assert row[-1].split()[0] == answer and row[3] == "n/a"


def test_minutes_add_up_and_admit_what_is_unknown(folders, say):
    def history(*seconds):
        def change(config):
            last = config["runs"][-1]
            last.pop("seconds", None)
            config["runs"] = [last if s is None else last | {"seconds": s} for s in seconds]
        edit(only(folders[0]) / "config.json", change)
        return cells(say("--runs", folders[0])[1])[1][-2:]

    assert history(60.0, 90.0) == ["2.5", "not run"]
    assert history(None, 90.0) == [">= 1.5", "not run"]
    assert history(None) == ["n/a", "not run"]


def test_what_is_left_out_is_named(made, folders, say):
    mine = folders[0] / "toy_experiment"
    copies = {name: mine / name for name in ("unfinished", "killed", "tier", "fields", "seeds", "newer")}
    for copy in copies.values():
        shutil.copytree(only(made[0]), copy)
    (copies["unfinished"] / "report.md").unlink()
    edit(copies["killed"] / "config.json", lambda c: c["runs"].append({**c["runs"][0], "finished": False}))
    edit(copies["tier"] / "config.json", lambda c: c.update(tier="full"))
    command = json.loads((only(made[0]) / "config.json").read_text())["runs"][0]["command"]
    edit(copies["fields"] / "config.json", lambda c: c["runs"][0].update(command=f"{command} --noise 0"))
    edit(copies["seeds"] / "config.json", lambda c: c["runs"][0].update(seeds=[0, 1, 1000]))
    (mine / "empty").mkdir()
    shutil.copytree(only(made[1]), mine / "stranger")
    old = only(made[0]).name
    os.utime(mine / old / "report.md", (10**9, 10**9))
    code, out, err = say("--runs", folders[0])
    assert code == 0 and len(cells(out)) == 2
    lines = [line.removeprefix("left out ").split(": ", 1) for line in err.splitlines()]
    said = {Path(folder).name: reason for folder, reason in lines}
    assert said.pop(old).endswith("newer is newer")
    assert said.pop("stranger").startswith("no run of this configuration")
    assert [said.pop(name) for name in ("unfinished", "killed", "empty")] == ["unfinished"] * 3
    assert said.pop("fields") == "fields of its own: --noise 0"
    assert said == {"tier": "tier full", "seeds": "seeds 0, 1, 1000"}


def test_write_replaces_what_stands_between_the_markers(folders, say, tmp_path):
    page = tmp_path / "README.md"
    for text in ("no markers", results.END + results.BEGIN, results.BEGIN):
        page.write_text(text)
        code, out, err = say("--runs", *folders, "--write", page)
        assert code == 2 and out == "" and len(err.splitlines()) == 1 and "are expected" in err
        assert page.read_text() == text
    page.write_text(f"above\n{results.BEGIN}\nold | row\n{results.END}\nbelow\n")
    once = say("--runs", *folders, "--write", page)
    written = page.read_text()
    assert once[0] == 0 and once[1] in written and "old" not in written
    assert written.startswith(f"above\n{results.BEGIN}\n") and written.endswith(f"\n{results.END}\nbelow\n")
    assert say("--runs", *folders, "--write", page) == once and page.read_text() == written


def test_nothing_to_show_is_an_error(folders, say, tmp_path):
    (only(folders[0]) / "report.md").unlink()
    code, out, err = say("--runs", folders[0])
    assert code == 2 and out == "" and "no finished run of tier smoke counts" in err
    assert say("--runs", tmp_path / "nowhere")[0] == 2
