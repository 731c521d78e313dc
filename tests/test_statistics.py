"""The statistics of claims: closed forms, definitions by brute force, error rates by simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxpt.lab.statistics import ALPHA, band, decide, holm, last, summarize

VERDICTS = ["refuted", "middle", "supported"]
number = st.floats(-5, 5).map(lambda x: round(x, 3))
sample = st.lists(number, min_size=5, max_size=12).map(np.array)
margin = st.floats(0.01, 2).map(lambda x: round(x, 3))


def verdict(x, m):
    (decision,) = decide([x], [m])
    return decision.verdict


def rank(name):
    return VERDICTS.index(name if name in VERDICTS else "middle")


@given(sample, margin)
def test_summary_is_scipys_t_test(x, m):
    s = summarize(x, m)
    if np.std(x) < 1e-6:
        return
    above = stats.ttest_1samp(x, m, alternative="greater")
    below = stats.ttest_1samp(x, m, alternative="less")
    interval = stats.ttest_1samp(x, 0.0).confidence_interval(0.95)
    floor = 2.0**-x.size
    np.testing.assert_allclose([s.p_above, s.p_below],
                               [max(above.pvalue, floor), max(below.pvalue, floor)], rtol=1e-9)
    np.testing.assert_allclose([s.low, s.high], interval, rtol=1e-9, atol=1e-12)


@given(sample, margin, st.floats(0, 10))
def test_verdict_rises_when_the_sample_is_shifted_up(x, m, shift):
    assert rank(verdict(x, m)) <= rank(verdict(x + shift, m))


@given(sample, margin, st.sampled_from([0.25, 4.0, 1024.0]))
def test_units_do_not_matter(x, m, scale):
    one, other = summarize(x, m), summarize(x * scale, m * scale)
    assert verdict(x, m) == verdict(x * scale, m * scale)
    np.testing.assert_allclose([other.mean, other.low, other.high, other.mde],
                               np.array([one.mean, one.low, one.high, one.mde]) * scale, rtol=1e-12)


@given(sample, margin, st.randoms(use_true_random=False))
def test_the_order_of_seeds_does_not_matter(x, m, random):
    shuffled = list(x)
    random.shuffle(shuffled)
    a, b = summarize(x, m), summarize(np.array(shuffled), m)
    np.testing.assert_allclose(a[1:7], b[1:7], rtol=1e-6, atol=1e-9)


@given(st.lists(sample, min_size=1, max_size=5), margin)
def test_mirrored_samples_have_mirrored_verdicts(samples, m):
    mirrored = [2 * m - x for x in samples]
    for a, b in zip(decide(samples, [m] * len(samples)), decide(mirrored, [m] * len(samples)), strict=True):
        np.testing.assert_allclose([a.p_above, a.p_below], [b.p_below, b.p_above], rtol=1e-6, atol=1e-9)
        assert not (a.p_above < ALPHA and a.p_below < ALPHA)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.01, 0.99))
def test_holm_rejects_what_its_closed_test_rejects(p, alpha):
    """Holm is the closure of Bonferroni: H_i falls if every set of hypotheses that holds it falls."""
    adjusted = holm(p)
    m = len(p)
    sets = [c for k in range(1, m + 1) for c in itertools.combinations(range(m), k)]
    for i in range(m):
        closed = max(len(c) * min(p[j] for j in c) for c in sets if i in c)
        np.testing.assert_allclose(adjusted[i], min(1.0, closed), rtol=1e-12)
    assert np.all(adjusted >= np.array(p))


@given(st.integers(2, 12), st.integers(1, 9), st.floats(1, 100))
def test_few_seeds_prove_nothing_whatever_their_variance(n, claims, gap):
    """n signs cannot reach a p below 2^-n; a zero variance is no exception."""
    decisions = decide([np.full(n, 0.5 + gap)] * claims, [0.5] * claims)
    reachable = claims * 2.0**-n < ALPHA
    assert {d.verdict for d in decisions} == ({"supported"} if reachable else {"underpowered"})


def binomial_bounds(draws, p):
    return stats.binom.ppf([1e-5, 1 - 1e-5], draws, p)


def test_error_rates_on_the_margin():
    """At mean = margin each direction is claimed in 5% of samples, and the interval covers in 95%."""
    draws, m = 2000, 0.3
    x = np.random.default_rng(0).normal(m, 2.0, (draws, 8))
    summaries = [summarize(row, m) for row in x]
    low, high = binomial_bounds(draws, ALPHA)
    assert low <= sum(s.p_above < ALPHA for s in summaries) <= high
    assert low <= sum(s.p_below < ALPHA for s in summaries) <= high
    low, high = binomial_bounds(draws, 0.95)
    assert low <= sum(s.low <= m <= s.high for s in summaries) <= high


def test_power_at_the_minimal_detectable_effect():
    """The mde of the true deviation is found in about 80% of samples; the usual formula errs by under 5%."""
    n, draws = 8, 2000
    mde = (stats.t.ppf(0.95, n - 1) + stats.t.ppf(0.8, n - 1)) / math.sqrt(n)
    x = np.random.default_rng(1).normal(mde, 1.0, (draws, n))
    found = np.mean([summarize(row, 0.0).p_above < ALPHA for row in x])
    assert 0.75 < found < 0.88


def test_family_error_of_holm():
    """Four true null claims: some claim is supported in at most 5% of experiments."""
    draws = 500
    x = np.random.default_rng(2).normal(0.1, 1.0, (draws, 4, 8))
    wrong = sum(any(d.verdict == "supported" for d in decide(list(e), [0.1] * 4)) for e in x)
    assert wrong <= binomial_bounds(draws, ALPHA)[1]


def test_clear_samples_and_unclear_ones():
    tight = np.array([1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.02, 0.98])
    assert verdict(tight, 0.5) == "supported"
    assert verdict(tight - 1, 0.5) == "refuted"
    assert verdict(tight - 0.5, 0.5) == "inconclusive"
    assert verdict((tight - 1) * 100 + 0.5, 0.5) == "underpowered"


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan, 2.0], [math.inf] * 8, [1e308, -1e308] * 4])
def test_unusable_values_are_said_not_raised(values):
    (decision,) = decide([np.array(values)], [0.1])
    assert decision.verdict == "underpowered"
    assert decision.summary.note


def test_one_bad_claim_does_not_free_the_others():
    good = np.linspace(1, 2, 8)
    with_bad = decide([good, np.full(8, np.nan)], [0.1, 0.1])
    assert with_bad[0].p_above == 2 * summarize(good, 0.1).p_above


@given(st.lists(st.lists(number | st.just(math.nan), min_size=4, max_size=4), min_size=1, max_size=4))
def test_last_and_band_skip_what_was_not_measured(rows):
    curve = np.array(rows)
    finals = [([math.nan] + [x for x in row if x == x])[-1] for row in rows]
    np.testing.assert_array_equal(last(curve), finals)
    mean, low, high = band(curve)
    for t in range(4):
        seen = curve[:, t][~np.isnan(curve[:, t])]
        s = summarize(seen, 0.0)
        np.testing.assert_allclose([mean[t], low[t], high[t]], [s.mean, s.low, s.high], atol=1e-9)


def test_last_of_an_empty_curve():
    np.testing.assert_array_equal(last(np.zeros((2, 0))), [np.nan, np.nan])
