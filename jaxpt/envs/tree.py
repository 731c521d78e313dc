"""Tree: every response is a path to a leaf with a reward of its own; all of them can be listed.

Token 1 stops; tokens 2..vocab go down. A response ends at a stop or after `depth` decisions, so lengths
vary. With b = vocab - 1 branches, places are numbered like a heap: the children of place i are
b i + 1 .. b i + b. Stopping at place i, or running out of decisions there, earns the i-th reward, and the
i-th response of `enumerate` is the one that ends there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, Spec
from jaxpt.types import Array, Key

STOP = 1
RUNNING, ENDED, INVALID = range(3)
MOST = 1024  # places a tree may have


class Task(NamedTuple):
    reward: Array  # [places] uniform in [0, 1)
    best: Array  # [places] the greatest reward at a place or below it


class State(NamedTuple):
    place: Array  # [] int32
    decisions: Array  # [] int32
    waiting: Array  # [] int32, 1 while the observation is due
    end: Array  # [] int32, RUNNING, ENDED or INVALID


def _responses(vocab: int, depth: int, observe: tuple[int, ...]) -> list[list[int]]:
    def see(decisions: int) -> list[int]:
        return [vocab + 1] if decisions in observe else []

    rows, layer = [], [[]]  # breadth first: the heap's order
    for decisions in range(depth):
        rows += [path + [STOP] for path in layer]
        layer = [path + [s] + see(decisions + 1) for path in layer for s in range(2, vocab + 1)]
    return rows + layer


def tree(vocab: int = 3, depth: int = 3, observe: tuple[int, ...] = ()) -> Environment:
    """A tree of decisions with a reward at every leaf; all responses can be listed.

    A token outside 1..vocab ends the episode with reward 0.

    Args:
      vocab: decisions at each place, the stop among them; at least 2.
      depth: decisions at most.
      observe: after these numbers of decisions (1..depth-1) the environment writes the token vocab + 1.

    Raises:
      ValueError: an argument is outside the range above, or the tree has more than 1024 places.
    """
    if vocab < 2 or depth < 1:
        raise ValueError(f"vocab is {vocab} and depth is {depth}, but they must be at least 2 and 1")
    if not all(1 <= k < depth for k in observe) or len(set(observe)) < len(observe):
        raise ValueError(f"observe is {observe}, but must hold distinct numbers from 1 to {depth - 1}")
    branches = vocab - 1
    widths = [branches**k for k in range(depth + 1)]
    places = sum(widths)
    if places > MOST:
        raise ValueError(f"vocab {vocab} and depth {depth} make {places} places, but {MOST} are allowed")
    rows = _responses(vocab, depth, observe)
    length = np.array([len(row) for row in rows], np.int32)
    response_len = depth + len(observe)
    tokens = np.array([row + [0] * (response_len - len(row)) for row in rows], np.int32)
    sees = ("SEE",) if observe else ()
    spec = Spec(
        vocab=vocab + 1 + len(sees), prompt_len=1, response_len=response_len, signals=("stop",),
        parts=("leaf",), max_level=1, styles=("best",),
        token_names=("PAD", "STOP", *(f"s{i}" for i in range(1, vocab)), *sees),
    )  # fmt: skip

    def sample(key: Key, level: Array) -> Task:
        reward = jax.random.uniform(key, (places,), jnp.float32)
        layers = jnp.split(reward, np.cumsum(widths)[:-1])
        best = [layers[-1]]
        for layer in reversed(layers[:-1]):
            best.append(jnp.maximum(layer, best[-1].reshape(-1, branches).max(1)))
        return Task(reward, jnp.concatenate(best[::-1]))

    def prompt(task: Task) -> tuple[Array, Array]:
        return jnp.array([STOP], jnp.int32), jnp.int32(1)  # one token for begin and end, as GPT-2 has

    def init(task: Task, key: Key) -> State:
        zero = jnp.int32(0)
        return State(zero, zero, zero, jnp.int32(RUNNING))

    def pending(task: Task, state: State) -> Array:
        due = jnp.where(state.waiting == 1, vocab + 1, POLICY)
        return jnp.where(state.end == RUNNING, due, DONE)

    def feed(task: Task, state: State, token: Array) -> State:
        down = (token > STOP) & (token <= vocab)
        decisions = state.decisions + 1
        last = (token == STOP) | (decisions == depth)
        end = jnp.where(down | (token == STOP), jnp.where(last, ENDED, RUNNING), INVALID)
        due = jnp.isin(decisions, np.array(observe, np.int32)) & (end == RUNNING)
        place = jnp.where(down, branches * state.place + token - STOP, state.place)
        decided = State(place, decisions, due.astype(jnp.int32), end)
        seen = state._replace(waiting=jnp.int32(0))
        running, waits = state.end == RUNNING, state.waiting == 1
        return jax.tree.map(
            lambda old, a, b: jnp.where(running, jnp.where(waits, a, b), old), state, seen, decided
        )

    def signals(task: Task, state: State, token: Array) -> Array:
        stops = (token == STOP) & (pending(task, state) == POLICY)
        return stops[None].astype(jnp.float32)

    def outcome(task: Task, state: State) -> Outcome:
        reward = jnp.where(state.end == ENDED, task.reward[state.place], 0.0)
        return Outcome(reward, reward, reward[None], state.end == RUNNING)

    def oracle(task: Task, state: State, key: Key, style: Array) -> Array:
        below = task.best[jnp.minimum(branches * state.place + 1 + jnp.arange(branches), places - 1)]
        stay = task.reward[state.place] >= below.max()
        return jnp.where(stay, STOP, STOP + 1 + jnp.argmax(below).astype(jnp.int32))

    def corpus(key: Key) -> Array:
        return jax.random.randint(key, (1 + response_len,), 1, spec.vocab)

    def enumerate_(task: Task) -> tuple[Array, Array]:
        return jnp.asarray(tokens), jnp.asarray(length)

    return Environment(
        name="tree", spec=spec, sample=sample, prompt=prompt, init=init, pending=pending, feed=feed,
        signals=signals, outcome=outcome, oracle=oracle, corpus=corpus, enumerate=enumerate_,
    )  # fmt: skip
