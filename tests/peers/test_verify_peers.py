"""Every entry of the README's table of broken laws, computed again without the verifier: the peer's own number on the
counterexample, the right one by a float64 loop, and that they differ."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from confirming import by_hand, doubt, theirs
from lens import TARGETS, function_of
from lens_target import CORE, OPENRLHF

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import verify_peers  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
RECORD = json.loads(verify_peers.FINDINGS.read_text())
BY_ID = {target.id: target for target in TARGETS}
ids = lambda finding: f"{finding['target'].split(':')[-1]}-{finding['law']}"  # noqa: E731


@pytest.fixture(autouse=True)
def lenient():
    """Numbers that are not finite are what is looked for."""
    with jax.debug_nans(False), np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("finding", RECORD["findings"], ids=ids)
def test_an_entry_of_the_table(finding, peer):
    target, inputs, where = BY_ID[finding["target"]], finding["inputs"], finding["where"]
    wrong, right = theirs(function_of(target, peer), target, inputs, where), by_hand(target, inputs, where)
    np.testing.assert_allclose(wrong, float(finding["wrong"]), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(right, finding["right"], rtol=1e-4, atol=1e-9)
    assert doubt(wrong, "a finite number", right) == ""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.id.split(":")[-1])
def test_by_hand_it_is_what_the_peer_computes_on_ordinary_inputs(target, peer):
    """Otherwise a loop of another formula would find faults everywhere."""
    from jaxpt.verify.families import FAMILIES
    from jaxpt.verify.generators import draw
    from jaxpt.verify.target import parameters

    family = FAMILIES[target.family]
    function, size = function_of(target, peer), family.sizes[0]
    for x in ordinary(draw(family, size, 2, 3, parameters(function, family, target.family))):
        inputs = {k: v.tolist() for k, v in x.items()}
        shape = np.shape(target.by_hand(x, x))
        for position in np.ndindex(shape):
            if shape and "mask" in x and not x["mask"][position] > 0:
                continue
            where = "value" + "".join(f"[{i}]" for i in position)
            right = by_hand(target, inputs, where)
            np.testing.assert_allclose(theirs(function, target, inputs, where), right, rtol=2e-4, atol=2e-5)
        moving = [name for name, arg in family.args.items() if arg.moving and target.framework != "numpy"]
        for name in moving:
            where = f"gradient of {name}" + "[0]" * x[name].ndim
            right = by_hand(target, inputs, where)
            np.testing.assert_allclose(theirs(function, target, inputs, where), right, rtol=2e-3, atol=2e-4)


def ordinary(batch):
    """Single examples in which everything counts, all groups are of two, nothing is far out, no margin is asked for and no
    length is over its bound."""
    for i in range(len(next(iter(batch.values())))):
        plain = {"margin": np.zeros_like, **{k: np.ones_like for k in batch if k.endswith("mask")}}
        x = {k: plain.get(k, np.array)(v[i]) for k, v in batch.items()}
        if "group" in x:
            x["group"] = np.arange(len(x["group"])) // 2
        if "length" in x:
            x["length"] = np.minimum(x["length"], x["max_length"])
        yield x


@pytest.mark.parametrize("module", [CORE, OPENRLHF])
def test_with_global_counts_a_batch_of_which_nothing_counts_is_0(module, peer):
    nothing = peer("torch").zeros(1, 2)
    reduce = peer(module).agg_loss if module == CORE else peer(module).aggregate_loss
    how = ("token-mean",) if module == CORE else ()
    assert float(reduce(nothing + 1, nothing, *how, batch_num_tokens=4)) == 0
    assert np.isnan(float(reduce(nothing + 1, nothing, *how)))


def test_who_was_asked_is_still_there():
    asked = [about["target"] for about in RECORD["asked"]]
    assert asked == [target for target in BY_ID if target in asked]
