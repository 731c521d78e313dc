"""The rows of other libraries' objectives, without these libraries: what holds for ours at the edges holds for them.

That they are what the libraries compute is in tests/peers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.objectives import ROWS, peer_pairs, peers
from jaxpt.objectives.describe import describe, difference, formula
from jaxpt.objectives.reduction import prompt_tokens_of, totals_of

B, T = 6, 5
GROUP = np.arange(B) // 2
ARGS = ("logp", "old_logp", "advantages", "ref_logp")
PEERS = {row.name: row for row in peers.ROWS if not row.alias_of}


def one(row, batch, totals):
    def loss(arrays):
        offered = {"ref_logp": arrays["ref_logp"], "prompt_tokens": batch["prompt_tokens"]}
        extra = {k: v for k, v in offered.items() if k in row.needs}
        return row.loss(arrays["logp"], arrays["old_logp"], arrays["advantages"], batch["mask"], totals=totals, **extra)[0]

    return jax.value_and_grad(loss)({k: batch[k] for k in ARGS})


@jax.jit
def battery(batch, totals):
    return {name: one(row, batch, totals) for name, row in PEERS.items()}


def run(batch, of=None):
    """On the batch, with the totals of `of`, the whole that it is a part of."""
    whole = batch if of is None else of
    tokens = prompt_tokens_of(jnp.asarray(whole["mask"]), jnp.asarray(GROUP))
    return jax.device_get(battery({**batch, "prompt_tokens": tokens}, totals_of(jnp.asarray(whole["mask"]), tokens)))


def draw(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < 0.8
    mask[rng.integers(B)] = False
    logp = rng.normal(-1, 0.5, (B, T)).clip(max=-0.01)
    moved = {k: logp + rng.normal(0, 0.3, (B, T)) for k in ("old_logp", "ref_logp")}
    batch = {"logp": logp, **moved, "advantages": rng.normal(size=(B, T))}
    return {**{k: np.float32(v) for k, v in batch.items()}, "mask": mask}, rng


@pytest.mark.parametrize("seed", range(5))
def test_what_stands_at_masked_slots_is_not_looked_at(seed):
    batch, rng = draw(seed)
    poison = rng.choice(np.float32([np.nan, np.inf, -np.inf, 1e30]), (B, T))
    dirty = {k: np.where(batch["mask"], batch[k], poison) for k in ARGS}
    clean, got = run(batch), run({**dirty, "mask": batch["mask"]})
    jax.tree.map(np.testing.assert_array_equal, clean, got)
    for _, grads in got.values():
        assert all((g[~batch["mask"]] == 0).all() for g in grads.values())


def test_partitions_add_up():
    """Except where a row says that it is not additive: then, on some batch, they do not."""
    torn = set()
    for seed in range(5):
        batch, rng = draw(seed)
        part = rng.permutation([0, 0, 0, 1, 1, 2])
        shares = [run({**batch, "mask": batch["mask"] & (part == k)[:, None]}, of=batch) for k in range(3)]
        added = jax.tree.map(lambda *x: sum(np.float64(y) for y in x), *shares)
        for name, whole in run(batch).items():
            near = jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-4, atol=1e-6), added[name], whole)
            torn |= set() if all(jax.tree.leaves(near)) else {name}
    assert torn == {name for name, row in PEERS.items() if not row.additive}


@pytest.mark.parametrize("drift", [30.0, 1e4])
def test_extreme_log_ratios_are_finite(drift):
    batch, rng = draw(7)
    sign = np.float32(rng.choice([-1, 1], (B, T)))
    for old, ref in ((drift, 0), (0, drift)):
        moved = {**batch, "old_logp": batch["logp"] + sign * old, "ref_logp": batch["logp"] + sign * ref}
        for name, (value, grads) in run({k: np.asarray(v, batch[k].dtype) for k, v in moved.items()}).items():
            assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads.values()), name


def test_constants_get_no_gradient_and_nothing_is_zero():
    batch, _ = draw(3)
    for _, grads in run(batch).values():
        for constant in ("old_logp", "advantages", "ref_logp"):
            np.testing.assert_array_equal(grads[constant], 0)
    for value, grads in run({**batch, "mask": np.zeros((B, T), bool)}).values():
        assert value == 0 and all((g == 0).all() for g in grads.values())


def test_no_two_names_have_one_formula():
    """A formula is made of the parts that are computed, so what reads the same is the same; aliases say so."""
    seen = {}
    for row in ROWS.values():
        if not row.alias_of:
            seen.setdefault((row.family, formula(row)), []).append(row.name)
    assert [names for names in seen.values() if len(names) > 1] == []
    for row in (*peers.ROWS, *peer_pairs.ROWS):
        if row.alias_of:
            assert not ROWS[row.alias_of].alias_of
            assert (row.hyper, formula(row)) == (ROWS[row.alias_of].hyper, formula(ROWS[row.alias_of]))


def test_how_peers_differ_is_said():
    text = difference("grpo", "trl.grpo")
    assert "std_eps: 0 against 0.0001" in text and "empty" in text and "beta: 0.04 against absent" in text
    assert "github.com/volcengine/verl" in describe("verl.grpo")
