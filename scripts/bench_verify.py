"""Seconds of `jaxpt verify` as its users meet them, in a process of its own, and examples per second.

Command: bench.py verify [--only jax|numpy|torch]
A policy loss of each framework at the default number of examples a law: with an empty cache of compiled programs, and
with the one that this run has filled. What is meant to be kept to stands beside it: 15 s cold and 5 s warm for jax, 60 s
for numpy and torch. torch is left out where it is not installed.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

EXAMPLES = 200
FRAMEWORKS = ("jax", "numpy", "torch")
BOUNDS = {"cold": 15.0, "warm": 5.0, "numpy": 60.0, "torch": 60.0}  # seconds
ARRAYS = '''
import {module} as xp

def ppo(logp, old_logp, advantages, mask):
    on = mask > 0
    change, advantages = xp.clip(xp.where(on, logp - old_logp, 0), -20, 20), xp.where(on, advantages, 0)
    ratio = xp.exp(change)
    per_token = -xp.minimum(ratio * advantages, xp.clip(ratio, 0.8, 1.2) * advantages)
    return xp.sum(per_token) / xp.maximum(xp.sum(on), 1)
'''
SOURCES = {
    "jax": ARRAYS.format(module="jax.numpy"), "numpy": ARRAYS.format(module="numpy"),
    "torch": '''
import torch

def ppo(logp, old_logp, advantages, mask):
    on, zero = mask > 0, torch.zeros_like(logp)
    change = (torch.where(on, logp, zero) - torch.where(on, old_logp, zero)).clamp(-20, 20)
    ratio, advantages = change.exp(), torch.where(on, advantages, zero)
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return per_token.sum() / on.sum().clamp(min=1)
''',
}


class Time(NamedTuple):
    what: str
    seconds: float
    bound: float
    examples_per_s: float  # examples x laws that were applied


def times(only: str | None = None):
    """A Time of every framework that is here, jax's cold and warm."""
    for framework in FRAMEWORKS:
        if only in (None, framework) and importlib.util.find_spec(framework):
            with tempfile.TemporaryDirectory() as folder:
                for cache in ("cold", "warm") if framework == "jax" else ("",):
                    seconds, laws = verified(framework, Path(folder))
                    bound = BOUNDS[cache or framework]
                    yield Time(f"verify, {framework} {cache}".rstrip(), seconds, bound, EXAMPLES * laws / seconds)


def verified(framework: str, folder: Path) -> tuple[float, int]:
    """Seconds of the whole command, and how many laws it applied. Raises where the right function is rejected."""
    file = folder / "loss.py"
    file.write_text(SOURCES[framework])
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    words = ["-m", "jaxpt", "verify", f"{file}:ppo", "--family", "policy_loss", "--examples", str(EXAMPLES)]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    last = (done.stdout or done.stderr).strip().splitlines()[-1]
    if done.returncode:
        raise RuntimeError(f"{framework}: exit code {done.returncode}: {last}")
    return seconds, int(last.split()[1])  # "all N laws hold"
