"""scripts/mutate.py: where sources can be changed, the tests against a change, and programs evaluated with numpy."""

import ast
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from mutation import sites, world  # noqa: E402
from mutation.numeric import evaluate  # noqa: E402

SOURCE = '''
"""A text with 1 + 1."""
BOUND: int = 3


def f(x: int | None, mask, scale=2.0):
    y = keep(x, mask) * -scale
    return jnp.sum(stop(y), axis=1) if x > BOUND else jnp.max(masked_sum(y, mask & (x < 1)))
'''


def test_sites_of_a_small_file():
    found = {(s.operator, s.before, s.after): s.function for s in sites.sites("f.py", SOURCE)}
    compared = "jnp.max(masked_sum(y, mask & (x < 1)))"
    assert found == {
        ("constant", "3", "4"): 0, ("constant", "2.0", "2.2"): 0, ("constant", "1", "2"): 6,
        ("arithmetic", "keep(x, mask) * -scale", "(keep(x, mask) / -scale)"): 6, ("sign", "-scale", "scale"): 6,
        ("mask", "keep(x, mask)", "x"): 6, ("mask", "mask & (x < 1)", "mask"): 6, ("mask", "mask & (x < 1)", "(x < 1)"): 6,
        ("mask", "masked_sum(y, mask & (x < 1))", "masked_sum(y, mask & (x < 1) == mask & (x < 1))"): 6,
        ("stop", "stop(y)", "y"): 6, ("axis", "jnp.sum(stop(y), axis=1)", "jnp.sum(stop(y), axis=0)"): 6,
        ("comparison", "x > BOUND", "(x >= BOUND)"): 6, ("comparison", "x > BOUND", "(x <= BOUND)"): 6,
        ("comparison", "x < 1", "(x <= 1)"): 6, ("comparison", "x < 1", "(x >= 1)"): 6,
        ("comparison", compared, compared.replace("max", "min")): 6,
    }


def test_the_sample_is_fixed_and_half_of_it_is_set_aside():
    drawn = sites.draw(30, seed=3)
    assert drawn == sites.draw(30, seed=3) != sites.draw(30, seed=4)
    assert len({site.id for site, _ in drawn}) == 30 and sum(aside for _, aside in drawn) == 15
    for site, _ in drawn:
        assert ast.dump(ast.parse(sites.mutated(site))) != ast.dump(ast.parse((sites.ROOT / site.file).read_text()))
        assert "peer" not in site.file
    assert {site.file for site, _ in sites.draw(5, 0, "masked.py")} == {"jaxpt/ops/masked.py"}


@pytest.mark.parametrize("before, after, killed", [
    ("jnp.exp(jnp.minimum(x, bound))", "jnp.exp(jnp.minimum(-x, bound))", True),
    ("jnp.exp(jnp.minimum(x, bound))", "jnp.exp(-jnp.maximum(-x, -bound))", False),  # the same, ties' gradients too
])
def test_a_planted_change(monkeypatch, before, after, killed):
    monkeypatch.setattr(jax, "jit", partial(world.interpreted, jax.jit))
    monkeypatch.setattr(sys, "meta_path", [world.Source, *sys.meta_path])
    ours = sys.modules["jaxpt.ops.masked"] if "jaxpt.ops.masked" in sys.modules else None
    source = (sites.ROOT / "jaxpt/ops/masked.py").read_text()
    assert source.count(before) == 1
    changed = world.World("jaxpt/ops/masked.py", source.replace(before, after))
    case = world.Case("test_masked", "test_bounded_exp_is_exp_then_its_tangent", ())
    assert case in world.cases(changed, "test_masked")
    assert bool(world.failure(changed, case)) == killed
    assert sys.modules.get("jaxpt.ops.masked") is ours  # what else runs in this process sees no change


def test_numpy_evaluates_what_jax_traces():
    def program(x, group):
        def back(carry, at):
            return carry * 0.5 + at, carry

        scanned = jax.lax.scan(back, jnp.zeros(4), x.T, reverse=True)[1]
        ranked, total = jnp.sort(x, axis=1), jnp.cumsum(jnp.where(group[:, None] == 1, x, -jnp.inf) > 0)
        whole = jnp.round(x).astype(jnp.int32).astype(jnp.float32)
        return scanned, ranked, total, whole, jnp.pad(x, ((1, 0), (0, 2)))[:, ::2], jnp.argmax(x, axis=1), jnp.logaddexp(x, 1.0)

    x, group = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), np.array([1, 1, 0, 2])
    both = jax.value_and_grad(lambda x: sum(jnp.sum(y * 1.0) for y in program(x, group)))
    for fun in (lambda x: program(x, group), both):
        with jax.disable_jit():
            closed = jax.make_jaxpr(fun)(x)
        got = evaluate(closed.jaxpr, closed.consts, [x])
        for a, b in zip(got, jax.tree.leaves(jax.jit(fun)(x)), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
