"""Where a run's workers are: beside the parent (lab.pool), on Ray's machines, or in SLURM's queue.

A job is one stage of one seed. It is done by a worker process of lab.pool, in the same environment, so that its bytes are
those of a run on one machine; that process may end at any moment, and whoever takes its job up goes on from the last chunk
on disk. All machines reach the run's folder by one path and have the same sources and versions, which a job checks. Only
the parent merges. A parent that dies leaves jobs behind that SLURM still runs: the next one's wait for them (worker).
"""

import contextlib
import importlib.util
import os
import platform
import queue
import re
import shutil
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpt.lab import catalogue, identity, pool, programs, store
from jaxpt.lab.compiling import cache_folder
from jaxpt.lab.errors import RunFailed, UserError, expected
from jaxpt.lab.experiment import Stage, lineage

TRIES = 3  # deaths of a job without a new chunk between them
PAUSE = 0.5  # seconds between two looks at SLURM's jobs
MINUTES = 24 * 60  # of a job in SLURM's queue, unless SBATCH_TIMELIMIT says otherwise; a longer one is submitted again
PACKAGES = {"local": None, "ray": "ray", "slurm": "submitit"}
ADDRESS = r"(ray://)?[^/:]+:\d+|auto|local"  # of Ray
ENDS = ("done", "user_error", "failed")  # kinds of a worker's last message


class Job(NamedTuple):
    stage: str
    seed: int


class Work(NamedTuple):
    """What all jobs of a run share; it travels to other machines."""

    setup: dict[str, Any]  # pool.setup_of
    chosen: pool.Executor
    must_agree: dict[str, str]  # identity.must_agree, where the run was started
    numerics: dict[str, str | None]  # the values there of identity.NUMERICS


Said = list[pool.Message]  # of a worker; the last one's kind is of ENDS, or "lost"
Then = Callable[[Job, Said], list[Job]]  # a job that has ended -> the jobs that are now to be done


def check(launcher: str, address: str | None) -> None:
    """UserError where the launcher is unknown, or cannot start from here."""
    if launcher not in PACKAGES:
        raise UserError(f"--launcher {launcher!r} is unknown: {expected(launcher, PACKAGES)}")
    package = PACKAGES[launcher]
    if package is None and address is not None:
        raise UserError(f"--address {address}: expected with --launcher ray or slurm only")
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(f"--launcher {launcher}: the package {package} is not installed; "
                        "pip install 'jaxpt[cluster]' installs it")
    if launcher == "ray" and not re.fullmatch(ADDRESS, where := _ray_address(address)):
        raise UserError(f"--address {where}: HOST:PORT of a Ray cluster is expected, or `auto`, or `local` for one of this machine")
    if launcher == "slurm" and address not in (None, "local"):
        raise UserError(f"--address {address}: expected `local` (this machine, without a queue) or none with --launcher slurm")
    if launcher == "slurm" and address is None and shutil.which("sbatch") is None:
        raise UserError("--launcher slurm: this machine has no sbatch; expected a SLURM login node, or --address local")


def work_of(setup: dict[str, Any], chosen: pool.Executor, must_agree: Mapping[str, str]) -> Work:
    folder = Path(setup["folder"]).resolve()
    here = {"folder": str(folder), "programs": str(folder / store.COMPILING)}
    return Work(setup | here, chosen, dict(must_agree), {name: os.environ.get(name) for name in identity.NUMERICS})


def compute(work: Work, launcher: str, address: str | None, stages: Sequence[Stage], seeds: Sequence[int],
            on_message: Callable[[pool.Message], None]) -> None:
    """Computes the seeds' missing chunks by jobs; returns when all are on disk. stages: in topological order."""
    folder = Path(work.setup["folder"])
    chunks = {stage.name: len(store.chunk_bounds(stage.steps, stage.chunk)) for stage in stages}
    jobs = [Job(stage.name, seed) for seed in seeds for stage in stages]
    left = dict.fromkeys(job for job in jobs if _chunks(folder, job) < chunks[job.stage])
    ancestors = {stage.name: [s.name for s in lineage(stages, stage.name)[:-1]] for stage in stages}
    waiting, deaths, had = dict(left), Counter(), {}

    def ready() -> list[Job]:
        found = [job for job in waiting if not any(Job(stage, job.seed) in left for stage in ancestors[job.stage])]
        for job in found:
            del waiting[job]
        return found

    def then(job: Job, said: Said) -> list[Job]:
        for message in said[:-1]:
            on_message(message)
        end = said[-1]
        pool.heed(end, folder)
        has = _chunks(folder, job)
        if end["kind"] == "lost" or has < chunks[job.stage]:
            deaths[job] = 1 if has > had.get(job, 0) else deaths[job] + 1
            had[job] = has
            if deaths[job] == TRIES:
                raise RunFailed(f"stage {job.stage}, seed {job.seed} was lost {TRIES} times without a new chunk: {end.get('text', '')}")
            return [job]
        del left[job]
        if not any(other.seed == job.seed for other in left):
            on_message(end)
        return ready()

    on_message(_rehearsed(work))
    LAUNCHERS[launcher](work, address, ready(), then)


def _chunks(folder: Path, job: Job) -> int:
    """How many chunks of a job are on disk."""
    return len(list(store.chunk_path(folder, job.stage, job.seed, 0).parent.glob(f"{job.seed:05d}-*.npz")))


def _rehearsed(work: Work) -> pool.Message:
    """The shapes of all metrics, traced on this machine without its accelerator."""
    folder = Path(work.setup["folder"])
    setup = work.setup | {"device": ("cpu", "cpu"), "cpus": [], "rehearse": True, "workers": 1}
    (message,) = _say(setup, pool.environment(work.chosen) | {"JAX_PLATFORMS": "cpu"}, None, folder / "workers.log", ("metrics",))
    pool.heed(message, folder)
    if message["kind"] == "lost":
        raise RunFailed(message["text"])
    return message


def _say(setup: Mapping[str, Any], env: Mapping[str, str], seed: int | None, log: Path, until: Sequence[str]) -> Said:
    """What a worker, started for this, says until a message of one of the kinds, of its failure or of its death."""
    messages: pool.Messages = queue.SimpleQueue()
    log.parent.mkdir(exist_ok=True)
    with open(log, "ab") as file, pool.started([dict(setup)], env, file, messages) as (process,):
        if seed is not None:
            pool.send(process, seed)
        said: Said = []
        while not said or said[-1]["kind"] not in (*until, *ENDS):
            message = messages.get()[1]
            said.append(message or {"kind": "lost", "text": pool.death(process.wait(), log)})
            if message is None:
                break
        return said


# --- on the machine of a job


def perform(work: Work, job: Job) -> Said:
    """Does a job on this machine."""
    try:
        place = _place(work)
    except UserError as error:
        return [{"kind": "user_error", "text": f"on {platform.node()}: {error}"}]
    with contextlib.ExitStack() as held:
        cores = _free_cores(work.chosen.threads, held) if work.chosen.platform == "cpu" else []
        setup = work.setup | {"stage": job.stage, "programs": str(place), "cpus": cores, "rehearse": False, "workers": 1}
        log = store.job_path(Path(setup["folder"]), job.stage, job.seed, "log")
        return _say(setup, pool.environment(work.chosen, work.numerics), job.seed, log, ("done",))


def _place(work: Work) -> Path:
    """This machine's folder of programs for the run. UserError where the run's folder or its code is not here."""
    folder, experiment = Path(work.setup["folder"]), work.setup["experiment"]
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not there: expected a folder (--out) that all machines reach by one path")
    code = identity.same_code(catalogue.find(experiment).path)
    if others := sorted(name for name, value in code.items() if work.must_agree[name] != value):
        raise UserError(f"{', '.join(others)} differ from where the run was started: the same are expected everywhere")
    cache = None if experiment.endswith(".py") else cache_folder()  # as in lab.run
    if cache is None:
        return folder / store.COMPILING
    return programs.place(cache, folder, {**work.must_agree, **work.chosen._asdict()})


def _free_cores(count: int, held: contextlib.ExitStack) -> list[int]:
    """`count` of this machine's cores that no other job of this user holds, or any where there are too few."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    place, found = Path(tempfile.gettempdir()) / f"jaxpt-cores-{os.getuid()}", []
    for core in pool.cores():
        if len(found) < count and held.enter_context(store.claimed(place / str(core), wait=False)):
            found.append(core)
    return [*found, *(core for core in pool.cores() if core not in found)][:count]


# --- launchers: they do the jobs that are ready, and what `then` gives for each that has ended, until none is left


def _lost(error: Exception) -> Said:
    return [{"kind": "lost", "text": " ".join(f"{type(error).__name__}: {error}".split())[-300:]}]


def _ray_address(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or "local"


def _on_ray(work: Work, address: str | None, ready: Sequence[Job], then: Then) -> None:
    """address: of a cluster, else by RAY_ADDRESS; without both a cluster of this machine alone, on loopback."""
    where = _ray_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if where == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # as there: loopback, not the address by which others reach us
    import ray

    own = {"num_cpus": len(pool.cores()), "object_store_memory": 100_000_000, "include_dashboard": False}
    try:
        host, _, port = where.removeprefix("ray://").rpartition(":")
        if port.isdecimal():  # ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(where, log_to_driver=False, logging_level="error", **(own if where == "local" else {}))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--address {where}: no Ray cluster answers ({_lost(error)[0]['text']})") from None
    needs = {"cpu": {"num_cpus": work.chosen.threads}, "gpu": {"num_gpus": 1}, "tpu": {"resources": {"TPU": 1}}}
    submit = ray.remote(max_retries=0, **needs[work.chosen.platform])(perform).remote
    try:
        running = {submit(work, job): job for job in ready}
        while running:
            (reference,), _ = ray.wait(list(running))
            try:
                said = ray.get(reference)
            except ray.exceptions.RayError as error:
                said = _lost(error)
            for job in then(running.pop(reference), said):
                running[submit(work, job)] = job
    finally:
        ray.shutdown()


def _on_slurm(work: Work, address: str | None, ready: Sequence[Job], then: Then) -> None:
    """Partition, account and the like: sbatch's own variables (SBATCH_PARTITION, ...). address `local`: no queue, as many
    jobs at a time as the machine has cores for."""
    import submitit

    executor = submitit.AutoExecutor(Path(work.setup["folder"]) / "jobs" / "submitit", cluster=address or "slurm")
    gpus = {"gpus_per_node": 1} if work.chosen.platform == "gpu" else {}
    executor.update_parameters(name="jaxpt", timeout_min=MINUTES, cpus_per_task=max(work.chosen.threads, 1), **gpus)
    waiting, running = deque(ready), {}
    most = pool.workers(work.chosen, len(pool.cores())) if address == "local" else 1000
    try:
        while waiting or running:
            batch = [waiting.popleft() for _ in range(min(len(waiting), most - len(running)))]
            if batch:
                with executor.batch():
                    handles = [executor.submit(perform, work, job) for job in batch]
                running |= dict(zip(handles, batch, strict=True))
            for handle in [handle for handle in running if handle.done()]:
                error = handle.exception()
                waiting += then(running.pop(handle), handle.result() if error is None else _lost(error))
            time.sleep(PAUSE)
    finally:
        for handle in running:
            handle.cancel(check=False)


LAUNCHERS = {"ray": _on_ray, "slurm": _on_slurm}
