"""Laws of losses of comparisons: preferences by sequence and by token, desirable or not, scores of a reward model."""

import numpy as np

from jaxpt.verify import invariants_masks as rows
from jaxpt.verify.bench import EPS, Bench, NotApplied, Part, Parts, column, over
from jaxpt.verify.generators import Example

TOKENS = ("chosen_mask", "rejected_mask")


def _pairs(x: Example) -> tuple[str, str]:
    return ("chosen_score", "rejected_score") if "chosen_score" in x else ("chosen_logp", "rejected_logp")


def _per_pair(g: np.ndarray) -> np.ndarray:
    """[n, N]"""
    return g if g.ndim == 2 else g.sum(2)


def _level(x: Example) -> Example:
    """Where nothing tells chosen and rejected apart: policy and reference agree, or the two are one text."""
    if "chosen_score" in x:
        return {**x, "rejected_score": x["chosen_score"]}
    if "chosen_mask" in x:
        ref = {k: x["chosen_logp"] for k in ("ref_chosen_logp", "ref_rejected_logp") if k in x}
        return {**x, "rejected_logp": x["chosen_logp"], "rejected_mask": x["chosen_mask"], **ref}
    return {k: x["chosen_logp"] for k in x}


def _there(x: Example) -> np.ndarray:
    """[n, N]: pairs of which something counts on both sides."""
    if "chosen_mask" not in x:
        return np.ones(x[_pairs(x)[0]].shape, bool)
    return np.all([(x[m] > 0).any(2) for m in TOKENS], axis=0)


def descends(b: Bench, x: Example) -> Parts:
    x = _level(x)
    out, there = b.run(x), _there(x)
    up, down = (_per_pair(out.grads[k]) for k in _pairs(x))
    small = 256 * EPS * np.maximum(over(np.abs(up)), over(np.abs(down)))[:, None]
    clean = lambda v, other: np.where(there, v, other)  # noqa: E731
    return [
        Part("slope along the margin", clean(up - down, -1.0), -1e-30, 1e-31, "at_most", x, out.raised),
        Part(f"gradient of {_pairs(x)[0]}", clean(up, 0.0), 0.0, small, "at_most", x, out.raised),
        Part(f"gradient of {_pairs(x)[1]}", clean(down, 0.0), 0.0, small, "at_least", x, out.raised),
    ]


def margin_direction(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    up, down = (out.grads[k] for k in _pairs(x))
    small = 256 * EPS * np.maximum(over(np.abs(up)), over(np.abs(down)))[:, None]
    return [Part("slope along the margin", up - down, 0.0, small, "at_most", raised=out.raised)]


def _usual(x: Example) -> Example:
    """Near to where nothing tells the two apart, and nowhere special; log-probabilities stay below 0."""
    x = _level(x)
    chosen, rejected = _pairs(x)
    size = np.linspace(1.0, 1.2, x[chosen].shape[1]).reshape(1, -1, *(1,) * (x[chosen].ndim - 2))
    return {**x, chosen: x[chosen] - 0.2 * size, rejected: x[rejected] - 0.3 * size}


def _total(v: np.ndarray) -> np.ndarray:
    """[n]"""
    return v if v.ndim == 1 else v.sum(1)


def _moves(b: Bench, base: Example, calls: list[Example], what: str, there: np.ndarray | bool = True) -> Part:
    """One of the calls has another value than the base: several, because one may be equal by chance."""
    outs, usual = [b.run(call) for call in calls], _total(b.run(base).value)
    moved = np.max([np.abs(_total(out.value) - usual) for out in outs], axis=0)
    return Part(f"change of the value with {what}", np.where(there, moved, np.inf), 0.0, 1e-6 * np.abs(usual),
        "differs", calls[-1],
                outs[-1].raised)


def _matters(b: Bench, x: Example, names: list[str]) -> Parts:
    x, there = _usual(x), _there(x).any(1)
    return [_moves(b, x, [{**x, name: x[name] - far} for far in (1.3, 3.0)], name, there) for name in names]


def policy_matters(b: Bench, x: Example) -> Parts:
    return _matters(b, x, list(_pairs(x)))


def reference_matters(b: Bench, x: Example) -> Parts:
    names = [k for k in ("ref_chosen_logp", "ref_rejected_logp") if k in x]
    if not names:
        raise NotApplied("the function takes no reference")
    return _matters(b, x, names)


def margin_matters(b: Bench, x: Example) -> Parts:
    if "margin" not in x:
        raise NotApplied("the function takes no margin")
    x = _usual(x)
    call = {**x, "margin": x["margin"] + 0.7}
    out, base = b.run(call), b.run(x)
    return [Part("value", out.value, base.value + 1e-6, 1e-7, "at_least", call, out.raised)]


def not_exchangeable(b: Bench, x: Example) -> Parts:
    def swapped(x):
        other = {k: k.replace("chosen", "?").replace("rejected", "chosen").replace("?", "rejected") for k in x}
        return {k: x[other[k]] if other[k] in x else v for k, v in x.items()}

    chosen, _ = _pairs(x)
    x, there = _usual(x), _there(x).any(1)
    both = [(_total(b.run(y).value), _total(b.run(swapped(y)).value)) for y in (x, {**x, chosen: x[chosen] - 1.7})]
    gap = np.max([np.abs(one - other) for one, other in both], axis=0)
    return [Part("change of the value with chosen and rejected exchanged", np.where(there, gap, np.inf), 0.0,
        1e-6 * np.abs(both[0][0]),
                 "differs", swapped(x))]


def pairs_apart(b: Bench, x: Example) -> Parts | dict[str, Parts]:
    """Of results a pair: another first pair changes the first result alone. Of a scalar: `partition`."""
    if b.run(x).value.ndim == 1:
        return rows.partition(b, x)
    call = {k: v.copy() for k, v in x.items()}
    call["chosen_logp"][:, 0] -= 3.0
    out, base = b.run(call), b.run(x)
    return [Part("value", out.value[:, 1:], base.value[:, 1:], b.tol(x).value, call=call, raised=out.raised)]


def log2_at_margin_0(b: Bench, x: Example) -> Parts:
    x = _level(x)
    out, there = b.run(x), _there(x).all(1)
    there = there if out.value.ndim == 1 else there[:, None]
    return [Part("value", np.where(there, out.value, np.log(2)), np.log(2), 256 * EPS, call=x, raised=out.raised)]


def monotone(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    up, down = (out.grads[k] for k in _pairs(x))
    small = lambda v: column(256 * EPS * over(np.abs(v)), v)  # noqa: E731
    return [Part(f"gradient of {_pairs(x)[0]}", up, 0.0, small(up), "at_most", raised=out.raised),
            Part(f"gradient of {_pairs(x)[1]}", down, 0.0, small(down), "at_least", raised=out.raised)]


def exchange_is_linear(b: Bench, x: Example) -> Parts:
    """What exchanging chosen and rejected changes, at the example's log-ratios or scores and at twice as large ones."""
    chosen, rejected = _pairs(x)
    ref = {k: x.get(f"ref_{k}", 0.0) for k in (chosen, rejected)}
    at_zero = {"margin": np.zeros_like(x["margin"])} if "margin" in x else {}

    def put(size: float, first: str, second: str) -> Example:
        gains = {k: size * (x[k] - ref[k]) for k in (first, second)}
        return {**x, **at_zero, chosen: ref[chosen] + gains[first], rejected: ref[rejected] + gains[second]}

    calls = [(put(size, chosen, rejected), put(size, rejected, chosen)) for size in (1.0, 2.0)]
    once, twice = (b.run(call).value - b.run(exchanged).value for call, exchanged in calls)
    far = calls[1][0]
    return [Part("change of the value with the two exchanged, at twice the margin", twice, 2 * once, 2 * b.tol(far).value,
                 call=far, raised=b.run(far).raised)]


def log_ratios_only(b: Bench, x: Example) -> Parts:
    call = {**x, **{k: x[k] - 4.0 for k in ("chosen_logp", "ref_chosen_logp")}}
    return b.same(x, b.run(call), b.run(x), call=call)


def length_normalised(b: Bench, x: Example) -> Parts:
    """Every token twice."""
    call = {k: np.repeat(v, 2, axis=2) for k, v in x.items()}
    out = b.run(call)
    return [Part("value", out.value, b.run(x).value, b.tol(x).value, call=call, raised=out.raised)]


def shift_invariance(b: Bench, x: Example) -> Parts:
    call = {**x, **{k: x[k] + 2.0 for k in _pairs(x)}}
    return b.same(x, b.run(call), b.run(x), call=call)


# --- one response a row, desirable or not


def label_direction(b: Bench, x: Example) -> Parts:
    """A desirable response is pushed up, another one down: nowhere the other way, and where policy and reference agree
    with some strength."""
    side = np.where(x["desirable"] > 0, -1.0, 1.0)
    level = {**x, "ref_logp": x["logp"], "kl_ref_logp": x["kl_logp"]}
    out, at = b.run(x), b.run(level)
    g = out.grads["logp"]
    return [Part("gradient of logp, signed by the label", g * side, 0.0, column(256 * EPS * over(np.abs(g)), g),
        "at_least", x, out.raised),
            Part("gradient of logp, signed by the label", at.grads["logp"] * side, 1e-9, 1e-10, "at_least", level,
                at.raised)]


def labels_matter(b: Bench, x: Example) -> Parts:
    rows = x["logp"].shape[1]
    kinds = np.broadcast_to((np.arange(rows) % 2).astype(float), x["logp"].shape)
    x = {**x, "logp": x["ref_logp"] + np.arange(1, rows + 1) * 0.7}
    return [_moves(b, {**x, "desirable": kinds},
        [{**x, "desirable": 1 - kinds}, {**x, "desirable": np.ones_like(kinds)}], "desirable")]


def one_kind(b: Bench, x: Example) -> Parts:
    parts = []
    for label in (0.0, 1.0):
        call = {**x, "desirable": np.full_like(x["desirable"], label)}
        out = b.run(call)
        parts += [Part("value", out.value, 0.0, 0.0, "finite", call, out.raised),
                  Part("gradient of logp", out.grads["logp"], 0.0, 0.0, "finite", call, out.raised)]
    return parts


def reference_point_matters(b: Bench, x: Example) -> Parts:
    """A larger KL of the mismatched pairs moves the reference point."""
    x = {**x, "desirable": np.ones_like(x["desirable"]), "logp": x["ref_logp"] + 1.0}
    calls = [{**x, "kl_logp": x["kl_ref_logp"] + far} for far in (3.0, 5.0)]
    return [_moves(b, {**x, "kl_logp": x["kl_ref_logp"] + 1.0}, calls, "kl_logp")]


def mirror(b: Bench, x: Example) -> Parts:
    """The mismatched pairs have a log-ratio of 0, so that a reference point made of them is 0 as well."""
    level = {**x, "kl_logp": x["kl_ref_logp"]}
    call = {**level, "logp": 2 * x["ref_logp"] - x["logp"], "desirable": 1 - x["desirable"]}
    out = b.run(call)
    return [Part("value", out.value, b.run(level).value, b.tol(x).value + b.tol(call).value, call=call, raised=out.raised)]


def one_reference_point(b: Bench, x: Example) -> Parts:
    call = {**x, **{k: np.roll(x[k], 1, axis=1) for k in ("kl_logp", "kl_ref_logp")}}
    return b.same(x, b.run(call), b.run(x), call=call)
