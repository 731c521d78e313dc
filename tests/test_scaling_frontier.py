"""Frontiers under other costs, counts of FLOPs, money, plans and simulated runs: against closed forms and loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_data import epoch

from jaxpt.models import ModelConfig
from jaxpt.models.counts import forward_flops
from jaxpt.scaling import chinchilla as ch
from jaxpt.scaling import costs, flops, planning, simulate
from jaxpt.scaling import frontier as fr
from jaxpt.scaling import uncertainty as un

HOFFMANN = np.array([*np.exp([6.0073404, 6.0179186]), np.exp(0.5267228), 0.33917084, 0.2849083])
MUENNIGHOFF = np.array([*np.exp([6.255414, 7.3049974, 0.6254804]), 0.3526596, 0.3526596])


def scan(f, low=6, high=13, n=200_001):
    """The lowest f(N) on a fine grid: (N, f)."""
    N = np.logspace(low, high, n)
    values = f(N)
    return N[np.nanargmin(values)], np.nanmin(values)


@given(st.floats(0.15, 0.6), st.floats(0.15, 0.6), st.floats(17, 26))
def test_compute_for_a_loss_inverts_the_frontier(alpha, beta, log_C):
    params = np.array([300.0, 900.0, 1.7, alpha, beta])
    best = fr.optimum(params, 10.0**log_C)
    if best.loss - 1.7 > 1e-9:
        assert fr.compute_for(params, best.loss) == pytest.approx(10.0**log_C, rel=1e-4)
    assert fr.compute_for(params, 1.7) == np.inf


def test_a_count_of_six_per_parameter_is_the_closed_form():
    best, solved = fr.optimum(HOFFMANN, 1e22, 6.0), fr.counted(HOFFMANN, 1e22, lambda N: 6 * N)
    np.testing.assert_allclose(solved, best, rtol=1e-6)
    np.testing.assert_allclose(fr.served(HOFFMANN, 1e22, 0.0), best, rtol=1e-6)
    np.testing.assert_allclose(fr.limited(HOFFMANN, 1e22, 1e18), best, rtol=1e-6)


def test_other_counts_against_a_scan():
    count = lambda N: 6 * (N + 5e4 * np.cbrt(N))  # noqa: E731
    solved = fr.counted(HOFFMANN, 1e20, count)
    assert solved.N == pytest.approx(scan(lambda N: ch.law(HOFFMANN, N, 1e20 / count(N)))[0], rel=1e-3)
    assert solved.D * count(solved.N) == pytest.approx(1e20, rel=1e-9)
    N, D = np.geomspace(1e6, 1e10, 30), 1e10
    assert flops.from_runs(N, D, count(N) * D)(3e8) == pytest.approx(count(3e8), rel=0.05)


def test_sardana_s_thirteen_billion():
    """Figure 1 of arXiv 2401.00448: 13B of Chinchilla's quality that serves 2e12 tokens is better a 7B trained longer,
    which saves 1.7e22 FLOPs, 17%. Their coefficients are rounded."""
    C = (13e9 / np.exp(fr._log_G(HOFFMANN))) ** (1 / fr.exponent(HOFFMANN)) * 6
    loss = float(fr.optimum(HOFFMANN, C).loss)
    both = C + 2 * 13e9 * 2e12
    best = fr.cheapest(HOFFMANN, loss, 2e12)
    spent = 6 * best.N * best.D + 2 * best.N * 2e12
    assert best.N == pytest.approx(7e9, rel=0.03) and best.loss == pytest.approx(loss, rel=1e-9)
    assert both - spent == pytest.approx(1.7e22, rel=0.05) and 1 - spent / both == pytest.approx(0.17, abs=0.01)
    better = fr.served(HOFFMANN, both, 2e12)
    assert better.loss < loss and 6 * better.N * better.D + 2 * better.N * 2e12 == pytest.approx(both, rel=1e-9)
    assert np.isnan(fr.cheapest(HOFFMANN, 1.6, 1e12).N)
    unserved = fr.cheapest(HOFFMANN, loss, 0.0)
    assert unserved.N == pytest.approx(13e9, rel=1e-5)


def test_data_that_run_out():
    """Muennighoff et al. 2023 (arXiv 2305.16264): with 25e9 unique tokens 9.3e21 FLOPs buy a smaller model and more
    epochs than Chinchilla's rule, which says 7."""
    plain, best = fr.optimum(MUENNIGHOFF, 9.3e21), fr.limited(MUENNIGHOFF, 9.3e21, 25e9)
    assert plain.D / 25e9 == pytest.approx(7.0, abs=0.1)
    assert 8.5 < best.D / 25e9 < 10 and best.N < plain.N

    def loop(N):
        out = []
        G = (MUENNIGHOFF[0] / MUENNIGHOFF[1]) ** (1 / (2 * 0.3526596))  # alpha = beta
        for n in N:
            d, base = 9.3e21 / 6 / n, 25e9 * G * G
            repeats, excess = max(d / 25e9 - 1, 0), max(n / base - 1, 0)
            d = min(d, 25e9) * (1 + 15.387756 * (1 - np.exp(-repeats / 15.387756)))
            n = min(n, base) * (1 + 5.309743 * (1 - np.exp(-excess / 5.309743)))
            out.append(MUENNIGHOFF[2] + MUENNIGHOFF[0] * n**-0.3526596 + MUENNIGHOFF[1] * d**-0.3526596)
        return np.array(out)

    N, loss = scan(loop, 9, 11, 4001)
    assert best.N == pytest.approx(N, rel=1e-3) and best.loss == pytest.approx(loss, rel=1e-7)
    assert fr.effective(MUENNIGHOFF, 1e9, 2e10, 25e9)[1] == 2e10  # one epoch counts in full


def test_flop_counts_are_those_of_our_own_decoder():
    cfg = ModelConfig(vocab=256, d_model=48, n_layers=3, n_heads=3, d_ff=128)
    shape = flops.Shape(3, 48, 128, 3, 16, 256, 64, gated=True)
    products = 3 * (forward_flops(cfg, 2, 64) + 2 * 2 * 64 * 48 * 256) / (2 * 64)
    assert flops.attention(shape) == pytest.approx(products, rel=1e-12)
    assert flops.kaplan(shape) < flops.last_layer(shape) < flops.attention(shape) < flops.chinchilla(shape)
    extra = flops.chinchilla(shape) - flops.attention(shape)
    assert extra == pytest.approx(3 * (2 * 256 * 48 + 3 * 3 * 64 * 3), rel=1e-12)  # embeddings, softmax


def test_prices():
    machine = costs.Machine(peak=989e12, utilisation=0.4, price=2.5)
    bill = costs.bill(1e21, machine)
    assert bill.hours == pytest.approx(1e21 / 989e12 / 0.4 / 3600) and bill.money == pytest.approx(2.5 * bill.hours)
    assert costs.affordable(float(bill.money), machine) == pytest.approx(1e21)
    assert costs.value_of_utilisation(HOFFMANN, 1e5, machine, 0.5).money == pytest.approx(20_000)


@pytest.fixture(scope="module")
def ladder():
    rng = np.random.default_rng(0)
    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 5)))
    return ch.fit(ch.prepare(N, D, ch.law(HOFFMANN, N, D) * np.exp(0.005 * rng.normal(size=N.size))), "lsq")


def test_gradients_and_the_first_purchase(ladder):
    """Bought alone, a run lowers the variance as Sherman and Morrison say: by the full inverse of the new matrix."""
    theta, centre = ladder.theta[None], ladder.data.centre
    c = planning.gradient(theta, centre, planning.best_loss(1e23))[0]
    step = 1e-3 * np.arange(1, 6)
    target = planning.best_loss(1e23)
    moved = target(ch.parameters(theta + 1e-3 * step, centre)) - target(ladder.params)
    assert moved[0, 0] == pytest.approx(float(1e-3 * step @ c[:, 0]), rel=1e-2)
    N, D = planning.candidates(ladder, 1e21)
    plan = planning.plan(ladder, planning.best_loss(1e23), N, D, 6 * N * D, 1, 1e21, others=0)
    _, gram = un.information(ladder)
    A = planning.steepness(theta, np.log(N) - centre[0], np.log(D) - centre[1])[0]
    after = np.array([c[:, 0] @ np.linalg.solve(gram + np.outer(J, J), c[:, 0]) for J in A])
    assert plan.rows[0] == np.argmin(after)
    before = c[:, 0] @ np.linalg.solve(gram, c[:, 0])
    assert plan.after[0] / plan.before == pytest.approx(np.sqrt(after.min() / before), rel=1e-5)


@pytest.mark.parametrize("target", [planning.allocation, planning.best_size(1e23),
                                    planning.loss_at(np.array([1e10]), np.array([2e11]))])
def test_plans_keep_to_their_budget_and_beat_chance(ladder, target):
    N, D = planning.candidates(ladder, 1e21)
    cost = 6 * N * D
    plan = planning.plan(ladder, target, N, D, cost, 6, 2e21)
    assert 1 <= plan.N.size <= 6 and plan.cost.sum() <= 2e21 * (1 + 1e-9)
    assert np.all(np.diff(plan.after) <= 0) and plan.after[-1] < plan.before
    one = planning.plan(ladder, target, N, D, cost, 6, 2e21, others=0)
    rng, left = np.random.default_rng(0), []
    c = planning.gradient(ladder.theta[None], ladder.data.centre, target)[0]
    _, gram = un.information(ladder)
    A = planning.steepness(ladder.theta[None], np.log(N) - ladder.data.centre[0], np.log(D) - ladder.data.centre[1])[0]
    for _ in range(50):
        rows = rng.choice(np.flatnonzero(cost <= 2e21 / 6), 6)
        left.append(np.trace(c.T @ np.linalg.solve(gram + A[rows].T @ A[rows], c)))
    planned = np.trace(c.T @ np.linalg.solve(gram + A[one.rows].T @ A[one.rows], c))
    assert planned < min(left)
    assert planning.plan(ladder, target, N, D, cost, 3, 1.0).N.size == 0


def test_6_how_many_points_hoffmann_s_interval_takes():
    """Besiroglu et al. 2024: .454 to .455 as an 80% interval needs about 600 000 runs."""
    fit = ch.fit(ch.prepare(*epoch()))
    a = fr.exponent(un.refits(fit, "case", 1500, 0).params)
    width = float(np.diff(np.quantile(a, [0.1, 0.9]))[0])
    assert planning.points_needed(240, width / 2, 0.0005) == pytest.approx(634_773, rel=0.15)
    assert planning.standard_error(fit, planning.allocation) == pytest.approx(a.std(), rel=0.25)


def test_simulated_recipes():
    """Each habit alone, without noise; what Porian's ladder does."""
    truth = np.array([482.006, 2085.434, 1.81686, 0.34781, 0.36585])
    assert simulate.useful_tokens(np.array([1e9, 4e9]), 2e9) == pytest.approx([0.25e9, 3e9])
    assert simulate.useful_tokens(2e9, 2e9) == pytest.approx(1e9)  # continuous where the warm-up ends
    N = np.array([1e6, 1e9])
    plain = simulate.losses(truth, N, 1e10, simulate.Recipe())
    np.testing.assert_allclose(plain, ch.law(truth, N + 47491 * np.cbrt(N), 1e10))
    for habit in ({"warmup": 1e9}, {"batch": 1e6}, {"schedule": 1e12}, {"tuned": False, "best_at": 1e7}):
        assert np.all(simulate.losses(truth, N, 1e10, simulate.Recipe(**habit)) > plain)
    runs = simulate.isoflop_runs(truth, simulate.LADDER["Kaplan's recipe"], np.array([1e18, 1e19]), N)
    np.testing.assert_allclose(runs.C, 6 * runs.N * runs.D)
    np.testing.assert_array_equal(runs.N, np.tile(N, 2))
    assert simulate.true_exponent(truth, 10.0 ** np.arange(16, 20)) == pytest.approx(fr.exponent(truth), abs=0.01)
