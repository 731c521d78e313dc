"""Runs whose stages and seeds are jobs elsewhere: on Ray, in SLURM's queue. The same bytes as beside the parent, whoever dies."""

import contextlib
import importlib.util
import os
import pickle
import signal
import tempfile
from pathlib import Path

import pytest

import toy_experiment
from jaxpt.cli import main
from jaxpt.lab import launch, pool, store
from jaxpt.lab.errors import RunFailed, UserError
from jaxpt.lab.experiment import lineage, topological
from jaxpt.lab.run import run
from running import start, wait_for, workers_of

TOY = str(Path(toy_experiment.__file__).resolve())
SWEEP = ["run", TOY, "--tier", "smoke", "--seeds", "3", "--steps", "60", "--chunk", "1"]  # three stages: nine jobs
MIDWAY = 60  # of its 540 chunks
pytestmark = pytest.mark.usefixtures("compile_cache")


def same_bytes(folder, other):
    for name in ("curves.npz", "claims.json", "inputs.npz"):  # the figure's footer has --out
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    for path in folder.glob("chunks/*/*.npz"):
        one, two = (store.load_chunk(root / path.relative_to(folder)) for root in (folder, other))
        assert one.owner == two.owner and (one.state is None) == (two.state is None)
        for a, b in zip(one.state or [], two.state or [], strict=True):
            assert a["data"].tobytes() == b["data"].tobytes()


# ------------------------------------------------------------------ which jobs, in which order


def test_a_lineage_is_what_a_stage_comes_after():
    stages = topological(toy_experiment.stages(toy_experiment.Config(), {}))
    assert [s.name for s in lineage(stages, "slow")] == ["base", "slow"] and [s.name for s in lineage(stages, "base")] == ["base"]


class Elsewhere:
    """A launcher that writes chunk files itself, in some order; what `lose` says is lost, a chunk later if it makes any."""

    def __init__(self, folder, stages, lose=lambda job, times: False, progress=False):
        self.folder, self.stages, self.lose, self.progress, self.log = folder, {s.name: s for s in stages}, lose, progress, []

    def __call__(self, work, address, ready, then):
        queue = list(ready)
        while queue:
            job = queue.pop()
            parent = self.stages[job.stage].after
            done = parent is None or launch.Job(parent, job.seed) in self.log
            assert done or launch._chunks(self.folder, job._replace(stage=parent)) == 3
            lost = self.lose(job, self.log.count(job))
            self.log.append(job)
            for index in range(self.log.count(job) if lost and self.progress else 0 if lost else 3):
                path = store.chunk_path(self.folder, job.stage, job.seed, index)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            queue += then(job, [{"kind": "lost", "text": "gone"} if lost else {"kind": "done", "seed": job.seed}])


@pytest.fixture
def scheduled(tmp_path, monkeypatch):
    stages = topological(toy_experiment.stages(toy_experiment.Config(), {}))  # 12 steps in chunks of 5: three files

    def call(**how):
        elsewhere, messages = Elsewhere(tmp_path, stages, **how), []
        monkeypatch.setitem(launch.LAUNCHERS, "ray", elsewhere)
        monkeypatch.setattr(launch, "_rehearsed", lambda work: {"kind": "metrics"})
        work = launch.work_of({"folder": str(tmp_path)}, pool.Executor("cpu", "cpu", 1, True), {})
        launch.compute(work, "ray", None, stages, [4, 5], messages.append)
        return elsewhere.log, messages
    return call


def test_every_job_is_done_once_and_after_what_it_comes_after(scheduled, tmp_path):
    store.chunk_path(tmp_path, "base", 5, 0).parent.mkdir(parents=True)
    for index in range(3):
        store.chunk_path(tmp_path, "base", 5, index).touch()
    log, messages = scheduled()
    assert sorted(log) == sorted(launch.Job(s, n) for s in ("base", "fast", "slow") for n in (4, 5) if (s, n) != ("base", 5))
    assert [m["kind"] for m in messages] == ["metrics", "done", "done"] and {m["seed"] for m in messages[1:]} == {4, 5}
    assert scheduled()[0] == []  # all is there


def test_a_lost_job_is_done_again_as_long_as_it_gets_on(scheduled):
    log, _ = scheduled(lose=lambda job, times: job == ("fast", 4) and times < 3, progress=True)
    assert log.count(("fast", 4)) == 4 and len(log) == 9


def test_a_job_that_is_lost_again_and_again_ends_the_run(scheduled):
    with pytest.raises(RunFailed, match="stage slow, seed 5 was lost 3 times without a new chunk: gone"):
        scheduled(lose=lambda job, times: job == ("slow", 5))


# ------------------------------------------------------------------ a job


def in_turn(work, address, ready, then):
    """A launcher without machines: every job is sent through pickle and done here, one after another."""
    queue = list(ready)
    while queue:
        job = queue.pop(0)
        queue += then(job, launch.perform(*pickle.loads(pickle.dumps((work, job)))))


def test_jobs_in_any_place_give_the_bytes_of_one_run(tmp_path, monkeypatch):
    monkeypatch.setitem(launch.LAUNCHERS, "ray", in_turn)
    monkeypatch.setattr(launch, "check", lambda launcher, address: None)
    arguments = {"tier": "smoke", "seeds": 1, "overrides": {"steps": 4, "chunk": 2}}
    here, there = run(TOY, out=tmp_path / "here", **arguments), run(TOY, out=tmp_path / "there", launcher="ray", **arguments)
    assert here.folder.name == there.folder.name
    same_bytes(here.folder, there.folder)

    monkeypatch.setitem(launch.LAUNCHERS, "ray", lambda *_: pytest.fail("nothing is left to do"))
    run(TOY, out=tmp_path / "there", launcher="ray", resume=True, **arguments)


def test_a_machine_that_differs_refuses(tmp_path):
    chosen = pool.Executor("cpu", "cpu", 1, False)
    setup = {"folder": str(tmp_path / "nowhere"), "experiment": TOY}
    (said,) = launch.perform(launch.work_of(setup, chosen, {}), launch.Job("base", 0))
    assert said["kind"] == "user_error" and "all machines reach" in said["text"]
    (tmp_path / "config.json").touch()
    agree = launch.identity.must_agree(Path(TOY)) | {"the version of jax": "0.1"}
    (said,) = launch.perform(launch.work_of(setup | {"folder": str(tmp_path)}, chosen, agree), launch.Job("base", 0))
    assert said["kind"] == "user_error" and "the version of jax differ" in said["text"]


def test_jobs_of_one_machine_take_cores_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pool, "cores", lambda: [0, 2, 4])
    with contextlib.ExitStack() as one, contextlib.ExitStack() as two, contextlib.ExitStack() as three:
        assert launch._free_cores(1, one) == [0]
        assert launch._free_cores(1, two) == [2]
        assert launch._free_cores(2, three) == [4, 0]  # too few: some are shared
        one.close()
        assert launch._free_cores(1, one) == [0]


# ------------------------------------------------------------------ what is asked for


@pytest.mark.parametrize("launcher, package", [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_package_is_told(launcher, package, tmp_path, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else found(name, *more))
    assert main(["run", "first_light", "--launcher", launcher, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said == f"jaxpt: --launcher {launcher}: the package {package} is not installed; pip install 'jaxpt[cluster]' installs it\n"
    assert not list(tmp_path.iterdir())


def test_slurm_must_be_there_and_a_cluster_must_be_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match="--address nowhere: HOST:PORT of a Ray cluster is expected"):
        launch.check("ray", "nowhere")
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    launch.check("ray", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="has no sbatch; expected a SLURM login node, or --address local"):
        launch.check("slurm", None)
    with pytest.raises(UserError, match="--address a:1: expected `local`"):
        launch.check("slurm", "a:1")
    launch.check("slurm", "local")


# ------------------------------------------------------------------ the launchers themselves


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The sweep in worker processes of this one."""
    out = tmp_path_factory.mktemp("alone")
    return finished(start(SWEEP, out), out)


def needs(package):
    if importlib.util.find_spec(package) is None:  # not imported here: its warnings are not ours
        pytest.skip(f"{package} is not installed: pip install 'jaxpt[cluster]'")


def finished(process, out):
    words, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert "Traceback" not in err and not workers_of(out)
    return next(out.glob("*/*"))


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def begun(process, out, chunks):
    """Waits until more chunks than that are there, and somebody is at work."""
    wait_for(lambda: process.poll() is not None or len(chunk_files(out)) > chunks and workers_of(out), 500)
    assert process.poll() is None, process.communicate()


def chunk_files(out):
    return list(out.glob("*/*/chunks/*/[!.]*.npz"))


def killed_midway(process, out):
    """Kills the process that runs a job of which some chunks are there. -> seconds of every chunk that was there."""
    begun(process, out, MIDWAY)
    worker = workers_of(out)[0]
    parent = parent_of(worker)
    os.kill(parent, signal.SIGKILL)
    there = {path: store.load_chunk(path).seconds for path in chunk_files(out)}
    assert MIDWAY < len(there) < 9 * 60
    wait_for(lambda: worker not in workers_of(out), 60)  # it does not outlive the process that was asked for its job
    return there


def heard_by_others(pid):
    """Sockets of a process and its descendants that listen beyond loopback."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = parent_of(entry.name)
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    inodes = set()
    for member in family:
        for descriptor in Path(f"/proc/{member}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
    return len(family), {address for address in listening if not address.endswith(("0100007F", "01000000"))}


def nothing_twice(there):
    """What was on disk has been kept, not computed again."""
    for path, seconds in there.items():
        assert store.load_chunk(path).seconds == seconds, path


@pytest.mark.slow
def test_ray_takes_a_killed_worker_s_job_up_again(alone, tmp_path):
    needs("ray")
    process = start([*SWEEP, "--launcher", "ray", "--address", "local"], tmp_path)
    begun(process, tmp_path, 0)
    family, addresses = heard_by_others(process.pid)
    assert family > 5 and not addresses
    there = killed_midway(process, tmp_path)
    folder = finished(process, tmp_path)
    nothing_twice(there)
    same_bytes(alone, folder)


@pytest.mark.slow
def test_submitit_takes_a_killed_worker_s_job_up_again(alone, tmp_path):
    needs("submitit")
    process = start([*SWEEP, "--launcher", "slurm", "--address", "local"], tmp_path)
    there = killed_midway(process, tmp_path)
    folder = finished(process, tmp_path)
    nothing_twice(there)
    same_bytes(alone, folder)


@pytest.mark.slow
def test_jobs_that_outlive_their_parent_are_waited_for(alone, tmp_path):
    """SLURM runs on when the process that asked is gone: another one's jobs wait, and compute nothing twice."""
    needs("submitit")
    process = start([*SWEEP, "--launcher", "slurm", "--address", "local"], tmp_path)
    begun(process, tmp_path, MIDWAY)
    process.kill()
    process.wait()
    assert workers_of(tmp_path)
    there = {path: store.load_chunk(path).seconds for path in chunk_files(tmp_path)}
    folder = finished(start([*SWEEP, "--launcher", "slurm", "--address", "local", "--resume"], tmp_path), tmp_path)
    process.communicate()  # not before: its jobs hold its output
    nothing_twice(there)
    same_bytes(alone, folder)


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_told(tmp_path):
    needs("ray")
    process = start([*SWEEP, "--launcher", "ray", "--address", "127.0.0.1:1"], tmp_path)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith("jaxpt: --address 127.0.0.1:1: no Ray cluster answers")


@pytest.mark.slow
def test_an_interrupted_sweep_ends_its_jobs(tmp_path):
    needs("submitit")
    process = start([*SWEEP, "--launcher", "slurm", "--address", "local"], tmp_path, start_new_session=True)
    begun(process, tmp_path, 0)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 130
    assert any(line.startswith("jaxpt: interrupted") and "--launcher slurm" in line for line in err.splitlines())
    wait_for(lambda: not workers_of(tmp_path), 60)
