"""Exact numbers of sampling many answers: pass@k, best-of-n, and what best-of-n costs in KL."""

import numpy as np


def pass_at_k(n: np.ndarray, c: np.ndarray, k: int) -> np.ndarray:
    """Unbiased probability that one of k answers is right, of problems with c right among n: 1 - C(n - c, k) /
    C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1). The plug-in 1 - (1 - c / n)^k is too low. n, c [...]
    whole numbers; ValueError for k above n."""
    n, c = np.broadcast_arrays(np.asarray(n, np.int64), np.asarray(c, np.int64))
    if np.any((c < 0) | (c > n) | (k > n)) or k < 1:
        raise ValueError(f"pass@k takes 0 <= c <= n and 1 <= k <= n, got k = {k}, n from {n.min()}")
    i = np.arange(k)
    left = np.maximum((n - c)[..., None] - i, 0) / (n[..., None] - i)
    return 1 - np.prod(left, axis=-1)


def best_of_n(proxy: np.ndarray, gold: np.ndarray, n: int) -> float:
    """Unbiased gold reward of the answer with the highest proxy among n, from N >= n scored answers [N]: the mean
    over all choices of n (Nakano et al. 2021, arXiv 2112.09332, section 3.2). Of equal proxies each wins alike."""
    proxy, gold = np.asarray(proxy, np.float64), np.asarray(gold, np.float64)
    N = proxy.size
    if not 1 <= n <= N:
        raise ValueError(f"best-of-n takes 1 <= n <= {N} scored answers, got n = {n}")
    values, group, count = np.unique(proxy, return_inverse=True, return_counts=True)
    below = np.cumsum(count)
    none_above = 1 - pass_at_k(np.full(below.size, N), N - below, n)  # P(all n are among the lowest `below`)
    wins = np.diff(none_above, prepend=0.0)
    return float(wins @ (np.bincount(group.reshape(-1), gold) / count))


def best_of_n_kl(n: np.ndarray) -> np.ndarray:
    """log n - (n - 1) / n: the KL of best-of-n from its policy where no two answers score alike; else a bound
    (Beirami et al. 2024, arXiv 2401.01879)."""
    n = np.asarray(n, np.float64)
    return np.log(n) - (n - 1) / n


def best_of_n_kl_exact(p: np.ndarray, n: int) -> float:
    """The KL for answers with probabilities p [m] in rising order of a reward that no two share."""
    p = np.asarray(p, np.float64) / np.sum(p)
    below = np.cumsum(p)
    q = np.minimum(below, 1.0) ** n - np.minimum(below - p, 1.0).clip(0) ** n
    some = q > 0
    return float(np.sum(q[some] * np.log(q[some] / p[some])))


def overoptimisation_peak(form: str, alpha: float, beta: float) -> tuple[float, float]:
    """(d, R) where gold reward is highest, d = sqrt(KL), for the forms "bon" R = d (alpha - beta d) and "rl"
    R = d (alpha - beta log d) of Gao et al. 2022 (arXiv 2210.10760)."""
    if form == "bon":
        return alpha / (2 * beta), alpha**2 / (4 * beta)
    if form == "rl":
        d = float(np.exp(alpha / beta - 1))
        return d, beta * d
    raise ValueError(f"form {form!r} is unknown: expected bon or rl")
