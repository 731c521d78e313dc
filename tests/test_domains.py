"""Text of several domains: its optimum against enumeration, and training with experts on it."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.data.domains import draw_rows, draw_tables, optimal_logp
from jaxpt.models import LoraConfig, ModelConfig, MoeConfig
from jaxpt.ops.sampling import row_keys
from jaxpt.train.domains import DomainsConfig, joint_counts, make_domains
from jaxpt.train.optim import OptimConfig

G, V, T = 2, 3, 4


def test_the_optimum_is_bayes_rule_over_all_sequences():
    tables = draw_tables(jax.random.key(0), G, V, 1.5)
    tokens = np.array(list(itertools.product(range(V), repeat=T)))
    p = np.asarray(tables, np.float64)
    whole = np.array([np.mean([np.prod([p[g, a, b] for a, b in itertools.pairwise(row)]) for g in range(G)]) / V for row in tokens])
    np.testing.assert_allclose(whole.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(np.exp(optimal_logp(tables, tokens).sum(1)), whole, rtol=1e-5)
    drawn, domain = draw_rows(tables, row_keys(jax.random.key(1), jnp.arange(4000)), T)
    seen = np.bincount(np.ravel_multi_index(np.asarray(drawn).T, (V,) * T), minlength=V**T) / 4000
    np.testing.assert_allclose(seen, whole, atol=4 * np.sqrt(whole.max() / 4000))
    assert abs(float(domain.mean()) - 0.5) < 0.04


def test_joint_counts_count():
    counts = joint_counts(jnp.array([1, 0, 1]), jnp.array([[[0, 2]], [[1, 2]], [[0, 1]]]), 2, 3)
    np.testing.assert_array_equal(counts, [[0, 1, 1], [2, 1, 1]])


MODEL = ModelConfig(vocab=6, d_model=8, n_layers=1, n_heads=1, d_ff=8, moe=MoeConfig(experts=4, top_k=2, bias=True))
CONFIG = DomainsConfig(
    model=MODEL, domains=G, window=12, batch=8, every=40, eval_rows=16, kill=True, other=1, optim=OptimConfig(learning_rate=1e-2)
)


def run(cfg, steps, start=None, **hyper):
    program = make_domains(cfg)
    state = program.init(jax.random.key(0), {k: jnp.float32(x) for k, x in (program.hyper | hyper).items()}, start)
    return jax.jit(lambda s: jax.lax.scan(lambda s, _: program.step(s), s, length=steps))(state)


@pytest.fixture(scope="module")
def trained():
    return run(CONFIG, 80)


@pytest.mark.slow
def test_experts_learn_the_text_and_the_bias_moves(trained):
    state, curves = trained
    assert curves["excess"][:5].mean() > curves["excess"][-5:].mean() + 0.1
    assert np.isnan(curves["held"][0]) and curves["held"][-1] < curves["held"][39]
    assert curves["held"][-1] == curves["held_leaky"][-1] and curves["held_other"][-1] > curves["held"][-1] + 0.2
    assert curves["killed"][-1] > curves["held"][-1] and 0 <= curves["information"][-1] < np.log(G) + 1e-3
    bias = np.asarray(state["params"]["layer_0"]["moe"]["bias"])
    steps = bias / 1e-3  # whole steps of the rate: nothing else has moved it
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-2)
    assert np.abs(steps).max() > 3 and np.all(curves["router_dropped"] == 0)


@pytest.mark.slow
def test_shares_of_a_batch_train_alike_and_a_frozen_base_stays(trained):
    """Without the balance losses, shares of a batch add up to it; adapters leave their base as it was."""
    whole, _ = run(replace(CONFIG, kill=False, other=None), 3, bias_rate=0.0)
    shared, _ = run(replace(CONFIG, kill=False, other=None, micro=2), 3, bias_rate=0.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), whole["params"], shared["params"])
    base = trained[0]["params"]
    cfg = replace(CONFIG, kill=False, world=1, other=0, every=20, model=replace(MODEL, lora=LoraConfig(rank=2)))
    state, curves = run(cfg, 40, start=base, bias_rate=0.0)
    jax.tree.map(np.testing.assert_array_equal, state["params"]["base"], base)
    assert curves["held"][-1] < trained[1]["held_other"][-1] and curves["held_other"][-1] > trained[1]["held"][-1]


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="window: got 1"):
        replace(CONFIG, window=1)
    with pytest.raises(ValueError, match="kill: expected a model with more experts"):
        replace(CONFIG, model=replace(MODEL, moe=None))
