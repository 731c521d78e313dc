"""Texts written on: prompts in, completions out, for a model whose tasks are texts and not an environment's."""

from collections.abc import Sequence

import jax.numpy as jnp

from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, Spec
from jaxpt.models import Model
from jaxpt.ops.sampling import Chooser
from jaxpt.rollout.generate import generate
from jaxpt.types import Array, Params, Trajectory


def complete(
    model: Model, params: Params, prompts: Array, n: Array, keys: Array, chooser: Chooser, *, new: int,
    ends: Sequence[int] = (), group: int = 1,
) -> Trajectory:
    """`group` completions of each prompt, of `new` tokens at most; the first token of `ends` is a completion's last.

    prompts [P,Tp] int32, of which the first n [P] >= 1 tokens count; keys [P * group], one per row. Rows p * group ...
    (p + 1) * group - 1 belong to prompt p. A row's first `length` tokens are its text, those of the mask are new; behind
    them stands 0, whatever that means in the vocabulary. truncated: no end came within `new` tokens. Rewards are 0, to be
    replaced by whoever judges the texts.
    """
    env = _texts(prompts.shape[1], new, jnp.asarray(list(ends), jnp.int32))
    return generate(model, params, env, (prompts, n), keys, chooser, group)


def _texts(prompt_len: int, new: int, ends: Array) -> Environment:
    """The policy chooses until an end or `new` tokens. State: (tokens chosen, whether the last one was an end)."""
    spec = Spec(0, prompt_len, response_len=new, signals=(), parts=(), max_level=1, styles=(), token_names=())

    def pending(task, state):
        count, ended = state
        return jnp.where(ended | (count >= new), DONE, POLICY)

    def feed(task, state, token):
        over = pending(task, state) == DONE
        count, ended = state
        return jnp.where(over, count, count + 1), jnp.where(over, ended, jnp.any(token == ends))

    def outcome(task, state):
        return Outcome(jnp.zeros(()), jnp.zeros(()), jnp.zeros(0), ~state[1])

    nothing = lambda *_: jnp.zeros(0)  # noqa: E731
    return Environment(
        name="texts", spec=spec, sample=nothing, prompt=lambda task: task,
        init=lambda task, key: (jnp.int32(0), jnp.asarray(False)), pending=pending, feed=feed, signals=nothing,
        outcome=outcome, oracle=nothing,
    )
