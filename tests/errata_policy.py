"""What is often said and what is right of advantages, ratios, rewards and samples: the numbers of jaxpt.errata, computed.

Sums over all outcomes stand for expectations; everything is in 64 bits.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from errata_numbers import noted_in
from scipy.integrate import quad
from scipy.stats import norm

from jaxpt.objectives import lengths, policy, ratios, shaping
from jaxpt.objectives.reduction import totals_of
from jaxpt.objectives.value import gae
from jaxpt.ops import balance, routing
from jaxpt.types import bare_trajectory

COMPUTED = {}  # name of an erratum -> () -> [(said, right)], in the order of its numbers
computes = noted_in(COMPUTED)
ROWS = {row.name: row for table in (policy, lengths) for row in table.ROWS}


# --- advantages and credit


@jax.jit
def group_of_8(reward):
    """Advantages [3,8] of one group: centred, over the standard deviation with n, and with n - 1."""
    tokens, group = jnp.zeros((8, 1), int), jnp.zeros(8, int)
    traj = bare_trajectory(tokens, jnp.ones(tokens.shape, bool), reward=reward, group=group)
    rows = ("dr_grpo", {}), ("grpo_no_kl", {"ddof": 0.0}), ("grpo_no_kl", {"ddof": 1.0})
    return jnp.stack([ROWS[name].prepare(traj, **hyper)["advantages"][:, 0] for name, hyper in rows])


def successes(k):
    return (np.arange(8) < k) * 1.0


@computes("group_std")
def group_std():
    _, over_n, over_less = group_of_8(successes(1))[:, 0]
    np.testing.assert_allclose(over_less * np.std(successes(1), ddof=1), 7 / 8)
    return [(over_n, over_less)]


@computes("standardisation")
def standardisation():
    one, four, six = (np.asarray(group_of_8(successes(k)))[:2] for k in (1, 4, 6))
    for p, got in ((1 / 8, one), (1 / 2, four), (3 / 4, six)):
        np.testing.assert_allclose(got[1, 0], np.sqrt((1 - p) / p))
    small = group_of_8(successes(4) / 100)[:, 0]
    assert small[0] < six[0, 0] and small[1] > six[1, 0]  # not monotone from one prompt to another
    low, high = (group_of_8(np.append(np.array([0, x]), np.ones(6)))[1] for x in (0.1, 0.9))
    assert not np.allclose(low, high)  # nor a matter of ranks
    weights = [x[1, 0] / x[0, 0] for x in (one, four)]
    return [one[:, 0], one[:, -1], four[:, 0], (1.0, weights[0] / weights[1])]


STEPS = 200


@jax.jit
def first_step(rewards, values, T, lam):
    """A of the first of T steps, gamma 1, and its weights on the rewards. -> [], [STEPS]"""
    mask = jnp.arange(STEPS)[None] < T
    return jax.value_and_grad(lambda r: gae(r[None], values[None], mask, 1.0, lam)[0, 0])(rewards)


@computes("gae_variance")
def gae_variance():
    """Without a critic the deltas are the rewards, and A is linear in them."""
    nothing = jnp.zeros(STEPS)
    exact_variance = {T: jnp.sum(first_step(nothing, nothing, T, 0.95)[1] ** 2) for T in (10, 200)}
    for T, variance in exact_variance.items():
        np.testing.assert_allclose(variance, (1 - 0.95 ** (2 * T)) / (1 - 0.95**2))
    return [(T * 0.95**T, variance) for T, variance in exact_variance.items()]


@computes("gae_horizon")
def gae_horizon():
    nothing, reward = jnp.zeros(STEPS), jnp.zeros(STEPS).at[12].set(1.0)
    np.testing.assert_allclose(first_step(nothing, nothing, 13, 1.0)[1][12], 1.0)
    values = jnp.ones(STEPS).at[0].set(0.5)  # 1/2 before the first decision, 1 behind the right one
    for lam in (0.0, 0.5, 1.0):
        np.testing.assert_allclose(first_step(reward, values, 13, lam)[0], 0.5)
    weight = first_step(nothing, nothing, 13, 0.95)[1][12]
    return [(None, weight), tuple(first_step(reward, critic, 13, 0.0)[0] for critic in (nothing, values))]


@computes("length_weight")
def length_weight():
    """Push on a token of a response of 100 tokens over one of 10, both of one advantage."""
    mask = jnp.arange(100)[None] < jnp.array([[10], [100]])

    @jax.jit
    def pushes(advantage):
        zero = jnp.zeros(mask.shape)

        def push(row):
            def loss(logp):
                return row.loss(logp, zero, zero + advantage, mask, totals=totals_of(mask))[0]

            return -jax.grad(loss)(zero)[:, 0]

        return [push(ROWS[name]) for name in ("dapo", "grpo_no_kl")]

    (by_token, wrong), (_, right) = pushes(-1.0), pushes(1.0)
    assert (wrong < 0).all() and (right > 0).all()
    wrong, right = wrong[1] / wrong[0], right[1] / right[0]
    return [(by_token[1] / by_token[0], wrong), (right, right)]


# --- ratios and clips


@jax.jit
def objective(logp, old_logp, advantage, eps_low, eps_high):
    """The clipped objective of one token, and its derivative by logp."""
    mask = jnp.ones((1, 1), bool)

    def value(logp):
        logp_, old, worth = (jnp.full((1, 1), x) for x in (logp, old_logp, advantage))
        clip = {"eps_low": eps_low, "eps_high": eps_high}
        return -ROWS["dapo"].loss(logp_, old, worth, mask, totals=totals_of(mask), **clip)[0]

    return jax.value_and_grad(value)(logp)


CLIP = 0.2, 0.2


@computes("ppo_bounds_ratio")
def ppo_bounds_ratio():
    old = jnp.log(jnp.array([0.1, 0.3, 0.6]))

    def push(logits):
        logp, pull = jax.vjp(lambda x: jax.nn.log_softmax(x)[0], logits)
        return pull(objective(logp, old[0], 1.0, *CLIP)[1])[0]

    stepped = old + 2.0 * push(old)
    assert not jnp.any(push(stepped))  # beyond the clip nothing pushes on, and nothing pulls back
    above = [objective(jnp.log(2.0), 0.0, sign, *CLIP)[1] for sign in (1.0, -1.0)]
    return [(1 + CLIP[1], jnp.exp(jax.nn.log_softmax(stepped)[0] - old[0])), above]


@computes("dapo_clip")
def dapo_clip():
    paper = ROWS["dapo"].hyper
    assert (paper["eps_low"], paper["eps_high"]) == (0.2, 0.28)
    one_sided, two_sided = (objective(jnp.log(0.5), 0.0, -1.0, low, paper["eps_high"]) for low in (1.0, 0.2))
    return list(zip(one_sided, two_sided))


@computes("clip_higher")
def clip_higher():
    def held_back(p):
        """The least probability at which a token of A = 1 is not pushed up, on a grid; p before."""
        grid = p * jnp.arange(1.1, 1.3, 1e-5)
        pushes = jax.vmap(lambda now: objective(jnp.log(now), jnp.log(p), 1.0, *CLIP)[1])(grid)
        return grid[jnp.argmin(pushes)]

    at = jnp.log(1.1)
    if_the_clip_saw_the_reward = jax.grad(lambda logp: jnp.minimum(100.0 * jnp.exp(logp), 1 + CLIP[1]))
    first = if_the_clip_saw_the_reward(at), objective(at, 0.0, 100.0, *CLIP)[1]
    return [first, (None, held_back(0.01)), (None, held_back(0.8))]


@computes("gspo_ratio")
def gspo_ratio():
    """Independent log-ratios sum to a deviation of 0.05 sqrt(1000): an end of that range, spread evenly."""
    n = 1000
    mask = jnp.ones((1, n), bool)

    def of_both(log_ratio):
        logp = jnp.full((1, n), log_ratio)
        of = ratios.token_ratio, ratios.sequence_ratio
        token, sequence = (ratio(logp, jnp.zeros_like(logp), mask)[0] for ratio in of)
        return jnp.prod(token), sequence[0]

    end = norm.ppf(0.975) * 0.05 / math.sqrt(n)
    mean, low, high = of_both(0.001), of_both(-end), of_both(end)
    bounds = np.log1p([-ROWS["gspo"].hyper["eps_low"], ROWS["gspo"].hyper["eps_high"]])
    np.testing.assert_allclose(np.expm1(bounds), [-3e-4, 4e-4])
    unclipped = [np.diff(norm.cdf(bounds, scale=0.05 * n**power))[0] for power in (0.5, -0.5)]
    assert unclipped[0] < 1e-3 < 0.1 < unclipped[1]
    return [mean, low, high]


# --- rewards and samples


@computes("soft_overlong")
def soft_overlong():
    length = jnp.array([18432.0, 16384.0, 30000.0])
    punished = -1.0 + ROWS["soft_overlong"].loss(length, jnp.full(3, -1.0), max_length=20480.0, buffer=4096.0)
    np.testing.assert_allclose(punished[1:], [-1.0, -2.0])
    return [(-1.0 * 0.5**2, punished[0])]


@computes("dynamic_sampling")
def dynamic_sampling():
    reward, group = jnp.concatenate([successes(k) for k in range(9)]), jnp.repeat(jnp.arange(9), 8)
    share = np.arange(9) / 8
    return [(np.sum((share >= 0.2) & (share <= 0.8)), shaping.has_signal(reward, group)[::8].sum())]


@computes("length_reward")
def length_reward():
    length, reward, target = jnp.array([2500.0, 500.0]), jnp.array([1.0, 0.0]), jnp.full(2, 500.0)
    totals = {
        name: reward + ROWS[name].loss(length, reward, target, lam=lam)
        for name, lam in (("length_quadratic", 1e-6), ("lcpo_exact", 3e-4))
    }
    assert all(wrong == 0 for _, wrong in totals.values())
    return [tuple(correct for correct, _ in totals.values())]


@computes("best_of_n")
def best_of_n():
    def mean(n):
        return quad(lambda x: x * n * norm.pdf(x) * norm.cdf(x) ** (n - 1), -12, 12, limit=400)[0]

    assert norm.ppf(1 - 1 / 1) == -math.inf and abs(mean(1)) < 1e-9
    assert all(abs(norm.ppf((n - 0.375) / (n + 0.25)) - mean(n)) < 0.03 for n in (1, 2, 4, 8, 64, 1024))
    for n, p in ((1, 0.1), (3, 0.1), (3, 0.6)):  # a verifier: all outcomes of n attempts
        tries = np.array(list(itertools.product((0, 1), repeat=n)))
        chance = np.prod(np.where(tries, p, 1 - p), axis=1)
        np.testing.assert_allclose(chance @ tries.max(1), 1 - (1 - p) ** n)
    return [(norm.ppf(1 - 1 / n), mean(n)) for n in (2, 8, 64, 1024)]


@computes("balance_loss_minimum")
def balance_loss_minimum():
    even = jnp.full((4, 2), 0.5), jnp.arange(4)[:, None] % 2
    probs = jnp.array([[0.51, 0.49]] * 9 + [[0.0, 1.0]])
    return [(balance.balance_loss(*even), balance.balance_loss(probs, routing.choose(probs, 1)))]
