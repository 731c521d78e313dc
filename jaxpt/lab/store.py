"""The run folder. Every file appears whole or not at all; one process at a time may write.

    OUT/NAME/<hash>/  lock  config.json  inputs.npz  chunks/STAGE/SEED-CHUNK.npz  jobs/
                      metrics.jsonl  curves.npz  claims.json  figure.png  report.md

A chunk file holds the metrics of its steps, and the newest one of a stage and seed also the state behind
them. When the next chunk is safely on disk, the older file is replaced by one without the state. So at
any moment at least one file has the state that the files up to it lead to; if one is deleted, the run
continues from the last state that its unbroken row of files still has, or from the stage's start.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxpt.lab.errors import UserError
from jaxpt.lab.identity import hash_arrays

TEMPORARY = ".partial-"
COMPILING = "compiling"  # where the workers of a run without a cache share programs


def write(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Writes path whole or not at all: a temporary file beside it, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(cannot_write(path, error)) from error


def cannot_write(path: Path, error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space" if full else "make it writable"
    return (f"cannot write {path}: {os.strerror(error.errno or 0)}; what was finished is kept: "
            f"{advice} and run the same command with --resume")


def write_json(path: Path, value: Any) -> None:
    write(path, lambda f: f.write((json.dumps(jsonable(value), indent=1, allow_nan=False) + "\n").encode()))


def jsonable(value: Any) -> Any:
    """Plain JSON: arrays and tuples as lists, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def between(path: Path, begin: str, end: str) -> tuple[str, str]:
    """What stands before and behind two markers of a text. UserError where they are not there, one below the other."""
    try:
        before, marker, rest = path.read_text(encoding="utf-8").partition(begin)
    except OSError as error:
        raise UserError(f"--write {path}: {error.strerror}") from None
    _, closed, after = rest.partition(end)
    if not marker or not closed:
        raise UserError(f"--write {path}: a line {begin} and, below it, a line {end} are expected")
    return before, after


def write_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replaces what stands between the two markers."""
    before, after = between(path, begin, end)
    write(path, lambda f: f.write(f"{before}{begin}\n\n{text}\n{end}{after}".encode()))


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """np.savez dates its members 1980, so equal arrays give equal files."""
    write(path, lambda f: np.savez(f, **arrays))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


class Chunk(NamedTuple):
    owner: str  # the identity of its stage and its seed: a file in another's place is no chunk
    first: int  # step before the chunk
    steps: int
    seconds: float
    metrics: dict[str, np.ndarray]  # name -> [steps, ...]
    state: list[dict[str, Any]] | None  # leaves as {data: bytes [k] uint8, dtype, shape, key}


def chunk_path(folder: Path, stage: str, seed: int, chunk: int) -> Path:
    return folder / "chunks" / stage / f"{seed:05d}-{chunk:05d}.npz"


def job_path(folder: Path, stage: str, seed: int, kind: str) -> Path:
    """A stage's and seed's file beside its chunks: its "lock", its "log"."""
    return folder / "jobs" / f"{stage}-{seed:05d}.{kind}"


def save_chunk(path: Path, chunk: Chunk) -> None:
    arrays = {f"metrics/{name}": x for name, x in chunk.metrics.items()}
    arrays |= {f"state/{i:04d}": leaf["data"] for i, leaf in enumerate(chunk.state or [])}
    types = [{k: leaf[k] for k in ("dtype", "shape", "key")} for leaf in chunk.state or []]
    meta = {
        "owner": chunk.owner, "first": chunk.first, "steps": chunk.steps, "seconds": chunk.seconds,
        "checksum": hash_arrays(arrays), "state": None if chunk.state is None else types,
    }
    write_arrays(path, arrays | {"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8)})


def load_chunk(path: Path) -> Chunk:
    """UserError names a file that is not what save_chunk wrote."""
    try:
        arrays = read_arrays(path)
        meta = json.loads(arrays.pop("meta").tobytes())
        if meta["checksum"] != hash_arrays(arrays):
            raise ValueError("checksum")
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from error
    except Exception as error:  # damage raises whatever the damaged bytes mean to zip, npy and JSON
        raise UserError(f"{path} is corrupt; delete it and run with --resume: its steps and those "
                        "behind it are computed again") from error
    metrics = {name.removeprefix("metrics/"): x for name, x in arrays.items() if name.startswith("metrics/")}
    leaves = meta["state"]
    if leaves is not None:
        leaves = [leaf | {"data": arrays[f"state/{i:04d}"]} for i, leaf in enumerate(leaves)]
    return Chunk(meta["owner"], meta["first"], meta["steps"], meta["seconds"], metrics, leaves)


def drop_state(path: Path) -> None:
    chunk = load_chunk(path)
    if chunk.state is not None:
        save_chunk(path, chunk._replace(state=None))


def chunk_bounds(steps: int, chunk: int) -> list[tuple[int, int]]:
    """[(first, steps)] of a stage's chunks; the last one may be shorter."""
    return [(first, min(chunk, steps - first)) for first in range(0, steps, chunk)]


def owner(stage_identity: str, seed: int) -> str:
    return f"{stage_identity} {seed}"


def load_own(path: Path, owner: str, bounds: tuple[int, int]) -> Chunk:
    """load_chunk, and UserError where the file belongs to another stage, seed or place."""
    chunk = load_chunk(path)
    if (chunk.owner, chunk.first, chunk.steps) != (owner, *bounds):
        raise UserError(f"{path} is another stage's or seed's chunk; delete it and run with --resume")
    return chunk


def progress(folder: Path, stage: str, seed: int, owner: str, bounds: Sequence[tuple[int, int]]
             ) -> tuple[int, list[dict[str, Any]] | None]:
    """(chunks that need not be computed, state behind them): the longest unbroken row ending in a state."""
    done, state = 0, None
    for index, bound in enumerate(bounds):
        path = chunk_path(folder, stage, seed, index)
        if not path.exists():
            break
        chunk = load_own(path, owner, bound)
        if chunk.state is not None:
            done, state = index + 1, chunk.state
    return done, state


def complete(folder: Path, stages: Mapping[str, int], seed: int) -> bool:
    """Whether every chunk file of the seed exists; stages: name -> number of chunks."""
    return all(chunk_path(folder, name, seed, i).exists() for name, n in stages.items() for i in range(n))


def seeds_on_disk(folder: Path) -> list[int]:
    names = (re.fullmatch(r"(\d+)-\d+\.npz", p.name) for p in folder.glob("chunks/*/*.npz"))
    return sorted({int(name[1]) for name in names if name})


@contextlib.contextmanager
def _out(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--out: cannot write {folder}: {os.strerror(error.errno or 0)}; "
                        "a folder that can be written is expected") from error


def make_folder(folder: Path) -> None:
    with _out(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, which ends with this process however that ends."""
    make_folder(folder)
    with _out(folder):
        file = open(folder / "lock", "a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder} is being written by another run; wait for it, stop it, "
                            "or choose another --out") from None
        for leftover in list(folder.rglob(f"{TEMPORARY}*")):  # a whole folder where a model was being written
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def claimed(path: Path, wait: bool) -> Iterator[bool]:
    """Whether this process holds the lock file `path` inside the block; `wait` until it does, or do not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def read_config(folder: Path) -> dict[str, Any] | None:
    """config.json of an earlier run; None if nothing was begun here."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict) or not {"runs", "must_agree", "stages"} <= set(config):
            raise ValueError("not a run's config")
        return config
    except FileNotFoundError:
        if seeds_on_disk(folder):
            raise UserError(f"{folder} has chunks but no config.json; delete the folder or choose another "
                            "--out") from None
        return None
    except (OSError, ValueError):
        raise UserError(f"{path} is unreadable; delete the folder or choose another --out") from None


def check_resumable(folder: Path, earlier: Mapping[str, Any] | None, must_agree: Mapping[str, str],
                    resume: bool) -> None:
    """UserError unless a run may begin (or, with resume, go on) in the folder."""
    if earlier is None:
        return
    before = earlier["must_agree"]
    changed = sorted(name for name, value in must_agree.items() if before.get(name) != value)
    if not resume:
        state = "a finished run" if (folder / "report.md").exists() else "an unfinished run"
        advice = f"{', '.join(changed)} changed since: " if changed else "add --resume to go on with it or to add seeds, or "
        raise UserError(f"{folder} holds {state} of this configuration: {advice}choose another --out")
    if changed:
        raise UserError(f"{folder} cannot be resumed: {', '.join(changed)} changed since it was begun, so "
                        "old and new steps would not be one experiment; restore them, or choose another --out")


def write_inputs(folder: Path, inputs: Mapping[str, np.ndarray]) -> None:
    write_arrays(folder / "inputs.npz", {f"inputs/{name}": x for name, x in inputs.items()})


def read_inputs(folder: Path) -> dict[str, np.ndarray]:
    path = folder / "inputs.npz"
    try:
        arrays = read_arrays(path)
    except Exception as error:  # damage raises whatever the damaged bytes mean to zip and npy
        raise UserError(f"{path} is corrupt; delete it and run with --resume") from error
    return {name.removeprefix("inputs/"): x for name, x in arrays.items()}
