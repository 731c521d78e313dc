"""Programs: pure functions of a key, learning what can be learned, whatever the chunks."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpt import envs
from jaxpt.envs import exact, make
from jaxpt.models import ModelConfig, make_model, stack_layers
from jaxpt.models.counts import dot_flops
from jaxpt.ops.sampling import row_keys
from jaxpt.rollout.generate import STRIDE, whole_strides
from jaxpt.train import common
from jaxpt.train.budget import update_flops
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.documents import DocumentsConfig, make_documents
from jaxpt.train.optim import OptimConfig, make_optimizer, scale_at
from jaxpt.train.parallel import ONE
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
    cfg = PolicyConfig(env=BANDIT, model=MODEL, objectives=("grpo",), prompts=4, group=4, eval=EvalConfig(5, 4),
                       optim=OptimConfig(learning_rate=0.03))
    return make_policy(cfg)


@pytest.fixture(scope="module")
def three(policy):
    return jax.jit(lambda s: jax.lax.scan(lambda s, _: policy.step(s), s, None, length=3))


def test_chunks_of_a_run_are_bit_identical(policy, three):
    state = policy.init(jax.random.key(0), hyper_of(policy))
    whole, metrics = run(policy, 6, state)
    first, m1 = three(state)
    second, m2 = three(first)
    unkey = lambda s: {k: v for k, v in s.items() if k != "key"}  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, unkey(whole), unkey(second))
    jax.tree.map(lambda a, b, c: np.testing.assert_array_equal(a, np.concatenate([b, c])), metrics, m1, m2)
    assert np.isfinite(np.asarray(metrics["greedy_gold"])).tolist() == [t % 5 == 4 for t in range(6)]


def test_numbers_are_leaves(policy, three):
    """Another learning rate or beta is the same compiled program: only the arguments differ."""
    three.clear_cache()
    for rate, beta in ((0.1, 0.0), (0.01, 1.0)):
        three(policy.init(jax.random.key(0), hyper_of(policy, learning_rate=rate, beta=beta)))
    assert three._cache_size() == 1


def test_the_start_and_the_reference_are_the_parent_s_parameters(policy):
    start = jax.tree.map(lambda x: x + 1, policy.init(jax.random.key(0), hyper_of(policy))["params"])
    state = policy.init(jax.random.key(1), hyper_of(policy), start=start)
    jax.tree.map(np.testing.assert_array_equal, state["params"], start)
    jax.tree.map(np.testing.assert_array_equal, state["reference"], start)


@pytest.mark.parametrize("objective", ["reinforce", "rloo", "grpo"])
def test_every_objective_finds_the_best_arm_of_one_task(objective):
    """A probe with a known optimum: one fixed tree, J* its best leaf; plain gradient descent gets there."""
    rates = {"reinforce": 2.0, "rloo": 2.0, "grpo_no_kl": 1.0, "grpo": 1.0}
    cfg = TabularConfig(vocab=3, depth=2, world=1, objectives=(objective,), prompts=8, learning_rate=rates[objective])
    program = make_tabular(cfg)
    _, metrics = run(program, 300, program.init(jax.random.key(0), hyper_of(program)))
    env = make("tree", vocab=3, depth=2)
    leaves = exact.leaves(env, env.sample(jax.random.key(1), jnp.int32(1)), jax.random.key(0))
    assert (np.asarray(metrics["J_replica"][-1]) > leaves.reward.max() - 0.03).all()


def test_maximum_likelihood_ends_at_the_demonstrator():
    cfg = TabularConfig(vocab=3, depth=2, objectives=("sft",), source="demonstrator", prompts=64, learning_rate=1.0)
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


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_schedules(schedule):
    cfg = OptimConfig(schedule=schedule, warmup=4, decay_steps=20, decay_start=12, floor=0.1)
    at = np.array([float(scale_at(cfg, jnp.int32(t))) for t in range(30)])
    np.testing.assert_allclose(at[:5], np.arange(1, 6) / 5, rtol=1e-6)
    done = np.clip((np.arange(30) - 4) / 16, 0, 1)
    shape = {"constant": np.ones(30), "linear": 0.1 + 0.9 * (1 - done), "cosine": 0.1 + 0.45 * (1 + np.cos(np.pi * done))}
    shape["wsd"] = 1 - 0.9 * np.clip((np.arange(30) - 12) / 8, 0, 1)
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
    (lambda: OptimConfig(schedule="wsd", decay_steps=9, decay_start=9), "decay_start: got 9, expected a step from warmup = 0"),
    (lambda: EnvConfig("chain", {}, (0, 3)), "expected 1 <= low <= high <= 8"),
    (lambda: EnvConfig("chian"), "'chain'"),
    (lambda: TabularConfig(source="expert"), "expected one of policy, start, demonstrator"),
    (lambda: PolicyConfig(env=BANDIT, model=MODEL, prompts=0), "prompts: got 0, expected a number above 0"),
    (lambda: PolicyConfig(env=BANDIT, model=MODEL, objectives=("grppo",)), "nearest: 'grpo'"),
    (lambda: SftConfig(env=BANDIT, model=MODEL, style="thnik"), "style: got 'thnik', expected one of best"),
    (lambda: SftConfig(env=BANDIT, model=MODEL, style="best", objective="grpo"), "expected a supervised row"),
    (lambda: PolicyConfig(model=MODEL), "model.vocab: got 5, expected at least"),
    (lambda: EvalConfig(every=0), "every: got 0"),
])
def test_bad_configs_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_the_budget_counts_the_products_that_a_step_executes(objective):
    """Against the jaxpr, evaluation made empty; embedding lookups are no products."""
    env = EnvConfig("chain", {"p": 5, "max_level": 2}, (1, 2))
    model = ModelConfig(vocab=env.make().spec.vocab, d_model=16, n_layers=2, n_heads=2)
    cfg = PolicyConfig(env=env, model=model, prompts=4, group=2, objectives=(objective,), eval=EvalConfig(1, 0))
    sft = SftConfig(env=env, model=model, batch=8, eval=EvalConfig(1, 0))
    for program, claimed in ((make_policy(cfg), policy_flops(cfg)), (make_sft(sft), update_flops(model, env.make().spec, 8))):
        state = jax.eval_shape(lambda p=program: p.init(jax.random.key(0), hyper_of(p)))
        trips = whole_strides(env.make().spec.response_len) // STRIDE
        assert dot_flops(program.step, state, trips=trips) == claimed


@pytest.fixture
def opposite(monkeypatch):
    """A bandit whose reward is the negative of its gold."""

    def make_env():
        env = envs.ENVS["bandit"](arms=3)
        return env._replace(outcome=lambda task, state: (lambda o: o._replace(reward=-o.gold))(env.outcome(task, state)))

    monkeypatch.setitem(envs.ENVS, "opposite", make_env)
    return EnvConfig("opposite")


COMPILED = {}  # what policy_run has compiled: configs that differ in numbers only share it


def policy_run(steps, hyper=None, **fields):
    cfg = PolicyConfig(**{"env": BANDIT, "model": MODEL, "objectives": ("rloo",), "prompts": 16, "group": 8,
                          "eval": EvalConfig(1, 256), **fields})
    program = make_policy(cfg)
    scan = lambda s: jax.lax.scan(lambda s, _: program.step(s), s, None, length=steps)  # noqa: E731
    compiled = COMPILED.setdefault((repr(fields), steps), jax.jit(scan))
    start = jax.jit(program.init)(jax.random.key(0), hyper_of(program, **(hyper or {})))
    return cfg, start, *compiled(start)


def test_training_sees_the_reward_and_evaluation_the_gold(opposite, monkeypatch):
    env = envs.ENVS["opposite"]()
    monkeypatch.setitem(envs.ENVS, "opposite", lambda: env._replace(  # arms keep their places, so one can be learnt
        sample=lambda key, level: jnp.linspace(1.0, 0.0, 3)))
    _, _, _, metrics = policy_run(30, env=opposite, optim=OptimConfig(learning_rate=0.1))
    np.testing.assert_allclose(metrics["reward"], -metrics["gold"], atol=1e-6)
    assert metrics["gold"][0] > 0.1 and metrics["sampled_gold"][-1] < 0.05  # the least gold pays most


def test_evaluation_is_one_greedy_and_one_drawn_episode():
    """Against the exact expectation: on the bandit a policy is one distribution over arms."""
    _, start, _, metrics = policy_run(20, {"learning_rate": 0.0})  # 20 looks at one policy
    model, env = make_model(MODEL), BANDIT.make()
    hidden, _ = model.forward(start["params"], jnp.full((1, 1), env.spec.vocab - 1))
    probs = jax.nn.softmax(hidden[0, 0] @ model.unembed(start["params"]))
    keys = row_keys(jax.random.fold_in(jax.random.key(common.EVALUATION), common.TASK), jnp.arange(256))
    means = common.draw_tasks(env, (1, 1), keys)
    gold = jnp.pad(means, ((0, 0), (1, 1)))  # what each token earns; tokens that are no arm earn 0
    drawn, best = float(jnp.mean(gold @ probs)), float(jnp.mean(gold[:, jnp.argmax(probs)]))
    np.testing.assert_allclose(metrics["greedy_gold"], best, atol=1e-5)
    assert abs(float(jnp.mean(metrics["sampled_gold"])) - drawn) < 4 * 0.5 / np.sqrt(20 * 256)
    assert len(np.unique(metrics["sampled_gold"])) > 5  # and each look draws anew
    assert abs(drawn - best) > 0.05


def test_the_ratio_is_one_at_any_temperature_and_the_reference_stays_where_the_run_began():
    _, start, state, metrics = policy_run(5, {"learning_rate": 0.1}, objectives=("grpo",), temperature=0.5)
    np.testing.assert_allclose(metrics["ratio"], 1.0, atol=1e-5)
    np.testing.assert_allclose(metrics["kl"][0], 0.0, atol=1e-9)
    jax.tree.map(np.testing.assert_array_equal, state["reference"], start["params"])
    assert metrics["kl"][-1] > 1e-3


def test_reward_noise_replaces_rewards_by_coins():
    _, _, _, plain = policy_run(20)
    _, _, _, coins = policy_run(20, hyper={"reward_noise": 1.0})
    np.testing.assert_array_equal(plain["reward"], plain["gold"])
    n = 20 * 16 * 8
    assert abs(float(np.mean(coins["reward"])) - 0.5) < 4 * 0.5 / np.sqrt(n)
    whole = np.asarray(coins["reward"]) * 128  # every reward is 0 or 1
    np.testing.assert_allclose(whole, np.round(whole), atol=1e-3)


def test_flops_are_counted_per_update():
    cfg, _, _, metrics = policy_run(20)
    np.testing.assert_allclose(metrics["flops"], policy_flops(cfg) * np.arange(1, 21), rtol=1e-6)


def test_the_style_of_the_demonstrations_is_the_config_s():
    def first_loss(style):
        env = EnvConfig("chain", {"p": 5, "max_level": 2, "corruption": 0.9}, (1, 2))
        model = ModelConfig(vocab=env.make().spec.vocab, d_model=8, n_layers=1, n_heads=1)
        program = make_sft(SftConfig(env=env, model=model, batch=32, style=style))
        return float(jax.jit(lambda: program.step(program.init(jax.random.key(0), hyper_of(program))))()[1]["loss"])

    assert abs(first_loss("think") - first_loss("think_noisy")) > 1e-3


def test_tasks_are_drawn_from_every_level():
    env = make("chain", max_level=4)
    tasks = common.draw_tasks(env, (2, 4), row_keys(jax.random.key(0), jnp.arange(64)))
    assert set(np.asarray(tasks.level).tolist()) == {2, 3, 4}


def test_keys_of_one_step_do_not_meet():
    """Task, row, noise and evaluation keys of a step, and what splitting them gives, are all different."""
    step_key = jax.random.fold_in(jax.random.key(0), 0)
    keys = []
    for purpose in (common.TASK, common.ROW, common.NOISE, common.EVALUATION):
        rows = row_keys(jax.random.fold_in(step_key, purpose), jnp.arange(16))
        keys += [rows, jax.vmap(jax.random.split)(rows).reshape(-1)]
    data = np.concatenate([np.asarray(jax.random.key_data(k)) for k in keys])
    assert len(np.unique(data, axis=0)) == len(data)


def test_norm_scales_never_decay_in_either_layout():
    model = make_model(ModelConfig(vocab=8, d_model=8, n_layers=2, n_heads=1))
    params = jax.tree.map(lambda x: jnp.ones(x.shape), jax.eval_shape(model.init, jax.random.key(0)))
    opt = make_optimizer(OptimConfig(weight_decay=0.5))
    for tree in (params, stack_layers(params)):
        zero = jax.tree.map(jnp.zeros_like, tree)
        updates, _ = opt.update(zero, opt.init(tree), tree)
        moved = {jax.tree_util.keystr(path): bool(jnp.any(x != 0)) for path, x in jax.tree_util.tree_leaves_with_path(updates)}
        assert all(moves != ("scale" in name) for name, moves in moved.items()) and len(set(moved.values())) == 2


def test_rows_that_know_who_drew_the_episodes_and_how_many_share_a_prompt():
    """grpo_tis behind a sampler that lags: the ratio is to the policy before the update, so 1 on a single pass, where
    grpo_no_kl's is to the sampler. magic's coefficient goes up by its step below the target and is floored at 0."""
    names = ("grpo_tis", "grpo_no_kl", "magic", "dapo_prompt_mean")
    cfg = PolicyConfig(env=BANDIT, model=MODEL, objectives=names, prompts=4, group=4, refresh=100, eval=EvalConfig(5, 4),
                       optim=OptimConfig(learning_rate=0.1))
    program = make_policy(cfg)
    out = jax.jit(lambda s: jax.lax.scan(lambda s, _: program.step(s), s, None, length=4))
    arm = lambda name, **more: out(program.init(jax.random.key(0), hyper_of(program, **{**cfg.arm(name), **more})))  # noqa: E731
    _, tis = arm("grpo_tis")
    _, plain = arm("grpo_no_kl")
    np.testing.assert_allclose(tis["ratio"], 1, rtol=1e-5)
    assert np.abs(np.asarray(plain["ratio"])[1:] - 1).max() > 1e-4
    np.testing.assert_allclose(tis["loss"][0], plain["loss"][0], rtol=1e-4, atol=1e-6)
    _, up = arm("magic", entropy_target=5.0, entropy_step=0.25)
    trained = np.isfinite(up["entropy"])  # a batch without signal moves nothing
    np.testing.assert_allclose(up["entropy_coef"], 0.25 * np.cumsum(trained), rtol=1e-6)
    state, down = arm("magic", entropy_target=0.01, entropy_coef=0.3, entropy_step=0.25)
    trained = np.isfinite(down["entropy"])
    np.testing.assert_allclose(down["entropy_coef"], np.maximum(0.3 - 0.25 * np.cumsum(trained), 0), atol=1e-6)
    np.testing.assert_allclose(state["hyper"]["entropy_last"], np.asarray(down["entropy"])[trained][-1], rtol=1e-5)
    assert np.isfinite(arm("dapo_prompt_mean")[1]["loss"]).all()
    with pytest.raises(ValueError, match="'grpo_token_weights' needs weights, which this program does not compute"):
        PolicyConfig(env=BANDIT, model=MODEL, objectives=("grpo_token_weights",))


def test_evaluation_elsewhere_is_evaluation_there():
    """Greedy scores, parts and events of a further range are those of a program that has it for its own."""
    env = EnvConfig("chain", {"p": 5, "max_level": 2}, (1, 2))
    made, model = env.make(), make_model(ModelConfig(vocab=env.make().spec.vocab, d_model=8, n_layers=1, n_heads=1))
    params = model.init(jax.random.key(0))
    elsewhere = {"short": (1, 1), "long": (2, 2)}

    @partial(jax.jit, static_argnums=0)
    def look(ranges):
        cfg = EvalConfig(tasks=64, elsewhere=dict(ranges))
        levels = elsewhere.get("short") if not ranges else (1, 2)
        return common.evaluate(model, params, made, SimpleNamespace(eval=cfg), levels, jax.random.key(1), ONE)

    alone, both = look(()), look(tuple(elsewhere.items()))
    assert {f"sampled_{name}" for name in (*made.spec.parts, *made.spec.signals, "gold")} < set(alone)
    for name, x in alone.items():
        if name.startswith("greedy_"):
            np.testing.assert_allclose(both[f"{name}_short"], x, atol=1e-6)
    mean = (both["sampled_malformed_short"] + both["sampled_malformed_long"]) / 2
    assert mean > 0 and abs(both["sampled_malformed"] - mean) < 0.3
    assert both["sampled_length_short"] != alone["sampled_length"]  # and draws of its own


def test_pretraining_on_documents_ends_at_their_entropy():
    """The bandit's documents name an arm, each as likely: the loss goes to log 3 and no further."""
    program = make_documents(DocumentsConfig(env=BANDIT, model=MODEL, batch=64, optim=OptimConfig(learning_rate=0.03)))
    _, metrics = run(program, 100, program.init(jax.random.key(0), hyper_of(program)))
    assert metrics["loss"][0] > 1.3
    np.testing.assert_allclose(np.mean(metrics["loss"][-30:]), np.log(3), atol=0.02)
