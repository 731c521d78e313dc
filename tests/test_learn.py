"""From a batch to updates: shares, minibatches, passes, the critic, dynamic sampling, the controller; for every row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpt.models import ModelConfig, make_model
from jaxpt.objectives import ROWS, get
from jaxpt.objectives.policy import ROWS as POLICY_ROWS
from jaxpt.train import learn
from jaxpt.train.collect import collect, episode_metrics
from jaxpt.train.common import EnvConfig, EvalConfig, shares
from jaxpt.train.critic import CriticConfig, critic_values, init_critic
from jaxpt.train.optim import OptimConfig
from jaxpt.train.parallel import DATA, ONE, make_mesh, named
from jaxpt.train.policy import COMPUTED, PolicyConfig, make_policy
from jaxpt.train.rows import arm, constants, leaves, own
from jaxpt.types import bare_trajectory

NAMES = tuple(row.name for row in POLICY_ROWS)
BANDIT = EnvConfig("bandit", {"arms": 3})
MODEL = ModelConfig(vocab=5, d_model=8, n_layers=1, n_heads=1)
P, G, T = 4, 4, 6


def config(**fields):
    defaults = {
        "env": BANDIT, "model": MODEL, "prompts": P, "group": G, "objectives": NAMES, "eval": EvalConfig(1, 4),
        "optim": OptimConfig(0.01, eps=1e-3), "critic": CriticConfig(optim=OptimConfig(0.01, eps=1e-3)),
    }
    return PolicyConfig(**{**defaults, **fields})


def batch(seed=0, prompts=P):
    """Off-policy episodes of uneven lengths, one row empty, one group without signal, some rows truncated."""
    rng = np.random.default_rng(seed)
    B = prompts * G
    length = rng.integers(2, T + 1, B)
    mask = (np.arange(T)[None] > 0) & (np.arange(T)[None] < length[:, None])
    mask[3] = False
    reward = rng.integers(0, 2, B).astype(np.float32)
    reward[4:8] = 1.0
    traj = bare_trajectory(
        jnp.asarray(rng.integers(1, 5, (B, T))), jnp.asarray(mask), reward=jnp.asarray(reward),
        old_logp=jnp.asarray(np.where(mask, rng.normal(-1.5, 0.3, (B, T)), 0), jnp.float32),
        group=jnp.arange(B) // G, length=jnp.asarray(length),
    )._replace(truncated=jnp.asarray(rng.random(B) < 0.3))
    stats = {"ref_logp": jnp.asarray(rng.normal(-1.5, 0.3, (B, T)), jnp.float32),
             "values": jnp.asarray(rng.random((B, T)), jnp.float32)}
    return traj, stats


@pytest.fixture(scope="module")
def update():
    """update(row, **config) -> (state, loss, norm, metrics) of one call of `learn` on the batch, compiled per config."""
    compiled = {}

    def run(name, **fields):
        cfg = config(**fields)
        program = make_policy(cfg)
        state = program.init(jax.random.key(0), {k: jnp.float32(v) for k, v in {**program.hyper, **cfg.arm(name)}.items()})
        traj, stats = batch()
        ready = get(name).prepare(traj, **stats)
        rows = [get(row) for row in cfg.objectives]
        call = lambda *args: learn.learn(cfg, make_model(cfg.model), rows, ONE, *args)  # noqa: E731
        return compiled.setdefault(repr(fields), jax.jit(call))(state, traj, ready, stats, traj.old_logp)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_shares_of_any_size_give_the_same_update(update, name):
    """Shares of 5 rows leave one row over: every row's loss, gradient and metrics add up, uneven parts included."""
    whole, loss, norm, metrics = update(name)
    for micro in (5,):
        state, loss_m, norm_m, metrics_m = update(name, micro=micro)
        np.testing.assert_allclose([loss_m, norm_m], [loss, norm], rtol=2e-5, atol=1e-7)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), metrics_m, metrics)
        for tree in ("params", "critic"):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), state[tree], whole[tree])
    assert norm > 0


def trainable(row):
    return row.family == "policy_loss" and row.additive and not row.alias_of and set(row.needs) <= set(COMPUTED)


OF_EVERY_KIND = ("ppo", "dapo_prompt_mean", "grpo_sequence_tis")  # a critic, whole prompts, another sampler
TRAINABLE = [name for name, row in ROWS.items() if trainable(row)]
WAYS = {"4 x 16": 16, "63 + 1": 63, "8 devices": 0}  # of making the same update from 64 rows: rows to a share


@pytest.fixture(scope="module")
def update_of_64():
    """update(names, name, way) -> what `learn` makes of 64 rows, by the program of `names`; compiled once a way."""
    compiled = {}
    traj, stats = batch(prompts=16)
    noise = np.random.default_rng(1).normal(0, 0.2, traj.old_logp.shape)
    given = {**stats, "sampler_logp": traj.old_logp + jnp.asarray(noise, jnp.float32)}

    def run(names, name, way):
        cfg = config(prompts=16, objectives=names, micro=WAYS.get(way, 0))
        program, rows, devices = make_policy(cfg), [get(row) for row in names], way == "8 devices"

        def call(*args):
            return learn.learn(cfg, make_model(cfg.model), rows, named(8) if devices else ONE, *args)

        if devices:
            of_rows = PartitionSpec(DATA)
            specs = PartitionSpec(), of_rows, of_rows, of_rows, of_rows
            call = jax.shard_map(call, mesh=make_mesh(8), in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        state = program.init(jax.random.key(0), {k: jnp.float32(v) for k, v in {**program.hyper, **cfg.arm(name)}.items()})
        ready = jax.device_get(get(name).prepare(traj, **given, **own(get(name), state["hyper"])))
        del ready["totals"]  # learn counts those of its minibatch itself
        return compiled.setdefault((names, way), jax.jit(call))(state, traj, ready, given, given["sampler_logp"])

    return run


def same(update, names, name, ways=tuple(WAYS)):
    """Whether these ways make the update of one share: loss, norm, metrics, policy and critic."""
    whole, *numbers = update(names, name, "1 x 64")
    assert numbers[1] > 0  # the gradient's norm
    close = lambda a, b, **tol: all(jax.tree.leaves(jax.tree.map(lambda x, y: np.allclose(x, y, **tol), a, b)))  # noqa: E731
    out = {}
    for way in ways:
        state, *others = update(names, name, way)
        trees = ({k: s[k] for k in ("params", "critic") if k in s} for s in (state, whole))
        out[way] = close(others, numbers, rtol=1e-4, atol=1e-6) and close(*trees, rtol=0, atol=2e-6)
    return out


@pytest.mark.parametrize("name", OF_EVERY_KIND)
def test_64_rows_make_one_update_however_they_are_shared(update_of_64, name):
    assert same(update_of_64, OF_EVERY_KIND, name, ("63 + 1", "8 devices")) == {"63 + 1": True, "8 devices": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINABLE)
def test_64_rows_of_any_row_make_one_update(update_of_64, name):
    at = TRAINABLE.index(name) // 12 * 12
    assert same(update_of_64, tuple(TRAINABLE[at : at + 12]), name) == dict.fromkeys(WAYS, True)


def test_shares_are_padded_with_masked_rows():
    parts = shares({"mask": jnp.ones((7, 2), bool), "x": jnp.ones((7, 2))}, 3)
    assert parts["mask"].shape == (3, 3, 2)
    np.testing.assert_array_equal(parts["mask"].sum((1, 2)), [6, 6, 2])


def test_minibatches_are_whole_groups_and_every_row_comes_once():
    rows = jnp.arange(P * G)
    parts = learn._minibatches({"row": rows}, G, 2)["row"]
    assert sorted(np.asarray(parts).reshape(-1).tolist()) == list(range(P * G))
    groups = np.asarray(parts).reshape(2, -1, G) // G
    assert (groups == groups[:, :, :1]).all() and groups[:, :, 0].tolist() == [[0, 2], [1, 3]]


def test_two_passes_of_two_minibatches_are_four_updates(update):
    """The optimizer counts them, and the ratio has left 1 by the end; a row alone and among others does the same."""
    state, *_ = update("grpo_no_kl", minibatches=2, epochs=2)
    counts = [x for x in jax.tree.leaves(state["opt"]) if x.dtype == jnp.int32]
    assert counts and all(int(x) == 4 for x in counts)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_row_among_others_is_the_row_alone(update, name):
    among, loss, norm, metrics = update(name)
    alone, loss_1, norm_1, metrics_1 = update(name, objectives=(name,))
    np.testing.assert_allclose([loss, norm], [loss_1, norm_1], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), alone["params"], among["params"])
    assert ("critic" in alone) == (name == "ppo")


def test_rows_without_a_critic_leave_it_alone(update):
    state, *_ = update("grpo")
    fresh = make_policy(config()).init(jax.random.key(0), {k: jnp.float32(v) for k, v in make_policy(config()).hyper.items()})
    jax.tree.map(np.testing.assert_array_equal, state["critic"], fresh["critic"])
    moved, *_ = update("ppo")
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(moved["critic"]), jax.tree.leaves(fresh["critic"])))


def test_a_shared_trunk_feels_the_critic_and_an_own_one_does_not(update):
    """From the second update on: the head begins at 0, and through it nothing reaches the trunk."""
    own, *_ = update("ppo", minibatches=2, epochs=2)
    critic = CriticConfig(trunk="shared", optim=OptimConfig(0.01, eps=1e-3))
    shared, *_ = update("ppo", minibatches=2, epochs=2, critic=critic)
    assert set(shared["critic"]) == {"head"} and set(own["critic"]) == {"head", "trunk"}
    pairs = zip(jax.tree.leaves(own["params"]), jax.tree.leaves(shared["params"]), strict=True)
    assert any((a != b).any() for a, b in pairs)


def test_critic_values_stand_before_their_token():
    """values[t] changes with tokens before t alone; the final value sees the whole row, and its padding never."""
    cfg, model = CriticConfig(), make_model(MODEL)
    critic = init_critic(cfg, MODEL, model.init(jax.random.key(1)), jax.random.key(2))
    critic["head"] = {"w": jnp.arange(8.0), "b": jnp.float32(0.5)}
    tokens, length = jnp.asarray([[1, 2, 3, 4, 0, 0]]), jnp.asarray([4])
    values, final = critic_values(cfg, model, critic, None, tokens, length)
    assert values.shape == tokens.shape and values[0, 0] == 0
    for at in range(6):
        changed, final_changed = critic_values(cfg, model, critic, None, tokens.at[0, at].set((int(tokens[0, at]) + 1) % 5), length)
        differs = np.asarray(changed != values)[0]
        assert not differs[: at + 1].any() and (differs[at + 1 :].all())
        assert bool(final_changed[0] != final[0]) == (at < 4)


def test_a_fresh_critic_says_nothing():
    for cfg in (CriticConfig(), CriticConfig(model=ModelConfig(vocab=5, d_model=4, n_layers=1, n_heads=1))):
        critic = init_critic(cfg, MODEL, make_model(MODEL).init(jax.random.key(1)), jax.random.key(2))
        values, final = critic_values(cfg, make_model(MODEL), critic, None, jnp.ones((2, 3), jnp.int32), jnp.asarray([2, 3]))
        np.testing.assert_array_equal(values, 0)
        np.testing.assert_array_equal(final, 0)


def scripted(rewards):
    """draw(key) for `collect`: round r gives the rewards [P,G] of rewards[r]; the round stands in every token."""
    table = jnp.asarray(rewards, jnp.float32)
    rounds = jnp.stack([jax.random.key_data(jax.random.fold_in(jax.random.key(0), r)) for r in range(len(rewards))])

    def draw(key):
        at = jnp.argmax(jnp.all(rounds == jax.random.key_data(key)[None], axis=1))
        size = table.shape[1] * table.shape[2]
        mask = jnp.broadcast_to((jnp.arange(3) > 0)[None], (size, 3))
        tokens = jnp.broadcast_to(at, (size, 3)).astype(jnp.int32)
        return bare_trajectory(tokens, mask, reward=table[at].reshape(-1), group=jnp.arange(size) // table.shape[2])

    return draw


SCRIPT = [
    [[0, 0], [0, 1], [1, 1], [1, 1]],  # one group of four has signal
    [[1, 0], [0, 0], [0, 1], [1, 1]],  # two more
    [[1, 0], [0, 1], [0, 1], [0, 1]],
]


@pytest.mark.parametrize("rounds, origin, drawn", [
    (1, [[0, 0], [0, 1], [0, 2], [0, 3]], 1), (2, [[0, 1], [1, 0], [1, 2], None], 2), (3, [[0, 1], [1, 0], [1, 2], [2, 0]], 3),
    (9, [[0, 1], [1, 0], [1, 2], [2, 0]], 3),
])
def test_dynamic_sampling_fills_places_in_order(rounds, origin, drawn):
    traj, metrics = collect(scripted(SCRIPT), jax.random.key(0), 2, jnp.float32(rounds), lambda x: x)
    for place, source in enumerate(origin):
        rows = slice(2 * place, 2 * place + 2)
        if source is None:
            assert not traj.mask[rows].any()
            continue
        at, group = source
        np.testing.assert_array_equal(traj.reward[rows], SCRIPT[at][group])
        assert (traj.tokens[rows] == at).all() and traj.mask[rows].any()
    np.testing.assert_array_equal(traj.group, np.arange(8) // 2)
    assert metrics["rounds"] == (drawn, 1)
    assert metrics["generated"][0] == 2 * 8 * drawn  # every token that was generated counts, kept or not
    kept = [np.ptp(g) > 0 for r in SCRIPT[:drawn] for g in r]
    np.testing.assert_allclose(metrics["no_signal"][0] / metrics["no_signal"][1], 1 - np.mean(kept))


def test_without_selection_a_batch_is_one_draw():
    draw = scripted(SCRIPT)
    key = jax.random.fold_in(jax.random.key(0), 1)
    traj, metrics = collect(draw, key, 2, None, lambda x: x)
    jax.tree.map(np.testing.assert_array_equal, traj, draw(key))
    jax.tree.map(np.testing.assert_array_equal, metrics, episode_metrics(draw(key)))


def test_episode_metrics_by_hand():
    mask = jnp.asarray([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 0]], bool)
    traj = bare_trajectory(jnp.zeros((4, 3), jnp.int32), mask, reward=jnp.asarray([1.0, 0, 0, 0]), group=jnp.asarray([0, 0, 1, 1]))
    found = {name: float(s / w) for name, (s, w) in episode_metrics(traj).items()}
    assert found == {"reward": 0.25, "gold": 0.25, "length": 1.25, "truncated": 0, "no_signal": 0.5, "wrong_length": 1,
                     "generated": 1.25}


def steps(cfg, name, count, **hyper):
    program = make_policy(cfg)
    numbers = {k: jnp.float32(v) for k, v in {**program.hyper, **cfg.arm(name), **hyper}.items()}
    return jax.jit(lambda: jax.lax.scan(
        lambda s, _: program.step(s), program.init(jax.random.key(0), numbers), None, length=count))()


@pytest.fixture(scope="module")
def ppo_run():
    return steps(config(objectives=("ppo",), epochs=2), "ppo", 12, learning_rate=0.03, beta=0.5, kl_target=0.01, kl_horizon=64.0)


def test_the_controller_s_beta_is_its_formula(ppo_run):
    """beta grows by at most 0.2 rows / horizon a batch, and follows the sign of KL - target."""
    _, metrics = ppo_run
    beta = np.asarray(metrics["beta"])
    factor = beta[1:] / beta[:-1]
    step = 0.2 * P * G / 64.0
    assert (factor <= 1 + step + 1e-6).all() and (factor >= 1 - step - 1e-6).all()
    np.testing.assert_allclose(beta[0], 0.5 * (1 - step), rtol=1e-6)  # the first batch is the reference's: KL 0 is below
    assert beta[-1] > beta[0]


def test_the_ratio_moves_within_a_batch(ppo_run):
    _, metrics = ppo_run
    assert abs(float(metrics["ratio"][0]) - 1) < 0.2 and np.abs(np.asarray(metrics["ratio"]) - 1).max() > 1e-4


def test_process_rewards_stand_at_their_tokens():
    """A signal with a price: a fresh policy repeats its prompt, which stops the tree; at 5 a stop it learns not to."""
    env = EnvConfig("tree", {"vocab": 3, "depth": 2})
    cfg = config(env=env, objectives=("rloo",), signal_rewards={"stop": -5.0})
    _, metrics = steps(cfg, "rloo", 40, learning_rate=0.1)
    assert metrics["length"][0] < 1.2 and metrics["length"][-1] > 1.8


def test_constants_in_tokens_are_the_environment_s_budget():
    spec = BANDIT.make().spec._replace(response_len=100)
    assert constants(get("dapo"), spec)["max_length"] == 100 and constants(get("dapo"), spec)["buffer"] == 20
    assert constants(get("dr_grpo"), spec)["max_length"] == 100
    both = leaves(("grpo", "dapo"), spec)
    assert both["eps_high"] == get("grpo").hyper["eps_high"] and both["row"] == 0
    chosen = arm(("grpo", "dapo"), "dapo", spec)
    assert chosen["row"] == 1 and chosen["eps_high"] == get("dapo").hyper["eps_high"]
    with pytest.raises(ValueError, match="expected one of the program's rows, grpo"):
        arm(("grpo",), "dapo", spec)


@pytest.mark.parametrize("fields, message", [
    ({"minibatches": 3}, "expected a divisor of prompts = 4"), ({"objectives": ()}, "at least one row"),
    ({"epochs": 0}, "epochs: got 0"), ({"signal_rewards": {"stpo": 1.0}}, "'stpo' is no signal of 'bandit'"),
])
def test_bad_configs_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_a_shared_trunk_has_no_model_of_its_own():
    with pytest.raises(ValueError, match="expected one of own, shared"):
        CriticConfig(trunk="both")
    with pytest.raises(ValueError, match="a shared trunk is the policy's"):
        CriticConfig(trunk="shared", model=MODEL)
