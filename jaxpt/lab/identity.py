"""What makes two runs the same run: canonical values, stage identities, claims, sources, versions."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import subprocess
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxpt
from jaxpt.lab.experiment import Claim, Stage, begun

# Variables that change what XLA computes; results under different values are not the same run.
NUMERICS = ("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL",
            "JAX_THREEFRY_PARTITIONABLE", "XLA_FLAGS")
PINNED = ("jax", "jaxlib", "flax", "optax", "jaxpt")  # a resumed run must agree in these versions
RECORDED = (*PINNED, "numpy", "scipy", "matplotlib")


def canonical(value: Any) -> Any:
    """Plain JSON that determines `value`: dataclasses with their type, functions by name, arrays by hash."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: canonical(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **fields}
    if isinstance(value, Mapping):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(v) for v in value]
    if isinstance(value, np.ndarray):
        return {"array": hash_arrays({"": value})}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, functools.partial):
        return {"partial": canonical(value.func), "args": canonical(value.args),
                "keywords": canonical(value.keywords)}
    if callable(value):
        name = f"{value.__module__}.{value.__qualname__}"
        # Functions made by one factory share their name: what they close over and default to tells them apart.
        cells = [canonical(cell.cell_contents) for cell in getattr(value, "__closure__", None) or ()]
        defaults = canonical([getattr(value, "__defaults__", None), getattr(value, "__kwdefaults__", None)])
        if not cells and "<" not in name:
            return name
        code = getattr(value, "__code__", None)
        body = hashlib.sha256(code.co_code + repr(code.co_consts).encode()).hexdigest() if code else ""
        return {"function": name, "closure": cells, "defaults": defaults, "code": body}
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(canonical(value), sort_keys=True).encode()).hexdigest()


def hash_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    h = hashlib.sha256()
    for name in sorted(arrays):
        x = np.asarray(arrays[name])
        h.update(f"{name} {x.dtype} {x.shape} ".encode())
        h.update(x.tobytes())
    return h.hexdigest()


def program_identity(stage: Stage) -> str:
    """Stages that share it (and a chunk length) share their compiled step."""
    return digest([stage.make, stage.config])


def stage_identities(stages: Sequence[Stage]) -> dict[str, str]:
    """name -> sha256 of (make, config, steps, hyper, stream, the parent's); stages in topological order."""
    known: dict[str | None, str | None] = {None: None}
    for s in stages:
        known[s.name] = digest([s.make, s.config, s.steps, s.hyper, s.stream or s.name, begun(s, known)])
    return {s.name: known[s.name] for s in stages}


def source(function: Callable[..., Any]) -> str:
    """A function's text, with the values it closes over: factories of estimands share their text."""
    if isinstance(function, functools.partial):
        return f"{source(function.func)}\nwith {function.args!r} {sorted(function.keywords.items())!r}"
    try:
        text = textwrap.dedent(inspect.getsource(function)).strip()
        captured = inspect.getclosurevars(function).nonlocals
    except (OSError, TypeError):  # a callable object, or a definition that stands in no file
        return repr(canonical(function)) if hasattr(function, "__qualname__") else repr(function)
    lines = [f"{k} = {source(v) if callable(v) else repr(v)}" for k, v in sorted(captured.items())]
    return "\n".join([text, *lines])


def claim_records(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """What config.json says about the claims before the run starts."""
    return [
        {
            "name": c.name, "statement": c.statement, "margin": c.margin, "unit": c.unit,
            "test": "one-sided paired t, Holm over the claims, alpha .05",
            "estimand": source(c.estimand), "control_name": c.control_name, "control": source(c.control),
        }
        for c in claims
    ]


def source_hash(experiment_file: Path) -> str:
    """sha256 over jaxpt/**/*.py (without other experiments) and the experiment's file."""
    root = Path(jaxpt.__file__).parent
    files = [p for p in sorted(root.rglob("*.py")) if p.relative_to(root).parts[0] != "experiments"]
    h = hashlib.sha256()
    for name, path in [*((str(p.relative_to(root)), p) for p in files), ("experiment", experiment_file)]:
        h.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return h.hexdigest()


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in RECORDED if name != "jaxpt"}
    return {"python": platform.python_version(), "jaxpt": jaxpt.__version__, **packages}


def must_agree(experiment_file: Path) -> dict[str, str]:
    """What a resumed run must find unchanged, by the name that a refusal gives it."""
    variables = {f"the variable {name}": os.environ.get(name, "") for name in NUMERICS}
    return {**same_code(experiment_file), **variables}


def same_code(experiment_file: Path) -> dict[str, str]:
    """What all machines of a run must have in common, by the name that a refusal gives it."""
    found = versions()
    return {"the source files": source_hash(experiment_file), **{f"the version of {name}": found[name] for name in PINNED}}


def git_revision(folder: Path) -> str | None:
    """HEAD of the checkout that `folder` stands in, with '+' where files differ; None outside git."""
    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True,
                              timeout=10, check=True).stdout.strip()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
