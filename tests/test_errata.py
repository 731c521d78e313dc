"""The table of jaxpt.errata about objectives, held against what errata_divergences and errata_policy compute: what is
often said, and what is right."""

import json
import math
import subprocess
import sys

import errata_divergences
import errata_policy
import jax
import pytest
from errata_numbers import agrees, check

from jaxpt.cli import main
from jaxpt.errata import ERRATA, OBJECTIVES, record

COMPUTED = {**errata_divergences.COMPUTED, **errata_policy.COMPUTED}  # name -> () -> [(said, right)]


@pytest.fixture(autouse=True)
def in_64_bits():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("row", OBJECTIVES, ids=lambda row: row.name)
def test_the_numbers_are_those_computed(row):
    check(row, COMPUTED[row.name]())


def test_every_row_is_computed_and_nothing_else():
    assert list(COMPUTED) == [row.name for row in OBJECTIVES]


def test_rows_are_complete_and_numbers_tell_the_two_apart():
    for row in ERRATA:
        assert all([*row[:-1]]) and all(n.what for n in row.numbers)
        assert any(n.said is not None and n.said != n.right for n in row.numbers), row.name
        for number in row.numbers:
            assert all(x is None or float(f"{x:.4g}") == x for x in number[1:]), number


def test_rounding_is_the_only_difference_allowed():
    assert agrees(2.646, math.sqrt(7)) and not agrees(2.645, math.sqrt(7)) and not agrees(2.475, math.sqrt(7))
    assert agrees(0.0, 0.0) and not agrees(0.0, 1e-6) and not agrees(-0.5, 0.5)
    assert agrees(None, None) and not agrees(None, 0.0) and not agrees(0.0, None)


def test_the_command_prints_every_field(capsys):
    assert main(["list", "errata"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for row in ERRATA:
        texts = [row.name, row.statement, row.right, row.source, row.setting, *(n.what for n in row.numbers)]
        assert all(" ".join(text.split()) in out for text in texts)
    assert main(["list", "errata", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps([record(row) for row in ERRATA]))


def test_the_table_takes_no_jax():
    code = (
        "import sys; from jaxpt.cli import main; "
        "main(['list', 'errata']); main(['list', 'errata', '--json']); "
        "sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
