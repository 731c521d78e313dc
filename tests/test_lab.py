"""Runs end to end on a toy: killed, resumed, extended, repeated, broken. Curves must agree bit for bit."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy_experiment
from jaxpt.lab import compiling, pool, store
from jaxpt.lab.errors import RunFailed, UserError
from jaxpt.lab.experiment import Experiment, Panel, Stage, asked, load, topological
from jaxpt.lab.identity import claim_records, digest, program_identity, stage_identities
from jaxpt.lab.merge import rehearse
from jaxpt.lab.run import run
from jaxpt.lab.worker import compute_seed
from jaxpt.train.program import Program

TOY = str(Path(toy_experiment.__file__).resolve())
LONG = {"steps": 40, "chunk": 1}  # many chunks: a kill falls between any two writes
WORDS = ["run", TOY, "--tier", "smoke", "--steps", "40", "--chunk", "1"]
# python -c, because the shell that started the tests may have told its children to ignore Ctrl-C
MAIN = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from jaxpt.cli import main; sys.exit(main())")


@pytest.fixture(scope="module", autouse=True)
def compile_cache():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPT_CACHE", jax.config.jax_compilation_cache_dir)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run of two seeds."""
    return run(TOY, "smoke", out=tmp_path_factory.mktemp("reference"), overrides=LONG)


def start(words, out, **more):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", MAIN, *words, "--out", str(out)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def workers_of(out):
    """Process ids of workers whose command line names a folder under `out`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "jaxpt.lab.worker" in words and any(w.startswith(str(out)) for w in words):
            found.append(int(entry.parent.name))
    return found


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


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
        wait_for(lambda: not workers_of(out), 10)
    process = start([*WORDS, "--resume"], out)
    _, err = process.communicate(timeout=180)
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
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("jaxpt: interrupted") and "--resume" in err
    assert "Traceback" not in err + out
    assert not workers_of(tmp_path)


def test_a_failing_disk_in_a_worker(tmp_path):
    """Files larger than the limit cannot be written: the worker's error arrives as one sentence."""
    words = [sys.executable, "-m", "jaxpt", "run", TOY, "--tier", "smoke", "--seeds", "1", "--size", "50000"]
    env = {**os.environ, "JAXPT_CACHE": "off", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    limited = ["bash", "-c", 'ulimit -f 150; exec "$@"', "-", *words, "--out", str(tmp_path)]
    done = subprocess.run(limited, env=env, capture_output=True, text=True, timeout=120)
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


# ------------------------------------------------------------------ wrong experiments


def test_a_broken_program_is_told_in_one_line(tmp_path):
    with pytest.raises(RunFailed, match="RuntimeError: the program is broken") as caught:
        run(TOY, "smoke", out=tmp_path, overrides={"fail": "program"})
    (error,) = tmp_path.glob("*/*/error.txt")
    assert str(error) in str(caught.value) and "make_descent" in error.read_text()
    assert not workers_of(tmp_path)


def test_a_killed_worker_is_told(tmp_path):
    with pytest.raises(RunFailed, match="killed by SIGKILL.*--resume"):
        run(TOY, "smoke", out=tmp_path, overrides={"fail": "memory"})


def test_a_broken_section_is_told_in_one_line(tmp_path):
    """What data may excuse passes the rehearsal; where the real curves do not excuse it, it is blamed."""
    own = tmp_path / "broken_toy.py"
    own.write_text(Path(TOY).read_text().replace('f"## Remarks', 'f"{1 / 0}'))
    with pytest.raises(RunFailed, match="ZeroDivisionError.*error.txt"):
        run(str(own), "smoke", seeds=1, out=tmp_path, overrides={"steps": 2})
    (folder,) = tmp_path.glob("broken_toy/*")
    assert "1 / 0" in (folder / "error.txt").read_text() and not (folder / "report.md").exists()


def test_misspelt_curves_are_found_before_the_computing(tmp_path):
    own = tmp_path / "misspelt_toy.py"
    text = Path(TOY).read_text()
    own.write_text(text.replace('gain("slow/loss", "slow/loss")', 'gain("slow/loss", "slow/los")'))
    with pytest.raises(UserError, match="curve 'slow/los' is unknown: did you mean slow/loss"):
        run(str(own), "smoke", out=tmp_path, overrides={"steps": 100000})


def test_rehearsal_forgives_what_data_may_excuse():
    experiment = toy_experiment.EXPERIMENT
    stages = topological(experiment.stages(toy_experiment.Config(), {}))
    shapes = {s.name: {"loss": (), "eval": (), "x": (2,)} for s in stages}
    rehearse(experiment, toy_experiment.Config(), stages, 2, {}, shapes)
    wide = Experiment(experiment.tiers, stages, [], [Panel("wide", {"x": "slow/x"}, "y")])
    with pytest.raises(UserError, match="more than one number per step"):
        rehearse(wide, None, stages, 2, {}, shapes)


def test_programs_of_one_factory_are_told_apart():
    def maker(speed):
        return lambda config: Program(
            lambda key, hyper, start=None: {"x": jnp.float32(0)},
            lambda state: ({"x": state["x"] + speed}, {"x": state["x"] + speed}), {}, lambda state: state,
        )

    one, ten = (Stage(name, maker(speed), None, 4) for name, speed in (("one", 1.0), ("ten", 10.0)))
    assert program_identity(one) != program_identity(ten)
    assert program_identity(one) == program_identity(Stage("again", maker(1.0), None, 4))


def test_tuning_seeds_and_evidence_do_not_share_a_folder(tmp_path):
    run(TOY, "smoke", seeds=1, out=tmp_path, overrides={"steps": 2})
    with pytest.raises(UserError, match="both sides of 10000"):
        run(TOY, "smoke", seeds=1, seed0=10000, out=tmp_path, overrides={"steps": 2}, resume=True)


@pytest.mark.parametrize("arguments, sentence", [
    ({"seeds": 0}, "--seeds 0: a whole number of at least 1"),
    ({"seeds": 2.5}, "--seeds 2.5: a whole number"),
    ({"seed0": -1}, "--seed0 -1"),
    ({"seed0": 9999, "seeds": 2}, "are for tuning"),
    ({"tier": "smok"}, "did you mean smoke"),
    ({"launcher": "slum"}, "--launcher 'slum' is unknown: did you mean slurm"),
    ({"address": "a:1"}, "--address a:1: expected with --launcher ray or slurm"),
    ({"overrides": {"step": 3}}, "did you mean steps"),
    ({"overrides": {"steps": 0}}, "steps 0"),
    ({"out": "/dev/null"}, "--out"),
])
def test_bad_arguments(tmp_path, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        run(TOY, **{"tier": "smoke", "out": tmp_path, **arguments})
    assert not list(tmp_path.iterdir())


def test_loading(tmp_path):
    assert load(TOY).doc.startswith("Does a larger step")
    for text, sentence in [("x = 1", "has no EXPERIMENT"), ("import nowhere_at_all", "ModuleNotFoundError"),
                           ("def", "not a Python file")]:
        path = tmp_path / f"{digest(text)[:8]}.py"
        path.write_text(text)
        with pytest.raises(UserError, match=sentence):
            load(str(path))
    with pytest.raises(UserError, match="no such file"):
        load("nowhere.py")
    with pytest.raises(UserError, match="unknown"):
        load("no_such_experiment")


def stage(name, after=None, **more):
    return Stage(name, toy_experiment.make_descent, toy_experiment.Descent(2, 0.1), 3, after, **more)


def test_stages_form_a_forest():
    names = [s.name for s in topological([stage("c", "b"), stage("b", "a"), stage("a")])]
    assert names == ["a", "b", "c"]
    for stages, sentence in [
        ([], "at least one"), ([stage("a"), stage("a")], "a name of its own"), ([stage("a/b")], "a name is"),
        ([stage("base"), stage("b", "bas")], "did you mean base"),
        ([stage("a", "b"), stage("b", "a")], "circle"),
    ]:
        with pytest.raises(UserError, match=sentence):
            topological(stages)


def test_identities_hold_what_changes_results():
    def ids(*stages):
        return stage_identities(topological(stages))

    base = ids(stage("a"), stage("b", "a"))
    assert ids(stage("a", chunk=1), stage("b", "a")) == base  # chunks change nothing
    changed = ids(stage("a", hyper={"lr": 0.1}), stage("b", "a"))
    assert changed["a"] != base["a"] and changed["b"] != base["b"]
    assert ids(stage("a"), stage("b", "a", stream="s"))["b"] != base["b"]
    assert program_identity(stage("a")) == program_identity(stage("b", hyper={"lr": 1.0}))
    one, two = claim_records(toy_experiment.EXPERIMENT.claims)[0], toy_experiment.EXPERIMENT.claims[0]
    assert one["estimand"] != one["control"]  # one text, other captured names
    assert digest(claim_records([two])) == digest([one])


def test_claims_and_panels_may_follow_from_the_config():
    given = toy_experiment.EXPERIMENT
    following = dataclasses.replace(
        given, claims=lambda cfg: list(given.claims) * cfg.size, panels=lambda cfg: given.panels[: cfg.size]
    )
    one = asked(following, toy_experiment.Config(size=1))
    assert one.claims == list(given.claims) and one.panels == given.panels[:1]
    assert len(asked(following, toy_experiment.Config(size=3)).claims) == 3 and asked(given, toy_experiment.Config()) == given
