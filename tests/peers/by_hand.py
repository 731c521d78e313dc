"""What a peer's function says it computes, as float64 loops over the slots that count: the right side of every entry of
the table that scripts/verify_peers.py writes.

A loop is f(x, at) of the family's arguments by name; at: the same where a gradient was stopped. It never looks at a slot
whose mask is 0, nor at a token of logit -inf, so that it does not matter what stands there. One half of every formula is
its mean over tokens or rows, the other what a token is worth.
"""

import math

import numpy as np


def exp(v):
    return math.exp(v) if v < 700 else math.inf


def softplus(v):
    return max(v, 0.0) + math.log1p(math.exp(-abs(v)))


# --- losses of tokens


def kept(x, *names):
    """Of every row the slots that count, each as a list of the named arguments' numbers."""
    slots = [[t for t, m in enumerate(row) if m > 0] for row in x["mask"]]
    return [[[float(x[name][i][t]) for name in names] for t in row] for i, row in enumerate(slots)]


def token_mean(rows):
    tokens = sum(map(len, rows))
    return sum(map(sum, rows)) / tokens if tokens else 0.0


def row_mean(rows):
    """Over rows with a token."""
    return _rows(rows, sum(1 for row in rows if row))


def all_rows_mean(rows):
    return _rows(rows, len(rows))


def _rows(rows, count):
    return sum(sum(row) / len(row) for row in rows if row) / count if count else 0.0


def clipped(change, a, low=0.2, high=0.2, cap=None):
    r = exp(change)
    far = -min(r * a, min(max(r, 1 - low), 1 + high) * a) if a else 0.0
    return min(far, -cap * a) if cap is not None and a < 0 else far


def ppo(mean, **clip):
    of = lambda row: [clipped(l - o, a, **clip) for l, o, a in row]  # noqa: E731
    return lambda x, at: mean([of(row) for row in kept(x, "logp", "old_logp", "advantages")])


def gspo(mean, token=False, **clip):
    """token: the ratio of the row moves with the token's own log-probability alone."""

    def loss(x, at):
        rows, fixed = (kept(y, "logp", "old_logp", "advantages") for y in (x, at))
        changes = [np.mean([l - o for l, o, _ in row]) if row else 0.0 for row in (fixed if token else rows)]
        own = lambda l, l0: l - l0 if token else 0.0  # noqa: E731
        return mean([
            [clipped(s + own(l, l0), a, **clip) for (l, _, a), (l0, _, _) in zip(row, row0, strict=True)]
            for row, row0, s in zip(rows, fixed, changes, strict=True)
        ])  # fmt: skip

    return loss


def cispo(mean, low, high):
    def loss(x, at):
        rows, fixed = (kept(y, "logp", "old_logp", "advantages") for y in (x, at))
        weight = lambda l, o: min(max(exp(l - o), low), high)  # noqa: E731
        return mean([[-weight(l0, o0) * a * l for (l, _, a), (l0, o0, _) in zip(*pair, strict=True)]
                     for pair in zip(rows, fixed, strict=True)])  # fmt: skip

    return loss


def reinforce(mean):
    return lambda x, at: mean([[-a * l for l, a in row] for row in kept(x, "logp", "advantages")])


def mean_of(mean):
    return lambda x, at: mean([[v for (v,) in row] for row in kept(x, "per_token")])


def critic(mean, clip):
    def of(v, old, target):
        near = min(max(v, old - clip), old + clip)
        return max((v - target) ** 2, (near - target) ** 2) / 2

    return lambda x, at: mean([[of(*token) for token in row] for row in kept(x, "values", "old_values", "returns")])


# --- estimators of the KL, one a token


def k1(d):
    return d


def k2(d):
    return d * d / 2


def k3(d):
    return exp(-d) - 1 + d


def kl(value, gradient=None):
    """gradient: the estimator that is differentiated in the place of `value`."""

    def estimate(x, at):
        d, d0 = (np.subtract(y["logp"], y["ref_logp"], dtype=float) for y in (x, at))
        of = lambda f, d: np.vectorize(f, otypes=[float])(d)  # noqa: E731
        return of(value, d) if gradient is None else of(value, d0) + of(gradient, d) - of(gradient, d0)

    return estimate


# --- logits


def log_probabilities(logits):
    there = [z for z in logits if z > -math.inf]
    top = max(there)
    total = math.log(sum(math.exp(z - top) for z in there)) + top
    return [z - total if z > -math.inf else -math.inf for z in logits]


def entropy(x, at):
    of = lambda logp: -sum(math.exp(v) * v for v in logp if v > -math.inf)  # noqa: E731
    return np.array([[of(log_probabilities(logits)) for logits in row] for row in x["logits"]])


def logprobs(x, at):
    rows = zip(x["logits"], x["tokens"], strict=True)
    return np.array([[log_probabilities(z)[int(token)] for z, token in zip(row[:-1], tokens[1:], strict=True)]
                     for row, tokens in rows])  # fmt: skip


def divergence(of, temperature=1.0):
    """of(log p, log q) of the student's and the teacher's entries; the mean over tokens that count, by temperature^2."""

    def loss(x, at):
        tokens = [[sum(map(of, *(log_probabilities(z / temperature) for z in pair))) for pair in row] for row in kept_logits(x)]
        return token_mean(tokens) * temperature**2

    return loss


def kept_logits(x):
    pairs = zip(x["student_logits"], x["teacher_logits"], x["mask"], strict=True)
    return [[(s, t) for s, t, m in zip(*row, strict=True) if m > 0] for row in pairs]


def times_log(p, log_ratio):
    return 0.0 if p == 0 else p * log_ratio


def forward(s, t):
    return times_log(math.exp(t), t - s) if t > -math.inf else 0.0


def mixed(beta):
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student."""

    def of(s, t):
        weighted = [(beta, math.exp(t)), (1 - beta, math.exp(s))]
        m = sum(w * p for w, p in weighted)
        return sum(w * p * math.log(p / m) for w, p in weighted if p)

    return of


# --- advantages


def groups(of):
    """of(mine, others) -> the advantage of a reward among those of its group."""

    def advantages(x, at):
        everyone = [(float(r), g) for r, g in zip(x["rewards"], x["group"], strict=True)]
        out = [of(r, [s for j, (s, h) in enumerate(everyone) if h == g and j != i]) for i, (r, g) in enumerate(everyone)]
        return np.array(out)

    return advantages


def standardised(eps, alone):
    """alone: what a group of one has, given its reward."""

    def of(mine, others):
        if not others or max(others) == min(others) == mine:
            return 0.0 if others else alone(mine)
        everyone = [mine, *others]
        return (mine - np.mean(everyone)) / (np.std(everyone, ddof=1) + eps)

    return of


def over_mean(mine, others):
    mean = np.mean([mine, *others])
    return (mine - mean) / (mean + 1e-6) if others else mine


def left_out(alone):
    return lambda mine, others: mine - sum(others) / len(others) if others else alone(mine)


def gae(x, at):
    out = np.zeros(np.shape(x["mask"]))
    for i, row in enumerate(x["mask"]):
        value = ahead = 0.0
        for t in reversed(range(len(row))):
            if row[t] > 0:
                ahead = x["rewards"][i][t] + x["gamma"] * value - x["values"][i][t] + x["gamma"] * x["lam"] * ahead
                value, out[i, t] = x["values"][i][t], ahead
    return out


def returns(x, at):
    return gae({**x, "values": np.zeros(np.shape(x["mask"])), "lam": 1.0}, at)


def whitened(by_row=False, ddof=1, eps=1e-8):
    def of(x, at):
        values, mask = np.array(x["x"], float), np.array(x["mask"]) > 0
        out = np.zeros(mask.shape)
        for rows in [[i] for i in range(len(mask))] if by_row else [list(range(len(mask)))]:
            some = [values[i, t] for i in rows for t in range(mask.shape[1]) if mask[i, t]]
            spread = math.sqrt(np.var(some, ddof=ddof) + eps) if len(some) > ddof else math.sqrt(eps)
            for i in rows:
                for t in range(mask.shape[1]):
                    out[i, t] = (values[i, t] - np.mean(some)) / spread if mask[i, t] else 0.0
        return out

    return of


# --- comparisons


def dpo(x, at, beta=0.1):
    names = ("chosen_logp", "ref_chosen_logp", "rejected_logp", "ref_rejected_logp")
    pairs = zip(*(x[name] for name in names), strict=True)
    return np.mean([softplus(-beta * (float(c) - rc - r + rr)) for c, rc, r, rr in pairs])


def dpo_of_tokens(x, at):
    sums = {}
    for side in ("chosen", "rejected"):
        for name in (f"{side}_logp", f"ref_{side}_logp"):
            rows = zip(x[name], x[f"{side}_mask"], strict=True)
            sums[name] = [sum(float(v) for v, m in zip(*row, strict=True) if m > 0) for row in rows]
    return dpo(sums, at)


def bradley_terry(x, at):
    margins = x.get("margin", np.zeros(len(x["chosen_score"])))
    scores = zip(x["chosen_score"], x["rejected_score"], margins, strict=True)
    return np.mean([softplus(float(r) - c + m) for c, r, m in scores])


def kto(x, at, beta=0.1, undesirable=1.5):
    point = max(float(np.mean(np.subtract(at["kl_logp"], at["kl_ref_logp"]))), 0.0)
    sigmoid = lambda v: math.exp(-softplus(-v))  # noqa: E731
    worth = []
    for logp, ref, good in zip(x["logp"], x["ref_logp"], x["desirable"], strict=True):
        z = beta * (logp - ref - point)
        worth.append(sigmoid(-z) if good > 0 else undesirable * sigmoid(z))
    return np.mean(worth)


def overlong(x, at):
    free = x["max_length"] - x["buffer"]
    return np.array([-min(max((n - free) / x["buffer"], 0.0), 1.0) for n in x["length"]])
