"""The Chinchilla fit against loops, SciPy and closed forms; what it must not depend on; what it must say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize

from jaxpt.scaling import chinchilla as ch
from jaxpt.scaling import uncertainty as un
from jaxpt.scaling.frontier import exponent, optimum
from jaxpt.scaling.robust import continuation, huber, location, penalty, value
from jaxpt.scaling.study import study

TRUE = np.array([406.4, 410.7, 1.69, 0.34, 0.28])  # Hoffmann et al. 2022, as printed


def runs(params=TRUE, noise=0.01, seed=0, sizes=8, lengths=7):
    """A grid of sizes and lengths with log-normal noise."""
    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e10, sizes), np.geomspace(3e8, 1e12, lengths)))
    return N, D, ch.law(params, N, D) * np.exp(noise * np.random.default_rng(seed).standard_t(4, N.size))


@pytest.fixture(scope="module")
def noisy():
    return ch.fit(ch.prepare(*runs()))


def loop_objective(params, N, D, loss, weight, delta):
    """Hoffmann et al. 2022, eq. 3, written as they write it."""
    A, B, E, alpha, beta = params
    total = 0.0
    for i in range(len(N)):
        r = abs(np.logaddexp(np.logaddexp(np.log(A) - alpha * np.log(N[i]), np.log(B) - beta * np.log(D[i])),
                             np.log(E)) - np.log(loss[i]))
        total += weight[i] * (r * r / 2 if r <= delta else delta * (r - delta / 2))
    return total


@given(st.integers(0, 10**6), st.sampled_from([1e-3, 0.05, np.inf]))
def test_value_gradient_and_hessian(seed, delta):
    rng = np.random.default_rng(seed)
    N, D, loss = runs(seed=seed, sizes=3, lengths=3)
    weight = rng.uniform(0.1, 2, N.size)
    data = ch.prepare(N, D, loss, weight)
    theta = np.array([[-0.5, -0.6, 0.5, 0.34, 0.28]]) + rng.normal(0, 0.3, (1, 5))
    here = ch.derivatives(theta, ch.problems(data), delta)
    params = ch.parameters(theta[0], data.centre)
    np.testing.assert_allclose(here.value, loop_objective(params, N, D, loss, weight, delta), rtol=1e-10)
    step = 1e-6 * np.concatenate([np.eye(5), -np.eye(5)])
    there = ch.derivatives(theta + step, ch.problems(data), delta)
    around = ch.terms(theta + step, data.n, data.d)[0] - data.y
    crossing = delta < np.inf and np.any(np.abs(np.abs(around) - delta) < 1e-4)  # a kink: no second derivative
    np.testing.assert_allclose((there.value[:5] - there.value[5:]) / 2e-6, here.gradient[0],
                               rtol=1e-5, atol=1e-7 * max(here.value[0], 1e-4))
    if not crossing:
        np.testing.assert_allclose((there.gradient[:5] - there.gradient[5:]) / 2e-6, here.hessian[0], rtol=1e-5,
                                   atol=1e-6 * np.abs(here.hessian).max())
    assert np.linalg.eigvalsh(here.metric[0])[0] > 0


@given(st.integers(0, 10**6))
def test_three_unknowns_of_nonnegative_least_squares(seed):
    rng = np.random.default_rng(seed)
    columns, target = rng.normal(size=(4, 6, 3)), rng.normal(size=(4, 6))
    found = ch.nonnegative(columns.swapaxes(1, 2) @ columns, np.einsum("knp,kn->kp", columns, target))
    for A, b, x in zip(columns, target, found, strict=True):
        np.testing.assert_allclose(x, optimize.nnls(A, b)[0], atol=1e-9)


def test_the_loss_family():
    r = np.array([-3.0, -0.5, 0.0, 0.2, 4.0])
    np.testing.assert_allclose(huber(r, 0.5).rho, [1.375, 0.125, 0, 0.02, 1.875])
    np.testing.assert_allclose(huber(r, np.inf).rho, r**2 / 2)
    np.testing.assert_array_equal(huber(r, np.inf).weight, 1)
    assert value(r, np.ones(5), "lad", 9.9) == 7.7
    np.testing.assert_allclose(value(r, np.ones(5), "lad", 0), huber(r, 1e-9).rho.sum() / 1e-9, rtol=1e-8)
    assert continuation("lsq", 1e-3) == [np.inf] and continuation("huber", 1.0) == [1.0]
    np.testing.assert_allclose(continuation("huber", 1e-3), [1e-2, 1e-3])


@given(st.tuples(st.floats(0.5, 3), st.floats(0.15, 0.6), st.floats(0.15, 0.6), st.floats(0.1, 1), st.floats(0.1, 1)),
       st.sampled_from(["huber", "lsq", "lad"]))
def test_noise_free_runs_give_the_law_back(shape, objective):
    E, alpha, beta, from_n, from_d = shape
    true = np.array([from_n * 1e8**alpha, from_d * 1e10**beta, E, alpha, beta])
    N, D, loss = runs(true, noise=0.0)
    found = ch.fit(ch.prepare(N, D, loss), objective)
    np.testing.assert_allclose(found.params, true, rtol=1e-6)
    assert found.certificate.converged and not found.certificate.at_bounds


@pytest.mark.parametrize("objective", ["huber", "lsq", "lad"])
def test_no_start_of_scipy_finds_less(objective):
    N, D, loss = runs(seed=3)
    data = ch.prepare(N, D, loss)
    found = ch.fit(data, objective)

    def F(theta):
        return value(ch.terms(theta[None], data.n, data.d)[0][0] - data.y, data.weight, objective, 1e-3)

    assert F(found.theta) == pytest.approx(found.value, rel=1e-13)
    rng = np.random.default_rng(0)
    for _ in range(6):
        start = found.theta + rng.normal(0, 0.05, 5)
        other = optimize.minimize(F, start, method="Nelder-Mead",
                                  options={"maxiter": 1500, "xatol": 1e-9, "fatol": 1e-14})
        assert other.fun >= found.value * (1 - 1e-9)
    if objective == "lsq":
        other = optimize.least_squares(lambda t: ch.terms(t[None], data.n, data.d)[0][0] - data.y, found.theta + 0.01,
                                       xtol=1e-14, ftol=1e-14, gtol=1e-14)
        np.testing.assert_allclose(found.theta, other.x, atol=1e-6)


def test_least_absolute_deviation_passes_through_five_runs():
    found = ch.fit(ch.prepare(*runs(seed=5)), "lad")
    size = np.sort(np.abs(found.residuals))
    assert np.all(size[:5] < 1e-13) and size[5] > 1e-6


@pytest.mark.parametrize("objective", ["huber", "lad", "lsq"])
def test_order_units_and_scale_do_not_matter(objective):
    N, D, loss = runs(seed=1)
    plain = ch.fit(ch.prepare(N, D, loss), objective)
    shuffled = np.random.default_rng(0).permutation(N.size)
    other = ch.fit(ch.prepare(N[shuffled], D[shuffled], loss[shuffled]), objective)
    np.testing.assert_array_equal(other.params, plain.params)
    units = ch.fit(ch.prepare(N / 1e6, D / 1e9, loss), objective).params
    alpha, beta = plain.params[3:]
    np.testing.assert_allclose(units * [1e6**alpha, 1e9**beta, 1, 1, 1], plain.params, rtol=1e-7)
    for scale in (1 / N.size, 1e3, 1e6):
        scaled = ch.fit(ch.prepare(N, D, loss, np.full(N.size, scale)), objective)
        np.testing.assert_allclose(scaled.params, plain.params, rtol=1e-8)
        assert scaled.value == pytest.approx(scale * plain.value, rel=1e-10)


def test_a_weight_is_a_number_of_copies():
    N, D, loss = runs(seed=2)
    weight = 1 + np.arange(N.size) % 3
    copies = [np.repeat(x, weight) for x in (N, D, loss)]
    np.testing.assert_allclose(ch.fit(ch.prepare(N, D, loss, weight)).params, ch.fit(ch.prepare(*copies)).params,
                               rtol=1e-8)


def test_bad_arrays_are_refused():
    N, D, loss = runs()
    for bad in (-1.0, 0.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="above 0"):
            ch.prepare(N, D, np.where(np.arange(N.size) == 3, bad, loss))
    with pytest.raises(ValueError, match="5 parameters"):
        ch.fit(ch.prepare(N[:4], D[:4], loss[:4]))


@pytest.mark.parametrize("kind", un.RESAMPLES)
def test_every_refit_is_at_its_own_optimum(noisy, kind):
    cluster = np.repeat(np.arange(8), 7)
    refitted = un.refits(noisy, kind, 24, seed=0, cluster=cluster)
    draws = un.draws(noisy, kind, 24, 0, cluster)
    for k in range(24):
        own = {name: x[k:k + 1] for name, x in draws.items()}
        data = noisy.data._replace(weight=np.maximum(own.get("weight", noisy.data.weight[None])[0], 1e-300),
                                   y=own.get("y", noisy.data.y[None])[0])
        starts = ch.starts(data, 1e-2)
        best = ch.solve(data, starts, noisy.deltas).value.min()
        assert refitted.value[k] <= best * (1 + 1e-8)


def test_resampling_is_what_it_says(noisy):
    n, cluster = noisy.data.y.size, np.repeat(np.arange(8), 7)
    case = un.draws(noisy, "case", 50, 1)["weight"]
    assert np.all(case.sum(axis=1) == n) and case.std() == pytest.approx(1, abs=0.1)
    whole = un.draws(noisy, "cluster", 50, 1, cluster)["weight"][:, np.argsort(noisy.data.order)]
    assert np.all(whole.reshape(50, 8, 7) == whole.reshape(50, 8, 7)[:, :, :1])
    assert np.all(whole.reshape(50, 8, 7)[:, :, 0].sum(axis=1) == 8)
    fitted = noisy.data.y - noisy.residuals
    wild = un.draws(noisy, "wild", 50, 1)["y"] - fitted
    np.testing.assert_allclose(np.abs(wild), np.broadcast_to(np.abs(noisy.residuals), wild.shape), atol=1e-14)
    residual = un.draws(noisy, "residual", 50, 1)["y"] - fitted
    centred = noisy.residuals + location(-noisy.residuals, noisy.data.weight, noisy.deltas[-1])
    assert set(residual.ravel().round(12)) <= set(centred.round(12))
    np.testing.assert_array_equal(un.refits(noisy, "case", 20, 7).params, un.refits(noisy, "case", 20, 7).params)
    assert np.any(un.refits(noisy, "case", 20, 7).params != un.refits(noisy, "case", 20, 8).params)
    with pytest.raises(ValueError, match="clusters"):
        un.draws(noisy, "cluster", 2, 0)


def test_residuals_are_drawn_about_the_centre_of_their_own_loss():
    N, D, loss = runs()
    loss = loss * np.exp(1e-4 * np.random.default_rng(3).normal(size=N.size))
    loss[::7] *= 1.5  # their mean is far from where Huber's loss puts the law
    found = ch.fit(ch.prepare(N, D, loss))
    E = un.refits(found, "residual", 200, 0).params[:, 2]
    assert abs(np.median(E) - found.params[2]) < 0.5 * np.std(E)


@pytest.mark.parametrize("shape", [1e-3, np.inf, ("student", 1e-2), ("asymmetric", 1e-2)])
def test_location_is_the_constant_that_fits_best(shape):
    r, w = np.random.default_rng(0).normal(0.02, 0.05, 31) ** 3 + 0.1, np.linspace(0.5, 2, 31)
    m = location(r, w, shape)
    grid = m + np.linspace(-1e-4, 1e-4, 41)
    costs = [np.sum(w * penalty(r - at, shape).rho) for at in grid]
    assert grid[np.argmin(costs)] == pytest.approx(m, abs=6e-6)
    if shape == np.inf:
        assert m == pytest.approx(np.average(r, weights=w), abs=1e-15)


@pytest.mark.parametrize("seed", [41, 117, 208])
def test_a_profile_that_begins_where_the_law_overflows_ends_where_the_objective_says(seed):
    rng = np.random.default_rng(seed)
    n = rng.integers(6, 30)
    N, D = (np.exp(rng.uniform(np.log(low), np.log(1e3 * low), n)) for low in (1e6, 1e8))
    noise = rng.choice([1e-4, 1e-2, 0.1]) * rng.standard_t(2, n)
    found = ch.fit(ch.prepare(N, D, ch.law(np.array([400, 2000, 1.8, 0.34, 0.36]), N, D) * np.exp(noise)))
    limits = un.profile_intervals(found)
    E, s = limits[2, 1], un.dispersion(found, found.slopes)[0]
    start, free = found.theta[None].copy(), np.arange(5)[None] != 2
    start[0, 2] = np.log(E)
    above = found.solve(start, found.deltas[-1:], free=free, tolerance=1e-8).value[0] - found.value
    assert np.sqrt(2 * above / max(s[2], 1e-3 * s.max())) == pytest.approx(np.sqrt(un.CHI_SQUARE_95), rel=1e-2)
    assert np.any(np.isinf(limits))


def test_profiles_of_least_squares_are_the_linear_ones_for_small_noise():
    N, D, _ = runs()
    rng = np.random.default_rng(0)
    loss = ch.law(TRUE, N, D) * np.exp(1e-5 * rng.normal(size=N.size))
    found = ch.fit(ch.prepare(N, D, loss), "lsq")
    half = np.diff(un.profile_intervals(found), axis=1)[:, 0] / 2
    r, (J, gram) = found.residuals, un.information(found)
    inverse = np.linalg.inv(gram)
    robust = inverse @ (J * r**2 * r.size / (r.size - 5)) @ J.T @ inverse
    np.testing.assert_allclose(half[2:] / 1.959964, np.sqrt(np.diag(robust))[2:] * [found.params[2], 1, 1], rtol=1e-3)
    inside = un.profile_intervals(found)
    assert np.all((inside[:, 0] < found.params) & (found.params < inside[:, 1]))


def test_profile_limits_are_where_the_objective_says(noisy):
    limits = un.profile_intervals(noisy)
    s, _ = un.dispersion(noisy, un.information(noisy)[0])
    for k in (3, 4):
        for limit in limits[k]:
            start, free = noisy.theta[None].copy(), np.ones((1, 5), bool)
            start[0, k], free[0, k] = limit, False
            rise = ch.solve(noisy.data, start, noisy.deltas, free=free).value[0] - noisy.value
            assert 2 * rise / s[k] == pytest.approx(un.CHI_SQUARE_95, rel=1e-3)


@pytest.mark.parametrize("objective, delta", [("huber", 1e-3), ("huber", 0.01), ("huber", 0.03), ("lsq", 1e-3),
                                              ("student", 0.01)])
def test_the_sandwich_of_normal_noise(objective, delta):
    """At the truth and for many runs it is E psi^2 / (E psi')^2 (sum w J J^T)^-1 (sum w^2 J J^T) (sum w J J^T)^-1, with
    the two expectations by quadrature (Huber 1964); psi' has jumps, so E psi' is E psi r / sigma^2 (Stein 1981)."""
    count, sigma, rng = 40_000, 0.01, np.random.default_rng(0)
    N, D = np.exp(rng.uniform(np.log(1e7), np.log(1e10), count)), np.exp(rng.uniform(np.log(3e8), np.log(1e12), count))
    data = ch.prepare(N, D, ch.law(TRUE, N, D) * np.exp(sigma * rng.normal(size=count)), rng.uniform(0.5, 2, count))
    theta = np.array([*np.log(TRUE[:3]), *TRUE[3:]])
    theta[:2] -= theta[3:] * data.centre
    found = ch.Fit(data, objective, delta, theta, TRUE, 0.0, None)
    shape, J = found.deltas[-1], found.slopes
    r = np.linspace(-12 * sigma, 12 * sigma, 200_001)
    psi, density = penalty(r, shape).psi, np.exp(-(r / sigma) ** 2 / 2) / np.sqrt(2 * np.pi) / sigma
    noise, curvature = (integrate.trapezoid(x * density, r) for x in (psi**2, psi * r / sigma**2))
    inverse = np.linalg.inv((J * data.weight) @ J.T)
    exact = noise / curvature**2 * inverse @ ((J * data.weight**2) @ J.T) @ inverse
    _, covariance = un.sandwich(found, J)
    unit = np.sqrt(np.diag(exact))
    np.testing.assert_allclose(covariance / unit / unit[:, None], exact / unit / unit[:, None], atol=0.08)


def test_leverage_adds_up_to_the_parameters(noisy):
    h = un.leverage(noisy)
    assert h.sum() == pytest.approx(5) and np.all((h > 0) & (h < 1))


def test_stability_is_a_fit_of_the_rest():
    N, D, loss = runs(seed=4)
    found = ch.fit(ch.prepare(N, D, loss))
    for without in un.stability(found):
        keep = {"the highest loss": np.argsort(loss)[:-1], "the 5 highest losses": np.argsort(loss)[:-5],
                "the 5 lowest losses": np.argsort(loss)[5:]}.get(without.what)
        if keep is not None:
            again = ch.fit(ch.prepare(N[keep], D[keep], loss[keep]))
            np.testing.assert_allclose(without.params[2:], again.params[2:], rtol=1e-5)
            assert without.n == keep.size


@given(st.floats(0.1, 0.8), st.floats(0.1, 0.8), st.floats(17, 26), st.floats(1, 12))
def test_the_frontier_is_the_lowest_loss_of_the_budget(alpha, beta, log_C, flop):
    params, C = np.array([300.0, 900.0, 1.7, alpha, beta]), 10.0**log_C
    best = optimum(params, C, flop)
    assert flop * best.N * best.D == pytest.approx(C, rel=1e-9)
    for factor in (0.9, 0.999, 1.001, 1.1):
        assert ch.law(params, best.N * factor, best.D / factor) > best.loss
    more = optimum(params, 10 * C, flop)
    assert np.log10(more.N / best.N) == pytest.approx(exponent(params), rel=1e-9)


def test_no_frontier_without_two_falling_terms():
    assert np.isnan(optimum(np.array([1.0, 1.0, 1.0, -0.1, 0.3]), 1e20).N)


DEGENERATE = {  # design -> what must be said of it
    "one size": (lambda N, D, y: (np.full_like(N, 1e8), D, y), "N is the same in all runs"),
    "one length": (lambda N, D, y: (N, np.full_like(D, 1e10), y), "D is the same in all runs"),
    "one ratio": (lambda N, D, y: (N, 20 * N, y), "All runs lie within a factor 1 of D/N = 20"),
    "two points": (lambda N, D, y: (np.where(N > 1e8, 1e9, 1e8), np.where(N > 1e8, 1e10, 1e9), y), "only 2 different"),
    "one point": (lambda N, D, y: (0 * N + 1e8, 0 * D + 1e9, y), "only 1 different"),
    "equal losses": (lambda N, D, y: (N, D, 0 * y + 3.0), "edge"),
    "no E": (lambda N, D, y: (N, D, ch.law(TRUE - [0, 0, 1.89, 0, 0], N, D)), "E ended at the edge"),
    "five runs": (lambda N, D, y: (N[::12], D[::12], y[::12]), "5 runs for 5 parameters"),
    "rising": (lambda N, D, y: (N, D, np.sort(y)), ""),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_designs_give_a_report_and_a_warning(name):
    change, sentence = DEGENERATE[name]
    N, D, loss = change(*runs(noise=0.02))
    loss = loss if name == "no E" else ch.law(TRUE, N, D) * np.exp(np.log(loss) - np.log(loss).mean()) \
        if name in ("one size", "one length", "one ratio") else loss
    result = study(N, D, loss, bootstrap=40, budget=1e21)
    assert np.isfinite(result.fit.value) and result.warnings
    assert any(sentence in warning for warning in result.warnings), result.warnings


def test_a_small_range_does_not_identify_E():
    N, D, loss = runs(noise=0.05, seed=1, sizes=3, lengths=3)
    result = study(N, D, loss, bootstrap=200)
    assert any("is not identified by these runs" in warning for warning in result.warnings)


def test_a_study_does_not_depend_on_the_order_of_the_runs():
    N, D, loss = runs(seed=6)
    p = np.random.default_rng(0).permutation(N.size)
    one, two = (study(*x, bootstrap=50, budget=1e22) for x in ((N, D, loss), (N[p], D[p], loss[p])))
    np.testing.assert_array_equal(one.params.se, two.params.se)
    np.testing.assert_array_equal(one.leverage[p], two.leverage)
    assert one.optimum_spread.N.low < one.optimum.N < one.optimum_spread.N.high
    assert one.warnings == two.warnings
