"""Laws of policy losses f(logp, old_logp, advantages, mask)."""

import itertools

import numpy as np

from jaxpt.verify.bench import EPS, Bench, NotApplied, Part, Parts, column, over, prompt_tokens, tokens_of
from jaxpt.verify.generators import Example


def _on_policy(x: Example) -> Example:
    """Nothing has changed since the tokens were drawn, and a row has one advantage."""
    same = {k: x["logp"] for k in ("old_logp", "sampler_logp", "ref_logp") if k in x}
    ones = {"weights": np.ones_like(x["logp"])} if "weights" in x else {}
    return {**x, **same, **ones, "advantages": np.broadcast_to(x["advantages"][:, :, :1], x["logp"].shape)}


def _no_regulariser(b: Bench) -> None:
    if "ref_logp" in b.takes:
        raise NotApplied("the loss has a reference: its KL pulls too")


def _pulls(x: Example) -> dict[str, np.ndarray]:
    """What a token weighs in the standard reductions, up to a factor of the batch. [n, B, T]"""
    mask, tokens = (x["mask"] > 0).astype(float), tokens_of(x)
    of_row = lambda w: mask / np.maximum(w, 1)[:, :, None]  # noqa: E731
    pulls = {"every token the same": mask, "every row the same": of_row(tokens)}
    return {**pulls, "every prompt the same": of_row(prompt_tokens(x))} if "group" in x else pulls


def _along(g: np.ndarray, r: np.ndarray) -> np.ndarray:
    """[n]: the c of the least |g - c r|."""
    return over(g * r, np.sum) / np.maximum(over(r * r, np.sum), 1e-30)


def _multiple_of(b: Bench, x: Example, pull: np.ndarray) -> Parts:
    """The gradient is a positive multiple of -A x pull."""
    out, reinforce = b.run(x), -x["advantages"] * pull
    c = _along(np.where(np.isfinite(out.grads["logp"]), out.grads["logp"], 0), reinforce)
    silent = over(np.abs(reinforce)) == 0
    want = column(np.maximum(c, 0), reinforce) * reinforce
    return [
        Part("gradient of logp", out.grads["logp"], want, b.tol(x).grads["logp"], call=x, raised=out.raised),
        Part("slope along REINFORCE's gradient", np.where(silent, 1.0, c), 1e-9, 1e-10, "at_least", call=x),
    ]


def on_policy(b: Bench, x: Example) -> dict[str, Parts]:
    _no_regulariser(b)
    x = _on_policy(x)
    return {name: _multiple_of(b, x, pull) for name, pull in _pulls(x).items()}


def zero_advantage(b: Bench, x: Example) -> Parts:
    _no_regulariser(b)
    some = _on_policy(x)
    none = {**some, "advantages": np.zeros_like(x["advantages"])}
    out, usual = b.run(none), over(np.abs(b.run(some).grads["logp"]))
    usual = np.where(np.isfinite(usual), usual, 0.0)
    return [Part("gradient of logp", out.grads["logp"], 0.0, column(256 * EPS * usual, out.grads["logp"]), call=none,
                 raised=out.raised)]


def token_mean(b: Bench, x: Example) -> Parts:
    return _exactly(b, x, "every token the same", lambda t: t.sum(1))


def sequence_mean(b: Bench, x: Example) -> dict[str, Parts]:
    return {
        "rows with a token": _exactly(b, x, "every row the same", lambda t: (t > 0).sum(1)),
        "all rows": _exactly(b, x, "every row the same", lambda t: np.full(len(t), t.shape[1])),
    }


def sequence_sum(b: Bench, x: Example) -> dict[str, Parts]:
    return {
        "rows with a token": _exactly(b, x, "every token the same", lambda t: (t > 0).sum(1)),
        "all rows": _exactly(b, x, "every token the same", lambda t: np.full(len(t), t.shape[1])),
    }


def _exactly(b: Bench, x: Example, name: str, divisor) -> Parts:
    _no_regulariser(b)
    x = _on_policy(x)
    pull, n = _pulls(x)[name], np.maximum(divisor(tokens_of(x)), 1)
    out = b.run(x)
    return [Part("gradient of logp", out.grads["logp"], -x["advantages"] * pull / column(n, pull),
        b.tol(x).grads["logp"],
                 call=x, raised=out.raised)]


def fixed_budget(b: Bench, x: Example) -> dict[str, Parts]:
    """Two batches of the same rows, one with every token: a token weighs the same in both."""
    _no_regulariser(b)
    full = {**_on_policy(x), "mask": np.ones_like(x["mask"])}
    out, whole = b.run(_on_policy(x)), b.run(full).grads["logp"]
    kept, tokens = x["mask"] > 0, tokens_of(x)
    rows, tol = tokens.shape[1], b.tol(full).grads["logp"] * tokens.shape[1]
    some = column(rows / np.maximum((tokens > 0).sum(1), 1), whole)
    part = lambda c: [Part("gradient of logp", out.grads["logp"], np.where(kept, c * whole, 0), tol,
        raised=out.raised)]  # noqa: E731
    return {"all rows": part(1.0), "rows with a token": part(some)}


def homogeneous(b: Bench, x: Example) -> Parts:
    big = {**x, "advantages": 2 * x["advantages"]}
    out, base = b.run(big), b.run(x)
    tol = b.tol(big)
    return [Part("value", out.value, 2 * base.value, tol.value, call=big), Part(
        "gradient of logp", out.grads["logp"], 2 * base.grads["logp"], tol.grads["logp"], call=big, raised=out.raised)]


def _single(x: Example, log_ratio: float, advantage: float) -> Example:
    """One sequence in which every token has this log-ratio and this advantage."""
    ones = np.ones_like(x["logp"])
    return {**x, "logp": -1.5 * ones, "old_logp": (-1.5 - log_ratio) * ones, "advantages": advantage * ones,
            "mask": np.ones_like(x["mask"])}


def no_dead_zone(b: Bench, x: Example) -> Parts:
    parts = []
    for log_ratio, advantage in itertools.product((-3.0, -0.7, 0.7, 3.0), (1.0, -1.0)):
        call = _single(x, log_ratio, advantage)
        out = b.run(call)
        parts.append(Part("gradient of logp", out.grads["logp"], 0.0, 1e-12, "differs", call, out.raised))
    return parts


def dual_clip_negative_only(b: Bench, x: Example) -> Parts:
    """Below 1 the ratio of a token with A > 0 is not clipped: its pull is the ratio times that at ratio 1."""
    usual = _single(x, 0.0, 1.0)
    at_one = b.run(usual).grads["logp"]
    parts = [Part("gradient of logp", at_one, 0.0, 1e-12, "differs", usual)]
    for log_ratio in (-0.1, -0.7, -2.0):
        call = _single(x, log_ratio, 1.0)
        out = b.run(call)
        size = np.abs(at_one) * 64 * EPS
        parts.append(Part("gradient of logp", out.grads["logp"], np.exp(log_ratio) * at_one, size, call=call,
            raised=out.raised))
    return parts


def rejected_not_counted(b: Bench, x: Example) -> Parts:
    """Every other slot is rejected; the sampler agrees at the others."""
    if "sampler_logp" not in x:
        raise NotApplied("the function takes no sampler_logp")
    kept = np.arange(x["mask"].shape[2]) % 2 == 0
    agreed = {**x, "sampler_logp": x["old_logp"]}
    call = {**agreed, "sampler_logp": np.where(kept, x["old_logp"], x["old_logp"] - 20.0)}
    return b.same(x, b.run(call), b.run({**agreed, "mask": np.where(kept, x["mask"], 0)}), call=call)


# --- every sequence of a small decision process: expected gradients are sums, not samples

TREE = {"": 0, "a": 1, "b": 2, "aa": 3}  # prefix -> decision; after a prefix that is not here, the sequence has ended
LEAVES = ("aaa", "aab", "ab", "ba", "bb")
LOGITS = np.array([[0.3, -0.2], [-0.6, 0.5], [0.8, 0.1], [-0.1, 0.7]])
REWARD = {"aaa": 1.0, "aab": -0.5, "ab": 0.25, "ba": 0.0, "bb": 2.0}


AWAY = 0.05 * np.array([[1.0, -1.0], [-1.0, 0.5], [0.5, 1.0], [-0.5, -1.0]])  # of another policy; no ratio is clipped


def gradient_of_expected_reward(b: Bench, x: Example) -> Parts:
    """sum over the leaves of p(leaf) grad f(leaf alone) is a positive multiple of -grad sum p(leaf) R(leaf)."""
    return _expected(b, x, LOGITS)


def gradient_off_policy(b: Bench, x: Example) -> Parts:
    """The same on samples of another policy, old_logp: sum of old p(leaf) grad f(leaf alone)."""
    return _expected(b, x, LOGITS + AWAY)


def _log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def _expected(b: Bench, x: Example, behaviour: np.ndarray) -> Parts:
    logp, old = _log_softmax(LOGITS), _log_softmax(behaviour)
    leaves, width = len(LEAVES), max(map(len, LEAVES))
    row = {k: np.zeros((leaves, 1, width)) for k in ("logp", "old_logp", "advantages", "mask")}
    score = np.zeros((leaves, width, *LOGITS.shape))
    for i, leaf in enumerate(LEAVES):
        for t, token in enumerate(leaf):
            node, a = TREE[leaf[:t]], "ab".index(token)
            row["logp"][i, 0, t], row["old_logp"][i, 0, t] = logp[node, a], old[node, a]
            row["mask"][i, 0, t], row["advantages"][i, 0, t] = 1, REWARD[leaf]
            score[i, t, node] = np.eye(2)[a] - np.exp(logp[node])
    others = {k: np.zeros((leaves, 1), v.dtype) if b.family.arg(k).axes == "B" else np.ones_like(row["logp"])
              for k, v in x.items() if k not in row}
    near = {k: row["old_logp"] for k in x if b.family.arg(k).kind == "near"}
    out = b.run({**others, **row, **near})
    probability = lambda which: np.exp((row[which] * row["mask"]).sum((1, 2)))  # noqa: E731
    got = np.einsum("i,it,itkv->kv", probability("old_logp"), out.grads["logp"][:, 0], score)
    true = -np.einsum("i,i,itkv->kv", probability("logp"), np.array([REWARD[leaf] for leaf in LEAVES]), score)
    c = max(float((got * true).sum() / (true * true).sum()), 0.0)
    n = len(x["logp"])
    spread = lambda v: np.broadcast_to(v, (n, *v.shape))  # noqa: E731
    tol = 1e-4 * np.abs(got).max() + 1e-30
    return [
        Part("expected gradient of the logits", spread(got), spread(c * true), tol, raised=out.raised),
        Part("slope along the gradient of the expected reward", np.full(n, c), 1e-9, 1e-10, "at_least"),
    ]
