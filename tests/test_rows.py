"""Rows as a table: names, constants, what they need, and what is said of them."""

import pytest

from jaxpt.objectives import ROWS, TABLES, get
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.describe import describe, difference, probe_batch
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.reduction import totals_of
from jaxpt.types import Trajectory


@pytest.mark.parametrize("name", ROWS)
def test_describe_prints_every_constant(name):
    text, row = describe(name), ROWS[name]
    assert row.paper in text and all(f"{k} = {v:g}" in text for k, v in row.hyper.items()) and "{" not in text
    assert row.needs[0] == "logp" and row.additive in (True, False)
    in_formula = {k for k in row.hyper if f"{{{k}}}" in row.formula}
    assert in_formula == set(row.hyper)  # and the formula shows where each of them stands


def test_what_rows_need():
    needs = {name: set(row.needs) - {"logp"} for name, row in ROWS.items()}
    assert needs.pop("ppo") == {"ref_logp", "entropy", "values"}
    for name in ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert needs.pop(name) == {"ref_logp"}
    assert not any(needs.values())


def test_constants_are_the_papers():
    """Where a paper states a number, it is the default."""
    stated = {
        "ppo": {"eps_low": 0.2, "eps_high": 0.2, "gamma": 1, "lam": 0.95, "value_clip": 0.2, "beta": 0.02, "kl_target": 6,
                "kl_horizon": 10000},
        "grpo": {"beta": 0.04, "ddof": 1, "std_eps": 0}, "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
        "dapo": {"eps_low": 0.2, "eps_high": 0.28, "max_length": 20480, "buffer": 4096},
        "dr_grpo": {"max_length": 3000}, "reinforce_plus_plus": {"eps_low": 0.2, "gamma": 1},
    }
    for name, constants in stated.items():
        assert {k: ROWS[name].hyper[k] for k in constants} == constants
    assert ROWS["gspo_token"].hyper == ROWS["gspo"].hyper and ROWS["dapo_sequence_mean"].hyper == ROWS["dapo"].hyper


def test_difference_names_what_differs():
    text = difference("grpo", "grpo_no_kl")
    assert "beta: 0.04 against absent" in text and "surrogate" not in text
    assert "the same parts and constants" in difference("rloo", "rloo")


def test_unknown_row_names_the_nearest():
    with pytest.raises(ValueError, match="nearest: 'grpo'"):
        get("grppo")


def test_names_are_unique_and_trajectory_has_the_contract_s_fields():
    assert len(ROWS) == sum(map(len, TABLES))
    assert Trajectory._fields == (
        "tokens", "mask", "old_logp", "turn", "signals", "reward", "gold", "parts", "truncated", "group", "length", "support",
    )


def test_an_unknown_constant_is_refused():
    traj, stats = probe_batch()
    with pytest.raises(TypeError, match="no constant 'eps_hgih'"):
        ROWS["grpo_no_kl"].prepare(traj, eps_hgih=0.3)
    with pytest.raises(TypeError, match="no constant 'eps_hgih'"):
        ROWS["grpo_no_kl"].loss(*[stats["logp"]] * 3, traj.mask, totals=totals_of(traj.mask), eps_hgih=0.3)
    for hyper in ({}, {"beta": 1.0, "gamma": 1.0}):  # a row states the constants of its parts, all and only these
        with pytest.raises(ValueError, match=r"its parts use \['beta'\]"):
            compose(
                "row", "", kl=Penalty("k1"), advantage="monte_carlo", ratio="none", surrogate="score",
                reduction="token_mean", hyper=hyper,
            )
