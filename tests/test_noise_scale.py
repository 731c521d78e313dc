"""noise_scale: its closed forms against samples and grids, its readings against planted curves. Nothing is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.experiments import noise_scale as ns

CFG = ns.Config(inputs=5, decay=0.7, label_noise=0.6, replicas=2)
BATCHES = np.array(ns.BATCHES)


def rows(away, h, count=400_000):
    """Gradients [count,n] of single rows at `away`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, h.size)) * np.sqrt(h)
    return x * (x @ away - CFG.label_noise * rng.normal(size=count))[:, None]


def test_the_traces_are_those_of_sampled_gradients():
    h, away = ns.curvature(CFG, False), np.array([1.0, -0.5, 2.0, 0.3, 1.2])
    g = rows(away, h)
    excess, bent, spread = map(float, ns.exact(away, h, CFG.label_noise))
    assert h.sum() == pytest.approx(1) and excess == pytest.approx(np.sum(h * away**2) / 2)
    assert bent == pytest.approx(np.sum(h * g.mean(0) ** 2), rel=0.02)
    assert spread == pytest.approx(np.sum(h * g.var(0)), rel=0.02)


def test_the_rate_of_a_step_is_the_one_that_lowers_the_loss_most():
    """Expected excess loss after a step of batch B, over a grid of rates, against the program's own step."""
    B, h = 8, ns.curvature(CFG, False)
    program = ns.make_descent(ns.Descent(CFG, B, False))
    state = program.init(jax.random.key(0), {})
    away = np.asarray(state["params"]["away"][-1], np.float64)
    _, bent, spread = (np.asarray(x) for x in ns.exact(away, h, CFG.label_noise))
    grid = np.linspace(0, 4, 40_001)
    straight = np.sum((h * away) ** 2, -1)
    for r in range(CFG.replicas):  # eq. 2.5: the loss falls by rate |G|^2 - rate^2 / 2 (G'HG + tr(HS) / B)
        best = grid[np.argmax(grid * straight[r] - grid**2 / 2 * (bent[r] + spread[r] / B))]
        moved = np.asarray(program.step(state)[0]["params"]["away"][:, r] - state["params"]["away"][:, r])
        fixed = ns.RATES / (h.max() + 1 / B)
        ratio = moved[-1] / moved[0] * fixed[0]  # the same rows: rates are to one another as the moves
        np.testing.assert_allclose(ratio, best, rtol=2e-3)


def test_the_start_has_the_excess_loss_that_was_asked_for():
    for flat in (False, True):
        program = ns.make_descent(ns.Descent(CFG, 4, flat))
        _, metrics = program.step(program.init(jax.random.key(1), {}))
        np.testing.assert_allclose(metrics["excess"], CFG.start, rtol=1e-5)
    # equal curvatures h and no label noise: tr(H S) = n h^3 |away|^2 h / h + G'HG, a noise scale of n + 1
    np.testing.assert_allclose(metrics["noise"], CFG.inputs + 1, rtol=1e-5)


def test_a_planted_hyperbola_is_found():
    steps = np.array([[12.0], [30.0]]) * (1 + np.array([[150.0], [20.0]]) / BATCHES)
    least, critical, off = ns.hyperbola(steps)
    np.testing.assert_allclose(least, [12, 30], rtol=0.01)
    np.testing.assert_allclose(critical, [150, 20], rtol=0.01)
    assert off.max() < 0.01


def curves(lengths):
    """Losses that fall by a factor e in each of a run's `lengths` steps to the target and go on; the greedy rate is twice
    as fast, and the second fixed rate the best of all fixed ones."""
    out = {"inputs/target": np.float64(1.0)}
    for b, length in lengths.items():
        t = np.arange(3 * length)[None, :, None]
        speed = np.full(len(ns.RATES) + 1, 0.5)
        speed[1], speed[-1] = 1.0, 2.0
        out[f"b{b}/excess"] = np.exp(length - t * speed)
        out[f"b{b}/noise"] = np.broadcast_to(t + 1.0, out[f"b{b}/excess"].shape)
    return out


def test_steps_are_read_where_the_loss_arrives():
    made = curves({b: 10 + k for k, b in enumerate(ns.BATCHES)})
    np.testing.assert_allclose(ns.needed(made)[0], (10 + np.arange(7)) / 2)
    np.testing.assert_allclose(ns.needed(made, "fixed")[0], 10 + np.arange(7))
    assert ns.arrival(made, f"b{ns.BATCHES[0]}", "fixed")[1] == 1
    assert ns.mean_noise(made)[0] == pytest.approx(np.mean(np.arange(1, 9)))  # 16 steps to the target at speed 2
    made[f"b{ns.BATCHES[0]}/excess"] = np.full((1, 5, len(ns.RATES) + 1), 2.0)
    assert np.isnan(ns.needed(made)[0, 0])


def test_claims_come_out_wrong_where_they_should():
    made = curves({b: 10 for b in ns.BATCHES})  # a batch saves nothing
    assert ns.follows(made)[0] > 0 > ns.follows_perfect_scaling(made)[0]
    assert ns.falls_with_a_fixed_rate(made)[0] == pytest.approx(0, abs=0.01)
    assert jnp.isfinite(ns.grows(made)[0])
