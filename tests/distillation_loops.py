"""The divergences on probabilities as float64 loops, entry by entry, and the constants that they are tried with."""

import numpy as np

from jaxpt.objectives.distillation import ROWS

TABLE = {row.name: row for row in ROWS if row.family == "distillation"}
HYPER = {name: dict(row.hyper) for name, row in TABLE.items()} | {
    "jsd": {"beta": 0.25}, "gkd": {"beta": 0.25}, "jsd_rescaled": {"beta": 0.75}, "alpha_divergence": {"alpha": 0.3},
    "top_k_forward_kl": {"k": 2.0}, "top_k_reverse_kl": {"k": 2.0},
}


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return e / e.sum()


def kl(a, b):
    return sum(x * np.log(x / y) for x, y in zip(a, b) if x > 0)


def mixture(weight, a, b):
    return [weight * x + (1 - weight) * y for x, y in zip(a, b)]


def js(s, t, beta):
    m = mixture(beta, t, s)
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def coarse(s, t, k):
    head = sorted(range(len(t)), key=lambda v: -t[v])[: int(k)]
    return tuple([x[v] for v in head] + [1 - sum(x[v] for v in head)] for x in (s, t))


PAPER = {  # of the student's and the teacher's probabilities
    "forward_kl": lambda s, t: kl(t, s),
    "reverse_kl": lambda s, t: kl(s, t),
    "minillm_single_step": lambda s, t: kl(s, t),
    "jsd": lambda s, t, beta: js(s, t, beta),
    "gkd": lambda s, t, beta: js(s, t, beta),
    "jsd_rescaled": lambda s, t, beta: js(s, t, beta) / (beta * (1 - beta)),
    "skew_kl": lambda s, t, alpha: kl(t, mixture(alpha, t, s)),
    "skew_reverse_kl": lambda s, t, alpha: kl(s, mixture(alpha, s, t)),
    "tvd": lambda s, t: sum(abs(x - y) for x, y in zip(s, t)) / 2,
    "alpha_divergence": lambda s, t, alpha: (1 - sum(y**alpha * x ** (1 - alpha) for x, y in zip(s, t))) / (alpha * (1 - alpha)),
    "top_k_forward_kl": lambda s, t, k: kl(*coarse(s, t, k)[::-1]),
    "top_k_reverse_kl": lambda s, t, k: kl(*coarse(s, t, k)),
}


def token(name, student, teacher, hyper):
    if name == "kd":
        tau = hyper["temperature"]
        return tau**2 * kl(softmax(teacher / tau), softmax(student / tau))
    return PAPER[name](softmax(student), softmax(teacher), **hyper)


def loop(name, batch, hyper=HYPER):
    at = np.argwhere(batch["mask"])
    values = [token(name, batch["student_logits"][i, t], batch["teacher_logits"][i, t], hyper[name]) for i, t in at]
    return sum(values) / len(values) if values else 0.0
