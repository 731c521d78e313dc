"""What `jaxpt fit` costs, in CPU-seconds of whole processes: every law of the table, and beside other fitters."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RUNS = 240  # as many as in Epoch's reading of Chinchilla's figure 4


def measured(command: list[str]) -> tuple[float, str]:
    """(CPU-seconds of a process and its own children, what it printed); nothing was compiled before."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"} | {
        "JAXPT_CACHE": "off", "MPLBACKEND": "agg", "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    with tempfile.TemporaryFile("w+") as out:
        child = os.posix_spawn(command[0], command, env, file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)])
        _, status, usage = os.wait4(child, 0)
        if status:
            raise SystemExit(f"failed: {' '.join(command)}")
        out.seek(0)
        return usage.ru_utime + usage.ru_stime, out.read()


def fit_command(file: str, *words: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from jaxpt.cli import main; sys.exit(main())", "fit", file, *words]


def laws(only: str | None) -> Iterator[tuple[str, float]]:
    """(law, CPU-seconds of `jaxpt fit` with nothing compiled before) on RUNS runs with noise of 1%."""
    from scaling_data import law_runs

    from jaxpt.scaling.laws import table

    for name, law in table().items():
        if only not in (None, name):
            continue
        x, y = law_runs(law, 0.01, count=RUNS)
        rows = zip(*(column.tolist() for column in (*x.values(), y)), strict=True)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "runs.csv")
            Path(file).write_text("\n".join([",".join((*x, law.output)), *(",".join(map(repr, r)) for r in rows)]))
            yield name, measured(fit_command(file, "--law", name))[0]


def scaling(only: str | None) -> Iterator[tuple[str, float, float]]:
    """(fitter, CPU-seconds, sum of Huber's loss at what it found) on Epoch's reading of Chinchilla's figure 4 without
    the 5 highest losses. CHINCHILLA_PYTHON names a Python that has the package `chinchilla`; else it is left out."""
    import numpy as np
    from scaling_data import epoch

    from jaxpt.scaling.chinchilla import law
    from jaxpt.scaling.robust import value

    N, D, loss = epoch()
    peers = ROOT / "scripts" / "bench_peers"
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "runs.csv")
        np.savetxt(file, np.stack([N, D, loss], axis=1), "%.17g", ",", header="N,D,loss", comments="")
        commands = {"jaxpt fit, no refits": fit_command(file, "--json", "--bootstrap", "0"),
                    "jaxpt fit, 4000 refits": fit_command(file, "--json"),
                    "SciPy L-BFGS-B, 4500 starts": [sys.executable, str(peers / "fit_scipy.py"), file]}
        if "CHINCHILLA_PYTHON" in os.environ:
            commands["chinchilla, 4500 starts"] = [os.environ["CHINCHILLA_PYTHON"], str(peers / "fit_chinchilla.py"),
                                                   file]
        for name, command in commands.items():
            if only is None or name.startswith(only):
                seconds, said = measured(command)
                found = json.loads(said)
                params = list(found["params"].values()) if isinstance(found, dict) else found
                yield name, seconds, float(value(np.log(law(np.array(params), N, D) / loss), np.ones(N.size), "huber", 1e-3))
