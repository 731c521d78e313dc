"""Public faults of preference losses, as numbers: what jaxpt gives, and beside it what the report saw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.objectives.preference import ROWS as PAIRED
from jaxpt.objectives.preference_parts import log1mexp
from jaxpt.objectives.unpaired import ROWS as UNPAIRED

ROWS = {row.name: row for row in (*PAIRED, *UNPAIRED)}
TESTED = ("dpo", "ipo", "ipo_sum", "orpo", "simpo", "discopop", "cdpo", "robust_dpo", "exo", "aot", "aot_unpaired")


def response(total, tokens, width=20):
    """A response of so many tokens whose values sum to `total`: (values, mask), [1,width] each."""
    mask = np.arange(width)[None] < tokens
    return jnp.asarray(np.where(mask, total / max(tokens, 1), np.nan), jnp.float32), jnp.asarray(mask)


def pair(chosen, rejected):
    """A batch of one pair, (sum of log-ratios, tokens) each, against a reference at 0."""
    (c, cm), (r, rm) = response(*chosen), response(*rejected)
    zero = jnp.zeros_like(c)
    return dict(
        chosen_logp=c, rejected_logp=r, chosen_mask=cm, rejected_mask=rm, ref_chosen_logp=zero, ref_rejected_logp=zero
    )


@jax.jit
def program(batch, hyper):
    """{row: ((value, metrics), gradients by the logp of both responses)}"""
    def one(row, constants):
        def loss(logp):
            return row.loss(**{**batch, **logp}, **row.prepare(batch, **constants), **constants)

        return jax.value_and_grad(loss, has_aux=True)({k: batch[k] for k in ("chosen_logp", "rejected_logp")})

    return {name: one(ROWS[name], constants) for name, constants in hyper.items()}


def evaluate(name, batch, **hyper):
    """(value, metrics, gradients) of a paired row."""
    constants = {row: {k: hyper.get(k, v) for k, v in ROWS[row].hyper.items()} for row in TESTED}
    (value, metrics), grads = program(batch, constants)[name]
    return value, metrics, grads


@jax.jit
def kto(batch):
    row = ROWS["kto"]
    return row.loss(**batch, **row.prepare(batch))


def test_ipo_does_not_depend_on_length():
    """TRL #1265, #1677; torchtune #1291; OpenRLHF's and oat's IPO: sums gave 1.0 where means give 22.09."""
    batch = pair((2.0, 10), (-2.0, 20))
    np.testing.assert_allclose(evaluate("ipo", batch)[0], 22.09, rtol=1e-5)
    np.testing.assert_allclose(evaluate("ipo_sum", batch)[0], 1.0, rtol=1e-5)


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("lengths", [(0, 20), (10, 0), (0, 0)])
def test_a_fully_truncated_response_is_no_nan(name, lengths):
    """TRL #1033: a completion of no tokens made IPO's mean 0/0. Here the pair is none: 0, no gradient."""
    batch = pair((-2.0, lengths[0]), (-3.0, lengths[1]))
    value, metrics, grads = evaluate(name, batch)
    assert value == 0 and all(pair == (0, 0) for pair in metrics.values())
    assert all((g == 0).all() for g in grads.values())


def test_kto_without_mismatched_pairs_has_no_nan():
    """TRL #1380, #1402: the mean of no mismatched pairs. Here the reference point is then 0."""
    logp, mask = response(-2.0, 10)
    zero = jnp.zeros_like(logp)
    batch = dict(logp=logp, mask=mask, ref_logp=zero, desirable=jnp.ones(1))
    batch |= dict(kl_logp=logp, kl_ref_logp=zero, kl_mask=mask & False)
    value, metrics = kto(batch)
    assert metrics["point"] == (0, 1)
    np.testing.assert_allclose(value, 1 - 1 / (1 + np.exp(0.2)), rtol=1e-5)


def test_kto_s_point_is_of_the_whole_batch_not_of_a_share():
    """TRL #1380: means of ranks are averaged; here shares of 1 and 3 rows are pooled, then divided."""
    z, width = jnp.asarray([4.0, 0.0, 0.0, 0.0]), 2
    logp = jnp.broadcast_to(z[:, None] / width, (4, width))
    ones = jnp.ones((4, width), bool)
    batch = dict(logp=logp, mask=ones, ref_logp=0 * logp, desirable=jnp.ones(4))
    batch |= dict(kl_logp=logp, kl_ref_logp=0 * logp, kl_mask=ones)
    shares = jnp.stack([ones & (jnp.arange(4) == 0)[:, None], ones & (jnp.arange(4) > 0)[:, None]])

    def prepare(share, **total):
        return ROWS["kto"].prepare({**batch, "kl_mask": share}, **total)["point"]

    pooled = jax.jit(jax.vmap(lambda share: prepare(share, total=lambda tree: jax.lax.psum(tree, "ranks")), axis_name="ranks"))
    assert pooled(shares).tolist() == [1.0, 1.0] and jax.jit(prepare)(ones) == 1.0
    assert jax.jit(jax.vmap(prepare))(shares).mean() == 2.0  # what the mean of the ranks' means would be


def test_kto_drops_no_row_silently():
    """TRL's KTO takes a nanmean: a row that is NaN vanishes. Here it is seen, unless its mask leaves it out."""
    logp = jnp.asarray([[-1.0], [jnp.nan]])
    batch = dict(logp=logp, ref_logp=0 * jnp.ones_like(logp), desirable=jnp.ones(2), kl_logp=logp * 0, kl_ref_logp=logp * 0)
    batch |= dict(mask=jnp.ones((2, 1), bool), kl_mask=jnp.zeros((2, 1), bool))
    assert jnp.isnan(kto(batch)[0])
    assert jnp.isfinite(kto({**batch, "mask": jnp.asarray([[True], [False]])})[0])


def test_orpo_s_odds_are_of_mean_probabilities():
    """Tunix's ORPO: sums of logps (-10, -20 over 10 tokens) gave log-odds of 10."""
    _, metrics, _ = evaluate("orpo", pair((-10.0, 10), (-20.0, 10)))
    np.testing.assert_allclose(metrics["chosen_reward"][0] - metrics["rejected_reward"][0], 1.31326, rtol=1e-5)


def test_orpo_near_certainty():
    """TRL #1473, #2564, #3237, #4763; axolotl #3910: log1p(-exp(x)) is -inf at x = -1e-9 in float32."""
    np.testing.assert_allclose(log1mexp(jnp.float32(-1e-9)), -20.7233, rtol=1e-5)
    for certain in (-1e-9, 0.0, 1e-6):
        for batch in (pair((certain, 1), (-1.0, 4)), pair((-1.0, 4), (certain, 1))):
            value, _, grads = evaluate("orpo", batch)
            assert jnp.isfinite(value) and all(jnp.isfinite(g).all() for g in grads.values())


def test_log1mexp_keeps_its_digits():
    x = np.float32([-1e-8, -1e-4, -0.5, -0.6931, -0.6932, -2.0, -30.0, -100.0])
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(log1mexp)))(x)
    x = x.astype(np.float64)
    expected = np.where(x > -1, np.log(-np.expm1(x)), np.log1p(-np.exp(x)))
    np.testing.assert_allclose(value, expected, rtol=2e-6, atol=1e-37)  # below lies what float32 flushes to 0
    np.testing.assert_allclose(slope, 1 / -np.expm1(-x), rtol=1e-5, atol=1e-37)


def test_simpo_has_no_likelihood_term():
    """TRL's CPO trainer adds the chosen likelihood to SimPO unless cpo_alpha is set to 0; the paper does not."""
    batch = pair((-10.0, 10), (-20.0, 10))
    np.testing.assert_allclose(evaluate("simpo", batch)[0], np.log1p(np.exp(-(2.0 * 1.0 - 1.0))), rtol=1e-5)


def test_smoothing_is_never_ignored():
    """TRL's sigmoid takes a label_smoothing and leaves it unused; here the rows that have it depend on it."""
    batch = pair((1.0, 10), (-1.0, 10))
    for name in ("cdpo", "robust_dpo", "exo", "aot", "aot_unpaired"):
        assert evaluate(name, batch, label_smoothing=0.2)[0] != evaluate(name, batch, label_smoothing=0.3)[0]
    with pytest.raises(TypeError, match="row 'dpo' has no constant 'label_smoothing'"):
        ROWS["dpo"].prepare(batch, label_smoothing=0.1)


def test_discopop_does_not_overflow():
    """exp(-h) alone is inf at h = -1000 and its weight 0: inf * 0 (TRL's form). The loss there is the logistic one."""
    batch = pair((-10000.0, 10), (10000.0, 10))
    value, _, grads = evaluate("discopop", batch)
    np.testing.assert_allclose(value, 1000.0, rtol=1e-5)
    np.testing.assert_allclose(grads["chosen_logp"][0, :10], -0.05, rtol=1e-5)
