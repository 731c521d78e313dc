"""The same jobs in jaxpt and in the peers, side by side: workers that stay loaded, asked in turn, A B C A B C."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_peers.jobs import JOBS

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("VENV", ROOT / ".venv"))
PEERS = {
    "grpo": {"TRL": "with_trl.py", "Tunix": "with_tunix.py"}, "decode": {"HF generate": "with_hf.py"},
    "moe": {"HF grouped_mm": "experts_hf.py"}, "sft": {"torch.compile": "with_torch.py"},
}
OURS = "jaxpt"
OUR_SCRIPTS = {"grpo": "with_jaxpt.py", "decode": "with_jaxpt.py", "moe": "experts_jaxpt.py", "sft": "with_jaxpt.py"}
PACKAGES = ("torch", "transformers", "trl", "google-tunix", "jax")
# What is alike is stated in jobs.Job; what remains unequal is printed with the results.
UNEQUAL = (
    "TRL and Tunix turn every response into text, and call the reward in Python; jaxpt's reward is compiled in",
    "a block of jaxpt's updates is one compiled call (as in its experiments); TRL and Tunix come back after each",
    "jaxpt spreads the rows over one virtual device a core; PyTorch and Tunix use threads within operations",
    "jaxpt also computes the sampler's log-probabilities and takes its ratio against them; TRL and Tunix take the"
    " ratio against the policy's own, detached (1 by construction)",
    "TRL and Tunix also reduce their own metrics; the entropy of every decision is computed by all three",
    "weights start from each library's own initialisation; Tunix repeats its sampling noise (no seed given)",
    "updates on texts: torch.compile takes whole forward and backward passes, its AdamW is fused, clipping is not compiled",
    "TRL and HF generate run eagerly (PyTorch's default), with sdpa attention and a dynamic cache",
)


class Missing(Exception):
    """The peers' environment is not there, or a worker failed. The message says what to do."""


def peers_python() -> Path:
    python = Path(f"{VENV}-peers") / "bin" / "python"
    if not python.exists():
        raise Missing(f"{python.parents[1].name} is missing: scripts/test --peers builds it")
    return python


def versions() -> str:
    """name version, ... of the peers that are installed."""
    code = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    return subprocess.run(
        [peers_python(), "-c", code, *PACKAGES], check=True, capture_output=True, text=True
    ).stdout.strip()


@contextlib.contextmanager
def worker(name: str, script: str, job: str):
    """(answer, block): the next answer of a live process, and that to a request, which is one more block of the job."""
    python = sys.executable if name == OURS else peers_python()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # No hub is asked for anything: models and tokenizers are made here.
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, Path(__file__).with_name(script), job]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        )

        def answer() -> dict:
            line = process.stdout.readline()
            if line:
                return json.loads(line)
            code = process.wait()
            errors.seek(0)
            tail = "".join(errors.readlines()[-20:])
            raise Missing(f"{tail}\nthe {name} worker of {job} ended with exit code {code}; its last words are above")

        def block(request: str = "go") -> dict:
            process.stdin.write(f"{request}\n")
            process.stdin.flush()
            return answer()

        try:
            yield answer, block
        finally:
            process.kill()
            process.wait()


def side_by_side(job_name: str, rounds: int) -> dict[str, dict]:
    """Medians of each library: seconds and cpu_seconds of one update or decoded batch, the last mean reward."""
    job = JOBS[job_name]
    scripts = {OURS: OUR_SCRIPTS[job.kind], **PEERS[job.kind]}
    with contextlib.ExitStack() as stack:
        live = {}
        for name, script in scripts.items():  # one after the other, so that no start disturbs another
            progress(f"{job_name}: starting {name}")
            ready, live[name] = stack.enter_context(worker(name, script, job_name))
            got = ready()["parameters"]
            if got != job.parameters:
                raise Missing(f"{name} made a model of {got} parameters for {job_name}, expected {job.parameters}")
        blocks = {name: [] for name in live}
        for i in range(rounds):
            for name, block in live.items():
                progress(f"{job_name}: round {i + 1} of {rounds}, {name}")
                blocks[name].append(block())
    progress("")
    median = lambda rows, key: statistics.median(row[key] for row in rows) / job.block  # noqa: E731
    return {
        name: {key: median(rows, key) for key in ("seconds", "cpu_seconds")} | {"reward": rows[-1]["reward"]}
        for name, rows in blocks.items()
    }


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def peer_rows(rounds: int, only: str | None = None):
    """Rows for bench.main: one per job and peer. `only` keeps the jobs whose name starts with it."""
    jobs = [name for name in JOBS if only is None or name.startswith(only)]
    if not jobs:
        raise Missing(f"no job is named {only!r}; there are {', '.join(JOBS)}")
    print(versions())
    for name in jobs:
        job, everyone = JOBS[name], side_by_side(name, rounds)
        ours = everyone[OURS]
        unit = "value and gradients" if job.kind == "moe" else "update" if job.kind != "decode" else (
            f"{job.prompts} x {job.new_tokens} tokens")
        for peer, theirs in list(everyone.items())[1:]:
            yield f"{name}, {unit}, ms", 1e3 * ours["seconds"], f"{peer}, ms", 1e3 * theirs["seconds"]
        cpu = ", ".join(f"{who} {1e3 * x['cpu_seconds']:.1f}" for who, x in everyone.items())
        print(f"    CPU ms, which depend less on what else runs: {cpu}")
        if job.kind == "grpo":
            print("    last mean reward: " + ", ".join(f"{who} {x['reward']:.2f}" for who, x in everyone.items()))
    print("Unequal still:\n  - " + "\n  - ".join(UNEQUAL))
