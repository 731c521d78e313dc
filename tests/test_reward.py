"""Reward models: laws over the three tables, in one compiled program, against float64 loops; and what is made of scores."""

import itertools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives import reward as rm
from jaxpt.objectives.families import FAMILIES
from jaxpt.ops.masked import count

B, K = 5, 4
seeds = st.integers(0, 2**31 - 1)
TABLE = {row.name: row for row in rm.ROWS}
HYPER = {name: dict(row.hyper) for name, row in TABLE.items()} | {"bradley_terry_centred": {"center_coef": 0.3}}
SCORES = {"reward_pair": ("chosen_score", "rejected_score"), "reward_ranking": ("scores",), "reward_step": ("scores",)}


@jax.jit
def battery(batch, whole, hyper):
    """batch: {family: arguments}; whole: the same of the batch whose totals count."""

    def one(name, row):
        args, totals = batch[row.family], row.prepare(whole[row.family], **hyper[name])
        given = {k: x for k, x in args.items() if k != "margin" or "margin" in row.needs}
        moving = {k: x for k, x in given.items() if k != "mask"}
        loss = lambda moving: row.loss(**moving, mask=given["mask"], **totals, **hyper[name])  # noqa: E731
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(moving)
        return value, grads, metrics

    return {name: one(name, row) for name, row in TABLE.items()}


def run(batch, whole=None, hyper=HYPER):
    return jax.device_get(battery(batch, batch if whole is None else whole, hyper))


def draw(seed, scale=2.0):
    rng = np.random.default_rng(seed)

    def some(*shape):
        return rng.normal(0, scale, shape).astype(np.float32)

    def mask(*shape):
        kept = rng.random(shape) < rng.choice([0.5, 0.9])
        kept[rng.integers(B)] = False
        return kept

    return {
        "reward_pair": {
            "chosen_score": some(B), "rejected_score": some(B), "margin": np.abs(some(B)), "mask": mask(B),
        },
        "reward_ranking": {"scores": some(B, K), "mask": mask(B, K)},
        "reward_step": {
            "scores": some(B, K), "labels": rng.choice([0.0, 1.0, 0.3], (B, K)).astype(np.float32), "mask": mask(B, K),
        },
    }, rng


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


# --- the papers' formulas as float64 loops


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def mean(values):
    return sum(values) / len(values) if values else 0.0


def pairs(loss):
    def value(x):
        return mean([loss(float(c), float(r), float(m)) for c, r, m, kept in zip(*x.values()) if kept])

    return value


def rankings(loss):
    def value(x):
        kept = [[float(s) for s, k in zip(*row) if k] for row in zip(x["scores"], x["mask"])]
        return mean([loss(row) for row in kept if len(row) > 1])

    return value


def orderings(scores):
    """Plackett-Luce by its definition: the probability of this order among those of sampling without replacement."""
    probability = 1.0
    for k in range(len(scores)):
        probability *= math.exp(scores[k]) / sum(map(math.exp, scores[k:]))
    return -math.log(probability)


def steps(loss, reduce):
    def value(x):
        rows = [[loss(float(s), float(y)) for s, y, k in zip(*row) if k] for row in zip(x["scores"], x["labels"], x["mask"])]
        return reduce([row for row in rows if row])

    return value


def bce(s, y):
    return -y * log_sigmoid(s) - (1 - y) * log_sigmoid(-s)


def by_steps(rows):
    return mean([x for row in rows for x in row])


PAPER = {
    "bradley_terry": pairs(lambda c, r, m: -log_sigmoid(c - r)),
    "bradley_terry_margin": pairs(lambda c, r, m: -log_sigmoid(c - r - m)),
    "bradley_terry_centred": pairs(lambda c, r, m: -log_sigmoid(c - r) + 0.3 * (c + r) ** 2),
    "plackett_luce": rankings(orderings),
    "all_pairs": rankings(lambda s: mean([-log_sigmoid(a - b) for a, b in itertools.combinations(s, 2)])),
    "orm": steps(bce, lambda rows: mean([row[-1] for row in rows])),
    "prm": steps(bce, by_steps),
    "prm_sum": steps(bce, lambda rows: mean([sum(row) for row in rows])),
    "mse_reward": steps(lambda s, y: (s - y) ** 2, by_steps),
}


def loop(name, batch):
    return PAPER[name](batch[TABLE[name].family])


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    got = run(batch)
    assert set(got) == set(PAPER)
    for name, (value, _, _) in got.items():
        np.testing.assert_allclose(value, loop(name, batch), rtol=1e-5, atol=1e-6, err_msg=name)


@given(seed=st.integers(0, 5))
def test_gradient_against_finite_differences_of_the_loops(seed):
    batch, _ = draw(seed)
    for name, (_, grads, _) in run(batch).items():
        family = TABLE[name].family
        for arg in SCORES[family]:
            numeric = np.zeros(grads[arg].shape)
            for at in np.ndindex(numeric.shape):
                ends = []
                for h in (1e-5, -1e-5):
                    moved = {k: np.float64(x) if x.dtype != bool else x for k, x in batch[family].items()}
                    moved[arg] = moved[arg].copy()
                    moved[arg][at] += h
                    ends.append(loop(name, {family: moved}))
                numeric[at] = (ends[0] - ends[1]) / 2e-5
            np.testing.assert_allclose(grads[arg], numeric, rtol=1e-3, atol=1e-6, err_msg=name)


@given(seed=seeds)
def test_masked_slots_may_hold_anything_and_constants_get_no_gradient(seed):
    batch, rng = draw(seed)
    dirty = {
        family: {
            k: x if k == "mask" else
            np.where(args["mask"], x, rng.choice([np.nan, np.inf, -np.inf, 1e30], x.shape)).astype(np.float32)
            for k, x in args.items()
        }
        for family, args in batch.items()
    }
    clean, poisoned = run(batch), run(dirty)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    for name, (_, grads, _) in poisoned.items():
        for arg, grad in grads.items():
            assert (grad[~batch[TABLE[name].family]["mask"]] == 0).all(), name
            if FAMILIES[TABLE[name].family].args[arg].constant:
                assert (grad == 0).all(), (name, arg)


@given(seed=seeds)
def test_uneven_partitions_add_up_and_rows_may_be_permuted(seed):
    batch, rng = draw(seed)
    part, order = rng.permutation([0, 1, 1, 1, 2]), rng.permutation(B)

    def share(k):
        keep = lambda mask: mask & (part == k).reshape((B,) + (1,) * (mask.ndim - 1))  # noqa: E731
        return {family: {**args, "mask": keep(args["mask"])} for family, args in batch.items()}

    shares = [run(share(k), batch) for k in range(3)]
    whole = run(batch)
    assert_same(jax.tree.map(lambda *x: sum(np.float64(v) for v in x), *shares), whole)
    moved = run({family: {k: x[order] for k, x in args.items()} for family, args in batch.items()})
    for name in TABLE:
        assert_same(moved[name][0], whole[name][0])
        assert_same(moved[name][1], {k: g[order] for k, g in whole[name][1].items()})


@pytest.mark.parametrize("gap", [89.0, 1e4])
def test_extreme_scores_are_finite_and_never_flat_where_they_are_wrong(gap):
    batch, rng = draw(1)
    for args in batch.values():
        args["mask"][:] = True
        for k, x in args.items():
            if k.endswith(("score", "scores")):
                args[k] = (gap * rng.choice([-1, 1], x.shape)).astype(np.float32)
    batch["reward_pair"]["chosen_score"][:], batch["reward_pair"]["rejected_score"][:] = -gap, gap  # all wrong
    got = run(batch)
    for name, (value, grads, _) in got.items():
        assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads.values()), name
    value, grads, _ = got["bradley_terry"]
    np.testing.assert_allclose(value, 2 * gap, rtol=1e-6)
    np.testing.assert_allclose(grads["chosen_score"], -1 / B, rtol=1e-6)


def test_nothing_kept_is_nothing():
    batch, _ = draw(0)
    for args in batch.values():
        args["mask"][:] = False
    for name, (value, grads, metrics) in run(batch).items():
        assert value == 0 and all((g == 0).all() for g in grads.values()), name
        assert all(m == (0, 0) for m in metrics.values()), name


def test_one_candidate_is_no_ranking():
    """It adds nothing and stands in no denominator."""
    batch, _ = draw(2)
    ranking = batch["reward_ranking"]
    ranking["mask"] = np.array([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 1]], bool)
    for name in ("plackett_luce", "all_pairs"):
        value, grads, metrics = run(batch)[name]
        two = {"scores": ranking["scores"][[0, 3]], "mask": ranking["mask"][[0, 3]]}
        np.testing.assert_allclose(value, PAPER[name](two), rtol=1e-5)
        assert (grads["scores"][[1, 2, 4]] == 0).all() and metrics["accuracy"][1] == 2


@given(seed=seeds)
def test_reductions_of_one_to_another(seed):
    """Two candidates rank as a pair; margin 0 is none; one step a row: orm, prm and prm_sum are one."""
    batch, _ = draw(seed)
    pair, ranking = batch["reward_pair"], batch["reward_ranking"]
    pair["margin"][:] = 0
    ranking["mask"][:] = False
    ranking["mask"][:, 1] = ranking["mask"][:, 3] = pair["mask"]
    ranking["scores"][:, 1], ranking["scores"][:, 3] = pair["chosen_score"], pair["rejected_score"]
    step = batch["reward_step"]
    step["mask"] &= np.arange(K) == np.arange(B)[:, None] % K
    got = run(batch, hyper=HYPER | {"bradley_terry_centred": {"center_coef": 0.0}})
    for name in ("bradley_terry_margin", "bradley_terry_centred", "plackett_luce", "all_pairs"):
        np.testing.assert_allclose(got[name][0], got["bradley_terry"][0], rtol=1e-5, atol=1e-7, err_msg=name)
    for name in ("prm", "prm_sum"):
        assert_same(got[name][:2], got["orm"][:2])


@given(seed=seeds)
def test_orders_of_plackett_luce_are_a_distribution_and_only_differences_count(seed):
    _, rng = draw(seed)
    scores = rng.normal(0, 2, K).astype(np.float32)
    orders = np.array(list(itertools.permutations(range(K))))
    values = rm.plackett_luce(jnp.asarray(scores[orders]), jnp.ones(orders.shape, bool))
    np.testing.assert_allclose(np.exp(-np.float64(values)).sum(), 1, rtol=1e-5)
    shifted = rm.plackett_luce(jnp.asarray(scores[orders] + 5), jnp.ones(orders.shape, bool))
    np.testing.assert_allclose(shifted, values, rtol=1e-4, atol=1e-5)


def test_centring_settles_the_constant():
    """Bradley-Terry alone is blind to a shift of both scores; the square pulls their sum to 0."""
    batch, _ = draw(3)
    batch["reward_pair"]["mask"][:] = True
    moved = {**batch, "reward_pair": {**batch["reward_pair"]}}
    for k in ("chosen_score", "rejected_score"):
        moved["reward_pair"][k] = batch["reward_pair"][k] + 3
    a, b = run(batch), run(moved)
    np.testing.assert_allclose(a["bradley_terry"][0], b["bradley_terry"][0], rtol=1e-4)
    assert b["bradley_terry_centred"][0] > a["bradley_terry_centred"][0] + 1
    pull = sum(b["bradley_terry_centred"][1][k].sum() for k in ("chosen_score", "rejected_score"))
    c, r = (moved["reward_pair"][k].astype(np.float64) for k in ("chosen_score", "rejected_score"))
    np.testing.assert_allclose(pull, 4 * 0.3 * (c + r).mean(), rtol=1e-4)


@given(seed=seeds)
def test_accuracy(seed):
    batch, _ = draw(seed)
    got = run(batch)
    pair, step = batch["reward_pair"], batch["reward_step"]
    right = (pair["chosen_score"] > pair["rejected_score"])[pair["mask"]]
    assert got["bradley_terry"][2]["accuracy"] == (right.sum(), right.size)
    gaps = (pair["chosen_score"] - pair["rejected_score"])[pair["mask"]]
    np.testing.assert_allclose(got["bradley_terry"][2]["gap"], (gaps.sum(), gaps.size), rtol=1e-4, atol=1e-5)
    right = ((step["scores"] > 0) == (step["labels"] > 0.5))[step["mask"]]
    assert got["prm"][2]["accuracy"] == (right.sum(), right.size)
    rows = [[s for s, k in zip(*row) if k] for row in zip(batch["reward_ranking"]["scores"], batch["reward_ranking"]["mask"])]
    rows = [row for row in rows if len(row) > 1]
    assert got["plackett_luce"][2]["accuracy"] == (sum(row[0] == max(row) for row in rows), len(rows))


def test_half_precision_is_computed_in_float32():
    batch, _ = draw(4)
    pair = {k: x if k == "mask" else jnp.asarray(x, jnp.bfloat16) for k, x in batch["reward_pair"].items()}
    row = TABLE["bradley_terry_margin"]
    value = row.loss(**pair, **row.prepare(pair))[0]
    exact = {k: x if k == "mask" else np.asarray(x, np.float32) for k, x in pair.items()}
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, PAPER["bradley_terry_margin"]({k: exact[k] for k in batch["reward_pair"]}), rtol=1e-5)


# --- several attributes, steps, ensembles, length


@given(seed=seeds)
def test_heads_are_one_comparison_each(seed):
    rng = np.random.default_rng(seed)
    chosen, rejected = rng.normal(size=(2, B, 3)).astype(np.float32)
    mask, weights = rng.random((B, 3)) < 0.6, np.array([0.5, 2.0, 0.0], np.float32)
    totals = {"pairs": count(jnp.asarray(mask), axis=0)}
    poisoned = [jnp.asarray(np.where(mask, x, np.nan)) for x in (chosen, rejected)]
    loss = lambda c, r: rm.bradley_terry_heads(c, r, mask, weights, totals=totals)  # noqa: E731
    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(*poisoned)
    by_head = [mean([-log_sigmoid(float(chosen[i, h] - rejected[i, h])) for i in range(B) if mask[i, h]]) for h in range(3)]
    np.testing.assert_allclose(value, sum(w * x for w, x in zip(weights, by_head)), rtol=1e-5, atol=1e-6)
    assert (np.asarray(grad)[~mask] == 0).all() and (np.asarray(grad)[:, 2] == 0).all()
    assert metrics["accuracy"] == ((chosen > rejected)[mask].sum(), mask.sum())


@given(seed=seeds)
def test_steps_to_an_outcome(seed):
    batch, _ = draw(seed)
    scores, mask = batch["reward_step"]["scores"], batch["reward_step"]["mask"]
    p = 1 / (1 + np.exp(-scores.astype(np.float64)))
    kept = [p[i][mask[i]] if mask[i].any() else np.ones(1) for i in range(B)]
    poisoned = jnp.asarray(np.where(mask, scores, np.nan))
    for fn, of_row in ((rm.product_of_steps, np.prod), (rm.weakest_step, np.min), (rm.last_step, lambda x: x[-1])):
        value, pull = jax.vjp(lambda x: fn(x, jnp.asarray(mask)), poisoned)  # noqa: B023
        np.testing.assert_allclose(np.exp(value), [of_row(row) for row in kept], rtol=1e-5)
        (grad,) = pull(jnp.ones(B))
        assert np.isfinite(grad).all() and (np.asarray(grad)[~mask] == 0).all()
    many = jnp.full((1, 400), -1.0)  # a product of probabilities would be 0 in float32
    np.testing.assert_allclose(rm.product_of_steps(many, jnp.ones((1, 400))), 400 * log_sigmoid(-1.0), rtol=1e-5)


@given(seed=seeds)
def test_ensembles(seed):
    scores = np.random.default_rng(seed).normal(size=(5, B)).astype(np.float32)
    x = jnp.asarray(scores)
    mu, low = scores.mean(0, dtype=np.float64), scores.min(0)
    np.testing.assert_allclose(rm.ensemble_mean(x), mu, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rm.ensemble_min(x), low)
    np.testing.assert_allclose(rm.ensemble_between(x, gamma=0.25), 0.25 * low + 0.75 * mu, rtol=1e-5, atol=1e-6)
    spread = ((scores - mu) ** 2).sum(0) / 5
    np.testing.assert_allclose(rm.ensemble_uncertain(x, lam=0.5), mu - 0.5 * spread, rtol=1e-5, atol=1e-6)
    for fn in (rm.ensemble_mean, rm.ensemble_min):  # members that agree say what one says
        np.testing.assert_allclose(fn(jnp.stack([x[0]] * 3)), x[0], rtol=1e-6)


@given(seed=seeds)
def test_a_length_residual_has_no_length_in_it(seed):
    rng = np.random.default_rng(seed)
    n = 12
    length, quality = rng.integers(1, 4000, n).astype(np.float32), rng.normal(size=n).astype(np.float32)
    mask = rng.random(n) < 0.7
    mask[:3] = True
    slope = rng.choice([0.0, 1e-3, -5e-3])
    poison = lambda x: jnp.asarray(np.where(mask, x, np.nan), jnp.float32)  # noqa: E731
    got = np.asarray(rm.length_residual(poison(quality + slope * length), poison(length), jnp.asarray(mask)))
    plain = np.asarray(rm.length_residual(poison(quality), poison(length), jnp.asarray(mask)))
    assert (got[~mask] == 0).all()
    centred = length[mask] - length[mask].mean()
    assert abs(np.corrcoef(got[mask], centred)[0, 1]) < 1e-2
    np.testing.assert_allclose(got[mask].mean(), (quality + slope * length)[mask].mean(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[mask] - got[mask].mean(), plain[mask] - plain[mask].mean(), atol=2e-3)
    fit = np.polyfit(length[mask].astype(np.float64), quality[mask].astype(np.float64), 1)
    np.testing.assert_allclose(plain[mask], quality[mask] - fit[0] * centred, atol=2e-4)
    same = rm.length_residual(poison(quality), jnp.full(n, 700.0), jnp.asarray(mask))
    np.testing.assert_allclose(same, np.where(mask, quality, 0), rtol=1e-5, atol=1e-6)


def test_shards_share_one_line():
    """With `total` as psum, two shards get what the whole batch gets."""
    rng = np.random.default_rng(0)
    reward, length = rng.normal(size=8).astype(np.float32), rng.integers(1, 100, 8).astype(np.float32)
    mask = np.array([1, 1, 0, 1, 1, 0, 1, 1], bool)
    whole = rm.length_residual(*map(jnp.asarray, (reward, length, mask)))
    halves = [x.reshape(2, 4) for x in (reward, length, mask)]
    shards = jax.vmap(lambda *x: rm.length_residual(*x, total=lambda t: jax.lax.psum(t, "shard")), axis_name="shard")(*halves)
    np.testing.assert_allclose(np.concatenate(shards), whole, rtol=1e-4, atol=1e-5)
