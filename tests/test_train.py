"""Programs: pure functions of a key, learning what can be learned, whatever the chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpt.envs import exact, make
from jaxpt.models import ModelConfig
from jaxpt.models.counts import dot_flops
from jaxpt.rollout.generate import STRIDE, whole_strides
from jaxpt.train.budget import update_flops
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.optim import OptimConfig, make_optimizer, scale_at
from jaxpt.train.policy import PolicyConfig, make_policy, policy_flops
from jaxpt.train.sft import SftConfig, make_sft
from jaxpt.train.tabular import TabularConfig, demonstrator, make_tabular

BANDIT = EnvConfig("bandit", {"arms": 3})
MODEL = ModelConfig(vocab=BANDIT.make().spec.vocab, d_model=8, n_layers=1, n_heads=1)


def hyper_of(program, **overrides):
    return {k: jnp.float32(v) for k, v in {**program.hyper, **overrides}.items()}


def run(program, steps, state):
    return jax.jit(lambda s: jax.lax.scan(lambda s, _: program.step(s), s, None, length=steps))(state)


@pytest.fixture(scope="module")
def policy():
    cfg = PolicyConfig(env=BANDIT, model=MODEL, objective="grpo", prompts=4, group=4, eval=EvalConfig(5, 4),
                       optim=OptimConfig(learning_rate=0.03))
    return make_policy(cfg)


def test_chunks_of_a_run_are_bit_identical(policy):
    state = policy.init(jax.random.key(0), hyper_of(policy))
    whole, metrics = run(policy, 6, state)
    first, m1 = run(policy, 3, state)
    second, m2 = run(policy, 3, first)
    unkey = lambda s: {k: v for k, v in s.items() if k != "key"}  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, unkey(whole), unkey(second))
    jax.tree.map(lambda a, b, c: np.testing.assert_array_equal(a, np.concatenate([b, c])), metrics, m1, m2)
    assert np.isfinite(np.asarray(metrics["greedy_gold"])).tolist() == [t % 5 == 4 for t in range(6)]


def test_numbers_are_leaves(policy):
    """Another learning rate or beta is the same compiled program: only the arguments differ."""
    step = jax.jit(policy.step)
    for rate, beta in ((0.1, 0.0), (0.01, 1.0)):
        step(policy.init(jax.random.key(0), hyper_of(policy, learning_rate=rate, beta=beta)))
    assert step._cache_size() == 1


def test_the_start_and_the_reference_are_the_parent_s_parameters(policy):
    start = jax.tree.map(lambda x: x + 1, policy.init(jax.random.key(0), hyper_of(policy))["params"])
    state = policy.init(jax.random.key(1), hyper_of(policy), start=start)
    jax.tree.map(np.testing.assert_array_equal, state["params"], start)
    jax.tree.map(np.testing.assert_array_equal, state["reference"], start)


@pytest.mark.parametrize("objective", ["reinforce", "rloo", "grpo_no_kl", "grpo"])
def test_every_objective_finds_the_best_arm_of_one_task(objective):
    """A probe with a known optimum: one fixed tree, J* its best leaf; plain gradient descent gets there."""
    rates = {"reinforce": 2.0, "rloo": 2.0, "grpo_no_kl": 1.0, "grpo": 1.0}
    cfg = TabularConfig(vocab=3, depth=2, world=1, objective=objective, prompts=8, learning_rate=rates[objective])
    program = make_tabular(cfg)
    _, metrics = run(program, 300, program.init(jax.random.key(0), hyper_of(program)))
    env = make("tree", vocab=3, depth=2)
    leaves = exact.leaves(env, env.sample(jax.random.key(1), jnp.int32(1)), jax.random.key(0))
    assert (np.asarray(metrics["J_replica"][-1]) > leaves.reward.max() - 0.03).all()


def test_maximum_likelihood_ends_at_the_demonstrator():
    cfg = TabularConfig(vocab=3, depth=2, objective="sft", source="demonstrator", prompts=64, learning_rate=1.0)
    program = make_tabular(cfg)
    _, metrics = run(program, 300, program.init(jax.random.key(0), hyper_of(program)))
    env = make("tree", vocab=3, depth=2)
    leaves = exact.leaves(env, env.sample(jax.random.key(0), jnp.int32(1)), jax.random.key(0))
    expert = exact.value(demonstrator(leaves, cfg.corruption), leaves)
    np.testing.assert_allclose(metrics["J"][-1], expert, atol=0.02)
    assert expert < leaves.reward.max() - 0.1


def test_a_coin_for_a_reward_teaches_nothing():
    program = make_tabular(TabularConfig(vocab=3, depth=2, reward_noise=1.0, replicas=32))
    _, metrics = run(program, 100, program.init(jax.random.key(0), hyper_of(program)))
    value = np.asarray(metrics["J_replica"])
    drift = value[-1] - value[0]
    assert abs(drift.mean()) < 4 * drift.std(ddof=1) / np.sqrt(32)


def test_supervised_training_lowers_the_loss():
    env = EnvConfig("chain", {"p": 5, "max_level": 1}, (1, 1))
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=16, n_layers=1, n_heads=2)
    program = make_sft(SftConfig(env=env, model=model, batch=16, optim=OptimConfig(learning_rate=1e-2)))
    _, metrics = run(program, 30, program.init(jax.random.key(0), hyper_of(program)))
    assert metrics["loss"][-1] < 0.5 * metrics["loss"][0]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules(schedule):
    cfg = OptimConfig(schedule=schedule, warmup=4, decay_steps=20, floor=0.1)
    at = np.array([float(scale_at(cfg, jnp.int32(t))) for t in range(30)])
    np.testing.assert_allclose(at[:5], np.arange(1, 6) / 5, rtol=1e-6)
    done = np.clip((np.arange(30) - 4) / 16, 0, 1)
    shape = {"constant": np.ones(30), "linear": 0.1 + 0.9 * (1 - done), "cosine": 0.1 + 0.45 * (1 + np.cos(np.pi * done))}
    np.testing.assert_allclose(at[4:], shape[schedule][4:], rtol=1e-5)


def test_the_optimizer_is_adamw_on_clipped_gradients():
    params = {"w": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    grads = jax.tree.map(lambda x: 3.0 * x, params)
    cfg = OptimConfig(learning_rate=0.1, weight_decay=0.5, clip=1.0)
    ours = make_optimizer(cfg)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(
        0.1, 0.9, 0.99, 1e-8, weight_decay=0.5, mask={"w": True, "scale": False}))
    a, _ = ours.update(grads, ours.init(params), params)
    b, _ = theirs.update(grads, theirs.init(params), params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


@pytest.mark.parametrize("build, message", [
    (lambda: OptimConfig(schedule="cosin"), "expected one of constant, linear, cosine"),
    (lambda: OptimConfig(schedule="cosine", decay_steps=0), "expected more than warmup"),
    (lambda: EnvConfig("chain", {}, (0, 3)), "expected 1 <= low <= high <= 8"),
    (lambda: EnvConfig("chian"), "'chain'"),
    (lambda: TabularConfig(source="expert"), "expected one of policy, demonstrator"),
])
def test_bad_configs_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_the_budget_counts_the_products_that_a_step_executes(objective):
    """Against the jaxpr, evaluation made empty; embedding lookups are no products."""
    env = EnvConfig("chain", {"p": 5, "max_level": 2}, (1, 2))
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=16, n_layers=2, n_heads=2)
    cfg = PolicyConfig(env=env, model=model, prompts=4, group=2, objective=objective, eval=EvalConfig(1, 0))
    sft = SftConfig(env=env, model=model, batch=8, eval=EvalConfig(1, 0))
    for program, claimed in ((make_policy(cfg), policy_flops(cfg)), (make_sft(sft), update_flops(model, env.make().spec, 8))):
        state = jax.eval_shape(lambda p=program: p.init(jax.random.key(0), hyper_of(p)))
        trips = whole_strides(env.make().spec.response_len) // STRIDE
        assert dot_flops(program.step, state, trips=trips) == claimed
