"""Length rewards: ranges, order, loops, and the two that go wrong."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives.lengths import ROWS

B = 8
seeds = st.integers(0, 2**31 - 1)
TABLE = {row.name: row for row in ROWS}
HYPER = {name: dict(row.hyper) for name, row in TABLE.items()} | {"kimi_length": {"length_weight": 0.7}}
for name in ("soft_overlong", "cosine_length"):
    HYPER[name]["max_length"] = 1000.0
HYPER["soft_overlong"]["buffer"] = 300.0


@jax.jit
def battery(batch, hyper):
    def one(name, row):
        given = {what: batch[what] for what in row.needs}
        added = lambda length, reward: row.loss(length, reward, **given, **row.prepare(batch), **hyper[name])  # noqa: E731
        value, pull = jax.vjp(added, batch["length"], batch["reward"])
        return value, pull(jnp.ones_like(value))

    return {name: one(name, row) for name, row in TABLE.items()}


def run(batch, hyper=HYPER):
    return jax.device_get(battery(batch, hyper))


def draw(seed):
    rng = np.random.default_rng(seed)
    return {
        "length": rng.choice([0, 1, 300, 699, 700, 701, 850, 999, 1000, 1001, 5000], B).astype(np.float32),
        "reward": rng.choice([0.0, 1.0], B).astype(np.float32),
        "target": rng.choice([100, 700, 3000], B).astype(np.float32),
        "group": rng.choice([3, 7, -1], B),
    }, rng


def kimi(batch, i, weight):
    lengths = [batch["length"][j] for j in range(B) if batch["group"][j] == batch["group"][i] and batch["length"][j] > 0]
    if batch["length"][i] == 0 or min(lengths) == max(lengths):
        return 0.0
    place = 0.5 - (batch["length"][i] - min(lengths)) / (max(lengths) - min(lengths))
    return weight * (place if batch["reward"][i] > 0 else min(0, place))


def cosine(length, reward, limit=1000):
    if length >= limit:
        return -10 - reward
    short, long = (2, 1) if reward > 0 else (-10, 0)
    return long + (short - long) * (1 + np.cos(np.pi * length / limit)) / 2 - reward


def loop(name, batch, i):
    n, target, reward = (float(batch[k][i]) for k in ("length", "target", "reward"))
    return {
        "soft_overlong": lambda: 0 if n <= 700 else -1 if n > 1000 else (700 - n) / 300,
        "length_linear": lambda: -3e-4 * n,
        "length_quadratic": lambda: -1e-6 * (n - target) ** 2,
        "lcpo_exact": lambda: -3e-4 * abs(n - target),
        "length_absolute": lambda: -3e-4 * abs(n - target),
        "lcpo_max": lambda: min(max(3e-4 * (target - n) + 0.5, 0), 1) - 1 if reward else 0,
        "kimi_length": lambda: kimi(batch, i, 0.7),
        "cosine_length": lambda: cosine(n, reward),
    }[name]()


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    for name, (value, (_, to_reward)) in run(batch).items():
        expected = [loop(name, batch, i) for i in range(B)]
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5, err_msg=name)
        assert (to_reward == 0).all(), name  # what is added tells the reward nothing about itself


RANGE = {
    "soft_overlong": (-1, 0), "lcpo_max": (-1, 0), "lcpo_exact": (-np.inf, 0), "length_absolute": (-np.inf, 0),
    "length_linear": (-np.inf, 0), "length_quadratic": (-np.inf, 0), "kimi_length": (-0.5, 0.5),
}


@given(seed=seeds)
def test_ranges(seed):
    batch, rng = draw(seed)
    batch["length"] = rng.choice([0.0, 1.0, 1e3, 1e6], B).astype(np.float32)
    for name, (value, (slope, _)) in run(batch).items():
        assert np.isfinite(value).all() and np.isfinite(slope).all(), name
        low, high = RANGE.get(name, (-np.inf, np.inf))
        assert (low <= value).all() and (value <= high).all(), name
    wrong = {**batch, "reward": np.zeros(B, np.float32)}
    assert all((run(wrong)[name][0] <= 0).all() for name in RANGE)  # no length earns a wrong answer anything


@given(seed=seeds)
def test_nobody_gains_by_writing_more(seed):
    """Non-increasing in the own length: everywhere for these, beyond the target for the two distances."""
    batch, rng = draw(seed)
    longer = batch["length"].copy()
    i = int(rng.integers(B))
    longer[i] += 50
    a, b = run(batch), run({**batch, "length": longer})
    beyond = batch["length"][i] >= batch["target"][i]
    always = {"soft_overlong", "length_linear", "lcpo_max"}
    for name in always | ({"length_quadratic", "lcpo_exact", "length_absolute"} if beyond else set()):
        assert b[name][0][i] <= a[name][0][i] + 1e-6, name
    if 0 < batch["length"][i]:
        longest = batch["length"][batch["group"] == batch["group"][i]].max()
        assert b["kimi_length"][0][i] <= a["kimi_length"][0][i] + 1e-6 or longest == batch["length"][i]


@given(seed=seeds)
def test_permutation_and_int_or_half_precision_lengths(seed):
    batch, rng = draw(seed)
    order = rng.permutation(B)
    whole, moved = run(batch), run({k: x[order] for k, x in batch.items()})
    for name, (value, _) in whole.items():
        np.testing.assert_allclose(moved[name][0], value[order], rtol=1e-6, atol=1e-6, err_msg=name)
    for dtype in (jnp.int32, jnp.bfloat16):
        length = jnp.asarray(batch["length"], dtype)
        for name in ("soft_overlong", "lcpo_max"):
            row = TABLE[name]
            given = {what: batch[what] for what in row.needs}
            value = row.loss(length, jnp.asarray(batch["reward"]), **given, **HYPER[name])
            exact = row.loss(length.astype(jnp.float32), jnp.asarray(batch["reward"]), **given, **HYPER[name])
            assert value.dtype == jnp.float32 and np.array_equal(value, exact)


def test_only_aliases_agree():
    got = run(draw(0)[0])
    names = list(TABLE)
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            assert np.array_equal(got[a][0], got[b][0]) == (TABLE[b].alias_of == a), (a, b)


def added(name, length, reward=1.0, target=0.0, **constants):
    row = TABLE[name]
    given = {"target": jnp.asarray([target])} if "target" in row.needs else {}
    return float(row.loss(jnp.asarray([length]), jnp.asarray([reward]), **given, **{**row.hyper, **constants})[0])


def test_a_square_outweighs_the_answer_where_the_distance_does_not():
    """2000 tokens off its target, a correct answer is worth less than a wrong one on it under the square;
    LCPO's distance leaves it .4."""
    assert 1 + added("length_quadratic", 2600.0, target=600.0) == pytest.approx(-3)
    assert 0 + added("length_quadratic", 600.0, 0.0, target=600.0) == 0
    assert 1 + added("lcpo_exact", 2600.0, target=600.0) == pytest.approx(0.4)


def test_a_factor_on_the_reward_pays_long_wrong_answers_and_an_added_penalty_does_not():
    """Yu et al. 2025, eq. 13, adds; r alpha^floor(n / block) would turn -1 into -.25 for an answer two blocks too long."""
    assert -1 * 0.5**2 == -0.25
    assert -1 + added("soft_overlong", 18432.0) == pytest.approx(-1.5)
    assert added("soft_overlong", 16384.0) == 0 and added("soft_overlong", 20480.0) == -1 == added("soft_overlong", 1e6)


def test_lcpo_max_multiplies_a_correct_reward_by_its_clip():
    for length, factor in ((1000.0, 0.5), (0.0, 0.8), (3000.0, 0.0), (2000.0, 0.2)):
        assert 1 + added("lcpo_max", length, target=1000.0) == pytest.approx(factor, abs=1e-6)
        assert added("lcpo_max", length, reward=0.0, target=1000.0) == 0


def test_cosine_s_ends():
    assert 1 + added("cosine_length", 0.0) == pytest.approx(2) and added("cosine_length", 0.0, reward=0.0) == pytest.approx(-10)
    assert 1 + added("cosine_length", 14335.0) == pytest.approx(1, abs=1e-4)
    assert 1 + added("cosine_length", 14336.0) == -10 == added("cosine_length", 20000.0, reward=0.0)
