"""Exact noise of a policy gradient by its baseline: a group's mean, or a critic that is wrong by so much.

Worlds are enumerable trees; every batch that the policy can draw is weighed by its probability (jaxpt.train.expected).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.envs import exact
from jaxpt.objectives import get
from jaxpt.objectives.algebra import compose
from jaxpt.ops.masked import safe_div
from jaxpt.train.expected import Moments, expected_gradient
from jaxpt.train.program import Program
from jaxpt.types import Array

# PPO's advantage alone: no whitening, ratio or clip, so that only the baseline differs from RLOO.
CRITIC = compose(
    "gae_score", "Schulman et al. 2015, arXiv 1506.02438, eq. 16", advantage="gae", ratio="none", surrogate="score",
    reduction="sequence_sum", hyper={"gamma": 1.0, "lam": 1.0, "bootstrap": 0.0, "value_clip": 0.2},
)


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    vocab: int = 3  # of the tree
    depth: int = 4  # 31 leaves, and so 29791 groups of 3
    groups: tuple[int, ...] = (2, 3)
    stride: float = 0.125  # how much wronger the critic is at each step, in standard deviations of the reward
    worlds: int = 8  # trees with rewards, and critics with errors, of their own, drawn from the run's key


def make_baselines(cfg: BaselineConfig) -> Program:
    """Step k measures critics whose values at every node are off by k * stride standard deviations of the reward.

    The policy is uniform over decisions; errors are independent normal numbers, one for each node. Metrics: error, in
    those units; as means over worlds and, under NAME_world, [worlds]: noise_critic and noise_group_G, the standard
    deviation of the update per episode over the length of the gradient of J, at equal numbers of episodes (a group of G
    counts as G); bias_critic, 1 - cosine of the expected update with the gradient of J, 0 where `lam` is 1.
    """
    env, rloo = envs.make("tree", vocab=cfg.vocab, depth=cfg.depth), get("rloo")
    shape = exact.leaves(env, env.sample(jax.random.key(0), jnp.int32(1)), jax.random.key(0))
    logits = jnp.zeros((int(shape.node.max()) + 1, int(shape.tokens.max()) + 1))
    p = exact.leaf_prob(logits, shape)

    def noise(moments: Moments, ascent: Array, episodes: int) -> Array:
        return safe_div(jnp.sqrt(episodes * moments.variance), jnp.linalg.norm(ascent))

    def of_groups(reward: Array) -> dict[str, Array]:
        leaves = shape._replace(reward=reward)
        ascent = jax.grad(exact.value)(logits, leaves)
        return {
            f"noise_group_{size}": noise(expected_gradient(rloo, leaves, logits, size, chunk=1024), ascent, size)
            for size in cfg.groups
        }

    def of_critic(reward: Array, direction: Array, error: Array, lam: Array) -> dict[str, Array]:
        leaves = shape._replace(reward=reward)
        ascent = jax.grad(exact.value)(logits, leaves)
        deviation = jnp.sqrt(p @ (reward - p @ reward) ** 2)
        values = exact.node_values(logits, leaves) + error * deviation * direction
        moments = expected_gradient(CRITIC, leaves, logits, 1, values=values, **{**CRITIC.hyper, "lam": lam})
        length = jnp.linalg.norm(moments.mean) * jnp.linalg.norm(ascent)
        return {
            "noise_critic": noise(moments, ascent, 1), "bias_critic": 1 - safe_div(jnp.sum(-moments.mean * ascent), length),
        }

    def init(key, hyper, start=None):
        key_world, key_error = jax.random.split(key)
        reward = jax.vmap(lambda key: env.sample(key, jnp.int32(1)).reward)(jax.random.split(key_world, cfg.worlds))
        direction = jax.random.normal(key_error, (cfg.worlds, logits.shape[0]))
        groups = jax.lax.map(of_groups, reward)
        return {"reward": reward, "direction": direction, "groups": groups, "step": jnp.int32(0), "hyper": hyper}

    def step(state):
        error = state["step"] * cfg.stride
        critic = jax.vmap(of_critic, (0, 0, None, None))(state["reward"], state["direction"], error, state["hyper"]["lam"])
        out = {**state["groups"], **critic}
        means = {name: jnp.mean(x) for name, x in out.items()}
        worlds = {f"{name}_world": x for name, x in out.items()}
        return {**state, "step": state["step"] + 1}, {"error": error, **means, **worlds}

    return Program(init, step, {"lam": 1.0}, lambda state: {})
