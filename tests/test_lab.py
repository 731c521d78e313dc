"""Runs end to end on a toy: killed, resumed, extended, repeated, broken. Curves must agree bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import toy_experiment
from jaxpt.lab import compiling, pool, store
from jaxpt.lab.errors import UserError
from jaxpt.lab.experiment import topological
from jaxpt.lab.identity import digest
from jaxpt.lab.run import run
from jaxpt.lab.worker import compute_seed
from running import start, wait_for, workers_of

TOY = str(Path(toy_experiment.__file__).resolve())
LONG = {"steps": 40, "chunk": 1}  # many chunks: a kill falls between any two writes
WORDS = ["run", TOY, "--tier", "smoke", "--steps", "40", "--chunk", "1"]
pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run of two seeds."""
    return run(TOY, "smoke", out=tmp_path_factory.mktemp("reference"), overrides=LONG)


def chunk_files(out):
    return len(list(out.glob("*/*/chunks/*/[!.]*")))


def same_arrays(folder, other):
    a, b = store.read_arrays(folder / "curves.npz"), store.read_arrays(other / "curves.npz")
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert a[name].tobytes() == b[name].tobytes(), name


# ------------------------------------------------------------------ killed and resumed


def kill_and_resume(reference, out, kills, rng):
    for number in range(kills):
        before = chunk_files(out)
        process = start([*WORDS, "--resume"], out)
        if number % 3:  # two in three kills fall while chunks are written, one anywhere, the start included
            wait_for(lambda: chunk_files(out) > before or process.poll() is not None)
            time.sleep(rng.uniform(0, 0.3))
        else:
            time.sleep(rng.uniform(0, 4))
        process.kill()
        process.communicate()
        wait_for(lambda: not workers_of(out))
    process = start([*WORDS, "--resume"], out)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (folder,) = out.glob("*/*")
    same_arrays(folder, reference.folder)


def test_killed_at_random_moments(reference, tmp_path):
    kill_and_resume(reference, tmp_path, 3, random.Random(0))


@pytest.mark.slow
def test_killed_at_many_random_moments(reference, tmp_path):
    kill_and_resume(reference, tmp_path, 20, random.Random(1))


def test_interrupted(tmp_path):
    """Ctrl-C reaches the whole group, as in a terminal: 130, a sentence, no workers, nothing broken."""
    process = start(WORDS, tmp_path, start_new_session=True)
    wait_for(lambda: chunk_files(tmp_path) > 3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("jaxpt: interrupted") and "--resume" in err
    assert "Traceback" not in err + out
    assert not workers_of(tmp_path)


def test_a_failing_disk_in_a_worker(tmp_path):
    """Files larger than the limit cannot be written: the worker's error arrives as one sentence."""
    words = [sys.executable, "-m", "jaxpt", "run", TOY, "--tier", "smoke", "--seeds", "1", "--size", "50000"]
    env = {**os.environ, "JAXPT_CACHE": "off", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    limited = ["bash", "-c", 'ulimit -f 150; exec "$@"', "-", *words, "--out", str(tmp_path)]
    done = subprocess.run(limited, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    (line,) = [x for x in done.stderr.splitlines() if "cannot write" in x]
    assert "free some space" in line and "--resume" in line and "chunks/base" in line
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------ repeated, extended, damaged


@pytest.fixture
def copied(reference, tmp_path):
    """A run folder of its own to damage, and the arguments that resume it."""
    folder = tmp_path / reference.folder.parent.name / reference.folder.name
    shutil.copytree(reference.folder, folder)
    return folder, {"out": tmp_path, "overrides": LONG, "resume": True}


def test_seeds_extend_a_folder_and_repeat(reference, tmp_path):
    """One seed, then a second: the same arrays as both at once, and the folder remembers the look."""
    first = run(TOY, "smoke", seeds=1, out=tmp_path, overrides=LONG)
    assert list(first.curves["seeds"]) == [0] and len(first.claims) == 1
    with pytest.raises(UserError, match="finished run"):
        run(TOY, "smoke", seeds=2, out=tmp_path, overrides=LONG)
    both = run(TOY, "smoke", seeds=2, out=tmp_path, overrides=LONG, resume=True)
    assert both.folder == first.folder
    same_arrays(both.folder, reference.folder)
    assert any("Seeds were added" in sentence for sentence in both.warnings)
    assert not reference.warnings or not any("Seeds were added" in s for s in reference.warnings)


def test_a_finished_folder_is_merged_again(reference, copied):
    folder, resume = copied
    messages = []
    (folder / "curves.npz").unlink()
    run(TOY, "smoke", seeds=1, on_progress=messages.append, **resume)
    same_arrays(folder, reference.folder)  # all finished seeds are reported, also beyond the asked ones
    assert [m["kind"] for m in messages] == ["inputs", "plan"]


@pytest.mark.parametrize("index", [3, 39])
def test_a_corrupt_chunk_is_named_deleted_and_computed_again(reference, copied, index):
    folder, resume = copied
    path = store.chunk_path(folder, "base", 1, index)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="corrupt; delete it") as caught:
        run(TOY, "smoke", **resume)
    assert str(path) in str(caught.value)
    path.unlink()
    if index == 3:
        store.chunk_path(folder, "fast", 1, 39).unlink()  # and the end of a stage behind it
    run(TOY, "smoke", **resume)
    same_arrays(folder, reference.folder)


def test_a_locked_folder(copied):
    folder, resume = copied
    with store.locked(folder), pytest.raises(UserError, match="another run"):
        run(TOY, "smoke", **resume)


def test_changed_sources_and_variables(reference, tmp_path, monkeypatch):
    own = tmp_path / "toy_experiment.py"
    shutil.copy(TOY, own)
    folder = tmp_path / reference.folder.parent.name / reference.folder.name
    shutil.copytree(reference.folder, folder)
    run(str(own), "smoke", out=tmp_path, overrides=LONG, resume=True)
    own.write_text(own.read_text() + "\n# a remark\n")
    with pytest.raises(UserError, match="cannot be resumed: the source files changed"):
        run(str(own), "smoke", out=tmp_path, overrides=LONG, resume=True)
    own.write_text(Path(TOY).read_text())
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16")
    with pytest.raises(UserError, match="JAX_DEFAULT_MATMUL_PRECISION changed"):
        run(str(own), "smoke", out=tmp_path, overrides=LONG, resume=True)


# ------------------------------------------------------------------ what a folder says


def test_the_folder_tells_the_whole_story(reference):
    folder, curves = reference.folder, reference.curves
    assert curves["slow/loss"].shape == (2, 40) and curves["slow/x"].shape == (2, 40, 2)
    assert np.isnan(curves["base/eval"]).mean() == 0.75
    np.testing.assert_array_equal(curves["inputs/numbers"], [0, 1, 2])
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["steps"] == 40 and config["executor"]["threads"] == 1
    assert config["claims_hash"] == digest(config["claims"])
    assert "slow/loss" in config["claims"][0]["estimand"]
    (claim,) = json.loads((folder / "claims.json").read_text())
    assert set("name statement estimate ci95 n margin mde control verdict".split()) <= claim.keys()
    assert {"name", "estimate", "ci95", "verdict"} <= claim["control"].keys()
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 2 * 40
    assert lines[-1]["metrics"]["loss"] == pytest.approx(float(curves["slow/loss"][1, -1]))
    report = (folder / "report.md").read_text()
    for words in ("Does a larger step", "| faster |", "the same arm twice", "figure.png", "Noise was 0.1"):
        assert words in report
    assert (folder / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(folder.rglob(f"{store.TEMPORARY}*"))
    assert "a program prints" in (folder / "workers.log").read_text()
    states = [p for p in folder.glob("chunks/*/*.npz") if store.load_chunk(p).state is not None]
    assert {p.name[-9:] for p in states} == {"00039.npz"} and len(states) == 6


def test_arms_of_one_stream_see_the_same_draws(reference):
    """Both arms start from base and share their noise: x differs by the step size alone."""
    x0 = reference.curves["base/x"][:, -1]
    slow, fast = (reference.curves[f"{arm}/x"][:, 0] for arm in ("slow", "fast"))
    np.testing.assert_allclose((fast - x0) / 0.2, (slow - x0) / 0.05, rtol=1e-4, atol=1e-5)


def test_claims_are_decided_with_enough_seeds(tmp_path):
    result = run(TOY, "smoke", seeds=6, out=tmp_path)
    (claim,) = result.claims
    assert (claim["verdict"], claim["control"]["verdict"]) == ("supported", "refuted")
    assert result.warnings == []


def test_one_compilation_serves_all_seeds_and_arms(tmp_path):
    """Steps are traced once per chunk length and once per stage for its shapes; never per seed."""
    cfg = toy_experiment.Config(steps=10, chunk=5)
    stages = topological(toy_experiment.stages(cfg, {}))
    compiled = {}
    toy_experiment.TRACES.clear()
    compute_seed(tmp_path, stages, 0, compiled, lambda *args, **kwargs: None)
    traces = len(toy_experiment.TRACES)
    compute_seed(tmp_path, stages, 1, compiled, lambda *args, **kwargs: None)
    assert len(toy_experiment.TRACES) == traces <= 2


def test_chunks_do_not_change_a_curve(tmp_path):
    def losses(chunk):
        stages = topological(toy_experiment.stages(toy_experiment.Config(steps=12, chunk=chunk), {}))
        compute_seed(tmp_path / str(chunk), stages, 0, {}, lambda *args, **kwargs: None)
        paths = sorted((tmp_path / str(chunk) / "chunks" / "slow").iterdir())
        return np.concatenate([store.load_chunk(p).metrics["loss"] for p in paths])

    whole = losses(12)
    for chunk in (1, 5):
        assert losses(chunk).tobytes() == whole.tobytes()


@pytest.mark.parametrize("cores", [[0], [0, 1], [0, 2, 4, 6, 8]])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_workers_share_the_cores(monkeypatch, cores, threads):
    monkeypatch.setattr(pool, "cores", lambda: cores)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    chosen = pool.executor(threads)
    assert chosen == ("cpu", "cpu", min(threads, len(cores)), True)
    for seeds in (0, 1, 3, 20):
        count = pool.workers(chosen, seeds)
        assert 1 <= count <= max(1, seeds)
        pins = [core for index in range(count) for core in pool._pin(chosen, index)]
        assert len(set(pins)) == len(pins) == count * chosen.threads and set(pins) <= set(cores)


def test_the_workers_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--kept")
    one = pool.environment(pool.Executor("cpu", "cpu", 1, True))
    assert one["JAX_NUM_CPU_DEVICES"] == "1" and one["XLA_FLAGS"] == "--kept --xla_cpu_multi_thread_eigen=false"
    quick = pool.environment(pool.Executor("cpu", "cpu", 2, False))
    assert quick["XLA_FLAGS"] == " ".join(["--kept", *compiling.QUICK_TO_COMPILE])
    monkeypatch.setenv("JAXPT_CACHE", "off")
    assert compiling.cache_folder() is None
    monkeypatch.setenv("JAXPT_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiling.cache_folder() == tmp_path / "jaxpt" / "xla"
