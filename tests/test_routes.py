"""Routes by reinforcement, against the enumeration of all of them."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpt.ops.routes import all_routes, draw_route, leave_one_out, reinforced, route_logp, straight_through
from jaxpt.train.routing import ESTIMATORS, RoutingConfig, make_routing

E, K, S = 3, 2, 2
ROUTES = all_routes(E, K)
TUPLES = jnp.asarray(list(itertools.product(range(len(ROUTES)), repeat=S)))


def losses(theta, route):
    """A loss of the route that depends on the parameters also given the route."""
    return jnp.sin(3 * theta[route].sum(-1)) + (route[..., 0] == 1) * theta[2] ** 2 + route[..., 1]


@cache
def gradients():
    def exact(theta):
        return jax.grad(lambda t: jnp.exp(route_logp(jnp.broadcast_to(t, (6, E)), ROUTES)) @ losses(t, ROUTES))(theta)

    def estimate(theta, baseline, members):
        route = jnp.asarray(ROUTES)[members]
        return jax.grad(lambda t: reinforced(losses(t, route), route_logp(jnp.broadcast_to(t, (S, E)), route), baseline))(theta)

    def run(theta):
        p = jnp.exp(route_logp(jnp.broadcast_to(theta, (6, E)), ROUTES))[TUPLES].prod(axis=1)
        out = {"exact": exact(theta)}
        for name, baseline in (("baseline", True), ("plain", False)):
            all_ = jax.vmap(lambda members: estimate(theta, baseline, members))(TUPLES)  # noqa: B023
            mean = p @ all_
            out[name] = mean, p @ jnp.sum((all_ - mean[None]) ** 2, axis=1)
        return out

    return jax.jit(run)


@given(st.integers(0, 2**31 - 1))
def test_reinforced_routes_are_unbiased_over_all_tuples_of_routes(seed):
    theta = jnp.asarray(np.random.default_rng(seed).normal(size=E), jnp.float32)
    out = gradients()(theta)
    for name in ("baseline", "plain"):
        np.testing.assert_allclose(out[name][0], out["exact"], atol=2e-5)


@settings(max_examples=5)
@given(st.integers(0, 2**31 - 1))
def test_route_probabilities_are_those_of_drawing_without_replacement(seed):
    logits = np.random.default_rng(seed).normal(size=4)
    p, q = np.exp(logits) / np.exp(logits).sum(), []
    routes = all_routes(4, 3)
    for a, b, c in routes:
        q.append(p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b]))
    logp = route_logp(jnp.broadcast_to(jnp.float32(logits), (24, 4)), jnp.asarray(routes))
    np.testing.assert_allclose(np.exp(logp), q, rtol=1e-4)
    np.testing.assert_allclose(sum(q), 1)


def test_draws_have_these_probabilities():
    logits = jnp.array([1.0, 0.0, -0.5])
    noise = jax.random.gumbel(jax.random.key(0), (20_000, 3))
    route = np.asarray(draw_route(jnp.broadcast_to(logits, noise.shape), noise, 2))
    seen = np.array([np.mean((route == r).all(1)) for r in ROUTES])
    np.testing.assert_allclose(seen, np.exp(route_logp(jnp.broadcast_to(logits, (6, 3)), ROUTES)), atol=0.012)


def test_straight_through_is_hard_forwards_and_soft_backwards():
    logits, noise = jnp.array([0.3, -1.0, 0.8, 0.1]), jnp.array([0.0, 0.2, 0.1, -0.4])
    value, pull = jax.vjp(lambda x: straight_through(x, noise, 2, 0.5), logits)
    np.testing.assert_allclose(value, [1, 0, 1, 0], atol=1e-6)
    expected = jax.vjp(lambda x: 2 * jax.nn.softmax((x + noise) / 0.5), logits)[1]
    direction = jnp.array([1.0, 2, -1, 0.5])
    np.testing.assert_allclose(pull(direction)[0], expected(direction)[0], rtol=1e-5)
    np.testing.assert_allclose(leave_one_out(jnp.array([1.0, 2, 6])), [1 - 4, 2 - 3.5, 6 - 1.5])


@pytest.mark.slow
def test_estimators_train_and_their_noise_and_bias_are_as_they_should():
    cfg = RoutingConfig(experts=4, clusters=3, features=4, classes=4, inputs=32, batch=16, draws=200, every=30)
    program = make_routing(cfg)
    rates = {name: jnp.float32(x) for name, x in program.hyper.items()}
    state = program.init(jax.random.key(0), rates)
    state, curves = jax.jit(lambda s: jax.lax.scan(lambda s, _: program.step(s), s, length=60))(state)
    at = {name: number for number, name in enumerate(ESTIMATORS)}
    assert all(curves[f"loss_{name}"][-1] < curves[f"loss_{name}"][0] - 0.1 for name in ESTIMATORS)
    noise, cosine = ({name: curves[f"{what}_{name}"][-1] for name in ESTIMATORS} for what in ("noise", "cosine"))
    assert noise["exact"] < 1e-6 < noise["straight_through"] < noise["no_baseline"]
    assert noise["reinforce"] < noise["no_baseline"] and cosine["reinforce"] > 0.8 > cosine["shuffled"]
    start = program.init(jax.random.key(0), rates)["params"]["router"]
    moved = np.abs(state["params"]["router"] - start).max(axis=(1, 2))
    assert moved[at["frozen"]] == 0 and np.all(np.delete(moved, at["frozen"]) > 1e-3)


@pytest.mark.parametrize("field, value", [("top_k", 9), ("samples", 1), ("batch", 0)])
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}: got {value}"):
        RoutingConfig(**{field: value})
