"""Functions for the tests of the verifier, in numpy and jax: right ones, wrong ones, and bad targets."""

import time

import jax.numpy as jnp
import numpy as np


def ppo(logp, old_logp, advantages, mask, eps=0.2):
    """Token-mean PPO in numpy."""
    on = mask > 0
    change, advantages = np.clip(np.where(on, logp - old_logp, 0), -20, 20), np.where(on, advantages, 0)
    ratio = np.exp(change)
    per_token = -np.minimum(ratio * advantages, np.clip(ratio, 1 - eps, 1 + eps) * advantages)
    return np.sum(per_token * on) / max(on.sum(), 1), {"ratio": ratio}


def sequence_product(logp, old_logp, advantages, mask):
    """The mean over rows of the advantage times the ratio of whole sequences."""
    on = mask > 0
    change = np.clip(np.where(on, logp - old_logp, 0).sum(1), -20, 20)
    advantage = np.where(on, advantages, 0).sum(1) / np.maximum(on.sum(1), 1)
    return -np.sum(advantage * np.exp(change) * on.any(1)) / max(on.any(1).sum(), 1)


def token_product(logp, old_logp, advantages, mask):
    """As sequence_product, with the ratio of every token."""
    on = mask > 0
    ratio = np.exp(np.clip(np.where(on, logp - old_logp, 0), -20, 20))
    return -np.sum(np.where(on, advantages, 0) * ratio * on) / max(on.any(1).sum(), 1)


def standardised(rewards, group):
    """(r - mean) / deviation within a group, 0 where rewards differ by rounding."""
    out = np.zeros_like(rewards)
    for label in np.unique(group):
        r = rewards[group == label]
        if np.ptp(r) > 1e-12 * np.abs(r).max():
            out[group == label] = (r - r.mean()) / r.std()
    return out


def dpo(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, beta=0.1):
    return np.logaddexp(0, -beta * (chosen_logp - ref_chosen_logp - rejected_logp + ref_rejected_logp))


def token_mean(per_token, mask):
    return np.where(mask > 0, per_token, 0).sum() / max((mask > 0).sum(), 1)


# --- wrong


def times_mask(logp, old_logp, advantages, mask):
    ratio = np.exp(np.clip(logp - old_logp, -20, 20))
    return -np.sum(np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages) * mask) / max(mask.sum(), 1)


def over_the_width(logp, old_logp, advantages, mask):
    return ppo(logp, old_logp, advantages, mask)[0] * (mask > 0).sum() / mask.size


def shifted(logp, old_logp, advantages, mask):
    return ppo(np.roll(logp, 1, axis=1), old_logp, advantages, mask)[0]


def upside_down(logp, old_logp, advantages, mask):
    return -ppo(logp, old_logp, advantages, mask)[0]


def dual_clip_always(logp, old_logp, advantages, mask):
    on = mask > 0
    a = np.where(on, advantages, 0)
    r = np.exp(np.clip(np.where(on, logp - old_logp, 0), -20, 20))
    return -np.sum(np.maximum(np.minimum(r * a, np.clip(r, 0.8, 1.2) * a), 3 * a)) / max(on.sum(), 1)


def two_denominators(logp, old_logp, advantages, mask):
    """A token mean, plus a penalty that is a mean over rows of sums."""
    on = mask > 0
    change = np.clip(np.where(on, logp - old_logp, 0), -20, 20)
    return ppo(logp, old_logp, advantages, mask)[0] + 0.1 * (change**2).sum() / max(on.any(1).sum(), 1)


def mean_of_means(per_token, mask, micro):
    means = [token_mean(per_token[micro == m], mask[micro == m]) for m in np.unique(micro)]
    return np.mean(means)


def rounded_groups(rewards, group):
    """float32 and a tiny epsilon: equal rewards get advantages of size 1."""
    r = rewards.astype(np.float32)
    out = np.zeros_like(r)
    for label in np.unique(group):
        some = r[group == label]
        mean = np.float32(0)
        for x in some:
            mean = np.float32(mean + x)
        mean = mean / np.float32(len(some))
        std = np.sqrt(((some - mean) ** 2).mean())
        out[group == label] = (some - mean) / (std + np.float32(1e-9))
    return out


def batch_baseline(rewards, group):
    return rewards - rewards.mean()


def swapped(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp):
    return dpo(rejected_logp, chosen_logp, ref_rejected_logp, ref_chosen_logp)


def overflowing(chosen_score, rejected_score):
    return np.log1p(np.exp((rejected_score - chosen_score))).mean()


def overshoots(logp, old_logp, advantages, mask):
    """A penalty of the ratio, scaled by the advantage, takes over at a ratio of 2."""
    on = mask > 0
    ratio = np.exp(np.clip(np.where(on, logp - old_logp, 0), -20, 5))
    return -(np.where(on, advantages, 0) * (ratio - (ratio - 1) ** 2 / 2)).sum() / max(on.sum(), 1)


def jumps(logp, old_logp, advantages, mask):
    """Tokens that have moved too far add a constant, which no gradient shows."""
    on = mask > 0
    change = np.where(on, logp - old_logp, 0)
    return (-(np.where(on, advantages, 0) * change) + np.where(np.abs(change) > 0.5, 2.0, 0)).sum() / max(on.sum(), 1)


def winner_alone(rewards, group):
    same = group[:, None] == group[None, :]
    best = np.where(same, rewards[None, :], -np.inf).max(1)
    return (rewards == best) - ((rewards[None, :] == best[:, None]) & same).sum(1) / same.sum(1)


def clipped_rewards(rewards, group):
    """Above 1/2 all rewards are one."""
    return standardised(np.minimum(rewards, 0.5), group)


def hinge(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp):
    return np.maximum(0, 1 - 0.1 * (chosen_logp - ref_chosen_logp - rejected_logp + ref_rejected_logp))


def desirable_twice(logp, ref_logp, desirable, kl_logp, kl_ref_logp):
    v = 0.1 * (logp - ref_logp - max(np.mean(kl_logp - kl_ref_logp), 0))
    return np.mean((1 + desirable) / (1 + np.exp(np.where(desirable > 0, v, -v))))


def whitened_pads(x, mask):
    """Right where something counts."""
    x = np.where(mask > 0, x, 0)
    n = max((mask > 0).sum(), 1)
    centred = x - x.sum() / n
    return centred / np.sqrt((centred**2 * (mask > 0)).sum() / n + 1e-12)


def through_tools(rewards, values, mask, gamma, lam):
    """Masked steps are transitions."""
    out = np.zeros_like(rewards)
    for i in range(len(rewards)):
        ahead = after = 0.0
        for t in reversed(range(rewards.shape[1])):
            ahead = rewards[i, t] + gamma * after - values[i, t] + gamma * lam * ahead
            after, out[i, t] = values[i, t], ahead
    return out * mask


def entropy_of_zero(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return -(p * np.log(p)).sum(-1)


def clamped_k3(logp, ref_logp):
    d = np.clip(ref_logp - logp, -20, 20)
    return np.minimum(np.exp(d) - d - 1, 10.0)


def k1(logp, ref_logp):
    return logp - ref_logp


def squares(router_probs, expert_index):
    """In jax, in numpy and in torch."""
    return router_probs.shape[1] * (router_probs.mean(0) ** 2).sum()


def jax_ppo(logp, old_logp, advantages, mask):
    """The clip comes behind exp."""
    ratio = jnp.exp(logp - old_logp)
    per_token = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    return jnp.sum(per_token * mask) / jnp.maximum(mask.sum(), 1)


# --- bad targets

NUMBER = 3


def two_arguments(logp, mask):
    return logp.sum()


def needs_more(logp, old_logp, advantages, mask, temperature):
    return logp.sum()


def wrong_shape(logp, old_logp, advantages, mask):
    return logp * mask


def raises(logp, old_logp, advantages, mask):
    raise KeyError("no such thing")


def all_nan(logp, old_logp, advantages, mask):
    return np.nan


def not_this_one(wrong):
    if wrong:
        raise RuntimeError("not this one")


def raises_on_an_empty_row(per_token, mask):
    not_this_one(not (mask > 0).any(1).all())
    return token_mean(per_token, mask)


def raises_when_wide(rewards, values, mask, gamma, lam):
    """On every example of one shape: of its result nothing is known."""
    not_this_one(rewards.shape[1] > 5)
    return np.where(mask > 0, rewards - values, 0)


def raises_when_narrow(per_token, mask):
    """On every example of the first shape that is tried."""
    not_this_one(per_token.shape[1] == 3)
    return token_mean(per_token, mask)


def slow(logp, old_logp, advantages, mask):
    time.sleep(600)


def dies(logp, old_logp, advantages, mask):
    import os

    os._exit(7)


def writes(per_token, mask):
    per_token[mask == 0] = 0
    return per_token.sum() / max(mask.sum(), 1)


CALLS = []


def remembers(per_token, mask):
    CALLS.append(0)
    return token_mean(per_token, mask) * (1 + 1e-3 * len(CALLS))


def random(per_token, mask):
    return token_mean(per_token, mask) + np.random.rand()


def jax_random(per_token, mask):
    return jnp.sum(jnp.where(mask > 0, per_token, 0)) * (1 + np.random.rand())


def branches(per_token, mask):
    """Python's if on a value cannot be traced."""
    n = jnp.sum(mask)
    if n == 0:
        return jnp.zeros(())
    return jnp.sum(jnp.where(mask > 0, per_token, 0)) / n


# --- in a file that imports jax and numpy


def says_numpy(per_token: "np.ndarray", mask: "np.ndarray") -> float:
    return per_token[mask > 0].sum() * float(jnp.exp(0.0))


def jax_and_numpy(per_token, mask):
    return jnp.sum(jnp.where(mask > 0, per_token, 0)) / np.sqrt(4.0)


def numpy_and_jax(per_token, mask):
    return np.where(mask > 0, per_token, 0).sum() / float(jnp.sqrt(4.0))


def imports_for_itself(per_token, mask):
    import jax.numpy

    return jax.numpy.where(mask > 0, per_token, 0).sum()
