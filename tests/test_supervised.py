"""Supervised rows: laws over the table, in one compiled program, against float64 loops; labels, chunks and memory."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives.reduction import totals_of
from jaxpt.objectives.supervised import ROWS, SFT, chunked_cross_entropy, from_labels

B, T, V = 4, 3, 5
seeds = st.integers(0, 2**31 - 1)
TABLE = {row.name: row for row in ROWS if row.family == "supervised"}
HYPER = {name: dict(row.hyper) for name, row in TABLE.items()} | {"z_loss": {"z_coef": 0.03}, "focal": {"gamma": 1.5}}


@jax.jit
def battery(batch, whole, hyper):
    def one(name, row):
        totals = row.prepare(whole, **hyper[name])["totals"]

        def loss(logits, weights):
            given = {"weights": weights} if row.needs else {}
            return row.loss(logits, batch["tokens"], batch["mask"], totals=totals, **given, **hyper[name])

        (value, metrics), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(batch["logits"], batch["weights"])
        return value, grads, metrics

    return {name: one(name, row) for name, row in TABLE.items()}


def run(batch, whole=None, hyper=HYPER):
    return jax.device_get(battery(batch, batch if whole is None else whole, hyper))


def draw(seed, scale=2.0):
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0.5, 0.9])
    mask[rng.integers(B)] = False
    return {
        "logits": rng.normal(0, scale, (B, T, V)).astype(np.float32), "tokens": rng.integers(0, V, (B, T)).astype(np.int32),
        "weights": rng.choice([0.0, 0.5, 3.0], (B, T)).astype(np.float32), "mask": mask,
    }, rng


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


# --- the formulas in float64; `held`: logits at which a stopped gradient was stopped


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x[x > -np.inf] - x.max()).sum()) - x.max()


def token(name, logits, y, held=None):
    logp = log_softmax(logits)
    p = np.exp(logp[y])
    if name == "label_smoothing":
        kept = logp[logp > -np.inf]
        target = 0.9 * (np.arange(len(logp)) == y)[logp > -np.inf] + 0.1 / len(kept)
        return -(target * kept).sum()
    return {
        "z_loss": lambda: -logp[y] + 0.03 * (logits[y] - logp[y]) ** 2,
        "focal": lambda: -((1 - p) ** 1.5) * logp[y],
        "dft": lambda: -np.exp(log_softmax(logits if held is None else held)[y]) * logp[y],
    }.get(name, lambda: -logp[y])()


def loop(name, batch, held=None):
    total = weight = 0.0
    for i, t in np.argwhere(batch["mask"]):
        w = float(batch["weights"][i, t]) if name == "weighted_cross_entropy" else 1.0
        logits = batch["logits"][i, t].astype(np.float64)
        total += w * token(name, logits, batch["tokens"][i, t], None if held is None else held[i, t])
        weight += w
    return total / weight if weight else 0.0


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    got = run(batch)
    for name, (value, _, metrics) in got.items():
        np.testing.assert_allclose(value, loop(name, batch), rtol=1e-4, atol=1e-6, err_msg=name)
        n = batch["mask"].sum()
        np.testing.assert_allclose(metrics["nll"], (n * loop("cross_entropy", batch), n), rtol=1e-4, atol=1e-5)
        right = (batch["logits"].argmax(-1) == batch["tokens"])[batch["mask"]]
        assert metrics["accuracy"] == (right.sum(), n)


@pytest.mark.parametrize("seed", [0, 3])
def test_gradient_against_finite_differences_of_the_loops(seed):
    batch, _ = draw(seed)
    for name, (_, (grad, _), _) in run(batch).items():
        numeric = np.zeros((B, T, V))
        for at in np.ndindex(B, T, V):
            ends = []
            for h in (1e-5, -1e-5):
                moved = batch["logits"].astype(np.float64)
                moved[at] += h
                ends.append(loop(name, {**batch, "logits": moved}, held=batch["logits"]))
            numeric[at] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(grad, numeric, rtol=2e-3, atol=2e-6, err_msg=name)


@given(seed=seeds)
def test_masked_slots_may_hold_anything(seed):
    """NaN logits and weights, tokens of -100 or beyond the vocabulary."""
    batch, rng = draw(seed)
    mask = batch["mask"]
    garbage = lambda shape: rng.choice([np.nan, np.inf, -np.inf, 1e30], shape)  # noqa: E731
    dirty = {
        "logits": np.where(mask[..., None], batch["logits"], garbage((B, T, V))).astype(np.float32),
        "weights": np.where(mask, batch["weights"], garbage((B, T))).astype(np.float32),
        "tokens": np.where(mask, batch["tokens"], rng.choice([-100, 10**6], (B, T))), "mask": mask,
    }
    clean, poisoned = run(batch), run(dirty)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    for _, (grad, to_weights), _ in poisoned.values():
        assert (grad[~mask] == 0).all() and (to_weights == 0).all()


@given(seed=seeds)
def test_uneven_partitions_add_up_and_rows_may_be_permuted(seed):
    batch, rng = draw(seed)
    part, order = rng.permutation([0, 1, 1, 1]), rng.permutation(B)
    shares = [run({**batch, "mask": batch["mask"] & (part == k)[:, None]}, batch) for k in (0, 1)]
    whole = run(batch)
    assert_same(jax.tree.map(lambda x, y: np.float64(x) + y, *shares), whole, rtol=1e-4)
    moved = run({k: x[order] for k, x in batch.items()})
    for name in TABLE:
        assert_same(moved[name][0], whole[name][0])
        assert_same(moved[name][1][0], whole[name][1][0][order])


@given(seed=seeds)
def test_a_padded_vocabulary_is_neutral(seed):
    batch, _ = draw(seed)
    batch["logits"][..., V - 1] = -np.inf
    batch["tokens"] %= V - 1
    cut = {**batch, "logits": batch["logits"][..., : V - 1]}
    for name, (value, (grad, _), _) in run(batch).items():
        np.testing.assert_allclose(value, loop(name, cut), rtol=1e-4, atol=1e-6, err_msg=name)
        assert np.isfinite(grad).all() and (grad[..., V - 1] == 0).all(), name


def test_extreme_logits_are_finite_and_cross_entropy_does_not_saturate():
    batch, rng = draw(1)
    batch["mask"][:] = True
    batch["logits"] = (1e4 * rng.choice([-1, 1], (B, T, V))).astype(np.float32)
    got = run(batch)
    for name, (value, (grad, _), _) in got.items():
        assert np.isfinite(value) and np.isfinite(grad).all(), name
    np.testing.assert_allclose(got["cross_entropy"][0], loop("cross_entropy", batch), rtol=1e-5)
    p = np.exp(np.apply_along_axis(log_softmax, -1, batch["logits"]))
    np.testing.assert_allclose(got["cross_entropy"][1][0], (p - np.eye(V)[batch["tokens"]]) / (B * T), atol=1e-6)


def test_a_certain_token_costs_nothing_and_an_excluded_one_has_no_nan():
    batch, _ = draw(1)
    batch["mask"][:] = True
    batch["logits"] = np.where(np.eye(V, dtype=bool)[batch["tokens"]], 0.0, -200.0).astype(np.float32)
    for name in ("cross_entropy", "focal", "dft"):
        value, (grad, _), _ = run(batch)[name]
        assert value == 0 and np.isfinite(grad).all(), name
    batch["logits"] = np.where(np.eye(V, dtype=bool)[batch["tokens"]], -np.inf, 0.0).astype(np.float32)
    got = run(batch)
    assert got["cross_entropy"][0] == np.inf and got["dft"][0] == 0 and np.isfinite(got["dft"][1][0]).all()


def test_nothing_kept_or_nothing_weighed_is_nothing():
    batch, _ = draw(0)
    weightless = {**batch, "weights": np.zeros((B, T), np.float32)}
    assert run(weightless)["weighted_cross_entropy"][0] == 0
    batch["mask"][:] = False
    for name, (value, (grad, _), metrics) in run(batch).items():
        assert value == 0 and (grad == 0).all() and all(m == (0, 0) for m in metrics.values()), name


@given(seed=seeds)
def test_ends_of_the_constants_and_aliases(seed):
    batch, _ = draw(seed)
    off = {"z_loss": {"z_coef": 0.0}, "label_smoothing": {"smoothing": 0.0}, "focal": {"gamma": 0.0}}
    ones = {**batch, "weights": np.ones((B, T), np.float32)}
    got = run(ones, hyper=HYPER | off)
    for name in ("z_loss", "label_smoothing", "focal", "weighted_cross_entropy", "sequence_kd"):
        assert_same(got[name][:2], got["cross_entropy"][:2])
    got = run(batch)
    if batch["mask"].sum() > 1:
        for name in set(TABLE) - {"cross_entropy", "sequence_kd"}:
            assert not np.allclose(got[name][1][0], got["cross_entropy"][1][0], rtol=1e-4, atol=1e-7), name
    assert TABLE["sequence_kd"].alias_of == "cross_entropy"


def test_cross_entropy_is_sft():
    """The row of logits and the row of the policy algebra are one loss on two kinds of argument."""
    batch, _ = draw(5)
    value = run(batch)["cross_entropy"][0]
    logp = np.take_along_axis(np.apply_along_axis(log_softmax, -1, batch["logits"]), batch["tokens"][..., None], -1)[..., 0]
    logp, mask = jnp.asarray(logp, jnp.float32), jnp.asarray(batch["mask"])
    np.testing.assert_allclose(SFT.loss(logp, logp, jnp.ones((B, T)), mask, totals=totals_of(mask))[0], value, rtol=1e-5)


def test_half_precision_is_computed_in_float32():
    batch, _ = draw(6)
    logits = jnp.asarray(batch["logits"], jnp.bfloat16)
    row = TABLE["z_loss"]
    value = row.loss(logits, batch["tokens"], batch["mask"], **row.prepare(batch), z_coef=0.03)[0]
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, loop("z_loss", {**batch, "logits": np.asarray(logits, np.float32)}), rtol=1e-5)


# --- labels and chunks


@given(seed=seeds, eos=st.integers(0, V - 1))
def test_labels_are_left_out_by_place(seed, eos):
    rng = np.random.default_rng(seed)
    labels = rng.choice([-100, eos, 1, 2], (B, 6))
    tokens, mask = from_labels(jnp.asarray(labels))
    expected = (labels != -100) & (np.arange(6) > 0)
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(tokens, np.where(expected, labels, 0))
    np.testing.assert_array_equal(from_labels(jnp.asarray(labels), ignore=eos)[1], (labels != eos) & (np.arange(6) > 0))


def hidden_case(rows=3, width=7, size=4, vocab=11):
    rng = np.random.default_rng(0)
    hidden, W = rng.normal(size=(rows, width, size)), rng.normal(size=(size, vocab))
    mask = rng.random((rows, width)) < 0.7
    mask[:, 0] = mask[1] = False
    return [jnp.asarray(x, jnp.float32) for x in (hidden, W)], jnp.asarray(rng.integers(0, vocab, (rows, width))), mask


def test_chunks_give_the_rows_of_logits():
    """With poison where nothing is decided, in hidden states and tokens; in value and both gradients."""
    (hidden, W), tokens, mask = hidden_case()
    totals = totals_of(jnp.asarray(mask))
    decides = np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    dirty = jnp.where(decides[..., None], hidden, jnp.nan), jnp.where(mask, tokens, -100)

    def plain(hidden, W, row, **hyper):
        logits = jnp.pad(hidden[:, :-1] @ W, ((0, 0), (1, 0), (0, 0)))
        return TABLE[row].loss(logits, tokens, mask, totals=totals, **hyper)

    def chunked(hidden, W, z_coef):
        return chunked_cross_entropy(hidden, W, dirty[1], jnp.asarray(mask), totals=totals, z_coef=z_coef, chunk=5)

    both = dict(argnums=(0, 1), has_aux=True)
    for row, hyper, z_coef in (("cross_entropy", {}, 0.0), ("z_loss", {"z_coef": 0.1}, 0.1)):
        (value, metrics), grads = jax.jit(jax.value_and_grad(lambda h, W: plain(h, W, row, **hyper), **both))(hidden, W)  # noqa: B023
        got = jax.jit(jax.value_and_grad(lambda h, W: chunked(h, W, z_coef), **both))(dirty[0], W)  # noqa: B023
        assert_same(got[0], (value, {"nll": metrics["nll"]}))
        assert_same(got[1], grads)
        assert (np.asarray(got[1][0])[~decides] == 0).all()


def test_chunks_need_a_quarter_of_the_memory_at_a_vocabulary_of_32k():
    """Compiled, not run: temporary bytes of value and gradients, for 1024 positions in chunks of 128."""
    rows, width, size, vocab = 4, 257, 8, 32768
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, width, size), (size, vocab))]
    tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    totals = {"tokens": 1024.0}

    def peak(loss):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def mask_of(tokens):
        return jnp.ones(tokens.shape, bool).at[:, 0].set(False)

    def naive(hidden, W, tokens):
        logits = jnp.pad(hidden[:, :-1] @ W, ((0, 0), (1, 0), (0, 0)))
        return TABLE["cross_entropy"].loss(logits, tokens, mask_of(tokens), totals=totals)[0]

    def chunked(hidden, W, tokens):
        return chunked_cross_entropy(hidden, W, tokens, mask_of(tokens), totals=totals, chunk=128)[0]

    held = 1024 * vocab * 4
    assert peak(naive) >= held and peak(chunked) <= peak(naive) / 4 and peak(chunked) < held
