"""Approaches 1 and 2 against closed forms, SciPy, and published faults with their right values."""

import csv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_data import EPOCH, KYO_TAKANO, epoch, table
from scipy.interpolate import Akima1DInterpolator

from jaxpt.scaling import approaches, isoflop
from jaxpt.scaling.chinchilla import law
from jaxpt.scaling.frontier import exponent, optimum

ASYMMETRIC = np.array([406.4, 410.7, 1.69, 0.465, 0.155])
SYMMETRIC = np.array([406.4, 410.7, 1.69, 0.31, 0.31])
CHINCHILLA = np.array([406.4, 410.7, 1.69, 0.34, 0.28])
BUDGETS = 10.0 ** np.arange(17, 22)
LADDER = [("base", "long", "kaplan", "kaplan"), ("base", "long", "kaplan", "standard"),
          ("base", "short", "kaplan", "standard"), ("base", "short", "chinchilla", "standard"),
          ("tuned", "short", "const", "standard")]


def grid(params, width, shift=lambda i: 1.0):
    """15 noise-free runs for each budget, sizes from 1/width to width times the best, or off it by `shift`."""
    sizes = [optimum(params, C).N * shift(i) * np.geomspace(1 / width, width, 15) for i, C in enumerate(BUDGETS)]
    N, C = np.concatenate(sizes), np.repeat(BUDGETS, 15)
    return N, C, law(params, N, C / (6 * N))


def by_parabola(params, width, shift=lambda i: 1.0):
    """(a, D* at 1e24 over the true one, minus 1)."""
    N, C, loss = grid(params, width, shift)
    at = isoflop.budgets(C, N)
    best = isoflop.parabola(np.log(N), loss[None], np.ones((1, N.size)), at).log_N
    a = isoflop.power_law(np.log(at.C), best).exponent[0]
    D = isoflop.power_law(np.log(at.C), np.log(at.C / 6) - best).at(1e24)[0]
    return a, D / optimum(params, 1e24).D - 1


def porian(dataset, setting):
    """(N, C, loss) of one setting of Porian et al. 2024."""
    with table("porian_isoflop_points.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["dataset"] == dataset and
                (r["hparams"], r["warmup"], r["decay"], r["param_count"]) == setting]
    return tuple(np.array([float(r[name]) for r in rows]) for name in ("n", "flops", "loss"))


@given(st.integers(0, 10**6))
def test_the_parabola_is_a_weighted_least_squares_fit(seed):
    rng = np.random.default_rng(seed)
    x, w = np.sort(rng.uniform(10, 20, 9)), rng.uniform(0.1, 3, (4, 9)) * (rng.uniform(size=(4, 9)) > 0.2)
    y = 3 + 0.1 * (x - rng.uniform(13, 17, (4, 1))) ** 2 + 0.01 * rng.normal(size=(4, 9))
    place, depth = isoflop.vertex(x, y, w)
    for k in range(4):
        c2, c1, c0 = np.polyfit(x, y[k], 2, w=np.sqrt(w[k]))
        best = -c1 / (2 * c2)
        seen = x[w[k] > 0]
        if c2 > 0 and seen.min() < best < seen.max():
            assert place[k] == pytest.approx(best, rel=1e-6)
            assert depth[k] == pytest.approx(c0 + c1 * best + c2 * best**2, rel=1e-6)
        else:
            assert np.isnan(place[k])


@pytest.mark.parametrize("y", [[3.0, 2.0, 1.0, 0.5], [1.0, 2.0, 2.5, 1.0]], ids=["falling", "a hill"])
def test_no_minimum_inside_is_said(y):
    x, y = np.arange(4.0), np.array([y])
    assert np.isnan(isoflop.vertex(x, y, np.ones((1, 4)))[0]).all()
    assert np.isnan(isoflop.lowest(x, y)[0]).all()
    assert np.isnan(isoflop.vertex(x, (x[None] - 1.3) ** 2, np.array([[1.0, 1.0, 0, 0]]))[0]).all()  # two points


@given(st.integers(0, 10**6), st.integers(4, 12))
def test_the_spline_is_akima_s(seed, m):
    rng = np.random.default_rng(seed)
    x, y = np.sort(rng.uniform(0, 10, m)) + 0.01 * np.arange(m), rng.normal(size=(3, m))
    for row, (place, depth) in zip(y, zip(*isoflop.lowest(x, y), strict=True), strict=True):
        fine = np.linspace(x[0], x[-1], 20_001)
        other = Akima1DInterpolator(x, row)(fine)
        if np.isnan(place):
            assert other.min() >= min(row[0], row[-1]) - 1e-9
        else:
            assert depth <= other.min() + 1e-9
            assert depth == pytest.approx(float(Akima1DInterpolator(x, row)(place)), abs=1e-9)


def test_budgets_are_runs_of_nearly_equal_compute():
    rng = np.random.default_rng(0)
    C = np.repeat([1e18, 1e19, 1e20], 7) * np.exp(rng.uniform(-0.1, 0.1, 21))
    N = np.tile(np.geomspace(1e7, 1e9, 7), 3)
    shuffled = rng.permutation(21)
    at = isoflop.budgets(C[shuffled], N[shuffled])
    np.testing.assert_array_equal(at.group, (np.arange(21) // 7)[shuffled])
    np.testing.assert_allclose(at.C, [1e18, 1e19, 1e20], rtol=0.1)
    assert isoflop.budgets(C, np.full(21, 1e8)).C.size == 0  # one size is no budget
    assert isoflop.budgets(np.geomspace(1e18, 1e21, 21), N).C.size == 0


@given(st.floats(0.2, 0.8), st.integers(0, 1000))
def test_a_power_law_over_what_is_there(a, seed):
    log_C = np.linspace(40, 48, 9)
    y = 2.0 + a * log_C
    holes = np.where(np.random.default_rng(seed).uniform(size=(5, 9)) < 0.4, np.nan, y)
    found = isoflop.power_law(log_C, holes)
    enough = np.isfinite(holes).sum(axis=1) > 1
    np.testing.assert_allclose(found.exponent[enough], a, rtol=1e-9)
    np.testing.assert_allclose(found.at(np.exp(50.0))[enough], np.exp(2 + 50 * a), rtol=1e-8)
    assert np.isnan(found.exponent[~enough]).all()


@pytest.mark.parametrize("params, shares", [(ASYMMETRIC, [-0.017, -0.065, -0.139, -0.231]),
                                            (CHINCHILLA, [-0.003, -0.013, -0.029, -0.051]), (SYMMETRIC, [0, 0, 0, 0])])
def test_16_a_parabola_is_biased_where_alpha_and_beta_differ(params, shares):
    """Czech et al. 2026 (arXiv 2603.22339): D* at 1e24 from budgets 1e17 to 1e21, the exponent stays exact."""
    for width, share in zip((2, 4, 8, 16), shares, strict=True):
        a, off = by_parabola(params, width)
        assert off == pytest.approx(share, abs=6e-4) and a == pytest.approx(exponent(params), abs=1e-6)


def test_17_drifting_off_the_middle_bends_the_exponent():
    drift = lambda i: 10 ** (0.15 * i)  # noqa: E731
    assert by_parabola(SYMMETRIC, 8, drift) == pytest.approx((0.5063, -0.085), abs=6e-4)
    assert by_parabola(ASYMMETRIC, 8, drift) == pytest.approx((0.2245, 0.259), abs=6e-4)
    assert by_parabola(SYMMETRIC, 8, lambda i: 3.0) == pytest.approx((0.5, -0.026), abs=6e-4)


@pytest.mark.parametrize("params, width", [(ASYMMETRIC, 8), (ASYMMETRIC, 4)])
def test_the_correction_takes_the_bias_off(params, width):
    N, C, loss = grid(params, width, lambda i: 10 ** (0.1 * i))
    found = approaches.compare(N, C / (6 * N), loss, bootstrap=0, target=1e24)
    rows = {row.name: row for row in found.approaches}
    true = optimum(params, 1e24).N
    assert rows["2 parabola, corrected"].N == pytest.approx(true, rel=1e-5)
    assert rows["3 law"].N == pytest.approx(true, rel=1e-5)
    plain = rows["2 parabola"]
    assert abs(plain.N / true - 1) > 0.01 and plain.N_bias == pytest.approx(plain.N / true - 1, rel=1e-3)


@pytest.mark.parametrize("dataset, noise, exponents", [
    ("rw", 0.002, (0.834, 0.701, 0.604, 0.571, 0.497)), ("owt2", 0.01, (0.870, 0.700, 0.602, 0.569, 0.518))])
def test_12_to_15_porian_s_ladder_from_the_points(dataset, noise, exponents):
    """Last layer, warm-up, decay, tuning: .834, .701, .604, .571, .497. As they do: the median over draws of seed noise
    of each budget's minimum, where at least half of the draws have one. Their own medians are of other draws."""
    rng = np.random.default_rng(0)
    for setting, published in zip(LADDER, exponents, strict=True):
        N, C, loss = porian(dataset, setting)
        at = isoflop.budgets(C, N)
        draws = loss + noise * rng.normal(size=(200, loss.size))
        found = isoflop.spline(np.log(N), draws, np.ones_like(draws), at).log_N
        own = isoflop.spline(np.log(N), loss[None], np.ones((1, loss.size)), at).log_N[0]
        kept = (np.isfinite(found).mean(axis=0) >= 0.5) & np.isfinite(own)
        middle = np.full(at.C.size, np.nan)
        middle[kept] = np.nanmedian(found[:, kept], axis=0)
        assert isoflop.power_law(np.log(at.C), middle[None]).exponent[0] == pytest.approx(published, abs=0.004 if dataset == "rw" else 0.01)


@pytest.mark.parametrize("setting, published", [(("base", "long", "kaplan", "attention"), 0.716),
                                                (("tuned", "short", "const", "attention"), 0.504)])
def test_23_counting_attention_moves_the_exponent(setting, published):
    N, C, loss = porian("rw", setting)
    at = isoflop.budgets(C, N)
    found = isoflop.spline(np.log(N), loss[None], np.ones((1, loss.size)), at).log_N
    assert isoflop.power_law(np.log(at.C), found).exponent[0] == pytest.approx(published, abs=0.002)


def test_the_approaches_disagree_where_the_recipe_depends_on_the_size():
    """Porian's runs with a warm-up too long for small models are no Chinchilla law; the tuned ones may be."""
    said = {}
    for setting in (LADDER[1], LADDER[4]):
        N, C, loss = porian("rw", setting)
        found = approaches.compare(N, C / (6 * N), loss, C=C, bootstrap=150)
        said[setting] = {row.name: row for row in found.approaches}
        assert said[setting]["2 spline"].a == pytest.approx({"long": 0.701, "short": 0.497}[setting[1]], abs=0.002)
    assert said[LADDER[1]]["2 spline"].p < 0.05 < said[LADDER[4]]["2 spline"].p


def test_intervals_do_not_depend_on_the_order_of_the_runs():
    N, C, loss = grid(CHINCHILLA, 8)
    loss = loss * np.exp(0.003 * np.random.default_rng(0).normal(size=N.size))
    p = np.random.default_rng(1).permutation(N.size)
    one, two = (approaches.compare(n, c / (6 * n), y, bootstrap=20)
                for n, c, y in ((N, C, loss), (N[p], C[p], loss[p])))
    assert repr(one.approaches) == repr(two.approaches)
    np.testing.assert_array_equal(one.budgets.group[p], two.budgets.group)


def test_runs_without_budgets_get_a_report():
    N = np.geomspace(1e7, 1e9, 12)
    found = approaches.compare(N, 20 * N**1.3, law(CHINCHILLA, N, 20 * N**1.3), bootstrap=10)
    assert np.isnan(found.approaches[1].a) and np.isfinite(found.approaches[-1].a)
    assert "nothing to work on" in found.warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [EPOCH, KYO_TAKANO])
def test_three_approaches_agree_on_chinchilla_s_runs(name):
    if name == EPOCH:
        N, D, loss = epoch()
    else:
        rows = np.genfromtxt(table(name), delimiter=",", names=True)
        N, D, loss = rows["N"], rows["D"], rows["loss"]
    found = approaches.compare(N, D, loss, target=5.76e23)
    for row in found.approaches:
        assert 0.49 < row.a < 0.56 and 5e10 < row.N < 1.2e11
        assert row.name == "3 law" or row.p > 0.05
        assert row.a_spread.low < found.approaches[-1].a < row.a_spread.high
