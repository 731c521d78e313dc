"""The map of the objective over the exponents, against a general minimiser and the profile intervals."""

import numpy as np
import pytest
from scipy.optimize import minimize

from jaxpt.scaling.chinchilla import fit, law, prepare
from jaxpt.scaling.profile_map import profile_map
from jaxpt.scaling.uncertainty import CHI_SQUARE_95, dispersion, profile_intervals

TRUE = np.array([406.4, 410.7, 1.69, 0.34, 0.28])
N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 6), np.geomspace(1e9, 1e11, 6)))
DELTA = 1e-2


@pytest.fixture(scope="module")
def found():
    noise = np.exp(0.01 * np.random.default_rng(0).normal(size=N.size))
    return fit(prepare(N, D, law(TRUE, N, D) * noise), delta=DELTA)


def test_heights_are_minima_over_the_other_three(found):
    limits = profile_intervals(found)[3:]
    at = profile_map(found, limits, cells=5)
    s = dispersion(found, found.slopes)[0][3:].mean()
    data = found.data

    def objective(rest, alpha, beta):
        a, b, e = rest
        r = np.log(np.exp(a - alpha * data.n) + np.exp(b - beta * data.d) + np.exp(e)) - data.y
        return np.sum(np.where(np.abs(r) <= DELTA, r**2 / 2, DELTA * (np.abs(r) - DELTA / 2)))

    for i, j in ((0, 0), (0, 4), (3, 1), (4, 4)):
        best = minimize(objective, found.theta[:3], (at.alpha[i], at.beta[j]), method="Nelder-Mead",
                        options={"xatol": 1e-10, "fatol": 1e-16, "maxiter": 5000})
        assert at.height[i, j] == pytest.approx(2 * (best.fun - found.value) / s, rel=1e-5)
    assert np.unravel_index(np.argmin(at.height), at.height.shape) == (2, 2)


def test_the_contour_s_shadow_is_the_profile_interval(found):
    limits = profile_intervals(found)[3:]
    at = profile_map(found, limits, cells=61, beyond=1.0)
    s = dispersion(found, found.slopes)[0][3:]
    for axis, edges in ((1, at.height.min(axis=1)[[0, -1]]), (0, at.height.min(axis=0)[[0, -1]])):
        np.testing.assert_allclose(edges * s.mean() / s[1 - axis], CHI_SQUARE_95, rtol=0.01)


def test_an_end_that_is_missing_is_half_or_twice_the_estimate(found):
    at = profile_map(found, np.array([[0.3, np.inf], [-np.inf, 0.4]]), cells=3)
    assert at.alpha[-1] == pytest.approx(2 * found.params[3]) and at.beta[0] == pytest.approx(found.params[4] / 2)


def test_an_exact_fit_has_no_map():
    exact = fit(prepare(N, D, law(TRUE, N, D)))
    at = profile_map(exact, profile_intervals(exact)[3:], cells=3)
    assert np.ptp(at.alpha) == np.ptp(at.beta) == 0
