"""Divergences as rows: laws over the whole table, in one compiled program, against float64 loops."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from distillation_loops import HYPER, PAPER, ROWS, TABLE, kl, loop, softmax, token
from jaxpt.objectives.distillation import annealed, distribution, kl_to_mixture, minillm_long_term
from jaxpt.types import bare_trajectory

B, T, V = 4, 3, 5
seeds = st.integers(0, 2**31 - 1)


@jax.jit
def battery(batch, whole_mask, hyper):
    def one(row, hyper):
        totals = row.prepare({**batch, "mask": whole_mask}, **hyper)["totals"]

        def loss(student, teacher):
            return row.loss(student, teacher, batch["mask"], totals=totals, **hyper)

        value_and_grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, metrics), grads = value_and_grads(batch["student_logits"], batch["teacher_logits"])
        return value, grads, metrics

    return {name: one(row, hyper[name]) for name, row in TABLE.items()}


def run(batch, hyper=HYPER, whole_mask=None):
    return jax.device_get(battery(batch, batch["mask"] if whole_mask is None else whole_mask, hyper))


def draw(seed, scale=2.0):
    rng = np.random.default_rng(seed)
    student, teacher = rng.normal(0, scale, (2, B, T, V)).astype(np.float32)
    mask = rng.random((B, T)) < rng.choice([0.5, 0.9])
    mask[rng.integers(B)] = False
    return {"student_logits": student, "teacher_logits": teacher, "mask": mask}, rng


def assert_same(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    got = run(batch)
    assert set(got) == set(PAPER) | {"kd"}
    for name, (value, _, metrics) in got.items():
        np.testing.assert_allclose(value, loop(name, batch), rtol=2e-4, atol=1e-6, err_msg=name)
        n = batch["mask"].sum()
        np.testing.assert_allclose(metrics["divergence"], (value * n, n), rtol=1e-4)
        same = (batch["student_logits"].argmax(-1) == batch["teacher_logits"].argmax(-1))[batch["mask"]]
        assert metrics["agreement"] == (same.sum(), n)


def test_an_impossible_entry_is_nobody_s_best():
    batch, _ = draw(3)
    batch["mask"][:] = True
    batch["student_logits"][..., 0] = batch["teacher_logits"][..., 0] = -np.inf
    same = batch["student_logits"].argmax(-1) == batch["teacher_logits"].argmax(-1)
    assert 0 < same.sum() < B * T
    for name in ("forward_kl", "reverse_kl"):
        assert run(batch)[name][2]["agreement"] == (same.sum(), B * T)


@pytest.mark.parametrize("seed", [1, 5])
def test_gradient_against_finite_differences_of_the_loops(seed):
    batch, _ = draw(seed)
    for name, (_, (grad, _), _) in run(batch).items():
        numeric = np.zeros((B, T, V))
        for i, t in np.argwhere(batch["mask"]):
            for v in range(V):
                ends = []
                for h in (1e-5, -1e-5):
                    student = batch["student_logits"][i, t].astype(np.float64)
                    student[v] += h
                    ends.append(token(name, student, batch["teacher_logits"][i, t], HYPER[name]))
                numeric[i, t, v] = (ends[0] - ends[1]) / 2e-5 / batch["mask"].sum()
        np.testing.assert_allclose(grad, numeric, rtol=2e-3, atol=2e-6, err_msg=name)


@given(seed=seeds)
def test_masked_slots_may_hold_anything(seed):
    batch, rng = draw(seed)
    dirty = {
        k: np.where(batch["mask"][..., None], batch[k], rng.choice([np.nan, np.inf, -np.inf, 1e30], (B, T, V))).astype(np.float32)
        for k in ("student_logits", "teacher_logits")
    }
    clean, poisoned = run(batch), run({**dirty, "mask": batch["mask"]})
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    for _, (grad, to_teacher), _ in poisoned.values():
        assert (grad[~batch["mask"]] == 0).all() and (to_teacher == 0).all()


@given(seed=seeds)
def test_uneven_partitions_add_up(seed):
    batch, rng = draw(seed)
    part = rng.permutation([0, 1, 1, 1])
    shares = [run({**batch, "mask": batch["mask"] & (part == k)[:, None]}, whole_mask=batch["mask"]) for k in (0, 1)]
    assert_same(jax.tree.map(lambda x, y: np.float64(x) + y, *shares), run(batch), rtol=1e-4)


@given(seed=seeds)
def test_rows_and_vocabulary_may_be_permuted_and_logits_shifted(seed):
    batch, rng = draw(seed)
    rows, words = rng.permutation(B), rng.permutation(V)
    shift = rng.normal(size=(2, B, T, 1)).astype(np.float32)
    moved = {k: (batch[k] + by)[rows][..., words] for k, by in zip(("student_logits", "teacher_logits"), shift)}
    for name, (value, (grad, _), _) in run({**moved, "mask": batch["mask"][rows]}).items():
        expected = run(batch)[name]
        np.testing.assert_allclose(value, expected[0], rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(grad, expected[1][0][rows][..., words], rtol=1e-3, atol=1e-6, err_msg=name)


@given(seed=seeds)
def test_at_least_0_and_0_only_at_equality_where_the_gradient_vanishes(seed):
    batch, rng = draw(seed)
    for name, (value, _, _) in run(batch).items():
        assert value > 0 or not batch["mask"].any(), name
    equal = {**batch, "teacher_logits": batch["student_logits"]}
    for name, (value, (grad, _), _) in run(equal).items():
        assert value == 0, name
        np.testing.assert_allclose(grad, 0, atol=2e-7, err_msg=name)
    close = {**batch, "teacher_logits": batch["student_logits"] + rng.normal(0, 1e-4, (B, T, V)).astype(np.float32)}
    for name, (value, _, _) in run(close).items():  # no negative rounding: the smallest difference is still one
        assert value > 0 or not batch["mask"].any(), name


@pytest.mark.parametrize("side", ["student_logits", "teacher_logits"])
def test_where_one_side_allows_nothing_the_gradient_is_a_number(side):
    batch, _ = draw(6)
    batch[side][0, 0], batch["mask"][0, 0] = -np.inf, True
    for name, (_, (grad, to_teacher), _) in run(batch).items():
        assert np.isfinite(grad).all() and (to_teacher == 0).all(), name


@pytest.mark.parametrize("out_of_reach", [-1e4, -1e9])
def test_an_entry_out_of_reach_costs_no_digits(out_of_reach):
    """As masks are often written; a formula in log(t/s) that cancels later loses 0.05% at -1e4 and everything at -1e9."""
    batch, rng = draw(4)
    for x in (batch["student_logits"], batch["teacher_logits"]):
        np.put_along_axis(x, rng.integers(0, V, (B, T, 1)), out_of_reach, axis=-1)
    bounded = {"jsd", "gkd", "jsd_rescaled", "skew_kl", "skew_reverse_kl", "tvd", "alpha_divergence"}
    for alpha in (0.3, 0.5, 0.8):
        hyper = {**HYPER, "alpha_divergence": {"alpha": alpha}}
        for name, (value, (grad, _), _) in run(batch, hyper).items():
            assert np.isfinite(value) and np.isfinite(grad).all(), name
            if name in bounded:
                np.testing.assert_allclose(value, loop(name, batch, hyper), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("x", [0.098, -0.098])
def test_the_series_has_six_terms_up_to_its_edge(x):
    """One entry decides: q - p = q x at a probability of a twentieth."""
    q = np.array([0.05, 0.95])
    p = q + [0.05 * x, -0.05 * x]
    exact = np.sum(q * (p / q - 1 - np.log(p / q)))
    got = kl_to_mixture(*(distribution(jnp.log(jnp.asarray(z, jnp.float32))) for z in (q, p)), np.float32(1.0))
    np.testing.assert_allclose(got, exact, rtol=1e-5)


@given(seed=seeds)
def test_a_padded_vocabulary_is_neutral(seed):
    """-inf on both sides, as where a vocabulary is padded: the same value and gradient as of the smaller vocabulary."""
    batch, rng = draw(seed)
    at = int(rng.integers(V))
    padded = {k: batch[k].copy() for k in ("student_logits", "teacher_logits")}
    for x in padded.values():
        x[..., at] = -np.inf
    cut = {k: np.delete(x, at, axis=-1) for k, x in padded.items()} | {"mask": batch["mask"]}
    for name, (value, (grad, _), _) in run({**padded, "mask": batch["mask"]}).items():
        np.testing.assert_allclose(value, loop(name, cut), rtol=2e-4, atol=1e-6, err_msg=name)
        assert np.isfinite(grad).all() and (grad[..., at] == 0).all(), name
        np.testing.assert_allclose(grad.sum(-1), 0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("side", ["student_logits", "teacher_logits"])
def test_a_support_that_only_one_side_has(side):
    """What the teacher excludes costs a bounded divergence its mass, and is infinitely wrong where the formula says so."""
    batch, _ = draw(3)
    batch["mask"][:] = True
    batch[side] = batch[side].copy()
    batch[side][..., 2] = -np.inf
    infinite = {"forward_kl", "kd"} if side == "student_logits" else {"reverse_kl", "minillm_single_step"}
    if side == "student_logits" and (np.argsort(-batch["teacher_logits"], axis=-1)[..., :2] == 2).any():
        infinite |= {"top_k_forward_kl"}
    for name, (value, (grad, _), _) in run(batch).items():
        if name in infinite:
            assert value == np.inf and np.isfinite(grad).all(), name
        else:
            np.testing.assert_allclose(value, loop(name, batch), rtol=2e-4, err_msg=name)
            assert np.isfinite(grad).all() and (grad[..., 2] == 0).all() == (side == "student_logits"), name


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_extreme_logits_are_finite_and_kl_does_not_saturate(size):
    batch, rng = draw(7)
    batch["mask"][:] = True
    for k in ("student_logits", "teacher_logits"):
        batch[k] = (size * rng.choice([-1, 1], (B, T, V))).astype(np.float32)
    got = run(batch)
    for name, (value, (grad, _), _) in got.items():
        assert np.isfinite(value) and value >= 0 and np.isfinite(grad).all(), name
    p_s, p_t = (np.apply_along_axis(softmax, -1, batch[k]) for k in ("student_logits", "teacher_logits"))
    np.testing.assert_allclose(got["forward_kl"][1][0], (p_s - p_t) / (B * T), atol=1e-6)
    lost = (p_t * (batch["teacher_logits"].astype(np.float64) - batch["student_logits"])).sum(-1)  # up to normalisers
    assert got["forward_kl"][0] > 0.5 * size and lost.max() > size


def test_half_precision_is_computed_in_float32():
    batch, _ = draw(11)
    half = {k: jnp.asarray(batch[k], jnp.bfloat16) for k in ("student_logits", "teacher_logits")}
    exact = {k: np.asarray(x, np.float32) for k, x in half.items()}
    names = ("forward_kl", "tvd")
    losses = lambda half: {k: TABLE[k].loss(**half, mask=batch["mask"], **TABLE[k].prepare(batch))[0] for k in names}  # noqa: E731
    got = jax.jit(losses)(half)
    for name, value in got.items():
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, loop(name, {**exact, "mask": batch["mask"]}), rtol=1e-5)


@given(seed=seeds)
def test_nothing_kept_is_nothing(seed):
    batch, _ = draw(seed)
    batch["mask"][:] = False
    for name, (value, (grad, _), metrics) in run(batch).items():
        assert value == 0 and (grad == 0).all() and all(x == (0, 0) for x in metrics.values()), name


# --- what parameters do


def at(name, batch, **constants):
    value, (grad, _), _ = run(batch, HYPER | {name: constants})[name]
    return value, grad


@given(seed=seeds)
def test_the_ends_of_jsd(seed):
    """jsd is 0 at both ends, without a jump; jsd_rescaled is the forward KL at 0 and the reverse KL at 1, without one."""
    batch, _ = draw(seed)
    got = run(batch)
    for beta, kl_there in ((0.0, got["forward_kl"]), (1.0, got["reverse_kl"])):
        inside = abs(beta - 1e-3)
        assert at("jsd", batch, beta=beta)[0] == 0 and (at("jsd", batch, beta=beta)[1] == 0).all()
        assert_same(at("jsd_rescaled", batch, beta=beta), (kl_there[0], kl_there[1][0]))
        value, grad = at("jsd_rescaled", batch, beta=inside)
        np.testing.assert_allclose(value, kl_there[0], rtol=0.3)
        assert_same(at("jsd", batch, beta=inside), (value * 1e-3 * (1 - 1e-3), grad * 1e-3 * (1 - 1e-3)), rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(value, loop("jsd_rescaled", batch, HYPER | {"jsd_rescaled": {"beta": inside}}), rtol=1e-4)


@given(seed=seeds, beta=st.sampled_from([0.0, 1e-3, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0]))
def test_swapping_student_and_teacher(seed, beta):
    batch, _ = draw(seed)
    swapped = {"student_logits": batch["teacher_logits"], "teacher_logits": batch["student_logits"], "mask": batch["mask"]}
    for name in ("jsd", "jsd_rescaled"):
        np.testing.assert_allclose(at(name, batch, beta=beta)[0], at(name, swapped, beta=1 - beta)[0], rtol=1e-4, atol=1e-8)
    a, b = at("alpha_divergence", batch, alpha=beta)[0], at("alpha_divergence", swapped, alpha=1 - beta)[0]
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8)
    got, other = run(batch), run(swapped)
    np.testing.assert_allclose(got["forward_kl"][0], other["reverse_kl"][0], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(got["tvd"][0], other["tvd"][0], rtol=1e-5, atol=1e-8)


@given(seed=seeds)
def test_where_families_of_divergences_meet(seed):
    batch, _ = draw(seed)
    got = run(batch)
    kls = {end: (got[name][0], got[name][1][0]) for end, name in ((1.0, "forward_kl"), (0.0, "reverse_kl"))}
    for end, expected in kls.items():
        assert_same(at("alpha_divergence", batch, alpha=end), expected, rtol=1e-4)
        near = at("alpha_divergence", batch, alpha=abs(end - 1e-4))
        np.testing.assert_allclose(near[0], expected[0], rtol=1e-2)
        np.testing.assert_allclose(near[1], expected[1], rtol=2e-2, atol=1e-3)
    assert_same(at("skew_kl", batch, alpha=0.0), kls[1.0])
    assert_same(at("skew_reverse_kl", batch, alpha=0.0), kls[0.0])
    assert_same(at("kd", batch, temperature=1.0), kls[1.0])
    for k, full in (("top_k_forward_kl", kls[1.0]), ("top_k_reverse_kl", kls[0.0])):
        values = [at(k, batch, k=float(n))[0] for n in range(V + 2)]
        assert abs(values[0]) < 1e-9 and all(a <= b + 1e-6 for a, b in zip(values, values[1:]))  # finer outcomes tell more
        assert_same(at(k, batch, k=float(V)), full, rtol=1e-4)
    bound = -np.log(0.1) + 1e-6
    assert got["skew_kl"][0] <= bound and got["skew_reverse_kl"][0] <= bound and got["tvd"][0] <= 1


def test_temperature_squared_keeps_the_gradient_s_size():
    """Hinton et al. 2015, section 2: at a high temperature the gradient tends to that of the squared
    difference of the centred logits, (s_v - t_v) / V, whatever the temperature; without the factor it would
    fall as its square."""
    batch, _ = draw(2)
    batch["mask"][:] = True
    s, t = (batch[k].astype(np.float64) for k in ("student_logits", "teacher_logits"))
    limit = ((s - s.mean(-1, keepdims=True)) - (t - t.mean(-1, keepdims=True))) / V / (B * T)
    for temperature in (100.0, 1000.0):
        np.testing.assert_allclose(at("kd", batch, temperature=temperature)[1], limit, rtol=0.05, atol=1e-3)


# --- aliases, on-policy distillation, schedules


@given(seed=seeds)
def test_aliases_and_only_aliases_agree(seed):
    got = run(draw(seed)[0], {name: dict(row.hyper) | ({"k": 2.0} if "k" in row.hyper else {}) for name, row in TABLE.items()})
    names = list(TABLE)
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            same = np.allclose(got[a][0], got[b][0], rtol=1e-5) and np.allclose(got[a][1][0], got[b][1][0], rtol=1e-5, atol=1e-7)
            declared = a == TABLE[b].alias_of or b == TABLE[a].alias_of
            assert same == declared or got[a][0] == 0, (a, b)


def test_sampled_tokens_follow_the_gradient_of_the_reverse_kl():
    """Enumerated on one state: the expectation of opd's gradient over the student's own tokens is reverse_kl's."""
    rng = np.random.default_rng(0)
    student, teacher = jnp.asarray(rng.normal(size=(2, V)), jnp.float32)
    opd = {row.name: row for row in ROWS}["opd"]
    traj = bare_trajectory(
        jnp.arange(V)[:, None], jnp.ones((V, 1), bool), reward=jnp.full(V, jnp.nan),  # no reward has a say
        old_logp=jax.nn.log_softmax(student)[:, None],
    )

    def of_token(logits, v):
        logp, ref_logp = (jax.nn.log_softmax(x)[v][None, None] for x in (logits, teacher))
        one = jax.tree.map(lambda x: x[v][None], traj)
        ready = opd.prepare(one, ref_logp=ref_logp)
        given = {"totals": ready["totals"], "ref_logp": ref_logp}
        return opd.loss(logp, one.old_logp, ready["advantages"], ready["mask"], **given)[0]

    by_token = jax.jit(jax.vmap(jax.grad(of_token), (None, 0)))(student, jnp.arange(V))
    p_s, p_t = softmax(student), softmax(teacher)
    expected = p_s * (np.log(p_s / p_t) - kl(p_s, p_t))
    np.testing.assert_allclose(p_s @ by_token, expected, rtol=1e-4, atol=1e-6)
    row = TABLE["reverse_kl"]
    of_state = lambda x: row.loss(x[None, None], teacher[None, None], jnp.ones((1, 1)), totals={"tokens": 1.0})[0]  # noqa: E731
    grad = jax.jit(jax.grad(of_state))(student)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def test_discount_0_gives_every_token_its_own_log_ratio():
    rng = np.random.default_rng(1)
    old, ref = rng.normal(size=(2, 2, 5)).astype(np.float32)
    mask = np.array([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0]], bool)
    opd = {row.name: row for row in ROWS}["opd"]
    traj = bare_trajectory(jnp.zeros((2, 5), int), jnp.asarray(mask), reward=jnp.asarray([1.0, -3.0]), old_logp=jnp.asarray(old))
    ref_logp = jnp.asarray(np.where(mask, ref, np.nan))
    for gamma in (0.0, 0.5):
        expected = np.zeros((2, 5))
        for i in range(2):
            kept = np.flatnonzero(mask[i])
            for n, t in enumerate(kept):
                expected[i, t] = sum(0.7 * gamma**k * (ref[i, s] - old[i, s]) for k, s in enumerate(kept[n:]))
        rewards = {"process": jnp.full((2, 5), jnp.nan)}  # have no say either
        got = opd.prepare(traj, ref_logp=ref_logp, gamma=gamma, beta=0.7, **rewards)["advantages"]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_minillm_s_long_term_is_the_mean_of_what_follows():
    rng = np.random.default_rng(4)
    old, teacher = rng.normal(size=(2, 2, 5))
    mask = np.array([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], bool)
    expected = np.zeros((2, 5))
    for t, behind in ((1, [3, 4]), (3, [4])):
        expected[0, t] = np.mean([teacher[0, s] - old[0, s] for s in behind])
    poisoned = [jnp.asarray(np.where(mask, x, np.inf), jnp.float32) for x in (old, teacher)]
    np.testing.assert_allclose(minillm_long_term(*poisoned, jnp.asarray(mask)), expected, rtol=1e-5, atol=1e-6)


@given(
    start=st.floats(-2, 2, width=32), end=st.floats(-2, 2, width=32), decay=st.sampled_from([1e-3, 0.1, 0.9, 0.99999, 1.0]),
    steps=st.integers(1, 1000),
)
def test_annealing_ends_at_its_end(start, end, decay, steps):
    at_step = lambda step: float(annealed(jnp.float32(step), steps, start, end, decay))  # noqa: E731
    assert at_step(0) == pytest.approx(start, abs=1e-6)
    assert at_step(steps) == pytest.approx(end, abs=1e-6) == pytest.approx(at_step(10 * steps), abs=1e-6)
    middle = end + (start - end) * ((decay**0.5 - decay) / (1 - decay) if decay < 0.9999 else 0.5)
    assert at_step(steps / 2) == pytest.approx(middle, abs=1e-3)


def test_what_is_often_written_does_not_end_at_its_end():
    """alpha_t = a0 g^(t/T) + a1 (1 - g^(t/T)) with a0 .9, a1 .1, g .9 ends at .82; it needs g of a hundredth."""
    written = lambda g: 0.9 * g + 0.1 * (1 - g)  # noqa: E731
    assert written(0.9) == pytest.approx(0.82) and written(0.01) == pytest.approx(0.108)
    assert float(annealed(jnp.float32(60), 60, 0.9, 0.1, 0.9)) == pytest.approx(0.1)


@given(seed=st.integers(0, 2**31 - 1), size=st.floats(1e-4, 0.3), share=st.floats(0.01, 1.0))
def test_near_equality_a_divergence_keeps_its_digits(seed, size, share):
    """Where the difference would cancel, a series of six terms stands: against float64, to float32's digits."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, 8)
    near = (logits + rng.uniform(-size, size, 8)).astype(np.float32)
    logp, logq = (x - np.log(np.exp(x).sum()) for x in (near.astype(np.float64), np.float32(logits).astype(np.float64)))
    q = np.exp(logq)
    x = np.float64(np.float32(share)) * np.expm1(logp - logq)
    exact = np.sum(q * (x - np.log1p(x))) / np.float64(np.float32(share))
    got = kl_to_mixture(*(distribution(jnp.asarray(z, jnp.float32)) for z in (logits, near)), np.float32(share))
    np.testing.assert_allclose(got, exact, rtol=3e-5 + 2e-6 / size, atol=1e-12)
