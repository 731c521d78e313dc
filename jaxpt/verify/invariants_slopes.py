"""Laws of how results move with their inputs: slopes, signs and sizes."""

import numpy as np

from jaxpt.verify.bench import EPS, Bench, NotApplied, Part, Parts, column, over
from jaxpt.verify.generators import Example

STEPS, STEP = 12, 0.2


def gradient_of_value(b: Bench, x: Example) -> Parts:
    """One number of every argument that moves, another one in every example, falls by 2.4 in twelve steps: over each
    the mean slope lies between the gradients at its ends, or beyond the larger one by what exp gains in a step, since
    a clip may end its rise. One number alone, so that a step has one kink at most."""
    return [part for k in b.moving for part in _along(b, x, k)]


def _along(b: Bench, x: Example, name: str) -> Parts:
    flat = x[name].reshape(len(x[name]), -1)
    rows, slots = np.arange(len(flat)), 7 * np.arange(len(flat)) % flat.shape[1]
    highest = flat[rows, slots] + STEPS * STEP / 2
    highest = np.minimum(highest, -1e-3) if "logp" in b.family.arg(name).kind else highest
    values, slopes, calls, raised = [], [], [], ""
    for k in range(STEPS + 1):
        moved = flat.copy()
        moved[rows, slots] = highest - k * STEP
        call = {**x, name: moved.reshape(x[name].shape)}
        out = b.run(call)
        values.append(over(out.value, np.sum))
        slopes.append(out.grads[name].reshape(flat.shape)[rows, slots])
        calls.append(call)
        raised = raised or out.raised
    values, slopes = np.stack(values, 1), np.stack(slopes, 1)
    low, high = (pick(slopes[:, 1:], slopes[:, :-1]) for pick in (np.minimum, np.maximum))
    noise = 256 * EPS * np.maximum(1.0, np.abs(values).max(1)) / STEP
    rise = np.expm1(STEP) * np.maximum(np.abs(low), np.abs(high))
    tol = (high - low) / 2 + rise + column(0.02 * np.abs(slopes).max(1) + noise, low)
    got = (values[:, :-1] - values[:, 1:]) / STEP
    return [Part(f"mean slope of the value along {name}", got[:, k], (low + high)[:, k] / 2, tol[:, k], call=calls[k],
                 raised=raised) for k in range(STEPS)]


def pulls_back(b: Bench, x: Example) -> Parts:
    """At log-ratios of all sizes, among them those of the example."""
    parts = []
    for gap in (0.0, -4.0, 4.0):
        call = {**x, "logp": x["ref_logp"] + gap} if gap else x
        call = {**call, "old_logp": call["logp"]} if "old_logp" in x else call
        out, away = b.run(call), np.sign(call["logp"] - call["ref_logp"])
        g = np.where(b.slots(x, "logp"), out.grads["logp"] * away, 0.0)
        parts.append(Part("gradient of logp, signed by the log-ratio", g, 0.0, column(256 * EPS * over(np.abs(g)), g),
                          "at_least", call, out.raised))
    return parts


def never_against(b: Bench, x: Example) -> Parts:
    """One advantage a row."""
    if "ref_logp" in b.takes:
        raise NotApplied("the loss has a reference: its KL pulls too")
    call = {**x, "advantages": np.broadcast_to(x["advantages"][:, :, :1], x["logp"].shape)}
    out = b.run(call)
    g = out.grads["logp"] * np.sign(call["advantages"])
    return [Part("gradient of logp, signed by the advantage", g, 0.0, column(256 * EPS * over(np.abs(g)), g), "at_most",
                 call, out.raised)]


def non_negative(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    return [Part("value", out.value, 0.0, 64 * EPS, "at_least", raised=out.raised)]
