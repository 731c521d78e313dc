"""The numbers of jaxpt.errata about scaling laws, computed with jaxpt.scaling, and by numeric minima where a formula is
what is in question."""

import numpy as np
import pytest
from errata_numbers import check, noted_in
from scipy.optimize import minimize_scalar

from jaxpt.errata import SCALING
from jaxpt.scaling import costs
from jaxpt.scaling.chinchilla import law
from jaxpt.scaling.frontier import compute_for, optimum
from jaxpt.scaling.laws_dense import kaplan_c, kaplan_d, kaplan_n, kaplan_nd

COMPUTED = {}  # name of an erratum -> () -> [(said, right)], in the order of its numbers
computes = noted_in(COMPUTED)

N_C, D_C, C_C = 8.8e13, 5.4e13, 3.1e8 * 8.64e19  # petaflop-days
ALPHA_N, ALPHA_D, ALPHA_C = 0.076, 0.095, 0.050
HOFFMANN = np.array([406.4, 410.7, 1.69, 0.34, 0.28])
REFIT = np.array([482.01, 2085.43, 1.8172, 0.3478, 0.3658])
BUDGET = 5.76e23


@pytest.mark.parametrize("row", SCALING, ids=lambda row: row.name)
def test_the_numbers_are_those_computed(row):
    check(row, COMPUTED[row.name]())


def test_every_row_is_computed_and_nothing_else():
    assert list(COMPUTED) == [row.name for row in SCALING]


def lowest(loss, C):
    """N with the lowest loss(N, C / (6 N)), by search."""
    at = minimize_scalar(lambda n: loss(np.exp(n), C / (6 * np.exp(n))), bounds=(10.0, 40.0), method="bounded",
                         options={"xatol": 1e-9})
    return np.exp(at.x)


def kaplan(N, D):
    return kaplan_nd(N, D, N_c=N_C, D_c=D_C, alpha_N=ALPHA_N, alpha_D=ALPHA_D)


def of_size(N):
    return kaplan_n(N, N_c=N_C, alpha_N=ALPHA_N)


def of_data(D):
    return kaplan_d(D, D_c=D_C, alpha_D=ALPHA_D)


@computes("kaplan_sum")
def kaplan_sum():
    N, D = 1.5e9, 2e10
    two = of_size(N) + of_data(D)
    for alone, limit in ((of_size(N), kaplan(N, 1e40)), (of_data(D), kaplan(1e40, D))):
        np.testing.assert_allclose(limit, alone)  # each power is the law where the other is no bottleneck
    return [(two + kaplan_c(6 * N * D, C_c=C_C, alpha_C=ALPHA_C), kaplan(N, D)), (two, kaplan(N, D))]


@computes("kaplan_exponents")
def kaplan_exponents():
    a = np.log(lowest(kaplan, 1e24) / lowest(kaplan, 1e20)) / np.log(1e4)
    np.testing.assert_allclose(a, ALPHA_D / (ALPHA_N + ALPHA_D), rtol=1e-5)
    size, data = (1 - f(2e9) / f(1e9) for f in (of_size, of_data))
    return [(0.73, a), (None, size), (None, data)]


@computes("chinchilla_optimum")
def chinchilla_optimum():
    alpha, beta = HOFFMANN[3:]
    power = alpha * beta / (alpha + beta)
    N, D = (BUDGET / 6 * alpha / beta) ** power, (BUDGET / 6 * beta / alpha) ** power
    best = optimum(HOFFMANN, BUDGET)
    np.testing.assert_allclose(best.N, lowest(lambda n, d: law(HOFFMANN, n, d), BUDGET), rtol=1e-5)
    return [(N, best.N), (D, best.D), (6 * N * D / BUDGET, 6 * best.N * best.D / BUDGET)]


@computes("twenty_tokens")
def twenty_tokens():
    def ratio(params, C):
        N = lowest(lambda n, d: law(params, n, d), C)
        best = optimum(params, C)
        np.testing.assert_allclose(best.D / best.N, C / (6 * N**2), rtol=1e-5)
        return best.D / best.N

    return [(20, ratio(HOFFMANN, BUDGET)), (20, ratio(REFIT, BUDGET)), (20, ratio(HOFFMANN, BUDGET / 100))]


def pure(a, E=1e-300):
    """A law whose frontier is E + const C^-a."""
    return np.array([100.0, 100.0, E, 2 * a, 2 * a])


@computes("tenth_less_loss")
def tenth_less_loss():
    slow, fast = (costs.factor_for_drop(pure(a), 1e20, 0.1) for a in (0.05, 0.10))
    np.testing.assert_allclose([slow, fast], [0.9**-20, 0.9**-10])
    floor = pure(0.05, 1.69)
    at = compute_for(floor, 2.2)
    assert costs.factor_for_drop(floor, at, 0.5) == np.inf
    return [(12, slow), (6, fast), (12, costs.factor_for_drop(floor, at, 0.1))]


@computes("third_more_compute")
def third_more_compute():
    machine = costs.Machine(1e15, 0.6, 2.0)
    shares = [costs.value_of_utilisation(pure(a), 1e5, machine, 0.6 * 1.33).share for a in (0.05, 0.10)]
    return [(1.33**a - 1, share) for a, share in zip((0.05, 0.10), shares, strict=True)]
