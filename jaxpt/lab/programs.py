"""Compiled programs on disk: shared by the workers of a run, and kept for the next run of the same sources.

A program is found by what it is made of and not by its trace, so a worker that finds it neither traces nor lowers.
"""

import os
import pickle
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpt.lab import store
from jaxpt.lab.identity import digest

DAYS = 30  # that a folder of programs is kept after its last use


def place(cache: Path | None, folder: Path, made_of: Mapping[str, Any]) -> Path:
    """Where the programs are that sources, versions and executor (`made_of`) give on this machine; in the run's own
    `folder`, for as long as it computes, where nothing is to be cached."""
    if cache is None:
        shutil.rmtree(folder / store.COMPILING, ignore_errors=True)  # a killed run's, perhaps of another machine
        return folder / store.COMPILING
    root = cache / "programs"
    for old in root.glob("*"):
        if time.time() - old.stat().st_mtime > DAYS * 86400:
            shutil.rmtree(old, ignore_errors=True)
    chosen = root / digest([made_of, _processor()])[:32]
    chosen.mkdir(parents=True, exist_ok=True)
    os.utime(chosen)
    return chosen


def _processor() -> list[str]:
    """What machine code may depend on: the processor with its features, else the machine's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return sorted(found) or [platform.machine(), platform.node()]


def fetch(place: Path, name: str, lower: Callable[[], Any], wait: bool) -> Any:
    """The program `name`, of one device, compiled if nobody has (lower() -> jax's Lowered); None where another process
    is at it and this one does not `wait`. What jax took from a cache of its own cannot be stored: everybody takes it
    from there."""
    import jax
    from jax.experimental.serialize_executable import deserialize_and_load, serialize

    file = place / f"{name}.program"
    with store.claimed(place / name, wait) as mine:
        if not mine:
            return None
        if file.exists():
            return deserialize_and_load(*pickle.loads(file.read_bytes()), execution_devices=jax.local_devices()[:1])
        program, cached = _compiled(lower())
        if not cached:
            store.write(file, lambda f: f.write(pickle.dumps(serialize(program))))
        return program


def _compiled(lowered: Any) -> tuple[Any, bool]:
    """The compiled program, and whether jax took it from its cache."""
    import jax

    taken: list[str] = []

    def listen(event: str, **_: Any) -> None:
        taken.extend([event] if event == "/jax/compilation_cache/cache_hits" else [])

    jax.monitoring.register_event_listener(listen)
    try:
        return lowered.compile(), bool(taken)
    finally:
        jax.monitoring.unregister_event_listener(listen)


def kept(file: Path, compute: Callable[[], Any]) -> Any:
    """compute(), or what it gave before."""
    if file.exists():
        return pickle.loads(file.read_bytes())
    value = compute()
    store.write(file, lambda f: f.write(pickle.dumps(value)))
    return value
