"""Many updates on one batch: how far the distribution of whole sequences moves, exactly, whatever a clip says.

Worlds are trees of `depth` decisions among `tokens` each, with rewards and an old policy of their own, drawn from the
run's key. All tokens^depth sequences are listed, so ratios, KL and total variation are those of the policy and not of
a sample. The policy is linear, logits = old + features @ weights: a node has a feature of its own and others that it
shares with all nodes; `sharing` says how much of its logits moves with them, and 0 is a table.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.envs import exact
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.row import Row
from jaxpt.ops.masked import exp_excess
from jaxpt.train.common import check_positive
from jaxpt.train.kl_twin import table_of, with_middle
from jaxpt.train.program import Program
from jaxpt.train.tabular import as_trajectory

RATIOS = ("token", "sequence")  # of GRPO and of GSPO


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    ratio: str = "token"  # whose clip: each token's, or the geometric mean of a sequence's
    depth: int = 4  # T, decisions of every sequence
    tokens: int = 2
    spread: float = 1.0  # deviation of the old policy's logits, which are normal
    shared: int = 8  # features that all nodes share
    sharing: float = 0.5  # their part in a node's squared feature norm
    groups: int = 4
    group: int = 8
    learning_rate: float = 1.0  # plain gradient descent on the weights
    eps_low: float = 0.2
    eps_high: float = 0.2
    beta: float = 0.0  # of k3 towards the old policy, in the loss
    kl_limit: float = 1e9  # no update where the exact KL(old || new) is above
    edge: float = 0.2  # the range 1 -+ edge that metrics speak of, whatever is clipped
    worlds: int = 8

    def __post_init__(self):
        if self.ratio not in RATIOS:
            raise ValueError(f"ratio: got {self.ratio!r}, expected one of {', '.join(RATIOS)}")
        check_positive(self, "depth", "tokens", "shared", "groups", "group", "worlds", "edge")
        if not 0 <= self.sharing <= 1:
            raise ValueError(f"sharing: got {self.sharing!r}, expected a number from 0 to 1")


def full_length(depth: int, tokens: int) -> exact.Leaves:
    """All tokens^depth sequences of `depth` decisions: a tree's responses without those that stop. Rewards are 0."""
    env = envs.make("tree", vocab=tokens + 1, depth=depth)
    whole = exact.leaves(env, env.sample(jax.random.key(0), jnp.int32(1)), jax.random.key(0))
    full = jax.tree.map(lambda x: x[-(tokens**depth):], whole)  # the heap's last layer
    return full._replace(reward=jnp.zeros_like(full.reward))


def clipped_row(ratio: str) -> Row:
    """GRPO, or GSPO, with the gradients of a sequence's tokens summed, so that T is no factor of a token's rate."""
    return compose(
        f"{ratio}_clip", "", advantage="standardised", ratio=ratio, surrogate="clipped", reduction="sequence_sum",
        kl=Penalty("k3"), hyper={"std_eps": 0.0, "ddof": 1.0, "eps_low": 0.2, "eps_high": 0.2, "beta": 0.0},
    )


def make_drift(cfg: DriftConfig) -> Program:
    """Each step is one more update on the batch that was drawn at the beginning.

    Metrics, their median over worlds and NAME_world, with r = new / old probability of a token:
      ratio, ratio_any     largest r of a token of the batch, and of any token of the tree
      outside, outside_all share of decisions whose r is not within 1 -+ edge: of the batch, of the old policy
      power                the largest product of r of a sequence of the batch, as a power of (1 + edge)^T
      kl, tv               KL(old || new) and total variation of sequences
      estimate             mean over the batch of sum_t r - 1 - log r, which estimates kl
      gain                 J minus that of the old policy
    """
    shape, row = full_length(cfg.depth, cfg.tokens), clipped_row(cfg.ratio)
    (nodes, width), size = table_of(shape), cfg.groups * cfg.group

    def world(key):
        keys = jax.random.split(key, 4)
        old = cfg.spread * jax.random.normal(keys[1], (nodes, width))
        features = jax.random.normal(keys[2], (nodes, cfg.shared))
        return {
            "reward": jax.random.uniform(keys[0], shape.reward.shape), "old": old,
            "features": features / jnp.linalg.norm(features, axis=1, keepdims=True),
            "members": jax.random.categorical(keys[3], jnp.log(exact.leaf_prob(old, shape)), shape=(size,)),
        }

    def init(key, hyper, start=None):
        drawn = jax.vmap(world)(jax.random.split(key, cfg.worlds))
        params = {"weights": jnp.zeros((cfg.worlds, nodes + cfg.shared, width))}
        return {"params": params, "kl": jnp.zeros(cfg.worlds), "world": drawn, "step": jnp.int32(0), "hyper": hyper}

    def policy(weights, world, sharing):
        alone, together = weights[:nodes], world["features"] @ weights[nodes:]
        logits = world["old"] + jnp.sqrt(1 - sharing) * alone + jnp.sqrt(sharing) * together
        return exact.leaf_logp(logits, shape)

    def measure(old, new, world):
        gap, members = new - old, world["members"]
        prob, after = jnp.exp(jnp.sum(old, axis=1)), jnp.exp(jnp.sum(new, axis=1))
        out_of_range = (gap > jnp.log1p(cfg.edge)) | (gap < jnp.log1p(-cfg.edge))
        moved = jnp.sum(gap, axis=1)
        return {
            "ratio": jnp.exp(jnp.max(gap[members])), "ratio_any": jnp.exp(jnp.max(gap)),
            "outside": jnp.mean(out_of_range[members]), "outside_all": prob @ jnp.mean(out_of_range, axis=1),
            "power": jnp.max(moved[members]) / (cfg.depth * jnp.log1p(cfg.edge)),
            "kl": -prob @ moved, "tv": 0.5 * jnp.sum(jnp.abs(after - prob)),
            "estimate": jnp.mean(jnp.sum(exp_excess(gap), axis=1)[members]),
            "gain": (after - prob) @ world["reward"],
        }

    def update(weights, kl, world, hyper):
        members, constants = world["members"], {name: hyper[name] for name in row.hyper}
        old = exact.leaf_logp(world["old"], shape)
        traj = as_trajectory(shape, members, world["reward"][members], old[members], cfg.group)
        ready = row.prepare(traj, ref_logp=old[members], **constants)

        def loss(weights):
            logp = policy(weights, world, hyper["sharing"])[members]
            return row.loss(
                logp, old[members], ready["advantages"], ready["mask"], totals=ready["totals"], ref_logp=old[members],
                **constants,
            )[0]

        rate = jnp.where(kl <= hyper["kl_limit"], hyper["learning_rate"], 0.0)
        weights = weights - rate * jax.grad(loss)(weights)
        return weights, measure(old, policy(weights, world, hyper["sharing"]), world)

    def step(state):
        hyper = state["hyper"]
        weights, out = jax.vmap(update, (0, 0, 0, None))(state["params"]["weights"], state["kl"], state["world"], hyper)
        return {**state, "params": {"weights": weights}, "kl": out["kl"], "step": state["step"] + 1}, with_middle(out)

    leaves = ("learning_rate", "sharing", "eps_low", "eps_high", "beta", "kl_limit")
    hyper = {**row.hyper, **{name: getattr(cfg, name) for name in leaves}}
    return Program(init, step, hyper, lambda state: state["params"])
