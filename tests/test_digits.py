"""Where a formula changes over to a series, and what tables say of themselves: small things that large tests pass by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.objectives import ROWS
from jaxpt.objectives.distillation import alpha_divergence, annealed, distribution, minillm_long_term
from jaxpt.objectives.families import FAMILIES
from jaxpt.objectives.preference_parts import log1mexp
from jaxpt.objectives.probe import probe_case


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
    scores, labels, mask = jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[1.0, 0.0, 1.0]]), jnp.ones((1, 3), bool)
    accuracy = row.loss(scores, labels, mask, **row.prepare({"mask": mask}))[1]["accuracy"]
    np.testing.assert_array_equal(accuracy, (2, 3))
