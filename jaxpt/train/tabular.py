"""The exact twin of a policy program: a table of logits on an environment whose responses can be listed.

Samples are drawn as in a real run and go through the same rows, but J is a sum over all leaves, without
sampling error. Every seed runs `replicas` independent tables at once.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.envs import exact
from jaxpt.objectives import get
from jaxpt.train.common import with_coins
from jaxpt.train.program import Program
from jaxpt.types import Array, Trajectory, bare_trajectory

SOURCES = ("policy", "demonstrator")


@dataclass(frozen=True, kw_only=True)
class TabularConfig:
    vocab: int = 4  # of the tree: decisions at each place, the stop among them
    depth: int = 3
    world: int = 0  # seed of the leaf rewards; the same for every run, so that only sampling varies
    objective: str = "grpo_no_kl"
    source: str = "policy"  # who draws the episodes: the policy itself, or the demonstrator
    corruption: float = 0.3  # the demonstrator takes another decision than the best with this probability
    reward_noise: float = 0.0  # share of episodes whose reward is replaced by a fair coin; 1 is a control
    prompts: int = 4  # groups per update
    group: int = 8
    learning_rate: float = 1.0  # plain gradient descent on the logits
    replicas: int = 8

    def __post_init__(self):
        if self.source not in SOURCES:
            raise ValueError(f"source: got {self.source!r}, expected one of {', '.join(SOURCES)}")


def demonstrator(leaves: exact.Leaves, corruption: float) -> Array:
    """Logits [nodes, V] of one who takes the best decision with probability 1 - corruption, else any other.

    The best decision at a node leads to the best leaf below it.
    """
    nodes, width = int(leaves.node.max()) + 1, int(leaves.tokens.max()) + 1
    below = jnp.full((nodes, width), -jnp.inf).at[leaves.node, leaves.tokens].max(
        jnp.where(leaves.mask, leaves.reward[:, None], -jnp.inf)
    )
    legal = below > -jnp.inf
    others = jnp.maximum(jnp.sum(legal, axis=1, keepdims=True) - 1, 1)
    best = below == jnp.max(below, axis=1, keepdims=True)
    return jnp.log(jnp.where(best, 1 - corruption, corruption / others))


def make_tabular(cfg: TabularConfig) -> Program:
    """Each step: prompts x group leaves, one gradient step on the table; metric J is exact."""
    env, row = envs.make("tree", vocab=cfg.vocab, depth=cfg.depth), get(cfg.objective)
    leaves = exact.leaves(env, env.sample(jax.random.key(cfg.world), jnp.int32(1)), jax.random.key(0))
    expert = demonstrator(leaves, cfg.corruption)
    rows = cfg.prompts * cfg.group

    def init(key, hyper, start=None):
        params = {"logits": jnp.zeros((cfg.replicas, *expert.shape))} if start is None else start
        # A copy: the state is donated, and one buffer must not be given away twice.
        reference = jnp.copy(params["logits"])
        return {"params": params, "reference": reference, "key": key, "step": jnp.int32(0), "hyper": hyper}

    def draw(key, logits, noise):
        source = expert if cfg.source == "demonstrator" else logits
        key_leaf, key_coin = jax.random.split(key)
        members = jax.random.categorical(key_leaf, jnp.log(exact.leaf_prob(source, leaves)), shape=(rows,))
        return members, with_coins(leaves.reward[members], jax.random.split(key_coin, rows), noise)

    def one(logits, reference, key, hyper):
        members, reward = draw(key, logits, hyper["reward_noise"])
        constants = {k: v for k, v in hyper.items() if k in row.hyper}

        extra = {"ref_logp": exact.leaf_logp(reference, leaves)[members]} if "ref_logp" in row.needs else {}

        def loss(logits):
            logp = exact.leaf_logp(logits, leaves)[members]
            traj = as_trajectory(leaves, members, reward, jax.lax.stop_gradient(logp), cfg.group)
            ready = row.prepare(traj, **constants)
            return row.loss(
                logp, traj.old_logp, ready["advantages"], traj.mask, totals=ready["totals"], **extra, **constants
            )[0]

        logits = logits - hyper["learning_rate"] * jax.grad(loss)(logits)
        return logits, exact.value(logits, leaves)

    def step(state):
        keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), cfg.replicas)
        logits, value = jax.vmap(one, (0, 0, 0, None))(
            state["params"]["logits"], state["reference"], keys, state["hyper"]
        )
        state = {**state, "params": {"logits": logits}, "step": state["step"] + 1}
        return state, {"J": jnp.mean(value), "J_replica": value}

    hyper = {"learning_rate": cfg.learning_rate, "reward_noise": cfg.reward_noise, **row.hyper}
    return Program(init, step, hyper, lambda state: state["params"])


def as_trajectory(leaves: exact.Leaves, members: Array, reward: Array, old_logp: Array, group: int) -> Trajectory:
    """The chosen leaves as a batch; rows k * group ... (k + 1) * group - 1 are a group.

    Leaves have no prompt: their first decision stands at index 0, which no row of the algebra minds.
    """
    return bare_trajectory(
        leaves.tokens[members], leaves.mask[members], reward=reward, old_logp=old_logp,
        group=jnp.arange(members.shape[0]) // group, length=leaves.length[members],
    )
