"""Episodes: the policy, or the oracle, against an environment, as one compiled loop.

A step asks `pending` of every row: the policy chooses (mask 1), the environment forces (mask 0), or the
row is done. Steps run in scans of 8 inside a while_loop that ends when every row is done. Draws are
addressed by row key and step, so rows do not depend on what else is in the batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpt.envs.protocol import DONE, POLICY, Environment
from jaxpt.models import Model
from jaxpt.ops.dots import dot, transposed
from jaxpt.ops.sampling import Chooser
from jaxpt.types import Array, Params, Trajectory

STRIDE = 8  # tokens between two looks at whether every row is done
FEW, LONG = range(4, 33), 32  # rows and tokens for which transposed matrices pay on a CPU, the copy of them included


def generate(
    model: Model, params: Params, env: Environment, tasks: Any, keys: Array, chooser: Chooser, group: int = 1
) -> Trajectory:
    """`group` episodes of each task. tasks: pytree with leading axis P; keys [P * group], one per row.

    Rows p * group ... (p + 1) * group - 1 belong to task p and share its prefill.
    """
    prompts, n = jax.vmap(env.prompt)(tasks)
    P, Tp = prompts.shape
    size = Tp + whole_strides(env.spec.response_len)
    hidden, cache = model.extend(params, prompts, model.cache(P, size), jnp.zeros(P, jnp.int32))
    last = jnp.take_along_axis(hidden, (n - 1)[:, None, None], axis=1)[:, 0]
    repeat = lambda tree: jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), tree)  # noqa: E731
    W = model.unembed(params)
    vocab = W.shape[1]
    if P * group in FEW and env.spec.response_len >= LONG and jax.default_backend() == "cpu":
        params, W = model.for_few_rows(params), transposed(W)

    def decide(carry, states, noise):
        return chooser.choose(noise, dot("bd,dv->bv", carry[0], W))

    def advance(carry, tokens, length):
        hidden, cache = model.extend(params, tokens[:, None], carry[1], length)
        return hidden[:, 0], cache

    return _episodes(
        env, repeat(tasks), repeat(prompts), repeat(n), keys, jnp.arange(P * group) // group,
        lambda keys: chooser.noise(keys, vocab), decide, advance, repeat((last, cache)),
    )


def demonstrate(env: Environment, tasks: Any, keys: Array, style: int | Array = 0) -> Trajectory:
    """One oracle episode of each task, in `spec.styles[style]` (an index, or one per row); old_logp is 0."""
    prompts, n = jax.vmap(env.prompt)(tasks)
    styles = jnp.broadcast_to(jnp.asarray(style), n.shape)

    def decide(carry, states, keys):
        tokens = jax.vmap(env.oracle)(tasks, states, keys, styles)
        return tokens, jnp.zeros(n.shape), None

    return _episodes(
        env, tasks, prompts, n, keys, jnp.arange(n.shape[0]), lambda keys: keys, decide, lambda carry, *_: carry, ()
    )


def _episodes(
    env: Environment, tasks: Any, prompts: Array, n: Array, keys: Array, group: Array,
    noise: Callable, decide: Callable, advance: Callable, carry: Any,
) -> Trajectory:
    """The loop that both share.

    noise(keys [B]) -> randomness of one step, drawn for a stride at once (three to five times cheaper);
    decide(carry, states, noise) -> (token [B], logp [B], support or None);
    advance(carry, tokens, length) -> carry: `tokens` now stand at position `length` of each row.
    """
    rows = prompts.shape[0]
    luck, draws = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    states = jax.vmap(env.init)(tasks, luck)

    def one(loop, noise):
        carry, states, length = loop
        pending = jax.vmap(env.pending)(tasks, states)
        free, alive = pending == POLICY, pending != DONE
        token, logp, support = decide(carry, states, noise)
        token = jnp.where(free, token, jnp.where(alive, pending, 0))
        signals = jax.vmap(env.signals)(tasks, states, token)
        out = {
            "tokens": token, "mask": free, "old_logp": jnp.where(free, logp, 0.0),
            "signals": jnp.where(free[:, None], signals, 0.0),
        }
        if support is not None:
            out["support"] = jnp.packbits(support & free[:, None], axis=-1)
        states = jax.vmap(env.feed)(tasks, states, token)
        return (advance(carry, token, length), states, length + alive), out

    def ahead(at):
        fold = jax.vmap(jax.random.fold_in, (0, None))
        return jax.vmap(lambda step: noise(fold(draws, step)))(at + jnp.arange(STRIDE))

    def stride(at_buffer):
        at, loop, buffer = at_buffer
        loop, out = jax.lax.scan(one, loop, ahead(at), length=STRIDE)
        put = lambda b, o: jax.lax.dynamic_update_slice_in_dim(b, o, at, axis=0)  # noqa: E731
        return at + STRIDE, loop, jax.tree.map(put, buffer, out)

    def unfinished(at_buffer):
        at, (_, states, _), _ = at_buffer
        return (at < env.spec.response_len) & jnp.any(jax.vmap(env.pending)(tasks, states) != DONE)

    loop = (carry, states, n.astype(jnp.int32))
    shapes = jax.eval_shape(lambda loop: jax.lax.scan(one, loop, ahead(0), length=STRIDE)[1], loop)
    steps = whole_strides(env.spec.response_len)
    buffer = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape[1:]), x.dtype), shapes)
    _, (_, states, length), buffer = jax.lax.while_loop(unfinished, stride, (jnp.int32(0), loop, buffer))

    response = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), buffer)
    width = env.spec.prompt_len + env.spec.response_len
    placed = {name: _place(x, n, length, width) for name, x in response.items()}
    mask = placed["mask"]
    starts = mask & ~jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))
    outcome = jax.vmap(env.outcome)(tasks, states)
    in_prompt = jnp.arange(width)[None] < n[:, None]
    padded = jnp.pad(prompts, ((0, 0), (0, env.spec.response_len)))
    return Trajectory(
        tokens=jnp.where(in_prompt, padded, placed["tokens"]), mask=mask, old_logp=placed["old_logp"],
        turn=jnp.where(mask, jnp.cumsum(starts, axis=1) - 1, 0), signals=placed["signals"],
        reward=outcome.reward, gold=outcome.gold, parts=outcome.parts, truncated=outcome.truncated,
        group=jnp.broadcast_to(group, (rows,)), length=length, support=placed.get("support"),
    )


def whole_strides(steps: int) -> int:
    """Steps rounded up to whole strides: what the loop runs at most, and the room it needs."""
    return -(-steps // STRIDE) * STRIDE


def _place(x: Array, n: Array, length: Array, width: int) -> Array:
    """Response-aligned x [B,steps,...] -> row-aligned [B,width,...], 0 outside n <= t < length."""
    steps = x.shape[1]
    at = jnp.arange(width)[None] - n[:, None]
    inside = (at >= 0) & (at < (length - n)[:, None])
    widen = lambda a: a.reshape(a.shape + (1,) * (x.ndim - 2))  # noqa: E731
    moved = jnp.take_along_axis(x, widen(jnp.clip(at, 0, steps - 1)), axis=1)
    return jnp.where(widen(inside), moved, jnp.zeros((), x.dtype))
