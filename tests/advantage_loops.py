"""Advantages as float64 loops written from the papers: f(mine, others, **constants) -> number. A member is a dict with
its reward r and, where a paper reads them, its length, baseline and parts. Members without a reward are left out."""

import itertools
import math

import numpy as np


def flat(rewards):
    """Equal up to float rounding, or alone."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-6 * max(map(abs, rewards))


def rewards_of(members):
    return [x["r"] for x in members]


def constant(mine, others):
    return 1.0


def monte_carlo(mine, others):
    return mine["r"]


def above_baseline(mine, others):
    return mine["r"] - mine["baseline"] if np.isfinite(mine["baseline"]) else 0.0


def centred(mine, others):
    return mine["r"] - np.mean(rewards_of([mine, *others]))


def leave_one_out(mine, others):
    return mine["r"] - np.mean(rewards_of(others))


def standardised(mine, others, std_eps=0.0, ddof=1.0):
    everyone = rewards_of([mine, *others])
    return (mine["r"] - np.mean(everyone)) / (np.std(everyone, ddof=ddof) + std_eps)


def standardised_parts(mine, others, **constants):
    total = 0.0
    for q in range(len(mine["parts"])):
        own, rest = {"r": mine["parts"][q]}, [{"r": x["parts"][q]} for x in others]
        total += 0.0 if flat(rewards_of([own, *rest])) else standardised(own, rest, **constants)
    return total


def less_length_weighted(mine, others):
    everyone = [mine, *others]
    return mine["r"] - sum(x["length"] * x["r"] for x in everyone) / sum(x["length"] for x in everyone)


def over_mean(mine, others):
    everyone = rewards_of([mine, *others])
    mean = np.mean(everyone)
    return (mine["r"] - mean) / mean if mean > 2e-6 * max(map(abs, everyone)) else 0.0


def pass_at_k(mine, others, k):
    """Mean over the draws of k that hold the sample of the draw's standardised success; all draws are listed."""
    successes = np.array(rewards_of([mine, *others])) > 0
    draws = [(0 in draw, any(successes[i] for i in draw)) for draw in itertools.combinations(range(len(successes)), int(k))]
    won = np.array([success for _, success in draws], float)
    if not draws or won.std() == 0:
        return 0.0
    return np.mean([(w - won.mean()) / won.std() for w, (held, _) in zip(won, draws, strict=True) if held])


def best_of_k(mine, others, k):
    """k x mean over sets of k - 1 others of what the sample adds to their best; all sets are listed."""
    sets = list(itertools.combinations(rewards_of(others), int(k) - 1))
    return k * np.mean([max(mine["r"], *rest) - max(rest) for rest in sets]) if sets else 0.0


def exponential(mine, others, temperature, weight_max):
    above = mine["r"] - np.mean(rewards_of([mine, *others]))
    return min(math.exp(min(above / temperature, 100.0)), weight_max)


ALONE = {f.__name__: f for f in (constant, monte_carlo, above_baseline, exponential)}
COMPARING = {
    f.__name__: f
    for f in (
        centred, leave_one_out, standardised, standardised_parts, less_length_weighted, over_mean, pass_at_k, best_of_k
    )
}


def advantage(name, mine, others, **constants):
    """Of one member. Where members are compared, a group without signal is worth exactly 0."""
    if name in ALONE:
        return ALONE[name](mine, others, **constants)
    no_signal = flat(rewards_of([mine, *others])) if name != "standardised_parts" else not others
    return 0.0 if no_signal else COMPARING[name](mine, others, **constants)
