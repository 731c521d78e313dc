"""What is often said and what is right of divergences, distillation and supervised learning: the numbers of jaxpt.errata,
computed.

Sums over all outcomes stand for expectations; everything is in 64 bits.
"""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from errata_numbers import noted_in

from jaxpt.envs import exact
from jaxpt.objectives import distillation, kl, supervised
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.reduction import totals_of
from jaxpt.train.expected import expected_gradient

COMPUTED = {}  # name of an erratum -> () -> [(said, right)], in the order of its numbers
computes = noted_in(COMPUTED)
ROWS = {row.name: row for table in (supervised, distillation) for row in table.ROWS}
P, Q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
REVERSE = float(P @ np.log(P / Q))


# --- divergences


@computes("k3_direction")
def k3_direction():
    said, right = P @ kl.k3(jnp.log(Q), jnp.log(P)), P @ kl.k3(jnp.log(P), jnp.log(Q))
    np.testing.assert_allclose(said, P @ (P / Q) - 1 - REVERSE)  # chi^2 - KL
    np.testing.assert_allclose(right, REVERSE)
    return [(said, right)]


@computes("k3_no_expansion")
def k3_no_expansion():
    return [(P @ kl.k2(jnp.log(P), jnp.log(Q)), P @ kl.k1(jnp.log(P), jnp.log(Q)))]


def pulled(*penalty):
    """A row without a reward: what it pulls towards is the reference alone."""
    return compose(
        "", "", advantage="monte_carlo", ratio="none", surrogate="score", reduction="sequence_sum",
        kl=Penalty(*penalty), hyper={"beta": 1.0},
    )


def leaves(tokens, node=None):
    """Responses of one length, without rewards; every decision is of node 0 unless said otherwise."""
    tokens = jnp.asarray(tokens)
    rows, width = tokens.shape
    node = jnp.zeros_like(tokens) if node is None else jnp.asarray(node)
    return exact.Leaves(tokens, jnp.ones(tokens.shape, bool), node, jnp.zeros(rows), jnp.full(rows, width))


@cache
def pulls():
    """Expected gradients by the logits of one decision of P; reference and expert are Q."""
    outcomes = leaves(np.arange(3)[:, None])

    @jax.jit
    def all_of(logits, other):
        def pull(row, **given):
            return expected_gradient(row, outcomes, logits, 1, **given).mean[0]

        def reverse(logits):
            logp, ref_logp = (exact.leaf_logp(table, outcomes)[:, 0] for table in (logits, other))
            return jnp.exp(logp) @ kl.k1(logp, ref_logp)

        rows = {name: pulled(name) for name in ("k1", "k2", "k3")}
        rows["k1_in_reward"] = pulled("k1", "own", "reward")
        return {name: pull(row, reference=other) for name, row in rows.items()} | {
            "reverse": jax.grad(reverse)(logits)[0],
            "sft": pull(ROWS["sft"], behaviour=other), "own samples": pull(ROWS["sft"]),
        }

    return jax.device_get(all_of(jnp.log(P)[None], jnp.log(Q)[None]))


@computes("k3_as_loss")
def k3_as_loss():
    pull = pulls()
    np.testing.assert_allclose(pull["k3"], P - Q)
    for right in ("k2", "k1_in_reward"):
        np.testing.assert_allclose(pull[right], pull["reverse"], atol=1e-12)
    return list(zip(pull["k3"], pull["reverse"]))


@computes("k1_as_loss")
def k1_as_loss():
    return list(zip(pulls()["k1"], pulls()["reverse"]))


@computes("kl_div_batchmean")
def kl_div_batchmean():
    @jax.jit
    def losses(tokens):
        student, teacher = (jnp.tile(jnp.log(x), (1, 10, 1)) for x in (P, Q))
        mask = jnp.arange(10)[None] < tokens
        by_tokens = totals_of(mask)
        by_rows = by_tokens | {"tokens": by_tokens["rows"]}
        names = ("forward_kl", by_rows), ("reverse_kl", by_tokens)
        return [ROWS[name].loss(student, teacher, mask, totals=totals)[0] for name, totals in names]

    return [losses(1), losses(10)]


# --- distillation and supervised learning


@computes("on_policy_distillation")
def on_policy_distillation():
    texts = leaves([[0, 0], [0, 1], [1, 0], [1, 1]], node=[[0, 1], [0, 1], [0, 2], [0, 2]])
    teacher = jnp.log(jnp.array([[0.5, 0.5], [0.98, 0.02], [0.02, 0.98]]))
    np.testing.assert_allclose(exact.leaf_prob(teacher, texts), [0.49, 0.01, 0.01, 0.49])

    @jax.jit
    def slopes(p, teacher):
        """By the student's probability p of A, of the two objectives, over all texts."""
        def slope(row, p, **given):
            table = jnp.tile(jnp.log(jnp.stack([p, 1 - p])), (3, 1))
            return expected_gradient(row, texts, table, 1, **given).mean[:, 0].sum()

        on_policy = pulled("k1", "own", "reward")
        return slope(ROWS["sft"], p[0], behaviour=teacher), slope(on_policy, p[1], reference=teacher)

    low, high = np.array([0.1, 0.6]), np.array([0.9, 1 - 1e-9])  # by symmetry 1/2 is no minimum of the second
    for _ in range(40):
        p = (low + high) / 2
        falls = np.array(slopes(p, teacher)) < 0
        low, high = np.where(falls, p, low), np.where(falls, high, p)
    return [tuple(2 * p * (1 - p))]


@computes("temperature_factor")
def temperature_factor():
    student, teacher = (jnp.log(x)[None, None] for x in (P, Q))
    mask = jnp.ones((1, 1), bool)

    @jax.jit
    def size(temperature):
        def loss(logits):
            return ROWS["kd"].loss(logits, teacher, mask, totals=totals_of(mask), temperature=temperature)[0]

        return jnp.linalg.norm(jax.grad(loss)(student))

    return [(size(10.0) / 10.0**2 / size(1.0), size(10.0) / size(1.0))]


@computes("anneal_end")
def anneal_end():
    def at(progress, decay):
        weight = decay**progress
        return 0.9 * weight + 0.1 * (1 - weight), distillation.annealed(100 * progress, 100, 0.9, 0.1, decay)

    for pair in (at(0.0, 0.9), at(0.0, 0.01)):
        np.testing.assert_allclose(pair, 0.9)
    return [at(1.0, 0.9), at(1.0, 0.01)]


@computes("teacher_information")
def teacher_information():
    teacher = np.full((4, 4), 0.01) + 0.96 * np.eye(4)
    permuted = np.roll(teacher, 1, axis=1)
    information = [np.sum(x / 4 * np.log(x / x.mean(0))) for x in (teacher, permuted)]
    np.testing.assert_allclose(*information)
    assert information[0] > 1
    return [tuple(sft_loss(np.log(np.diag(x))) for x in (teacher, permuted))]


def sft_loss(logp):
    """The sft row's loss of one token a row."""
    logp = jnp.atleast_1d(jnp.asarray(logp))[:, None]
    mask = jnp.ones(logp.shape, bool)
    return ROWS["sft"].loss(logp, logp, jnp.ones(logp.shape), mask, totals=totals_of(mask))[0]


@computes("sft_convex")
def sft_convex():
    ends = [sft_loss(jax.nn.log_sigmoid(jnp.float64(a * b))) for a, b in ((3, 3), (-3, -3))]
    assert ends[0] == ends[1]
    return [(sum(ends) / 2, sft_loss(jax.nn.log_sigmoid(jnp.float64(0.0))))]


@computes("sft_is_rl")
def sft_is_rl():
    np.testing.assert_allclose(pulls()["sft"], P - Q)
    return list(zip(pulls()["own samples"], pulls()["sft"]))


@computes("imitation_horizon")
def imitation_horizon():
    T, e = 8, 0.05
    errs = jnp.array(list(itertools.product((0, 1), repeat=T)))  # all ways to err, one decision at every step
    p = exact.leaf_prob(jnp.log(jnp.array([[1 - e, e]])), leaves(errs))
    lost = jax.lax.cummax(errs, axis=1)  # no way back
    assert max(p @ lost.sum(1), p @ errs.sum(1)) <= e * T**2
    return [(e * T**2, p @ lost.sum(1)), (e * T**2, p @ errs.sum(1))]
