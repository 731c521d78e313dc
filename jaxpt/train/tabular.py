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
from jaxpt.objectives.value import clipped_value_loss
from jaxpt.train.common import with_coins
from jaxpt.train.program import Program
from jaxpt.train.rows import arm, check_rows, follow, own
from jaxpt.train.rows import leaves as leaves_of
from jaxpt.types import Array, Trajectory, bare_trajectory

SOURCES = ("policy", "start", "demonstrator")


@dataclass(frozen=True, kw_only=True)
class TabularConfig:
    vocab: int = 4  # of the tree: decisions at each place, the stop among them
    depth: int = 3
    world: int = 0  # seed of the leaf rewards; the same for every run, so that only sampling varies
    winners: int = 0  # so many leaves, the best, earn 1 and all others 0; with 0 every leaf earns its own reward
    objectives: tuple[str, ...] = ("grpo_no_kl",)  # rows that share the program; the leaf `row` picks one
    source: str = "policy"  # who draws the episodes: the policy, itself as it was at the start, or the demonstrator
    corruption: float = 0.3  # the demonstrator takes another decision than the best with this probability
    reward_noise: float = 0.0  # share of episodes whose reward is replaced by a fair coin; 1 is a control
    prompts: int = 4  # groups per update
    group: int = 8
    epochs: int = 1  # updates per batch
    learning_rate: float = 1.0  # plain gradient descent on the logits
    critic_rate: float = 0.5  # and on the table of values, where a row needs one
    replicas: int = 8

    def __post_init__(self):
        check_rows(self.objectives, ("logp", "ref_logp", "entropy", "values", "prompt_tokens"))
        if self.source not in SOURCES:
            raise ValueError(f"source: got {self.source!r}, expected one of {', '.join(SOURCES)}")

    def arm(self, name: str) -> dict[str, float]:
        """The leaves that make this program follow row `name` with its own constants."""
        return arm(self.objectives, name, envs.make("tree", vocab=self.vocab, depth=self.depth).spec)


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
    """Each step: prompts x group leaves, `epochs` gradient steps on the table; metric J is exact.

    A row's beta stays where it begins, and groups that a row rejects are not replaced.
    """
    env, rows = envs.make("tree", vocab=cfg.vocab, depth=cfg.depth), [get(name) for name in cfg.objectives]
    leaves = exact.leaves(env, env.sample(jax.random.key(cfg.world), jnp.int32(1)), jax.random.key(0))
    expert = demonstrator(leaves, cfg.corruption)
    if cfg.winners:
        leaves = leaves._replace(reward=(leaves.reward >= jnp.sort(leaves.reward)[-cfg.winners]).astype(jnp.float32))
    size = cfg.prompts * cfg.group

    def init(key, hyper, start=None):
        fresh = {"logits": jnp.zeros((cfg.replicas, *expert.shape)), "values": jnp.zeros((cfg.replicas, expert.shape[0]))}
        # Copies: the state is donated, and one buffer must not be given away twice.
        params = fresh if start is None else {**fresh, "logits": jnp.copy(start["logits"])}
        reference = jnp.copy(params["logits"])
        return {"params": params, "reference": reference, "key": key, "step": jnp.int32(0), "hyper": hyper}

    def draw(key, logits, reference, noise):
        source = {"policy": logits, "start": reference, "demonstrator": expert}[cfg.source]
        key_leaf, key_coin = jax.random.split(key)
        members = jax.random.categorical(key_leaf, jnp.log(exact.leaf_prob(source, leaves)), shape=(size,))
        return members, with_coins(leaves.reward[members], jax.random.split(key_coin, size), noise)

    def one(table, reference, key, hyper):
        members, reward = draw(key, table["logits"], reference, hyper["reward_noise"])
        old_logp = exact.leaf_logp(table["logits"], leaves)[members]
        ref_logp = exact.leaf_logp(reference, leaves)[members]
        old_values = table["values"][leaves.node[members]]
        traj = as_trajectory(leaves, members, reward, old_logp, cfg.group)
        prepare = lambda row: lambda: row.prepare(traj, ref_logp=ref_logp, values=old_values, **own(row, hyper))  # noqa: E731
        ready = follow(rows, hyper, prepare)

        def loss(table):
            logp, entropy = exact.leaf_logp(table["logits"], leaves)[members], exact.node_entropy(table["logits"], leaves)
            run = lambda row: lambda: row.loss(  # noqa: E731
                logp, old_logp, ready["advantages"], ready["mask"], totals=ready["totals"], ref_logp=ref_logp,
                entropy=entropy[leaves.node[members]], prompt_tokens=ready["prompt_tokens"], **own(row, hyper),
            )[0]
            values = table["values"][leaves.node[members]]
            critic, _ = clipped_value_loss(
                values, old_values, ready["returns"], ready["mask"], totals=ready["totals"],
                value_clip=hyper.get("value_clip", jnp.inf),
            )
            return follow(rows, hyper, run) + critic

        rates = {"logits": hyper["learning_rate"], "values": hyper["critic_rate"]}
        descend = lambda table, _: (jax.tree.map(lambda x, g, r: x - r * g, table, jax.grad(loss)(table), rates), None)  # noqa: E731
        table, _ = jax.lax.scan(descend, table, length=cfg.epochs)
        return table, exact.value(table["logits"], leaves)

    def step(state):
        keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), cfg.replicas)
        params, value = jax.vmap(one, (0, 0, 0, None))(state["params"], state["reference"], keys, state["hyper"])
        return {**state, "params": params, "step": state["step"] + 1}, {"J": jnp.mean(value), "J_replica": value}

    hyper = {"learning_rate": cfg.learning_rate, "critic_rate": cfg.critic_rate, "reward_noise": cfg.reward_noise}
    return Program(init, step, {**hyper, **leaves_of(cfg.objectives, env.spec)}, lambda state: state["params"])


def as_trajectory(leaves: exact.Leaves, members: Array, reward: Array, old_logp: Array, group: int) -> Trajectory:
    """The chosen leaves as a batch; rows k * group ... (k + 1) * group - 1 are a group.

    Leaves have no prompt: their first decision stands at index 0, which no row of the algebra minds.
    """
    return bare_trajectory(
        leaves.tokens[members], leaves.mask[members], reward=reward, old_logp=old_logp,
        group=jnp.arange(members.shape[0]) // group, length=leaves.length[members],
    )
