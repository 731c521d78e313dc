"""scripts/verify_power.py: planted changes of the sources, seen by laws alone or not."""

import sys
from functools import partial
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import verify_power  # noqa: E402
from mutation import sites, targets, world  # noqa: E402

FEW = ("kl.k3", "kl.k1", "advantages.standardised", "bradley_terry: reward_model")


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(jax, "jit", partial(world.interpreted, jax.jit))
    monkeypatch.setattr(sys, "meta_path", [world.Source, *sys.meta_path])
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    base = world.World()
    with base.inside():
        wired = {name: w for name, w in targets.table().items() if name in FEW}
    return verify_power.Original(base, wired, {name: verify_power.entered(base, w) for name, w in wired.items()}, {}, {})


def change(file, before, after, line=0):
    """A change of the sources, which need not be one of the operators'."""
    source = (sites.ROOT / file).read_bytes()
    assert source.count(before.encode()) == 1
    start = source.index(before.encode())
    function = next(s.function for s in sites.sites(file) if s.start >= start)
    return sites.Site(file, line, 0, "planted", before, after, start, start + len(before.encode()), function)


@pytest.mark.parametrize("file, before, after, verdict, law", [
    ("kl.py", "return exp_excess(ref_logp - logp)", "return exp_excess(logp - ref_logp)", "killed", "unbiased"),
    ("kl.py", "return exp_excess(ref_logp - logp)", "return 1.5 * exp_excess(ref_logp - logp)", "killed", "kl_expectation"),
    ("reward.py", "return softplus(rejected - chosen)\n", "return softplus(-(chosen - rejected))\n", "equivalent", ""),
    ("kl.py", "return logp - ref_logp\n", "return -(ref_logp - logp)\n", "unmoved", ""),  # no row's corner inputs were asked
    ("advantages.py", "return safe_div(at.place * at.spread, std * at.spread + std_eps)",
     "return safe_div(at.place * at.spread, 1.1 * std * at.spread + std_eps)", "killed by more", "unit_deviation"),
    ("reward.py", '"gap": weighed(gap, mask)', '"gap": weighed(-gap, mask)', "unmoved", ""),
    ("lengths.py", "return -lam * length\n", "return lam * length\n", "no family", ""),
])
def test_planted_changes(known, file, before, after, verdict, law):
    record = verify_power.judged(change(f"jaxpt/objectives/{file}", before, after), known)
    assert record["verdict"] == verdict, record
    assert not law or law in record["laws"]


def test_no_law_complains_without_a_change(known):
    for name, wired in known.wired.items():
        laws, stated = verify_power.held(known, name)
        assert verify_power.broken(known.base, wired, laws) == [] and set(stated) <= set(laws)
        assert {"same_twice", "precision"} <= set(stated) and set(wired.claims) <= set(stated), name


def test_the_summary_counts_what_is_asked_and_what_is_not():
    said = verify_power.summary([{"verdict": v, "laws": [], "stated": []} for v in verify_power.VERDICTS])
    assert "of the 3 that" in said and "0.33 killed by what is stated, 0.67 by all" in said
    assert "of these and the 2 that nothing sees: 0.20" in said and "afterwards: 0.00" in said
