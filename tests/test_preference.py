"""One battery over every row of preferences, paired and unpaired, in one compiled program (and one for prepare)."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from preference_loops import HYPER, PAIRED, PARTS, QUANTILES, ROWS, VALUES, B, T, facts, loops, singles

from jaxpt.objectives import preference, preference_algebra, unpaired
from jaxpt.objectives.families import FAMILIES
from jaxpt.objectives.preference_algebra import compose

seeds = st.integers(0, 2**31 - 1)
SINGLE = {  # the unpaired rows see the chosen side as their batch, the rejected side as mismatched pairs
    "logp": "chosen_logp", "mask": "chosen_mask", "ref_logp": "ref_chosen_logp", "desirable": "desirable",
    "kl_logp": "rejected_logp", "kl_ref_logp": "ref_rejected_logp", "kl_mask": "rejected_mask",
}
METRICS = {"preference": preference_algebra.METRICS, "unpaired": unpaired.METRICS}
CONSTANT = [k for k in VALUES if k not in ("chosen_logp", "rejected_logp")]


def mask_of(value):
    return "chosen_mask" if "chosen" in value else "rejected_mask"


def arguments_of(row, batch):
    """Those of its family's arguments that the row is given."""
    if row.family == "unpaired":
        batch = {name: batch[source] for name, source in SINGLE.items()}
    return {k: batch[k] for k, arg in FAMILIES[row.family].args.items() if not arg.optional or arg.optional in row.needs}


@jax.jit
def prepared(batch, hyper):
    return {name: ROWS[name].prepare(arguments_of(ROWS[name], batch), **hyper[name]) for name in hyper}


@jax.jit
def battery(batch, ready, hyper):
    """Value, gradients by every array of the batch and metrics of the rows that `hyper` names, stacked."""
    def one(row, ready, hyper):
        def loss(values):
            return row.loss(**arguments_of(row, {**batch, **values}), **ready, **hyper)

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)({k: batch[k] for k in VALUES})
        return value, grads, jnp.stack([jnp.stack(metrics[k]) for k in METRICS[row.family]])

    results = [one(ROWS[name], ready[name], hyper[name]) for name in sorted(hyper)]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *results)


def run(batch, hyper=HYPER, ready=None):
    """{row: (value, {array: gradient}, {metric: (sum, weight)})}"""
    ready = prepared(batch, hyper) if ready is None else ready
    values, grads, metrics = jax.device_get(battery(batch, ready, hyper))
    return {
        name: (
            values[i], {k: g[i] for k, g in grads.items()},
            {k: tuple(pair) for k, pair in zip(METRICS[ROWS[name].family], metrics[i], strict=True)},
        )
        for i, name in enumerate(sorted(hyper))
    }


def draw(seed, spread=0.5):
    rng = np.random.default_rng(seed)
    batch = {f"{side}_mask": rng.random((B, T)) < rng.choice([0.5, 0.9, 1.0]) for side in ("chosen", "rejected")}
    batch["chosen_mask"][:, 0] = batch["rejected_mask"][:, -1] = True
    one = rng.integers(B)
    batch["chosen_mask"][one] = batch["rejected_mask"][one] = False
    batch["desirable"] = (np.arange(B) % 2 == 0).astype(np.float32)[rng.permutation(B)]
    for side in ("chosen", "rejected"):
        logp = rng.uniform(-2, -0.05, (B, T))
        batch[f"{side}_logp"], batch[f"ref_{side}_logp"] = logp, logp + rng.normal(0, spread, (B, T))
        batch[f"{side}_collision"] = rng.uniform(-2, 0, (B, T))
    return {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in batch.items()}, rng


def without(batch, rows):
    """The batch with nothing kept in those rows."""
    gone = np.isin(np.arange(B), rows)[:, None]
    return {k: v & ~gone if k.endswith("_mask") else v for k, v in batch.items()}


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, rng = draw(seed)
    if rng.random() < 0.3:  # an empty response here and there
        batch["rejected_mask"][rng.integers(B)] = False
    got, expected = run(batch), loops(batch)
    assert set(got) == set(expected) == set(ROWS)
    for name, (value, _, _) in got.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("seed", [3, 4])
def test_gradient_against_finite_differences_of_the_loops(seed):
    batch, _ = draw(seed)
    got = run(batch)
    for arg in ("chosen_logp", "rejected_logp"):
        numeric = {name: np.zeros((B, T)) for name in ROWS}
        for at in map(tuple, np.argwhere(batch[mask_of(arg)])):
            ends = []
            for h in (1e-5, -1e-5):
                moved = {**batch, arg: batch[arg].astype(np.float64)}
                moved[arg][at] += h
                ends.append(loops(moved, at=batch))
            for name in ROWS:
                numeric[name][at] = (ends[0][name] - ends[1][name]) / 2e-5
        for name, (_, grads, _) in got.items():
            np.testing.assert_allclose(grads[arg], numeric[name], rtol=2e-3, atol=2e-5, err_msg=f"{name} {arg}")


@given(seed=seeds)
def test_metrics_against_loops(seed):
    batch, _ = draw(seed)
    pairs, rows = facts(batch), singles(batch)
    for name, (_, _, metrics) in run(batch).items():
        if name in PAIRED:
            assert {float(weight) for _, weight in metrics.values()} == {len(pairs)}
            wins = sum(x["zc"] > x["zr"] for x in pairs)
            expected = {"chosen_reward": sum(x["zc"] for x in pairs), "rejected_reward": sum(x["zr"] for x in pairs)}
            expected = {**expected, "accuracy": wins} if name == "dpo" else {}
        else:
            kinds = (("desirable", True), ("undesirable", False))
            split = {key: [z for z, good in rows if good == kind] for key, kind in kinds}
            for key, zs in split.items():
                assert metrics[f"{key}_reward"][1] == len(zs)
            expected = {f"{key}_reward": sum(zs) for key, zs in split.items()}
            mismatches = [z for z, _ in singles(batch, "rejected")]
            if name == "kto":
                expected["point"] = max(0, np.mean(mismatches)) * len(rows)
        for key, total in expected.items():
            np.testing.assert_allclose(metrics[key][0], total, rtol=1e-4, atol=1e-4, err_msg=f"{name} {key}")


@given(seed=seeds)
def test_poison_at_masked_slots(seed):
    batch, rng = draw(seed)
    poison = rng.choice([np.nan, np.inf, -np.inf, 1e30], (B, T)).astype(np.float32)
    poisoned = {k: np.where(batch[mask_of(k)], batch[k], poison) for k in VALUES}
    clean, dirty = run(batch), run({**batch, **poisoned})
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    for name, (_, grads, _) in dirty.items():
        assert all((g[~batch[mask_of(k)]] == 0).all() for k, g in grads.items()), name


@given(seed=seeds)
def test_partitions_add_up_where_a_row_says_so(seed):
    """With what prepare gave for the whole, losses, gradients and metrics of uneven parts add up to the whole;
    quantiles do not (below), and say so."""
    batch, rng = draw(seed)
    ready = prepared(batch, HYPER)
    part = rng.choice([[0, 0, 0, 0, 0, 1], [0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5]])[rng.permutation(B)]
    parts = [run(without(batch, np.flatnonzero(part != k)), ready=ready) for k in range(part.max() + 1)]
    whole = run(batch, ready=ready)
    for name, row in ROWS.items():
        added = jax.tree.map(lambda *shares: sum(np.asarray(x, np.float64) for x in shares), *(p[name] for p in parts))
        assert row.additive == (name not in QUANTILES) == ("additive" in row.claims or name in PARTS)
        if row.additive:
            assert_same(added, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", QUANTILES)
def test_quantiles_do_not_add_up(name):
    batch, _ = draw(8, spread=4.0)
    ready = prepared(batch, HYPER)
    added = sum(run(without(batch, np.delete(np.arange(B), k)), ready=ready)[name][0] for k in range(B))
    assert abs(added - run(batch, ready=ready)[name][0]) > 0.02


@given(seed=seeds)
def test_permutation_of_rows(seed):
    batch, rng = draw(seed)
    order = rng.permutation(B)
    whole, moved = run(batch), run({k: v[order] for k, v in batch.items()})
    for name in ROWS:
        assert_same(moved[name][0], whole[name][0])
        assert_same(moved[name][1], {k: g[order] for k, g in whole[name][1].items()}, atol=1e-5)


@given(seed=seeds)
def test_declared_constants_get_no_gradient(seed):
    for name, (_, grads, _) in run(draw(seed)[0]).items():
        for constant in CONSTANT if name in PAIRED else [*CONSTANT, "rejected_logp"]:
            np.testing.assert_array_equal(grads[constant], 0, err_msg=name)


def test_every_argument_changes_the_value():
    batch, _ = draw(1)
    base = run(batch)
    for value in VALUES:
        moved = run({**batch, value: batch[value] + np.float32(0.3)})
        need = "collision" if "collision" in value else "ref_logp" if "ref" in value else "logp"
        for name, row in ROWS.items():
            own = need in row.needs and (name in PAIRED or "collision" not in value)
            if name not in PAIRED and "rejected" in value:  # the mismatched pairs
                own = "kl_logp" in row.needs and "collision" not in value
            assert (moved[name][0] != base[name][0]) == own, (name, value)
    flipped = run({**batch, "desirable": 1 - batch["desirable"]})
    assert all(flipped[name][0] != base[name][0] for name in ROWS if name not in PAIRED)


def test_every_constant_changes_value_and_gradient():
    batch, _ = draw(2)
    base = run(batch)
    for constant in sorted({k for hyper in HYPER.values() for k in hyper}):
        scale = lambda hyper: {k: v * 1.1 if k == constant else v for k, v in hyper.items()}  # noqa: B023, E731
        moved = run(batch, {name: scale(hyper) for name, hyper in HYPER.items()})
        for name, hyper in HYPER.items():
            same = moved[name][0] == base[name][0] and (moved[name][1]["chosen_logp"] == base[name][1]["chosen_logp"]).all()
            assert same == (constant not in hyper), (name, constant)


def test_no_two_rows_agree():
    got = run(draw(7)[0], {name: dict(row.hyper) for name, row in ROWS.items()})
    values = {name: float(value) for name, (value, _, _) in got.items() if name not in PARTS}
    names = sorted(values, key=values.get)
    assert all(values[b] - values[a] > 1e-6 for a, b in zip(names, names[1:], strict=False)), values


def swapped(batch):
    other = {"chosen": "rejected", "rejected": "chosen"}
    side = {k: next((s for s in other if s in k), "") for k in batch}
    return {k: batch[k.replace(s, other[s])] if s else batch[k] for k, s in side.items()}


@given(seed=seeds)
def test_chosen_and_rejected_are_told_apart_unless_the_labels_are_worth_nothing(seed):
    batch, _ = draw(seed)
    there, back = run(batch), run(swapped(batch))
    assert all(abs(there[name][0] - back[name][0]) > 1e-6 for name in PAIRED)
    worthless = {"label_smoothing": 0.5}
    fair = {name: h | worthless if preference.SWAP in ROWS[name].claims else h for name, h in HYPER.items()}
    there, back = run(batch, fair), run(swapped(batch), fair)
    for name in PAIRED:
        if preference.SWAP in ROWS[name].claims:
            np.testing.assert_allclose(there[name][0], back[name][0], rtol=1e-5, err_msg=name)


@given(seed=seeds)
def test_log_2_where_policy_and_reference_agree(seed):
    batch, _ = draw(seed, spread=0.0)
    for name, (value, _, _) in run(batch).items():
        assert (abs(value - np.log(2)) < 1e-6) == (preference.LOG2 in ROWS[name].claims), name


def falls(name, x, h, side):
    """Whether the loss of the pair must fall as the chosen response rises (as the rejected one falls)."""
    margin, e = x["zc"] - x["zr"], h.get("label_smoothing")
    if name in ("cdpo", "exo"):
        return h["beta"] * margin < np.log((1 - e) / e)
    if name == "ipo":
        return x["zc"] / x["nc"] - x["zr"] / x["nr"] < 0.5 / h["tau"]
    if name == "ipo_sum":
        return margin < 0.5 / h["tau"]
    if name == "sppo":
        return x["zc"] < h["eta"] / 2 if side == "c" else x["zr"] > -h["eta"] / 2
    if name == "nca":
        return side == "r" or h["beta"] * x["zc"] < np.log(2)
    if name == "discopop":
        return True if abs(h["beta"] * margin) > 6 * h["tau"] else None
    if name == "apo_down":
        return True if side == "r" else None
    return None if name in QUANTILES else True


@pytest.mark.parametrize("spread", [0.3, 3.0, 50.0])
@given(seed=seeds)
def test_the_loss_falls_with_the_margin_until_its_stated_optimum(seed, spread):
    batch, _ = draw(seed, spread)
    counted = [i for i in range(B) if batch["chosen_mask"][i].any() and batch["rejected_mask"][i].any()]
    got, pairs = run(batch), facts(batch)
    for name in PAIRED:
        assert (preference.MONOTONE in ROWS[name].claims or name in PARTS) == (
            name not in (*QUANTILES, "cdpo", "exo", "ipo", "ipo_sum", "sppo", "nca", "discopop", "apo_down")
        )
        grads = got[name][1]
        for i, x in zip(counted, pairs, strict=True):
            for side, grad in (("c", grads["chosen_logp"][i]), ("r", -grads["rejected_logp"][i])):
                must = falls(name, x, HYPER[name], side)
                if must is not None:
                    assert (grad <= 1e-12 if must else grad >= -1e-12).all(), (name, i, side)
    for name in ("kto", "bco", "apo_unpaired"):
        up = np.where(batch["desirable"] > 0, 1, -1)[:, None] * got[name][1]["chosen_logp"]
        assert preference.MONOTONE in ROWS[name].claims or name in PARTS
        assert (up <= 0).all()


@given(seed=seeds)
def test_repeating_tokens_changes_nothing_where_a_row_says_so(seed):
    batch, _ = draw(seed)
    half = T // 2
    once, twice = {}, {}
    for k, x in batch.items():
        once[k] = np.concatenate([x[:, :half], np.zeros_like(x[:, half:])], axis=1) if x.ndim == 2 else x
        twice[k] = np.repeat(x[:, :half], 2, axis=1) if x.ndim == 2 else x
    once["rejected_mask"][:, 0] |= once["chosen_mask"][:, 0]
    twice["rejected_mask"][:, :2] |= twice["chosen_mask"][:, :2]
    a, b = run(once), run(twice)
    for name in PAIRED:
        same = abs(a[name][0] - b[name][0]) < 1e-5 * max(1, abs(a[name][0]))
        assert same == (preference.LENGTH in ROWS[name].claims), name


FLAT = {  # where the formula itself has no slope at a response that has fallen far
    "apo_zero", "apo_down", "exo", "kto", "apo_unpaired",
}


@pytest.mark.parametrize("drift", [20.0, 100.0, 1e4])
def test_extreme_log_ratios_are_finite_and_a_fallen_response_is_always_lifted(drift):
    batch, rng = draw(5)
    for chosen, rejected in ((-drift, drift), (drift, -drift), (drift, drift), (-drift, 0.0)):
        moved = {
            **batch, "chosen_logp": batch["chosen_logp"] + np.float32(chosen),
            "rejected_logp": batch["rejected_logp"] + np.float32(rejected),
        }
        counted = (batch["chosen_mask"] & batch["rejected_mask"].any(1, keepdims=True))
        for name, (value, grads, metrics) in run(moved).items():
            assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads.values()), name
            assert all(np.isfinite(x) for x, _ in metrics.values()), name
            if chosen < 0 and rejected == 0 and name not in FLAT and (name in PAIRED) and not name.startswith("wpo"):
                assert (grads["chosen_logp"][counted] < 0).all(), name


def test_nothing_to_train_on_is_zero():
    batch = without(draw(0)[0], np.arange(B))
    for name, (value, grads, metrics) in run(batch).items():
        assert value == 0 and all(pair == (0, 0) for pair in metrics.values()), name
        jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)


@given(seed=seeds)
def test_a_pair_with_an_empty_response_is_no_pair(seed):
    batch, rng = draw(seed)
    side, row = rng.choice(["chosen", "rejected"]), rng.integers(B)
    empty = {**batch, f"{side}_mask": batch[f"{side}_mask"] & (np.arange(B) != row)[:, None]}
    got, expected = run(empty), run(without(batch, [row]))
    for name in PAIRED:
        jax.tree.map(np.testing.assert_array_equal, got[name], expected[name])
        assert np.isfinite(got[name][0])


@pytest.mark.parametrize("seed", [0, 1])
def test_bfloat16_inputs_are_computed_in_float32(seed):
    batch, _ = draw(seed)
    half = {k: jnp.asarray(v).astype(jnp.bfloat16) if k in VALUES else v for k, v in batch.items()}
    back = {k: np.asarray(v.astype(jnp.float32)) if k in VALUES else v for k, v in half.items()}
    exact = run(back)  # one row of every way in: what is done to an input is the same for all the others
    some = {name: HYPER[name] for name in ("dpo", "orpo", "wpo", "aot", "kto", "bco")}
    for name, (value, grads, _) in run(half, some).items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, exact[name][0], rtol=1e-5, atol=1e-5, err_msg=name)
        for k in ("chosen_logp", "rejected_logp"):
            np.testing.assert_allclose(np.float32(grads[k]), exact[name][1][k], rtol=2**-7, atol=1e-5, err_msg=name)


def test_matched_and_mismatched_pairs_are_not_mixed():
    """KTO's reference point knows the mismatched responses only, and every share of a batch is given the same one."""
    batch, _ = draw(3)
    base = prepared(batch, HYPER)["kto"]["point"]
    lift = {"rejected_logp": batch["ref_rejected_logp"] + np.float32(1)}
    kl = prepared({**batch, **lift}, HYPER)["kto"]["point"]
    kept = batch["rejected_mask"].sum(1)
    np.testing.assert_allclose(kl, kept[kept > 0].mean(), rtol=1e-5)
    assert prepared({**batch, "chosen_logp": batch["chosen_logp"] + np.float32(1)}, HYPER)["kto"]["point"] == base
    assert prepared({**batch, "rejected_logp": batch["ref_rejected_logp"] - np.float32(1)}, HYPER)["kto"]["point"] == 0

    def total(tree):  # as two shards would be summed: this one, and one with twice its numbers
        return jax.tree.map(lambda x: 3 * x, tree)

    args = arguments_of(ROWS["kto"], {k: jnp.asarray(v) for k, v in {**batch, **lift}.items()})
    shared = ROWS["kto"].prepare(args, total=total)
    np.testing.assert_allclose(shared["point"], kl, rtol=1e-6)
    assert sum(shared["totals"].values()) == 3 * len(singles(batch))


def test_what_a_row_lacks_is_said():
    batch, _ = draw(0)
    row, ready = ROWS["dpo"], prepared(batch, HYPER)["dpo"]
    args = {k: batch[k] for k in ("chosen_logp", "rejected_logp", "chosen_mask", "rejected_mask")}
    with pytest.raises(TypeError, match="row 'dpo' needs the ref_logp of every response"):
        row.loss(**args, **ready)
    with pytest.raises(TypeError, match="row 'dpo' has no constant 'bta', only"):
        row.loss(**arguments_of(row, batch), **ready, bta=0.2)
    with pytest.raises(ValueError, match=r"hyper has \['beta', 'gamma'\], its parts use \['beta'\]"):
        compose("x", "", link="logistic", hyper={"beta": 1.0, "gamma": 0.0})
    with pytest.raises(ValueError, match="quantiles are of no pair"):
        compose("x", "", link="logistic", margin="quantile", weight="confidence", hyper={"beta": 1.0})


@pytest.mark.parametrize("name", ROWS)
def test_formulas_show_every_constant(name):
    row = ROWS[name]
    assert {k for k in row.hyper if f"{{{k}}}" in row.formula} == set(row.hyper)
    assert "{" not in row.formula.format(**row.hyper) and row.formula.startswith("loss = ")
