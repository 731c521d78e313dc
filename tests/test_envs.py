"""Every environment obeys the laws, and every law catches an environment that breaks it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.envs import ENVS, check_level, laws, make
from jaxpt.envs.protocol import DONE, POLICY

VARIANTS = {
    "chain affine": make("chain", p=7, max_level=4),
    "chain s5": make("chain", group="s5", max_level=3, generators=4),
    "chain forced": make("chain", p=5, max_level=3, force="think"),
    "chain slips": make("chain", p=5, max_level=2, hint=0.5, slip=0.5),
    "cards": make("cards", k=2),
    "cards drawn, again": make("cards", k=2, tries=2, pictures=True),
    "bandit": make("bandit", noise=0.5),
    "fileops": make("fileops", files=3),
    "tree": make("tree"),
    "tree observed": make("tree", vocab=4, observe=(1, 2)),
}
SEEDS = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_laws(variant):
    env = VARIANTS[variant]

    @given(SEEDS, st.integers(1, env.spec.max_level))
    def holds(seed, level):
        laws.check(env, jax.random.key(seed), level)

    holds()


def _impure(function):
    """Numpy's randomness inside a traced function: every trace bakes in another number."""
    rng = np.random.default_rng(0)
    return lambda *arguments: function(*arguments) + np.float32(rng.uniform())


def _batch_dependent(env):
    """A feed that behaves otherwise under vmap: custom batching rules are where such faults come from."""

    @jax.custom_batching.custom_vmap
    def place(x):
        return x

    @place.def_vmap
    def _(axis_size, in_batched, x):
        return jnp.where(x > 0, x[::-1], x), in_batched[0]

    def feed(task, state, token):
        new = env.feed(task, state, token)
        return new._replace(place=place(new.place))

    return env._replace(feed=feed)


def _mutants():
    bandit, tree = make("bandit"), make("tree", depth=2, observe=(1,))

    def outcome(**changes):
        def mutated(task, state):
            got = bandit.outcome(task, state)
            return got._replace(**{k: change(getattr(got, k)) for k, change in changes.items()})

        return bandit._replace(outcome=mutated)

    def listed(change):
        return tree._replace(enumerate=lambda task: change(*tree.enumerate(task)))

    yield "shapes", tree._replace(feed=lambda t, s, k: tree.feed(t, s, k)._replace(place=jnp.float32(0)))
    yield "shapes", tree._replace(signals=lambda t, s, k: jnp.zeros(2))
    yield "shapes", outcome(reward=lambda x: x.astype(jnp.bfloat16))
    wide = bandit._replace(spec=bandit.spec._replace(prompt_len=2))
    yield "prompt", bandit._replace(prompt=lambda t: (bandit.prompt(t)[0], jnp.int32(0)))
    yield "prompt", bandit._replace(prompt=lambda t: (bandit.prompt(t)[0] + 1, jnp.int32(1)))
    yield "prompt", wide._replace(prompt=lambda t: (jnp.array([5, 5]), jnp.int32(1)))
    yield "demonstrated", bandit._replace(oracle=lambda t, s, k, style: jnp.argmin(t).astype(jnp.int32) + 1)
    yield "demonstrated", outcome(truncated=lambda x: ~x)
    yield "absorbing", bandit._replace(feed=lambda t, s, k: s._replace(pulled=jnp.maximum(k, 0)))
    yield "absorbing", bandit._replace(pending=lambda t, s: jnp.int32(POLICY))
    yield "total", outcome(gold=lambda x: jnp.log(x))
    yield "total", bandit._replace(oracle=lambda t, s, k, style: jnp.int32(0))
    yield "total", bandit._replace(pending=lambda t, s: jnp.minimum(bandit.pending(t, s) + 1, 0))
    yield "truncated", outcome(truncated=lambda x: x & False)
    yield "alone", _batch_dependent(tree)
    yield "replay", bandit._replace(sample=_impure(bandit.sample))
    yield "labels", bandit._replace(step_labels=lambda t, r: jnp.zeros_like(r))
    yield "corpus", bandit._replace(corpus=lambda key: jax.random.randint(key, (2,), 1, 5))
    yield "corpus", bandit._replace(corpus=lambda key: jax.random.randint(key, (2,), 1, 7))
    yield "corpus", bandit._replace(corpus=lambda key: jax.random.randint(key, (2,), 0, 6))
    yield "listed", listed(lambda tokens, length: (tokens[1:], length[1:]))
    yield "listed", listed(lambda tokens, length: (tokens.at[1].set(tokens[2]), length))
    yield "listed", listed(lambda tokens, length: (tokens, length.at[0].set(2)))
    yield "listed", listed(lambda tokens, length: (jnp.where(tokens == 4, 2, tokens), length))


@pytest.mark.parametrize("law, env", [pytest.param(law, env, id=law) for law, env in _mutants()])
def test_a_broken_environment_is_caught(law, env):
    with pytest.raises(AssertionError):
        for seed in range(3):  # a mutant may be right by luck
            laws.LAWS[law].check(env, jax.random.key(seed), 1)


def test_the_message_names_environment_and_law():
    env = make("bandit")._replace(oracle=lambda task, state, key, style: jnp.int32(9))
    with pytest.raises(AssertionError, match=r"bandit, law 'demonstrated' \(.*the oracle's gold is"):
        laws.check(env, jax.random.key(0), 1)


@partial(jax.jit, static_argnums=0)
def _play(env, task, token):
    return laws.play(env, task, jax.random.key(1), lambda *_: token)


def test_masks_are_true_exactly_where_the_policy_chose():
    env = VARIANTS["tree observed"]
    task = env.sample(jax.random.key(0), 1)
    row = _play(env, task, 2)
    assert row.tokens.tolist() == [2, 5, 2, 5, 2]
    assert row.mask.tolist() == [True, False, True, False, True]
    assert row.length == 5 and env.pending(task, row.final) == DONE
    forced = VARIANTS["chain forced"]
    task = forced.sample(jax.random.key(0), 1)
    row = _play(forced, task, 1)
    assert row.tokens.tolist()[:3] == [3, 1, 0] and row.mask.tolist()[:3] == [False, True, False]


def test_every_environment_of_the_table_is_checked():
    assert set(ENVS) <= {env.name for env in VARIANTS.values()}


@pytest.mark.parametrize("build, message", [
    (lambda: make("chian"), "no environment is named 'chian'; .* is 'chain'"),
    (lambda: make("chain", group="s6"), "group is 's6'"),
    (lambda: make("chain", p=9), "p is 9"),
    (lambda: make("fileops", variant="hacked"), "variant is 'hacked', but must be one of hackable"),
    (lambda: make("fileops", files=2, max_level=3), "max_level is 3, but must be from 1 to files = 2"),
    (lambda: make("fileops", care=1.5), "care is 1.5, but must be a probability"),
    (lambda: make("chain", p=5, generators=20), "generators is 20, .* 2 to 19"),
    (lambda: make("chain", force="yes"), "force is 'yes'"),
    (lambda: make("chain", max_level=0), "max_level is 0"),
    (lambda: make("chain", corruption=1.5), "corruption is 1.5"),
    (lambda: make("chain", slip=-0.1), "slip is -0.1, but must be a probability"),
    (lambda: make("bandit", arms=1), "arms is 1"),
    (lambda: make("bandit", noise=-1.0), "noise is -1.0"),
    (lambda: make("tree", vocab=1), "vocab is 1"),
    (lambda: make("tree", observe=(3,)), r"observe is \(3,\)"),
    (lambda: make("tree", observe=(1, 1)), r"observe is \(1, 1\)"),
    (lambda: make("tree", vocab=9, depth=9), "places, but 1024 are allowed"),
    (lambda: check_level(make("bandit").spec, 2), "level is 2, but this environment has levels 1 to 1"),
    (lambda: laws.check(make("bandit"), jax.random.key(0), 0), "level is 0"),
])  # fmt: skip
def test_errors_say_what_was_expected(build, message):
    with pytest.raises(ValueError, match=message):
        build()
