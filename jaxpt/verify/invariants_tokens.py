"""Laws of what is made of logits: log-probabilities of tokens, entropies, divergences between two models."""

import numpy as np

from jaxpt.verify.bench import EPS, Bench, NotApplied, Part, Parts, column, over
from jaxpt.verify.generators import Example

LOGITS = ("logits", "student_logits", "teacher_logits")


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def _logits(x: Example) -> list[str]:
    return [k for k in LOGITS if k in x]


def shift_invariance(b: Bench, x: Example) -> Parts:
    call = {**x, **{k: x[k] + 2.5 for k in _logits(x)}}
    return b.same(x, b.run(call), b.run(x), call=call)


def vocabulary_padding(b: Bench, x: Example) -> Parts:
    """One more entry, of logit -inf, on either side."""
    more = lambda v: np.concatenate([v, np.full((*v.shape[:-1], 1), -np.inf)], axis=-1)  # noqa: E731
    call = {**x, **{k: more(x[k]) for k in _logits(x)}}
    out = b.run(call)
    new = [Part(f"gradient of {k}", g[..., -1], 0.0, 0.0, call=call) for k, g in out.grads.items()]
    return b.same(x, out._replace(grads={k: g[..., :-1] for k, g in out.grads.items()}), b.run(x), call=call) + new


def vocabulary_permutation(b: Bench, x: Example) -> Parts:
    call = {**x, **{k: x[k][..., ::-1] for k in _logits(x)}}
    base = b.run(x)
    return b.same(x, b.run(call), base._replace(grads={k: g[..., ::-1] for k, g in base.grads.items()}), call=call)


def gradient_sums_to_zero(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    return [Part(f"sum over the vocabulary of the gradient of {k}", g.sum(-1), 0.0,
        b.tol(x).grads[k][..., 0] * g.shape[-1], raised=out.raised)
            for k, g in out.grads.items()]


# --- log-probabilities


def definition(b: Bench, x: Example) -> Parts:
    out, logp = b.run(x), log_softmax(x["logits"])
    if "tokens" in x:
        right = np.take_along_axis(logp[:, :, :-1], x["tokens"][:, :, 1:, None], axis=3)[..., 0]
    else:
        right = -(np.exp(logp) * logp).sum(-1)
    return [Part("value", out.value, right, b.tol(x).value, raised=out.raised)]


def alignment(b: Bench, x: Example) -> Parts:
    """Another logit at t changes result t and no other; another token t + 1 as well; the last row changes nothing."""
    base, width = b.run(x), x["tokens"].shape[2]
    parts, tol = [], b.tol(x).value
    for t in range(width):
        bumped = x["logits"].copy()
        bumped[:, :, t, 0] += 1.0
        others = np.arange(width - 1) != t
        call = {**x, "logits": bumped}
        out = b.run(call)
        parts.append(Part("value", out.value[:, :, others], base.value[:, :, others], tol, call=call,
            raised=out.raised))
        if t < width - 1:
            parts.append(Part("value", out.value[:, :, t], base.value[:, :, t], 1e-4, "differs", call, out.raised))
        if t:
            tokens = x["tokens"].copy()
            tokens[:, :, t] = (tokens[:, :, t] + 1) % x["logits"].shape[-1]
            others, call = np.arange(width - 1) != t - 1, {**x, "tokens": tokens}
            out = b.run(call)
            parts.append(Part("value", out.value[:, :, others], base.value[:, :, others], tol, call=call,
                raised=out.raised))
    return parts


def normalised(b: Bench, x: Example) -> Parts:
    total = 0.0
    for v in range(x["logits"].shape[-1]):
        total = total + np.exp(b.run({**x, "tokens": np.full_like(x["tokens"], v)}).value)
    return [Part("sum of probabilities over the vocabulary", total, 1.0, 8 * b.tol(x).value)]


def temperature(b: Bench, x: Example) -> Parts:
    if "temperature" not in b.takes:
        raise NotApplied("the function takes no temperature")
    warm, cool = {**x, "temperature": 2 * x["temperature"]}, {**x, "logits": x["logits"] / 2}
    out, want = b.run(warm), b.run(cool)
    return [Part("value", out.value, want.value, b.tol(x).value, call=warm, raised=out.raised)]


# --- entropy


def bounds(b: Bench, x: Example) -> Parts:
    out, tol = b.run(x), b.tol(x).value
    return [Part("value", out.value, 0.0, tol, "at_least", raised=out.raised),
            Part("value", out.value, np.log(x["logits"].shape[-1]), tol, "at_most", raised=out.raised)]


def uniform(b: Bench, x: Example) -> Parts:
    call = {**x, "logits": np.broadcast_to(x["logits"][..., :1], x["logits"].shape)}
    out = b.run(call)
    return [Part("value", out.value, np.log(x["logits"].shape[-1]), 256 * EPS, call=call, raised=out.raised)]


# --- divergences


def zero_at_equality(b: Bench, x: Example) -> Parts:
    call = {**x, "student_logits": x["teacher_logits"]}
    out, other = b.run(call), b.run(x)
    tol = 256 * EPS * np.maximum(1.0, np.abs(np.where(np.isfinite(other.value), other.value, 0)))
    return [Part("value", out.value, 0.0, tol, call=call, raised=out.raised),
            Part("gradient of student_logits", out.grads["student_logits"], 0.0,
                column(tol, out.grads["student_logits"]), call=call)]


def positive_apart(b: Bench, x: Example) -> Parts:
    """Not below 0; and above it where the two differ, a token at a time."""
    out, kept = b.run(x), x["mask"] > 0
    apart = over(np.where(kept, np.abs(log_softmax(x["student_logits"]) - log_softmax(x["teacher_logits"])).max(-1),
        0)) > 0.1
    return [Part("value", out.value, 0.0, 64 * EPS, "at_least", raised=out.raised),
            Part("value", np.where(apart, out.value, 1.0), 1e-7, 1e-8, "at_least", raised=out.raised)]


def vocabulary_duplication(b: Bench, x: Example) -> Parts:
    """Two entries of the same logit are half as likely each."""
    call = {**x, **{k: np.repeat(x[k], 2, axis=-1) for k in _logits(x)}}
    out = b.run(call)
    return [Part("value", out.value, b.run(x).value, b.tol(x).value, call=call, raised=out.raised)]


def _mean_of(b: Bench, x: Example, divergence) -> Parts:
    """With every token, all means over tokens and rows are one."""
    call = {**x, "mask": np.ones_like(x["mask"])}
    out = b.run(call)
    want = divergence(log_softmax(x["student_logits"]), log_softmax(x["teacher_logits"])).sum(-1).mean((1, 2))
    return [Part("value", out.value, want, b.tol(call).value, call=call, raised=out.raised)]


def forward_kl(b: Bench, x: Example) -> Parts:
    return _mean_of(b, x, lambda s, t: np.exp(t) * (t - s))


def reverse_kl(b: Bench, x: Example) -> Parts:
    return _mean_of(b, x, lambda s, t: np.exp(s) * (s - t))


def generalised_jsd(b: Bench, x: Example) -> Parts:
    if "beta" not in x:
        raise NotApplied("the function takes no beta")
    share = x["beta"][:, None, None, None]

    def gap(s, t):
        entropy = lambda logp: -np.exp(logp) * logp  # noqa: E731
        m = np.logaddexp(t + np.log(share), s + np.log1p(-share))
        return entropy(m) - share * entropy(t) - (1 - share) * entropy(s)
    return _mean_of(b, x, gap)


def jsd(b: Bench, x: Example) -> Parts:
    def half(s, t):
        m = np.logaddexp(s, t) - np.log(2)
        return 0.5 * (np.exp(s) * (s - m) + np.exp(t) * (t - m))
    return _mean_of(b, x, half)
