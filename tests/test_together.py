"""A run of two processes of which one is killed, or hangs: the other ends and says why, and the run goes on from what was
saved, to the bits of an uninterrupted one."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpt.lab import beats, together
from jaxpt.lab.errors import UserError
from jaxpt.models import ModelConfig
from jaxpt.train import parallel
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.train.sft import SftConfig, make_sft

PROCESSES, DEVICES_EACH, SECONDS, PATIENCE = 2, 4, 500, 15
STEPS, EVERY = 10, 3
ENV = EnvConfig("chain", {"p": 5, "max_level": 2}, (1, 2))
MODEL = ModelConfig(vocab=-(-ENV.make().spec.vocab // 8) * 8, d_model=16, n_layers=1, n_heads=2)
CFG = SftConfig(env=ENV, model=MODEL, optim=OptimConfig(learning_rate=1e-2), eval=EvalConfig(1, 8), batch=16)


def train(mesh, folder, steps=STEPS, report=lambda step, metrics: None, seed=3):
    return together.train(make_sft, CFG, mesh, jax.random.key(seed), {}, steps, EVERY, folder, report)


# ------------------------------------------------------------------ one process


@pytest.mark.slow
def test_a_run_goes_on_from_what_was_saved(tmp_path):
    mesh = parallel.make_mesh(4)
    state, metrics = train(mesh, tmp_path / "whole")
    assert metrics["loss"].shape == (STEPS,) and {p.name for p in (tmp_path / "whole" / "states").iterdir()} == {"4"}

    def interrupt(step, _):
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(mesh, tmp_path / "broken", report=interrupt)
    (tmp_path / "broken" / "states" / "3.orbax-checkpoint-tmp").mkdir()  # as a killed process leaves one
    seen = []
    again, more = train(mesh, tmp_path / "broken", report=lambda step, _: seen.append(step))
    assert seen == [7, 8, 9, 10]  # six were saved
    for name, values in metrics.items():
        assert values.tobytes() == more[name].tobytes(), name
    for a, b in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(again["params"]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    with pytest.raises(UserError, match="more than 6 updates"):
        train(mesh, tmp_path / "broken", steps=6)
    with pytest.raises(UserError, match="another stage's or seed's chunk"):
        train(mesh, tmp_path / "broken", seed=4)


def test_silence_is_noticed_and_an_end_is_not_taken_for_it(tmp_path):
    (tmp_path / "1").write_text(beats.DONE)
    for i in (2, 4):
        (tmp_path / str(i)).write_text("x")

    def beat():  # of process 3, which can be heard
        time.sleep(0.01)
        beats.write(tmp_path / "3")
        return False

    assert beats.lost(tmp_path, [1, 2, 3, 4], 2.0, beat) == [2, 4]
    assert beats.lost(tmp_path, [1, 2, 3, 4], 2.0, lambda: True) == []
    assert "process 2 of 5 lost" in beats.sentence([2], 5) and "processes 2, 4 of 5 lost" in beats.sentence([2, 4], 5)


@pytest.mark.parametrize("own, other, told", [("x", "x", True), (beats.DONE, "x", False), ("x", beats.DONE, False)])
def test_who_stands_beside_says_what_the_dead_cannot(tmp_path, own, other, told):
    """Only where the process has not come to its end, and another one is silent."""
    (tmp_path / "0").write_text(other)
    (tmp_path / "1").write_text(own)
    done = subprocess.run([sys.executable, "-m", "jaxpt.lab.beats", str(tmp_path), "1", "2", "0.5"], input=b"", capture_output=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 0
    assert done.stderr.decode() == (beats.sentence([0], 2) + "\n" if told else "")


# ------------------------------------------------------------------ two processes


def child(address: str, index: int, folder: Path) -> None:
    """What process `index` runs; VICTIM="INDEX STEP SIGNAL" says which one gets a signal, and when."""
    victim = os.environ.get("VICTIM", "").split()

    def report(step, _):
        if victim and (int(victim[0]), int(victim[1])) == (index, step):
            os.kill(os.getpid(), int(victim[2]))

    with together.together(address, PROCESSES, index, folder, PATIENCE):
        state, metrics = train(parallel.make_mesh(4, tensor=2), folder, report=report)
        local = [np.asarray(shard.data) for x in jax.tree.leaves(state["params"]) for shard in x.addressable_shards]
        (folder / f"result_{index}").write_bytes(pickle.dumps((metrics, local)))


def processes(folder: Path, victim: str = "") -> tuple[list[int | None], list[str]]:
    """Exit codes (None: still there, when the other had ended) and what was said. None of the processes outlives this call."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = {
        **os.environ, "JAX_NUM_CPU_DEVICES": str(DEVICES_EACH), "JAX_PLATFORMS": "cpu", "VICTIM": victim,
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    logs = [folder / f"log_{i}" for i in range(PROCESSES)]

    def spawn(index):
        with logs[index].open("wb") as log:
            command = [sys.executable, __file__, address, str(index), str(folder)]
            return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    running = [spawn(i) for i in range(PROCESSES)]
    try:
        waited = [i for i in range(PROCESSES) if not victim or i != int(victim[0])]
        for i in waited:
            running[i].wait(SECONDS)
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    if victim:  # who stands beside a process that jax has ended speaks a little later
        deadline = time.monotonic() + 60
        while "jaxpt: " not in logs[waited[0]].read_text(errors="replace") and time.monotonic() < deadline:
            time.sleep(0.2)
    return codes, [log.read_text(errors="replace") for log in logs]


@pytest.mark.slow
def test_the_other_process_ends_and_the_run_goes_on(tmp_path):
    codes, said = processes(tmp_path / "whole")
    assert codes == [0, 0], said
    whole = [pickle.loads((tmp_path / "whole" / f"result_{i}").read_bytes()) for i in range(PROCESSES)]
    for victim, number in ((1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)):
        folder = tmp_path / f"broken_{victim}_{number.name}"
        codes, said = processes(folder, f"{victim} 8 {number.value}")
        assert codes[1 - victim] == 1 if victim else codes[1 - victim] not in (0, None), (victim, codes, said)
        told = [line for line in said[1 - victim].splitlines() if line.startswith("jaxpt: ")]
        assert len(told) == 1 and told[0].startswith(f"jaxpt: process {victim} of 2 lost"), said
        assert not list(folder.glob("result_*"))
        codes, said = processes(folder)
        assert codes == [0, 0], said
        for i in range(PROCESSES):
            metrics, local = pickle.loads((folder / f"result_{i}").read_bytes())
            for name, values in whole[i][0].items():
                assert values.tobytes() == metrics[name].tobytes(), name
            assert all(a.tobytes() == b.tobytes() for a, b in zip(whole[i][1], local, strict=True))


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
