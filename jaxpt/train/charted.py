"""The exact twin of a policy program on an environment with few states: a table of logits on its chart.

Episodes are drawn and go through the same rows and the same channels as in a real run (train.paths), but what the policy
earns and does is computed without sampling error. Every seed runs `replicas` independent tables at once.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxpt.envs.chart import Chart, Walks, chart, expected, steps_logp, walk
from jaxpt.envs.protocol import POLICY, Environment, Task
from jaxpt.objectives import get
from jaxpt.objectives.shaping import has_signal
from jaxpt.ops.masked import keep
from jaxpt.train import paths
from jaxpt.train.common import EnvConfig, means, when_due
from jaxpt.train.program import Program
from jaxpt.train.rows import arm, check_rows, follow, leaves, own
from jaxpt.types import Array, Trajectory

DRAWS = 512  # of the oracle at every node, from which its habits are read


@dataclass(frozen=True, kw_only=True)
class ChartedConfig:
    env: EnvConfig
    path: paths.PathConfig
    world: int = 0  # seed of the task, at the highest level; the same for every run, so that only sampling varies
    style: str  # of the oracle, whose habits the table begins with
    explore: float = 0.05  # share of the start that is uniform over all tokens
    objectives: tuple[str, ...] = ("dr_grpo",)  # rows that share the program; the leaf `row` picks one
    prompts: int = 8  # groups per update
    group: int = 8
    epochs: int = 1  # updates per batch
    every: int = 10  # updates between two exact evaluations
    learning_rate: float = 0.1  # of Adam
    replicas: int = 4

    def __post_init__(self):
        check_rows(self.objectives, ("logp", "entropy", "prompt_tokens"))
        spec = self.env.make().spec
        self.path.check(spec)
        if self.style not in spec.styles:
            raise ValueError(f"style: got {self.style!r}, expected one of {', '.join(spec.styles)}")

    def arm(self, name: str) -> dict[str, float]:
        """The leaves that make this program follow row `name` with its own constants."""
        return arm(self.objectives, name, self.env.make().spec)


def habits(env: Environment, task: Task, of: Chart, style: int, explore: float) -> Array:
    """[N,V] log-probabilities of the oracle's tokens at every node, from DRAWS of them, mixed with uniform ones."""
    keys = jax.random.split(jax.random.key(0), DRAWS)

    def one(state):
        said = jax.vmap(lambda key: env.oracle(task, state, key, jnp.int32(style)))(keys)
        return jnp.zeros(env.spec.vocab).at[said].add(1 / DRAWS)

    share = jax.lax.map(one, of.state, batch_size=256)
    anything = (jnp.arange(env.spec.vocab) > 0) / (env.spec.vocab - 1)
    return jnp.log((1 - explore) * share + explore * anything[None] + 1e-30)


def make_charted(cfg: ChartedConfig) -> Program:
    """Each step: prompts x group episodes of one task, `epochs` updates of the table.

    sampled_NAME are metrics of train.paths, of the episodes drawn. Every `every` updates, exactly: reward, gold, decisions,
    violations and count_NAME of every event, as means over replicas and, with _replica behind the name, of each.
    """
    env, rows = cfg.env.make(), [get(name) for name in cfg.objectives]
    spec, size = env.spec, cfg.prompts * cfg.group
    task = env.sample(jax.random.key(cfg.world), jnp.int32(cfg.env.levels[1]))
    of = chart(env, task, jax.random.key(0))
    start_logits = habits(env, task, of, spec.styles.index(cfg.style), cfg.explore)
    shows = cfg.path.demonstrator is not None
    shown = habits(env, task, of, spec.styles.index(cfg.path.demonstrator), 0.0) if shows else None
    adam = optax.scale_by_adam(b2=0.99)

    def init(key, hyper, start=None):
        logits = jnp.tile(start_logits[None], (cfg.replicas, 1, 1)) if start is None else jnp.copy(start)
        return {"logits": logits, "opt": jax.vmap(adam.init)(logits), "key": key, "step": jnp.int32(0), "hyper": hyper}

    def draw(logp, key, rows):
        return jax.vmap(lambda key: walk(of, logp, key, spec.response_len))(jax.random.split(key, rows))

    def seat(traj, node, logp, key, taken):
        """The batch and its nodes with demonstrations in their seats, and which rows these are."""
        if not shows:
            return traj, node, jnp.zeros(size, bool)
        where = paths.seats(size, cfg.group, taken)
        walks = draw(steps_logp(of, shown), key, cfg.prompts)
        node = jnp.where(where[:, None], jnp.repeat(walks.node, cfg.group, axis=0), node)
        return paths.seated(traj, as_trajectory(of, walks, logp, 1), where, cfg.group), node, where

    def one(logits, opt, key, step, hyper):
        key_walk, key_shown = jax.random.split(key)
        logp = steps_logp(of, logits)
        walks = draw(logp, key_walk, size)
        traj = as_trajectory(of, walks, logp, cfg.group)
        silent = jnp.sum(1.0 - has_signal(traj.reward, traj.group))
        metrics = {**paths.path_metrics(cfg.path, spec, traj), "no_signal": (silent, jnp.float32(size))}
        traj, node, where = seat(traj, walks.node, logp, key_shown, hyper.get("demonstrated"))
        guided, further = paths.guided(cfg.path, spec, hyper, step, traj, where, cfg.group)
        ready = follow(rows, hyper, lambda row: lambda: row.prepare(guided, **own(row, hyper)))
        advantages = ready["advantages"] + keep(further, ready["mask"])

        def loss(logits):
            at = steps_logp(of, logits)[node]
            logp = keep(jnp.take_along_axis(at, traj.tokens[:, :, None], axis=2)[:, :, 0], traj.mask)
            taken = at > -jnp.inf
            entropy = -jnp.sum(jnp.where(taken, jnp.exp(at) * jnp.where(taken, at, 0.0), 0.0), axis=-1)
            run = lambda row: lambda: row.loss(  # noqa: E731
                logp, traj.old_logp, advantages, ready["mask"], totals=ready["totals"], entropy=entropy,
                prompt_tokens=ready["prompt_tokens"], **own(row, hyper),
            )[0]
            return follow(rows, hyper, run)

        def descend(carry, _):
            logits, opt = carry
            updates, opt = adam.update(jax.grad(loss)(logits), opt)
            return (logits - hyper["learning_rate"] * updates, opt), None

        (logits, opt), _ = jax.lax.scan(descend, (logits, opt), length=cfg.epochs)
        return logits, opt, metrics

    def exactly(logits):
        got = jax.lax.map(lambda table: expected(of, table, spec.response_len), logits)
        at = {name: got.events[:, spec.signals.index(name)] for name in cfg.path.events}
        bad = [x for name, x in at.items() if cfg.path.events[name] < 0]
        return {"reward": got.reward, "gold": got.gold, "decisions": got.decisions,
                "violations": sum(bad, jnp.zeros_like(got.reward)), **{f"count_{name}": x for name, x in at.items()}}

    def step(state):
        keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), cfg.replicas)
        logits, opt, metrics = jax.vmap(one, (0, 0, 0, None, None))(
            state["logits"], state["opt"], keys, state["step"], state["hyper"]
        )
        done = state["step"] + 1
        sampled = means(jax.tree.map(jnp.sum, metrics))
        exact = when_due(done, cfg.every, lambda: exactly(logits))
        out = {name: jnp.mean(x) for name, x in exact.items()} | {f"{name}_replica": x for name, x in exact.items()}
        return {**state, "logits": logits, "opt": opt, "step": done}, {**out, **{f"sampled_{k}": x for k, x in sampled.items()}}

    hyper = {"learning_rate": cfg.learning_rate, **leaves(cfg.objectives, spec), **cfg.path.leaves()}
    return Program(init, step, hyper, lambda state: state["logits"])


def as_trajectory(of: Chart, walks: Walks, logp: Array, group: int) -> Trajectory:
    """Walks as a batch; rows k * group ... (k + 1) * group - 1 are a group. There is no prompt: the first decision
    stands at index 0, which no row of the algebra minds."""
    mask = walks.mask
    begins = mask & ~jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))
    size, reward = mask.shape[0], of.reward[walks.last]
    return Trajectory(
        tokens=walks.tokens, mask=mask, old_logp=keep(logp[walks.node, walks.tokens], mask),
        turn=jnp.where(mask, jnp.cumsum(begins, axis=1) - 1, 0), signals=walks.events, reward=reward,
        gold=of.gold[walks.last], parts=jnp.zeros((size, 0)), truncated=of.asked[walks.last] == POLICY,
        group=jnp.arange(size) // group, length=jnp.full(size, mask.shape[1], jnp.int32),
    )
