"""`jaxpt fit`: tables in, a report or one sentence out."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxpt.cli import main
from jaxpt.lab.errors import UserError
from jaxpt.lab.points import read_points
from jaxpt.lab.tables import number, read_table
from jaxpt.scaling.chinchilla import law

TRUE = np.array([406.4, 410.7, 1.69, 0.34, 0.28])
N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 5)))
LOSS = law(TRUE, N, D) * np.exp(0.01 * np.random.default_rng(0).normal(size=25))
ROWS = [(repr(n), repr(d), repr(y)) for n, d, y in zip(N.tolist(), D.tolist(), LOSS.tolist(), strict=True)]
FAST = ["--bootstrap", "20"]


def text(rows=ROWS, header=("N", "D", "loss"), by=","):
    return "\n".join(by.join(row) for row in (header, *rows)) + "\n"


def changed(line, column, cell):
    """The table with one cell (line counts from 1, the header's) replaced."""
    rows = [list(row) for row in ROWS]
    rows[line - 2][column] = cell
    return text(rows)


@pytest.fixture
def fit(tmp_path, capsys):
    """Writes a file and fits it: (exit code, stdout, stderr)."""
    def run(content, *words, name="runs.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        code = main(["fit", str(path), *FAST, *words])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(tmp_path) + os.sep, "")
    return run


def test_the_contract_s_keys(fit):
    code, out, err = fit(text(), "--json", "--law", "chinchilla", "--budget", "1e21")
    entry = json.loads(out, parse_constant=pytest.fail)
    assert code == 0 and err == ""
    assert list(entry)[:9] == ["law", "n_points", "params", "se", "ci95", "objective", "certificate", "warnings",
                               "version"]
    names = ["A", "B", "E", "alpha", "beta"]
    assert entry["law"] == "chinchilla" and entry["n_points"] == 25
    assert list(entry["params"]) == list(entry["se"]) == list(entry["ci95"]) == names
    for name in names:
        low, high = entry["ci95"][name]
        assert low < high and entry["se"][name] > 0
    assert {"gradient_norm", "condition", "starts", "share_at_optimum", "minima", "at_bounds"} <= set(
        entry["certificate"])
    assert entry["budget"]["N"]["value"] * entry["budget"]["D"]["value"] * 6 == pytest.approx(1e21)
    assert fit(text(), "--json", "--budget", "1e21")[1] == out  # the same bytes


def test_text_and_markdown(fit):
    code, out, _ = fit(text(), "--budget", "1T")
    assert code == 0 and all(word in out for word in ("alpha", "95% case bootstrap", "D*/N*", "Objective", "N from 'N'"))
    assert "\x1b" not in out
    code, out, _ = fit(text(), "--markdown")
    assert code == 0 and "| alpha |" in out and out.count("| --- |") >= 2
    assert "n/a" in fit(text(), "--bootstrap", "0")[1]


BAD = {  # content, words -> one sentence
    "missing column": (text(header=("N", "D", "lss")), [], "line 1: no column for the loss among N, D, lss"),
    "missing D": (text(header=("N", "C", "loss")), [], "--d-from 6 takes D = C / (6 N)"),
    "wrong flag": (text(), ["--n", "Model"], "--n Model: runs.csv has no such column"),
    "text": (changed(9, 2, "n/a"), [], "runs.csv line 9: loss 'n/a' is not a number (1 of 25 rows cannot be read"),
    "negative": (changed(4, 2, "-3.1"), [], "line 4: loss '-3.1' is not above 0"),
    "zero": (changed(4, 0, "0"), [], "line 4: N '0' is not above 0"),
    "NaN": (changed(5, 2, "nan"), [], "line 5: loss 'nan' is not a finite number"),
    "inf": (changed(5, 1, "inf"), [], "line 5: D 'inf' is not a finite number"),
    "empty cell": (changed(7, 1, ""), [], "line 7: D is empty"),
    "decimal comma": (changed(7, 2, '"3,141"'), [], "line 7: loss '3,141' is not a number"),
    "ragged": (text() + "1,2\n", [], "line 27: 2 cells where the header has 3"),
    "one point": (text(ROWS[:1]), [], "one run (line 2) left to fit; the law has 5 parameters"),
    "four points": (text(ROWS[:4]), [], "4 runs left to fit"),
    "all dropped": (text(ROWS[:6]), ["--drop", "highest:6"], "0 runs left to fit"),
    "empty": ("", [], "runs.csv is empty"),
    "blank": ("\n  \n", [], "runs.csv is empty"),
    "header only": ("N,D,loss\n", [], "has a header and no rows"),
    "no header": ("\n".join(",".join(row) for row in ROWS), [], "line 1: a header with the columns' names"),
    "wrong delimiter": (text(by=" "), [], "line 1: a header of several columns is expected, separated by comma"),
    "two candidates": (text(header=("N", "tokens", "loss")).replace("tokens", "tokens,n_tokens", 1), [],
                       "'tokens' and 'n_tokens' could both be meant: say --d COLUMN"),
    "two of one name": (text(header=("N", "D", "loss"), rows=[]).strip() + ",loss\n1,2,3,4\n", [],
                        "2 columns are called 'loss'"),
    "not text": (b"N,D,loss\n1,2,\xff\xfe\n", [], "line 2: not UTF-8 text"),
    "zero byte": (b"N,D,loss\n1,2,\0\n", [], "line 2: a zero byte"),
    "two sources": (text(), ["--d", "D", "--d-from", "6"], "two sources of D"),
    "law": (text(), ["--law", "chinchila"], "--law chinchila: did you mean chinchilla?"),
    "rule": (text(), ["--drop", "top:5"], "--drop top:5: highest:K or lowest:K is expected"),
    "budget": (text(), ["--budget", "much"], "--budget much: a number above 0 is expected"),
    "delta": (text(), ["--delta", "0"], "--delta 0: a number above 0 is expected"),
    "clusters": (text(), ["--resample", "cluster"], "--cluster COLUMN is needed"),
    "option": (text(), ["--bugdet", "1e21"], "option --bugdet is unknown: did you mean --budget?"),
    "figure": (text(), ["--figure", "x.gif"], "--figure x.gif: a name that ends in .png"),
    "place": (text(), ["--figure", "/nowhere/x.png"], "--figure /nowhere/x.png: cannot be written"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(fit, name):
    content, words, sentence = BAD[name]
    code, out, err = fit(content, *words)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert err.startswith("jaxpt: ") and sentence in err


@pytest.mark.parametrize("content, sentence", [
    (b'{"N": 1e8, "D": 1e9, "loss": 3}\nnot json\n', "line 2: not a JSON object on one line"),
    (b"[1, 2]\n", "line 1: not a JSON object on one line"),
    (b'{"N": 1e8, "D": 1e9}\n', "no column for the loss"),
])
def test_bad_json_lines(fit, content, sentence):
    code, out, err = fit(content, name="runs.jsonl")
    assert code == 2 and sentence in err and len(err.splitlines()) == 1


def test_files_that_are_none(tmp_path, capsys, monkeypatch):
    for path, sentence in ((tmp_path / "no.csv", "there is no such file"), (tmp_path, "without a finished run")):
        assert main(["fit", str(path)]) == 2
        assert sentence in capsys.readouterr().err
    broken = tmp_path / "runs.csv.gz"
    broken.write_bytes(b"no gzip")
    assert main(["fit", str(broken)]) == 2 and "cannot be read" in capsys.readouterr().err
    monkeypatch.setattr("jaxpt.lab.tables.MOST_BYTES", 100)
    (tmp_path / "huge.csv").write_text(text())
    assert main(["fit", str(tmp_path / "huge.csv")]) == 2 and "is larger than" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr("jaxpt.lab.points.MOST_ROWS", 10)
    assert main(["fit", str(tmp_path / "huge.csv")]) == 2 and "25 rows; at most 10" in capsys.readouterr().err


def test_parquet_without_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "runs.parquet").write_bytes(b"PAR1")
    assert main(["fit", str(tmp_path / "runs.parquet")]) == 2
    assert "pip install 'jaxpt[parquet]'" in capsys.readouterr().err


def test_parquet(tmp_path, capsys):
    """Numbers, weights and groups as a Parquet file has them, of whatever type."""
    arrow = pytest.importorskip("pyarrow", reason="the extra jaxpt[parquet] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "runs.parquet"
    seed, weight = np.arange(25) % 5, 1.0 + np.arange(25) % 3
    whole = {"N": N.astype(np.int64), "D": D, "loss": LOSS.astype(np.float32), "seed": seed.astype(np.int8), "w": weight}
    parquet.write_table(arrow.table(whole), path)
    points = read_points(read_table(str(path)), cluster="seed", columns={"weight": "w"})
    np.testing.assert_array_equal(points.N, N.astype(np.int64))
    np.testing.assert_array_equal(points.loss, LOSS.astype(np.float32))
    np.testing.assert_array_equal(points.weight, weight)
    assert points.cluster.tolist() == [str(s) for s in seed] and points.places.tolist() == list(range(1, 26))
    parquet.write_table(arrow.table({**whole, "loss": [None, *LOSS.tolist()[1:]]}), path)
    assert main(["fit", str(path)]) == 2 and "row 1: loss is empty" in capsys.readouterr().err
    path.write_bytes(b"PAR1")
    assert main(["fit", str(path)]) == 2 and "not a Parquet file" in capsys.readouterr().err


def test_unreadable_rows_are_left_out_only_by_request_and_named(fit):
    content = changed(9, 2, "diverged").replace(ROWS[3][2], "nan")
    assert "line 5: loss 'nan' is not a finite number (2 of 25 rows cannot be read; --skip-bad leaves" in fit(content)[2]
    code, out, _ = fit(content, "--skip-bad", "--json")
    entry = json.loads(out)
    assert code == 0 and entry["n_points"] == 23
    assert [left["line"] for left in entry["input"]["left_out"]] == [5, 9]
    assert entry["warnings"][0].startswith("2 of 25 rows cannot be read and were left out (line 5: loss 'nan'")


def test_duplicates_are_said_and_counted(fit):
    entry = json.loads(fit(text([*ROWS, ROWS[0]]), "--json")[1])
    assert entry["n_points"] == 26
    assert any("(lines 2 and 27); all are counted" in sentence for sentence in entry["warnings"])


def test_dropped_losses_are_named(fit):
    entry = json.loads(fit(text(), "--json", "--drop", "highest:2")[1])
    lines = sorted(2 + np.argsort(LOSS)[-2:])
    assert entry["n_points"] == 23
    assert f"Dropped the 2 highest losses (lines {lines[0]}, {lines[1]})." in entry["input"]["notes"]


@pytest.mark.parametrize("cell, value", [("70M", 70e6), ("1.4T", 1.4e12), ("6e19", 6e19), (" 7 B ", 7e9), ("3k", 3e3),
                                         ("1_000", 1e3), (5, 5.0), ("2.5e3M", 2.5e9)])
def test_numbers(cell, value):
    assert number(cell) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("cell", ["", None, "x", "M", "1,000", "1 2", True, [1], "nan", float("nan"), "1e999", "70m"])
def test_no_numbers(cell):
    with pytest.raises(ValueError):
        number(cell)


def write(tmp_path, content, name="runs.csv"):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_table(str(tmp_path / name))


@pytest.mark.parametrize("by", [",", ";", "\t", "|"])
def test_one_table_in_every_dress(tmp_path, by):
    points = read_points(write(tmp_path, "\ufeff" + text(by=by).replace("\n", "\r\n")))
    for found, wanted in ((points.N, N), (points.D, D), (points.loss, LOSS)):
        np.testing.assert_array_equal(found, wanted)
    assert points.places.tolist() == list(range(2, 27))


def test_json_lines_and_gzip(tmp_path):
    lines = "".join(json.dumps({"params": n, "tokens": f"{d!r}", "val_loss": y}) + "\n"
                    for n, d, y in zip(N.tolist(), D.tolist(), LOSS.tolist(), strict=True))
    for content, name in ((lines, "runs.jsonl"), (lines, "runs.txt"), (gzip.compress(lines.encode()), "runs.jsonl.gz")):
        points = read_points(write(tmp_path, content, name))
        np.testing.assert_array_equal(points.D, D)
        assert points.notes == ["N from 'params', D from 'tokens', loss from 'val_loss'."]


def test_units_in_cells_and_in_the_column_s_name(tmp_path):
    rows = [(f"{n / 1e6!r}", f"{d / 1e9!r}B", y) for n, d, (_, _, y) in zip(N.tolist(), D.tolist(), ROWS, strict=True)]
    points = read_points(write(tmp_path, text(rows, ("params (M)", "Tokens", "eval-loss"))))
    np.testing.assert_allclose(points.N, N, rtol=1e-14)
    np.testing.assert_allclose(points.D, D, rtol=1e-14)
    assert "'params (M)' is read in units of 1e+06." in points.notes
    bare = read_points(write(tmp_path, text([(n, f"{float(d) / 1e9}", y) for n, d, y in ROWS])))
    assert any("are all columns in single parameters and tokens" in sentence for sentence in bare.warnings)


def test_tokens_from_compute_and_groups(tmp_path):
    rows = [(repr(6 * n * d), repr(n), y, f"run{i % 4}", "2") for i, (n, d, (_, _, y)) in
            enumerate(zip(N.tolist(), D.tolist(), ROWS, strict=True))]
    table = write(tmp_path, text(rows, ("flops", "model_size", "loss", "run", "w")))
    points = read_points(table, d_from=6.0, cluster="run", columns={"weight": "w"})
    np.testing.assert_allclose(points.D, D, rtol=1e-14)
    assert set(points.cluster) == {"run0", "run1", "run2", "run3"} and set(points.weight) == {2.0}
    assert len(set(read_points(table, d_from=6.0, cluster="N").cluster)) == 5
    with pytest.raises(UserError, match="--cluster rum: .* did you mean run"):
        read_points(table, d_from=6.0, cluster="rum")


def test_a_weight_is_a_number_of_copies(fit):
    """The objective of weighted runs is that of runs written down so many times, and so are its parameters."""
    copies = 1 + np.arange(25) % 3
    weighted = text([(*row, str(k)) for row, k in zip(ROWS, copies, strict=True)], ("N", "D", "loss", "w"))
    repeated = text([row for row, k in zip(ROWS, copies, strict=True) for _ in range(k)])
    one, other = (json.loads(fit(content, "--json", "--bootstrap", "0", *words)[1])
                  for content, words in ((weighted, ["--weight", "w"]), (repeated, [])))
    assert one["objective"] == pytest.approx(other["objective"], rel=1e-9)
    assert list(one["params"].values()) == pytest.approx(list(other["params"].values()), rel=1e-7)
    assert one["params"] != json.loads(fit(weighted, "--json", "--bootstrap", "0")[1])["params"]


def test_clusters_and_other_objectives_from_the_command(fit):
    entry = json.loads(fit(text(), "--json", "--cluster", "N")[1])
    assert entry["method"]["resample"] == "cluster"
    for objective in ("lad", "lsq"):
        entry = json.loads(fit(text(), "--json", "--objective", objective, "--resample", "wild")[1])
        assert entry["method"]["objective"] == objective and entry["method"]["resample"] == "wild"


@pytest.mark.parametrize("words", [["--budget", "1e22"], ["--bootstrap", "0"], ["--next", "3"], ["--isoflop"]])
def test_a_figure_of_every_report(fit, tmp_path, words):
    pytest.importorskip("matplotlib")
    for name in ("x.png", "x.svg"):
        assert fit(text(), "--figure", str(tmp_path / name), *words)[0] == 0
        assert (tmp_path / name).stat().st_size > 10_000
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_a_figure_of_runs_that_tell_no_exponents(fit, tmp_path):
    """All runs have one size, or the law fits them exactly: no map, and no traceback."""
    pytest.importorskip("matplotlib")
    exact = text([(n, d, repr(y)) for (n, d, _), y in zip(ROWS, law(TRUE, N, D).tolist(), strict=True)])
    for content in (text([("1e8", d, y) for _, d, y in ROWS]), exact):
        code, _, err = fit(content, "--figure", str(tmp_path / "x.png"))
        assert code == 0 and err == "" and (tmp_path / "x.png").stat().st_size > 10_000


def test_neither_jax_nor_scipy_nor_matplotlib_is_imported(tmp_path):
    (tmp_path / "runs.csv").write_text(text())
    code = ("import sys; from jaxpt.cli import main; code = main(); "
            "print(sorted({'jax', 'scipy', 'matplotlib', 'rich', 'tyro'} & set(sys.modules)), file=sys.stderr); "
            "sys.exit(code)")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code, "fit", str(tmp_path / "runs.csv"), *FAST], env=env, timeout=300,
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "[]\n"
