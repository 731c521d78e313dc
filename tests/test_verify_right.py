"""No false alarm: right functions, whoever wrote them, break no law of mathematics and no contract that they claim.

Those in torch are in tests/peers/test_right_in_torch.py.
"""

import pytest
from verify_right import JAX, NUMPY

from jaxpt.verify import check

SEEDS = 5
RIGHT = {f"{right.framework}-{name}": right for table in (JAX, NUMPY) for name, right in table.items()}
QUICK = ("jax-kl", "jax-length_shaping", "numpy-dpo", "numpy-leave_one_out")


def accepted(right, seed, examples):
    check(right.fn, right.family, claim=right.claims, framework=right.framework, examples=examples, seed=seed).assert_ok()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", RIGHT)
def test_right_functions_break_no_law(name, seed):
    loops = name.startswith("numpy") and RIGHT[name].family == "policy_loss"  # slow, token by token
    accepted(RIGHT[name], seed, 12 if loops else 60)


@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize("name", QUICK)
def test_some_right_functions_break_no_law(name, seed):
    accepted(RIGHT[name], seed, 24)
