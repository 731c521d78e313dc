"""One program over the devices of several processes: saved as it goes, ended when a process is lost, resumed.

    with together(address, processes, index, folder):          in every process, as the first that it does with jax
        mesh = make_mesh(...)
        state, metrics = train(make_policy, cfg, mesh, jax.random.key(0), {}, steps, every, folder)

The folder is one that all processes reach. When one of them ends or hangs the others end too, with a sentence and a code
that is not 0, within about `patience` seconds; started again, all of them go on from what was saved last.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from orbax.checkpoint import multihost

from jaxpt.lab import beats, identity, store
from jaxpt.lab.errors import UserError
from jaxpt.lab.mesh_store import load_state, save_state
from jaxpt.lab.worker import host
from jaxpt.train.parallel import start_on, step_by_jit
from jaxpt.types import Key

STAGE = "steps"
COMPILING = 3_600_000  # milliseconds that processes wait for each other before the first step
AFTER = 10.0  # seconds of silence that count as a loss when jax has ended this process


@contextlib.contextmanager
def together(address: str, processes: int, index: int, folder: str | Path, patience: float = 60.0) -> Iterator[None]:
    """jax.distributed for the block, which ends this process when another one is lost: when nothing has come from it for
    `patience` seconds. A thread looks for that, since this one may be waiting for the lost one inside a step; and a process
    beside this one, since jax ends this one by itself where process 0 is lost."""
    place, stop = Path(folder).absolute() / "processes", threading.Event()
    place.mkdir(parents=True, exist_ok=True)
    beats.write(place / str(index))
    words = [str(place), str(index), str(processes), str(min(patience, AFTER))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    beside = subprocess.Popen([sys.executable, "-P", "-m", "jaxpt.lab.beats", *words], stdin=subprocess.PIPE, env=env)
    limit = 2 * int(patience) + 10  # jax's own, which ends this process without a sentence: ours comes first
    jax.distributed.initialize(address, processes, index, heartbeat_timeout_seconds=limit, shutdown_timeout_seconds=limit)
    others = [i for i in range(processes) if i != index]

    def watch() -> None:
        def beat() -> bool:
            beats.write(place / str(index))
            return stop.wait(beats.BEAT)

        if silent := beats.lost(place, others, patience, beat):
            beats.write(place / str(index), beats.DONE)  # for the process beside this one, which need not say it again
            print(beats.sentence(silent, processes), file=sys.stderr, flush=True)
            os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)):  # perhaps another process is lost: the thread will know
            thread.join(patience + 10 * beats.BEAT)
        beside.kill()  # this end has a traceback; that it falls silent tells the others
        raise
    else:
        stop.set()
        thread.join()
        beats.write(place / str(index), beats.DONE)
    finally:
        stop.set()
        beside.stdin.close()
        beside.wait()
    jax.distributed.shutdown()


def train(make: Callable, cfg: Any, mesh: Mesh, key: Key, hyper: Mapping[str, Any], steps: int, every: int, folder: str | Path,
          report: Callable[[int, Mapping[str, np.ndarray]], None] = lambda step, metrics: None
          ) -> tuple[Any, dict[str, np.ndarray]]:
    """`steps` updates of make(cfg) over a mesh, saved every `every` of them, from what was saved last in the folder.
    -> (state, metric -> [steps, ...]); report gets the number of updates done and the last one's metrics.

    All processes call this alike. On equal meshes the numbers are those of an uninterrupted run, bit for bit; on another
    one a run goes on too. hyper: in the place of the program's. UserError where the folder holds another run.
    """
    folder, first_process = Path(folder).absolute(), jax.process_index() == 0
    program, bounds = make(cfg), store.chunk_bounds(steps, every)
    numbers = {name: jnp.float32(value) for name, value in {**program.hyper, **hyper}.items()}
    made_of = [make, cfg, {name: float(x) for name, x in numbers.items()}, np.asarray(jax.random.key_data(key))]
    owner = store.owner(identity.digest(made_of), 0)
    states, chunks = folder / "states", [store.chunk_path(folder, STAGE, 0, i) for i in range(len(bounds))]
    with store.locked(folder) if first_process else contextlib.nullcontext():
        done = max((int(path.name) for path in states.glob("*") if path.name.isdecimal()), default=0)
        if done > len(bounds):
            raise UserError(f"{folder} holds more than {steps} updates: expected at least as many, or another folder")
        rows = [store.load_own(path, owner, bound) for path, bound in zip(chunks[:done], bounds[:done], strict=True)]
        if first_process and states.exists():
            _only(states, done)
        if done:
            like = jax.eval_shape(program.init, key, numbers)
            state = load_state(states / str(done), like, mesh)
        else:
            state = start_on(make, cfg, mesh, key, numbers)
        step = step_by_jit(make, cfg, mesh).lower(state).compile()
        # Collectives of CPUs give up where another process comes half a minute later, perhaps since it compiles longer.
        multihost.get_barrier_sync_fn()(key="compiled", timeout_ms=COMPILING)
        for index, (first, count) in list(enumerate(bounds))[done:]:
            began, found = time.perf_counter(), []
            for number in range(first, first + count):
                state, metrics = step(state)
                found.append({name: host(x) for name, x in metrics.items()})
                report(number + 1, found[-1])
            metrics = {name: np.stack([row[name] for row in found]) for name in found[0]}
            rows.append(store.Chunk(owner, first, count, time.perf_counter() - began, metrics, None))
            if first_process:
                store.save_chunk(chunks[index], rows[-1])  # before the state, so that a state has all metrics before it
            save_state(states / str(index + 1), state)
            if first_process:
                _only(states, index + 1)
    return state, {name: np.concatenate([row.metrics[name] for row in rows]) for name in rows[0].metrics}


def _only(states: Path, newest: int) -> None:
    """Removes what is older than the newest state, and what a killed process has left half written."""
    for path in states.iterdir():
        if path.name != str(newest):
            shutil.rmtree(path)
