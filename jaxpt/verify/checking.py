"""Runs the catalogue over a function: every law on a few hundred examples, a small counterexample where one breaks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from jaxpt.verify import generators, matrix, moves
from jaxpt.verify.adapters import first
from jaxpt.verify.bench import Bench, NotApplied, Part, over
from jaxpt.verify.families import FAMILIES, Family
from jaxpt.verify.generators import Example
from jaxpt.verify.report import Outcome, Report, literal, plain
from jaxpt.verify.shrink import smallest
from jaxpt.verify.target import FRAMEWORKS, Target, TargetError, frameworks_of, parameters, root_of

CLEARLY = 100.0  # a counterexample may not be shrunk to a matter of rounding


def check(
    fn: Callable, family: str, *, claim: Sequence[str] = (), like: str | None = None, framework: str | None = None,
    mask: str = "float", examples: int = 200, seed: int = 0, dtype: str = "float32", only: Sequence[str] | None = None,
    name: str | None = None,
) -> Report:
    """Verifies fn against the laws of its family; see the docstring of jaxpt.verify. TargetError if it cannot be;
    ValueError for a family, claim, law, row or framework that there is not."""
    _known("family", family, FAMILIES)
    _known("mask", mask, ("float", "bool"))
    _known("dtype", dtype, ("float32", "float64"))
    _known("framework", framework or FRAMEWORKS[0], FRAMEWORKS)
    table = FAMILIES[family]
    takes = parameters(fn, table, family)
    notes: list[str] = []
    claims, nearest = _claims(claim, like, family), None
    for what in claim:
        _known("claim", what, matrix.claimable(family))
    for what in only or ():
        _known("law", what, [law.name for law in matrix.of_family(family)] + ["as_row"])
    if examples < 1:
        raise ValueError(f"examples {examples}: at least 1 is expected")
    batches = [generators.draw(table, size, -(-examples // len(table.sizes)), seed, takes) for size in table.sizes]
    bench_in = functools.partial(_bench, table, takes, mask, dtype)
    framework = framework or _framework(fn, bench_in, batches[0])
    bench = bench_in(fn, framework, name or getattr(fn, "__name__", type(fn).__name__))
    target = bench.target
    _probe(bench, batches)
    run = functools.partial(
        _outcome, bench, batches, seed=seed, claims=claims, waived=matrix.waived(family, claims), only=only
    )
    outcomes = [run(law) for law in matrix.of_family(family)]
    if like is not None:
        from jaxpt.verify import rows

        difference, nearest = rows.compare(bench, batches, like, family)
        outcomes += [difference] if only is None or "as_row" in only else []
    if any(o.law == "same_twice" and o.status == "broken" for o in outcomes):
        notes.append("the function does not give the same result twice: what other laws say may follow from that")
    if getattr(bench.adapter, "eager", False):
        notes.append("the function cannot be traced by jax.jit: its examples were evaluated one by one")
    return Report(target.name, family, framework, seed, examples, tuple(outcomes), tuple(notes), like, nearest)


def _bench(family: Family, takes: tuple[str, ...], mask: str, dtype: str, fn: Callable, framework: str, name: str) -> Bench:
    return Bench(Target(fn, name, framework, takes), family, mask=mask, dtype=dtype)


def _framework(fn: Callable, bench_in: Callable[..., Bench], x: Example) -> str:
    """Where the code does not decide: the first framework whose arrays the function takes, gradients and all, and gives
    back."""
    choices = frameworks_of(fn)
    fits = (name for name in choices if len(choices) == 1 or _answers_in(fn, name, bench_in, x))
    return next(fits, choices[0])


def _answers_in(fn: Callable, framework: str, bench_in: Callable[..., Bench], x: Example) -> bool:
    kinds = []

    def watched(*args, **given):
        out = fn(*args, **given)
        kinds.append(root_of(type(first(out))))
        return out

    bench = bench_in(watched, framework, "")
    some = bench.evaluation({k: v[:8] for k, v in x.items()}, moving=bench.moving)
    own = ("numpy", "builtins") if framework == "numpy" else (framework,)
    return not bench.adapter.one_by_one(some).nothing and kinds[-1] in own


def laws(fn: Callable, family: str, **options: Any) -> Callable:
    """`test_my_loss = laws(my_loss, family="policy_loss")` in a test file: every law is a test of its own,
    test_my_loss[padding] and so on. Options are those of `check`."""
    import pytest

    @functools.cache
    def report() -> Report:
        return check(fn, family, **options)

    claims = _claims(options.get("claim", ()), options.get("like"), family)
    names = [law.name for law in matrix.of_family(family) if law.kind == matrix.MATH or law.name in claims]
    names += ["as_row"] if options.get("like") else []

    @pytest.mark.parametrize("law", [n for n in names if n in (options.get("only") or names)])
    def test(law: str) -> None:
        outcome = next(o for o in report().outcomes if o.law == law)
        if outcome.status == "not_applied":
            pytest.skip(outcome.detail)
        report()._replace(outcomes=(outcome,)).assert_ok()

    return test


def _claims(claim: Sequence[str], like: str | None, family: str) -> tuple[str, ...]:
    """Those that were made, and those of the row."""
    if like is None:
        return tuple(claim)
    from jaxpt.verify import rows

    return (*claim, *rows.claims_of(like, family))


def _known(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        import difflib

        near = difflib.get_close_matches(str(value), list(choices), 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(choices)}"
        raise ValueError(f"{what} {value!r} is unknown: {hint}")


def _probe(bench: Bench, batches: list[Example]) -> None:
    """TargetError unless the function gives numbers of the family's shape on some ordinary examples. One that raises on
    some and not on others is for the laws to tell."""
    tried = []
    for x in batches:
        some = {k: v[:8] for k, v in x.items()}
        tried.append((some, bench.run(some)))
    fine = [(some, out) for some, out in tried if not out.nothing]
    if not fine:
        raise TargetError(f"the function raised {tried[0][1].raised}")
    returns = bench.family.returns
    for some, out in fine:
        sizes, shape = moves.sizes(some, bench.family), out.value.shape[1:]
        allowed = [(), (sizes.get("N"),)] if returns == "?" else [tuple(sizes[axis] for axis in returns)]
        if shape not in allowed:
            words = " or ".join("a scalar" if not s else f"shape {s}" for s in allowed)
            raise TargetError(f"the function returns shape {shape}, expected {words}")
    if all(np.isnan(out.value).all() for _, out in fine):
        raise TargetError("the function gives NaN on every ordinary input")
    bench.forget()


class _Finding(NamedTuple):
    excess: np.ndarray  # [n]: the worst of the parts
    parts: list[Part]


def _findings(bench: Bench, law: Callable, x: Example) -> dict[str, _Finding]:
    """By reading; one without a name where the law has but one."""
    with np.errstate(all="ignore"):
        parts = law(bench, x)
    n = len(next(iter(x.values())))
    readings = parts if isinstance(parts, dict) else {"": parts}
    worst = lambda ps: np.max([over(_wide(p.excess(), n)) for p in ps], axis=0) if ps else np.zeros(n)  # noqa: E731
    return {name: _Finding(worst(ps), ps) for name, ps in readings.items()}


def _wide(excess: np.ndarray, n: int) -> np.ndarray:
    return np.broadcast_to(excess, (n, *excess.shape[1:]))


def _outcome(
    bench: Bench, batches: list[Example], law: matrix.Law, *, seed: int, claims: Sequence[str],
    waived: Mapping[str, str], only: Sequence[str] | None
) -> Outcome:
    say = functools.partial(Outcome, law.name, law.kind)
    rest = (law.statement, law.tolerance)
    if only is not None and law.name not in only:
        return say("not_applied", law.where, *rest, "not asked for")
    if law.kind == matrix.CONTRACT and law.name not in claims:
        return say("not_applied", law.where, *rest, "a choice that was not claimed")
    if law.name in waived:
        return say("not_applied", law.where, *rest, f"waived by the claim {waived[law.name]}")
    try:
        found = examined(bench, batches, law, seed)
    except NotApplied as reason:
        return say("not_applied", law.where, *rest, str(reason))
    reading = min(found.bad, key=found.bad.get, default="")
    if not found.bad or found.bad[reading] == 0:
        return say("holds", law.where, *rest, reading)
    return _broken(bench, found.batches, found.results, law, function_of(law), reading)


class Examined(NamedTuple):
    batches: list[Example]  # as the law prepares them
    results: list[dict[str, _Finding]]  # of each batch
    bad: dict[str, int]  # by reading: how many examples break it; the law is broken where each reading is


def examined(bench: Bench, batches: list[Example], law: matrix.Law, seed: int) -> Examined:
    """What a law finds on all examples, without a counterexample. NotApplied where it says nothing about the function."""
    if law.prepare:
        change = getattr(generators, law.prepare)
        batches = [change(x, bench.family, np.random.default_rng([seed, 1])) for x in batches]
    results = [_findings(bench, function_of(law), x) for x in batches]
    readings = dict.fromkeys(reading for result in results for reading in result)
    bad = {reading: sum(int((r[reading].excess > 1).sum()) for r in results if reading in r) for reading in readings}
    return Examined(batches, results, bad)


def _broken(bench: Bench, batches: list, results: list, law: matrix.Law, fn: Callable, reading: str) -> Outcome:
    """The smallest counterexample: one that breaks every reading, if there is one."""
    def excess_under(result: dict[str, _Finding], every: bool) -> np.ndarray:
        return np.min([f.excess for f in result.values()], axis=0) if every else result[reading].excess

    every = any(bool((excess_under(r, True) > 1).any()) for r in results if r)
    i = next(i for i, r in enumerate(results) if r and (excess_under(r, every) > 1).any())
    excess = excess_under(results[i], every)
    start = int(np.argmax(np.minimum(excess, CLEARLY)))
    enough = min(CLEARLY, excess[start])

    def breaks(x: Example) -> np.ndarray:
        something = np.all([over(x[m]) > 0 for m in bench.masks], axis=0) if bench.masks else True
        for name, arg in bench.family.args.items():  # where a masked reward goes is a choice: there is none
            if arg.kind == "kept_score":
                something &= over(np.abs(x[name]) * (x["mask"] <= 0)) == 0
        found = _findings(bench, fn, x)
        if len(bench.memory) > 200:
            bench.forget()
        worse = excess_under(found, every) >= enough if found else np.zeros(len(next(iter(x.values()))), bool)
        return worse & something

    small = smallest({k: np.asarray(v[start]) for k, v in batches[i].items()}, bench.family, breaks)
    bench.forget()
    x = {k: v[None] for k, v in small.items()}
    found = _findings(bench, fn, x)
    name = min(found, key=lambda k: found[k].excess[0])
    name = reading if not every else name
    enough = min(CLEARLY, found[name].excess[0])
    part = next(p for p in found[name].parts if over(_wide(p.excess(), 1))[0] >= enough)
    bench.forget()
    return Outcome(
        law.name, law.kind, "broken", part.place, law.statement, law.tolerance, f"nearest: {name}" if name else "",
        law.cause,
        counterexample(bench, part, x),
    )


def counterexample(bench: Bench, part: Part, x: Example) -> dict[str, Any]:
    call = {k: v[0] for k, v in (part.call or x).items()}
    got, want, excess = (np.broadcast_to(v, np.broadcast_shapes(np.shape(part.got), np.shape(part.want)))[0]
                         for v in (part.got, part.want, part.excess()))
    at = np.unravel_index(int(np.argmax(excess)), excess.shape) if excess.ndim else ()
    words = {"at_least": "at least ", "at_most": "at most ", "differs": "anything but "}.get(part.sense, "")
    right = "a finite number" if part.sense == "finite" else plain(want[at], 6)
    return {
        "inputs": {k: plain(v) for k, v in call.items()},
        "wrong": f"raised {part.raised}" if part.raised and np.isnan(got[at]) else plain(got[at], 6),
        "right": f"{words}{right}" if words else right,
        "position": "".join(f"[{int(j)}]" for j in at), "reproduce": _code(bench, part.place, call),
    }


def _code(bench: Bench, place: str, call: Example) -> str:
    framework, name = bench.target.framework, bench.target.name
    head, f = "", name
    if ":" in name:
        head, f = f"from jaxpt.verify import load; f = load({name!r}); ", "f"
    args = [literal(call[k], framework) for k in bench.family.args]
    args += [f"{k}={literal(v, framework)}" for k, v in call.items() if k not in bench.family.args]
    wrt = place.removeprefix("gradient of ")
    if place.startswith("gradient") and wrt in bench.family.args and framework == "jax":
        f = f"jax.grad({f}, argnums={list(bench.family.args).index(wrt)})"
    return f"{head}{f}({', '.join(args)})"


def function_of(law: matrix.Law) -> Callable:
    return getattr(import_module(f"jaxpt.verify.invariants_{law.group}"), law.name)
