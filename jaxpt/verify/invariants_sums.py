"""Laws of reductions, value losses, length rewards and router losses."""

import numpy as np

from jaxpt.verify.bench import DIFFERENCING, EPS, Bench, Part, Parts, column, over, tokens_of
from jaxpt.verify.generators import Example


def unit_loss(b: Bench, x: Example) -> dict[str, Parts]:
    """Every token's loss is 1."""
    ones = {**x, "per_token": np.ones_like(x["per_token"])}
    out, whole = b.run(ones), b.run({**ones, "mask": np.ones_like(x["mask"])})
    tokens, (_, rows, width) = tokens_of(x), x["mask"].shape
    full, some = (tokens > 0).sum(1), np.maximum((tokens > 0).sum(1), 1)
    part = lambda want: [Part("value", out.value, want, 256 * EPS * np.maximum(1, np.abs(want)), call=ones,
        raised=out.raised)]  # noqa: E731
    return {
        "a mean": part(np.ones(len(tokens))),
        "a mean over all rows": part(full / rows),
        "a sum by a constant": part(whole.value * tokens.sum(1) / (rows * width)),
        "a sum by rows with a token": part(whole.value * tokens.sum(1) / (some * width)),
    }


def linear(b: Bench, x: Example) -> Parts:
    y = {**x, "per_token": x["per_token"][:, ::-1, ::-1]}
    both = {**x, "per_token": 2 * x["per_token"] + y["per_token"]}
    out = b.run(both)
    tol = 2 * b.tol(x).value + b.tol(y).value
    return [Part("value", out.value, 2 * b.run(x).value + b.run(y).value, tol, call=both, raised=out.raised)]


def assignment(b: Bench, x: Example) -> Parts:
    """All rows in one micro-batch, every row in its own, or as they were."""
    parts, rows = [], x["micro"].shape[1]
    for labels in (np.zeros(rows, int), np.arange(rows)):
        call = {**x, "micro": np.broadcast_to(labels, x["micro"].shape).astype(x["micro"].dtype)}
        parts += b.same(x, b.run(call), b.run(x), call=call)
    return parts


def _means(b: Bench, x: Example, want: np.ndarray) -> Parts:
    out = b.run(x)
    return [Part("value", out.value, want, b.tol(x).value, raised=out.raised)]


def _sums(x: Example) -> tuple[np.ndarray, np.ndarray]:
    return np.where(x["mask"] > 0, x["per_token"], 0).sum(2), tokens_of(x)


def token_mean(b: Bench, x: Example) -> Parts:
    sums, tokens = _sums(x)
    return _means(b, x, sums.sum(1) / tokens.sum(1))


def sequence_mean(b: Bench, x: Example) -> dict[str, Parts]:
    sums, tokens = _sums(x)
    rows = (sums / np.maximum(tokens, 1)).sum(1)
    return {"rows with a token": _means(b, x, rows / (tokens > 0).sum(1)),
        "all rows": _means(b, x, rows / tokens.shape[1])}


def fixed_budget(b: Bench, x: Example) -> dict[str, Parts]:
    """A token weighs the same, whatever else counts: by comparison with the batch in which all tokens do."""
    (sums, tokens), width = _sums(x), x["mask"].shape[2]
    ones = {**x, "per_token": np.ones_like(x["per_token"]), "mask": np.ones_like(x["mask"])}
    a_token = b.run(ones).value / (tokens.shape[1] * width)
    some = tokens.shape[1] / (tokens > 0).sum(1)
    return {"all rows": _means(b, x, a_token * sums.sum(1)),
        "rows with a token": _means(b, x, a_token * some * sums.sum(1))}


# --- value losses


def zero_at_target(b: Bench, x: Example) -> Parts:
    call = {**x, "old_values": x["values"], "returns": x["values"]}
    out = b.run(call)
    return [Part("value", out.value, 0.0, 0.0, call=call, raised=out.raised),
        Part("gradient of values", out.grads["values"], 0.0, DIFFERENCING * 1e-2, call=call)]


def points_to_target(b: Bench, x: Example) -> Parts:
    """Where nothing is clipped: the gradient has the sign of value less return, everywhere that counts."""
    call = {**x, "old_values": x["values"]}
    out, error = b.run(call), x["values"] - x["returns"]
    counts = (x["mask"] > 0) & (np.abs(error) > 1e-3)
    some = counts.any((1, 2))
    return [Part("gradient of values, signed by value less return",
        np.where(counts, out.grads["values"] * np.sign(error), 1.0), 1e-12, 1e-13,
                 "at_least", call, out.raised),
            Part("value", np.where(some, out.value, 1.0), 1e-12, 1e-13, "at_least", call, out.raised)]


def pessimistic(b: Bench, x: Example) -> Parts:
    """The clip never makes the loss smaller."""
    free = b.run({**x, "old_values": x["values"]})
    out = b.run(x)
    return [Part("value", out.value, free.value, b.tol(x).value, "at_least", raised=out.raised)]


def half_square(b: Bench, x: Example) -> Parts:
    call = {**x, "old_values": x["values"], "mask": np.ones_like(x["mask"])}
    out, error = b.run(call), x["values"] - x["returns"]
    return [Part("value", out.value, (error**2).mean((1, 2)) / 2, b.tol(call).value, call=call, raised=out.raised)]


# --- length rewards


def length_range(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    return [Part("value", out.value, 0.0, 1e-6, "at_most", raised=out.raised),
        Part("value", out.value, -1.0, 1e-6, "at_least", raised=out.raised)]


def free_below(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    below = x["length"] <= (x["max_length"] - x["buffer"])[:, None]
    return [Part("value", np.where(below, out.value, 0), 0.0, 1e-6, raised=out.raised)]


def longer_is_no_better(b: Bench, x: Example) -> Parts:
    longer = {**x, "length": x["length"] + 2.0}
    out, base = b.run(longer), b.run(x)
    return [Part("value", out.value, base.value, 1e-6, "at_most", longer, out.raised)]


def linear_slope(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    over_by = (x["length"] - (x["max_length"] - x["buffer"])[:, None]) / x["buffer"][:, None]
    return [Part("value", out.value, -np.clip(over_by, 0, 1), 64 * EPS, raised=out.raised)]


# --- routers


def expert_relabelling(b: Bench, x: Example) -> Parts:
    experts = x["router_probs"].shape[2]
    call = {**x, "router_probs": x["router_probs"][:, :, ::-1], "expert_index": experts - 1 - x["expert_index"]}
    base = b.run(x)
    return b.same(x, b.run(call), base._replace(grads={k: g[:, :, ::-1] for k, g in base.grads.items()}), call=call)


def _balanced(x: Example) -> Example:
    _, tokens, experts = x["router_probs"].shape
    turn = (np.arange(tokens)[:, None] + np.arange(x["expert_index"].shape[2])) % experts
    return {**x, "router_probs": np.full_like(x["router_probs"], 1 / experts),
            "expert_index": np.broadcast_to(turn, x["expert_index"].shape).astype(x["expert_index"].dtype)}


def collapse_costs(b: Bench, x: Example) -> Parts:
    experts, k = x["router_probs"].shape[2], x["expert_index"].shape[2]
    if x["router_probs"].shape[1] < experts:
        return []
    sharp = np.broadcast_to(np.where(np.arange(experts) < k, 1 / k, 0.0), x["router_probs"].shape)
    call = {**x, "router_probs": sharp,
        "expert_index": np.broadcast_to(np.arange(k), x["expert_index"].shape).astype(x["expert_index"].dtype)}
    out, even = b.run(call), b.run(_balanced(x))
    return [Part("value", out.value - even.value, 1e-9, 1e-10, "at_least", call, out.raised)]


def reaches_probabilities(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    return [Part("largest gradient of router_probs", over(np.abs(out.grads["router_probs"])), 0.0, 1e-12, "differs",
        raised=out.raised)]


def one_at_balance(b: Bench, x: Example) -> Parts:
    call = _balanced(x)
    out = b.run(call)
    return [Part("value", out.value, 1.0, 64 * EPS, call=call, raised=out.raised)]


def probabilities_alone(b: Bench, x: Example) -> Parts:
    """The share of tokens is a constant: the gradient is linear in nothing but it."""
    half = {**x, "router_probs": (x["router_probs"] + 1 / x["router_probs"].shape[2]) / 2}
    out, base = b.run(half), b.run(x)
    g = base.grads["router_probs"]
    return [Part("gradient of router_probs", out.grads["router_probs"], g, column(1e-4 * over(np.abs(g)), g), call=half,
        raised=out.raised)]
