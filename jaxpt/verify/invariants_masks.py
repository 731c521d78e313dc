"""Laws of everything that has a mask, or rows: what does not count, how batches are cut, order, and honest calls."""

import numpy as np

from jaxpt.verify import moves
from jaxpt.verify.adapters import Out, first
from jaxpt.verify.bench import EPS, Bench, NotApplied, Part, Parts, column, over, tokens_of
from jaxpt.verify.families import AXIS
from jaxpt.verify.generators import Example

POISONS = (np.nan, np.inf, -np.inf, 1e30)


def mask_poison(b: Bench, x: Example) -> Parts:
    parts = []
    clean = b.run(x)
    spare = tuple(k for k in x if b.family.arg(k).kind == "kept_score")
    for poison in POISONS:
        bad = moves.poisoned(x, b.family, poison, spare)
        out = b.run(bad)
        parts += b.same(x, out, clean, call=bad, kept=b.kept(x))
        for k, g in out.grads.items():
            outside = np.where(b.slots(x, k), 0.0, g)
            parts.append(Part(f"gradient of {k}", outside, 0.0, 0.0, call=bad, raised=out.raised))
    return parts


def padding(b: Bench, x: Example) -> Parts:
    parts = []
    for behind in (True, False):
        wide = moves.padded(x, b.family, 2, behind=behind)
        width, out = moves.size(x, b.family, "T"), b.run(wide)
        keep = slice(0, width) if behind else slice(2, None)
        value = out.value[:, :, keep] if b.family.returns == "BT" else out.value
        inner = Out(value, {k: g[:, :, keep] for k, g in out.grads.items()}, out.raised)
        parts += b.same(x, inner, b.run(x), call=wide, kept=b.kept(x))
    return parts


def empty_rows(b: Bench, x: Example) -> dict[str, Parts]:
    letter = moves.rows_letter(b.family)
    more, rows = moves.with_empty_rows(x, b.family, letter), moves.size(x, b.family, letter)
    out, base = b.run(more), b.run(x)
    if b.family.returns:
        inner = Out(out.value[:, :rows], {k: g[:, :rows] for k, g in out.grads.items()}, out.raised)
        return {"unchanged": b.same(x, inner, base, call=more, kept=b.kept(x))}
    inner = out._replace(grads={k: g[:, :rows] for k, g in out.grads.items()})
    if len(b.masks) > 1:  # a pair of empty responses may have the loss of margin 0
        inner, base = inner._replace(value=0 * inner.value), base._replace(value=0 * base.value)
    scaled = lambda c: Out(c * base.value, {k: c * g for k, g in base.grads.items()})  # noqa: E731
    return {
        "unchanged": b.same(x, inner, base, call=more),
        "counted in a mean over rows": b.same(x, inner, scaled(rows / (rows + 1)), call=more),
    }


def all_masked(b: Bench, x: Example) -> Parts:
    nothing = {k: np.zeros_like(v) if b.family.arg(k).kind == "mask" else v for k, v in x.items()}
    out = b.run(nothing)
    if b.family.returns:  # nothing is looked at, but it may not be NaN: later sums would be
        return [Part("value", out.value, 0.0, 0.0, "finite", nothing, out.raised)]
    sense = "equal" if len(b.masks) == 1 else "finite"  # a pair of empty responses may have the loss of margin 0
    return [Part("value", out.value, 0.0, 0.0, sense, nothing, out.raised)] + [
        Part(f"gradient of {k}", g, 0.0, 0.0, call=nothing, raised=out.raised) for k, g in out.grads.items()
    ]


def zero_off_mask(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    return [Part("value", np.where(x["mask"] > 0, 0, out.value), 0.0, 0.0, raised=out.raised)]


def compaction(b: Bench, x: Example) -> Parts:
    """What is told is the example with holes: without them there is little to get wrong."""
    close, order = moves.compacted(x, b.family)
    out, base, kept = b.run(close), b.run(x), x["mask"] > 0
    tol, back, raised = b.tol(x), np.argsort(order, axis=2), base.raised or out.raised
    along = lambda v: np.take_along_axis(v, back.reshape(*back.shape, *(1,) * (v.ndim - 3)), axis=2)  # noqa: E731
    if b.family.returns == "BT":
        got, want = np.where(kept, base.value, 0), np.where(kept, along(out.value), 0)
    else:
        got, want = base.value, out.value
    return [Part("value", got, want, tol.value, raised=raised)] + [
        Part(f"gradient of {k}", g, along(out.grads[k]), tol.grads[k], raised=raised) for k, g in base.grads.items()
    ]


def row_permutation(b: Bench, x: Example) -> Parts:
    letter = moves.rows_letter(b.family)
    order = np.roll(np.arange(moves.size(x, b.family, letter)), 1)
    turned = moves.take(x, b.family, letter, order)
    out, base = b.run(turned), b.run(x)
    value = base.value if base.value.ndim == 1 else base.value[:, order]
    want = Out(value, {k: g[:, order] for k, g in base.grads.items()})
    return b.same(x, out, want, call=turned, kept=b.kept(turned))


def _readings(b: Bench, x: Example) -> dict[str, np.ndarray]:
    """[n] what a batch may weigh, when partial losses are put together."""
    letter = moves.rows_letter(b.family)
    rows = np.full(len(next(iter(x.values()))), float(moves.size(x, b.family, letter)))
    weights = {"rows": rows, "one (a sum)": np.ones_like(rows)}
    if len(b.masks) == 2:
        sides = [(x[m] > 0).any(2) for m in b.masks]
        weights |= {"pairs with a token": np.any(sides, axis=0).sum(1) * 1.0,
            "whole pairs": np.all(sides, axis=0).sum(1) * 1.0}
    if b.masks == ["mask"]:
        tokens = tokens_of(x)
        weights = {"tokens": tokens.sum(1), "rows with a token": (tokens > 0).sum(1).astype(float), **weights}
        if "group" in x:
            weights["prompts"] = np.array([len(set(g[t > 0])) for g, t in zip(x["group"], tokens, strict=True)], float)
    return weights


def partition(b: Bench, x: Example) -> dict[str, Parts]:
    letter = moves.rows_letter(b.family)
    rows = moves.size(x, b.family, letter)
    if rows < 2:
        return {}
    if "group" in x:  # a prompt's rows stay together
        x = {**x, "group": np.broadcast_to(np.arange(rows), x["group"].shape)}
    cuts = [moves.take(x, b.family, letter, np.arange(*ends)) for ends in ((0, rows // 2), (rows // 2, rows))]
    whole, parts = b.run(x), [b.run(cut, whole=x if "totals" in b.takes else None) for cut in cuts]
    if "totals" in b.takes:
        readings = {"one (a sum), by the totals of the whole": [np.ones(len(whole.value))] * 3}
    else:
        readings = {k: [_readings(b, y)[k] for y in (x, *cuts)] for k in _readings(b, x)}
    return {name: b.same(x, _put_together(parts, w[1:], w[0]), whole) for name, w in readings.items()}


def additive(b: Bench, x: Example) -> Parts:
    if "totals" not in b.takes:
        raise NotApplied("the function takes no totals")
    return next(iter(partition(b, x).values()), [])


def _put_together(parts: list[Out], weights: list[np.ndarray], total: np.ndarray) -> Out:
    share = [np.where(total > 0, w / np.where(total > 0, total, 1), 0.0) for w in weights]
    weigh = lambda s, v: np.where(column(s, v) > 0, column(s, v) * v, 0.0)  # noqa: E731
    value = sum(weigh(s, part.value) for s, part in zip(share, parts, strict=True))
    grads = {
        k: np.concatenate([weigh(s, part.grads[k]) for s, part in zip(share, parts, strict=True)],
            axis=1) for k in parts[0].grads
    }
    return Out(value, grads, next((part.raised for part in parts if part.raised), ""))


def duplication(b: Bench, x: Example) -> dict[str, Parts]:
    letter = moves.rows_letter(b.family)
    twice = moves.doubled(x, b.family, letter)
    out, base = b.run(twice), b.run(x)
    times = lambda c: Out(  # noqa: E731
        c * base.value, {k: np.concatenate([g, g], axis=1) * (c / 2) for k, g in base.grads.items()}
    )
    return {"a mean": b.same(x, out, times(1.0), call=twice), "a sum": b.same(x, out, times(2.0), call=twice)}


def same_twice(b: Bench, x: Example) -> Parts:
    one, two = b.adapter.again(b.evaluation(x))
    n = len(next(iter(x.values())))
    widen = lambda v: np.concatenate([v, np.zeros((n, *v.shape[1:]))])[:n]  # noqa: E731
    one, two = widen(one), widen(two)
    return [Part("value of the second call", two, one, 1e-9 * (1e-3 + np.abs(np.where(np.isfinite(one), one, 0))))]


def inputs_untouched(b: Bench, x: Example) -> Parts:
    touched = b.adapter.untouched(b.evaluation(x))
    changed = np.zeros(len(next(iter(x.values()))))
    changed[: len(touched)] = [len(names) for names in touched]
    names = sorted({name for some in touched for name in some})
    return [Part(f"arguments that were written into ({', '.join(names) or 'none'}), their number", changed, 0.0, 0.0)]


def finite(b: Bench, x: Example) -> Parts:
    out = b.run(x)
    parts = [Part("value", out.value, 0.0, 0.0, "finite", raised=out.raised)]
    return parts + [Part(f"gradient of {k}", g, 0.0, 0.0, "finite") for k, g in out.grads.items()]


def declared_constants(b: Bench, x: Example) -> Parts:
    if b.target.framework == "numpy":
        raise NotApplied("numpy has no gradients to stop")
    constant = tuple(k for k,
        a in b.family.args.items() if not a.moving and x[k].dtype.kind == "f" and a.kind not in ("mask", "choice"))
    out = b.run(x, moving=constant)
    return [Part(f"gradient of {k}", g, 0.0, 0.0, raised=out.raised) for k, g in out.grads.items()]


def padded_width(b: Bench, x: Example) -> Parts:
    width = moves.size(x, b.family, "T")
    wide = moves.padded(x, b.family, 2)
    out, base = b.run(wide), b.run(x)
    scale = width / (width + 2)
    want = Out(scale * base.value, {k: scale * g for k, g in base.grads.items()})
    return b.same(x, out._replace(grads={k: g[:, :, :width] for k, g in out.grads.items()}), want, call=wide)


def empty_rows_not_counted(b: Bench, x: Example) -> Parts:
    return empty_rows(b, x)["unchanged"]


# --- the same in other precisions and on several devices


def precision(b: Bench, x: Example) -> Parts:
    if b.target.framework == "numpy" or "key" in b.takes:
        raise NotApplied("numpy functions are run in float64" if "key" not in b.takes else "it draws random numbers")
    single, double = (b.other(dtype, dtype=dtype) for dtype in ("float32", "float64"))
    x = {k: v.astype(np.float32).astype(float) if v.dtype.kind == "f" else v for k, v in x.items()}  # the same numbers
    want = double.run(x)
    if want.raised:
        raise NotApplied(f"in float64 the function raised {want.raised}")
    size = 16 * EPS * np.max([over(np.abs(v)) for v in x.values()], axis=0)  # of a difference of two inputs
    value = single.same(x, single.run(x), want, call=x, kept=b.kept(x))[0]  # a gradient may jump within a rounding
    return [value._replace(tol=value.tol + column(size, value.got))]


def shard(b: Bench, x: Example) -> Parts:
    """On two shards, each an example, the function's own sums over the axis give the loss of the two together."""
    if b.target.framework != "jax" or AXIS not in b.signature:
        raise NotApplied(f"the function has no parameter {AXIS}")
    letter = moves.rows_letter(b.family)
    others = {k: np.roll(v, 1, axis=0) for k, v in x.items()}
    if "group" in x:
        others["group"] = others["group"] + x["group"].max() + 1
    both = moves.joined(x, others, b.family, letter)
    out, want = b.other("shard", _on_two_shards(b, letter)).run(both), b.run(both)
    return b.same(both, out, want, call=both)


def _on_two_shards(b: Bench, letter: str):
    """The mean over two shards of what the function gives on each; vmap's named axis stands for that of a mesh."""
    import jax

    rows = {k for k in (*b.family.args, *b.takes) if letter in b.family.arg(k).axes}
    cut = lambda v: v.reshape(2, v.shape[0] // 2, *v.shape[1:])  # noqa: E731

    def fn(*args, **given):
        whole = {**dict(zip(b.family.args, args, strict=True)), **given}
        named = {k: cut(v) if k in rows else v for k, v in whole.items()}

        def one(named):
            places = [named[k] for k in b.family.args]
            return first(b.target.fn(*places, **{k: named[k] for k in given}, **{AXIS: "shard"}))

        return jax.vmap(one, ({k: 0 if k in rows else None for k in named},), axis_name="shard")(named).mean(0)

    return fn
