"""One battery over the loss of every row, on value, gradient and metrics; one compiled program for all of them.

What happens before the loss is in test_prepare.py, what a loss follows on average in test_expected_gradient.py.
"""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from policy_loops import BINDS, PAPER, alpha_divergence, by_nothing, by_prompts, by_rows, by_sum, by_tokens, jensen_shannon
from policy_loops import HYPER as LOOP_HYPER
from policy_loops import losses, of_budget, tokens_of

from jaxpt.objectives import ROWS, kl
from jaxpt.objectives.algebra import METRICS, compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.reduction import prompt_tokens_of, totals_of

B, T = 6, 5
seeds = st.integers(0, 2**31 - 1)
ARGS = ("logp", "old_logp", "advantages", "ref_logp", "entropy", "vocab_kl", "sampler_logp", "weights")
SCORE = dict(advantage="monte_carlo", ratio="none", surrogate="score", reduction="token_mean", hyper={"beta": 0.5})
PARTS = {  # parts that no row of the table has, or has only in its defaults' shadow
    name: compose(name, "", kl=Penalty(*penalty), **SCORE)
    for name, penalty in {
        "k1_loss": ("k1",), "k1_pulls_as_k2": ("k1", "k2"), "k3_pulls_as_k2": ("k3", "k2"), "k3_score": ("k3", "score"),
        "k1_importance": ("k1", "importance"), "abs": ("abs",), "forward": ("forward",), "jensen_shannon": ("jensen_shannon",),
    }.items()
}
PARTS["alpha"] = compose("alpha", "", kl=Penalty("alpha"), **SCORE | {"hyper": {"beta": 0.5, "alpha": 0.3}})
PARTS["summed"] = compose("summed", "", **SCORE | {"reduction": "token_sum", "hyper": {}})
PARTS["tis_with_kl"] = compose(
    "tis_with_kl", "", kl=Penalty("k2"), correction="token_truncated", **SCORE | {"hyper": {"beta": 0.5, "is_high": 1.1}}
)
POLICY = {name: row for name, row in ROWS.items() if row.family == "policy_loss" and "." not in name}
TESTED = {**POLICY, **PARTS}
HYPER = {name: {**row.hyper, **LOOP_HYPER.get(name, {})} for name, row in TESTED.items()}


def one(row, batch, totals, hyper):
    def loss(arrays):
        extra = {k: {**batch, **arrays}[k] for k in (*ARGS[3:], "prompt_tokens") if k in row.needs}
        return row.loss(
            arrays["logp"], arrays["old_logp"], arrays["advantages"], batch["mask"], totals=totals, **extra, **hyper
        )

    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)({k: batch[k] for k in ARGS})
    return value, grads, metrics


@jax.jit
def battery(batch, totals, hyper):
    return {name: one(row, batch, totals, hyper[name]) for name, row in TESTED.items()}


def whole(batch):
    """The batch with what its rows know of it, and its totals."""
    mask, group = (jnp.asarray(batch[k]) for k in ("mask", "group"))
    prompt_tokens = prompt_tokens_of(mask, group)
    return {**batch, "prompt_tokens": prompt_tokens}, totals_of(mask, prompt_tokens)


def run(batch, hyper=HYPER):
    return jax.device_get(battery(*whole(batch), hyper))


def draw(seed, spread=0.3):
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0.4, 0.9, 1.0])
    mask[rng.integers(B)] = False
    logp = rng.normal(-1, 0.5, (B, T))
    of_row = rng.choice([-1.0, 0.0, 0.5, 2.0], (B, 1))
    batch = {
        "logp": logp, "old_logp": logp + rng.normal(0, spread, (B, T)), "ref_logp": logp + rng.normal(0, spread, (B, T)),
        "advantages": np.where(rng.random() < 0.5, np.broadcast_to(of_row, (B, T)), rng.normal(size=(B, T))),
        "entropy": rng.random((B, T)), "weights": rng.random((B, T)),
    }
    batch["sampler_logp"] = batch["old_logp"] + rng.normal(0, spread / 2, (B, T))
    group = rng.permutation([4, 4, -1, 7, 7, 7])
    batch["vocab_kl"] = rng.random((B, T))
    return {**{k: v.astype(np.float32) for k, v in batch.items()}, "mask": mask, "group": group}, rng


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    got = run(batch)
    want = losses(PAPER, batch)
    assert set(got) == set(want)
    for name, (value, _, _) in got.items():
        np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("arg, seed", [*((arg, seed) for arg in ("logp", "entropy") for seed in (3, 4, 11)), ("vocab_kl", 3)])
def test_gradient_against_finite_differences_of_the_loops(arg, seed):
    batch, _ = draw(seed)
    got = run(batch)
    numeric = {name: np.zeros((B, T)) for name in got}
    for at in map(tuple, np.argwhere(batch["mask"])):
        ends = []
        for h in (1e-5, -1e-5):
            moved = {**batch, arg: batch[arg].astype(np.float64)}
            moved[arg][at] += h
            ends.append(losses(got, moved, at=batch))
        for name in got:
            numeric[name][at] = (ends[0][name] - ends[1][name]) / 2e-5
    for name, (_, grads, _) in got.items():
        np.testing.assert_allclose(grads[arg], numeric[name], rtol=1e-3, atol=1e-5, err_msg=name)


@given(seed=seeds)
def test_metrics_against_loops(seed):
    """Sums over trainable tokens and their number: the ratio, the share where the bound binds, the KL's value."""
    batch, _ = draw(seed)
    tokens = [x for row in tokens_of(batch) for x in row]
    values = {
        "k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.expm1(d) - d, "absolute": abs,
        "KL": lambda d: np.exp(d) * (d - 1) + 1, "alpha": lambda d: alpha_divergence({"f": d, "l": 0.0}),
        "Jensen-Shannon": lambda d: jensen_shannon({"f": d, "l": 0.0}),
    }
    for name, (_, _, metrics) in run(batch).items():
        parts, expected = TESTED[name].parts, dict.fromkeys(METRICS, (0, 0))
        gspo = name.startswith("gspo")
        ratio = lambda x, gspo=gspo: np.exp(x["s"] if gspo else x["l"] - x["o"])  # noqa: E731
        if parts["ratio"] != "no importance ratio":
            expected["ratio"] = sum(map(ratio, tokens)), len(tokens)
        if "eps_low" in TESTED[name].hyper or name in BINDS:
            low, high = (HYPER[name].get(k) for k in ("eps_low", "eps_high"))
            past = lambda x: x["a"] > 0 and ratio(x) > 1 + high or x["a"] < 0 and ratio(x) < 1 - low  # noqa: E731, B023
            expected["clip_fraction"] = sum(map(BINDS.get(name, past), tokens)), len(tokens)
        if "vocab_kl" in TESTED[name].needs:
            expected["kl"] = sum(x["v"] for x in tokens), len(tokens)
        if "ref_logp" in TESTED[name].needs:
            value = values[parts["kl"].split()[0]]
            expected["kl"] = sum(value(x["f"] - x["l"]) for x in tokens), len(tokens)
        for metric, pair in metrics.items():
            np.testing.assert_allclose(pair, expected[metric], rtol=1e-4, atol=2e-5, err_msg=f"{name} {metric}")


@given(seed=seeds)
def test_poison_at_masked_slots(seed):
    batch, rng = draw(seed)
    poisoned = {
        k: np.where(batch["mask"], batch[k], rng.choice([np.nan, np.inf, -np.inf, 1e30], (B, T))).astype(np.float32)
        for k in ARGS
    }
    clean, dirty = run(batch), run({**batch, **poisoned})
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    for _, grads, _ in dirty.values():
        assert all((g[~batch["mask"]] == 0).all() for g in grads.values())


def in_parts(batch, part):
    """Sums over parts of the rows, with the totals of the whole, beside the whole; in float64."""
    known, totals = whole(batch)
    shares = [battery({**known, "mask": batch["mask"] & (part == k)[:, None]}, totals, HYPER) for k in range(part.max() + 1)]
    return jax.tree.map(lambda *xs: sum(np.asarray(x, np.float64) for x in xs), *shares), run(batch)


@given(seed=seeds)
def test_partitions_add_up(seed):
    """With the totals of the whole, losses, gradients and metrics of uneven parts add up to the whole; prompts, too, may
    be in several parts."""
    batch, rng = draw(seed)
    part = rng.choice([[0, 0, 0, 0, 0, 1], [0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5]])[rng.permutation(B)]
    added, together = in_parts(batch, part)
    for name in TESTED:
        if TESTED[name].additive:
            assert_same(added[name], together[name], rtol=1e-4, atol=1e-5)


NOT_ADDITIVE = {"clip_cov": -0.0372, "kl_cov": -0.0124, "top_entropy": -0.1681}  # what two halves add to one batch's loss


def test_rows_that_compare_all_tokens_do_not_add_up():
    added, together = in_parts(draw(6)[0], np.array([0, 0, 0, 1, 1, 1]))
    off = {name: float(added[name][0] - together[name][0]) for name in TESTED if not TESTED[name].additive}
    assert off == pytest.approx(NOT_ADDITIVE, abs=1e-4)


@jax.jit
def chosen(batch, totals):
    return {name: one(ROWS[name], batch, totals, HYPER[name])[:2] for name in NOT_ADDITIVE}


@pytest.mark.parametrize("seed", range(4))
def test_choices_do_not_depend_on_padding_or_repetition(seed):
    """A batch twice, in wider rows: the same loss, half the gradient at each copy; advantages are used as they are,
    not divided by what the reduction divides by (SkyRL scales them first, and its thresholds stop meaning anything)."""
    batch, rng = draw(seed)
    wide = {k: np.pad(v, ((0, 0), (2, 1)), constant_values=np.nan) for k, v in batch.items() if k in ARGS}
    wide |= {"mask": np.pad(batch["mask"], ((0, 0), (2, 1))), "group": batch["group"]}
    twice = {k: np.concatenate([v, v]) for k, v in wide.items()}
    got, once = jax.device_get(chosen(*whole(twice))), run(batch)
    for name in NOT_ADDITIVE:
        np.testing.assert_allclose(got[name][0], once[name][0], rtol=1e-5, atol=1e-6)
        for copy in (slice(B), slice(B, None)):
            np.testing.assert_allclose(got[name][1]["logp"][copy, 2:-1], once[name][1]["logp"] / 2, rtol=1e-4, atol=1e-6)


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
    for name, (_, grads, _) in run(draw(seed)[0]).items():
        for constant in ("old_logp", "advantages", "ref_logp", "sampler_logp", "weights"):
            np.testing.assert_array_equal(grads[constant], 0)
        assert TESTED[name].parts["entropy"].startswith("entropy") or (grads["entropy"] == 0).all(), name
        assert "vocab_kl" in TESTED[name].needs or (grads["vocab_kl"] == 0).all(), name


@given(seed=seeds)
def test_on_policy_the_gradient_is_reinforce(seed):
    """At logp = old_logp = ref_logp every row's gradient is -A / denominator of its own reduction, whatever the
    clip and the KL; where the ratio is one for the whole row, with the row's mean advantage."""
    batch, _ = draw(seed, spread=0.0)
    mask, a = batch["mask"], batch["advantages"]
    n = np.maximum(mask.sum(1, keepdims=True), 1)
    rows, tokens, ones = max((mask.sum(1) > 0).sum(), 1), max(mask.sum(), 1), np.ones((B, T))
    known, totals = whole(batch)
    weight = {
        by_tokens: ones / tokens, by_rows: ones / (rows * n), by_sum: ones / rows, of_budget: ones / rows / 7, by_nothing: ones,
        by_prompts: ones / np.maximum(totals["prompts"], 1) / np.maximum(known["prompt_tokens"], 1)[:, None],
    }
    factor = dict.fromkeys(TESTED, ones) | {"grpo_token_weights": batch["weights"]}
    factor |= {name: np.zeros((B, T)) for name in ("clip_cov", "top_entropy", "entropy_advantage")}
    for x in (x for row in tokens_of(batch) for x in row):
        factor["clip_cov"][x["at"]], factor["top_entropy"][x["at"]] = not x["clip_cov"], x["top"]
        factor["entropy_advantage"][x["at"]] = 1 + np.sign(x["a"]) * min(0.4 * x["h"] / max(abs(x["a"]), 1e-9), 0.5)
    for name, (_, grads, _) in run(batch).items():
        per_token = weight[PAPER[name][0]]
        shared = np.where(mask, a, 0).sum(1, keepdims=True) / n + 0 * a
        expected = -(shared if name in ("gspo", "gmpo") else a) * per_token * factor[name]
        expected += 0.5 * per_token if name in ("k1_loss", "k1_importance") else 0
        np.testing.assert_allclose(grads["logp"], np.where(mask, expected, 0), rtol=1e-5, atol=1e-6, err_msg=name)


@given(seed=seeds)
def test_gspo_and_its_token_form_agree_where_a_row_has_one_advantage(seed):
    batch, rng = draw(seed)
    batch["advantages"] = np.broadcast_to(rng.normal(size=(B, 1)), (B, T)).astype(np.float32)
    got = run(batch)
    assert_same(got["gspo"], got["gspo_token"])


@given(seed=seeds)
def test_with_one_token_a_row_gspo_and_gmpo_are_grpo(seed):
    batch, rng = draw(seed)
    batch["mask"] = np.arange(T)[None] == rng.integers(0, T, (B, 1))
    clip = {"eps_low": 0.2, "eps_high": 0.2}
    logs = {"log_low": -np.log(0.8), "log_high": np.log(1.2)}
    got = run(batch, HYPER | {name: HYPER[name] | clip for name in ("gspo", "gspo_token")} | {"gmpo": HYPER["gmpo"] | logs})
    for name in ("gspo", "gspo_token"):
        assert_same(got[name], got["grpo_no_kl"])
    assert_same(got["gmpo"][:2], got["grpo_no_kl"][:2])


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


@example(d=0.25)  # 1 - alpha of 1e-4 magnifies the rounding of e^d - 1 - d
@given(d=st.floats(-30, 30, width=32))
def test_divergences_between_the_kls_keep_their_digits(d):
    """Against float64 where float32 would cancel; alpha -> 0 is k3, alpha -> 1 the KL from the reference."""
    of = lambda f: [float(x) for x in jax.value_and_grad(lambda ref: f(jnp.float32(0), ref))(jnp.float32(d))]  # noqa: E731
    half, js, x = of(partial(kl.alpha, alpha=0.5)), of(kl.jensen_shannon), np.longdouble(d)
    if d > 20:
        assert half[1] > 1e8 and js[1] > 1e7
        return
    r, root, log2r = np.exp(x), np.exp(x / 2), np.log1p(np.tanh(x / 2))  # the last: log(2 r / (1 + r))
    np.testing.assert_allclose(half, [2 * np.expm1(x / 2) ** 2, 2 * root * np.expm1(x / 2)], rtol=1e-4, atol=1e-30)
    of_js = root * (x * np.sinh(x / 2) / 2 - np.cosh(x / 2) * np.log1p(2 * np.sinh(x / 4) ** 2))
    np.testing.assert_allclose(js, [of_js, r * log2r / 2], rtol=1e-3, atol=1e-12)
    for alpha, end in ((1e-4, kl.k3), (1 - 1e-4, kl.forward)):
        np.testing.assert_allclose(of(partial(kl.alpha, alpha=alpha))[0], of(end)[0], rtol=2e-2, atol=1e-9)


def test_k2_is_a_parabola_with_linear_arms():
    d = jnp.asarray([-2e3, -3.0, 0.0, 0.5, 1e3, 1e20])
    value, slope = jax.vmap(jax.value_and_grad(lambda d: kl.k2(d, jnp.zeros(()))))(d)
    np.testing.assert_allclose(value, [2e6 - 5e5, 4.5, 0, 0.125, 5e5, 1e23], rtol=1e-6)
    np.testing.assert_allclose(slope, [-1e3, -3, 0, 0.5, 1e3, 1e3], rtol=1e-6)


@given(seed=seeds)
def test_every_kl_is_exactly_zero_at_equality(seed):
    batch, _ = draw(seed)
    batch["ref_logp"], batch["vocab_kl"] = batch["logp"], np.zeros((B, T), np.float32)
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
