"""Small settings in which every batch can be listed, with what the tests of expected gradients need, in numpy."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.envs import exact
from jaxpt.envs.bandit import bandit
from jaxpt.envs.tree import tree
from jaxpt.objectives import ROWS
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.train.expected import expected_gradient

NODES, V, N, T = 3, 9, 7, 3  # every setting is padded to one shape
ENVS = {"bandit": bandit(arms=7), "tree": tree(vocab=3, depth=2), "observed": tree(vocab=3, depth=2, observe=(1,))}
BETA, MAX_LENGTH, ENTROPY = 0.5, 7.0, 0.1
OPEN = {"eps_low": 1e9, "eps_high": 1e9}
SUM = dict(reduction="sequence_sum", ratio="none", surrogate="score")


def pulled(*penalty, **more):
    advantage = {"advantage": "monte_carlo"} | more
    return compose("", "", kl=Penalty(*penalty), **SUM, **advantage, hyper={"beta": BETA} | ({"gamma": 1.0} if more else {}))


GAE = compose(
    "", "", advantage="gae", **SUM, hyper={"gamma": 1.0, "lam": 1.0, "bootstrap": 0.0, "value_clip": 0.2}
)
FOLLOWED = (  # rows of which what they follow is written down; the loss of any other row is one of these, or has a test
    "sft", "reinforce", "rloo", "raft", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "grpo", "grpo_no_kl",
    "dr_grpo", "dapo", "dapo_sequence_mean", "gspo", "gspo_token",
)
CASES = {  # name -> (row, constants)
    **{name: (ROWS[name], {}) for name in FOLLOWED},
    "dr_grpo": (ROWS["dr_grpo"], {"max_length": MAX_LENGTH}),
    "ppo": (ROWS["ppo"], {"entropy_coef": ENTROPY, "beta": BETA, "gamma": 0.9}),
    "reinforce_plus_plus": (ROWS["reinforce_plus_plus"], {"beta": BETA}),
    "grpo_no_std": (compose("", "", advantage="centred", ratio="none", surrogate="score", reduction="sequence_mean"), {}),
    "grpo_no_length": (
        compose("", "", advantage="standardised", **SUM, hyper={"std_eps": 0.0, "ddof": 1.0}), {}
    ),
    "importance": (
        compose("", "", advantage="leave_one_out", ratio="token", surrogate="clipped", reduction="sequence_sum", hyper=OPEN), {}
    ),
    "gae_0": (GAE, {"lam": 0.0}), "gae_1": (GAE, {"lam": 1.0}),
    "k1": (pulled("k1"), {}), "k2": (pulled("k2"), {}), "k3": (pulled("k3"), {}),
    "k3_as_k2": (pulled("k3", "k2"), {}), "k1_score": (pulled("k1", "score"), {}),
    "k3_importance": (pulled("k3", "importance"), {}),
    "corrected": (
        compose("", "", advantage="monte_carlo", correction="sequence_truncated", **SUM, hyper={"is_high": 1e9}), {}
    ),
    "corrected_tokens": (
        compose("", "", advantage="monte_carlo", correction="token_truncated", **SUM, hyper={"is_high": 1e9}), {}
    ),
    "soft": (compose("", "", advantage="monte_carlo", entropy="reward", **SUM, hyper={"entropy_coef": ENTROPY}), {}),
    "k1_in_reward": (pulled("k1", "own", "reward"), {}),
    "k1_in_token_rewards": (pulled("k1", "own", "reward", advantage="returns"), {}),
}

ALL = (*FOLLOWED, "grpo_no_std", "grpo_no_length")  # compiled together, for groups of three
PAIR_NAMES = ("reinforce", "rloo", "dr_grpo", "importance")  # for groups of two
PART_NAMES = (  # for single rows
    "reinforce", "rloo", "gae_0", "gae_1", "k1", "k2", "k3", "k3_as_k2", "k1_score", "k3_importance", "k1_in_reward",
    "k1_in_token_rewards", "corrected", "corrected_tokens", "soft",
)


@partial(jax.jit, static_argnums=(0, 1, 2))
def moments(names, group, groups, leaves, logits, behaviour, reference, values):
    def one(row, hyper):
        return expected_gradient(
            row, leaves, logits, group, groups=groups, behaviour=behaviour, reference=reference, values=values, **hyper
        )

    return {name: one(*CASES[name]) for name in names}


class Setting:
    """Leaves of one task, random tables, and in numpy: table pi [NODES,V], p [N] and d log pi(token) / d logits
    [N,T,NODES,V] of every decision."""

    def __init__(self, name):
        env = ENVS[name]
        leaves = exact.leaves(env, env.sample(jax.random.key(7), 1), jax.random.key(0))
        pad = lambda x: jnp.pad(x, ((0, 0), (0, T - x.shape[1])))  # noqa: E731
        reward = np.round(np.asarray(leaves.reward, np.float64) * 4) / 4  # some are equal
        self.leaves = leaves._replace(
            tokens=pad(leaves.tokens), mask=pad(leaves.mask), node=pad(leaves.node), reward=jnp.asarray(reward)
        )
        self.tokens, self.mask, self.node = (np.asarray(x) for x in self.leaves[:3])
        self.reward, self.length = reward, self.mask.sum(1)
        rng = np.random.default_rng(1)
        self.logits, self.behaviour, self.reference = rng.normal(size=(3, NODES, V))
        self.values = rng.normal(size=NODES)
        self.legal = np.zeros((NODES, V), bool)
        self.legal[self.node[self.mask], self.tokens[self.mask]] = True
        self.pi, self.mu, self.ref = (self.softmax(x) for x in (self.logits, self.behaviour, self.reference))
        self.score = np.zeros((N, T, NODES, V))
        for leaf, t in np.argwhere(self.mask):
            k = self.node[leaf, t]
            self.score[leaf, t, k] = -self.pi[k]
            self.score[leaf, t, k, self.tokens[leaf, t]] += 1
        self.p, self.l = self.prob(self.pi), self.logp(self.pi)
        self.f, self.o = self.logp(self.ref), self.logp(self.mu)

    def softmax(self, table):
        e = np.where(self.legal, np.exp(table), 0)
        return e / np.maximum(e.sum(1, keepdims=True), 1e-300)

    def logp(self, pi):
        return np.where(self.mask, np.log(np.maximum(pi[self.node, self.tokens], 1e-300)), 0)

    def prob(self, pi):
        return np.exp(self.logp(pi).sum(1))

    def along(self, weights, p=None):
        """sum over leaves and decisions of p x weights x score; weights [N] or [N,T]."""
        weights = np.broadcast_to(weights.reshape(N, -1), (N, T)) * self.mask
        return np.einsum("n,nt,ntkv->kv", self.p if p is None else p, weights, self.score)

    def visits(self, pi):
        """[NODES] probability that each node is passed."""
        out = np.zeros(NODES)
        for leaf, t in np.argwhere(self.mask):
            out[self.node[leaf, t]] += self.prob(pi)[leaf]
        return out

    def state_pull(self, visits, weight):
        """sum_s visits(s) sum_a weight(s,a) grad log pi(a|s), by softmax algebra: weight - pi sum(weight)."""
        return visits[:, None] * (weight - self.pi * weight.sum(1, keepdims=True)) * self.legal

    def moments(self, names, group=1, groups=1, behaviour=None, reference=None, values=None, leaves=None):
        given = (self.logits if x is None else x for x in (behaviour, reference))
        values = self.values if values is None else values
        args = (self.leaves if leaves is None else leaves, self.logits, *given, values)
        return jax.device_get(moments(names, group, groups, *jax.tree.map(jnp.asarray, args)))

    def means(self, *args, **kwargs):
        return {name: got.mean for name, got in self.moments(*args, **kwargs).items()}


@cache
def setting(name):
    """Called in 64 bits."""
    return Setting(name)


def kl_pulls(s, visits):
    """[NODES,V] gradients, by softmax algebra, of the KL of each state: KL(pi || ref) and KL(ref || pi)."""
    log = np.log(np.where(s.legal, s.pi, 1)) - np.log(np.where(s.legal, s.ref, 1))
    return s.state_pull(visits, s.pi * log), visits[:, None] * (s.pi - s.ref) * s.legal


def off(g, true):
    """How far g points away from `true`: the sine of the angle between them."""
    g, true = g.ravel(), true.ravel()
    return float(np.linalg.norm(g - (g @ true) / (true @ true) * true) / np.linalg.norm(g))
