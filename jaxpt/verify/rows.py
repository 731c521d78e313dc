"""The table of objectives as functions of the verifier's families: for --like ROW, and as targets of our own tests."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpt.verify import matrix
from jaxpt.verify.bench import Bench, Part, column, over
from jaxpt.verify.families import FAMILIES
from jaxpt.verify.generators import Example
from jaxpt.verify.report import Outcome
from jaxpt.verify.target import Target, parameters

OF_ROW = {  # family of the table of objectives -> of the verifier
    "policy_loss": "policy_loss", "preference": "preference", "unpaired": "kto", "reward_pair": "reward_model",
    "distillation": "distillation", "length_shaping": "length_shaping",
}
WAIVERS = {"entropy_advantage": ("weighted",), "aot": ("ranked",), "aot_unpaired": ("ranked",),
    "discopop": ("bumpy_link",)}
NEAREST = 8  # examples on which rows are compared


def families_of(row) -> tuple[str, ...]:
    own = OF_ROW.get(row.family)
    return (own, "preference_tokens") if own == "preference" else (own,) if own else ()


def _row(name: str, family: str):
    from jaxpt.objectives import ROWS
    from jaxpt.verify.checking import _known

    _known("row", name, ROWS)
    row = ROWS[name]
    if family not in families_of(row):
        raise ValueError(f"row {name!r} is of family {row.family}, not comparable with a function of family {family}")
    return row


def claims_of(name: str, family: str) -> tuple[str, ...]:
    """What a row claims of the function that is compared with it, waivers among them."""
    row = _row(name, family)
    contracts = {law.name for law in matrix.of_family(family) if law.kind == matrix.CONTRACT}
    claims = [claim for claim in row.claims if claim in contracts]
    claims += ["declared_constants"] if "declared_constants" in contracts and family == "policy_loss" else []
    return (*claims, *waivers_of(row, family))


def waivers_of(row, family: str) -> tuple[str, ...]:
    claims = [*([] if row.additive else ["batch_coupled"]), *WAIVERS.get(row.alias_of or row.name, ())]
    if family == "preference" and "ref_logp" not in row.needs:
        claims.append("reference_free")
    if family == "kto" and "kl_logp" not in row.needs:
        claims.append("reference_point_free")
    return tuple(claims)


def function(row, family: str) -> Callable[..., Any]:
    """The row's loss with the family's arguments, denominators of the whole batch; what it needs beyond, by name."""
    return {"policy_loss": _policy, "preference": _sequences, "preference_tokens": _tokens, "kto": _unpaired,
            "reward_model": _scores, "distillation": _plain, "length_shaping": _lengths}[family](row)


def _signature(fn: Callable, positional: tuple[str, ...], keyword: tuple[str, ...] = ()) -> Callable:
    kinds = inspect.Parameter
    fn.__signature__ = inspect.Signature([kinds(p, kinds.POSITIONAL_OR_KEYWORD) for p in positional] + [
        kinds(p, kinds.KEYWORD_ONLY, default=None) for p in keyword])
    return fn


def _policy(row) -> Callable:
    from jaxpt.objectives.reduction import prompt_tokens_of, totals_of

    def f(logp, old_logp, advantages, mask, *, group=None, **given):
        tokens = None
        if group is not None:
            given["prompt_tokens"] = tokens = prompt_tokens_of(mask, group)
        return row.loss(logp, old_logp, advantages, mask, totals=totals_of(mask, tokens), **given)

    known = FAMILIES["policy_loss"].optional
    names = tuple("group" if what == "prompt_tokens" else what for what in row.needs if what in known)
    return _signature(f, tuple(FAMILIES["policy_loss"].args), names)


def _loss(row, batch: dict) -> Any:
    return row.loss(**batch, **row.prepare(batch))


def _sequences(row) -> Callable:
    import jax.numpy as jnp

    def f(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp):
        ones = jnp.ones((chosen_logp.shape[0], 1))
        batch = {"chosen_logp": chosen_logp[:, None], "rejected_logp": rejected_logp[:, None], "chosen_mask": ones,
            "rejected_mask": ones}
        if "ref_logp" in row.needs:
            batch |= {"ref_chosen_logp": ref_chosen_logp[:, None], "ref_rejected_logp": ref_rejected_logp[:, None]}
        if "collision" in row.needs:
            batch |= {"chosen_collision": 0.9 * chosen_logp[:, None],
                "rejected_collision": 0.9 * rejected_logp[:, None]}
        return _loss(row, batch)

    return f


def _tokens(row) -> Callable:
    def f(chosen_logp, rejected_logp, chosen_mask, rejected_mask, **refs):
        batch = {"chosen_logp": chosen_logp, "rejected_logp": rejected_logp, "chosen_mask": chosen_mask,
            "rejected_mask": rejected_mask}
        if "collision" in row.needs:
            batch |= {"chosen_collision": 0.9 * chosen_logp, "rejected_collision": 0.9 * rejected_logp}
        return _loss(row, batch | refs)

    refs = ("ref_chosen_logp", "ref_rejected_logp") if "ref_logp" in row.needs else ()
    return _signature(f, tuple(FAMILIES["preference_tokens"].args), refs)


def _unpaired(row) -> Callable:
    import jax.numpy as jnp

    def f(logp, ref_logp, desirable, kl_logp, kl_ref_logp):
        ones = jnp.ones((logp.shape[0], 1))
        batch = {"logp": logp[:, None], "desirable": desirable, "mask": ones, "ref_logp": ref_logp[:, None]}
        if "kl_logp" in row.needs:
            batch |= {"kl_logp": kl_logp[:, None], "kl_ref_logp": kl_ref_logp[:, None], "kl_mask": ones}
        return _loss(row, batch)

    return f


def _scores(row) -> Callable:
    import jax.numpy as jnp

    def f(chosen_score, rejected_score, **margin):
        batch = {"chosen_score": chosen_score, "rejected_score": rejected_score, "mask": jnp.ones_like(chosen_score)}
        return _loss(row, batch | margin)

    return _signature(f, ("chosen_score", "rejected_score"), ("margin",) if "margin" in row.needs else ())


def _plain(row) -> Callable:
    def f(student_logits, teacher_logits, mask):
        return _loss(row, {"student_logits": student_logits, "teacher_logits": teacher_logits, "mask": mask})

    return f


def _lengths(row) -> Callable:
    def f(length, max_length, buffer):
        hyper = {k: v for k, v in (("max_length", max_length), ("buffer", buffer)) if k in row.hyper}
        return row.loss(length, 0 * length + 1, **hyper)

    return f


# --- comparison


def bench_of(row, family: str, *, mask: str = "float", dtype: str = "float32") -> Bench:
    fn = function(row, family)
    return Bench(Target(fn, row.name, "jax", parameters(fn, FAMILIES[family], family)), FAMILIES[family], mask=mask,
        dtype=dtype)


def _missing(theirs: Bench, x: Example) -> Example:
    """The arguments that only the row takes: a reference is the old policy, an entropy is 0, ..."""
    out = dict(x)
    for name in theirs.takes:
        arg = theirs.family.optional[name]
        if name not in out and arg.kind == "near":
            out[name] = x.get("old_logp", x.get(arg.like))
        elif name not in out and arg.kind in ("positive", "label"):
            like = x["mask"] if "mask" in x else x[next(iter(x))]
            out[name] = np.arange(like.shape[1]) + np.zeros(like.shape[:2],
                int) if arg.kind == "label" else np.ones(like.shape)
    return out


def _gap(mine: Bench, theirs: Bench, x: Example) -> tuple[list[Part], float]:
    """Parts of the comparison, and how far apart the two are relative to the row."""
    full = _missing(theirs, x)
    a, b, tol = mine.run(x), theirs.run(full), theirs.tol(full)
    shared = a.value if a.value.ndim == b.value.ndim else a.value.mean(1)
    parts = [Part("value", shared, b.value, 4 * tol.value, raised=a.raised)]
    if a.value.ndim == b.value.ndim:
        parts += [Part(f"gradient of {k}", g, b.grads[k],
            4 * tol.grads[k] + 1e-6 * column(over(np.abs(b.grads[k])), g)) for k, g in a.grads.items()]
    distance = 0.0
    for p in parts:
        size = np.linalg.norm(p.want) + np.linalg.norm(np.nan_to_num(p.got)) + 1e-30
        distance = max(distance, float(np.linalg.norm(np.nan_to_num(p.got - p.want, nan=1e30)) / size))
    return parts, distance


def compare(mine: Bench, batches: list[Example], name: str, family: str) -> tuple[Outcome, dict]:
    """The differential check against one row, and which row of the table is nearest."""
    from jaxpt.objectives import ROWS
    from jaxpt.verify.checking import counterexample

    theirs = bench_of(ROWS[name], family)
    say = ("as_row", "contract")
    words = f"The function is the row {name}, in value and gradient."
    broken = None
    for x in batches:
        parts, _ = _gap(mine, theirs, x)
        for part in parts:
            excess = over(np.broadcast_to(part.excess(), (len(part.want), *np.shape(part.excess())[1:])))
            if broken is None and (excess > 1).any():
                broken = part, x, int(np.argmax(excess))
    nearest = _nearest(mine, batches[-1], family, name)
    rest = (words, "4 times the rounding of the row")
    if broken is None:
        return Outcome(*say, "holds", "both", *rest), nearest
    part, x, i = broken
    one = lambda v: np.broadcast_to(v, np.shape(part.want))[i : i + 1]  # noqa: E731
    single = part._replace(got=one(part.got), want=one(part.want), tol=one(part.tol))
    example = counterexample(mine, single, {k: v[i : i + 1] for k, v in x.items()})
    return Outcome(*say, "broken", part.place, *rest, "", "See `jaxpt describe` for the row's formula and constants.",
        example), nearest


def _nearest(mine: Bench, x: Example, family: str, like: str) -> dict:
    """By value and gradient on a few examples; rows that match exactly come first, the one asked for before others."""
    from jaxpt.objectives import ROWS

    some = {k: v[:NEAREST] for k, v in x.items()}
    matches, distances = [], {}
    for name, row in ROWS.items():
        if family not in families_of(row) or set(parameters(function(row, family), FAMILIES[family],
            family)) - set(mine.takes):
            continue
        if row.alias_of in distances:
            distances[name] = distances[row.alias_of]
            matches += [name] if row.alias_of in matches else []
            continue
        parts, distances[name] = _gap(mine, bench_of(row, family), some)
        if all((p.excess() <= 1).all() for p in parts):
            matches.append(name)
    matches.sort(key=lambda name: name != like)
    best = matches[0] if matches else min(distances, key=distances.get, default=None)
    if best is None:
        return {"row": None, "exact": [], "distance": None, "words": "none of this family takes the same arguments"}
    parts = ", ".join(f"{kind} {words}" for kind,
        words in ROWS[best].parts.items() if kind in ("ratio", "surrogate", "reduction", "link"))
    constants = ", ".join(f"{k} = {v:g}" for k, v in ROWS[best].hyper.items())
    is_it = f"this is {best}" if matches else f"{best}, {distances[best]:.2g} of it away"
    others = f"; the same function: {', '.join(matches[1:])}" if len(matches) > 1 else ""
    return {"row": best, "exact": matches, "distance": float(f"{distances[best]:.3g}"),
            "words": f"{is_it} ({parts}; {constants}){others}"}
