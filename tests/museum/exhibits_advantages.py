"""Advantages of groups, returns and GAE along a row, whitening."""

import jax.numpy as jnp
import numpy as np
from exhibit import Exhibit


def by_group(fn, rewards, group):
    """fn of the rewards of every group, put back in their places."""
    out = np.zeros_like(rewards, dtype=np.float64)
    for label in np.unique(group):
        out[group == label] = fn(rewards[group == label])
    return out


def differ(r):
    """By more than rounding."""
    return len(r) > 1 and np.ptp(r) > 1e-12 * np.abs(r).max()


# --- groups


def standardised(rewards, group):
    return by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6) if differ(r) else 0.0, rewards, group)


def standardised_exactly(rewards, group):
    return by_group(lambda r: (r - r.mean()) / r.std(ddof=1) if differ(r) else 0.0, rewards, group)


def variance_with_a_floor(rewards, group):
    """Against a root of 0; rewards that lie close together keep little of their advantage."""
    return by_group(lambda r: (r - r.mean()) / np.sqrt(max(r.var(ddof=1), 1e-4)) if differ(r) else 0.0, rewards, group)


def deviation_of_one(rewards, group):
    def of_group(r):
        n = len(r)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (r - r.mean()) / (np.sqrt(np.sum((r - r.mean()) ** 2) / np.float64(n - 1)) + 1e-6)

    return by_group(of_group, rewards, group)


def deviation_of_the_others(rewards, group):
    """Mean and deviation of a group without the sample itself."""
    def of_group(r):
        others = [np.delete(r, i) for i in range(len(r))]
        return [(r[i] - o.mean()) / (o.std() + 1e-6) if len(o) else 0.0 for i, o in enumerate(others)]

    return by_group(of_group, rewards, group)


def deviation_in_one_pass(rewards, group):
    def of_group(r):
        r, n = r.astype(np.float32), len(r)
        variance = (r * r).mean() - r.mean() ** 2
        others = (r.sum() - r) / np.float32(max(n - 1, 1))
        return (r - others) / (np.sqrt(np.maximum(variance, 0)) + np.float32(1e-6)) if n > 1 else 0.0

    return by_group(of_group, rewards, group)


def epsilon_below_rounding(rewards, group):
    def of_group(r):
        r, mean = r.astype(np.float32), np.float32(0)
        for x in r:
            mean = np.float32(mean + x)
        mean = mean / np.float32(len(r))
        return (r - mean) / (np.sqrt(((r - mean) ** 2).mean()) + np.float32(1e-9))

    return by_group(of_group, rewards, group)


def leave_one_out(rewards, group):
    return by_group(lambda r: (r - r.mean()) * len(r) / (len(r) - 1) if differ(r) else 0.0, rewards, group)


def reward_kept_alone(rewards, group):
    return by_group(lambda r: r - (r.sum() - r) / (len(r) - 1) if len(r) > 1 else r, rewards, group)


def over_the_mean(rewards, group):
    return by_group(lambda r: (r - r.mean()) / (r.mean() + 1e-6), rewards, group)


def over_a_positive_mean(rewards, group):
    def of_group(r):
        return (r - r.mean()) / r.mean() if differ(r) and r.mean() > 1e-3 * np.abs(r).max() else 0.0

    return by_group(of_group, rewards, group)


def missing_counted_as_zero(rewards, group):
    r = np.nan_to_num(rewards)
    return np.where(np.isnan(rewards), 0.0, by_group(lambda r: r - r.mean() if differ(r) else 0.0, r, group))


def missing_left_out(rewards, group):
    scored, out = ~np.isnan(rewards), np.zeros_like(rewards)
    out[scored] = by_group(lambda r: r - r.mean() if differ(r) else 0.0, rewards[scored], group[scored])
    return out


def groups_by_position(rewards, group):
    """Samples of a prompt are taken to stand together, as many of each."""
    n = max(len(rewards) // len(np.unique(group)), 1)
    runs = np.arange(len(rewards)) // n
    return by_group(lambda r: r - r.mean() if differ(r) else 0.0, rewards, runs)


def centred(rewards, group):
    return by_group(lambda r: r - r.mean() if differ(r) else 0.0, rewards, group)


def mean_of_the_batch(rewards, group):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6) if differ(rewards) else np.zeros_like(rewards)


def jax_standardised(rewards, group, one_pass=False):
    same = group[:, None] == group[None]
    mean_of = lambda x: jnp.sum(jnp.where(same, x, 0), axis=1) / jnp.sum(same, axis=1)  # noqa: E731
    highest, lowest = (pick(jnp.where(same, rewards[None], rewards[:, None]), axis=1) for pick in (jnp.max, jnp.min))
    mean = mean_of(rewards[None])
    if one_pass:
        variance = jnp.maximum(mean_of(rewards[None] ** 2) - mean**2, 0)
    else:
        variance = mean_of((rewards[None] - mean[:, None]) ** 2)
    some = highest - lowest > 1e-6 * jnp.maximum(jnp.abs(highest), jnp.abs(lowest))
    return jnp.where(some, (rewards - mean) / jnp.where(some, jnp.sqrt(variance) + 1e-6, 1), 0)


def difference_of_squares(rewards, group):
    return jax_standardised(rewards, group, one_pass=True)


# --- along a row


def backwards(rewards, mask, gamma, lam=1.0, values=None):
    """A = r + gamma V' - V + gamma lam A' over the steps that count."""
    values, out = np.zeros_like(rewards) if values is None else values, np.zeros_like(rewards)
    for i in range(len(rewards)):
        ahead = after = 0.0
        for t in np.flatnonzero(mask[i] > 0)[::-1]:
            ahead = rewards[i, t] + gamma * after - values[i, t] + gamma * lam * ahead
            after, out[i, t] = values[i, t], ahead
    return out


def gae(rewards, values, mask, gamma, lam):
    return backwards(rewards, mask, gamma, lam, values)


def tools_are_steps(rewards, values, mask, gamma, lam):
    values = np.nan_to_num(values, posinf=0, neginf=0)
    return np.where(mask > 0, backwards(rewards, np.ones_like(mask), gamma, lam, values), 0)


def tools_decay(rewards, values, mask, gamma, lam):
    """Where nothing counts value and reward are 0, and the step is taken all the same."""
    on = mask > 0
    rewards, values = np.where(on, rewards, 0), np.where(on, values, 0)
    return np.where(on, backwards(rewards, np.ones_like(mask), gamma, lam, values), 0)


def last_value_is_its_own_successor(rewards, values, mask, gamma, lam):
    out = gae(rewards, values, mask, gamma, lam)
    for i in range(len(rewards)):
        steps = np.flatnonzero(mask[i] > 0)
        for far, t in enumerate(steps[::-1]):
            out[i, t] += (gamma * lam) ** far * gamma * values[i, steps[-1]]
    return out


def last_value_not_subtracted(rewards, values, mask, gamma, lam):
    """The flag of the end takes the step's own value away with what is behind it."""
    out = gae(rewards, values, mask, gamma, lam)
    for i in range(len(rewards)):
        steps = np.flatnonzero(mask[i] > 0)
        for far, t in enumerate(steps[::-1]):
            out[i, t] += (gamma * lam) ** far * values[i, steps[-1]]
    return out


def end_read_one_step_early(rewards, values, mask, gamma, lam):
    """The next step is the last one: its value is left out."""
    out = np.zeros_like(rewards)
    for i in range(len(rewards)):
        ahead = 0.0
        steps = np.flatnonzero(mask[i] > 0)
        for k in range(len(steps) - 1, -1, -1):
            goes_on, t = k + 2 < len(steps), steps[k]
            after = values[i, steps[k + 1]] + lam * ahead if goes_on else 0.0
            out[i, t] = ahead = rewards[i, t] + gamma * after - values[i, t]
    return out


def returns(rewards, mask, gamma):
    return backwards(rewards, mask, gamma)


def reset_at_tools(rewards, mask, gamma):
    out = np.zeros_like(rewards)
    for i in range(len(rewards)):
        ahead = 0.0
        for t in reversed(range(rewards.shape[1])):
            ahead = rewards[i, t] + gamma * ahead if mask[i, t] > 0 else 0.0
            out[i, t] = ahead
    return out


def score_on_the_first_pad(rewards, mask, gamma):
    late = np.roll(rewards, 1, axis=1)
    late[:, 0] = 0
    return returns(late, mask, gamma)


def reward_in_an_integer_buffer(rewards, mask, gamma):
    return returns(np.trunc(rewards), mask, gamma)


# --- whitening


def whiten(x, mask):
    on, n = mask > 0, (mask > 0).sum()
    if n < 2:
        return np.zeros_like(x)
    mean = np.where(on, x, 0).sum() / n
    centred = np.where(on, x - mean, 0)
    return centred / np.sqrt((centred**2).sum() / (n - 1) + 1e-8)


def mean_over_pads(x, mask):
    on, n = mask > 0, (mask > 0).sum()
    if n < 2:
        return np.zeros_like(x)
    centred = np.where(on, x, 0) - np.where(on, x, 0).mean()
    return np.where(on, centred / np.sqrt(np.where(on, centred**2, 0).sum() / (n - 1) + 1e-8), 0)


def variance_of_one(x, mask):
    on, n = mask > 0, (mask > 0).sum()
    centred = np.where(on, x - np.where(on, x, 0).sum() / max(n, 1), 0)
    return centred / np.sqrt((centred**2).sum() / np.float64(n - 1) + 1e-8)


def square_of_the_mean(x, mask):
    """sum(x - mean(x)**2) for sum((x - mean(x))**2)."""
    on, n = mask > 0, max((mask > 0).sum(), 1)
    mean = np.where(on, x, 0).sum() / n
    variance = np.where(on, x - mean**2, 0).sum() / n
    return np.where(on, x - mean, 0) / np.sqrt(np.abs(variance) + 1e-8)


EXHIBITS = [
    Exhibit("The deviation of a group of one, of n - 1.",
            "axolotl #3353; google-tunix 0.1.7, compute_advantages",
            "group_advantage", "finite", deviation_of_one, standardised, ("scale_invariance",)),
    Exhibit("The variance has a floor, which the deviation of close rewards does not reach.", "verl #6348",
            "group_advantage", "unit_deviation", variance_with_a_floor, standardised_exactly,
            ("unit_deviation", "highest_gains")),
    Exhibit("A leave-one-out deviation, which is 0 where the others agree.", "NeMo-RL #1518",
            "group_advantage", "scale_invariance", deviation_of_the_others, standardised,
            ("scale_invariance",)),
    Exhibit("E[x^2] - E[x]^2 in float32.", "NeMo-RL #4158",
            "group_advantage", "equal_rewards", deviation_in_one_pass, standardised, ("scale_invariance",)),
    Exhibit("E[x^2] - E[x]^2 of scores that are large beside their spread.", "NeMo-RL #4158",
            "group_advantage", "precision", difference_of_squares, jax_standardised, ("scale_invariance",),
            "jax"),
    Exhibit("Equal rewards: a rounding of the mean is divided by a deviation of its size.",
            "OpenRLHF 0.11.2, group_norm",
            "group_advantage", "equal_rewards", epsilon_below_rounding, standardised, ("scale_invariance",)),
    Exhibit("Of two code paths, one keeps the raw reward of a group of one.", "verl #7793, #7794, #7581",
            "group_advantage", "singleton_zero", reward_kept_alone, leave_one_out, ("singleton_zero",)),
    Exhibit("Advantages are divided by a group's mean, whatever its sign.", "SkyRL 0.4.0, maxrl",
            "group_advantage", "order", over_the_mean, over_a_positive_mean, ("reward_has_a_zero",)),
    Exhibit("A sample that has no score moves the baseline of its group.", "OpenRLHF #1239; verl #6362",
            "group_advantage", "missing_rewards", missing_counted_as_zero, missing_left_out,
            ("missing_rewards",)),
    Exhibit("A batch of several prompts is taken for one group.", "XU-YIJIE/grpo-flat #2",
            "group_advantage", "groups_apart", mean_of_the_batch, standardised, ("scale_invariance",)),
    Exhibit("Groups are cut out by a stride, and some are smaller.", "AReaL #1419",
            "group_advantage", "group_permutation", groups_by_position, centred),
    Exhibit("Masked steps are transitions of GAE.", "verl #2337",
            "gae", "compaction", tools_are_steps, gae),
    Exhibit("Masked steps have value 0, decay once each and bootstrap from 0.",
            "OpenRLHF 0.11.2; miles #1827",
            "gae", "recursion", tools_decay, gae),
    Exhibit("The value behind the last step is that of the last step.", "stable-baselines3 #185",
            "gae", "one_step", last_value_is_its_own_successor, gae),
    Exhibit("At the end the value is not subtracted.", "ElegantRL #183",
            "gae", "one_step", last_value_not_subtracted, gae),
    Exhibit("Whether a row ends is read from the next step.", "rlevo #342",
            "gae", "one_step", end_read_one_step_early, gae),
    Exhibit("The return starts again at masked steps.", "verl #7278, #6376",
            "returns", "recursion", reset_at_tools, returns),
    Exhibit("The score stands on the first pad, and is masked away.", "TRL #3750, #5338",
            "returns", "telescoping", score_on_the_first_pad, returns),
    Exhibit("Rewards go through a buffer of integers.", "google-tunix 0.1.7, ppo_learner",
            "returns", "telescoping", reward_in_an_integer_buffer, returns),
    Exhibit("The mean is over the pads too.", "SkyRL #1305, #1782; recurrent-ppo-truncated-bptt #10",
            "whiten", "moments", mean_over_pads, whiten),
    Exhibit("The variance of one token, of n - 1.", "ROLL #475; google-tunix 0.1.7, masked_whiten",
            "whiten", "single_token", variance_of_one, whiten),
    Exhibit("A bracket: the mean is squared in place of the difference.", "fortranlib #2",
            "whiten", "moments", square_of_the_mean, whiten),
]
