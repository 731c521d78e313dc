"""What surrounds the directions of an optimizer, against loops in numpy: clipping by z-score, averages, Schedule-Free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.train.optim import OptimConfig, apply_update, kept, start_optimizer
from jaxpt.train.spikes import DECAY, FIRST, clip_by_z_score


def z_clipped(norms, threshold):
    """The norms that are let through."""
    out, seen, mean, variance = [], [], 0.0, 0.0
    for g in norms:
        if not np.isfinite(g):
            out.append(g)
            continue
        if len(seen) >= FIRST and variance > 0 and (z := (g - mean) / variance**0.5) > threshold:
            g = mean + threshold**2 / z * variance**0.5
        seen.append(g)
        out.append(g)
        if len(seen) <= FIRST:
            mean, variance = np.mean(seen), np.var(seen)
        else:
            mean = DECAY * mean + (1 - DECAY) * g
            variance = DECAY * variance + (1 - DECAY) * (g - mean) ** 2
    return np.array(out)


@jax.jit
def lengths(norms):
    clip = clip_by_z_score(2.5)

    def step(state, norm):
        out, state = clip.update({"w": norm * jnp.array([0.6, -0.8])}, state)
        return state, jnp.linalg.norm(out["w"])

    return jax.lax.scan(step, clip.init(None), norms)[1]


@given(seed=st.integers(0, 2**32 - 1), spikes=st.sets(st.integers(0, 79), max_size=6), size=st.floats(1, 1e6),
       broken=st.sets(st.integers(0, 79), max_size=2))
def test_a_norm_that_stands_out_is_shortened(seed, spikes, size, broken):
    norms = np.random.default_rng(seed).uniform(0.5, 1.5, 80).astype(np.float32)
    norms[list(spikes)] *= size
    norms[list(broken)] = np.nan
    np.testing.assert_allclose(lengths(norms), z_clipped(norms.astype(float), 2.5), rtol=2e-3, atol=1e-3)


def test_equal_norms_and_a_spike_of_any_size():
    """No spread: nothing stands out. The further out a norm is, the less of it is left."""
    np.testing.assert_allclose(lengths(jnp.ones(40)), 1.0, rtol=1e-5)
    usual = 1 + 0.1 * jnp.cos(jnp.arange(40.0))
    left = [float(lengths(usual.at[39].set(spike))[39]) for spike in (1.5, 2.0, 10.0, 1e6)]
    assert all(a > b > 1 for a, b in zip(left, left[1:], strict=False))


def descend(cfg, steps=7):
    """Adapters and what is kept of them, before and after each update of sum((w - goal)^2)."""
    goal = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    params = {"lora": {"w": jnp.zeros((2, 2))}, "base": {"w": jnp.array([0.1, 0.7])}}
    params, opt = start_optimizer(cfg, params)
    seen, averaged = [params], [kept(cfg, opt, params)]
    for _ in range(steps):
        grads = {"lora": {"w": 2 * (params["lora"]["w"] - goal).astype(jnp.float32)}}
        params, opt, _ = apply_update(cfg, cfg.learning_rate, grads, opt, params)
        seen.append(params)
        averaged.append(kept(cfg, opt, params))
    for tree in (*seen, *averaged):
        np.testing.assert_array_equal(tree["base"]["w"], seen[0]["base"]["w"])  # what is frozen keeps every bit
    of_adapter = lambda trees: np.array([tree["lora"]["w"] for tree in trees], float)  # noqa: E731
    return of_adapter(seen), of_adapter(averaged), np.array(goal)


def test_the_average_weighs_every_update_s_parameters():
    trained, averaged, _ = descend(OptimConfig(learning_rate=0.1, ema=0.8))
    np.testing.assert_array_equal(averaged[0], trained[0])
    for t in range(1, len(trained)):
        weight = 0.8 ** np.arange(t)[::-1]
        np.testing.assert_allclose(averaged[t], np.tensordot(weight / weight.sum(), trained[1 : t + 1], 1), rtol=1e-5)
    plain, same, _ = descend(OptimConfig(learning_rate=0.1))
    np.testing.assert_array_equal(plain, trained)
    np.testing.assert_array_equal(plain, same)


def test_averages_are_of_the_float32_weights():
    """Rounded once, when they are read: those that are read while training are rounded too."""
    for fields in ({"ema": 0.8}, {"schedule": "free"}):
        exact, narrow = (descend(OptimConfig(learning_rate=0.1, weights=weights, **fields))[1]
                         for weights in ("float32", "bfloat16"))
        np.testing.assert_allclose(narrow, exact, rtol=2e-2, atol=2e-2)
        np.testing.assert_array_equal(narrow, np.asarray(jnp.bfloat16(narrow), float))


def test_schedule_free_is_the_papers_recursion():
    """Defazio et al. 2024, equations 3 to 5, with Adam's denominator and averages weighed by the squared rate."""
    cfg = OptimConfig(learning_rate=0.1, schedule="free", warmup=3, clip=1e9)
    trained, averaged, goal = descend(cfg)
    x = z = y = np.zeros((2, 2))
    second, total = np.zeros((2, 2)), 0.0
    for t in range(len(trained) - 1):
        rate = 0.1 * min(1, (t + 1) / 4)
        grad = 2 * (y - goal)
        second = cfg.b2 * second + (1 - cfg.b2) * grad**2
        z = z - rate * grad / (np.sqrt(second / (1 - cfg.b2 ** (t + 1))) + cfg.eps)
        total += rate**2
        x = (1 - rate**2 / total) * x + rate**2 / total * z
        y = cfg.b1 * x + (1 - cfg.b1) * z
        np.testing.assert_allclose(trained[t + 1], y, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(averaged[t + 1], x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fields, said", [
    ({"ema": 1.0}, "ema: got 1.0"), ({"ema": 0.9, "schedule": "free"}, "ema: got 0.9"), ({"z_clip": -1.0}, "z_clip: got -1.0"),
    ({"schedule": "free", "method": "muon"}, "schedule: got 'free' with 'muon'"), ({"schedule": "free", "b1": 0.0}, "b1 = 0.0"),
])
def test_what_cannot_be_is_said(fields, said):
    with pytest.raises(ValueError, match=said):
        OptimConfig(**fields)
