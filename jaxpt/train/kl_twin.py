"""KL penalties, exactly: what each measures, where each pulls, and where training with it ends.

Worlds are enumerable trees with rewards and a reference policy of their own, drawn from the run's key. There the KL
of whole sequences, its gradient, and the optimum of J - beta KL(policy || reference) are sums over leaves:

    policy*(leaf) proportional to reference(leaf) exp(R(leaf) / beta)
    J - beta KL there = beta log sum_leaf reference(leaf) exp(R(leaf) / beta)

A penalty is a value (k1, k2, k3), whose gradient pulls, and its place (jaxpt.objectives.kl). In the reward only the
value counts, and in the loss only the pull, so the table's 3 x 3 x 2 cells are seven penalties.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.envs import exact
from jaxpt.objectives import kl
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.row import Row
from jaxpt.ops.masked import safe_div
from jaxpt.train.common import check_positive
from jaxpt.train.expected import expected_gradient
from jaxpt.train.program import Program
from jaxpt.train.rows import follow
from jaxpt.train.tabular import as_trajectory
from jaxpt.types import Array, Key

PENALTIES = {
    "k1_loss": Penalty("k1"),
    "k2_loss": Penalty("k2"),
    "k3_loss": Penalty("k3"),
    "score_loss": Penalty("k1", "score"),
    "k1_reward": Penalty("k1", placement="reward"),
    "k2_reward": Penalty("k2", placement="reward"),
    "k3_reward": Penalty("k3", placement="reward"),
}
VALUES = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


@dataclass(frozen=True, kw_only=True)
class Worlds:
    """Trees with uniform rewards; a reference's logits are normal with deviation `spread`."""

    vocab: int = 3  # decisions at each place, the stop among them
    depth: int = 3
    spread: float = 1.0
    count: int = 8

    def __post_init__(self):
        check_positive(self, "spread", "count")

    def leaves(self) -> exact.Leaves:
        """The shape that all worlds share; its rewards are those of a key of its own."""
        env = envs.make("tree", vocab=self.vocab, depth=self.depth)
        return exact.leaves(env, env.sample(jax.random.key(0), jnp.int32(1)), jax.random.key(0))

    def draw(self, key: Key, table: tuple[int, int]) -> dict[str, Array]:
        """reward [count,N], reference [count,nodes,V], of which `table` is the shape of one."""
        env = envs.make("tree", vocab=self.vocab, depth=self.depth)
        key_reward, key_reference = jax.random.split(key)
        tasks = jax.vmap(lambda key: env.sample(key, jnp.int32(1)))(jax.random.split(key_reward, self.count))
        reference = self.spread * jax.random.normal(key_reference, (self.count, *table))
        return {"reward": tasks.reward, "reference": reference}


def table_of(leaves: exact.Leaves) -> tuple[int, int]:
    """Nodes and tokens of a table for these leaves."""
    return int(leaves.node.max()) + 1, int(leaves.tokens.max()) + 1


def penalised(name: str, beta: float = 1.0) -> Row:
    """RLOO with the penalty called `name`: clipped ratios of tokens, gradients summed over a sequence."""
    return compose(
        name, "", advantage="leave_one_out", ratio="token", surrogate="clipped", reduction="sequence_sum",
        kl=PENALTIES[name], hyper={"beta": beta, "eps_low": 0.2, "eps_high": 0.2},
    )


def check_penalties(names: tuple[str, ...]) -> None:
    """ValueError, naming the first name that is none."""
    for name in names:
        if name not in PENALTIES:
            raise ValueError(f"penalties: got {name!r}, expected some of {', '.join(PENALTIES)}")


def sequence_kl(logits: Array, reference: Array, leaves: exact.Leaves) -> Array:
    """[] KL(policy || reference) of whole sequences, in nats."""
    logp = exact.leaf_logp(logits, leaves)
    gap = jnp.sum(logp - exact.leaf_logp(reference, leaves), axis=1)
    return jnp.exp(jnp.sum(logp, axis=1)) @ gap


def regularised(logits: Array, reference: Array, leaves: exact.Leaves, beta: Array) -> Array:
    """[] J - beta KL(policy || reference)."""
    return exact.value(logits, leaves) - beta * sequence_kl(logits, reference, leaves)


def optimum(reference: Array, leaves: exact.Leaves, beta: Array) -> Array:
    """Logits [nodes,V] of the policy that maximises `regularised`: each token's share of the tilted mass behind it."""
    mass = jax.nn.softmax(jnp.sum(exact.leaf_logp(reference, leaves), axis=1) + leaves.reward / beta)
    through = jnp.zeros_like(reference).at[leaves.node, leaves.tokens].add(jnp.where(leaves.mask, mass[:, None], 0.0))
    return jnp.log(jnp.maximum(through, jnp.finfo(through.dtype).tiny))


def with_middle(per_world: Mapping[str, Array]) -> dict[str, Array]:
    """Each metric's median over the worlds, and the worlds' own as NAME_world [worlds]."""
    return {k: jnp.median(x) for k, x in per_world.items()} | {f"{k}_world": x for k, x in per_world.items()}


@dataclass(frozen=True, kw_only=True)
class KlBiasConfig:
    worlds: Worlds = Worlds()
    penalties: tuple[str, ...] = tuple(PENALTIES)
    stride: float = 1.0  # growth of 1 / beta from step to step
    lag: float = 0.0  # the samples' 1 / beta is less by this share: 0 is on-policy

    def __post_init__(self):
        check_penalties(self.penalties)


def make_kl_bias(cfg: KlBiasConfig) -> Program:
    """Step s measures at the policy that is optimal for 1 / beta = s stride: the path that regularised training takes.

    Metrics, their median over worlds and NAME_world: kl, of whole sequences; behind, KL(policy || sampler); for a
    value NAME, summed over a sampled sequence, off_NAME: its mean over the KL, minus 1; sd_NAME: its deviation over
    the KL. For a penalty NAME, by expected gradients of pairs (group 2) without reward or clip, in units of the length
    of the true gradient of the KL:
      pull_NAME   how far the mean update goes along the true one: 1 is right, 0 regularises nothing
      error_NAME  how far the mean update is from the true one: 1 is no better than no penalty
      noise_NAME  deviation of one pair's update
    """
    shape = cfg.worlds.leaves()
    table, rows = table_of(shape), [penalised(name) for name in cfg.penalties]

    def init(key, hyper, start=None):
        drawn = cfg.worlds.draw(key, table)
        return {"params": {"logits": jnp.copy(drawn["reference"])}, "world": drawn, "step": jnp.int32(0), "hyper": hyper}

    def measure(world, tilt, lag):
        leaves, reference = shape._replace(reward=world["reward"]), world["reference"]
        logits, sampler = (optimum(reference, leaves, 1 / x) for x in (tilt, (1 - lag) * tilt))
        distance, true = jax.value_and_grad(sequence_kl)(logits, reference, leaves)
        size = jnp.linalg.norm(true)
        out = {"kl": distance, "behind": sequence_kl(logits, sampler, leaves)}
        logp, ref_logp = exact.leaf_logp(logits, leaves), exact.leaf_logp(reference, leaves)
        prob = exact.leaf_prob(sampler, leaves)
        for name, value in VALUES.items():
            estimate = jnp.sum(value(logp, ref_logp), axis=1)
            mean = prob @ estimate
            out[f"off_{name}"] = safe_div(mean, distance) - 1
            out[f"sd_{name}"] = safe_div(jnp.sqrt(prob @ (estimate - mean) ** 2), distance)
        free = leaves._replace(reward=jnp.zeros_like(leaves.reward))
        for row in rows:
            mean, variance = expected_gradient(
                row, free, logits, 2, behaviour=sampler, reference=reference, eps_low=1e9, eps_high=1e9
            )
            out[f"pull_{row.name}"] = jnp.sum(mean * true) / size**2
            out[f"error_{row.name}"] = jnp.linalg.norm(mean - true) / size
            out[f"noise_{row.name}"] = jnp.sqrt(variance) / size
        return logits, out

    def step(state):
        tilt = (state["step"] + 1) * state["hyper"]["stride"]
        logits, out = jax.vmap(measure, (0, None, None))(state["world"], tilt, state["hyper"]["lag"])
        return {**state, "params": {"logits": logits}, "step": state["step"] + 1}, with_middle(out)

    return Program(init, step, {"stride": cfg.stride, "lag": cfg.lag}, lambda state: state["params"])


@dataclass(frozen=True, kw_only=True)
class KlLearningConfig:
    worlds: Worlds = Worlds()
    penalties: tuple[str, ...] = tuple(PENALTIES)  # share the program; the leaf `row` picks one
    beta: float = 0.2
    weight: float = 1.0  # the penalty in training is weight x beta; 0 is a control
    groups: int = 4  # of an update
    group: int = 8
    epochs: int = 1  # updates per batch
    updates: int = 400  # until the rate, which falls linearly, is 0
    learning_rate: float = 1.0  # plain gradient descent on the logits
    clip: float = 0.2
    draws: int = 0  # another number draws other samples in the same worlds

    def __post_init__(self):
        check_penalties(self.penalties)

    def arm(self, name: str) -> dict[str, float]:
        """The leaves that make this program train with penalty `name`."""
        check_penalties((name,))
        return {"row": float(self.penalties.index(name))}


def make_kl_learning(cfg: KlLearningConfig) -> Program:
    """Each step draws groups x group sequences from the table, which then makes `epochs` updates on them.

    Metrics, exact, their median over worlds and NAME_world: J; kl, of whole sequences; kl_optimum, of the optimum;
    reached: the share of what J - beta KL can rise above the reference's, 1 at the optimum.
    """
    shape = cfg.worlds.leaves()
    table, rows = table_of(shape), [penalised(name, cfg.beta) for name in cfg.penalties]
    size = cfg.groups * cfg.group

    def init(key, hyper, start=None):
        drawn = cfg.worlds.draw(key, table)
        logits = jnp.copy(drawn["reference"]) if start is None else jnp.copy(start["logits"])
        key = jax.random.fold_in(key, hyper["draws"].astype(jnp.int32))
        return {"params": {"logits": logits}, "world": drawn, "key": key, "step": jnp.int32(0), "hyper": hyper}

    def train(logits, world, key, rate, hyper):
        leaves, reference = shape._replace(reward=world["reward"]), world["reference"]
        all_logp = exact.leaf_logp(logits, leaves)
        members = jax.random.categorical(key, jnp.sum(all_logp, axis=1), shape=(size,))
        old_logp, ref_logp = all_logp[members], exact.leaf_logp(reference, leaves)[members]
        constants = {"beta": hyper["weight"] * hyper["beta"], "eps_low": hyper["clip"], "eps_high": hyper["clip"]}
        traj = as_trajectory(leaves, members, leaves.reward[members], old_logp, cfg.group)
        ready = follow(rows, hyper, lambda row: lambda: row.prepare(traj, ref_logp=ref_logp, **constants))

        def loss(logits):
            logp = exact.leaf_logp(logits, leaves)[members]
            return follow(rows, hyper, lambda row: lambda: row.loss(
                logp, old_logp, ready["advantages"], ready["mask"], totals=ready["totals"], ref_logp=ref_logp, **constants
            )[0])

        descend = lambda _, logits: logits - rate * jax.grad(loss)(logits)  # noqa: E731
        return jax.lax.fori_loop(0, hyper["epochs"].astype(jnp.int32), descend, logits)

    def measure(logits, world, beta):
        leaves, reference = shape._replace(reward=world["reward"]), world["reference"]
        target = optimum(reference, leaves, beta)
        start, now, best = (regularised(x, reference, leaves, beta) for x in (reference, logits, target))
        return {
            "J": exact.value(logits, leaves), "kl": sequence_kl(logits, reference, leaves),
            "kl_optimum": sequence_kl(target, reference, leaves), "reached": (now - start) / (best - start),
        }

    def step(state):
        hyper, done = state["hyper"], state["step"].astype(jnp.float32)
        keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), cfg.worlds.count)
        rate = hyper["learning_rate"] * jnp.maximum(0.0, 1 - done * hyper["epochs"] / hyper["updates"])
        logits = jax.vmap(train, (0, 0, 0, None, None))(state["params"]["logits"], state["world"], keys, rate, hyper)
        out = jax.vmap(measure, (0, 0, None))(logits, state["world"], hyper["beta"])
        return {**state, "params": {"logits": logits}, "step": state["step"] + 1}, with_middle(out)

    leaves = ("beta", "weight", "epochs", "updates", "learning_rate", "clip", "draws")
    return Program(init, step, {"row": 0.0, **{name: getattr(cfg, name) for name in leaves}}, lambda state: state["params"])
