"""The laws every environment obeys, and the little driver that checks them.

    check(env, jax.random.key(0), level=2)          all laws on one task
    LAWS["total"].check(env, key, level)            one of them

Each raises AssertionError with a sentence. The evidence for a task (demonstrations, random plays, random
token streams fed without asking) is one compiled program per environment, shared by all laws.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.envs import exact
from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, State, Task, check_level
from jaxpt.types import Array, Key

ROWS = 16  # plays and streams per task
BEYOND = 3  # tokens a stream goes on behind the budget
DOCUMENTS = 2048
ASTRAY = 0.2  # how often a random row leaves the oracle's advice; without any it would soon be lost

# One program per environment runs for milliseconds, so compiling it is all that costs.
_jit = partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


class Episode(NamedTuple):
    tokens: Array  # [T] the response, 0 behind `length`
    mask: Array  # [T] bool, True where `choose` chose
    signals: Array  # [T,R], 0 where mask is False
    length: Array  # []
    states: State  # [T, ...] before each token
    final: State


def play(env: Environment, task: Task, key: Key, choose: Callable[[Task, State, Key], Array]) -> Episode:
    """One episode of response_len tokens at most; `choose(task, state, key) -> token` is the policy."""
    noise, choices = jax.random.split(key)

    def turn(state: State, t: Array) -> tuple[State, tuple]:
        due = env.pending(task, state)
        mine, alive = due == POLICY, due != DONE
        token = jnp.where(mine, choose(task, state, jax.random.fold_in(choices, t)), due)
        token = jnp.where(alive, token, 0).astype(jnp.int32)
        events = jnp.where(mine, env.signals(task, state, token), 0.0)
        return env.feed(task, state, token), (token, mine, events, alive, state)

    start = env.init(task, noise)
    final, row = jax.lax.scan(turn, start, jnp.arange(env.spec.response_len))
    tokens, mask, events, alive, states = row
    return Episode(tokens, mask, events, alive.sum(), states, final)


class Probe(NamedTuple):
    """What an environment says of one state, and of one token there."""

    state: State
    token: Array
    pending: Array
    outcome: Outcome
    signals: Array
    advice: Array  # [styles]
    features: Array | None
    after: State


class Evidence(NamedTuple):
    """A row has response_len + BEYOND tokens. First come the demonstrations, one a style, then ROWS plays;
    these obey `pending` and feed 0 when the episode is over. The last ROWS streams never ask.
    """

    task: Task
    noise: Key  # the environment's noise, one for all rows
    labels: Array | None  # [T] step_labels of the first demonstration
    rows: Probe  # [styles + 2 ROWS, T, ...]
    alone: tuple  # the rows' pending, outcome, signals and after, asked one by one


def _walk(
    env: Environment, task: Task, noise: Key, keys: Key, dice: Array, style: Array, astray: Array,
    blind: Array,
) -> Probe:  # fmt: skip
    """The oracle's advice in one style, or with probability `astray` a random token; the environment's
    demands come first unless `blind`."""
    styles = jnp.arange(len(env.spec.styles))

    def turn(state: State, at: tuple[Key, Array]) -> tuple[State, Probe]:
        k, (strays, token) = at
        advice = jax.vmap(lambda s: env.oracle(task, state, k, s))(styles)
        token = jnp.where(strays < astray, (token * env.spec.vocab).astype(jnp.int32), advice[style])
        due = env.pending(task, state)
        demand = jnp.where(due == DONE, 0, jnp.where(due == POLICY, token, due))
        token = jnp.where(blind, token, demand)
        after = env.feed(task, state, token)
        features = env.features(task, state) if env.features else None
        events = env.signals(task, state, token)
        return after, Probe(state, token, due, env.outcome(task, state), events, advice, features, after)

    return jax.lax.scan(turn, env.init(task, noise), (keys, dice))[1]


def evidence(env: Environment, key: Key, level: int) -> Evidence:
    """What the laws look at, for the task that `key` and `level` draw; rows and alone as numpy arrays."""
    got = _evidence(env, key, level)
    return got._replace(rows=_host(got.rows), alone=_host(got.alone))


@_jit
def _evidence(env: Environment, key: Key, level: Array) -> Evidence:
    k_task, k_rows, noise = jax.random.split(key, 3)
    styles, length = len(env.spec.styles), env.spec.response_len
    row = jnp.arange(styles + 2 * ROWS)
    task = env.sample(k_task, level)
    # One draw is cut into keys and dice: every call of the generator costs a third of a second to compile.
    words = jax.random.key_data(key).size
    bits = jax.random.bits(k_rows, (row.size, length + BEYOND, words + 2))
    keys = jax.random.wrap_key_data(bits[..., :words], impl=jax.random.key_impl(key))
    dice = (bits[..., words:] >> 8).astype(jnp.float32) / 2**24
    astray = jnp.where(row < styles, 0.0, ASTRAY)
    rows = jax.vmap(partial(_walk, env, task, noise))(
        keys, dice, row % styles, astray, row >= styles + ROWS
    )

    def ask(at: tuple[State, Array]) -> tuple:
        state, token = at
        seen = env.pending(task, state), env.outcome(task, state), env.signals(task, state, token)
        return *seen, env.feed(task, state, token)

    alone = jax.lax.map(lambda row: jax.lax.map(ask, row), (rows.state, rows.token))
    labels = env.step_labels(task, rows.token[0, :length]) if env.step_labels else None
    return Evidence(task, noise, labels, rows, alone)


@_jit
def _documents(env: Environment, key: Key) -> Array:
    return jax.vmap(env.corpus)(jax.random.split(key, DOCUMENTS))


class Listing(NamedTuple):
    leaves: exact.Leaves
    pending: Array  # [N,T+1] before each token and behind the last
    plays: Array  # [4 ROWS, T] responses drawn from the tokens that the listed ones use
    uniform: Array  # [] sum of the listed responses' probabilities under the uniform policy


@_jit
def _listing(env: Environment, key: Key, level: Array) -> Listing:
    k_task, noise, k_dice = jax.random.split(key, 3)
    task = env.sample(k_task, level)
    leaves = exact.leaves(env, task, noise)
    start = env.init(task, noise)

    def replay(row: Array) -> Array:
        def read(state: State, token: Array) -> tuple[State, Array]:
            return env.feed(task, state, token), env.pending(task, state)

        final, asked = jax.lax.scan(read, start, row)
        return jnp.append(asked, env.pending(task, final))

    alphabet = jnp.zeros(env.spec.vocab, bool).at[leaves.tokens].max(leaves.mask)
    letters = jnp.argsort(~alphabet)  # the alphabet comes first

    def draw(dice: Array) -> Array:
        def turn(state: State, die: Array) -> tuple[State, Array]:
            due = env.pending(task, state)
            letter = letters[(die * alphabet.sum()).astype(jnp.int32)]
            token = jnp.where(due == DONE, 0, jnp.where(due == POLICY, letter, due))
            return env.feed(task, state, token), token

        return jax.lax.scan(turn, start, dice)[1]

    dice = jax.random.uniform(k_dice, (4 * ROWS, env.spec.response_len))
    table = jnp.zeros((leaves.tokens.size, env.spec.vocab))
    uniform = exact.leaf_prob(table, leaves).sum()
    return Listing(leaves, jax.vmap(replay)(leaves.tokens), jax.vmap(draw)(dice), uniform)


def _host(tree: Any) -> Any:
    def bring(x: Array) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(bring, tree)


def _same(a: Any, b: Any) -> bool:
    """Equal leaf by leaf: integers exactly, floats up to the reordering that batching may bring."""

    def equal(x: np.ndarray, y: np.ndarray) -> bool:
        close = partial(np.allclose, rtol=1e-5, atol=1e-6, equal_nan=True)
        return close(x, y) if np.issubdtype(x.dtype, np.floating) else np.array_equal(x, y)

    return all(jax.tree.leaves(jax.tree.map(equal, _host(a), _host(b))))


def _at(tree: Any, where: Array) -> Any:
    return jax.tree.map(lambda x: x[where], tree)


def _finite(tree: Any) -> bool:
    floats = [x for x in jax.tree.leaves(tree) if np.issubdtype(x.dtype, np.floating)]
    return all(np.isfinite(x).all() for x in floats)


def _shapes(env: Environment, key: Key, level: int) -> None:
    spec = env.spec
    key = jax.random.key(0)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)

    def expect(what: str, got: Any, shape: tuple, dtype: Any) -> None:
        assert (got.shape, got.dtype) == (shape, dtype), f"{what} is {got.dtype}{list(got.shape)}"

    assert spec.vocab == len(spec.token_names), "token_names must name every token"
    assert spec.styles, "the oracle needs a default style"
    task = jax.eval_shape(env.sample, key, scalar)
    tokens, n = jax.eval_shape(env.prompt, task)
    expect("prompt", tokens, (spec.prompt_len,), jnp.int32)
    expect("the prompt's length", n, (), jnp.int32)
    state = jax.eval_shape(env.init, task, key)
    after = jax.eval_shape(env.feed, task, state, scalar)
    assert jax.tree.structure(after) == jax.tree.structure(state), "feed changes the state's structure"
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        expect("a state's leaf after feed", y, x.shape, x.dtype)
    expect("pending", jax.eval_shape(env.pending, task, state), (), jnp.int32)
    expect("signals", jax.eval_shape(env.signals, task, state, scalar), (len(spec.signals),), jnp.float32)
    expect("oracle", jax.eval_shape(env.oracle, task, state, key, scalar), (), jnp.int32)
    outcome = jax.eval_shape(env.outcome, task, state)
    expect("reward", outcome.reward, (), jnp.float32)
    expect("gold", outcome.gold, (), jnp.float32)
    expect("parts", outcome.parts, (len(spec.parts),), jnp.float32)
    expect("truncated", outcome.truncated, (), jnp.bool_)
    response = jax.ShapeDtypeStruct((spec.response_len,), jnp.int32)
    if env.step_labels:
        expect("step_labels", jax.eval_shape(env.step_labels, task, response), response.shape, jnp.int32)
    if env.corpus:
        expect("corpus", jax.eval_shape(env.corpus, key), (spec.prompt_len + spec.response_len,), jnp.int32)
    if env.features:
        features = jax.eval_shape(env.features, task, state)
        expect("features", features, features.shape[:1], jnp.float32)


@_jit
def _prompted(env: Environment, key: Key, level: Array) -> tuple[Task, Array, Array]:
    task = env.sample(jax.random.split(key, 3)[0], level)
    return task, *env.prompt(task)


def _prompt(env: Environment, key: Key, level: int) -> None:
    _, tokens, n = _host(_prompted(env, key, level))
    assert 1 <= n <= env.spec.prompt_len, f"the prompt has {n} tokens, prompt_len is {env.spec.prompt_len}"
    assert ((tokens[:n] >= 1) & (tokens[:n] < env.spec.vocab)).all(), f"prompt {tokens[:n]} is out of range"
    assert (tokens[n:] == 0).all(), f"behind the prompt stands {tokens[n:]}, not padding"


def _demonstrated(env: Environment, key: Key, level: int) -> None:
    got, styles = evidence(env, key, level), len(env.spec.styles)
    end = _at(got.rows, (slice(styles + ROWS), -1))  # the streams never ask, so their gold is no one's
    assert end.pending[0] == DONE, "the oracle's episode is not over after response_len tokens"
    truncated = end.outcome.truncated[:styles]
    assert not truncated.any(), f"demonstrations of styles {np.flatnonzero(truncated)} are truncated"
    gold = end.outcome.gold
    if env.enumerate:
        listed = _gold(env, got.task, got.noise, env.enumerate(got.task)[0])
        gold = np.concatenate([gold, listed])
    assert gold[0] >= gold.max(), f"the oracle's gold is {gold[0]}, another response earns {gold.max()}"


@_jit
def _gold(env: Environment, task: Task, noise: Key, tokens: Array) -> Array:
    def judge(row: Array) -> Array:
        feed = partial(env.feed, task)
        final = jax.lax.scan(lambda state, token: (feed(state, token), None), env.init(task, noise), row)[0]
        return env.outcome(task, final).gold

    return jax.vmap(judge)(tokens)


def _absorbing(env: Environment, key: Key, level: int) -> None:
    rows = evidence(env, key, level).rows
    over = rows.pending == DONE
    assert _same(_at(rows.state, over), _at(rows.after, over)), "a token changed the state of an episode over"
    assert over[:, -BEYOND:].all(), "an episode goes on behind response_len tokens"


def _total(env: Environment, key: Key, level: int) -> None:
    rows = evidence(env, key, level).rows
    assert _finite(rows), "a state, outcome, signal or feature is not finite"
    asked, advice = rows.pending, rows.advice
    legal = (asked == POLICY) | (asked == DONE) | ((asked >= 1) & (asked < env.spec.vocab))
    assert legal.all(), f"pending asks for {np.unique(asked[~legal])}"
    legal = (advice >= 1) & (advice < env.spec.vocab)
    assert legal.all(), f"the oracle says {np.unique(advice[~legal])}"


def _truncated(env: Environment, key: Key, level: int) -> None:
    rows = evidence(env, key, level).rows
    running = rows.pending != DONE
    assert rows.outcome.truncated[running].all(), "a running episode does not count as truncated"


def _alone(env: Environment, key: Key, level: int) -> None:
    got = evidence(env, key, level)
    rows = got.rows.pending, got.rows.outcome, got.rows.signals, got.rows.after
    assert _same(rows, got.alone), "a state asked alone answers otherwise than in a batch"


def _replay(env: Environment, key: Key, level: int) -> None:
    got = evidence(env, key, level)
    assert _same(got, evidence(env, key, level)), "one key gave two different results"
    assert _same(got.task, _prompted(env, key, level)[0]), "one key gave two different tasks"


def _labels(env: Environment, key: Key, level: int) -> None:
    if env.step_labels is None:
        return
    labels = np.asarray(evidence(env, key, level).labels)
    assert np.isin(labels, (-1, 0, 1)).all(), f"labels are {np.unique(labels)}, not among -1, 0, 1"
    assert not (labels == 0).any(), f"a right demonstration has the labels {labels}"


def _corpus(env: Environment, key: Key, level: int) -> None:
    if env.corpus is None:
        return
    tokens = np.asarray(_documents(env, key))
    assert ((tokens >= 0) & (tokens < env.spec.vocab)).all(), "a document's token is out of range"
    missing = sorted(set(range(1, env.spec.vocab)) - set(np.unique(tokens).tolist()))
    assert not missing, f"the tokens {[env.spec.token_names[i] for i in missing]} never occur in the corpus"
    length = (tokens > 0).sum(1, keepdims=True)
    stands = np.arange(tokens.shape[1]) < length
    assert ((tokens > 0) == stands).all(), "padding stands inside a document"


def _listed(env: Environment, key: Key, level: int) -> None:
    if env.enumerate is None:
        return
    got = _host(_listing(env, key, level))
    tokens, length, asked = got.leaves.tokens, got.leaves.length, got.pending
    assert len(np.unique(tokens, axis=0)) == len(tokens), "a response is listed twice"
    stands = np.arange(tokens.shape[1]) < length[:, None]
    assert not tokens[~stands].any(), "tokens stand behind the length of a listed response"
    over = np.arange(tokens.shape[1] + 1) >= length[:, None]
    assert ((asked == DONE) == over).all(), "a listed response does not end exactly at its length"
    forced = stands & (asked[:, :-1] >= 0)
    assert (tokens == asked[:, :-1])[forced].all(), "a listed response contradicts a forced token"
    assert abs(got.uniform - 1) < 1e-5, f"the uniform policy gives the list probability {got.uniform}"
    known = {tuple(row) for row in tokens.tolist()}
    lost = [row for row in got.plays.tolist() if tuple(row) not in known]
    assert not lost, f"the response {lost[0]} is missing from the list"


class Law(NamedTuple):
    statement: str
    check: Callable[[Environment, Key, int], None]


LAWS: dict[str, Law] = {
    "shapes": Law("shapes and dtypes are the Spec's, and feed keeps the state's", _shapes),
    "prompt": Law("a prompt has 1..prompt_len tokens in range, then padding", _prompt),
    "demonstrated": Law("no style is cut short, and none has more gold than the first", _demonstrated),
    "absorbing": Law("an episode over stays as it is; response_len tokens end every one", _absorbing),
    "total": Law("any token in any state gives finite numbers, legal demands and legal advice", _total),
    "truncated": Law("an episode still running counts as truncated", _truncated),
    "alone": Law("the answers depend on state and token alone, not on the batch", _alone),
    "replay": Law("one key gives one result", _replay),
    "labels": Law("no step of a right demonstration is labelled wrong", _labels),
    "corpus": Law("all tokens but the padding occur in the corpus", _corpus),
    "listed": Law("enumerate lists every response once, with its length", _listed),
}


def check(env: Environment, key: Key, level: int) -> None:
    """All laws on the task drawn from `key` and `level`.

    Raises:
      ValueError: the environment has no such level.
      AssertionError: a law is broken; the message names it and says how.
    """
    check_level(env.spec, level)
    for name, law in LAWS.items():
        try:
            law.check(env, key, level)
        except AssertionError as error:
            raise AssertionError(f"{env.name}, law {name!r} ({law.statement}): {error}") from error
