"""Examples: hundreds at once, [n, ...] arrays from numpy's Generator, with the corners that public faults live in.

Not Hypothesis: a target is evaluated on all examples in one vmapped call, which wants arrays of one shape drawn
together; a report has to be the same byte for byte in every version of every library; and shrink.py makes a failing
example smaller by batches of candidates, which is faster than one call each. Numbers have two or three decimals, so
that a counterexample can be read; log-ratios end in 3, so that none lies on a bound such as 0.2 or 0.4.
"""

from collections.abc import Callable

import numpy as np

from jaxpt.verify.families import Arg, Family

Example = dict[str, np.ndarray]
Rng = np.random.Generator
REWARDS = (  # where rounding shows: no dyadic values, tiny and negative ones
    (0.0, 1.0), (0.1, 0.3, 0.95), (-1.0, 0.5, 2.0), (1e-3, 2e-3), (0.25, 0.75, 1.25, 3.0),
)


def every(n: int, period: int, axes: int) -> np.ndarray:
    """[n, 1, ...] the example's number modulo a period: corners take turns."""
    return (np.arange(n) % period).reshape(n, *(1,) * axes)


def logp(shape, rng, x):
    return np.round(-0.05 - rng.gamma(1.5, 0.8, shape).clip(max=6.0), 2)


def _beside(shape, rng, of, spread):
    """A log-probability beside another: a log-ratio of either sign, in some examples tiny or 0."""
    delta = np.round(rng.normal(0, spread, shape), 2) + 0.003
    turn = every(shape[0], 4, len(shape) - 1)
    delta = np.where((turn == 1) & (rng.random(shape) < 0.5), 0.0, np.where(turn == 2, 1e-3 * np.sign(delta), delta))
    return np.minimum(of - delta, -0.001)


def near(shape, rng, x, like):
    return _beside(shape, rng, x[like], 0.5)


def advantage(shape, rng, x):
    """One for every token; the same on a whole row; with zeros among them."""
    free = np.round(rng.normal(0, 1.5, shape), 2)
    turn = every(shape[0], 4, len(shape) - 1)
    return np.where(turn == 1, free[..., :1], np.where((turn == 2) & (rng.random(shape) < 0.3), 0.0, free))


def mask(shape, rng, x):
    """Full; padded behind; with holes; with a leading hole; a row with one token; an empty row. One slot counts."""
    n, rows, width = shape
    t, length = np.arange(width), rng.integers(1, width + 1, (n, rows, 1))
    behind, holes = t < length, rng.random(shape) < 0.6
    single = t == rng.integers(0, width, (n, rows, 1))
    turn = every(n, 6, 2)
    kept = np.select(
        [turn == 0, turn == 1, turn == 2, turn == 3, turn == 4],
        [np.ones(shape, bool), behind, holes, holes & (t > 0), np.where(np.arange(rows)[:, None] == 0, single, holes)],
        behind & (np.arange(rows)[:, None] > 0),
    )
    nothing = ~kept.any((1, 2))
    kept[nothing, -1, -1] = True
    return kept.astype(float)


def score(shape, rng, x):
    return np.round(rng.normal(0, 1.2, shape), 2)


def kept_score(shape, rng, x):
    """0 where nothing was decided; drawn behind the mask, see `draw`."""
    return np.round(rng.normal(0, 1.0, shape), 2)


def near_score(shape, rng, x, like):
    return np.round(x[like] + rng.normal(0, 0.3, shape), 2)


def positive(shape, rng, x):
    return np.round(rng.uniform(0.1, 1.5, shape), 2)


def reward(shape, rng, x):
    sets = [np.asarray(values) for values in REWARDS]
    rows = [rng.choice(sets[i % len(sets)], shape[1:]) for i in range(shape[0])]
    free = np.round(rng.normal(0, 1, shape) * 8) / 8
    return np.where(every(shape[0], 2, len(shape) - 1) == 0, free, np.stack(rows))


def label(shape, rng, x):
    """Groups of rows, in any order: one, two, three, uneven, singletons among them."""
    n, rows = shape
    labels = np.stack([rng.integers(0, 1 + i % 3, rows) for i in range(n)])
    labels[::4, 0] = labels[::4].max(1) + (0 if rows == 1 else 1)  # a group of one
    return labels.astype(np.int64)


def discount(shape, rng, x):
    return rng.choice([0.0, 0.5, 0.9, 0.95, 1.0], shape)


def share(shape, rng, x):
    """Between 0 and 1, and never 1/2, where much that is wrong looks right."""
    return rng.choice([0.1, 0.25, 0.7, 0.9], shape)


def logits(shape, rng, x):
    return np.round(rng.normal(0, 1.5, shape), 2)


def token(shape, rng, x):
    vocabulary = next(iter(x.values())).shape[-1]
    return rng.integers(0, vocabulary, shape)


def sum_logp(shape, rng, x):
    return np.round(-1.0 - rng.gamma(2.0, 3.0, shape).clip(max=24.0), 1)


def near_sum(shape, rng, x, like):
    return _beside(shape, rng, x[like], 2.0)


def choice(shape, rng, x):
    return (rng.random(shape) < 0.5).astype(float)


def length(shape, rng, x):
    return rng.integers(0, 48, shape).astype(float)


def limit(shape, rng, x):
    return rng.integers(20, 40, shape).astype(float)


def buffer(shape, rng, x):
    return rng.integers(2, 16, shape).astype(float)


def one(shape, rng, x):
    return np.ones(shape)


def probabilities(shape, rng, x):
    e = np.exp(rng.normal(0, 1.2, shape))
    return np.round(e / e.sum(-1, keepdims=True), 6)


def experts(shape, rng, x):
    """Different experts for every token, the likeliest among the probabilities first."""
    probs = next(iter(x.values()))
    return np.argsort(-probs + 0.3 * rng.random(probs.shape), axis=-1)[..., : shape[-1]]


KINDS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        logp, near, advantage, mask, score, kept_score, near_score, positive, reward, label, discount, share, logits, token,
        sum_logp, near_sum, choice, length, limit, buffer, one, probabilities, experts,
    )
}
GIVEN = ("totals", "key", "prompt_tokens")  # from the other arguments, when the target is called


def shape_of(arg: Arg, size: dict, n: int) -> tuple[int, ...]:
    return (n, *(size[axis] for axis in arg.axes))


def draw(family: Family, size: dict, n: int, seed: int, takes: tuple[str, ...] = ()) -> Example:
    """n examples of one shape: every argument, and the optional ones that the target takes."""
    rng = np.random.default_rng([seed, *size.values()])
    x: Example = {}
    for name, arg in {**family.args, **{k: family.optional[k] for k in family.optional if k in takes}}.items():
        if arg.kind not in GIVEN:
            given = (x, arg.like) if arg.like else (x,)
            x[name] = KINDS[arg.kind](shape_of(arg, size, n), rng, *given)
    for name, arg in family.args.items():
        if arg.kind == "kept_score":
            x[name] = x[name] * x["mask"]
    return x


def far(x: Example, family: Family, rng: Rng) -> Example:
    """512 from 0, a thousand times their spread: scores, rewards and logits. Log-probabilities and advantages get
    more decimals, so that nothing lies on a bound, where the two precisions may fall on different sides."""
    out = dict(x)
    for name, v in x.items():
        kind, noise = family.arg(name).kind, 0.004 * rng.random(v.shape)
        if kind in ("score", "near_score", "logits"):
            out[name] = v + 512.0 + noise
        elif kind == "reward":  # without noise: equal ones stay equal
            out[name] = v + 512.0
        elif kind in ("logp", "near", "sum_logp", "near_sum"):
            out[name] = v - noise
        elif kind in ("advantage", "kept_score"):
            out[name] = v * (1 + noise)
    return out


def extreme(x: Example, family: Family, rng: Rng) -> Example:
    """Finite, and far out: log-ratios of 20 to 1000 nats, values of a million, logits of ten thousand, probabilities
    of 0 and 1. In every third example everywhere, in the others at some slots."""
    out = dict(x)
    where = lambda v: (rng.random(v.shape) < 0.4) | (every(len(v), 3, v.ndim - 1) == 0)  # noqa: E731
    for name, v in x.items():
        arg = family.arg(name)
        if arg.like and arg.kind in ("near", "near_sum"):
            far, other = rng.choice([21.0, 89.0, 800.0, 1000.0], v.shape), out[arg.like]
            low = rng.random(v.shape) < 0.5  # which of the two is unlikely
            there = where(v)
            out[arg.like] = np.where(there & low, v - far, other)
            out[name] = np.where(there & ~low, other - far, v)
        elif arg.kind in ("score", "near_score", "kept_score"):
            out[name] = np.where(where(v), rng.choice([-1e6, 1e6, 1e3], v.shape),
                v) * (1.0 if arg.kind != "kept_score" else v != 0)
        elif arg.kind == "reward":
            out[name] = v * rng.choice([1e6, 1e-6, -1e6, 1.0], (len(v), 1)) + rng.choice([0.0, 1e6], (len(v), 1))
        elif arg.kind == "logits":
            out[name] = np.where(where(v), rng.choice([-1e4, 1e4, 100.0], v.shape), v)
        elif arg.kind in ("logp", "sum_logp"):
            out[name] = np.where(where(v), rng.choice([-1e-9, -1e3, -89.0], v.shape), v)
        elif arg.kind == "probabilities":
            sharp = np.eye(v.shape[-1])[np.argmax(v, axis=-1)]
            out[name] = np.where(every(len(v), 2, v.ndim - 1) == 0, sharp, v)
    return out
