"""The museum: public faults of loss code, written anew as small functions. The verifier rejects each by the law
meant, with a small counterexample, and accepts the function put right under the same claims."""

import functools
import statistics

import exhibits_advantages
import exhibits_kl
import exhibits_logits
import exhibits_pairs
import exhibits_policy
import exhibits_sums
import numpy as np
import pytest

from jaxpt.verify import check
from jaxpt.verify.families import FAMILIES

pytestmark = pytest.mark.museum
ROOMS = (exhibits_sums, exhibits_advantages, exhibits_policy, exhibits_kl, exhibits_pairs, exhibits_logits)
EXHIBITS = {exhibit.wrong.__name__: exhibit for room in ROOMS for exhibit in room.EXHIBITS}
EXAMPLES = 48


@functools.cache
def verified(fn, family, claim, framework, only=None):
    """One right function stands beside several wrong ones."""
    return check(fn, family, claim=claim, framework=framework, examples=EXAMPLES, only=only)


def outcome(fn, exhibit, only=None):
    """What the law that is meant says."""
    report = verified(fn, exhibit.family, exhibit.claim, exhibit.framework, only)
    return next(outcome for outcome in report.outcomes if outcome.law == exhibit.law)


def rejection(name):
    exhibit = EXHIBITS[name]
    return outcome(exhibit.wrong, exhibit, only=(exhibit.law,))


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_wrong_one_is_rejected_and_the_right_one_accepted(name):
    exhibit = EXHIBITS[name]
    assert rejection(name).status == "broken", f"{exhibit.report}: {exhibit.fault}"
    assert outcome(exhibit.right, exhibit).status == "holds"
    verified(exhibit.right, exhibit.family, exhibit.claim, exhibit.framework, None).assert_ok()


def size(name):
    """Sequences and tokens of the counterexample."""
    family = FAMILIES[EXHIBITS[name].family]
    first = next(iter(family.args))
    shape = np.shape(rejection(name).counterexample["inputs"][first])
    return shape[0], shape[1] if "T" in family.arg(first).axes else 1


def test_counterexamples_are_small():
    sequences, tokens = zip(*map(size, EXHIBITS), strict=True)
    assert statistics.median(sequences) <= 2 and statistics.median(tokens) <= 3


def test_no_exhibit_hides_another():
    assert len(EXHIBITS) == sum(len(room.EXHIBITS) for room in ROOMS)
