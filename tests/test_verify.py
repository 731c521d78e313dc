"""The verifier: right functions pass, wrong ones are caught by the law that is meant to, and the matrix is whole."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import verify_targets as targets
from verify_right import JAX

from jaxpt.objectives import ROWS, kl
from jaxpt.verify import check, generators, laws, matrix, rows
from jaxpt.verify.bench import Part
from jaxpt.verify.checking import function_of
from jaxpt.verify.families import FAMILIES
from jaxpt.verify.shrink import smallest

FEW = 24


SLOW = ("policy_loss", "preference_tokens", "value_loss", "accumulate", "gae", "returns", "distillation",
    "kl_penalty_loss")


def applied(report, *names):
    assert {o.law for o in report.outcomes if o.status != "not_applied"} >= set(names)


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in FAMILIES])
def test_our_own_pass_with_what_they_claim(family):
    fn, _, claims, _ = JAX[family]
    report = check(fn, family, claim=claims, framework="jax", examples=FEW)
    report.assert_ok()
    assert len(report.outcomes) == len(matrix.of_family(family))


# Other libraries' rows have their faults; of length rewards only one has the family's range.
MINE = [(name, family) for name, row in ROWS.items() if "." not in name for family in rows.families_of(row)
        if family != "length_shaping" or name == "soft_overlong"]


@pytest.mark.slow
@pytest.mark.parametrize("name, family", MINE)
def test_every_row_passes_the_laws_that_it_does_not_waive(name, family):
    claims = rows.claims_of(name, family)
    check(rows.function(ROWS[name], family), family, claim=claims, framework="jax", examples=60).assert_ok()


RIGHT = [
    (targets.sequence_product, "policy_loss", ("gradient_of_expected_reward", "gradient_off_policy", "sequence_sum")),
    (targets.ppo, "policy_loss", ("token_mean", "homogeneous", "empty_rows_not_counted")),
    (targets.standardised, "group_advantage", ("scale_invariance",)),
    (targets.dpo, "preference", ("log2_at_margin_0", "monotone", "log_ratios_only")),
    (targets.token_mean, "aggregate", ("token_mean",)),
]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fn, family, claims", RIGHT, ids=lambda v: getattr(v, "__name__", ""))
def test_right_functions_in_numpy(fn, family, claims, seed):
    report = check(fn, family, claim=claims, framework="numpy", examples=FEW, seed=seed)
    report.assert_ok()
    applied(report, *claims)


WRONG = [  # function, family, claims, the laws that must name it
    (targets.times_mask, "policy_loss", (), {"mask_poison"}),
    (targets.over_the_width, "policy_loss", (), {"padding"}),
    (targets.shifted, "policy_loss", (), {"on_policy"}),
    (targets.upside_down, "policy_loss", (), {"on_policy"}),
    (targets.dual_clip_always, "policy_loss", ("dual_clip_negative_only",), {"on_policy", "dual_clip_negative_only"}),
    (targets.two_denominators, "policy_loss", (), {"partition"}),
    (targets.ppo, "policy_loss", ("sequence_mean",), {"sequence_mean"}),
    (targets.ppo, "policy_loss", ("no_dead_zone",), {"no_dead_zone"}),
    (targets.ppo, "policy_loss", ("gradient_of_expected_reward",), {"gradient_of_expected_reward"}),
    (targets.token_product, "policy_loss", ("gradient_off_policy",), {"gradient_off_policy"}),
    (targets.mean_of_means, "accumulate", (), {"assignment"}),
    (targets.rounded_groups, "group_advantage", (), {"equal_rewards"}),
    (targets.batch_baseline, "group_advantage", (), {"groups_apart"}),
    (targets.standardised, "group_advantage", ("leave_one_out_independence",), {"leave_one_out_independence"}),
    (targets.swapped, "preference", (), {"descends"}),
    (targets.overflowing, "reward_model", (), {"finite"}),
    (targets.through_tools, "gae", (), {"compaction", "recursion"}),
    (targets.entropy_of_zero, "entropy", (), {"vocabulary_padding"}),
    (targets.clamped_k3, "kl", ("no_clamp",), {"no_clamp"}),
    (targets.k1, "kl", ("gradient_of_kl",), {"gradient_of_kl"}),
    (targets.k1, "kl", ("pulls_back", "non_negative"), {"pulls_back", "non_negative"}),
    (targets.overshoots, "policy_loss", ("never_against",), {"never_against"}),
    (targets.jumps, "policy_loss", ("gradient_of_value",), {"gradient_of_value"}),
    (targets.winner_alone, "group_advantage", ("unit_deviation",), {"unit_deviation"}),
    (targets.clipped_rewards, "group_advantage", ("highest_gains",), {"highest_gains"}),
    (targets.whitened_pads, "whiten", ("zero_off_mask",), {"zero_off_mask"}),
    (targets.desirable_twice, "kto", ("mirror",), {"mirror"}),
    (targets.hinge, "preference", ("exchange_is_linear",), {"exchange_is_linear"}),
    (kl.k3, "kl", ("gradient_of_kl",), {"gradient_of_kl"}),
    (targets.token_mean, "aggregate", ("sequence_mean",), {"sequence_mean"}),
]


@pytest.mark.parametrize("fn, family, claims, expected", WRONG, ids=lambda v: getattr(v, "__name__", ""))
def test_wrong_functions_are_caught_by_the_law_meant(fn, family, claims, expected):
    framework = "jax" if fn is kl.k3 else "numpy"
    report = check(fn, family, claim=claims, framework=framework, examples=FEW, only=tuple(expected))
    assert set(report.broken) == expected, set(report.broken)
    for law in expected:
        found = report.broken[law].counterexample
        assert found["wrong"] != found["right"] and found["position"] is not None
        size = np.shape(found["inputs"][next(iter(FAMILIES[family].args))])
        assert family == "group_advantage" or len(size) < 2 or (size[0] <= 3 and size[1] <= 4), size


def test_a_counterexample_reproduces():
    """What the report says comes out when its line of code is run."""
    report = check(targets.over_the_width, "policy_loss", framework="numpy", examples=FEW, only=("padding",))
    found = report.broken["padding"].counterexample
    assert report.broken["padding"].where == "value"
    got = eval(found["reproduce"], {"np": np, "over_the_width": targets.over_the_width})
    assert got == pytest.approx(found["wrong"], rel=1e-5) and got != pytest.approx(found["right"], rel=1e-5)


def test_a_counterexample_has_no_reward_where_nothing_counts():
    """Where such a reward goes is a choice, and would be told as if it were the fault."""
    report = check(targets.through_tools, "gae", framework="numpy", examples=FEW, only=("to_the_end",))
    inputs = report.broken["to_the_end"].counterexample["inputs"]
    assert not np.any(np.array(inputs["rewards"])[np.array(inputs["mask"]) == 0])


def test_one_fault_breaks_few_laws():
    report = check(targets.times_mask, "policy_loss", framework="numpy", examples=FEW)
    assert set(report.broken) == {"mask_poison"}


@pytest.mark.parametrize("fn, law, words", [
    (targets.writes, "inputs_untouched", "per_token"), (targets.remembers, "same_twice", ""),
        (targets.random, "same_twice", ""),
    (targets.jax_random, "same_twice", ""),
], ids=lambda v: getattr(v, "__name__", ""))
def test_impure_functions_are_named(fn, law, words):
    framework = "jax" if fn is targets.jax_random else "numpy"
    report = check(fn, "aggregate", framework=framework, examples=FEW, only=("same_twice", "inputs_untouched"))
    assert set(report.broken) == {law} and words in report.broken[law].where


def test_what_cannot_be_traced_is_run_one_by_one():
    report = check(targets.branches, "aggregate", examples=4, only=("linear", "same_twice", "unit_loss"))
    report.assert_ok()
    assert report.framework == "jax" and "one by one" in report.notes[0]


def test_the_same_seed_is_the_same_report():
    def bytes_of(seed):
        report = check(targets.over_the_width, "policy_loss", framework="numpy", examples=6, seed=seed,
            only=("padding", "partition"))
        return json.dumps(report.record(), allow_nan=False)

    assert bytes_of(3) == bytes_of(3)
    family = FAMILIES["policy_loss"]
    one, other = (generators.draw(family, family.sizes[0], 6, seed) for seed in (3, 4))
    assert not np.array_equal(one["logp"], other["logp"])


def test_like_a_row_names_the_row():
    """A function of our own is found in the table, by another library's name too."""
    def mine(chosen_score, rejected_score):
        return jnp.mean(jnp.logaddexp(0.0, rejected_score - chosen_score))

    report = check(mine, "reward_model", like="bradley_terry", framework="jax", examples=FEW)
    report.assert_ok()
    applied(report, "as_row")
    assert report.nearest["exact"][0] == "bradley_terry"
    other = check(lambda c, r: jnp.mean(jax.nn.relu(1 - c + r)), "reward_model", like="bradley_terry", framework="jax",
        examples=FEW,
                  only=("as_row",))
    assert set(other.broken) == {"as_row"} and not other.nearest["exact"]


test_every_law_has_an_id = laws(targets.token_mean, family="aggregate", framework="numpy", examples=6,
    claim=("token_mean",))


def test_the_ids_are_those_of_the_laws():
    (mark,) = test_every_law_has_an_id.pytestmark
    assert {"mask_poison", "unit_loss", "token_mean"} <= set(mark.args[1]) and "sequence_mean" not in mark.args[1]


def test_the_matrix_is_whole():
    """Every law has a function of its name, every family laws, and no family two laws of one name."""
    for law in matrix.LAWS:
        assert callable(function_of(law)) and set(law.families) <= set(FAMILIES), law.name
        assert not law.prepare or callable(getattr(generators, law.prepare))
    for family in FAMILIES:
        names = [law.name for law in matrix.of_family(family)]
        assert len(names) == len(set(names)), family
        assert sum(law.kind == matrix.MATH for law in matrix.of_family(family)) >= 5, family
        everything = {law for w in matrix.WAIVERS if family in w.families for law in w.laws}
        assert everything <= {law.name for law in matrix.LAWS}


@pytest.mark.parametrize("family", FAMILIES)
def test_examples_have_the_corners(family):
    table = FAMILIES[family]
    for size in table.sizes:
        x = generators.draw(table, size, 48, 0, tuple(table.optional))
        wild = generators.extreme(x, table, np.random.default_rng(0))
        for name in x:
            arg = table.arg(name)
            assert x[name].shape == (48,
                *(size[a] for a in arg.axes)) and np.isfinite(x[name]).all() and np.isfinite(wild[name]).all()
            if arg.kind in ("logp", "near"):
                assert (x[name] < 0).all() and (wild[name] < 0).all()
            if arg.kind == "mask":
                assert (x[name].sum((1, 2)) > 0).all()
                rows_kept = x[name].sum(2)
                assert (rows_kept == 0).any() and (rows_kept == 1).any() and (x[name] == 1).all((1, 2)).any()


def test_excess_knows_infinities_and_nan():
    def excess(got, want, sense="equal", tol=0.1):
        return float(Part("value", np.array([got]), np.array([want]), tol, sense).excess()[0])

    nan, inf = np.nan, np.inf
    assert excess(1.0, 1.05) == pytest.approx(0.5) and excess(inf, inf) == 0 and excess(nan, nan) == 0
    assert excess(nan, 1.0) == inf and excess(inf, 1.0) == inf and excess(1.0, inf) == inf
    assert excess(1.0, 2.0, "at_least") == pytest.approx(10) and excess(3.0, 2.0, "at_least") == 0
    assert excess(1.0, 2.0, "at_most") == 0 and excess(nan, 2.0, "at_most") == inf and excess(nan, 2.0,
        "at_least") == inf
    assert excess(1.0, 1.05, "differs") == inf and excess(1.0, 2.0, "differs") == 0
    assert excess(1.0, 0.0, "finite") == 0 and excess(inf, 0.0, "finite") == inf
    assert excess(1.0, 2.0, tol=0.0) == inf and excess(2.0, 2.0, tol=0.0) == 0


def test_shrinking_keeps_what_breaks():
    """Of a batch that breaks because two advantages have opposite signs, two tokens are left."""
    table = FAMILIES["policy_loss"]
    x = {k: v[1] for k, v in generators.draw(table, table.sizes[1], 4, 0).items()}
    x["advantages"] = np.where(np.arange(15).reshape(3, 5) == 7, -1.7, 2.3)

    def breaks(x):
        signs = x["advantages"].reshape(len(x["advantages"]), -1)
        return (signs > 0).any(1) & (signs < 0).any(1)

    small = smallest(x, table, breaks)
    assert small["advantages"].size == 2 and set(small["advantages"].ravel()) == {1.0, -1.0}
    assert all(v.size == 2 for v in small.values())


@pytest.mark.parametrize("what, words", [
    (partial(check, targets.ppo, "policy"), "policy_loss"),
        (partial(check, targets.ppo, "policy_loss", claim=("token_men",)), "token_mean"),
    (partial(check, targets.ppo, "policy_loss", only=("paddin",)), "padding"),
        (partial(check, targets.ppo, "policy_loss", like="grop"), "grpo"),
    (partial(check, targets.ppo, "policy_loss", framework="tf"), "jax, numpy, torch"),
        (partial(check, targets.ppo, "policy_loss", like="dpo"), "preference"),
    (partial(check, targets.ppo, "policy_loss", examples=0), "at least 1"),
])
def test_what_there_is_not_is_said_with_the_nearest(what, words):
    with pytest.raises(ValueError, match=words):
        what()
