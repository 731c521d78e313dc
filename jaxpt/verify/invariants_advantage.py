"""Laws of advantages and returns: groups of rewards, GAE, discounted returns, whitening."""

import numpy as np

from jaxpt.verify.bench import EPS, Bench, NotApplied, Part, Parts, column
from jaxpt.verify.generators import Example


def _same_group(x: Example) -> np.ndarray:
    """[n, B, B]"""
    return x["group"][:, :, None] == x["group"][:, None, :]


def _members(x: Example) -> np.ndarray:
    return _same_group(x).sum(2)


def group_permutation(b: Bench, x: Example) -> Parts:
    call = {k: np.roll(v, 3, axis=1)[:, ::-1] for k, v in x.items()}
    out, base = b.run(call), b.run(x)
    want = np.roll(base.value, 3, axis=1)[:, ::-1]
    return [Part("value", out.value, want, b.tol(x).value, call=call, raised=out.raised)]


def relabelling(b: Bench, x: Example) -> Parts:
    call = {**x, "group": x["group"].max(1, keepdims=True) - x["group"]}
    out = b.run(call)
    return [Part("value", out.value, b.run(x).value, b.tol(x).value, call=call, raised=out.raised)]


def shift_invariance(b: Bench, x: Example) -> Parts:
    """Of groups of two or more; in eighths, so that the sum is exact."""
    x = {**x, "rewards": np.round(x["rewards"] * 8) / 8}
    call = {**x, "rewards": x["rewards"] + 2.0}
    out, base, several = b.run(call), b.run(x), _members(x) > 1
    tol = b.tol(x).value + b.tol(call).value
    return [Part("value", np.where(several, out.value, 0), np.where(several, base.value, 0), tol, call=call,
        raised=out.raised)]


def equal_rewards(b: Bench, x: Example) -> Parts:
    """Every member has the reward of the group's first."""
    first = np.argmax(_same_group(x), axis=2)
    rewards = np.take_along_axis(x["rewards"], first, axis=1)
    call = {**x, "rewards": rewards}
    out, several = b.run(call), _members(x) > 1
    tol = 16 * EPS * np.maximum(1.0, np.abs(rewards))
    return [Part("value", np.where(several, out.value, 0), 0.0, tol, call=call, raised=out.raised)]


def groups_apart(b: Bench, x: Example) -> Parts:
    mine = x["group"] == x["group"][:, :1]
    call = {**x, "rewards": np.where(mine, 1.5 - 2 * x["rewards"], x["rewards"])}
    out, base = b.run(call), b.run(x)
    return [Part("value", np.where(mine, 0, out.value), np.where(mine, 0, base.value), b.tol(x).value, call=call,
        raised=out.raised)]


def order(b: Bench, x: Example) -> Parts:
    out, r = b.run(x), x["rewards"]
    above = _same_group(x) & (r[:, :, None] > r[:, None, :] + 1e-5 * np.abs(r).max(1)[:, None, None])
    gap = out.value[:, :, None] - out.value[:, None, :]
    return [Part("advantage of the larger reward less that of the smaller", np.where(above, gap, 0.0), 0.0,
        column(b.tol(x).value[:, 0], gap), "at_least",
        raised=out.raised)]


def _scaled(b: Bench, x: Example, by: float) -> Parts:
    """Rewards doubled. An epsilon beside a deviation may be 1e-3 of it."""
    call = {**x, "rewards": 2 * x["rewards"]}
    out, base, several = b.run(call), b.run(x), _members(x) > 1
    tol = b.tol(x).value + b.tol(call).value + 1e-2 * np.abs(base.value)
    return [Part("value", np.where(several, out.value, 0), np.where(several, by * base.value, 0), tol, call=call,
        raised=out.raised)]


def scale_invariance(b: Bench, x: Example) -> Parts:
    return _scaled(b, x, 1.0)


def scale_equivariance(b: Bench, x: Example) -> Parts:
    return _scaled(b, x, 2.0)


def leave_one_out_independence(b: Bench, x: Example) -> Parts:
    """The baseline of the first row is the same whatever its reward is."""
    up = np.zeros_like(x["rewards"])
    up[:, 0] = 0.5
    call = {**x, "rewards": x["rewards"] + up}
    out, base, several = b.run(call), b.run(x), _members(x)[:, :1] > 1
    got = np.where(several, out.value[:, :1] - base.value[:, :1], 0.5)
    return [Part("change of the first row's advantage", got, 0.5, b.tol(x).value + b.tol(call).value, call=call,
        raised=out.raised)]


def sums_to_zero(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    sums = np.einsum("nij,nj->ni", _same_group(x), out.value)
    return [Part("sum over the group", np.where(_members(x) > 1, sums, 0), 0.0, 8 * b.tol(x).value, raised=out.raised)]


def highest_gains(b: Bench, x: Example) -> Parts:
    """The rewards of the group differ by more than rounding."""
    out, same, r = b.run(x), _same_group(x), x["rewards"]
    inside = lambda v, fill: np.where(same, v[:, None, :], fill)  # noqa: E731
    at = lambda which: np.take_along_axis(out.value, which, axis=1)  # noqa: E731
    top, bottom = np.argmax(inside(r, -np.inf), axis=2), np.argmin(inside(r, np.inf), axis=2)
    differ = np.take_along_axis(r, top, 1) - np.take_along_axis(r, bottom, 1) > 1e-5 * np.abs(r).max(1, keepdims=True)
    gap = np.where(differ, at(top) - at(bottom), 1.0)
    return [Part("advantage of the highest reward less that of the lowest", gap, 1e-9, 1e-10, "at_least",
                 raised=out.raised)]


def unit_deviation(b: Bench, x: Example) -> dict[str, Parts]:
    """Of groups whose rewards differ; an epsilon beside the deviation may be 1e-2 of it."""
    out, same, n = b.run(x), _same_group(x), _members(x)
    r, several = x["rewards"], n > 1
    spread = np.where(same, r[:, None, :], -np.inf).max(2) - np.where(same, r[:, None, :], np.inf).min(2)
    differ = several & (spread > 1e-5 * np.abs(r).max(1, keepdims=True))
    mean = np.einsum("nij,nj->ni", same, out.value) / n
    squares = np.where(same, (out.value[:, None, :] - mean[:, :, None]) ** 2, 0).sum(2)
    variance = lambda ddof: np.where(differ, squares / np.maximum(n - ddof, 1), 1.0)  # noqa: E731
    return {f"over n - {ddof}": [Part("variance within the group", variance(ddof), 1.0, 2e-2, raised=out.raised)]
            for ddof in (0, 1)}


def singleton_zero(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    return [Part("value", np.where(_members(x) == 1, out.value, 0), 0.0, 0.0, raised=out.raised)]


def missing_rewards(b: Bench, x: Example) -> Parts:
    """The first row's reward is NaN: it gets 0, and the others get what they get without it."""
    call = {**x, "rewards": x["rewards"].copy()}
    call["rewards"][:, 0] = np.nan
    rest = {k: v[:, 1:] for k, v in x.items()}
    if not rest["rewards"].shape[1]:
        return []
    out, without = b.run(call), b.run(rest)
    return [
        Part("value", out.value[:, :1], 0.0, 0.0, call=call, raised=out.raised),
        Part("value", out.value[:, 1:], without.value, b.tol(rest).value, call=call, raised=out.raised),
    ]


# --- along a row


def _back(x: Example, lam: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A = r + gamma V' - V + gamma lam A' over the steps that count, V' and A' the next one's; 0 elsewhere."""
    kept, gamma = x["mask"] > 0, x["gamma"][:, None]
    value = ahead = np.zeros(kept.shape[:2])
    out = np.zeros(kept.shape)
    for t in reversed(range(kept.shape[2])):
        now = x["rewards"][:, :, t] + gamma * value - values[:, :, t] + gamma * lam[:, None] * ahead
        value, ahead = np.where(kept[:, :, t], values[:, :, t], value), np.where(kept[:, :, t], now, ahead)
        out[:, :, t] = np.where(kept[:, :, t], now, 0)
    return out


def _against(b: Bench, x: Example, right: np.ndarray) -> Parts:
    out = b.run(x)
    return [Part("value", np.where(x["mask"] > 0, out.value, 0), right, b.tol(x).value, call=x, raised=out.raised)]


def one_step(b: Bench, x: Example) -> Parts:
    x = {**x, "lam": np.zeros_like(x["lam"])}
    return _against(b, x, _back(x, x["lam"], x["values"]))


def to_the_end(b: Bench, x: Example) -> Parts:
    x = {**x, "lam": np.ones_like(x["lam"])}
    return _against(b, x, _back(x, x["lam"], x["values"]))


def recursion(b: Bench, x: Example) -> Parts:
    if "values" in x:
        return _against(b, x, _back(x, x["lam"], x["values"]))
    return _against(b, x, _back(x, np.ones_like(x["gamma"]), np.zeros_like(x["rewards"])))


def telescoping(b: Bench, x: Example) -> Parts:
    """gamma = lam = 1: all that is still to come, less the value."""
    ones = {k: np.ones_like(x[k]) for k in ("gamma", "lam") if k in x}
    x = {**x, **ones}
    kept = x["mask"] > 0
    to_go = np.cumsum((x["rewards"] * kept)[:, :, ::-1], axis=2)[:, :, ::-1]
    return _against(b, x, np.where(kept, to_go - x.get("values", 0.0), 0))


def masked_reward_dropped(b: Bench, x: Example) -> Parts:
    call = {**x, "rewards": np.where(x["mask"] > 0, x["rewards"], 0.75)}
    out, kept = b.run(call), x["mask"] > 0
    return [Part("value", np.where(kept, out.value, 0), np.where(kept, b.run(x).value, 0), b.tol(x).value, call=call,
        raised=out.raised)]


# --- whitening


def _statistics(v: np.ndarray, kept: np.ndarray, axes: tuple[int, ...], ddof: int) -> tuple[np.ndarray, np.ndarray,
    np.ndarray]:
    n = kept.sum(axes)
    total = np.where(kept, v, 0).sum(axes) / np.maximum(n, 1)
    centred = np.where(kept, v - np.expand_dims(total, axes), 0)
    return total, (centred**2).sum(axes) / np.maximum(n - ddof, 1), n


READINGS = {"the batch, ddof 0": ((1, 2), 0), "the batch, ddof 1": ((1, 2), 1), "every row, ddof 0": ((2,), 0),
    "every row, ddof 1": ((2,), 1)}


def moments(b: Bench, x: Example) -> dict[str, Parts]:
    """Where there are two numbers or more, and they vary."""
    out, kept, parts = b.run(x), x["mask"] > 0, {}
    noise = lambda like: column(b.tol(x).value[:, 0, 0], like)  # noqa: E731
    for name, (axes, ddof) in READINGS.items():
        _, spread, n = _statistics(x["x"], kept, axes, ddof)
        mean, variance, _ = _statistics(np.where(kept, out.value, 0), kept, axes, ddof)
        varies = (n > 1) & (spread > 0.02)
        parts[name] = [
            Part("masked mean", np.where(varies, mean, 0), 0.0, 1e-4 + noise(mean), raised=out.raised),
            Part("masked variance", np.where(varies, variance, 1), 1.0, 5e-3 + noise(mean), raised=out.raised),
        ]
    return parts


def affine_invariance(b: Bench, x: Example) -> Parts:
    """2 x + 1: an epsilon in the denominator may be 1e-3 of the deviation."""
    call = {**x, "x": 2 * x["x"] + 1}
    out, base, kept = b.run(call), b.run(x), x["mask"] > 0
    _, spread, _ = _statistics(x["x"], kept, (1, 2), 0)
    fine = kept & column(spread > 0.02, kept)
    tol = 1e-3 + b.tol(x).value + b.tol(call).value
    return [Part("value", np.where(fine, out.value, 0), np.where(fine, base.value, 0), tol, call=call,
        raised=out.raised)]


def single_token(b: Bench, x: Example) -> Parts:
    """One number has no variance."""
    only = np.zeros_like(x["mask"])
    only[:, 0, -1] = 1
    call = {**x, "mask": only}
    out = b.run(call)
    return [Part("value", np.where(only > 0, out.value, 0), 0.0, 0.0, "finite", call, out.raised)]


def over_the_batch(b: Bench, x: Example) -> Parts:
    if x["x"].shape[1] < 2:
        raise NotApplied("one row")
    found = moments(b, x)
    return found["the batch, ddof 0"][:1]
