"""Does the default 95% interval cover the truth 95 times in 100? On runs that never were, at real sizes and lengths."""

import numpy as np
import pytest
from scaling_data import epoch
from scipy import stats

from jaxpt.scaling import chinchilla as ch
from jaxpt.scaling import uncertainty as un
from jaxpt.scaling.frontier import exponent

SETS, REFITS = 500, 400  # the command's 4000 refits give the same limits with less noise of their own


def quantities(params):
    """[...,3]: alpha, beta, a of N* ~ C^a."""
    return np.stack([params[..., 3], params[..., 4], exponent(params)], axis=-1)


@pytest.mark.slow
def test_coverage():
    """SETS tables of Epoch's 240 (N, D): the loss of the law fitted to them, times exp of residuals of that fit drawn
    with replacement. Shares covered must lie in the binomial 99% band around 95%.

    Measured, of alpha, beta and a: percentiles (the default) .964 .952 .960; basic .902 .918 .902; refits' standard
    error with Student's t .946 .948 .938; BCa .950 .938 .940; sandwich with t .926 .920 .926."""
    N, D, loss = epoch()
    real = ch.fit(ch.prepare(N, D, loss))
    rng, truth, covered = np.random.default_rng(0), quantities(real.params), []
    for seed in range(SETS):
        found = ch.fit(ch.prepare(N, D, ch.law(real.params, N, D) * np.exp(rng.choice(real.residuals, N.size))))
        limits = un.spread(quantities(un.refits(found, "case", REFITS, seed).params))
        covered.append((limits.low <= truth) & (truth <= limits.high))
    low, high = stats.binom.interval(0.99, SETS, 0.95)
    counts = np.sum(covered, axis=0)
    assert np.all((low <= counts) & (counts <= high)), counts / SETS
