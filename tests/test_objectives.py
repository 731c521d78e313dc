"""One battery over every row of the table, on value and gradient; one compiled program for all of them."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives import ROWS, TABLES, get
from jaxpt.objectives.describe import describe, difference, probe_batch
from jaxpt.objectives.reduction import totals_of
from jaxpt.types import Trajectory

B, T = 6, 5
seeds = st.integers(0, 2**31 - 1)
ARGS = ("logp", "old_logp", "advantages", "ref_logp")


def one(row, batch, totals):
    extra = {"ref_logp": batch["ref_logp"]} if "ref_logp" in row.needs else {}

    def loss(arrays):
        value, metrics = row.loss(
            arrays["logp"], arrays["old_logp"], arrays["advantages"], batch["mask"],
            totals=totals, **({"ref_logp": arrays["ref_logp"]} if extra else {}),
        )
        return value, metrics

    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)({k: batch[k] for k in ARGS})
    return value, grads, metrics


@jax.jit
def battery(batch, totals):
    return {name: one(row, batch, totals) for name, row in ROWS.items()}


def draw(seed, spread=0.3):
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0.4, 0.9, 1.0])
    mask[rng.integers(B)] = False
    logp = rng.normal(-1, 0.5, (B, T))
    batch = {
        "logp": logp, "old_logp": logp + rng.normal(0, spread, (B, T)), "ref_logp": logp + rng.normal(0, spread, (B, T)),
        "advantages": np.broadcast_to(rng.choice([-1.0, 0.0, 0.5, 2.0], (B, 1)), (B, T)),
    }
    return {**{k: v.astype(np.float32) for k, v in batch.items()}, "mask": mask}, rng


def run(batch):
    return battery(batch, totals_of(jnp.asarray(batch["mask"])))


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def k3(logp, ref):
    return np.exp(ref - logp) - 1 - (ref - logp)


def per_token(name, logp, old, ref, a):
    if name in ("sft", "reinforce", "rloo"):
        return -a * logp
    r = np.exp(logp - old)
    loss = -min(r * a, min(max(r, 0.8), 1.2) * a)
    return loss + (0.04 * k3(logp, ref) if name == "grpo" else 0)


def loop(name, batch):
    """The formula of each row, written as plain float64 loops."""
    total, rows, tokens = 0.0, 0, 0
    for i in range(B):
        kept = [t for t in range(T) if batch["mask"][i, t]]
        if not kept:
            continue
        losses = [per_token(name, *(float(batch[k][i, t]) for k in ("logp", "old_logp", "ref_logp", "advantages"))) for t in kept]
        total += np.mean(losses) if name.startswith("grpo") else sum(losses)
        rows, tokens = rows + 1, tokens + len(kept)
    return total / max(tokens if name == "sft" else rows, 1)


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    for name, (value, grads, _) in run(batch).items():
        np.testing.assert_allclose(value, loop(name, batch), rtol=1e-4, atol=1e-5, err_msg=name)


def test_gradient_against_finite_differences_of_the_loops():
    batch, _ = draw(3)
    for name, (_, grads, _) in run(batch).items():
        numeric = np.zeros((B, T))
        for at in np.ndindex(B, T):
            ends = []
            for h in (1e-5, -1e-5):
                moved = {**batch, "logp": batch["logp"].astype(np.float64)}
                moved["logp"][at] += h
                ends.append(loop(name, moved))
            numeric[at] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(grads["logp"], numeric, rtol=1e-3, atol=1e-5, err_msg=name)


@given(seed=seeds)
def test_poison_at_masked_slots(seed):
    batch, rng = draw(seed)
    poisoned = {
        k: np.where(batch["mask"], batch[k], rng.choice([np.nan, np.inf, -np.inf, 1e30], (B, T))).astype(np.float32)
        for k in ARGS
    }
    clean, dirty = run(batch), run({**poisoned, "mask": batch["mask"]})
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    for _, grads, _ in dirty.values():
        assert (np.asarray(grads["logp"])[~batch["mask"]] == 0).all()


@given(seed=seeds)
def test_partitions_add_up(seed):
    """With the totals of the whole, the losses and gradients of any two parts add up to the whole."""
    batch, rng = draw(seed)
    totals = totals_of(jnp.asarray(batch["mask"]))
    part = rng.random(B) < 0.5
    whole = battery(batch, totals)
    first = battery({**batch, "mask": batch["mask"] & part[:, None]}, totals)
    second = battery({**batch, "mask": batch["mask"] & ~part[:, None]}, totals)
    assert_same(jax.tree.map(lambda a, b: np.asarray(a) + np.asarray(b), first, second), whole, rtol=1e-4, atol=1e-5)


@given(seed=seeds)
def test_permutation_of_rows(seed):
    batch, rng = draw(seed)
    order = rng.permutation(B)
    whole, moved = run(batch), run({k: v[order] for k, v in batch.items()})
    for name in ROWS:
        assert_same(moved[name][0], whole[name][0])
        assert_same(moved[name][1]["logp"], np.asarray(whole[name][1]["logp"])[order])


@given(seed=seeds)
def test_declared_constants_get_no_gradient(seed):
    for _, grads, _ in run(draw(seed)[0]).values():
        for constant in ("old_logp", "advantages", "ref_logp"):
            np.testing.assert_array_equal(grads[constant], 0)


@given(seed=seeds)
def test_on_policy_the_gradient_is_reinforce(seed):
    """At logp = old_logp = ref_logp every row's gradient is -A / denominator of its own reduction."""
    batch, _ = draw(seed, spread=0.0)
    mask = batch["mask"]
    n = np.maximum(mask.sum(1, keepdims=True), 1)
    rows = max((mask.sum(1) > 0).sum(), 1)
    for name, (_, grads, _) in run(batch).items():
        denominator = {"sft": max(mask.sum(), 1), "grpo": rows * n, "grpo_no_kl": rows * n}.get(name, rows)
        np.testing.assert_allclose(grads["logp"], np.where(mask, -batch["advantages"] / denominator, 0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("drift", [20.0, 100.0, 1000.0])
def test_extreme_log_ratios_are_finite_and_never_flat(drift):
    batch, rng = draw(5)
    sign = rng.choice([-1, 1], (B, T))
    for old, ref in ((drift, 0), (0, drift), (drift, drift)):
        moved = {**batch, "old_logp": (batch["logp"] + sign * old).astype(np.float32),
                 "ref_logp": (batch["logp"] + sign * ref).astype(np.float32)}
        for name, (value, grads, metrics) in run(moved).items():
            assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads.values()), name
            if name == "grpo" and ref:  # the KL pulls back wherever the policy has drifted
                pull = np.asarray(grads["logp"])[batch["mask"] & (batch["advantages"] == 0)]
                assert (np.abs(pull) > 0).all()


def test_nothing_to_train_on_is_zero():
    batch, _ = draw(0)
    empty = {**batch, "mask": np.zeros((B, T), bool)}
    for value, grads, _ in run(empty).values():
        assert value == 0
        jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)


@given(seed=seeds)
def test_bfloat16_inputs_are_computed_in_float32(seed):
    batch, _ = draw(seed)
    half = {k: (jnp.asarray(v).astype(jnp.bfloat16) if k != "mask" else v) for k, v in batch.items()}
    back = {k: (np.asarray(v.astype(jnp.float32)) if k != "mask" else v) for k, v in half.items()}
    for name, (value, _, _) in run({k: v for k, v in half.items()}).items():
        np.testing.assert_allclose(np.float32(value), run(back)[name][0], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ROWS)
def test_prepare(name):
    """Advantages stand on trainable slots only; a row without them shifts no baseline."""
    traj, _ = probe_batch()
    ready = ROWS[name].prepare(traj)
    assert ready["advantages"].shape == traj.mask.shape
    np.testing.assert_array_equal(np.asarray(ready["advantages"])[~np.asarray(traj.mask)], 0)
    emptied = traj._replace(mask=traj.mask.at[0].set(False), reward=traj.reward.at[0].set(1e6))
    gone = traj._replace(mask=traj.mask.at[0].set(False), reward=traj.reward.at[0].set(jnp.nan))
    np.testing.assert_array_equal(ROWS[name].prepare(emptied)["advantages"], ROWS[name].prepare(gone)["advantages"])


@pytest.mark.parametrize("name", ROWS)
def test_describe_prints_every_constant(name):
    text, row = describe(name), ROWS[name]
    assert row.paper in text and all(f"{k} = {v:g}" in text for k, v in row.hyper.items()) and "{" not in text
    assert row.needs[0] == "logp" and row.additive in (True, False)


def test_difference_names_what_differs():
    text = difference("grpo", "grpo_no_kl")
    assert "beta: 0.04 against absent" in text and "surrogate" not in text
    assert "the same parts and constants" in difference("rloo", "rloo")


def test_unknown_row_names_the_nearest():
    with pytest.raises(ValueError, match="nearest: 'grpo'"):
        get("grppo")


def test_names_are_unique_and_trajectory_has_the_contract_s_fields():
    assert len(ROWS) == sum(map(len, TABLES))
    assert Trajectory._fields == (
        "tokens", "mask", "old_logp", "turn", "signals", "reward", "gold", "parts", "truncated", "group", "length", "support",
    )


def test_an_unknown_constant_is_refused():
    traj, stats = probe_batch()
    with pytest.raises(TypeError, match="no constant 'eps_hgih'"):
        ROWS["grpo_no_kl"].prepare(traj, eps_hgih=0.3)


def test_the_clip_by_hand():
    """One token each: ratio 1.5 and 0.5, advantage +1 and -1; the pessimistic bound binds in two of the four."""
    logp = jnp.log(jnp.asarray([[1.5], [1.5], [0.5], [0.5]]))
    advantages = jnp.asarray([[1.0], [-1.0], [1.0], [-1.0]])
    mask = jnp.ones((4, 1), bool)
    (value, metrics), grad = jax.value_and_grad(
        lambda logp: ROWS["grpo_no_kl"].loss(logp, jnp.zeros((4, 1)), advantages, mask, totals=totals_of(mask)), has_aux=True
    )(logp)
    np.testing.assert_allclose(value, -(1.2 - 1.5 + 0.5 - 0.8) / 4, rtol=1e-6)
    assert metrics["clip_fraction"] == (2, 4) and metrics["ratio"][1] == 4
    np.testing.assert_allclose(grad[:, 0], [0, 1.5 / 4, -0.5 / 4, 0], rtol=1e-6)


@given(d=st.floats(-30, 30, width=32))
def test_k3_keeps_its_digits_near_zero(d):
    from jaxpt.objectives.kl import k3

    with jax.enable_x64(True):
        exact = lambda x: jnp.where(jnp.abs(x) < 1e-3, x * x / 2 * (1 + x / 3 + x * x / 12), jnp.expm1(x) - x)  # noqa: E731
        expected = float(exact(jnp.float64(d))) if d <= 20 else float(np.exp(20.0) * (1 + d - 20) - 1 - d)
    value, slope = jax.value_and_grad(lambda x: k3(jnp.float32(0), x))(jnp.float32(d))
    assert value >= 0
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(slope, np.expm1(min(d, 20.0)) if d <= 20 else np.exp(20.0) - 1, rtol=1e-4, atol=1e-30)


def test_advantage_zero_at_minus_infinity_is_zero():
    logp, mask = jnp.asarray([[-jnp.inf, -1.0]]), jnp.ones((1, 2), bool)
    value, grad = jax.value_and_grad(
        lambda logp: ROWS["rloo"].loss(logp, logp, jnp.asarray([[0.0, 2.0]]), mask, totals=totals_of(mask))[0]
    )(logp)
    assert value == 2 and np.asarray(grad).tolist() == [[0, -2]]
