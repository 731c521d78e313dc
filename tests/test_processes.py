"""Process agreement: one update in one process on one device, and in two processes of four virtual devices each; what they
save together, one process reads onto another mesh and goes on from."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpt.lab.mesh_store import load_state, save_state
from jaxpt.lab.worker import from_leaves, to_leaves
from jaxpt.models import ModelConfig
from jaxpt.train import parallel
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft

PROCESSES, DEVICES_EACH, SECONDS = 2, 4, 400
ENV = EnvConfig("chain", {"p": 5, "max_level": 2}, (1, 2))
COMMON = {
    "env": ENV, "model": ModelConfig(vocab=-(-ENV.make().spec.vocab // 8) * 8, d_model=16, n_layers=1, n_heads=2),
    "optim": OptimConfig(learning_rate=1e-2), "eval": EvalConfig(1, 8),
}
PROGRAMS = {
    "sft": (make_sft, SftConfig(**COMMON, batch=16), parallel.step_by_jit),
    "grpo": (make_policy, PolicyConfig(**COMMON, prompts=8, group=4), parallel.step_by_shard_map),
}


def start(program):
    return jax.jit(program.init)(jax.random.key(0), {k: jnp.float32(v) for k, v in program.hyper.items()})


def as_numpy(state, metrics):
    return [np.asarray(x) for x in jax.tree.leaves(state["params"])], {k: np.asarray(x) for k, x in metrics.items()}


def child(address: str, index: int, folder: Path) -> None:
    """What process `index` runs: one update of every program, from the states that the parent left."""
    jax.distributed.initialize(address, PROCESSES, index)
    meshes = {parallel.step_by_jit: parallel.make_mesh(4, tensor=2), parallel.step_by_shard_map: parallel.make_mesh()}
    assert (len(jax.devices()), len(jax.local_devices())) == (PROCESSES * DEVICES_EACH, DEVICES_EACH)
    leaves = pickle.loads((folder / "states").read_bytes())
    results = {}
    for name, (make, cfg, step_by) in PROGRAMS.items():
        structure = jax.tree.structure(jax.eval_shape(lambda make=make, cfg=cfg: start(make(cfg))))
        state, mesh = from_leaves(leaves[name], structure), meshes[step_by]
        state, metrics = step_by(make, cfg, mesh)(parallel.place(state, mesh))
        save_state(folder / name, state)
        everywhere = jax.jit(lambda params: params, out_shardings=NamedSharding(mesh, PartitionSpec()))
        results[name] = as_numpy({"params": everywhere(state["params"])}, metrics)
    (folder / f"result_{index}").write_bytes(pickle.dumps(results))


@pytest.mark.slow
def test_one_update_agrees_over_two_processes(tmp_path):
    expected, later, states = {}, {}, {}
    for name, (make, cfg, _) in PROGRAMS.items():
        program = make(cfg)
        step, state = jax.jit(program.step), start(program)
        for _ in range(3):  # Adam's first update is the gradient's sign, which rounding may flip
            state, _ = step(state)
        states[name] = to_leaves(state)
        state, metrics = step(state)
        expected[name], later[name] = as_numpy(state, metrics), as_numpy(*step(state))
    (tmp_path / "states").write_bytes(pickle.dumps(states))
    for results in run_processes(tmp_path):
        for name in PROGRAMS:
            agree(expected[name], results[name], name)
    make, cfg, step_by = PROGRAMS["sft"]
    mesh = parallel.make_mesh(2, tensor=2)
    state = load_state(tmp_path / "sft", jax.eval_shape(lambda: start(make(cfg))), mesh)
    agree(later["sft"], as_numpy(*step_by(make, cfg, mesh)(state)), "from two processes on a mesh of 8 to one on a mesh of 4")


def agree(expected, got, what):
    for a, b in zip(expected[0], got[0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=what)
    for key, value in expected[1].items():
        np.testing.assert_allclose(value, got[1][key], rtol=1e-5, atol=1e-5, err_msg=f"{what} {key}")


def run_processes(folder: Path) -> list[dict]:
    """The results of all processes, which talk over loopback; none of them outlives this call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = {
        **os.environ, "JAX_NUM_CPU_DEVICES": str(DEVICES_EACH), "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,  # jax fills it from process 0 alone
    }
    logs = [folder / f"log_{i}" for i in range(PROCESSES)]

    def spawn(index):
        with logs[index].open("wb") as log:
            command = [sys.executable, __file__, address, str(index), str(folder)]
            return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    processes = [spawn(i) for i in range(PROCESSES)]
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * PROCESSES, "\n".join(log.read_text()[-2000:] for log in logs)
    return [pickle.loads((folder / f"result_{i}").read_bytes()) for i in range(PROCESSES)]


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
