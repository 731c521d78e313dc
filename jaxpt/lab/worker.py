"""The process that computes seeds: `python -m jaxpt.lab.worker FOLDER`, started by lab.pool.

Standard input is a stream of pickles: a setup (lab.pool), then seeds. Its end means that the parent is gone or done,
and ends the process at once, which is safe at any moment because files appear whole or not at all.
Standard output is a stream of pickled messages; what the experiment prints goes to the folder's log.
"""

import os
import pickle
import platform
import queue
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.lab import programs, store
from jaxpt.lab.errors import UserError, expected
from jaxpt.lab.experiment import Stage, begun, lineage, load, topological
from jaxpt.lab.identity import digest, program_identity, stage_identities
from jaxpt.train.program import Program
from jaxpt.types import Array, Key

Compiled = dict[Any, Any]  # what this process has compiled, reused over seeds and stages


def compute_seed(folder: Path, stages: Sequence[Stage], seed: int, compiled: Compiled,
                 report: Callable[..., None]) -> None:
    """Runs the stages (in topological order) of one seed, chunk by chunk, from where their files end. A stage that
    another process is at, perhaps on another machine, is waited for."""
    parameters: dict[str | None, Any] = {None: None}
    identities = stage_identities(stages)
    for stage in stages:
        owner = store.owner(identities[stage.name], seed)
        with store.claimed(store.job_path(folder, stage.name, seed, "lock"), wait=True):
            parameters[stage.name] = _compute_stage(folder, stage, seed, owner, begun(stage, parameters), compiled, report)


def _compute_stage(folder: Path, stage: Stage, seed: int, owner: str, parents: Any, compiled: Compiled,
                   report: Callable[..., None]) -> Any:
    """The parameters behind the stage, computed from where its files end."""
    bounds = store.chunk_bounds(stage.steps, stage.chunk)
    identity = program_identity(stage)
    program = _program(stage, identity, compiled)
    start = (*_key_and_hyper(stage, program, seed), parents)
    done, leaves = store.progress(folder, stage.name, seed, owner, bounds)
    if leaves is None:
        leaves = to_leaves(program.init(*start))
    state = from_leaves(leaves, jax.tree.structure(jax.eval_shape(program.init, *start)))
    if done >= 2:
        store.drop_state(store.chunk_path(folder, stage.name, seed, done - 2))
    for index, (first, steps) in list(enumerate(bounds))[done:]:
        run = _once(compiled, ("scan", identity, steps), lambda: _scan(program.step, steps))
        started = time.perf_counter()
        state, metrics = run(state)
        metrics = {name: host(x) for name, x in metrics.items()}
        seconds = time.perf_counter() - started
        path = store.chunk_path(folder, stage.name, seed, index)
        store.save_chunk(path, store.Chunk(owner, first, steps, seconds, metrics, to_leaves(state)))
        if index > 0:
            store.drop_state(store.chunk_path(folder, stage.name, seed, index - 1))
        last = {name: float(x[-1]) for name, x in metrics.items() if x.ndim == 1}
        report("progress", seed=seed, stage=stage.name, chunk=index, steps=first + steps, metrics=last)
    return program.params(state)


def share_compiling(place: Path, stages: Sequence[Stage], compiled: Compiled) -> None:
    """Takes every program from `place` before the first seed, or compiles it together with the other workers: what one
    of them is busy with is left for later. The last stages' first: what is forked is more to compile than its start."""
    left = {}
    for stage in reversed(stages):
        for _, steps in store.chunk_bounds(stage.steps, stage.chunk):
            left.setdefault(("scan", program_identity(stage), steps), stage)
    for patient in (False, True):
        for key, stage in list(left.items()):
            _, identity, steps = key
            lower = partial(_lower, stage, identity, steps, compiled)
            program = programs.fetch(place, f"{identity[:32]}-{steps}", lower, patient)
            if program is not None:
                compiled[key] = program
                del left[key]


def _lower(stage: Stage, identity: str, steps: int, compiled: Compiled) -> jax.stages.Lowered:
    program = _program(stage, identity, compiled)
    state = jax.eval_shape(program.init, *_key_and_hyper(stage, program, 0), None)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return _scan(program.step, steps).lower(shapes)


def metric_shapes(stages: Sequence[Stage], compiled: Compiled) -> dict[str, dict[str, tuple[int, ...]]]:
    """stage -> metric -> shape of one step, by tracing alone."""
    shapes, parameters = {}, {None: None}
    for stage in stages:
        program = _program(stage, program_identity(stage), compiled)
        state = jax.eval_shape(program.init, *_key_and_hyper(stage, program, 0), begun(stage, parameters))
        _, metrics = jax.eval_shape(program.step, state)
        shapes[stage.name] = {name: x.shape for name, x in metrics.items()}
        parameters[stage.name] = jax.eval_shape(program.params, state)
    return shapes


def _program(stage: Stage, identity: str, compiled: Compiled) -> Program:
    return _once(compiled, ("program", identity), lambda: _traced_once(stage.make(stage.config)))


def _traced_once(program: Program) -> Program:
    """The program with functions that remember their traces: every length of chunk shares one."""
    return program._replace(init=jax.jit(program.init), step=jax.jit(program.step))


def _key_and_hyper(stage: Stage, program: Program, seed: int) -> tuple[Key, dict[str, Array]]:
    unknown = [name for name in stage.hyper if name not in program.hyper]
    if unknown:
        hint = expected(unknown[0], program.hyper)
        raise UserError(f"stage {stage.name!r}: hyper {unknown[0]!r} is unknown: {hint}")
    stream = zlib.crc32((stage.stream or stage.name).encode())
    numbers = {**program.hyper, **stage.hyper}
    hyper = {name: jnp.asarray(value, jnp.float32) for name, value in numbers.items()}
    return jax.random.fold_in(jax.random.key(seed), stream), hyper


def _once(table: Compiled, key: Any, build: Callable[[], Any]) -> Any:
    if key not in table:
        table[key] = build()
    return table[key]


def _scan(step: Callable[[Any], Any], steps: int) -> Callable[[Any], Any]:
    return jax.jit(lambda state: jax.lax.scan(lambda s, _: step(s), state, length=steps), donate_argnums=0)


def host(x: jax.Array) -> np.ndarray:
    """Metrics in a dtype that .npz knows: bfloat16 becomes float32."""
    return np.asarray(x) if np.asarray(x).dtype.isbuiltin == 1 else np.asarray(x.astype(jnp.float32))


def to_leaves(state: Any) -> list[dict[str, Any]]:
    """The state's leaves as bytes with dtype and shape; typed keys by their data and implementation."""
    return [_to_bytes(x) for x in jax.tree.leaves(state)]


def _to_bytes(x: jax.Array) -> dict[str, Any]:
    key = None
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        key, x = str(jax.random.key_impl(x)), jax.random.key_data(x)
    host = np.asarray(x)
    data = np.frombuffer(host.tobytes(), np.uint8)
    return {"data": data, "dtype": host.dtype.name, "shape": list(host.shape), "key": key}


def from_leaves(leaves: Sequence[Mapping[str, Any]], structure: Any) -> Any:
    """The state on the device. A fresh state takes this way too: it and a resumed one have one type,
    and no two leaves share a buffer, so that the state can be donated."""
    return jax.tree.unflatten(structure, [_from_bytes(leaf) for leaf in leaves])


def _from_bytes(leaf: Mapping[str, Any]) -> jax.Array:
    host = np.frombuffer(leaf["data"].tobytes(), jnp.dtype(leaf["dtype"])).reshape(leaf["shape"])
    x = jnp.array(host, copy=True)
    return x if leaf["key"] is None else jax.random.wrap_key_data(x, impl=leaf["key"])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    setup = pickle.load(sys.stdin.buffer)
    if setup["cpus"]:
        os.sched_setaffinity(0, setup["cpus"])
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(seeds,), daemon=True).start()

    def send(kind: str, **fields: Any) -> None:
        pickle.dump({"kind": kind, **fields}, out)
        out.flush()

    try:
        experiment = load(setup["experiment"]).experiment
        folder = Path(setup["folder"])
        inputs = store.read_inputs(folder)
        stages = topological(experiment.stages(pickle.loads(setup["config"]), inputs))
        wanted = stages
        if setup["stage"] is not None:
            stages = lineage(stages, setup["stage"])
            wanted = stages[-1:]
        device = jax.devices()[0]
        if (device.platform, device.device_kind) != setup["device"]:
            raise UserError(f"this run is of {' '.join(setup['device'])}, but {platform.node()} has {device.platform} "
                            f"{device.device_kind}: the same kind of device is expected everywhere")
        compiled: Compiled = {}
        place = Path(setup["programs"])
        if setup["rehearse"]:
            file = place / f"{digest(stage_identities(stages))[:32]}.shapes"
            send("metrics", shapes=programs.kept(file, lambda: metric_shapes(stages, compiled)))
        if setup["workers"] > 1 or place.parent != folder:  # there is somebody to share with, now or later
            share_compiling(place, wanted, compiled)
        while True:
            seed = seeds.get()
            compute_seed(folder, stages, seed, compiled, send)
            send("done", seed=seed)
    except UserError as error:
        send("user_error", text=str(error))
    except OSError as error:
        send("user_error", text=f"{type(error).__name__}: {error}")
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        send("failed", text=text, traceback=traceback.format_exc())


def _listen(seeds: "queue.SimpleQueue[int]") -> None:
    try:
        while True:
            seeds.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
