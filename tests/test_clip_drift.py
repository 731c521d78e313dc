"""Exact drift against a float64 loop over sequences, what must hold of any clip, and the experiment's arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.experiments import clip_drift
from jaxpt.train import drift

CONFIG = clip_drift.EXPERIMENT.tiers["cpu"].config
SMALL = drift.DriftConfig(depth=2, tokens=3, groups=2, group=4, worlds=2, learning_rate=4.0)
FREE = {"eps_low": 1e9, "eps_high": 1e9}


@pytest.fixture(scope="module")
def runs():
    """(hyper) -> last parameters, worlds, metrics; compiles once."""
    program = drift.make_drift(SMALL)

    @jax.jit
    def scan(numbers):
        return jax.lax.scan(lambda s, _: program.step(s), program.init(jax.random.key(0), numbers), length=12)

    def run(**hyper):
        state, metrics = scan({name: jnp.float32(x) for name, x in {**program.hyper, **hyper}.items()})
        return jax.tree.map(np.asarray, (state["params"], state["world"], metrics))

    run.hyper = set(program.hyper)
    return run


@pytest.mark.parametrize("depth, tokens", [(1, 4), (3, 2)])
def test_all_full_sequences_are_listed_once(depth, tokens):
    leaves = drift.full_length(depth, tokens)
    assert len({tuple(row) for row in np.asarray(leaves.tokens)}) == leaves.tokens.shape[0] == tokens**depth
    assert leaves.mask.all() and leaves.mask.shape[1] == depth


def test_metrics_are_those_of_a_loop_over_sequences(runs):
    params, worlds, metrics = runs(sharing=0.4)
    leaves = jax.tree.map(np.asarray, drift.full_length(SMALL.depth, SMALL.tokens))
    weights = params["weights"][0].astype(np.float64)
    drawn = jax.tree.map(lambda x: x[0], worlds)
    nodes = drawn["old"].shape[0]
    new = drawn["old"] + np.sqrt(0.6) * weights[:nodes] + np.sqrt(0.4) * drawn["features"] @ weights[nodes:]
    legal = sorted(set(leaves.tokens.ravel()))
    policy = [np.exp(x[:, legal]) / np.exp(x[:, legal]).sum(1, keepdims=True) for x in (drawn["old"].astype(float), new)]
    kl = tv = gain = 0.0
    ratios, products = [], []
    for row, node, reward in zip(leaves.tokens, leaves.node, drawn["reward"], strict=True):
        old, now = ([x[n, legal.index(t)] for n, t in zip(node, row, strict=True)] for x in policy)
        ratios.append(np.divide(now, old))
        products.append(np.prod(ratios[-1]))
        kl -= np.prod(old) * np.log(products[-1])
        tv += abs(np.prod(now) - np.prod(old)) / 2
        gain += (np.prod(now) - np.prod(old)) * reward
    batch = np.array(ratios)[drawn["members"]]
    power = np.log(max(np.array(products)[drawn["members"]])) / np.log(1.2) / SMALL.depth
    want = {"kl": kl, "tv": tv, "gain": gain, "ratio": batch.max(), "ratio_any": np.max(ratios), "power": power,
            "outside": np.mean(np.abs(batch - 1) > 0.2), "estimate": np.mean((batch - 1 - np.log(batch)).sum(1))}
    for name, value in want.items():
        np.testing.assert_allclose(metrics[f"{name}_world"][-1, 0], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_no_clip_binds_in_the_first_update(runs):
    clipped, free = runs()[-1], runs(**FREE)[-1]
    np.testing.assert_allclose(clipped["kl_world"][0], free["kl_world"][0], rtol=1e-6)
    assert (clipped["kl_world"][-1] < free["kl_world"][-1]).all()


def test_the_stop_allows_one_update_too_many(runs):
    stopped = runs(**FREE, kl_limit=0.0)[-1]["kl_world"]
    assert (stopped[0] > 0).all()
    np.testing.assert_array_equal(stopped, np.broadcast_to(stopped[:1], stopped.shape))


def test_errors_name_the_field():
    for field, value in {"ratio": "word", "sharing": 1.5, "depth": 0}.items():
        with pytest.raises(ValueError, match=f"{field}: got"):
            dataclasses.replace(SMALL, **{field: value})


def test_arms_of_one_length_share_worlds_and_mostly_a_program(runs):
    stages = clip_drift.stages(CONFIG, {})
    assert len({s.config for s in stages}) == len(clip_drift.DEPTHS) + 1  # and the sequence's clip
    for stage in stages:
        assert stage.stream == f"T{stage.config.depth}" == stage.name.rpartition("_")[2]
        assert stage.steps == CONFIG.updates and set(stage.hyper) <= runs.hyper


def test_gains_are_compared_at_equal_kl():
    """The clipped arm gains twice its KL, the free one once: at the end 0.3 more, at a tenth of the way 0.03."""
    steps = np.arange(1, 5) / 4
    paths = {"clip_T8/kl": 0.3 * steps, "clip_T8/gain": 0.6 * steps, "open_T8/kl": 2 * steps, "open_T8/gain": 2 * steps}
    curves = {f"{name}_world": np.tile(x[None, :, None], (2, 1, 3)) for name, x in paths.items()}
    claim = next(c for c in clip_drift.CLAIMS if c.name == "the_clip_spends_its_kl_better")
    np.testing.assert_allclose(claim.estimand(curves), np.full(6, 0.3))
    np.testing.assert_allclose(claim.control(curves), np.full(6, 0.03))


@pytest.mark.parametrize("field, value, sentence", [
    ("updates", 100, "--updates 100: expected a multiple of 64"),
    ("group", 1, "--group 1: expected at least 2"),
    ("beta", -1.0, "--beta -1.0: expected at least 0"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})
