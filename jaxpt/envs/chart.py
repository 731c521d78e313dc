"""Exact expectations over an environment with few states, however many responses it has.

`jaxpt.envs.exact` lists responses; here states are listed, and those with equal `features` are one node. A tabular
policy is a table of logits [nodes, V], the same at all times, and its expectations come from pushing probability along
the chart for as many steps as the budget allows. That needs features which, with the clock, decide what lies ahead.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.envs.protocol import POLICY, Environment, State, Task
from jaxpt.types import Array, Key

TOGETHER = 64  # states that are asked at once
MOST = 50_000  # nodes a chart may have


class Chart(NamedTuple):
    """Node 0 is the start. Token 0, the padding, is no decision."""

    behind: Array  # [N,V] int32, the node behind a token; the node itself where the token cannot stand there
    asked: Array  # [N] int32, what `pending` says: POLICY, DONE or the forced token
    events: Array  # [N,V,R] float32, the signals of a decision; 0 where the policy does not decide
    reward: Array  # [N] float32, of an episode that ends here
    gold: Array  # [N] float32
    features: Array  # [N,F] float32
    state: State  # [N, ...] the first state found with these features


def chart(env: Environment, task: Task, key: Key) -> Chart:
    """Every node that the policy's decisions can reach within the budget, breadth first.

    Raises:
      ValueError: the environment has no features, or more than 50 000 nodes.
    """
    if env.features is None:
        raise ValueError(f"{env.name!r} has no features to tell its states apart")
    width, budget = env.spec.vocab, env.spec.response_len

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # it runs for milliseconds
    def look(states: State) -> tuple[Chart, State, Array]:
        def one(state: State) -> tuple[Chart, State, Array]:
            tokens = jnp.arange(width)
            after = jax.vmap(lambda token: env.feed(task, state, token))(tokens)
            events = jax.vmap(lambda token: env.signals(task, state, token))(tokens)
            outcome, asked, names = env.outcome(task, state), env.pending(task, state), env.features(task, state)
            seen = Chart(tokens, asked, events * (asked == POLICY), outcome.reward, outcome.gold, names, state)
            return seen, after, jax.vmap(lambda state: env.features(task, state))(after)

        return jax.vmap(one)(states)

    def ask(states: State) -> tuple[Chart, State, Array]:
        rows = jax.tree.leaves(states)[0].shape[0]
        at = np.arange(-(-rows // TOGETHER) * TOGETHER) % rows  # whole blocks, so that one program serves every breadth
        blocks = [jax.device_get(look(_at(states, block))) for block in at.reshape(-1, TOGETHER)]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[:rows], *blocks)

    layer = jax.tree.map(lambda x: np.asarray(x)[None], jax.jit(env.init)(task, key))
    number = {np.asarray(jax.jit(env.features)(task, _at(layer, 0))).tobytes(): 0}
    layers: list[Chart] = []
    asked_so_far = 0
    for depth in range(budget + 1):
        seen, after, names = ask(layer)
        here = asked_so_far + np.arange(len(seen.asked), dtype=np.int32)
        stands = np.where(seen.asked[:, None] == POLICY, np.arange(width) > 0, np.arange(width) == seen.asked[:, None])
        behind = np.tile(here[:, None], (1, width))
        fresh: list[tuple[int, int]] = []
        for at in np.argwhere(stands) if depth < budget else ():
            name = names[*at].tobytes()
            if name not in number:
                number[name] = len(number)
                fresh.append(tuple(at))
            behind[*at] = number[name]
        layers.append(seen._replace(behind=behind))
        asked_so_far += len(here)
        if len(number) > MOST:
            raise ValueError(f"{env.name!r} has more than {MOST} states")
        if not fresh:
            break
        layer = _at(after, tuple(np.array(fresh).T))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *layers)


def _at(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda x: x[where], tree)


def steps_logp(chart: Chart, logits: Array) -> Array:
    """[N,V] log-probability of every token at every node: the policy's where it decides, 0 for what is forced, and the
    padding's 0 where the episode is over; -inf for what cannot stand there."""
    tokens = jnp.arange(logits.shape[1])
    decides = (chart.asked == POLICY)[:, None]
    own = jax.nn.log_softmax(jnp.where(tokens[None] > 0, logits, -jnp.inf), axis=-1)
    forced = tokens[None] == jnp.maximum(chart.asked, 0)[:, None]
    return jnp.where(decides, own, jnp.where(forced, 0.0, -jnp.inf))


class Expected(NamedTuple):
    reward: Array  # [] of an episode
    gold: Array  # []
    events: Array  # [R] how often each occurs in an episode
    decisions: Array  # [] tokens that the policy chooses


def expected(chart: Chart, logits: Array, budget: int) -> Expected:
    """Exact expectations of an episode of at most `budget` tokens under the table; differentiable in logits."""
    prob = jnp.exp(steps_logp(chart, logits))
    decides = (chart.asked == POLICY).astype(prob.dtype)
    of_node = jnp.concatenate([jnp.einsum("nv,nvr->nr", prob, chart.events), decides[:, None]], axis=1)

    def onward(here: Array, _: Any) -> tuple[Array, Array]:
        flow = (here[:, None] * prob).reshape(-1)
        return jnp.zeros_like(here).at[chart.behind.reshape(-1)].add(flow), here @ of_node

    start = jnp.zeros(prob.shape[0], prob.dtype).at[0].set(1.0)
    here, seen = jax.lax.scan(onward, start, length=budget)
    seen = jnp.sum(seen, axis=0)
    return Expected(here @ chart.reward, here @ chart.gold, seen[:-1], seen[-1])


class Walks(NamedTuple):
    tokens: Array  # [T] int32, 0 where the episode is over
    mask: Array  # [T] bool, the policy decides
    node: Array  # [T] int32, where it does
    events: Array  # [T,R]
    last: Array  # [] int32, the node where the episode ends


def walk(chart: Chart, logp: Array, key: Key, budget: int) -> Walks:
    """One episode drawn from logp [N,V] = steps_logp(chart, logits)."""

    def one(node: Array, noise: Array) -> tuple[Array, tuple]:
        token = jnp.argmax(logp[node] + noise).astype(jnp.int32)
        decides = chart.asked[node] == POLICY
        return chart.behind[node, token], (token, decides, node, chart.events[node, token])

    noise = jax.random.gumbel(key, (budget, logp.shape[1]))
    last, row = jax.lax.scan(one, jnp.int32(0), noise)
    return Walks(*row, last)
