"""Peers' functions against ours: value and gradient on 200 random batches each, within 1e-5 relative.

One table, one test; and the same comparison with one constant of ours a little off, which must not hold.
"""

from functools import cache, partial

import cases_advantages
import cases_pairs
import cases_policy
import cases_terms
import jax
import pytest
from parity import Case, data, disagreement, jax_side, torch_side

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # the peers' own deprecations
]

CASES = [*cases_policy.CASES, *cases_advantages.CASES, *cases_terms.CASES, *cases_pairs.CASES]
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@cache
def theirs(case: int, peer):
    of = CASES[case]
    module, _, path = of.peer.partition(":")
    function = peer(module)
    for name in path.split("."):
        function = getattr(function, name)
    call = partial(of.call, function)
    if of.framework == "torch":
        return torch_side(call, data(of), of.wrt)
    return jax.device_get(jax.jit(lambda x: jax_side(call, x, of.wrt))(data(of)))


@cache
def ours(case: int):
    of = CASES[case]
    return jax.jit(lambda x, constants: jax_side(lambda batch: of.ours(batch, **constants), x, of.wrt))


def worst(case: int, peer, constants: dict) -> float:
    of = CASES[case]
    return disagreement(of, jax.device_get(ours(case)(data(of), of.given | constants)), theirs(case, peer))


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: CASES[i].id)
def test_equal_in_value_and_gradient(case, peer):
    of: Case = CASES[case]
    assert worst(case, peer, of.constants) < TOLERANCE
    for name, value in of.constants.items():  # and about that constant the comparison says something
        off = of.constants | {name: value * 1.1 + 1e-6}
        assert worst(case, peer, off) > TOLERANCE, name


def test_the_table_is_of_many_functions():
    assert len({(case.peer, case.mode) for case in CASES}) == len(CASES) >= 40
