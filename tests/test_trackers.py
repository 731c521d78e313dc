"""Trackers behind one log(step, values): what they are told is what curves.npz holds, each point once."""

import importlib.machinery
import importlib.util
import json
import math
import os
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import toy_experiment
from jaxpt.cli import main
from jaxpt.lab import trackers
from jaxpt.lab.errors import UserError
from jaxpt.lab.run import run

TOY = str(Path(toy_experiment.__file__).resolve())
pytestmark = pytest.mark.usefixtures("compile_cache")


def needs(package):
    installed = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not installed, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An untracked run of two seeds, 12 steps of each of three stages."""
    return run(TOY, "smoke", out=tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copied(finished, tmp_path):
    """The `out` of a copy of the finished run: resumed with two seeds, it has nothing to compute."""
    shutil.copytree(finished.folder.parents[1], tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def fake(monkeypatch):
    """A tracker that remembers: (name, config, [(step, values)], closed) of every tracked run."""
    opened = []

    def open_fake(folder, name, config):
        (folder / name).mkdir(parents=True)
        seen = SimpleNamespace(folder=folder, name=name, config=config, points=[], closed=False)
        opened.append(seen)
        return trackers.Tracker(lambda step, values: seen.points.append((step, values)),
                                lambda: setattr(seen, "closed", True))

    monkeypatch.setitem(trackers.KINDS, "fake", open_fake)
    return opened


def points_of(curves, stage, row):
    """{(metric, step): value} by plain loops: NaN is no point, nor is an array."""
    table = {}
    for name, x in curves.items():
        if name.split("/")[0] == stage and np.ndim(x) == 2:
            for step in range(x.shape[1]):
                if x[row][step] == x[row][step]:
                    table[name.split("/")[1], step + 1] = float(x[row][step])
    return table


def expected_runs(result):
    curves = dict(np.load(result.folder / "curves.npz"))
    runs = {f"{stage}/seed{seed}": points_of(curves, stage, row)
            for stage in ("base", "fast", "slow") for row, seed in enumerate(curves["seeds"])}
    assert all(len(points) == 12 + 3 + 12 for points in runs.values())  # loss, eval every fourth step, half
    return runs


# ------------------------------------------------------------------ what a tracker is told


def test_every_point_of_the_curves_once(fake, finished, tmp_path):
    result = run(TOY, "smoke", out=tmp_path, track=("fake", "none", "fake"))
    assert result.tracked == [result.folder / "fake"] and (result.folder / "fake" / "slow" / "seed1").is_dir()
    assert all(seen.closed for seen in fake)
    expected = expected_runs(result)
    assert [seen.name for seen in fake] == list(expected)
    for seen in fake:
        told = {(metric, step): value for step, values in seen.points for metric, value in values.items()}
        assert told == expected[seen.name]
        steps = [step for step, _ in seen.points]
        assert steps == sorted(set(steps))
        assert all(type(value) is float for _, values in seen.points for value in values.values())
        assert (seen.config["stage"], f"seed{seen.config['seed']}") == tuple(seen.name.split("/"))
        assert seen.config["run"] == result.folder.name and seen.config["config"]["noise"] == 0.1
        json.dumps(seen.config)
    # and tracking is no part of the run: the same hash, the same arrays
    assert result.folder.name == finished.folder.name
    assert (result.folder / "curves.npz").read_bytes() == (finished.folder / "curves.npz").read_bytes()


def test_a_finished_run_is_tracked_without_computing(fake, copied):
    messages = []
    result = run(TOY, "smoke", out=copied, resume=True, track=("fake",), on_progress=messages.append)
    assert [seen.name for seen in fake] == list(expected_runs(result))
    assert [m["kind"] for m in messages] == ["inputs", "plan"] and messages[1]["seeds"] == []


def test_an_extended_run_replaces_what_was_tracked(fake, copied):
    (folder,) = copied.glob("*/*")
    (folder / "fake" / "old").mkdir(parents=True)
    (folder / "fake.unfinished" / "old").mkdir(parents=True)  # as a kill leaves it
    result = run(TOY, "smoke", seeds=3, out=copied, resume=True, track=("fake",))
    assert [seen.name for seen in fake] == list(expected_runs(result)) and len(fake) == 9
    assert sorted(p.name for p in folder.glob("fake*/*")) == ["base", "fast", "slow"]


def test_infinity_is_a_point_and_a_step_without_a_measurement_none():
    curves = {"a/x": np.array([[1.0, np.nan, np.inf]]), "a/n": np.array([[np.nan, np.nan, 7]]),
              "a/wide": np.zeros((1, 3, 2)), "ab/x": np.zeros((1, 3)), "seeds": np.array([0])}
    assert list(trackers.points(curves, "a", 0)) == [(1, {"x": 1.0}), (3, {"x": math.inf, "n": 7.0})]


def test_a_failing_tracker_leaves_the_run_finished(monkeypatch, copied):
    def broken(folder, name, config):
        folder.mkdir()
        raise RuntimeError("no room\nat all")

    monkeypatch.setitem(trackers.KINDS, "broken", broken)
    with pytest.raises(UserError, match="--track broken: RuntimeError: no room at all; the run is finished"):
        run(TOY, "smoke", out=copied, resume=True, track=["broken"])
    (folder,) = copied.glob("*/*")
    assert (folder / "report.md").exists() and not (folder / "broken").exists()


# ------------------------------------------------------------------ the command line


def test_unknown_and_missing_trackers_are_told_before_anything_is_computed(capsys, monkeypatch, tmp_path):
    find, gone = importlib.util.find_spec, set(trackers.PACKAGES.values())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in gone else find(name))
    for words, sentence in [
        ("wandbb", "--track 'wandbb' is unknown: did you mean wandb?"),
        ("none,x", "--track 'x' is unknown: expected one of none, tensorboard, wandb"),
        ("tensorboard", "--track tensorboard: the package tensorboardX is not installed; "
                        "pip install 'jaxpt[tensorboard]' installs it"),
        ("none,wandb", "pip install 'jaxpt[wandb]'"),
    ]:
        assert main(["run", TOY, "--tier", "smoke", "--out", str(tmp_path), "--track", words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and sentence in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_track_is_repeatable_and_takes_commas(fake, monkeypatch, capsys, copied):
    monkeypatch.setitem(trackers.KINDS, "other", trackers.KINDS["fake"])
    words = ["run", TOY, "--tier", "smoke", "--out", str(copied), "--resume"]
    assert main([*words, "--track", "fake,none", "--track=other"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["report", "figure", "tracked", "tracked"]
    assert lines[-2].endswith("/fake") and lines[-1].endswith("/other") and len(fake) == 12


def test_wandb_is_always_offline(monkeypatch, tmp_path):
    """A stand-in for the module: the environment asks for the network, and does not get it."""
    calls = []
    session = SimpleNamespace(log=lambda values, step: calls.append((step, values)),
                              finish=lambda: calls.append("finish"))
    module = ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.run, module.Settings = None, dict
    module.init = lambda **words: calls.append(words) or session
    module.teardown = lambda: calls.append("teardown")
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    tracker = trackers.open_tracker("wandb", tmp_path / "new", "a/seed0", {"stage": "a", "x": np.float32(1)})
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    tracker.log(3, {"loss": 0.5})
    tracker.close()
    assert calls[0]["mode"] == "offline" and calls[0]["dir"] == str(tmp_path / "new")
    assert (tmp_path / "new").is_dir() and calls[1:] == [(3, {"loss": 0.5}), "finish", "teardown"]


# ------------------------------------------------------------------ the real ones, read back


def children():
    """Process ids of this process's children."""
    return sorted(path.read_text() for path in Path("/proc/self/task").glob("*/children"))


def event_scalars(path):
    """[(tag, step, value)] of a TensorBoard event file: length u64, its checksum, message, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, at, rows = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        scalars = [v for v in event.summary.value if v.HasField("simple_value")]
        rows += [(v.tag, event.step, v.simple_value) for v in scalars]
    return rows


def track_twice(copied, kind):
    """A finished run tracked after the fact and then once more, as a resumed run is."""
    return [run(TOY, "smoke", out=copied, resume=True, track=(kind,)) for _ in range(2)][-1]


@needs("tensorboardX")
def test_tensorboard_files_hold_the_curves(copied):
    result = track_twice(copied, "tensorboard")
    for name, points in expected_runs(result).items():
        (file,) = (result.folder / "tensorboard" / name).iterdir()
        rows = event_scalars(file)
        assert len(rows) == len(points) and {(tag, step): value for tag, step, value in rows} == points


@needs("tensorboardX")
@needs("tensorboard")
def test_tensorboard_itself_reads_the_curves(copied):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = track_twice(copied, "tensorboard")
    for name, points in expected_runs(result).items():
        read = EventAccumulator(str(result.folder / "tensorboard" / name), {"scalars": 0}).Reload()
        rows = [(tag, e.step, e.value) for tag in read.Tags()["scalars"] for e in read.Scalars(tag)]
        assert len(rows) == len(points) and {(tag, step): value for tag, step, value in rows} == points


def wandb_records(path):
    """The records of a .wandb file, which is a LevelDB log: a header of 7 bytes and blocks of 32 KiB, whose
    pieces are checksum u32, length u16, type u8 (1 whole, 2 first, 3 middle, 4 last), bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, pieces = path.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(pieces)
            pieces = b""


@needs("wandb")
def test_wandb_files_hold_the_curves(copied, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    before = children()
    result = track_twice(copied, "wandb")
    assert children() == before  # no service left running
    files = sorted((result.folder / "wandb").glob("wandb/offline-run-*/*.wandb"))
    expected = expected_runs(result)
    assert len(files) == len(expected)
    for file in files:
        records = list(wandb_records(file))
        (name,) = [r.run.display_name for r in records if r.WhichOneof("record_type") == "run"]
        rows = []
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = {(item.nested_key[0] if item.nested_key else item.key): json.loads(item.value_json)
                         for item in record.history.item}
                rows += [(k, record.history.step.num, v) for k, v in items.items() if k[0] != "_"]
        points = expected.pop(name)
        assert len(rows) == len(points) and {(k, step): v for k, step, v in rows} == points
        assert any(r.WhichOneof("record_type") == "exit" for r in records)
