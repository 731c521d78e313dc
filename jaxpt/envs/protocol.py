"""What an environment is: a token automaton, written as functions of one task (the caller vmaps).

A rollout asks `pending` before every token: POLICY lets the policy choose (mask 1), a token id forces
that token (mask 0), DONE ends the row. Prompts, tool results and user turns are all forced tokens, so
the loss mask is right by construction. `jaxpt.envs.laws` states what every environment must obey.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpt.types import Array

POLICY = -1  # pending: the policy chooses the next token
DONE = -2  # pending: the episode is over

Task = Any  # a pytree of arrays with static shapes
State = Any  # a pytree of arrays; the environment's noise (a key) lives in it


class Spec(NamedTuple):
    """Static shapes. A row has prompt_len + response_len tokens at most."""

    vocab: int  # V; token 0 is the padding and never means anything
    prompt_len: int
    response_len: int
    signals: tuple[str, ...]  # names of the R verifiable events
    parts: tuple[str, ...]  # names of the Q parts of the reward
    max_level: int  # levels are 1..max_level
    styles: tuple[str, ...]  # what `oracle` can demonstrate; the first is the default
    token_names: tuple[str, ...]  # [V], for people


class Outcome(NamedTuple):
    reward: Array  # [] float32, the proxy the policy is trained on
    gold: Array  # [] float32, what is really wanted
    parts: Array  # [Q] float32
    truncated: Array  # [] bool; the episode was cut before the environment ended it


class Environment(NamedTuple):
    """Functions of one task; all pure, jit-able and total (any token in any state is accepted)."""

    name: str
    spec: Spec
    sample: Callable[[Array, Array], Task]  # (key, level) -> task
    prompt: Callable[[Task], tuple[Array, Array]]  # task -> (tokens [prompt_len] int32, n)
    init: Callable[[Task, Array], State]  # (task, key) -> state, after the prompt
    pending: Callable[[Task, State], Array]  # POLICY, DONE or the forced token
    feed: Callable[[Task, State, Array], State]  # a DONE state is left as it is
    signals: Callable[[Task, State, Array], Array]  # [R] float32 events of this decision, before feed
    outcome: Callable[[Task, State], Outcome]  # in any state; truncated unless the episode is over
    oracle: Callable[[Task, State, Array, Array], Array]  # (task, state, key, style index) -> token
    # Where they exist:
    step_labels: Callable[[Task, Array], Array] | None = None  # response [T] -> [T] 1 right, 0 wrong, -1 none
    features: Callable[[Task, State], Array] | None = None  # [F] float32; for envs.chart, all but the clock
    corpus: Callable[[Array], Array] | None = None  # key -> tokens [prompt_len + response_len], 0-padded
    enumerate: Callable[[Task], tuple[Array, Array]] | None = None  # all responses: tokens [N,T], length [N]


def check_level(spec: Spec, level: int) -> int:
    """The level, when the environment has it; `sample` itself may be traced and cannot refuse.

    Raises:
      ValueError: the level is outside 1..max_level.
    """
    if not 1 <= level <= spec.max_level:
        raise ValueError(f"level is {level}, but this environment has levels 1 to {spec.max_level}")
    return level
