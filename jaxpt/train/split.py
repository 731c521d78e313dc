"""How a batch of a fixed number of samples is best split: many prompts with few samples each, or the reverse.

Two twins. In closed form (`make_split_noise`): the noise of a row's gradient at prompts with K answers, one of them
right with probability p and the wrong ones equally likely, for every size of group. By sampling (`make_split`): M
prompts with features x, answers drawn from softmax(x theta), right the one that a teacher's theta* ranks first; what
is learned of one prompt helps and disturbs the others, every learning rate of a grid is tried at once, and expected
reward is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpt import envs
from jaxpt.objectives import get
from jaxpt.objectives.row import Row
from jaxpt.train.program import Program
from jaxpt.train.rows import arm, check_rows, follow, leaves, own
from jaxpt.types import Array, Trajectory, bare_trajectory

ONE_TOKEN = envs.make("bandit").spec


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    objectives: tuple[str, ...] = ("rloo", "grpo_no_kl")  # rows that share the program, without KL, entropy or critic
    prompts: int = 256  # M
    features: int = 16  # of a prompt
    answers: int = 20  # K
    samples: int = 64  # of one batch: samples / group prompts, `group` samples of each
    group: int = 8  # G, a leaf
    knowledge: float = 0.0  # a leaf: theta at the start is so many times the teacher's; 0 succeeds with probability 1/K
    rates: Sequence[float] = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)  # of gradient descent; each trains tables of its own
    replicas: int = 8

    def __post_init__(self):
        check_rows(self.objectives, ("logp",))
        if not 1 <= self.samples <= self.prompts * self.group:
            raise ValueError(f"samples: got {self.samples}, expected at most prompts x group = {self.prompts * self.group}")

    def arm(self, name: str) -> dict[str, float]:
        """The leaves that make this program follow row `name` with its own constants."""
        return arm(self.objectives, name, ONE_TOKEN)


def weights(row: Row, traj: Trajectory, **hyper: float) -> Array:
    """[B]: what each sample's score is multiplied by in the row's update, on-policy; one token a row."""
    ready = row.prepare(traj, **hyper)

    def loss(logp):
        return row.loss(logp, traj.old_logp, ready["advantages"], ready["mask"], totals=ready["totals"], **hyper)[0]

    return -jax.grad(loss)(traj.old_logp)[:, 0]


def group_moments(row: Row, group: Array, success: Array, answers: int, limit: int, **hyper: float) -> tuple[Array, Array]:
    """|mean|^2 and variance of the row's update from one group of `group` <= `limit` samples of one prompt.

    With k right answers of G the update is a sum of scores s = e_answer - policy, whose moments given right or
    wrong are closed forms; a k is drawn with its binomial probability.
    """
    p, q, K = success, 1 - success, answers
    right = q**2 * K / (K - 1)  # |E[s | right]|^2; E[s | wrong] is -p / q times that vector
    wrong_square = 1 - 2 * q / (K - 1) + p**2 + q**2 / (K - 1)
    wrong_variance = wrong_square - (p / q) ** 2 * right
    member = jnp.arange(limit)

    def given(k: Array) -> tuple[Array, Array, Array]:
        traj = bare_trajectory(
            jnp.zeros((limit, 1), jnp.int32), (member < group)[:, None], reward=(member < k).astype(jnp.float32),
            group=jnp.where(member < group, 0, member + 1),
        )
        w = weights(row, traj, **hyper)
        of_right, of_wrong = jnp.sum(jnp.where(member < k, w, 0)), jnp.sum(jnp.where(member < k, 0, w))
        wrongs = jnp.sum(jnp.where(member < k, 0, w**2))
        return of_right - p / q * of_wrong, wrongs, _log_binomial(group, k) + k * jnp.log(p) + (group - k) * jnp.log(q)

    k = jnp.arange(limit + 1)
    along, wrongs, log_chance = jax.vmap(given)(k)
    chance = jnp.where(k <= group, jnp.exp(log_chance), 0.0)
    mean = chance @ along
    return mean**2 * right, chance @ (along - mean) ** 2 * right + chance @ wrongs * wrong_variance


def _log_binomial(n: Array, k: Array) -> Array:
    k = jnp.minimum(k, n)
    ln = jax.lax.lgamma
    n, k = n.astype(jnp.float32), k.astype(jnp.float32)
    return ln(n + 1) - ln(k + 1) - ln(n - k + 1)


def make_split_noise(cfg: SplitConfig) -> Program:
    """Step i: groups of G = 2^(i + 1), up to cfg.samples. Exact and the same for every key.

    Metrics: log2_group; and for every row, samples_NAME: the samples of a batch whose update has a signal-to-noise
    ratio of one, G (variance + (1 - alike) |mean|^2) / |mean|^2. The variance is within a prompt; the second
    term is between prompts, whose updates have nothing in common (the leaf alike = 0) or everything (1).
    """
    rows = [get(name) for name in cfg.objectives]

    def init(key, hyper, start=None):
        return {"step": jnp.int32(0), "hyper": hyper}

    def step(state):
        hyper, group = state["hyper"], 2 ** (state["step"] + 1)
        out = {"log2_group": (state["step"] + 1).astype(jnp.float32)}
        for row in rows:
            signal, noise = group_moments(row, group, hyper["success"], cfg.answers, cfg.samples, **row.hyper)
            out[f"samples_{row.name}"] = group * (noise + (1 - hyper["alike"]) * signal) / signal
        return {**state, "step": state["step"] + 1}, out

    return Program(init, step, {"success": 0.05, "alike": 0.0}, lambda state: {})


def make_split(cfg: SplitConfig) -> Program:
    """Each step: samples / G prompts without replacement, G answers to each, one step of gradient descent.

    Prompts' features are random directions, teachers are normal, both drawn from the run's key for each replica.
    Metrics: J [rates], the expected reward over all prompts, and J_best, that of the rate that is best by now.
    """
    rows, rates = [get(name) for name in cfg.objectives], jnp.asarray(cfg.rates)

    def world(key):
        key_feature, key_teacher = jax.random.split(key)
        x = jax.random.normal(key_feature, (cfg.prompts, cfg.features))
        teacher = jax.random.normal(key_teacher, (cfg.features, cfg.answers))
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        return {"x": x, "teacher": teacher, "right": jnp.argmax(x @ teacher, axis=1)}

    def init(key, hyper, start=None):
        worlds = jax.vmap(world)(jax.random.split(key, cfg.replicas))
        theta = hyper["knowledge"] * worlds["teacher"]
        theta = jnp.broadcast_to(theta, (len(cfg.rates), *theta.shape))
        return {"theta": theta, "worlds": worlds, "key": key, "step": jnp.int32(0), "hyper": hyper}

    def learn(theta, world, key, rate, hyper):
        key_prompt, key_answer = jax.random.split(key)
        group = jnp.arange(cfg.samples) // hyper["group"].astype(jnp.int32)
        prompt = jax.random.permutation(key_prompt, cfg.prompts)[group]
        x = world["x"][prompt]
        logp = jax.nn.log_softmax(x @ theta)
        answer = jax.random.categorical(key_answer, logp)
        traj = bare_trajectory(
            answer[:, None], jnp.ones((cfg.samples, 1), bool), reward=(answer == world["right"][prompt]).astype(jnp.float32),
            group=group, old_logp=jnp.take_along_axis(logp, answer[:, None], axis=1),
        )
        weight = follow(rows, hyper, lambda row: lambda: weights(row, traj, **own(row, hyper)))
        score = jax.nn.one_hot(answer, cfg.answers) - jnp.exp(logp)
        return theta + rate * x.T @ (weight[:, None] * score)

    def value(theta, world):
        return jnp.mean(jnp.take_along_axis(jax.nn.softmax(world["x"] @ theta), world["right"][:, None], axis=1))

    def step(state):
        keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), cfg.replicas)
        each = jax.vmap(jax.vmap(learn, (0, 0, 0, None, None)), (0, None, None, 0, None))
        theta = each(state["theta"], state["worlds"], keys, rates, state["hyper"])
        J = jnp.mean(jax.vmap(jax.vmap(value), (0, None))(theta, state["worlds"]), axis=1)
        return {**state, "theta": theta, "step": state["step"] + 1}, {"J": J, "J_best": jnp.max(J)}

    hyper = {**leaves(cfg.objectives, ONE_TOKEN), "knowledge": cfg.knowledge, "group": float(cfg.group)}
    return Program(init, step, hyper, lambda state: {"theta": state["theta"]})
