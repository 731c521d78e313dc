"""Rows as a table: names, constants, what they need, and what is said of them."""

import pytest

from jaxpt.objectives import ROWS, TABLES, get
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.describe import describe, difference
from jaxpt.objectives.probe import policy_batch, probe_case
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.reduction import totals_of
from jaxpt.types import Trajectory


@pytest.mark.parametrize("name", ROWS)
def test_describe_prints_every_constant(name):
    text, row = describe(name), ROWS[name]
    assert row.paper in text and all(f"{k} = {v:g}" in text for k, v in row.hyper.items()) and "{" not in text
    assert row.additive in (True, False)
    in_formula = {k for k in row.hyper if f"{{{k}}}" in row.formula}
    assert in_formula == set(row.hyper)  # and the formula shows where each of them stands


def test_what_rows_need():
    """Of policy objectives, beyond logp; most need nothing."""
    policy = {name: row for name, row in ROWS.items() if row.family == "policy_loss" and "." not in name}
    needs = {name: " ".join(row.needs[1:]) for name, row in policy.items() if len(row.needs) > 1}
    assert needs == {
        "ppo": "ref_logp entropy values", "a2c": "entropy values", "ppo_dual_clip": "values",
        "impala": "entropy sampler_logp values", "grpo_vocab_kl": "vocab_kl",
        **dict.fromkeys(("grpo", "grpo_unbiased_kl", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo_kl"), "ref_logp"),
        "grpo_process": "ref_logp", "opd": "ref_logp", "gigpo": "ref_logp anchor", "remax": "baseline", "gdpo": "parts",
        **dict.fromkeys(("magic", "top_entropy", "entropy_advantage"), "entropy"),
        **dict.fromkeys(
            ("grpo_tis", "grpo_sequence_tis", "grpo_sequence_mis", "grpo_geometric_mask", "icepop"), "sampler_logp"
        ),
        "grpo_token_weights": "weights", "dapo_prompt_mean": "prompt_tokens",
    }


def test_constants_are_the_papers():
    """Where a paper states a number, it is the default."""
    stated = {
        "ppo": {"eps_low": 0.2, "eps_high": 0.2, "gamma": 1, "lam": 0.95, "value_clip": 0.2, "beta": 0.02, "kl_target": 6,
                "kl_horizon": 10000},
        "grpo": {"beta": 0.04, "ddof": 1, "std_eps": 0}, "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
        "dapo": {"eps_low": 0.2, "eps_high": 0.28, "max_length": 20480, "buffer": 4096},
        "dr_grpo": {"max_length": 3000}, "reinforce_plus_plus": {"eps_low": 0.2, "gamma": 1},
        "gigpo": {"gamma": 0.95, "step_weight": 1, "beta": 0.01}, "grpo_process": {"beta": 0.04},
        "sapo": {"tau_pos": 1, "tau_neg": 1.05}, "gmpo": {"log_low": 0.4, "log_high": 0.4},
        "ppo_dual_clip": {"dual_clip": 3, "eps_low": 0.2, "gamma": 0.997, "lam": 0.95},
        "clip_cov": {"cov_share": 2e-4, "cov_low": 1, "cov_high": 5}, "kl_cov": {"cov_share": 2e-4, "old_coef": 1},
        "dppo_tv": {"tv_low": 0.15, "tv_high": 0.15}, "dppo_kl": {"kl_low": 0.05, "kl_high": 0.05},
        "magic": {"entropy_coef": 0, "entropy_target": 0.2, "entropy_step": 0.005}, "top_entropy": {"entropy_share": 0.2},
        "entropy_advantage": {"entropy_gain": 0.4, "entropy_limit": 2}, "grpo_tis": {"is_high": 2},
        "icepop": {"is_low": 0.5, "is_high": 5},
        "impala": {"gamma": 0.99, "rho_bar": 1, "c_bar": 1, "entropy_coef": 0.01}, "rloo_kl": {"beta": 0.03},
        "grpo_geometric_mask": {"is_low": 0.999, "is_high": 1.001}, "wpo": {"beta": 0.01}, "wpo_unaligned": {"beta": 0.01},
        "dpo_norm": {"beta": 5}, "alpha_po": {"alpha": 0.25, "beta": 2.5, "gamma": 0.1}, "robust_dpo": {"label_smoothing": 0.1},
        "exo": {"beta": 0.1}, "nca": {"beta": 0.01},
        "awr": {"temperature": 1, "weight_max": 20}, "a2c": {"gamma": 0.99, "n_steps": 5, "entropy_coef": 0.01},
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
    traj, stats = policy_batch()
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


@pytest.mark.parametrize("penalty", [Penalty("vocabulary", placement="reward"), Penalty("vocabulary", "score")])
def test_a_kl_over_the_vocabulary_is_no_estimator(penalty):
    parts = dict(advantage="monte_carlo", ratio="none", surrogate="score", reduction="token_mean", hyper={"beta": 1.0})
    with pytest.raises(ValueError, match="'row': a KL over the vocabulary is differentiated as it stands, in the loss"):
        compose("row", "", kl=penalty, **parts)


def test_prepare_asks_for_what_its_parts_read():
    traj, stats = policy_batch()
    for name, what in {"impala": "sampler_logp", "remax": "baseline", "gigpo": "anchor"}.items():
        with pytest.raises(TypeError, match=f"row '{name}' needs {what}"):
            ROWS[name].prepare(traj, ref_logp=stats["ref_logp"], values=stats["values"])


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.hyper and row.family != "policy_loss"])
def test_bad_constants_of_every_family_are_refused(name):
    row, case = ROWS[name], probe_case(ROWS[name])
    constant = next(k for k, v in row.hyper.items() if v >= 0)
    with pytest.raises(TypeError, match="has no constant 'nonesuch'"):
        row.loss(**case.moving, **case.rows, **case.shared, nonesuch=1.0)
    with pytest.raises(ValueError, match=f"{constant} = -0.5: expected a number of at least 0"):
        row.loss(**case.moving, **case.rows, **case.shared, **{constant: -0.5})


def test_a_negative_constant_of_a_policy_row_is_refused():
    with pytest.raises(ValueError, match="row 'grpo': eps_low = -0.2: expected a number of at least 0"):
        ROWS["grpo"].prepare(policy_batch()[0], ref_logp=policy_batch()[1]["ref_logp"], eps_low=-0.2)
