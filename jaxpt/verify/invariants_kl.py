"""Laws of KL estimators f(logp, ref_logp) and of penalties made of them. Expectations are sums over a vocabulary."""

import numpy as np

from jaxpt.verify.bench import EPS, Bench, Part, Parts, column, over
from jaxpt.verify.generators import Example


def _equal(x: Example) -> Example:
    return {**x, "ref_logp": x["logp"]}


def kl_zero(b: Bench, x: Example) -> Parts:
    call = _equal(x)
    out = b.run(call)
    return [Part("value", out.value, 0.0, 0.0, call=call, raised=out.raised)]


def elementwise(b: Bench, x: Example) -> Parts:
    call = {k: v[:, :, ::-1] for k, v in x.items()}
    out, base = b.run(call), b.run(x)
    return b.same(x, out,
        base._replace(value=base.value[:, :, ::-1], grads={k: g[:, :, ::-1] for k, g in base.grads.items()}),
                  call=call)


def no_nan(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    nan = lambda v: np.where(np.isnan(v), np.nan, 0.0)  # noqa: E731
    return [Part("value", nan(out.value), 0.0, 0.0, "finite", raised=out.raised)] + [
        Part(f"gradient of {k}", nan(g), 0.0, 0.0, "finite") for k, g in out.grads.items()
    ]


def _normal(z: np.ndarray) -> np.ndarray:
    """Log-probabilities [n, B, V]: a row's tokens are a whole vocabulary."""
    z = z - z.max(2, keepdims=True)
    return z - np.log(np.exp(z).sum(2, keepdims=True))


def _distributions(x: Example) -> tuple[np.ndarray, np.ndarray]:
    return _normal(x["logp"]), _normal(x["ref_logp"])


def _expectations(logp: np.ndarray, logq: np.ndarray) -> dict[str, np.ndarray]:
    """What a right estimator may be on average, [n, B]."""
    p, q, d = np.exp(logp), np.exp(logq), logp - logq
    means = {"KL(policy || reference)": p * d, "KL(reference || policy)": -q * d,
        "half the mean square of the log-ratio": p * d**2 / 2,
             "the mean square of the log-ratio": p * d**2, "the mean size of the log-ratio": p * np.abs(d)}
    return {name: v.sum(2) for name, v in means.items()}


def _as_whole(x: Example) -> Example:
    logp, logq = _distributions(x)
    beside = {"mask": np.ones_like(logp)} if "mask" in x else {"old_logp": logp} if "old_logp" in x else {}
    return {**x, "logp": logp, "ref_logp": logq, **beside}


def kl_expectation(b: Bench, x: Example) -> dict[str, Parts]:
    call = _as_whole(x)
    logp, logq = call["logp"], call["ref_logp"]
    if "mask" not in x:
        out = b.run(call)
        terms = np.exp(logp) * out.value
        tol = 256 * EPS * np.maximum(1.0, np.abs(terms).sum(2))
        return {name: [Part("expected value", terms.sum(2), want, tol, call=call, raised=out.raised)]
                for name, want in _expectations(logp, logq).items()}
    n, rows, size = logp.shape
    alone = {k: v.reshape(-1, 1, 1) for k, v in call.items()}  # a penalty is told apart token by token
    out = b.run(alone)
    mean = (np.exp(logp) * out.value.reshape(n, rows, size)).sum(2)
    tol = 512 * EPS * np.maximum(1.0, np.abs(mean).max(1))[:, None]
    parts = {}
    for name, want in _expectations(logp, logq).items():
        c = np.maximum((mean * want).sum(1) / np.maximum((want**2).sum(1), 1e-30), 0.0)[:, None]
        parts[name] = [Part("expected value", mean, c * want, tol * np.maximum(c, 1.0), call=call, raised=out.raised)]
    return parts


def unbiased(b: Bench, x: Example) -> Parts:
    return kl_expectation(b, x)["KL(policy || reference)"]


def no_clamp(b: Bench, x: Example) -> Parts:
    """The gradient does not vanish where the policy has left the reference."""
    parts = []
    for gap in (-8.0, -4.0, 4.0, 8.0):
        ref = np.full_like(x["logp"], -10.0)
        call = {**x, "logp": ref + gap, "ref_logp": ref, **({"old_logp": ref + gap} if "old_logp" in x else {})}
        out = b.run(call)
        kept = b.slots(x, "logp")
        parts.append(Part("gradient of logp", np.where(kept, out.grads["logp"], 1.0), 0.0, 1e-12, "differs", call,
            out.raised))
    return parts


def gradient_of_kl(b: Bench, x: Example) -> Parts:
    """sum_v p_v k'(v) grad log p_v is a positive multiple of the gradient of KL(policy || reference)."""
    call = _as_whole(x)
    return _pulls_as_kl(b, call, np.exp(call["logp"]))


def gradient_of_kl_off_policy(b: Bench, x: Example) -> Parts:
    """The same with samples of another policy: sum_v old_v k'(v) grad log p_v."""
    old = _normal(x.get("old_logp", x["logp"][:, :, ::-1]))
    call = {**_as_whole(x), **({"old_logp": old} if "old_logp" in x else {})}
    return _pulls_as_kl(b, call, np.exp(old))


def _pulls_as_kl(b: Bench, call: Example, drawn: np.ndarray) -> Parts:
    """drawn [n, B, V]: how often each token is."""
    logp, logq = call["logp"], call["ref_logp"]
    p, d = np.exp(logp), logp - logq
    out = b.run(call)
    pull = drawn * out.grads["logp"]
    got = pull - p * pull.sum(2, keepdims=True)
    true = p * (d - (p * d).sum(2, keepdims=True))
    c = over(got * true, np.sum) / np.maximum(over(true**2, np.sum), 1e-30)
    silent = over(np.abs(true)) < 1e-6
    digits = 4 * np.maximum(c, 0) * over(p * (np.abs(logp) + np.abs(logq)))  # of log-ratios that all but cancel
    tol = EPS * np.maximum(512 * over(np.abs(pull)) + digits, 1e-30)
    return [
        Part("expected gradient of the logits", got, column(np.maximum(c, 0), true) * true, column(tol, got), call=call,
            raised=out.raised),
        Part("slope along the KL's gradient", np.where(silent, 1.0, c), 1e-9, 1e-10, "at_least", call=call),
    ]
