"""emergence: probabilities and readings against closed forms and planted scores."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpt.experiments import emergence as em

CFG = em.Config(items=2000, difficulty=0.0)
LOSS = CFG.loss * (em.SIZES / em.SIZES[0]) ** -CFG.exponent


@pytest.fixture(scope="module")
def drawn():
    program = em.make_tests(CFG)
    return jax.device_get(jax.jit(program.step)(program.init(jax.random.key(0), {}))[1])


def test_tokens_and_answers_have_their_probabilities(drawn):
    p = np.exp(-LOSS)
    for world, tokens in (("smooth", CFG.tokens), ("again", CFG.tokens), ("single", 1)):
        np.testing.assert_allclose(drawn[f"{world}_tokens"], p, atol=5 * 0.5 / np.sqrt(CFG.items * tokens))
        np.testing.assert_allclose(drawn[f"{world}_exact"], p**tokens, atol=5 * 0.5 / np.sqrt(CFG.items))
    np.testing.assert_array_equal(drawn["single_tokens"], drawn["single_exact"])


def test_recalled_items_are_right_and_the_others_as_before(drawn):
    recalled = 1 / (1 + np.exp(-3 * np.log10(em.SIZES / CFG.recalled_at)))
    exact = np.exp(-CFG.tokens * LOSS)
    expected = exact + CFG.leaked * recalled * (1 - exact)
    np.testing.assert_allclose(drawn["contaminated_exact"], expected, atol=5 * 0.5 / np.sqrt(CFG.items))
    np.testing.assert_allclose(drawn["fresh_exact"], exact, atol=5 * 0.5 / np.sqrt(0.6 * CFG.items))


def test_how_long_a_score_is_flat():
    x = np.zeros((4, 17))
    x[0, 9:], x[1], x[2, -1] = 1.0, 1.0, 1.0
    x[3] = np.linspace(0, 1, 17)
    np.testing.assert_allclose(em.flat(x), [(8 + em.FLAT) / 16, 0, (15 + em.FLAT) / 16, em.FLAT], atol=1e-12)


def test_small_models_foretell_a_power_exactly_and_no_leap():
    exact = {"inputs/tokens": np.float64(20), "tests/smooth_tokens": np.exp(-LOSS)[None, None],
             "tests/smooth_exact": np.exp(-20 * LOSS)[None, None]}
    predicted, measured = em.foretold(exact, "smooth")
    np.testing.assert_allclose(predicted, measured, rtol=1e-6)
    leap = np.where(em.SIZES < 1e10, 0.02, 0.97)
    exact |= {"tests/transition_tokens": leap[None, None], "tests/transition_exact": leap[None, None] ** 20}
    predicted, measured = em.foretold(exact, "transition")
    assert predicted[0] < 1e-6 and measured[0] == pytest.approx(0.97**20)


def test_without_leaks_nothing_is_faked():
    """`leaked` is a share of items: the contaminated test of a model that recalls nothing is a clean one."""
    none = dataclasses.replace(CFG, recalled_at=1e13, items=500)
    program = em.make_tests(none)
    out = jax.device_get(jax.jit(program.step)(program.init(jax.random.key(1), {}))[1])
    made = {f"tests/{name}": x[None, None] for name, x in out.items()}
    assert abs(em.faked(made) - em.faked_without_leaks(made))[0] < 0.06
