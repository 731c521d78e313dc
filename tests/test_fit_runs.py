"""`jaxpt fit FOLDER`: a table of the runs that `jaxpt run` wrote there."""

import json

import numpy as np
import pytest

from jaxpt.cli import main
from jaxpt.lab import store
from jaxpt.lab.points import read_points
from jaxpt.lab.tables import read_table
from jaxpt.scaling.chinchilla import law

TRUE = np.array([406.4, 410.7, 1.69, 0.34, 0.28])
N = np.repeat(np.geomspace(1e6, 1e8, 4), 3)
TOKENS = np.tile(np.geomspace(1e8, 1e10, 3), 4)
SEEDS = [3, 4]
NOISE = np.exp(0.01 * np.random.default_rng(0).normal(size=(12, 2)))


def run(folder, N=N, loss="held", experiment="ladder", **more):
    """What `jaxpt run` leaves of a ladder, two steps a stage, with the loss written where it was measured."""
    names = [f"rung{i}" for i in range(12)]
    curves = {"seeds": np.array(SEEDS), "inputs/width": np.arange(12), "inputs/train": np.zeros(99, np.uint8)}
    curves |= {} if N is None else {"inputs/N": N}
    for i, name in enumerate(names):
        end = law(TRUE, np.repeat(1e7, 12) if N is None else N, TOKENS)[i] * NOISE[i]
        curves[f"{name}/tokens"] = np.outer([1, 1], [TOKENS[i] / 2, TOKENS[i]])
        curves[f"{name}/flops"] = 7.5 * curves[f"{name}/tokens"]
        curves[f"{name}/{loss}"] = np.stack([end, np.full(2, np.nan)], axis=1)  # measured once, not at the end
    store.write_json(folder / "config.json", {"experiment": experiment, "stages": dict.fromkeys(["warm", *names], "")})
    store.write_arrays(folder / "curves.npz", curves | {"warm/loss": np.ones((2, 2))} | more)


@pytest.mark.parametrize("loss", ["held", "loss"])
def test_a_row_for_each_stage_and_seed(tmp_path, loss):
    run(tmp_path / "ladder" / "abc", loss=loss)
    table = read_table(str(tmp_path))
    assert table.columns == ("experiment", "run", "seed", "N", "D", "flops", "loss", "width")
    points = read_points(table, cluster="seed", columns={"weight": "seed"})
    np.testing.assert_array_equal(points.N, np.repeat(N, 2))
    np.testing.assert_array_equal(points.D, np.repeat(TOKENS, 2))
    np.testing.assert_array_equal(points.C, 7.5 * np.repeat(TOKENS, 2))
    np.testing.assert_array_equal(points.loss, (law(TRUE, N, TOKENS)[:, None] * NOISE).ravel())
    assert points.cluster.tolist() == ["3", "4"] * 12 and points.weight.tolist() == [3, 4] * 12
    assert [row["width"] for row in table.rows] == np.repeat(np.arange(12), 2).tolist()


def test_several_folders_and_the_command(tmp_path, capsys):
    run(tmp_path / "a")
    run(tmp_path / "b", N=10 * N, experiment="larger")
    assert len(read_table(str(tmp_path)).rows) == 48
    words = ["--bootstrap", "20", "--cluster", "seed", "--json"]
    assert main(["fit", str(tmp_path), *words]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["n_points"] == 48 and entry["method"]["resample"] == "cluster"
    assert entry["params"]["alpha"] == pytest.approx(0.34, rel=0.1)


def test_what_is_no_ladder_is_named(tmp_path, capsys):
    run(tmp_path / "b", N=None, experiment="pretrain")
    assert main(["fit", str(tmp_path)]) == 2
    assert "pretrain does not say the parameters of its 12 training stages" in capsys.readouterr().err
    run(tmp_path / "a")
    assert main(["fit", str(tmp_path)]) == 2
    assert "row 25: " in (said := capsys.readouterr().err) and "--skip-bad leaves such rows out" in said
    assert main(["fit", str(tmp_path), "--skip-bad", "--bootstrap", "0", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["n_points"] == 24 and entry["input"]["left_out"][0]["row"] == 25
    whole = (tmp_path / "a" / "curves.npz").read_bytes()
    for broken in (b"PK broken", whole[:500], whole[:-200], b""):
        (tmp_path / "a" / "curves.npz").write_bytes(broken)
        assert main(["fit", str(tmp_path)]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_run_that_diverged_is_a_row_that_cannot_be_read(tmp_path, capsys):
    run(tmp_path / "a", **{"rung2/held": np.full((2, 2), np.nan)})
    assert main(["fit", str(tmp_path)]) == 2
    assert "row 5: loss 'nan' is not a finite number (2 of 24 rows" in capsys.readouterr().err


@pytest.mark.slow
def test_the_ladder_s_own_folder(tmp_path, capsys):
    """The rows are those of the CSV that its report ends with."""
    from jaxpt.lab.run import run as run_experiment

    result = run_experiment("scaling_ladder", tier="smoke", out=tmp_path)
    lines = result.report.read_text().split("```csv\n")[1].split("\n```")[0]
    (tmp_path / "ladder.csv").write_text(lines + "\n")
    wanted, found = (read_points(read_table(str(tmp_path / name))) for name in ("ladder.csv", "scaling_ladder"))
    for name in ("N", "D", "loss"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-6)
