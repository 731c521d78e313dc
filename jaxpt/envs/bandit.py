"""Bandit: one decision, the smallest episode there is. Its response is one token, an arm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, Spec
from jaxpt.types import Array, Key


class State(NamedTuple):
    pulled: Array  # [] int32, the token read; -1 before
    luck: Array  # [] float32, the standard normal draw of this episode


def bandit(arms: int = 4, noise: float = 0.0) -> Environment:
    """One decision among arms of known means.

    Arms are tokens 1..arms; token arms + 1 asks. A task gives the arms the means 0 .. 1, evenly spaced, in
    random order. gold is the mean of the arm pulled and reward is mean + noise * N(0, 1); any other token
    ends the episode with 0.

    Args:
      arms: number of arms, at least 2.
      noise: standard deviation of the reward; 0 makes it exact.

    Raises:
      ValueError: an argument is outside the range above.
    """
    if arms < 2:
        raise ValueError(f"arms is {arms}, but a bandit needs at least 2")
    if noise < 0:
        raise ValueError(f"noise is {noise}, but a standard deviation is at least 0")
    ask = arms + 1
    spec = Spec(
        vocab=arms + 2, prompt_len=1, response_len=1, signals=(), parts=("mean",), max_level=1,
        styles=("best",), token_names=("PAD", *(f"arm{i}" for i in range(1, arms + 1)), "ASK"),
    )  # fmt: skip

    def sample(key: Key, level: Array) -> Array:
        return jax.random.permutation(key, jnp.linspace(0.0, 1.0, arms, dtype=jnp.float32))

    def prompt(means: Array) -> tuple[Array, Array]:
        return jnp.array([ask], jnp.int32), jnp.int32(1)

    def init(means: Array, key: Key) -> State:
        return State(jnp.int32(-1), jax.random.normal(key, dtype=jnp.float32))

    def pending(means: Array, state: State) -> Array:
        return jnp.where(state.pulled >= 0, DONE, POLICY)

    def feed(means: Array, state: State, token: Array) -> State:
        return state._replace(pulled=jnp.where(state.pulled >= 0, state.pulled, jnp.maximum(token, 0)))

    def signals(means: Array, state: State, token: Array) -> Array:
        return jnp.zeros(0, jnp.float32)

    def outcome(means: Array, state: State) -> Outcome:
        valid = (state.pulled >= 1) & (state.pulled <= arms)
        gold = jnp.where(valid, means[jnp.clip(state.pulled, 1, arms) - 1], 0.0)
        reward = jnp.where(valid, gold + noise * state.luck, 0.0)
        return Outcome(reward, gold, gold[None], state.pulled < 0)

    def oracle(means: Array, state: State, key: Key, style: Array) -> Array:
        return jnp.argmax(means).astype(jnp.int32) + 1

    def corpus(key: Key) -> Array:
        return jnp.stack([jnp.int32(ask), jax.random.randint(key, (), 1, arms + 1)])

    def enumerate_(means: Array) -> tuple[Array, Array]:
        return jnp.arange(1, arms + 1, dtype=jnp.int32)[:, None], jnp.ones(arms, jnp.int32)

    return Environment(
        name="bandit", spec=spec, sample=sample, prompt=prompt, init=init, pending=pending, feed=feed,
        signals=signals, outcome=outcome, oracle=oracle, corpus=corpus, enumerate=enumerate_,
    )  # fmt: skip
