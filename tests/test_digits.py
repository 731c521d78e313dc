"""Where a formula changes over to a series, and what tables say of themselves: small things that large tests pass by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.objectives import ROWS
from jaxpt.objectives.distillation import alpha_divergence, annealed, distribution, minillm_long_term


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
