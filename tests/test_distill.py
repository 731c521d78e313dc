"""The program that distils: whose texts, whose weights; and the arithmetic of its experiment."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.experiments import on_policy_distillation as experiment
from jaxpt.lab.experiment import topological
from jaxpt.lab.identity import stage_identities
from jaxpt.models import ModelConfig, make_model
from jaxpt.rollout import demonstrate
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.distill import DistillConfig, behind, decisions, make_distill

ENV = EnvConfig("chain", {"p": 5, "generators": 3, "max_level": 2}, (1, 2))
MODEL = ModelConfig(vocab=ENV.make().spec.vocab, d_model=8, n_layers=1)
ROWS = ("sft", "forward_kl", "reverse_kl", "opd", "grpo_no_kl")
CFG = DistillConfig(env=ENV, model=MODEL, teacher=MODEL, objectives=ROWS, prompts=4, group=2, eval=EvalConfig(100, 2))


@pytest.fixture(scope="module")
def program():
    made = make_distill(CFG)
    step = jax.jit(made.step)
    student, teacher = (make_model(MODEL).init(jax.random.key(k)) for k in (1, 2))

    def begin(weights, end=None, start=(student, teacher), **leaves):
        hyper = {**made.hyper, **CFG.arm(weights, end, **leaves)}
        return made.init(jax.random.key(0), {k: jnp.float32(x) for k, x in hyper.items()}, start)

    return begin, step, student, teacher


def losses(step, state, count=3):
    out = []
    for _ in range(count):
        state, metrics = step(state)
        out.append(float(metrics["loss"]))
    return np.array(out), state


def test_texts_of_a_pool_are_drawn_once_where_the_teacher_draws_them(program):
    """A learning rate of 0: what differs between updates is the texts alone."""
    begin, step, *_ = program
    fixed, _ = losses(step, begin({"sft": 1.0}, own=0.0, pool=2.0, learning_rate=0.0))
    assert np.ptp(fixed) == 0
    turns, _ = losses(step, begin({"sft": 1.0}, own=0.0, pool=8.0, learning_rate=0.0), 4)  # 4 of them an update
    assert turns[0] != turns[1] and (turns[:2] == turns[2:]).all()
    for leaves in ({"own": 0.0}, {"own": 1.0, "pool": 2.0}):
        moving, _ = losses(step, begin({"sft": 1.0}, learning_rate=0.0, **leaves))
        assert len(set(moving)) == 3


def test_who_is_the_teacher_learns_nothing(program):
    """Distributions are equal: no loss and no gradient but rounding; sampled tokens have no advantage. Neither moves."""
    begin, step, student, _ = program
    for row in ("forward_kl", "reverse_kl", "opd"):
        state, metrics = step(begin({row: 1.0}, start=(student, student)))
        assert abs(float(metrics["loss"])) < 1e-6 and float(metrics["grad_norm"]) < 1e-5
        assert float(metrics["agreement"]) == 1


def test_the_student_moves_toward_the_teacher_who_stays(program):
    begin, step, student, teacher = program
    state = begin({"reverse_kl": 1.0}, learning_rate=1e-2)
    kl = []
    for _ in range(60):
        state, metrics = step(state)
        kl.append(float(metrics["reverse_kl"]))
    assert np.mean(kl[-5:]) < 0.5 * np.mean(kl[:5])
    jax.tree.map(np.testing.assert_array_equal, state["teacher"], teacher)


def test_losses_are_weighed_and_handed_over_on_a_line(program):
    begin, step, *_ = program
    at = lambda weights, end=None, number=0, **leaves: float(  # noqa: E731
        step({**begin(weights, end, learning_rate=0.0, **leaves), "step": jnp.int32(number)})[1]["loss"]
    )
    one, other = (at({row: 1.0}, number=6) for row in ("reverse_kl", "opd"))
    np.testing.assert_allclose(at({"reverse_kl": 2.0, "opd": 0.5}, number=6), 2 * one + 0.5 * other, rtol=1e-5)
    over = {"weights": {"reverse_kl": 1.0}, "end": {"opd": 1.0}}
    np.testing.assert_allclose(at(**over, number=6, anneal=8.0), 0.25 * one + 0.75 * other, rtol=1e-5)
    np.testing.assert_allclose(at(**over, number=6, anneal=3.0), other, rtol=1e-6)


def test_logits_are_those_that_decide(program):
    *_, student, _ = program
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    stats, logits = decisions(make_model(MODEL), student, tokens)
    logp = jax.nn.log_softmax(logits[0], axis=-1)
    np.testing.assert_allclose(stats["logp"][0, 1:], logp[jnp.arange(1, 5), tokens[0, 1:]], rtol=1e-5)
    assert not logits[:, 0].any()


def test_a_teacher_reads_the_student_s_responses_behind_its_own_prompts(program):
    """Against rows built token by token; where its prompts are the student's, nothing differs."""
    hinted = EnvConfig("chain", {**ENV.options, "hint": 1.0}, (1, 2))
    env, other = ENV.make(), hinted.make()
    tasks = jax.vmap(env.sample)(jax.random.split(jax.random.key(3), 6), jnp.array([1, 2] * 3))
    traj = demonstrate(env, tasks, jax.random.split(jax.random.key(4), 6))
    (_, n), (prompt, m) = (jax.vmap(e.prompt)(tasks) for e in (env, other))
    width = other.spec.prompt_len + other.spec.response_len
    moved, at = behind(traj.tokens, n, prompt, m, width)
    for row in range(6):
        response = traj.tokens[row, n[row] : traj.length[row]].tolist()
        whole = prompt[row, : m[row]].tolist() + response
        assert moved[row].tolist() == whole + [0] * (width - len(whole))
        assert moved[row, at[row, n[row] : traj.length[row]]].tolist() == response

    begin, step, *start = program
    weights = {"reverse_kl": 1.0}
    told = {"none": float(step(begin(weights))[1]["reverse_kl"])}
    for name, seen in (("same", ENV), ("hinted", hinted)):
        made = make_distill(replace(CFG, seen=seen))
        hyper = {k: jnp.float32(x) for k, x in {**made.hyper, **CFG.arm(weights)}.items()}
        told[name] = float(jax.jit(made.step)(made.init(jax.random.key(0), hyper, tuple(start)))[1]["reverse_kl"])
    np.testing.assert_allclose(told["none"], told["same"], rtol=1e-5)
    assert abs(told["hinted"] - told["same"]) > 1e-4


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="'grpo_nokl' is none of the program's rows"):
        CFG.arm({"grpo_nokl": 1.0})
    with pytest.raises(ValueError, match="seen: expected .* responses as long"):
        replace(CFG, seen=EnvConfig("chain", {"max_level": 3}, (1, 2)))
    with pytest.raises(ValueError, match="needs values"):
        DistillConfig(env=ENV, model=MODEL, teacher=MODEL, objectives=("ppo",))


# --- the experiment ---------------------------------------------------------------------------------------------------


def test_arms_begin_from_the_student_and_a_teacher():
    cfg = experiment.EXPERIMENT.tiers["cpu"].config
    stages = topological(experiment.stages(cfg, {}))
    after = {stage.name: stage.after for stage in stages}
    assert after["opd"] == ("start", "teacher") and after["weak"] == ("start", "noisy")
    assert after["self"] == ("informed", "informed") and after["slip_seasoned"] == ("start", "seasoned")
    ids = stage_identities(stages)
    arms = [name for name, parents in after.items() if isinstance(parents, tuple)]
    assert len({ids[name] for name in arms}) == len(arms)


@given(seed=st.integers(0, 2**32 - 1), goal=st.floats(0.1, 0.9))
def test_the_crossing_lies_where_success_passes_the_goal(seed, goal):
    curve = np.random.default_rng(seed).random((3, 6))
    updates = 10.0 * np.arange(1, 7)
    for y, at in zip(curve, experiment.crossing(curve, updates, goal), strict=True):
        before = y[updates < at]
        assert np.all(before < goal)
        assert abs(np.interp(at, updates, y) - goal) < 1e-9 or at == updates[0] or (y < goal).all() and at == updates[-1]


def test_errors_that_grow_alike_are_no_steeper():
    success = {"opd": (0.9, 0.6), "offline": (0.8, 0.4)}
    curves = {f"{arm}/sampled_gold_{end}": np.array([[np.nan, x]]) for arm, both in success.items()
              for end, x in zip(("shortest", "longest"), both, strict=True)}
    np.testing.assert_allclose(experiment.steeper("offline")(curves), 0.1)
    np.testing.assert_allclose(experiment.growth(curves, "opd"), 0.3)
