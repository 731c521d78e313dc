"""Pre-training on sources whose entropy is known, scoring against a float64 loop, samples, devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.data import text
from jaxpt.models import ModelConfig, make_model
from jaxpt.train.optim import OptimConfig
from jaxpt.train.parallel import make_mesh, step_by_jit
from jaxpt.train.pretrain import (
    PretrainConfig, SampleConfig, ScoreConfig, make_pretrain, make_sample, make_score,
)

MODEL = ModelConfig(vocab=256, d_model=32, n_layers=1, n_heads=2)
STEPS = 150
OPTIM = OptimConfig(learning_rate=1e-2, schedule="cosine", decay_steps=STEPS)
CONFIG = PretrainConfig(MODEL, OPTIM, window=32, batch=16, every=STEPS)
SCORE = ScoreConfig(MODEL, batch=8)
WORD = b"periodcal"  # no byte twice, so one byte of context decides the next
TAIL = 200


def programs(train, held):
    windows = text.scoring_windows(held, CONFIG.window, CONFIG.window // 2)
    unit = np.where(windows.position < 0, -1, windows.position * 3 // len(held))  # three units
    counts = windows.position >= 0
    pretrain = make_pretrain(CONFIG, train=train, probe_tokens=windows.tokens, probe_counts=counts)
    score = make_score(SCORE, tokens=windows.tokens, unit=unit, units=3)
    return pretrain, score, -(-len(unit) // SCORE.batch)


def trained(train, held):
    pretrain, score, steps = programs(train, held)
    state = pretrain.init(jax.random.key(0), {name: jnp.float32(x) for name, x in pretrain.hyper.items()})
    state, curves = jax.jit(lambda s: jax.lax.scan(lambda s, _: pretrain.step(s), s, length=STEPS))(state)
    params = pretrain.params(state)
    begin = score.init(jax.random.key(0), {}, params)
    _, scored = jax.jit(lambda s: jax.lax.scan(lambda s, _: score.step(s), s, length=steps))(begin)
    return params, curves, np.asarray(scored["bits"], np.float64)


@pytest.fixture(scope="module")
def periodic():
    data = np.frombuffer(WORD * 200, np.uint8)
    return trained(data, data[-TAIL:])


def test_a_periodic_text_is_learnt_to_nearly_nothing(periodic):
    _, curves, bits = periodic
    assert float(curves["bits"][0]) > 5
    assert float(curves["bits"][-1]) < 0.02
    # All but the first byte of the text: train never shows what follows a separator.
    assert bits.sum() - bits.max() < 0.05 * TAIL
    assert np.isnan(curves["held_bits"][:-1]).all() and curves["held_bits"][-1] < 0.2
    np.testing.assert_allclose(curves["held_bits"][-1], bits.sum() / TAIL, rtol=1e-4)
    assert float(curves["bytes"][-1]) == STEPS * 16 * 31


def test_an_independent_source_is_learnt_to_its_entropy():
    """The optimum on the very bytes that are scored: -log2 p of each."""
    p = np.array([0.5, 0.25, 0.125, 0.125])
    rng = np.random.default_rng(0)
    train, held = (rng.choice(4, n, p=p) for n in (20_000, 2000))
    _, _, bits = trained((train + 97).astype(np.uint8), (held + 97).astype(np.uint8))
    optimum = -np.log2(p)[held].mean()
    assert optimum - 0.01 < bits.sum() / len(held) < optimum + 0.05


def test_scores_are_the_bits_of_each_byte_given_its_window(periodic):
    """Oracle: float64 log-softmax over windows cut by hand, one byte at a time."""
    params, _, bits = periodic
    model, window, stride = make_model(MODEL), CONFIG.window, CONFIG.window // 2
    held = np.frombuffer(WORD * 200, np.uint8)[-TAIL:]
    padded = np.concatenate([[text.SEPARATOR], held]).astype(np.int32)
    forward = jax.jit(lambda tokens: model.forward(params, tokens)[0] @ model.unembed(params))
    units = np.zeros(3)
    for i in range(TAIL):
        start = stride * max(0, -(-(i + 2 - window) // stride))  # the first window that reaches byte i
        row = np.zeros((1, window), np.int32)
        row[0, : i + 1 - start] = padded[start:i + 1]  # later bytes are not even there
        logits = np.asarray(forward(row), np.float64)[0, i - start]
        nats = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[held[i]]
        units[i * 3 // TAIL] += nats / np.log(2)
    np.testing.assert_allclose(bits.sum(axis=0), units, rtol=1e-4, atol=1e-3)


def test_samples_continue_their_prompts(periodic):
    params, _, _ = periodic
    prompts = np.stack([np.frombuffer((WORD * 3)[i:i + 12], np.uint8) for i in range(3)])
    program = make_sample(SampleConfig(MODEL, length=15), prompts=prompts)
    begin = program.init(jax.random.key(0), {"temperature": jnp.float32(0.2)}, params)
    state, metrics = jax.jit(program.step)(begin)
    expected = np.stack([np.frombuffer((WORD * 4)[i:i + 27], np.uint8) for i in range(3)])
    np.testing.assert_array_equal(metrics["tokens"], expected)
    assert -0.01 < float(metrics["logp"]) <= 0 and int(state["step"]) == 1


def test_one_update_is_the_same_on_four_devices():
    data = np.frombuffer(WORD * 20, np.uint8)
    probe = {"probe_tokens": np.zeros((1, 4), np.int32), "probe_counts": np.ones((1, 4), bool)}
    make = partial(make_pretrain, train=data, **probe)
    program = make(CONFIG)
    state = program.init(jax.random.key(1), {"learning_rate": jnp.float32(1e-2)})
    one, _ = jax.jit(program.step)(state)
    four, _ = step_by_jit(make, CONFIG, make_mesh(4))(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one["params"], four["params"])


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="expected at least one window"):
        programs(np.zeros(31, np.uint8), np.zeros(100, np.uint8))
