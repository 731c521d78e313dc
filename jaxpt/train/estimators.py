"""Exact bias and noise of every row's gradient, along the path of exact ascent: the twin of a comparison.

Worlds are enumerable trees with rewards of their own. At each point of a path every row's gradient estimator is
averaged over all groups that the policy can draw (jaxpt.train.expected), so nothing here has sampling error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.envs import exact
from jaxpt.objectives import get
from jaxpt.ops.masked import safe_div
from jaxpt.train.expected import expected_gradient
from jaxpt.train.program import Program
from jaxpt.train.rows import check_rows, constants
from jaxpt.types import Array


@dataclass(frozen=True, kw_only=True)
class EstimatorConfig:
    objectives: tuple[str, ...]
    vocab: int = 3  # of the tree
    depth: int = 2
    group: int = 3  # G; vocab 3, depth 2 has 7 leaves and so 343 groups of 3
    worlds: int = 8  # trees with rewards of their own, drawn from the run's key
    changed: Mapping[str, float] = field(default_factory=dict)  # constants that every row which has them gets
    learning_rate: float = 4.0  # of the ascent on exact J that makes the path

    def __post_init__(self):
        check_rows(self.objectives, ("logp", "ref_logp", "entropy", "values", "prompt_tokens"))


def make_estimators(cfg: EstimatorConfig) -> Program:
    """Each step measures every row at the worlds' policies, then moves these along the gradient of J.

    Metrics, as means over worlds and, under NAME_world, [worlds]: J; and for every row
      bias_ROW   1 - cosine of the expected update with the gradient of J: 0 where the row climbs J itself
      noise_ROW  standard deviation of the update of one group, over the length of its mean
    A critic is given the true values. Places where a row's expected update is 0 count as bias 1, noise 0.
    """
    env = envs.make("tree", vocab=cfg.vocab, depth=cfg.depth)
    shape = exact.leaves(env, env.sample(jax.random.key(0), jnp.int32(1)), jax.random.key(0))
    table = int(shape.node.max()) + 1, int(shape.tokens.max()) + 1
    rows = [get(name) for name in cfg.objectives]

    def init(key, hyper, start=None):
        tasks = jax.vmap(lambda key: env.sample(key, jnp.int32(1)))(jax.random.split(key, cfg.worlds))
        logits = jnp.zeros((cfg.worlds, *table)) if start is None else start["logits"]
        return {"params": {"logits": jnp.copy(logits)}, "reward": tasks.reward, "step": jnp.int32(0), "hyper": hyper}

    def measure(logits: Array, reward: Array) -> tuple[Array, dict[str, Array]]:
        leaves = shape._replace(reward=reward)
        value, ascent = jax.value_and_grad(exact.value)(logits, leaves)
        out = {"J": value}
        for row in rows:
            critic = {"values": exact.node_values(logits, leaves)} if "values" in row.needs else {}
            numbers = {k: cfg.changed.get(k, v) for k, v in constants(row, env.spec).items()}
            moments = expected_gradient(row, leaves, logits, cfg.group, **critic, **numbers)
            size = jnp.linalg.norm(moments.mean)
            out[f"bias_{row.name}"] = 1 - safe_div(jnp.sum(-moments.mean * ascent), size * jnp.linalg.norm(ascent))
            out[f"noise_{row.name}"] = safe_div(jnp.sqrt(moments.variance), size)
        return ascent, out

    def step(state):
        logits = state["params"]["logits"]
        ascent, out = jax.vmap(measure)(logits, state["reward"])
        params = {"logits": logits + state["hyper"]["learning_rate"] * ascent}
        means = {name: jnp.mean(x) for name, x in out.items()}
        return {**state, "params": params, "step": state["step"] + 1}, means | {f"{k}_world": x for k, x in out.items()}

    return Program(init, step, {"learning_rate": cfg.learning_rate}, lambda state: state["params"])
