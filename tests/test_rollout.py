"""Rollouts: what is recorded is what happened."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxpt import envs, rollout
from jaxpt.envs.protocol import DONE, POLICY
from jaxpt.models import ModelConfig, make_model
from jaxpt.ops import dots
from jaxpt.ops.logprobs import token_stats
from jaxpt.ops.sampling import greedy, row_keys, sampler
from jaxpt.train.common import draw_tasks

P, G = 3, 2
ENVS = {
    "chain": envs.make("chain", p=5, max_level=3),
    "forced": envs.make("chain", p=5, max_level=3, force="think"),
    "tree": envs.make("tree", vocab=3, depth=3, observe=(1,)),
    "bandit": envs.make("bandit", arms=3, noise=1.0),
}


def model_of(env):
    return make_model(ModelConfig(vocab=env.spec.vocab, d_model=16, n_layers=1, n_heads=2))


def roll(env, choose, group=G):
    model = model_of(env)

    @jax.jit
    def run(params, seed, rows):
        key = jax.random.key(seed)
        tasks = draw_tasks(env, (1, env.spec.max_level), row_keys(jax.random.fold_in(key, 0), rows))
        keys = row_keys(jax.random.fold_in(key, 1), (rows[:, None] * group + jnp.arange(group)[None]).reshape(-1))
        traj = rollout.generate(model, params, env, tasks, keys, choose, group)
        return tasks, keys, traj

    # Embeddings five times larger, so that the distributions are far from uniform.
    params = model.init(jax.random.key(0))
    return run, {**params, "embed": 5 * params["embed"]}, model


RUNS = {name: roll(env, sampler(0.7)) for name, env in ENVS.items()}
LIMITED = roll(ENVS["chain"], sampler(1.3, top_k=4))


def replay(env, task, key, tokens, n, length):
    """One row fed token by token to the environment, outside jit: what it decided, signalled and paid."""
    luck = jax.random.split(key)[0]
    state, decided, signals = env.init(task, luck), [], []
    for t in range(n, length):
        decided.append(int(env.pending(task, state)))
        free = decided[-1] == POLICY
        signals.append(np.asarray(env.signals(task, state, tokens[t])) if free else np.zeros(len(env.spec.signals)))
        state = env.feed(task, state, tokens[t])
    return decided, signals, int(env.pending(task, state)), env.outcome(task, state)


@pytest.mark.parametrize("name", ENVS)
@settings(max_examples=3)
@given(seed=st.integers(0, 1000))
def test_a_replay_gives_the_same_episode(name, seed):
    env = ENVS[name]
    run, params, _ = RUNS[name]
    tasks, keys, traj = run(params, seed, jnp.arange(P))
    np.testing.assert_array_equal(traj.group, np.repeat(np.arange(P), G))
    for row in range(P * G):
        task = jax.tree.map(lambda x: x[row // G], tasks)
        prompt, n = (np.asarray(x) for x in env.prompt(task))
        tokens, length = np.asarray(traj.tokens[row]), int(traj.length[row])
        np.testing.assert_array_equal(tokens[:n], prompt[:n])
        decided, signals, end, outcome = replay(env, task, keys[row], tokens, int(n), length)
        assert end == DONE and DONE not in decided
        np.testing.assert_array_equal(np.asarray(traj.mask[row, n:length]), np.array(decided) == POLICY)
        for t, forced in enumerate(decided):
            assert forced in (POLICY, tokens[n + t])
        np.testing.assert_array_equal(traj.signals[row, n:length], np.array(signals).reshape(length - n, -1))
        for name in ("reward", "gold", "parts", "truncated"):
            np.testing.assert_allclose(getattr(traj, name)[row], getattr(outcome, name), rtol=1e-6, err_msg=name)
        assert not np.asarray(traj.mask[row, :n]).any() and not np.asarray(traj.mask[row, length:]).any()
        assert (tokens[length:] == 0).all()


@pytest.mark.parametrize("name", ENVS)
def test_the_sampler_s_logp_is_the_model_s(name):
    run, params, model = RUNS[name]
    _, _, traj = run(params, 1, jnp.arange(P))
    hidden, _ = model.forward(params, traj.tokens)
    logp = token_stats(hidden, model.unembed(params), traj.tokens, temperature=0.7)["logp"]
    np.testing.assert_allclose(jnp.where(traj.mask, logp, 0), traj.old_logp, atol=2e-5)
    assert traj.support is None


def test_the_stored_support_makes_the_ratio_one():
    run, params, model = LIMITED
    _, _, traj = run(params, 2, jnp.arange(P))
    hidden, _ = model.forward(params, traj.tokens)
    logp = token_stats(hidden, model.unembed(params), traj.tokens, temperature=1.3, support=traj.support)["logp"]
    np.testing.assert_allclose(np.asarray(logp)[traj.mask], np.asarray(traj.old_logp)[traj.mask], atol=2e-5)
    kept = jnp.unpackbits(traj.support, axis=-1, count=ENVS["chain"].spec.vocab)
    np.testing.assert_array_equal(np.asarray(kept.sum(-1))[np.asarray(traj.mask)], 4)


def test_rows_do_not_depend_on_the_batch():
    run, params, _ = RUNS["chain"]
    _, _, whole = run(params, 3, jnp.arange(P))
    _, _, other = run(params, 3, jnp.asarray([1, 7, 2]))
    for a, b in ((1, 0), (2, 2)):
        np.testing.assert_array_equal(whole.tokens[a * G : a * G + G], other.tokens[b * G : b * G + G])


def test_looking_for_the_end_more_often_changes_nothing(monkeypatch):
    run, params, _ = RUNS["chain"]
    _, _, eight = run(params, 4, jnp.arange(P))
    monkeypatch.setitem(rollout.generate.__globals__, "STRIDE", 3)
    run, params, _ = roll(ENVS["chain"], sampler(0.7))
    _, _, three = run(params, 4, jnp.arange(P))
    for name in ("tokens", "mask", "reward", "length", "turn"):
        np.testing.assert_array_equal(getattr(eight, name), getattr(three, name))


def test_few_rows_against_transposed_matrices_draw_the_same(monkeypatch):
    monkeypatch.setitem(rollout.generate.__globals__, "LONG", 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    run, params, _ = RUNS["chain"]
    _, _, plain = run(params, 6, jnp.arange(P))
    monkeypatch.setattr(dots, "LARGE", 1)
    run, _, _ = roll(ENVS["chain"], sampler(0.7))
    assert "optimization_barrier" in str(jax.make_jaxpr(run)(params, 6, jnp.arange(P)))  # they are in use
    _, _, transposed = run(params, 6, jnp.arange(P))
    np.testing.assert_array_equal(plain.tokens, transposed.tokens)
    np.testing.assert_allclose(plain.old_logp, transposed.old_logp, atol=1e-5)


def test_greedy_follows_the_most_probable_tokens():
    env = ENVS["chain"]
    run, params, model = roll(env, greedy, group=1)
    _, _, traj = run(params, 5, jnp.arange(P))
    hidden, _ = model.forward(params, traj.tokens)
    best = jnp.argmax(hidden @ model.unembed(params), axis=-1)
    np.testing.assert_array_equal(np.asarray(best[:, :-1])[np.asarray(traj.mask[:, 1:])], np.asarray(traj.tokens[:, 1:])[traj.mask[:, 1:]])


def test_demonstrations_are_rollouts_of_the_oracle():
    env = ENVS["forced"]
    tasks = draw_tasks(env, (1, 3), row_keys(jax.random.key(0), jnp.arange(16)))
    traj = jax.jit(lambda tasks, keys: rollout.demonstrate(env, tasks, keys))(tasks, row_keys(jax.random.key(1), jnp.arange(16)))
    np.testing.assert_array_equal(traj.reward, 1)
    first = np.asarray(jax.vmap(env.prompt)(tasks)[1])
    assert not np.asarray(traj.mask)[np.arange(16), first].any()  # TH was forced
    np.testing.assert_array_equal(np.asarray(traj.mask).sum(1), np.asarray(traj.length) - first - 1)
    np.testing.assert_array_equal(traj.turn, 0)


def test_turns_count_what_stands_between_forced_tokens():
    env = ENVS["tree"]
    run, params, _ = RUNS["tree"]
    _, _, traj = run(params, 6, jnp.arange(P))
    tokens, mask, turn = (np.asarray(x) for x in (traj.tokens, traj.mask, traj.turn))
    see = env.spec.vocab - 1
    for row in range(P * G):
        seen = np.cumsum(tokens[row] == see)
        np.testing.assert_array_equal(turn[row][mask[row]], seen[mask[row]])
