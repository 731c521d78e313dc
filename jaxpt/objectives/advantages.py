"""Advantages of whole episodes, [B] -> [B], from the rewards of a group (rows with one value of `group`).

One contract for all that read rewards: a reward that is not finite is missing; its row gets 0 and takes no
part in its group's baseline (it still counts in the totals of a reduction, as a token or row of loss 0).
A group without signal (one scored member, or rewards equal up to float rounding) gets exactly 0 from all that
compare members; `constant`, `monte_carlo`, `above_baseline` and `exponential` compare a row with something else
and say what they give. Arithmetic is float32 (float64 stays), centred on a member of the group before any mean,
so equal rewards give exact zeros at any size and any value.

rewards [B]; group [B] int labels, in any order, or (where no function says otherwise) a tuple of keys [B] that are
the label together.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.ops.masked import at_least_float32, group_extreme, group_sum, keep, safe_div, sorted_groups
from jaxpt.types import Array

Group = Array | tuple[Array, ...]


class Standing(NamedTuple):
    """Where rewards stand in their groups, all [B]. r_i - mean r = place x spread, both 0 without signal."""

    place: Array  # u - mean u, u in [0,1] the reward's place in the group's range
    spread: Array  # the range
    mean: Array  # of the group's rewards; 0 where the row is not scored
    n: Array  # scored members
    signal: Array  # bool: scored, and the group's rewards differ by more than float rounding
    total: Callable[[Array], Array]  # sums over the group's scored members


def standing(rewards: Array, group: Group) -> Standing:
    rewards = at_least_float32(rewards)
    scored = jnp.isfinite(rewards)
    if isinstance(group, tuple):
        sum_of, extreme_of = sorted_groups(group)
    else:
        sum_of, extreme_of = (lambda x, m: group_sum(x, group, m)), (lambda x, m: group_extreme(x, group, m))
    low, high = extreme_of(rewards, scored)
    n = sum_of(jnp.ones_like(rewards), scored)
    signal = scored & (n > 1) & (high - low > _rounding(low, high))
    spread, low = keep(high - low, signal), keep(low, scored)
    u = safe_div(keep(rewards - low, signal), spread)
    mean_u = safe_div(sum_of(u, scored), n)
    return Standing(
        keep(u - mean_u, signal), spread, keep(low + mean_u * spread, scored), n, signal, lambda x: sum_of(x, scored)
    )


def constant(rewards: Array, group: Group) -> Array:
    """A = 1: every kept token is to be repeated, scored or not. Maximum likelihood as a policy gradient."""
    return jnp.ones_like(at_least_float32(rewards))


def monte_carlo(rewards: Array, group: Group) -> Array:
    """A_i = r_i: no baseline (Williams 1992)."""
    rewards = at_least_float32(rewards)
    return keep(rewards, jnp.isfinite(rewards))


def above_baseline(rewards: Array, group: Group, *, baseline: Array) -> Array:
    """A_i = r_i - b_i, b_i a reward that does not depend on the sample, such as the greedy answer's (Li et al. 2023,
    arXiv 2310.10505, section 4). baseline [B]; where it is not finite, the row gets 0."""
    rewards, baseline = at_least_float32(rewards), at_least_float32(baseline)
    scored = jnp.isfinite(rewards) & jnp.isfinite(baseline)
    return keep(rewards, scored) - keep(baseline, scored)


def centred(rewards: Array, group: Group) -> Array:
    """A_i = r_i - mean of the group, the row itself included (Liu et al. 2025, arXiv 2503.20783, section 3.2)."""
    at = standing(rewards, group)
    return at.place * at.spread


def leave_one_out(rewards: Array, group: Group) -> Array:
    """A_i = r_i - mean of the other members' rewards (Kool et al. 2019; Ahmadian et al. 2024, eq. 8).

    Equal to n / (n - 1) times the centred reward; the baseline does not depend on r_i.
    """
    at = standing(rewards, group)
    return at.place * at.spread * safe_div(at.n, at.n - 1)


def standardised(rewards: Array, group: Group, *, std_eps: float = 0.0, ddof: float = 1.0) -> Array:
    """A_i = (r_i - mean) / (std + std_eps) over the group (Shao et al. 2024, section 4.1.2).

    The paper leaves std's degrees of freedom open and names no eps; TRL, verl, OpenRLHF and Tunix all divide
    by n - 1. std_eps is in the units of the reward; 0 makes the result exactly invariant to affine maps.
    """
    at = standing(rewards, group)
    variance = safe_div(at.total(at.place**2), jnp.maximum(at.n - ddof, 0.0))
    std = jnp.sqrt(jnp.where(variance > 0, variance, 1.0))
    return safe_div(at.place * at.spread, std * at.spread + std_eps)


def standardised_parts(
    rewards: Array, group: Group, *, parts: Array, std_eps: float = 0.0, ddof: float = 1.0
) -> Array:
    """A_i = sum over parts of the reward of each part standardised on its own (Liu et al. 2026, arXiv 2601.05242,
    section 3), so that sums that coincide do not make their parts coincide.

    parts [B,Q]. The reward itself is not read, but where it or a part is not finite the row is missing.
    """
    parts = at_least_float32(parts)
    scored = jnp.isfinite(rewards) & jnp.all(jnp.isfinite(parts), axis=1)
    each = jax.vmap(lambda part: standardised(jnp.where(scored, part, jnp.nan), group, std_eps=std_eps, ddof=ddof), 1, 1)
    return jnp.sum(each(parts), axis=1)


def less_length_weighted(rewards: Array, group: Group, *, length: Array) -> Array:
    """A_i = r_i - sum_j n_j r_j / sum_j n_j: the baseline of least variance where a token's score has the same size
    everywhere (Hao et al. 2025, arXiv 2505.23585, section 3). length [B]: tokens of each row."""
    at = standing(rewards, group)
    length = length.astype(at.place.dtype)
    return keep(at.place - safe_div(at.total(length * at.place), at.total(length)), at.signal) * at.spread


def over_mean(rewards: Array, group: Group) -> Array:
    """A_i = (r_i - mean) / mean: for rewards of 0 and 1, the gradient of the first n - 1 terms of log p(success) in
    powers of the chance to fail (Tajwar et al. 2026, arXiv 2602.02710).

    Rewards are meant to be >= 0. A group whose mean is not above 0 by more than rounding gets 0.
    """
    at = standing(rewards, group)
    positive = at.mean > 4 * _rounding(at.mean, at.spread)
    return safe_div(at.place * at.spread, keep(at.mean, positive))


def pass_at_k(rewards: Array, group: Array, *, k: float) -> Array:
    """The standardised advantage of a sample's chance to be in a successful draw of k out of the group (Chen et al.
    2025, arXiv 2508.10751, section 2): with n members of which f fail and a draw failing with probability
    F = C(f,k) / C(n,k) = f/n Q, Q = C(f-1,k-1) / C(n-1,k-1),

        A+ = F / sqrt(F (1 - F)),   A- = (F - Q) / sqrt(F (1 - F)) = -Q (1 - f/n) / sqrt(F (1 - F)).

    A reward above 0 is a success. Groups of fewer than k, and those of which every draw succeeds or fails, get 0.
    k = 1 is `standardised` with ddof = 0. group [B] labels; quadratic in B.
    """
    at = standing(rewards, group)
    right = at.signal & (rewards > 0)
    failed = at.total(keep(jnp.ones_like(at.n), ~right))
    draw = _all_among(failed, at.n, k)
    others = _all_among(jnp.maximum(failed - 1, 0), jnp.maximum(at.n - 1, 0), k - 1)
    deviation = jnp.sqrt(draw * (1 - draw))
    numerator = jnp.where(right, draw, -others * (1 - safe_div(failed, at.n)))
    return keep(safe_div(numerator, deviation), at.signal)


def best_of_k(rewards: Array, group: Array, *, k: float) -> Array:
    """A_i = k x mean over sets J of k - 1 other members of (r_i - max_J r)+: what the sample adds to the best of k
    (Walder and Karkhanis 2025, arXiv 2505.15201, eq. 33, times n). Its mean with the score is the gradient of the
    expected best of k rewards, and the baseline max_J r does not depend on r_i.

    k >= 2; groups of fewer than k get 0. group [B] labels; quadratic in B. With m members below r_j in rank, r_j is the
    best of J with probability (k-1)/(n-1) C(m,k-2) / C(n-2,k-2): no term is negative, so nothing cancels.
    """
    at = standing(rewards, group)
    index = jnp.arange(at.place.size)
    lower = (at.place[None, :] < at.place[:, None]) | (
        (at.place[None, :] == at.place[:, None]) & (index[None, :] < index[:, None])
    )
    below = (group[:, None] == group[None, :]) & at.signal[:, None] & at.signal[None, :] & lower
    rank = jnp.sum(below, axis=1, dtype=at.place.dtype)
    best = _all_among(rank, jnp.maximum(at.n - 2, 0), k - 2) * safe_div(k - 1, at.n - 1)
    gain = jnp.where(below, (at.place[:, None] - at.place[None, :]) * best[None, :], 0.0)
    return k * jnp.sum(gain, axis=1) * at.spread


def exponential(rewards: Array, group: Group, *, temperature: float, weight_max: float) -> Array:
    """A_i = min(exp((r_i - mean) / temperature), weight_max): a weight for imitation, never negative (Peng et al. 2019,
    arXiv 1910.00177, eq. 10), the group's mean in the critic's place. 1 in a group without signal, 0 without reward."""
    at = standing(rewards, group)
    scored = jnp.isfinite(at_least_float32(rewards))
    return keep(jnp.exp(jnp.minimum(at.place * at.spread / temperature, jnp.log(weight_max))), scored)


def _rounding(*x: Array) -> Array:
    """What numbers of this size may differ by and be equal."""
    return 4 * jnp.finfo(x[0].dtype).eps * jnp.max(jnp.stack([jnp.abs(y) for y in x]), axis=0)


def _all_among(some: Array, n: Array, k: float) -> Array:
    """C(some, k) / C(n, k): the chance that k of n members, drawn without replacement, all are among `some` of them.

    A product of k factors in [0,1], which neither overflows nor cancels. some <= n <= B, [B]; 1 for k <= 0.
    """
    drawn = jnp.arange(n.size, dtype=n.dtype)[None, :]
    factor = jnp.maximum(some[:, None] - drawn, 0) / jnp.maximum(n[:, None] - drawn, 1)
    return jnp.prod(jnp.where(drawn < k, factor, 1.0), axis=1)
