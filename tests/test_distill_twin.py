"""When are a student's own texts worth more than the teacher's? An exact twin of Chain, where what is compared is a table.

Maps are bijections, so values can be renamed at every step such that the truth is 0 and a chain that goes on from a wrong
value k is at k again. States are (step, value); a slip replaces what is written by another value with probability SLIP, as
a student's own errors do. A teacher goes on from whatever stands there, or mends it.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpt.objectives.distillation import distribution, forward_kl, reverse_kl

STEPS, VALUES, SLIP = 5, 4, 0.1
SURE = 12.0  # logit of what a teacher writes
GOES_ON = SURE * jnp.tile(jnp.eye(VALUES), (STEPS, 1, 1))
MENDS = SURE * jnp.tile(jnp.eye(VALUES)[:1], (STEPS, VALUES, 1))


def slipping(slip):
    """[values, values]: what is written, given what was meant."""
    return (1 - slip) * jnp.eye(VALUES) + slip * (1 - jnp.eye(VALUES)) / (VALUES - 1)


def visits(logits, slip):
    """[steps + 1, values]: how likely each value stands before each step and at the end; logits[step, value] decide."""
    before = [jax.nn.one_hot(0, VALUES)]
    for table in jax.nn.softmax(logits, axis=-1):
        before.append(before[-1] @ table @ slipping(slip))
    return jnp.stack(before)


def distilled(teacher, divergence, on_policy):
    """The table, uniform at first, after descent on the exact expectation of the divergence over states that are visited:
    by a teacher that never errs, or by itself with its slips."""

    def loss(logits):
        there = jax.lax.stop_gradient(visits(logits, SLIP)) if on_policy else visits(100 * teacher, 0.0)
        return jnp.sum(there[:-1] * divergence(distribution(logits), distribution(teacher)))

    adam = optax.adam(0.1)

    def one(carry, _):
        logits, opt = carry
        updates, opt = adam.update(jax.grad(loss)(logits), opt)
        return (logits + updates, opt), None

    start = jnp.zeros((STEPS, VALUES, VALUES))
    return jax.jit(lambda: jax.lax.scan(one, (start, adam.init(start)), length=600)[0][0])()


def closed(back):
    """P(right) after 1 .. STEPS steps of who goes right from the truth, and from elsewhere with probability `back`."""
    right, out = 1.0, []
    for _ in range(STEPS):
        meant = right + (1 - right) * back
        right = meant * (1 - SLIP) + (1 - meant) * SLIP / (VALUES - 1)
        out.append(right)
    return np.array(out)


def test_visits_are_the_sum_over_all_texts():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, VALUES, VALUES)))
    p, slips = jax.nn.softmax(logits, axis=-1), np.asarray(slipping(SLIP))
    total = np.zeros(VALUES)
    for meant in itertools.product(range(VALUES), repeat=3):
        for written in itertools.product(range(VALUES), repeat=3):
            chance = 1.0
            for step, (at, m, w) in enumerate(zip((0, *written[:-1]), meant, written, strict=True)):
                chance *= float(p[step, at, m]) * slips[m, w]
            total[written[-1]] += chance
    np.testing.assert_allclose(visits(logits, SLIP)[-1], total, rtol=1e-5)


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl])
def test_own_texts_pay_where_the_teacher_mends_errors_and_cost_where_it_goes_on(divergence):
    """Off-policy the table stays uniform where the teacher never is; on-policy it learns what the teacher does there. That
    keeps the error flat where the teacher mends it. Where it goes on, as in Chain, errors become certain to stay."""
    right = {}
    for name, teacher, back in (("mends", MENDS, 1.0), ("goes on", GOES_ON, 0.0)):
        for on_policy in (False, True):
            got = visits(distilled(teacher, divergence, on_policy), SLIP)[1:, 0]
            np.testing.assert_allclose(got, closed(back if on_policy else 1 / VALUES), atol=4e-3)
            right[name, on_policy] = np.asarray(got)
    growth = {key: x[0] - x[-1] for key, x in right.items()}
    assert growth["mends", True] < 0.01 < 0.1 < growth["mends", False] < growth["goes on", True]
