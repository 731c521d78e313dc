"""One battery over the loss of every row, on value, gradient and metrics; one compiled program for all of them.

What happens before the loss is in test_prepare.py, what a loss follows on average in test_expected_gradient.py.
"""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives import ROWS, kl
from jaxpt.objectives.algebra import METRICS, compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.reduction import totals_of

B, T = 6, 5
seeds = st.integers(0, 2**31 - 1)
ARGS = ("logp", "old_logp", "advantages", "ref_logp", "entropy")
SCORE = dict(advantage="monte_carlo", ratio="none", surrogate="score", reduction="token_mean", hyper={"beta": 0.5})
PARTS = {  # parts that no row of the table has, or has only in its defaults' shadow
    name: compose(name, "", kl=Penalty(*penalty), **SCORE)
    for name, penalty in {
        "k1_loss": ("k1",), "k1_pulls_as_k2": ("k1", "k2"), "k3_pulls_as_k2": ("k3", "k2"), "k3_score": ("k3", "score"),
    }.items()
}
TESTED = {**ROWS, **PARTS}
HYPER = {name: dict(row.hyper) for name, row in TESTED.items()}
HYPER["ppo"]["entropy_coef"] = 0.3
HYPER["dr_grpo"]["max_length"] = 7.0
HYPER["gspo"] = HYPER["gspo_token"] = HYPER["gspo"] | {"eps_low": 0.05, "eps_high": 0.1}


def one(row, batch, totals, hyper):
    def loss(arrays):
        extra = {k: arrays[k] for k in ("ref_logp", "entropy") if k in row.needs}
        return row.loss(
            arrays["logp"], arrays["old_logp"], arrays["advantages"], batch["mask"], totals=totals, **extra, **hyper
        )

    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)({k: batch[k] for k in ARGS})
    return value, grads, metrics


@jax.jit
def battery(batch, totals, hyper):
    return {name: one(row, batch, totals, hyper[name]) for name, row in TESTED.items()}


def run(batch, hyper=HYPER):
    return jax.device_get(battery(batch, totals_of(jnp.asarray(batch["mask"])), hyper))


def draw(seed, spread=0.3):
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0.4, 0.9, 1.0])
    mask[rng.integers(B)] = False
    logp = rng.normal(-1, 0.5, (B, T))
    of_row = rng.choice([-1.0, 0.0, 0.5, 2.0], (B, 1))
    batch = {
        "logp": logp, "old_logp": logp + rng.normal(0, spread, (B, T)), "ref_logp": logp + rng.normal(0, spread, (B, T)),
        "advantages": np.where(rng.random() < 0.5, np.broadcast_to(of_row, (B, T)), rng.normal(size=(B, T))),
        "entropy": rng.random((B, T)),
    }
    return {**{k: v.astype(np.float32) for k, v in batch.items()}, "mask": mask}, rng


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


# --- the papers' formulas as float64 loops: x has l, o, f, h (logp, old, reference, entropy), a, and the row's
# --- s (mean log-ratio) and, where a paper stops a gradient, the values of l and s at which it was stopped: l0, s0


def clip(x, r, low, high):
    return -min(r * x["a"], min(max(r, 1 - low), 1 + high) * x["a"])


def ppo(x, low=0.2, high=0.2):
    return clip(x, np.exp(x["l"] - x["o"]), low, high)


def reinforce(x):
    return -x["a"] * x["l"]


def k_1(x):
    return x["l"] - x["f"]


def k_3(x):
    return np.exp(x["f"] - x["l"]) - 1 - (x["f"] - x["l"])


def held(value, weight):
    """value at the point where the gradient was stopped, moving with logp by `weight` there."""
    return lambda x: value({**x, "l": x["l0"]}) + weight({**x, "l": x["l0"]}) * (x["l"] - x["l0"])


def by_tokens(rows, f):
    return sum(f(x) for row in rows for x in row) / sum(map(len, rows))


def by_rows(rows, f):
    return sum(sum(f(x) for x in row) / len(row) for row in rows) / len(rows)


def by_sum(rows, f):
    return sum(f(x) for row in rows for x in row) / len(rows)


GSPO_CLIP = (0.05, 0.1)
PAPER = {  # name -> (reduction, loss of a token)
    "sft": (by_tokens, reinforce),
    "reinforce": (by_sum, reinforce),
    "rloo": (by_sum, reinforce),
    "raft": (by_tokens, reinforce),
    "reinforce_plus_plus": (by_tokens, ppo),
    "reinforce_plus_plus_baseline": (by_tokens, lambda x: ppo(x) + 0.01 * k_1(x) ** 2 / 2),
    "ppo": (by_tokens, lambda x: ppo(x) - 0.3 * x["h"]),
    "grpo": (by_rows, lambda x: ppo(x) + 0.04 * k_3(x)),
    "grpo_no_kl": (by_rows, ppo),
    "dr_grpo": (lambda rows, f: by_sum(rows, f) / 7, ppo),
    "dapo": (by_tokens, lambda x: ppo(x, 0.2, 0.28)),
    "dapo_sequence_mean": (by_rows, lambda x: ppo(x, 0.2, 0.28)),
    "gspo": (by_rows, lambda x: clip(x, np.exp(x["s"]), *GSPO_CLIP)),
    "gspo_token": (by_rows, lambda x: clip(x, np.exp(x["s0"] + x["l"] - x["l0"]), *GSPO_CLIP)),
    "k1_loss": (by_tokens, lambda x: reinforce(x) + 0.5 * k_1(x)),
    "k1_pulls_as_k2": (by_tokens, lambda x: reinforce(x) + 0.5 * held(k_1, k_1)(x)),
    "k3_pulls_as_k2": (by_tokens, lambda x: reinforce(x) + 0.5 * held(k_3, k_1)(x)),
    "k3_score": (by_tokens, lambda x: reinforce(x) + 0.5 * held(k_3, lambda x: np.exp(x["l"] - x["o"]) * k_1(x))(x)),
}


def loop(name, batch, at=None):
    """The row's loss; where a gradient is stopped, what is held is taken from the logp `at`."""
    at, rows = batch["logp"] if at is None else at, []
    for i in range(B):
        kept = [t for t in range(T) if batch["mask"][i, t]]
        if not kept:
            continue
        names = {"l": "logp", "o": "old_logp", "f": "ref_logp", "a": "advantages", "h": "entropy"}
        row = [{k: float(batch[v][i, t]) for k, v in names.items()} | {"l0": float(at[i, t])} for t in kept]
        means = {"s": np.mean([x["l"] - x["o"] for x in row]), "s0": np.mean([x["l0"] - x["o"] for x in row])}
        rows.append([{**x, **means} for x in row])
    reduction, token = PAPER[name]
    return reduction(rows, token) if rows else 0.0


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    got = run(batch)
    assert set(got) == set(PAPER)
    for name, (value, _, _) in got.items():
        np.testing.assert_allclose(value, loop(name, batch), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("seed", [3, 4, 11])
@pytest.mark.parametrize("arg", ["logp", "entropy"])
def test_gradient_against_finite_differences_of_the_loops(arg, seed):
    batch, _ = draw(seed)
    for name, (_, grads, _) in run(batch).items():
        numeric = np.zeros((B, T))
        for at in np.argwhere(batch["mask"]):
            ends = []
            for h in (1e-5, -1e-5):
                moved = {**batch, arg: batch[arg].astype(np.float64)}
                moved[arg][tuple(at)] += h
                ends.append(loop(name, moved, at=batch["logp"]))
            numeric[tuple(at)] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(grads[arg], numeric, rtol=1e-3, atol=1e-5, err_msg=name)


@given(seed=seeds)
def test_metrics_against_loops(seed):
    """Sums over trainable tokens and their number: the ratio, the share where the bound binds, the KL's value."""
    batch, _ = draw(seed)
    mask, (l, o, f, a) = batch["mask"], (batch[k].astype(np.float64) for k in ("logp", "old_logp", "ref_logp", "advantages"))
    tokens = mask.sum()
    for name, (_, _, metrics) in run(batch).items():
        row, parts = TESTED[name], TESTED[name].parts
        assert set(metrics) == set(METRICS) and all(weight in (0, tokens) for _, weight in metrics.values())
        log_ratio = l - o
        if name.startswith("gspo"):
            log_ratio = np.where(mask, log_ratio, 0).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1) + 0 * l
        r = np.exp(log_ratio)
        if "eps_low" in row.hyper:
            assert metrics["ratio"][1] == tokens
            np.testing.assert_allclose(metrics["ratio"][0], r[mask].sum(), rtol=1e-4)
            low, high = HYPER[name]["eps_low"], HYPER[name]["eps_high"]
            binds = ((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low))
            assert metrics["clip_fraction"] == (binds[mask].sum(), tokens)
        else:
            assert metrics["ratio"] == metrics["clip_fraction"] == (0, 0)
        if "beta" in row.hyper and "ref_logp" in row.needs:
            value = {"k1": l - f, "k2": (l - f) ** 2 / 2, "k3": np.exp(f - l) - 1 - (f - l)}[parts["kl"][:2]]
            np.testing.assert_allclose(metrics["kl"][0], value[mask].sum(), rtol=1e-4, atol=1e-5)
            assert metrics["kl"][1] == tokens
        else:
            assert metrics["kl"] == (0, 0)


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
        assert all((g[~batch["mask"]] == 0).all() for g in grads.values())


@given(seed=seeds)
def test_partitions_add_up(seed):
    """With the totals of the whole, losses, gradients and metrics of uneven parts add up to the whole."""
    batch, rng = draw(seed)
    totals = totals_of(jnp.asarray(batch["mask"]))
    part = rng.choice([[0, 0, 0, 0, 0, 1], [0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5]])[rng.permutation(B)]
    parts = [battery({**batch, "mask": batch["mask"] & (part == k)[:, None]}, totals, HYPER) for k in range(part.max() + 1)]
    added = jax.tree.map(lambda *shares: sum(np.asarray(x, np.float64) for x in shares), *parts)
    assert_same(added, battery(batch, totals, HYPER), rtol=1e-4, atol=1e-5)


@given(seed=seeds)
def test_permutation_of_rows(seed):
    batch, rng = draw(seed)
    order = rng.permutation(B)
    whole, moved = run(batch), run({k: v[order] for k, v in batch.items()})
    for name in TESTED:
        assert_same(moved[name][0], whole[name][0])
        assert_same(moved[name][1], {k: g[order] for k, g in whole[name][1].items()})


@given(seed=seeds)
def test_declared_constants_get_no_gradient(seed):
    for _, grads, _ in run(draw(seed)[0]).values():
        for constant in ("old_logp", "advantages", "ref_logp"):
            np.testing.assert_array_equal(grads[constant], 0)


@given(seed=seeds)
def test_on_policy_the_gradient_is_reinforce(seed):
    """At logp = old_logp = ref_logp every row's gradient is -A / denominator of its own reduction, whatever the
    clip and the KL; where the ratio is one for the whole row, with the row's mean advantage."""
    batch, _ = draw(seed, spread=0.0)
    mask, a = batch["mask"], batch["advantages"]
    n = np.maximum(mask.sum(1, keepdims=True), 1)
    rows, tokens = max((mask.sum(1) > 0).sum(), 1), max(mask.sum(), 1)
    weight = {by_tokens: np.full((B, T), 1 / tokens), by_rows: 1 / (rows * n) + 0 * a, by_sum: np.full((B, T), 1 / rows)}
    for name, (_, grads, _) in run(batch).items():
        per_token = weight.get(PAPER[name][0], weight[by_sum] / 7)
        shared = np.where(mask, a, 0).sum(1, keepdims=True) / n + 0 * a
        expected = -(shared if name == "gspo" else a) * per_token + (0.5 * per_token if name == "k1_loss" else 0)
        np.testing.assert_allclose(grads["logp"], np.where(mask, expected, 0), rtol=1e-5, atol=1e-6, err_msg=name)


@given(seed=seeds)
def test_gspo_and_its_token_form_agree_where_a_row_has_one_advantage(seed):
    batch, rng = draw(seed)
    batch["advantages"] = np.broadcast_to(rng.normal(size=(B, 1)), (B, T)).astype(np.float32)
    got = run(batch)
    assert_same(got["gspo"], got["gspo_token"])


@given(seed=seeds)
def test_with_one_token_a_row_gspo_is_grpo(seed):
    batch, rng = draw(seed)
    batch["mask"] = np.arange(T)[None] == rng.integers(0, T, (B, 1))
    clip = {"eps_low": 0.2, "eps_high": 0.2}
    got = run(batch, HYPER | {name: HYPER[name] | clip for name in ("gspo", "gspo_token")})
    for name in ("gspo", "gspo_token"):
        assert_same(got[name], got["grpo_no_kl"])


@given(seed=seeds)
def test_an_open_clip_is_no_clip(seed):
    """eps -> infinity: -rho A; the rows that differ by the clip alone become one."""
    batch, _ = draw(seed)
    got = run(batch, {name: h | {k: 1e6 for k in h if k.startswith("eps_")} for name, h in HYPER.items()})
    l, o, a = (np.where(batch["mask"], batch[k], 0).astype(np.float64) for k in ("logp", "old_logp", "advantages"))
    np.testing.assert_allclose(got["dapo"][0], -np.sum(np.exp(l - o) * a) / max(batch["mask"].sum(), 1), rtol=1e-4, atol=1e-5)
    assert_same(got["dapo"][:2], got["reinforce_plus_plus"][:2])


@pytest.mark.parametrize("drift", [20.0, 100.0, 1000.0])
def test_extreme_log_ratios_are_finite_and_never_flat(drift):
    batch, rng = draw(5)
    batch["advantages"] = np.broadcast_to(np.array([[1.0], [0], [-1], [0], [2], [0]], np.float32), (B, T))
    sign = rng.choice([-1, 1], (B, T))
    for old, ref in ((drift, 0), (0, drift), (drift, drift)):
        moved = {**batch, "old_logp": (batch["logp"] + sign * old).astype(np.float32),
                 "ref_logp": (batch["logp"] + sign * ref).astype(np.float32)}
        for name, (value, grads, metrics) in run(moved).items():
            assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads.values()), name
            assert all(np.isfinite(x) for x, _ in metrics.values()), name
            penalised = name in ("grpo", "reinforce_plus_plus_baseline", "k1_pulls_as_k2", "k3_pulls_as_k2")
            if penalised and ref:  # the KL pulls back wherever the policy has drifted
                pull = grads["logp"][batch["mask"] & (batch["advantages"] == 0)]
                back = -sign[batch["mask"] & (batch["advantages"] == 0)]
                assert len(pull) and (np.sign(pull) == back).all(), name


def test_nothing_to_train_on_is_zero():
    batch, _ = draw(0)
    for value, grads, metrics in run({**batch, "mask": np.zeros((B, T), bool)}).values():
        assert value == 0 and all(pair == (0, 0) for pair in metrics.values())
        jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bfloat16_inputs_are_computed_in_float32(seed):
    batch, _ = draw(seed)
    half = {k: (jnp.asarray(v).astype(jnp.bfloat16) if k != "mask" else v) for k, v in batch.items()}
    back = {k: (np.asarray(v.astype(jnp.float32)) if k != "mask" else v) for k, v in half.items()}
    exact = run(back)
    for name, (value, grads, _) in run(half).items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, exact[name][0], rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(
            np.float32(grads["logp"]), exact[name][1]["logp"], rtol=2**-7, atol=1e-5, err_msg=name
        )


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
    with jax.enable_x64(True):
        exact = lambda x: jnp.where(jnp.abs(x) < 1e-3, x * x / 2 * (1 + x / 3 + x * x / 12), jnp.expm1(x) - x)  # noqa: E731
        expected = float(exact(jnp.float64(d))) if d <= 20 else float(np.exp(20.0) * (1 + d - 20) - 1 - d)
    value, slope = jax.value_and_grad(lambda x: kl.k3(jnp.float32(0), x))(jnp.float32(d))
    assert value >= 0
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(slope, np.expm1(min(d, 20.0)) if d <= 20 else np.exp(20.0) - 1, rtol=1e-4, atol=1e-30)


def test_k2_is_a_parabola_with_linear_arms():
    d = jnp.asarray([-2e3, -3.0, 0.0, 0.5, 1e3, 1e20])
    value, slope = jax.vmap(jax.value_and_grad(lambda d: kl.k2(d, jnp.zeros(()))))(d)
    np.testing.assert_allclose(value, [2e6 - 5e5, 4.5, 0, 0.125, 5e5, 1e23], rtol=1e-6)
    np.testing.assert_allclose(slope, [-1e3, -3, 0, 0.5, 1e3, 1e3], rtol=1e-6)


@given(seed=seeds)
def test_every_kl_is_exactly_zero_at_equality(seed):
    batch, _ = draw(seed)
    batch["ref_logp"] = batch["logp"]
    assert all(metrics["kl"][0] == 0 for _, _, metrics in run(batch).values())


def test_the_controller_follows_its_target():
    """Ziegler et al. 2019: beta moves by at most 20% of rows / horizon, towards the target, and rests on it."""

    def move(nats, **changed):
        return float(kl.adapted(0.1, jnp.float32(nats), **{"kl_target": 6.0, "kl_horizon": 1e4, "rows": 256.0} | changed))

    assert move(6.0) == pytest.approx(0.1)
    assert move(6.6) == pytest.approx(0.1 * (1 + 0.1 * 256 / 1e4))
    assert move(5.4) == pytest.approx(0.1 * (1 - 0.1 * 256 / 1e4))
    assert move(1e6) == pytest.approx(0.1 * (1 + 0.2 * 0.0256)) and move(-1e6) == pytest.approx(0.1 * (1 - 0.2 * 0.0256))
    assert move(12.0, kl_target=11.0, kl_horizon=100.0) == pytest.approx(0.1 * (1 + (1 / 11) * 2.56), rel=1e-5)


def test_advantage_zero_at_minus_infinity_is_zero():
    logp, mask = jnp.asarray([[-jnp.inf, -1.0]]), jnp.ones((1, 2), bool)
    value, grad = jax.value_and_grad(
        lambda logp: ROWS["rloo"].loss(logp, logp, jnp.asarray([[0.0, 2.0]]), mask, totals=totals_of(mask))[0]
    )(logp)
    assert value == 2 and np.asarray(grad).tolist() == [[0, -2]]
