"""Where a formula changes over to a series, and what tables say of themselves: small things that large tests pass by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.objectives import ROWS, surrogates
from jaxpt.objectives.distillation import alpha_divergence, annealed, distribution, minillm_long_term
from jaxpt.objectives.families import FAMILIES
from jaxpt.objectives.preference_parts import log1mexp
from jaxpt.objectives.probe import probe_case
from jaxpt.objectives.reward import length_residual
from jaxpt.objectives.value import v_trace, whiten
from jaxpt.ops.masked import exp_excess


@pytest.mark.parametrize("alpha", [1.0, 0.7, 0.5, 0.2, 0.0])
@pytest.mark.parametrize("u", [0.099, 0.09, -0.099])
def test_the_alpha_divergence_s_series_keeps_its_digits_up_to_its_edge(alpha, u):
    """One entry is e^u times the other's, at a probability of a twentieth; the rest of the mass is far from the edge."""
    s = np.array([0.05, 0.95])
    t = np.array([0.05 * np.exp(u), 1 - 0.05 * np.exp(u)])
    if alpha in (0.0, 1.0):
        p, q = (t, s) if alpha else (s, t)
        exact = np.sum(p * np.log(p / q))
    else:
        exact = (1 - np.sum(t**alpha * s ** (1 - alpha))) / (alpha * (1 - alpha))
    got = alpha_divergence(*(distribution(jnp.log(jnp.asarray(x, jnp.float32))) for x in (s, t)), alpha=alpha)
    np.testing.assert_allclose(got, exact, rtol=8e-6)


@given(step=st.floats(0, 60), decay=st.floats(1e-3, 1.0))
def test_annealing_is_its_formula_on_either_side_of_the_straight_line(step, decay):
    x = step / 60
    bent = x if decay > 1 - 1e-6 else (decay**x - 1) / (decay - 1)
    np.testing.assert_allclose(annealed(jnp.float32(step), 60, 0.9, 0.1, decay), 0.9 - 0.8 * bent, rtol=3e-4)


def test_minillm_s_advantages_get_no_gradient():
    logp, mask = -jnp.arange(1.0, 7).reshape(2, 3), jnp.ones((2, 3), bool)
    for number in (0, 1):
        grad = jax.grad(lambda *x: jnp.sum(minillm_long_term(*x, mask) ** 2), argnums=number)(logp, 2 * logp)
        np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("name", [
    name for name, row in ROWS.items() if "." not in name and row.family != "length_shaping"  # no claims of peers, no sums
])
def test_a_row_claims_to_be_additive_where_it_is(name):
    assert ROWS[name].additive == ("additive" in ROWS[name].claims)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_calls_constant_gets_no_gradient_and_all_else_gets_one(family):
    """Of the first and the last row of those that need an argument."""
    args, rows = FAMILIES[family].args, [row for row in ROWS.values() if row.family == family]
    wanted = {arg.optional for arg in args.values()}
    needing = [[row for row in rows if not need or need in row.needs] for need in sorted(wanted)]
    found = [row for some in needing for row in (some[0], some[-1])]
    moved, read = set(), set()
    for row in {row.name: row for row in found}.values():
        case = probe_case(row)
        floats = {name: x for name, x in {**case.moving, **case.rows}.items()
                  if name in args and jnp.issubdtype(x.dtype, jnp.floating)}

        def loss(floats, row=row, case=case):
            out = row.loss(**{**case.rows, **case.moving, **floats}, **case.shared)
            return jnp.sum(out[0] if isinstance(out, tuple) else out)

        for name, grad in jax.grad(loss)(floats).items():
            if name == "prompt_tokens":  # numbers of tokens are data, which nobody differentiates
                continue
            read.add(name)
            if args[name].constant:
                np.testing.assert_array_equal(grad, 0, err_msg=name)
            elif np.any(grad != 0):
                moved.add(name)
    assert moved == {name for name in read if not args[name].constant and args[name].kind != "label"}


def test_log1mexp_is_continued_by_its_tangent_at_0():
    """log(1 - e^-edge) = log edge, with slope -1/edge."""
    for x in (0.0, 1e-10):
        value, slope = jax.value_and_grad(log1mexp)(jnp.float32(x))
        np.testing.assert_allclose(value, np.log(1e-10) - (x + 1e-10) / 1e-10, rtol=1e-6)
        np.testing.assert_allclose(slope, -1e10, rtol=1e-6)


def test_a_step_of_score_0_is_called_wrong():
    """As a probability of a half says neither."""
    row = ROWS["prm"]
    scores, labels, mask = jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[1.0, 1.0, 1.0]]), jnp.ones((1, 3), bool)
    accuracy = row.loss(scores, labels, mask, **row.prepare({"mask": mask}))[1]["accuracy"]
    np.testing.assert_array_equal(accuracy, (1, 3))


@pytest.mark.parametrize("mask_of", [surrogates.tv_mask, surrogates.kl_mask])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.5])
def test_every_trusted_token_is_pushed_by_its_advantage(mask_of, advantage):
    """Also an advantage of exactly 1, as right answers among wrong ones may have."""
    names = ("tv_low", "tv_high") if mask_of is surrogates.tv_mask else ("kl_low", "kl_high")
    logp, old_logp = jnp.array([[-0.5, -0.6]]), jnp.array([[-0.6, -0.5]])
    ratio, A, mask = jnp.exp(logp - old_logp), jnp.full((1, 2), advantage), jnp.ones((1, 2), bool)
    bounds = dict.fromkeys(names, 10.0)
    loss = lambda logp: jnp.sum(mask_of(logp, old_logp, ratio, A, mask, ratio_cap=20.0, **bounds)[0])  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(logp), -advantage * ratio, rtol=1e-6)


def test_a_log_probability_above_0_by_rounding_has_moved_as_far_as_one_of_0():
    inside = lambda x, most: surrogates.kl_mask(  # noqa: E731
        jnp.array([[x]]), jnp.array([[-0.1]]), jnp.ones((1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1), bool),
        kl_low=most, kl_high=most, ratio_cap=20.0,
    )[1]["clip_fraction"][0, 0] == 0
    old = np.exp(-0.1)
    moved = old * -0.1 + (1 - old) * (np.log(1 - old) - np.log(1e-12))
    for x in (0.0, 0.5):
        assert inside(x, 1.01 * moved) and not inside(x, 0.99 * moved)


def test_a_short_difference_between_long_lengths_is_no_rounding():
    """And what rounding makes of equal lengths is no difference."""
    reward, mask = jnp.array([0.0, 0.0, 1.0, 1.0]), jnp.ones(4, bool)
    length = jnp.array([1000.0, 1000, 1010, 1010])
    np.testing.assert_allclose(length_residual(reward, length, mask), 0.5, atol=1e-4)
    np.testing.assert_array_equal(length_residual(reward, jnp.full(4, 16777.2), mask), reward)


def test_lengths_a_rounding_apart_are_equal():
    reward, mask = jnp.array([0.0, 0.0, 1.0, 1.0]), jnp.ones(4, bool)
    length = jnp.array([1000.0, 1000, 1000.0002, 1000.0002])
    assert float(length[2] - length[0]) > 0
    np.testing.assert_array_equal(length_residual(reward, length, mask), reward)


@pytest.mark.parametrize("std_eps", [0.0, 0.3, 1.0, 5.0])
def test_whitening_adds_the_square_of_its_floor_to_the_variance(std_eps):
    x, mask = np.array([[1.0, -2.0, 4.0], [0.5, 0.0, 9.0]]), np.array([[1, 1, 1], [1, 1, 0]], bool)
    kept = x[mask]
    expected = np.where(mask, (x - kept.mean()) / np.sqrt(kept.var() + std_eps**2), 0.0)
    np.testing.assert_allclose(whiten(jnp.float32(x), jnp.asarray(mask), std_eps=std_eps), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("x", [0.0999, -0.0999, 0.05, -0.02, 0.101, -0.101, 0.25, -0.5, 1.0, 1e-4])
def test_exp_excess_keeps_its_digits_up_to_the_series_edge(x):
    x = np.float32(x)
    exact = np.expm1(np.float64(x)) - np.float64(x)
    np.testing.assert_allclose(exp_excess(jnp.asarray(x)), exact, rtol=4e-6)


def test_v_trace_cuts_at_1_by_default():
    """Espeholt et al. 2018, section 5: rho and c of 1."""
    rng = np.random.default_rng(0)
    rewards, values, log_ratio = (jnp.float32(rng.normal(size=(3, 5))) for _ in range(3))
    mask = jnp.ones((3, 5), bool)
    for one, other in zip(v_trace(rewards, values, log_ratio, mask, 0.9),
                          v_trace(rewards, values, log_ratio, mask, 0.9, rho_bar=1.0, c_bar=1.0, lam=1.0), strict=True):
        np.testing.assert_array_equal(one, other)
