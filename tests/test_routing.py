"""Routing, dispatch and balance against loops in float64, and the laws they obey."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt.ops import balance, dispatch, routing

CASES, N, D, F, E, K, C = 4, 80, 4, 3, 4, 2, 25
seeds = st.integers(0, 2**31 - 1)


def draw(seed):
    """CASES problems: some experts are much in demand (more than a block of 64 rows each), some assignments void."""
    rng = np.random.default_rng(seed)
    demand = rng.normal(size=(CASES, 1, E)) * rng.choice([0, 1, 10], (CASES, 1, 1))
    index = np.argsort(-(rng.normal(size=(CASES, N, E)) + demand), axis=-1)[..., :K].astype(np.int32)
    index[rng.random((CASES, N)) < 0.1] = E
    shapes = {"x": (N, D), "gates": (N, K), "gate_up": (E, D, 2 * F), "down": (E, F, D), "back": (N, D)}
    return index, {name: rng.normal(size=(CASES, *shape)).astype(np.float32) for name, shape in shapes.items()}


@cache
def all_ways():
    ways = dispatch.DROPLESS | {
        "capacity": lambda *a: dispatch.capacity(*a, places_each=N), "tight": lambda *a: dispatch.capacity(*a, places_each=C)
    }

    def one(way, index, given):
        def loss(given):
            y, kept = way(given["x"], index, given["gates"], dispatch.Experts(given["gate_up"], given["down"]))
            return jnp.sum(y * given["back"]), (y, kept)

        return jax.value_and_grad(loss, has_aux=True)(given)

    return jax.jit(jax.vmap(lambda index, given: {name: one(way, index, given) for name, way in ways.items()}))


def expert(g, c, e, n):
    gate, up = np.split(g["x"][c, n] @ g["gate_up"][c, e], 2)
    return gate / (1 + np.exp(-gate)) * up @ g["down"][c, e]


def by_loop(index, g, c, places):
    """Value of case c, token by token, first choices first; and who was kept."""
    y, kept, full = np.zeros((N, D)), np.zeros((N, K), bool), np.zeros(E + 1, int)
    for k in range(K):
        for n in range(N):
            e = index[c, n, k]
            kept[n, k] = e < E and full[e] < places
            full[e] += kept[n, k]
            if kept[n, k]:
                y[n] += g["gates"][c, n, k] * expert(g, c, e, n)
    return y, kept


@settings(max_examples=4)
@given(seeds)
def test_every_dispatch_is_the_loop_s_in_value_and_the_reference_s_in_gradient(seed):
    index, given_ = draw(seed)
    out = all_ways()(index, given_)
    g = {name: x.astype(np.float64) for name, x in given_.items()}
    reference = out["dense"][1]
    for name, ((_, (y, kept)), grads) in out.items():
        for c in range(CASES):
            expected, seen = by_loop(index, g, c, C if name == "tight" else N)
            np.testing.assert_array_equal(kept[c], seen, err_msg=name)
            np.testing.assert_allclose(y[c], expected, atol=2e-5, err_msg=name)
            assert max((index[c][kept[c]] == e).sum() for e in range(E)) <= (C if name == "tight" else N)
        if name != "tight":
            for part in reference:
                np.testing.assert_allclose(grads[part], reference[part], atol=1e-3, rtol=1e-4, err_msg=f"{name} {part}")
    assert not out["tight"][0][1][1].all() and (index < E).sum() > out["tight"][0][1][1].sum()


def test_the_tight_gradient_is_that_of_the_assignments_kept():
    index, given_ = draw(0)
    (_, (_, kept)), grads = all_ways()(index, given_)["tight"]
    voided = np.where(kept, index, E)
    expected = all_ways()(voided, given_)["dense"][1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4), grads, expected)


@cache
def choices():
    """For logits [N,8]: everything that is chosen and weighed, by softmax and by sigmoid."""

    def one(logits, bias, order, alive):
        out = {}
        for kind in routing.SCORES:
            scores = routing.scores_of(kind, logits)
            index = routing.choose(scores, 3)
            biased = routing.choose(scores, 3, bias=bias)
            out[kind] = {
                "scores": scores, "index": index, "permuted": routing.choose(scores[:, order], 3), "biased": biased,
                "normal": routing.weigh(scores, index, normalise=True, scale=2.5),
                "raw": routing.weigh(scores, biased, normalise=False),
                "grouped": routing.choose(scores, 3, bias=bias, groups=4, top_groups=2),
                "alive": routing.choose(masked := routing.scores_of(kind, logits, alive), 3, bias=bias, alive=alive),
                "masked": masked,
                "bias_grad": jax.grad(
                    lambda b: routing.weigh(scores, routing.choose(scores, 3, bias=b), normalise=True).std()
                )(bias),
                "taken": routing.expert_choice(scores, 5, alive[:, 0]),
            }
        return out

    return jax.jit(one)


@settings(max_examples=15)
@given(seeds)
def test_what_is_chosen_and_with_which_weight(seed):
    rng = np.random.default_rng(seed)
    logits, bias, order = rng.normal(size=(20, 8)) * rng.choice([1, 5]), rng.normal(size=8), rng.permutation(8)
    alive = rng.random((20, 8)) < 0.7
    alive[:, [1, 4, 6]] = True
    logits, bias = logits.astype(np.float32), bias.astype(np.float32)
    for kind, o in choices()(logits, bias, order, alive).items():
        scores, rows = np.asarray(o["scores"], np.float64), np.arange(20)[:, None]
        np.testing.assert_array_equal(o["index"], np.argsort(-scores, axis=1, kind="stable")[:, :3])
        np.testing.assert_array_equal(order[o["permuted"]], o["index"])  # relabelled experts, relabelled choice
        chosen = scores[rows, o["index"]]
        np.testing.assert_allclose(o["normal"].sum(1), 2.5, rtol=1e-5)
        np.testing.assert_allclose(o["normal"], 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
        if kind == "softmax":  # top-k before softmax is the same as after it
            np.testing.assert_allclose(o["normal"], 2.5 * jax.nn.softmax(logits[rows, o["index"]], axis=1), rtol=1e-4)
        np.testing.assert_array_equal(o["biased"], np.argsort(-(scores + bias).astype(np.float32), 1, kind="stable")[:, :3])
        np.testing.assert_array_equal(o["raw"], np.float32(scores)[rows, o["biased"]])  # the bias selects, it never weighs
        np.testing.assert_array_equal(o["bias_grad"], 0)
        ranked = np.where(alive, (scores + bias).astype(np.float32), -np.inf)
        assert (o["masked"][~alive] == 0).all() and alive[rows, o["alive"]].all()
        if kind == "sigmoid":
            np.testing.assert_array_equal(o["alive"], np.argsort(-ranked, axis=1, kind="stable")[:, :3])
        for n in range(20):
            pairs = (scores + bias)[n].reshape(4, 2)
            best = set(np.argsort(-pairs.sum(1))[:2])
            assert {int(e) // 2 for e in o["grouped"][n]} <= best
        token, gates = o["taken"]
        for e in range(8):
            eligible = np.where(alive[:, 0], scores[:, e], 0)
            np.testing.assert_allclose(np.sort(gates[e])[::-1], np.sort(eligible)[::-1][:5], rtol=1e-6)
            np.testing.assert_array_equal(gates[e], np.float32(eligible)[token[e]])


def test_hashes_are_fixed_even_and_distinct_per_expert():
    def run():
        scores = routing.hashed(jnp.arange(4000), 8)
        return scores, routing.hashed(jnp.arange(7), 8), balance.violation(balance.load_of(routing.choose(scores, 2), 8))

    scores, few, uneven = jax.jit(run)()
    assert len(np.unique(scores[:100])) > 790 and np.min(scores) >= 0 and np.max(scores) < 1 and uneven < 0.1
    np.testing.assert_array_equal(np.asarray(scores)[:7], few)


def test_dropout_leaves_enough_experts():
    alive = jax.jit(jax.vmap(lambda rate: routing.survivors(jax.random.key(0), 2000, 8, 2, rate)))(jnp.array([0.5, 1.0, 0.0]))
    half, none, all_ = np.asarray(alive).sum(axis=2)
    assert half.min() == 2 and abs(half.mean() / 8 - 0.5) < 0.02 and (none == 2).all() and (all_ == 8).all()


@cache
def losses():
    def one(logits, mask):
        probs = jax.nn.softmax(logits, axis=-1)
        index = routing.choose(probs, 2)
        rows = lambda x: x.reshape(3, 5, -1)  # noqa: E731
        return {
            "balance": balance.balance_loss(probs, index, mask), "z": balance.z_loss(logits, mask),
            "sequence": balance.sequence_balance_loss(rows(probs), rows(index), mask.reshape(3, 5)),
            "load": balance.load_of(index, 4, mask), "index": index, "probs": probs,
            "grad": jax.grad(lambda p: balance.balance_loss(p, index, mask))(probs),
        }

    return jax.jit(one)


def loss_by_loop(probs, index, mask):
    load, mean, n = np.zeros(4), np.zeros(4), mask.sum()
    for p, chosen, counts in zip(probs, index, mask, strict=True):
        if counts:
            load[chosen] += 1 / (2 * n)
            mean += p / n
    return 4 * load @ mean, load


@given(seeds)
def test_losses_are_the_loop_s(seed):
    rng = np.random.default_rng(seed)
    logits, mask = (3 * rng.normal(size=(15, 4))).astype(np.float32), rng.random(15) < 0.7
    mask[:2] = True, False
    logits[1] = np.nan  # what does not count may hold anything
    o = losses()(logits, mask)
    probs, index = np.asarray(o["probs"], np.float64), np.asarray(o["index"])
    value, load = loss_by_loop(probs, index, mask)
    np.testing.assert_allclose(o["balance"], value, rtol=1e-5)
    np.testing.assert_allclose(o["load"], load, rtol=1e-5)
    np.testing.assert_allclose(o["grad"], np.where(mask[:, None], 4 * load / mask.sum(), 0), rtol=1e-5)
    lse = np.log(np.exp(logits[mask].astype(np.float64)).sum(1))
    np.testing.assert_allclose(o["z"], (lse**2).mean(), rtol=1e-5)
    rows = [loss_by_loop(probs[s], index[s], mask[s])[0] for s in (slice(0, 5), slice(5, 10), slice(10, 15)) if mask[s].any()]
    np.testing.assert_allclose(o["sequence"], np.mean(rows), rtol=1e-5)


def test_the_balance_loss_is_1_at_balance_and_lower_elsewhere():
    """Nine tokens lean to one expert a little, the tenth to the other wholly: 0.934, below the 1 of perfect balance."""
    uniform, even, one = np.full((8, 4), 0.25, np.float32), np.arange(8)[:, None] % 4, np.zeros((8, 1), np.int32)
    leaning = np.array([[0.51, 0.49]] * 9 + [[0.0, 1.0]], np.float32)
    onehot = np.eye(2, dtype=np.float32)[[0, 0, 0, 1]]  # load = mean probability: 1 + CV^2

    def run():
        skewed = jax.nn.softmax(jnp.arange(32.0).reshape(8, 4) % 5, axis=-1)
        ones = [balance.balance_loss(*pair) for pair in ((uniform, even), (uniform, one), (skewed, even))]
        return ones, balance.balance_loss(leaning, leaning.argmax(1)[:, None]), balance.balance_loss(onehot, onehot.argmax(1)[:, None])

    ones, lower, squared = jax.jit(run)()
    np.testing.assert_allclose(ones, 1, rtol=1e-6)
    np.testing.assert_allclose([lower, squared], [0.9344, 1.25], atol=1e-5)


def test_the_bias_brings_balance_and_the_measures_say_so():
    """Fixed scores that all prefer one expert: the bias alone spreads the load."""

    def run():
        scores = jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (400, 4)) + jnp.array([[2.0, 0, 0, -1]]))

        def step(bias, _):
            load = balance.load_of(routing.choose(scores, 1, bias=bias), 4)
            return balance.moved_bias(bias, load, 0.01), load

        bias, loads = jax.lax.scan(step, jnp.zeros(4), length=150)
        ends = jnp.stack([loads[0], loads[-20:].mean(0), jnp.full(4, 0.25), jnp.array([1.0, 0, 0, 0])])
        return bias, balance.violation(ends), balance.evenness(ends), balance.alert(ends), (
            balance.information(5 * jnp.eye(3)), balance.information(jnp.outer(jnp.array([1.0, 3]), jnp.array([2.0, 5, 1])))
        )

    bias, violation, evenness, alert, information = (np.asarray(x) for x in jax.jit(run)())
    assert bias[3] > 0 > bias[0] and alert.tolist() == [True, False, False, True]
    assert violation[0] > 1 > 10 * violation[1] and evenness[0] < 0.8 and evenness[1] > 0.99
    np.testing.assert_allclose(violation[2:], [0, 3], atol=1e-6)
    np.testing.assert_allclose(evenness[2:], [1, 0], atol=1e-6)
    np.testing.assert_allclose(information, [np.log(3), 0], atol=1e-6)


def test_places_and_blocks_suffice_exactly():
    assert [routing.places_of(*x) for x in ((100, 2, 8, 1.0), (100, 2, 8, 1.25), (4, 2, 8, 1.0), (10, 2, 4, 9.0))] == [25, 32, 1, 10]
    up = lambda n: -(-n // dispatch.BLOCK)  # noqa: E731
    for n in (0, 1, 63, 64, 65, 130, 200):  # every split over three experts
        worst = max(up(a) + up(b) + up(n - a - b) for a in range(n + 1) for b in range(n + 1 - a))
        assert dispatch.block_count(n, 3) == worst and dispatch.block_count(n, 1) == up(n)
