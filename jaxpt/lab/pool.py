"""A pool of worker processes, one seed at a time each.

On CPUs a run uses one process of `threads` threads per seed, pinned: faster than any vmap there, and the
same bits however many run side by side. On an accelerator one process computes the seeds one after another.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpt.lab import store
from jaxpt.lab.compiling import QUICK_TO_COMPILE, cache_folder
from jaxpt.lab.errors import RunFailed, UserError

Message = dict[str, Any]
Worker = subprocess.Popen[bytes]
Messages = queue.SimpleQueue[tuple[int, Message | None]]  # (worker, what it says); None: it is gone


class Executor(NamedTuple):
    """Who computes a seed; part of the run's identity, because bits depend on it."""

    platform: str  # cpu, gpu, tpu
    kind: str  # the device's own name
    threads: int  # of the process that runs one seed; 0 where the platform has no say in it
    optimised: bool  # machine code as usual; without, on CPUs, compiling takes a fraction of the time, steps far more


def executor(threads: int, optimised: bool = True) -> Executor:
    platform, kind = _probe()
    cpu = platform == "cpu"
    return Executor(platform, kind, min(threads, len(cores())) if cpu else 0, optimised or not cpu)


def workers(chosen: Executor, seeds: int) -> int:
    """How many processes run side by side."""
    return max(1, min(len(cores()) // chosen.threads, seeds)) if chosen.platform == "cpu" else 1


def cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _probe() -> tuple[str, str]:
    """(platform, device kind) that a worker will find. Asked in a process of its own where it is not
    certain: this one must not take hold of an accelerator."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not _accelerators_installed():
        return "cpu", "cpu"
    code = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(f"jax finds no device: {done.stderr.strip().splitlines()[-1]}")
    platform, kind = done.stdout.strip().splitlines()[-2:]
    return platform, kind


def _accelerators_installed() -> bool:
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))


def setup_of(folder: Path, experiment: str, config: Any, chosen: Executor, programs: Path) -> dict[str, Any]:
    """What every worker of a run is told; they share what they compile in the folder `programs`."""
    return {"experiment": experiment, "folder": str(folder), "config": pickle.dumps(config), "programs": str(programs),
            "device": (chosen.platform, chosen.kind), "stage": None}


def compute(setup: dict[str, Any], chosen: Executor, seeds: Sequence[int], on_message: Callable[[Message], None]) -> None:
    """Computes the seeds' missing chunks; returns when all are on disk. Workers never outlive the call."""
    folder, count = Path(setup["folder"]), workers(chosen, len(seeds))
    messages: Messages = queue.SimpleQueue()
    waiting = deque(seeds)
    told = [{"cpus": _pin(chosen, i), "rehearse": i == 0, "workers": count} for i in range(count)]
    with open(folder / "workers.log", "ab") as log, started(
        [setup | more for more in told], environment(chosen), log, messages
    ) as processes:
        for process in processes:
            send(process, waiting.popleft())
        running = len(processes)
        while running:
            index, message = messages.get()
            if message is None:
                raise RunFailed(death(processes[index].wait(), folder / "workers.log"))
            heed(message, folder)
            on_message(message)
            if message["kind"] == "done":
                if waiting:
                    send(processes[index], waiting.popleft())
                else:
                    running -= 1


def heed(message: Message, folder: Path) -> None:
    """The error that a worker's message tells of, if it does."""
    if message["kind"] == "user_error":
        raise UserError(message["text"])
    if message["kind"] == "failed":
        store.write(folder / "error.txt", lambda f: f.write(message["traceback"].encode()))
        raise RunFailed(f"{message['text']} (traceback in {folder / 'error.txt'})")


@contextlib.contextmanager
def started(setups: Sequence[dict[str, Any]], env: Mapping[str, str], log: Any, messages: Messages) -> Iterator[list[Worker]]:
    """A worker for each setup, none of which outlives the block."""
    processes: list[Worker] = []
    try:
        for index, setup in enumerate(setups):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxpt.lab.worker", setup["folder"]],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env,
            )
            processes.append(process)
            send(process, setup)
            threading.Thread(target=_receive, args=(index, process, messages), daemon=True).start()
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def send(process: Worker, value: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # its death is reported where its messages end
        pickle.dump(value, process.stdin)
        process.stdin.flush()


def _receive(index: int, process: Worker, messages: Messages) -> None:
    with process.stdout, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            messages.put((index, pickle.load(process.stdout)))
    messages.put((index, None))


def _pin(chosen: Executor, index: int) -> list[int]:
    """The cores of worker `index`; runs side by side start their counts at different cores."""
    if chosen.platform != "cpu" or not hasattr(os, "sched_setaffinity"):
        return []
    allowed = cores()
    first = os.getpid() + index * chosen.threads
    return [allowed[(first + i) % len(allowed)] for i in range(chosen.threads)]


def environment(chosen: Executor, numerics: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """A worker's. numerics: variables (identity.NUMERICS) of another machine, in the place of this one's."""
    env = dict(os.environ)
    for name, value in (numerics or {}).items():
        env.pop(name, None)
        env |= {} if value is None else {name: value}
    env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    if chosen.platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
        env["JAX_NUM_CPU_DEVICES"] = "1"
        env |= {f"{library}_NUM_THREADS": str(chosen.threads) for library in ("OMP", "OPENBLAS", "MKL")}
        flags = [env.get("XLA_FLAGS", "")]
        flags += ["--xla_cpu_multi_thread_eigen=false"] if chosen.threads == 1 else []
        flags += [] if chosen.optimised else QUICK_TO_COMPILE
        env["XLA_FLAGS"] = " ".join(flags).strip()
    cache = cache_folder()
    if cache is not None:
        env |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    return env


def death(code: int, log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"a worker was killed by {name}{memory}; run the same command with --resume (log: {log})"
    return f"a worker ended with code {code}; its last words are in {log}"
