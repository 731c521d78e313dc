"""The updates of fine-tuning, without a folder: shares of batches, adapters, order, places of answers, layers in a scan."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.models import LoraConfig, ModelConfig, make_model, stack_layers, unstack_layers
from jaxpt.ops.sampling import greedy, sampler
from jaxpt.rollout import complete
from jaxpt.train import finetune as tuning

CFG = ModelConfig(vocab=259, d_model=16, n_layers=1, n_heads=2)
ADAPTED = replace(CFG, lora=LoraConfig(rank=2))


@pytest.fixture(scope="module")
def drawn():
    return jax.jit(make_model(CFG).init)(jax.random.key(0))


def test_shares_of_a_batch_add_up(drawn):
    tokens, mask = tuning.responses([[5, 6]] * 5, [[7, 8, 9], [7, 8], [1], [2, 2, 2, 2], [3]], 8)
    other, other_mask = tuning.responses([[5, 6]] * 5, [[9], [8, 7], [4], [5, 5], [6, 7, 8]], 8)
    pairs = {"chosen": tokens, "chosen_mask": mask, "rejected": other, "rejected_mask": other_mask}
    whole, parts = (tuning.FinetuneConfig(model=ADAPTED, method="dpo", objective="dpo", micro=micro) for micro in (0, 2))
    results = []
    for cfg in (whole, parts):
        frozen, state = tuning.begin(cfg, jax.random.key(1), drawn)
        state["trained"] = jax.tree.map(lambda x: x + 0.1, state["trained"])  # no longer the reference
        results.append(jax.jit(partial(tuning.update, cfg))(frozen, state, jax.tree.map(jnp.asarray, pairs)))
    (one, metrics), (two, shared) = results
    assert metrics["loss"] != pytest.approx(np.log(2), abs=1e-4)
    for name in ("loss", "accuracy", "grad_norm"):
        assert metrics[name] == pytest.approx(float(shared[name]), rel=1e-4), name
    for a, b in zip(*(jax.tree.leaves(state["opt"][1].mu) for state in (one, two)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(a).max())


@pytest.mark.parametrize("micro, each, window", [(0, 3, None), (0, 3, 4), (2, 1, None)])
def test_completions_are_scored_at_their_own_places(drawn, micro, each, window):
    """Two prompts, three completions each, beside the statistics of every place of plain rows: the same at decisions, value
    and gradient, and 0 in front of and behind them."""
    model = replace(CFG, window=window)
    cfg = tuning.FinetuneConfig(model=model, method="grpo", objective="grpo", new=4, temperature=0.7, group=3, micro=micro)
    assert tuning.completions_per_row(cfg, 8) == each
    n, length = np.repeat([3, 8], 3)[:, None], np.array([7, 6, 4, 12, 8, 11])[:, None]  # one of them says nothing
    tokens = jax.random.randint(jax.random.key(1), (6, 12), 0, 259)
    tokens = jnp.where(np.arange(12)[None] < n, tokens[np.repeat([0, 3], 3)], tokens)
    here = jnp.asarray((np.arange(12)[None] >= n) & (np.arange(12)[None] < length))

    def both(first, params):
        found = tuning._stats(cfg, make_model(model), params, ("logp", "entropy"), tokens, first)
        return sum(jnp.where(here, x, 0).sum() * rate for x, rate in zip(found.values(), (1.0, 0.3), strict=True)), found

    run = lambda first: jax.jit(jax.value_and_grad(partial(both, first), has_aux=True))(drawn)  # noqa: E731
    ((_, ours), slope), ((_, whole), expected) = run(jnp.asarray(n[:, 0])), run(None)
    for name, x in ours.items():
        np.testing.assert_allclose(x[here], whole[name][here], atol=1e-5)
    assert not ours["logp"][0, 7:].any() and not ours["logp"][3, :8].any() and (whole["logp"][0, 5:] < 0).all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), slope, expected)


@pytest.mark.parametrize("width, new, group, micro, each", [
    (512, 8, 8, 0, 8), (512, 8, 8, 4, 4), (512, 8, 6, 4, 2), (8, 512, 8, 0, 1), (512, 8, 1, 0, 1)])
def test_completions_share_a_row_where_that_costs_less(width, new, group, micro, each):
    cfg = tuning.FinetuneConfig(model=CFG, method="grpo", objective="grpo", new=new, group=group, micro=micro)
    assert tuning.completions_per_row(cfg, width) == each


@pytest.mark.parametrize("group, micro", [(4, 4), (4, 5), (2, 8), (1, 2)])
def test_shares_of_groups_add_up(drawn, group, micro):
    """Of 12 rows or 3: whole groups, parts of them, and shares that rows of zeros fill."""
    whole = tuning.FinetuneConfig(model=ADAPTED, method="grpo", objective="grpo", new=3, group=group)
    frozen, state = tuning.begin(whole, jax.random.key(1), drawn)
    state["trained"] = jax.tree.map(lambda x: x + 0.1, state["trained"])  # no longer the reference
    prompts, n = jax.random.randint(jax.random.key(2), (3, 16), 4, 259), jnp.array([16, 9, 1])
    keys = jax.random.split(jax.random.key(3), 3 * group)
    batch = jax.jit(partial(tuning.sample, whole))(frozen, state["trained"], prompts, n, keys)
    batch = batch._replace(reward=jnp.arange(3.0 * group) ** 2 % 5)
    results = [jax.jit(partial(tuning.update, replace(whole, micro=size)))(frozen, state, batch) for size in (0, micro)]
    (one, metrics), (two, shared) = results
    for name in ("loss", "entropy", "kl", "grad_norm"):
        assert metrics[name] == pytest.approx(float(shared[name]), rel=1e-4, abs=1e-6), name
    assert metrics["grad_norm"] > 1e-3  # of a group of one too, by its KL
    for a, b in zip(*(jax.tree.leaves(state["opt"][1].mu) for state in (one, two)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(a).max(), 1e-6))


def test_a_scan_s_layers_are_apart_when_they_decode():
    deep = replace(ADAPTED, n_layers=3)
    one, two = (tuning.FinetuneConfig(model=replace(deep, scan=scan), method="grpo", objective="grpo", new=6) for scan in (False, True))
    params = jax.jit(make_model(replace(deep, lora=None)).init)(jax.random.key(0))
    frozen, state = tuning.begin(two, jax.random.key(1), stack_layers(params))
    b = jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), state["trained"])
    apart = {"lora": unstack_layers(b["lora"])}, frozen | {"base": unstack_layers(frozen["base"])}
    prompts, n = jnp.array([[4, 5, 6], [7, 8, 0]]), jnp.array([3, 2])
    keys = jax.random.split(jax.random.key(3), 16)
    ours, theirs = tuning.sample(two, frozen, b, prompts, n, keys), tuning.sample(one, apart[1], apart[0], prompts, n, keys)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.old_logp, theirs.old_logp, atol=1e-5)
    params = tuning.whole_params(two, frozen, b)
    now = tuning._stats(two, make_model(two.model), params, ("logp",), ours.tokens, jnp.repeat(n, 8))["logp"]
    np.testing.assert_allclose(now[ours.mask], ours.old_logp[ours.mask], atol=1e-4)


def test_adapters_leave_nothing_of_the_base_in_the_state(drawn):
    cfg = tuning.FinetuneConfig(model=ADAPTED)
    frozen, state = tuning.begin(cfg, jax.random.key(0), drawn)
    assert set(frozen) == {"base", "alpha", "rank"} and set(state["trained"]) == {"lora"}
    assert max(x.size for x in jax.tree.leaves(state)) < CFG.vocab * CFG.d_model


@pytest.mark.parametrize("rows, batch", [(7, 3), (5, 5), (3, 8), (1, 4)])
def test_every_epoch_goes_through_all_rows_once(rows, batch):
    key = jax.random.key(3)
    drawn = np.concatenate([tuning.order(key, step, batch, rows) for step in range(rows)])
    for epoch in drawn.reshape(batch, rows):
        assert sorted(epoch) == list(range(rows))
    np.testing.assert_array_equal(tuning.order(key, rows - 1, batch, rows), drawn[-batch:])
    if rows == 7:
        assert len({tuple(epoch) for epoch in drawn.reshape(batch, rows)}) > 1


def test_responses_are_masked_by_place():
    tokens, mask = tuning.responses([[4, 5], [], [6]], [[0, 7], [8, 9], [5, 5]], 6)
    np.testing.assert_array_equal(tokens, [[4, 5, 0, 7, 0, 0], [8, 9, 0, 0, 0, 0], [6, 5, 5, 0, 0, 0]])
    np.testing.assert_array_equal(mask, [[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]])


def test_which_rows_a_method_can_follow():
    assert tuning.objectives("sft") == ["sft"]
    assert {"grpo", "grpo_no_kl", "dr_grpo", "rloo", "gspo"} <= set(tuning.objectives("grpo"))
    assert not {"sft", "ppo", "dapo", "dpo", "kto"} & set(tuning.objectives("grpo"))
    assert {"dpo", "ipo", "simpo"} <= set(tuning.objectives("dpo")) and "wpo" not in tuning.objectives("dpo")
    with pytest.raises(ValueError, match="whole batches"):
        tuning.FinetuneConfig(model=CFG, method="dpo", objective="aot", micro=2)


def test_a_probe_is_the_most_probable_text_and_a_drawn_one(drawn):
    cfg = tuning.FinetuneConfig(model=CFG, method="grpo", objective="grpo", new=5, temperature=0.8)
    prompts, n, keys = jnp.array([[4, 5, 6], [7, 8, 0]]), jnp.array([3, 2]), jax.random.split(jax.random.key(1), 4)
    found, other = (tuning.probe(cfg, {}, drawn, prompts, n, k) for k in (keys, jax.random.split(jax.random.key(2), 4)))
    greedily = complete(make_model(CFG), drawn, prompts, n, keys[:2], greedy, new=5)
    freely = complete(make_model(CFG), drawn, prompts, n, keys, sampler(0.8), new=5, group=2)
    np.testing.assert_array_equal(found.tokens[::2], greedily.tokens)
    np.testing.assert_array_equal(found.tokens[1::2], freely.tokens[1::2])
    np.testing.assert_array_equal(found.tokens[::2], other.tokens[::2])
    assert (np.asarray(found.tokens[1::2]) != other.tokens[1::2]).any()
