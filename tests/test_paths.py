"""What verified events do to rewards and advantages, against loops; and the twin, where the answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.envs.protocol import Spec
from jaxpt.models import ModelConfig
from jaxpt.train import paths
from jaxpt.train.charted import ChartedConfig, make_charted
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.paths import PathConfig
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.types import Trajectory

SPEC = Spec(4, 1, 5, ("bad", "unused", "good"), (), 1, ("best",), ("PAD", "a", "b", "c"))
EVENTS = PathConfig(events={"good": 1.0, "bad": -2.0})
GROUP, ROWS, T = 4, 8, 6


def batch(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, T)) < 0.6
    mask[:, 0] = False
    turn = np.where(mask, np.cumsum(mask & ~np.pad(mask[:, :-1], ((0, 0), (1, 0))), 1) - 1, 0)
    signals = np.where(mask[..., None], rng.random((ROWS, T, 3)) < 0.3, 0).astype(np.float32)
    reward = rng.integers(0, 2, ROWS).astype(np.float32)
    fields = dict(
        tokens=rng.integers(1, 4, (ROWS, T)).astype(np.int32), mask=mask, old_logp=-rng.random((ROWS, T)).astype(np.float32),
        turn=turn.astype(np.int32), signals=signals, reward=reward, gold=reward, parts=np.zeros((ROWS, 0), np.float32),
        truncated=np.zeros(ROWS, bool), group=np.arange(ROWS, dtype=np.int32) // GROUP, length=np.full(ROWS, T, np.int32),
    )
    return Trajectory(**{name: jnp.asarray(x) for name, x in fields.items()})


def hyper_of(cfg, **more):
    return {name: jnp.float32(x) for name, x in {**cfg.leaves(), **more}.items()}


def run_guided(traj, hyper, step=0, where=None):
    where = jnp.zeros(ROWS, bool) if where is None else where
    return jax.jit(lambda h, s, t, w: paths.guided(EVENTS, SPEC, h, s, t, w, GROUP))(hyper, jnp.int32(step), traj, where)


@pytest.mark.parametrize("seed", range(3))
def test_rewards_and_channel_are_those_of_a_loop(seed):
    traj = batch(seed)
    more = {"outcome_weight": 0.7, "path_total": 0.3, "path_cap": 2.5, "path_weight": 0.5, "path_until": 8.0}
    left = 1 - 2 / 8
    ready, further = run_guided(traj, hyper_of(EVENTS, **more), step=2)
    p = np.asarray(traj.signals) @ np.array([-2.0, 0.0, 1.0])
    reward = [0.7 * r + left * 0.3 * min(max(x.sum(), -2.5), 2.5) for r, x in zip(traj.reward, p, strict=True)]
    np.testing.assert_allclose(ready.reward, reward, rtol=1e-5)
    mask, turn, of_turn = np.asarray(traj.mask), np.asarray(traj.turn), np.zeros((ROWS, T))
    for b in range(ROWS):
        for t in np.flatnonzero(mask[b]):
            of_turn[b, t] = sum(p[b, s] for s in np.flatnonzero(mask[b]) if turn[b, s] == turn[b, t])
    scale = mask.sum() / (of_turn != 0).sum()
    np.testing.assert_allclose(further, left * 0.5 * scale * of_turn, rtol=1e-5, atol=1e-6)


def test_by_default_the_outcome_alone_is_used():
    traj = batch(0)
    ready, further = run_guided(traj, hyper_of(EVENTS))
    np.testing.assert_array_equal(ready.reward, traj.reward)
    assert not further.any()


def test_what_fades_is_gone_at_its_end():
    traj, more = batch(1), {"path_total": 1.0, "path_weight": 1.0, "path_until": 5.0}
    for step in (5, 50):
        ready, further = run_guided(traj, hyper_of(EVENTS, **more), step=step)
        np.testing.assert_array_equal(ready.reward, traj.reward)
        assert not further.any()


def test_a_demonstration_is_compared_with_the_others_and_they_are_not_with_it():
    traj, shown = batch(2), jax.tree.map(lambda x: x[:2], batch(3))
    where = paths.seats(ROWS, GROUP, jnp.float32(1))
    assert where.tolist() == [False, False, False, True] * 2 and not paths.seats(ROWS, GROUP, jnp.float32(0)).any()
    seated = paths.seated(traj, shown, where, GROUP)
    for name in ("tokens", "mask", "old_logp", "turn", "signals", "reward", "length"):
        got, own, other = (np.asarray(getattr(x, name)) for x in (seated, traj, shown))
        np.testing.assert_array_equal(got[[3, 7]], other)
        np.testing.assert_array_equal(np.delete(got, [3, 7], 0), np.delete(own, [3, 7], 0))
    np.testing.assert_array_equal(seated.group, traj.group)
    ready, further = run_guided(seated, hyper_of(EVENTS), where=where)
    assert np.isnan(ready.reward[jnp.array([3, 7])]).all()
    for at in (3, 7):
        lesson = seated.reward[at] - np.mean(seated.reward[at - 3 : at])
        np.testing.assert_allclose(further[at], np.where(seated.mask[at], lesson, 0), rtol=1e-6)
    assert not np.delete(np.asarray(further), [3, 7], 0).any()


def test_metrics_of_a_batch_that_is_known():
    """Four rows a group: in the first nobody earns anything and one breaks the rule; in the second all earn alike."""
    signals = jnp.zeros((ROWS, T, 3)).at[1, 2, 0].set(1).at[1, 3, 0].set(1).at[5, 1, 2].set(1)
    traj = batch(0)._replace(signals=signals, mask=jnp.ones((ROWS, T), bool), reward=jnp.repeat(jnp.array([0.0, 1.0]), 4))
    got = {name: float(s / w) for name, (s, w) in paths.path_metrics(EVENTS, SPEC, traj).items()}
    expected = {"violations": 2 / 8, "all_fail": 0.5, "rescued": 1.0, "outcome_variance": 0.0, "count_bad": 2 / 8,
                "count_good": 1 / 8, "differs_bad": 0.5, "differs_good": 0.5, "violation_variance": (0.75 * 0.25 * 4) / 2}
    assert got == pytest.approx(expected)


FILEOPS = EnvConfig("fileops", {"files": 2, "max_level": 1}, (1, 1))
RULES = {"blind_write": -1.0, "blind_delete": -1.0, "tampering": -1.0, "untested_submit": -1.0, "discharged": 0.0}


@pytest.mark.parametrize("cfg, message", [
    (PathConfig(events={"blind_writ": -1.0}), "path.events: 'blind_writ' is no signal"),
    (PathConfig(events=RULES, demonstrator="complaint"), "path.demonstrator: got 'complaint', expected one of compliant"),
])  # fmt: skip
def test_a_config_is_told_what_the_environment_has(cfg, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig(env=FILEOPS, model=ModelConfig(vocab=17), path=cfg)
    with pytest.raises(ValueError, match=message):
        ChartedConfig(env=FILEOPS, path=cfg, style="habit")


def test_demonstrations_need_groups_of_known_tasks():
    shown = PathConfig(events=RULES, demonstrator="compliant")
    for more in ({"objectives": ("dapo",)}, {"repeats": 2}):
        with pytest.raises(ValueError, match="path.demonstrator: expected None with `repeats`"):
            PolicyConfig(env=FILEOPS, model=ModelConfig(vocab=17), path=shown, **more)


@pytest.fixture(scope="module")
def trained():
    """(steps, **hyper) -> metrics of the twin."""
    twin = make_charted(ChartedConfig(
        env=FILEOPS, path=PathConfig(events=RULES, demonstrator="compliant"), style="habit", prompts=4, replicas=2, every=40,
    ))  # fmt: skip

    def train(steps, **hyper):
        numbers = {name: jnp.float32(x) for name, x in {**twin.hyper, **hyper}.items()}
        run = jax.jit(lambda s: jax.lax.scan(lambda s, _: twin.step(s), s, None, length=steps))
        return jax.device_get(run(twin.init(jax.random.key(0), numbers))[1])

    return train


def test_the_twin_s_samples_agree_with_its_exact_expectations(trained):
    """Nothing is learned at rate 0, so 40 batches of 32 episodes are draws from what is computed."""
    got = trained(40, learning_rate=0.0)
    for name in ("violations", "count_discharged", "count_blind_write"):
        sample = got[f"sampled_{name}"]
        assert abs(sample.mean() - got[name][-1]) < 5 * sample.std(ddof=1) / np.sqrt(sample.size)
    assert np.isnan(got["reward"][:-1]).all() and (got["reward_replica"][-1] > 0.5).all()


def test_penalties_alone_teach_to_do_nothing_and_the_outcome_alone_does_not(trained):
    """Without an outcome, the best that can be done is to submit at once: no violation, and no success either."""
    alone = trained(160, outcome_weight=0.0, path_total=0.5)
    assert (alone["reward_replica"][-1] < 0.02).all() and (alone["violations_replica"][-1] < 0.05).all()
    outcome = trained(160)
    assert (outcome["reward_replica"][-1] > 0.95).all() and (outcome["violations_replica"][-1] > 0.5).all()


def test_with_a_demonstration_in_every_group_the_twin_learns_the_compliant_way(trained):
    got = trained(160, path_weight=0.5, demonstrated=1.0, event_discharged=1.0)
    assert (got["gold_replica"][-1] > 0.9).all() and (got["violations_replica"][-1] < 0.1).all()
    assert (got["count_discharged_replica"][-1] > 1.8).all()


def test_a_policy_program_with_channels_and_demonstrations_steps():
    cfg = PolicyConfig(
        env=FILEOPS, model=ModelConfig(vocab=17, d_model=8, n_layers=1, n_heads=1), objectives=("dr_grpo",), prompts=2, group=4,
        path=PathConfig(events=RULES, demonstrator="compliant"), eval=EvalConfig(1, 4),
    )  # fmt: skip
    program = make_policy(cfg)
    step = jax.jit(program.step)

    def after(**hyper):
        numbers = {name: jnp.float32(x) for name, x in {**program.hyper, **hyper}.items()}
        return jax.device_get(step(program.init(jax.random.key(0), numbers)))

    plain, shown = after(), after(demonstrated=1.0)
    for state, metrics in (plain, shown):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state["params"]))
        assert np.isfinite(metrics["violations"])
    # What is measured is the policy; what is learned from is the demonstration too, which an unlucky group has to thank.
    assert plain[1]["violations"] == shown[1]["violations"] and plain[1]["reward"] == shown[1]["reward"]
    assert plain[1]["reward"] > 0 or shown[1]["grad_norm"] > plain[1]["grad_norm"] == 0
