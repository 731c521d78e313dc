"""The row algebra: `compose` joins parts into a Row.

    objective = shaping, selection, filter            which rewards and tokens count
              x advantage, credit, normalisation      what a token is worth
              x ratio, surrogate, reduction           the loss
              (x weights, correction)                 how much a token counts, and for whom it was drawn
              (+ KL, entropy, critic)
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import chex
import jax.numpy as jnp

from jaxpt.objectives import loss_parts
from jaxpt.objectives import parts as tables
from jaxpt.objectives import reduction as reductions
from jaxpt.objectives.parts import Part, Penalty, bind
from jaxpt.objectives.row import Row
from jaxpt.objectives.shaping import on_last_token
from jaxpt.ops.masked import at_least_float32, count, keep, stop, weighed
from jaxpt.types import Array, Trajectory

LOSS_READS = ("ref_logp", "entropy", "vocab_kl", "sampler_logp", "weights", "prompt_tokens")  # by the loss, beyond its arguments
GIVEN = ("baseline", "anchor", "parts")  # to `prepare`, by further samples or by the environment
METRICS = ("ratio", "clip_fraction", "kl")  # of every loss; weight 0 where a row has no such thing


def compose(
    name: str,
    paper: str,
    *,
    advantage: str,
    ratio: str,
    surrogate: str,
    reduction: str,
    credit: str = "trajectory",
    normalisation: str = "none",
    shaping: str = "none",
    selection: str = "all",
    filter: str = "none",
    weights: str = "none",
    correction: str = "none",
    kl: Penalty = Penalty(),
    entropy: str = "none",
    entropy_controller: str = "fixed",
    hyper: Mapping[str, float] | None = None,
    claims: tuple[str, ...] = (),
    more: Mapping[str, Mapping[str, Part]] = MappingProxyType({}),
) -> Row:
    """Joins named parts into a row. `hyper` must give exactly the constants that the parts use. `more`: entries that
    the tables of parts.py and loss_parts.py lack, by the name of the table.

    An advantage of parts.STEPWISE knows every decision as a step, so `credit` has no say; those of
    parts.WITH_CRITIC bring a critic.
    """
    def table(kind: str) -> Mapping[str, Part]:
        return {**getattr(tables if hasattr(tables, kind) else loss_parts, kind), **more.get(kind, {})}

    stepwise = advantage in table("STEPWISE")
    critic = "clipped" if advantage in (*tables.WITH_CRITIC, *more.get("WITH_CRITIC", ())) else "none"
    penalised, entropy_term = kl.value != "none", entropy
    parts = {
        "shaping": table("SHAPINGS")[shaping], "selection": table("SELECTIONS")[selection], "filter": table("FILTERS")[filter],
        "advantage": table("STEPWISE" if stepwise else "ADVANTAGES")[advantage],
        "credit": table("CREDITS")["step" if stepwise else credit],
        "normalisation": table("NORMALISATIONS")[normalisation], "ratio": table("RATIOS")[ratio],
        "surrogate": table("SURROGATES")[surrogate], "weights": table("WEIGHTS")[weights],
        "correction": table("CORRECTIONS")[correction], "reduction": table("REDUCTIONS")[reduction],
        "kl": table("KL_VALUES")[kl.value], "kl_gradient": table("KL_GRADIENTS")[kl.gradient],
        "kl_placement": table("KL_PLACEMENTS")[kl.placement], "kl_controller": table("KL_CONTROLLERS")[kl.controller],
        "entropy": table("ENTROPIES")[entropy],
        "entropy_controller": table("ENTROPY_CONTROLLERS")[entropy_controller], "critic": table("CRITICS")[critic],
    }
    if "vocab_kl" in parts["kl"].reads and (kl.gradient, kl.placement) != ("own", "loss"):
        raise ValueError(f"row {name!r}: a KL over the vocabulary is differentiated as it stands, in the loss")
    wanted = {what for part in parts.values() for what in part.reads} | ({"values"} if critic != "none" else set())
    needs = tuple(what for what in (*LOSS_READS, "values", *GIVEN) if what in wanted)
    hyper = dict(hyper or {})
    apply, constants_with = bind(name, parts, hyper)

    def divergence(constants) -> Callable:
        """The KL's value; beta weighs it, what else it uses is its own."""
        return partial(parts["kl"].fn, **{k: constants[k] for k in parts["kl"].uses if k != "beta"})

    def token_rewards(traj: Trajectory, outcome, ref_logp, process, constants) -> Array:
        """[B,T]: the shaped reward at the last decision, process rewards and the KL at their own."""
        rewards = on_last_token(outcome, traj.mask)
        if process is not None:
            rewards = rewards + keep(process, traj.mask).astype(rewards.dtype)
        old_logp = keep(at_least_float32(traj.old_logp), traj.mask)
        if penalised and kl.placement == "reward":
            rewards = rewards - constants["beta"] * divergence(constants)(old_logp, keep(at_least_float32(ref_logp), traj.mask))
        if entropy_term == "reward":
            rewards = rewards + apply("entropy", old_logp, **constants)
        return rewards

    def prepare(
        traj: Trajectory, *, ref_logp=None, values=None, final_values=None, process=None, baseline=None, anchor=None,
        sampler_logp=None, total=lambda tree: tree, **overrides: float,
    ) -> dict:
        constants = constants_with(overrides)
        decided = traj.mask > 0
        outcome = at_least_float32(apply("shaping", traj, **constants))
        rewards = token_rewards(traj, outcome, ref_logp, process, constants)
        scored = decided & jnp.all(jnp.isfinite(rewards), axis=1, keepdims=True)
        of_row, returns = jnp.sum(keep(rewards, scored), axis=1), jnp.zeros_like(rewards)
        offered = {
            "baseline": baseline, "anchor": anchor, "parts": traj.parts if traj.parts.shape[1] else None, "total": total,
            "outcome": outcome, "length": count(decided, axis=1),
            "process": jnp.zeros_like(rewards) if process is None else process.astype(rewards.dtype),
            "old_logp": at_least_float32(traj.old_logp),
            "sampler_logp": None if sampler_logp is None else at_least_float32(sampler_logp),
        }
        given = {kind: {what: offered[what] for what in parts[kind].reads} for kind in ("advantage", "credit")}
        missing = [what for read in given.values() for what, x in read.items() if x is None]
        if missing:
            raise TypeError(f"row {name!r} needs {missing[0]}")
        if stepwise:
            rewards = keep(rewards, scored)
            values = jnp.zeros_like(rewards) if values is None else keep(at_least_float32(values), decided)
            final = jnp.zeros_like(rewards[:, 0]) if final_values is None else keep(final_values, traj.truncated)
            steps = rewards, values, scored, final.astype(rewards.dtype)
            returns, advantages = apply("advantage", *steps, given=given["advantage"], **constants)
            returns = jnp.where(scored, returns, values)  # a row whose reward is missing teaches the critic nothing
        else:
            of = lambda worth, group: apply("advantage", worth, group, given=given["advantage"], **constants)  # noqa: E731
            advantages = apply("credit", of, rewards, traj, given=given["credit"], **constants)
        mask = apply("filter", traj, apply("selection", traj, decided, **constants), **constants)
        if normalisation != "none":
            advantages = apply("normalisation", advantages, of_row, traj.group, mask & scored, total, **constants)
        prompt_tokens = reductions.prompt_tokens_of(mask, traj.group)
        return {
            "advantages": keep(advantages, mask), "returns": keep(returns, mask), "mask": mask,
            "prompt_tokens": prompt_tokens, "totals": total(reductions.totals_of(mask, prompt_tokens)),
        }

    def loss(
        logp, old_logp, advantages, mask, *, totals, ref_logp=None, entropy=None, vocab_kl=None, sampler_logp=None,
        weights=None, prompt_tokens=None, **overrides,
    ):
        chex.assert_equal_shape([logp, old_logp, advantages, mask])
        constants = constants_with(overrides)
        of_tokens = {
            "ref_logp": stop(ref_logp), "entropy": entropy, "vocab_kl": vocab_kl, "sampler_logp": stop(sampler_logp),
            "weights": stop(weights),
        }
        given = {what: keep(at_least_float32(x), mask) for what, x in of_tokens.items() if what in needs and x is not None}
        given |= {"prompt_tokens": prompt_tokens} if prompt_tokens is not None else {}
        missing = [what for what in needs if what in LOSS_READS and what not in given]
        if missing:
            raise TypeError(f"row {name!r} needs {missing[0]}")
        read = lambda kind: [given[what] for what in parts[kind].reads]  # noqa: E731
        logp, old_logp, advantages = (
            keep(at_least_float32(x), mask) for x in (logp, stop(old_logp), stop(advantages))
        )
        rho = apply("ratio", logp, old_logp, mask)
        per_token, metrics = apply("surrogate", logp, old_logp, rho, advantages, mask, **constants)
        if parts["weights"].fn:
            per_token *= stop(apply("weights", advantages, mask, *read("weights"), **constants))
        if parts["correction"].fn:
            per_token *= apply("correction", old_logp, mask, *read("correction"), **constants)
        if ratio != "none":
            metrics["ratio"] = rho
        if penalised:
            metrics["kl"] = divergence(constants)(logp, *read("kl"))
            if kl.placement == "loss":
                per_token += constants["beta"] * parts["kl_gradient"].fn(divergence(constants), logp, old_logp, *read("kl"))
        if entropy_term == "bonus":
            per_token -= apply("entropy_controller", constants["entropy_coef"], **constants) * given["entropy"]
        measured = {k: weighed(x, mask) for k, x in metrics.items()}
        nothing = (jnp.zeros_like(per_token[0, 0]), jnp.float32(0))
        value = apply("reduction", per_token, mask, totals, *read("reduction"), **constants)
        return value, {k: measured.get(k, nothing) for k in METRICS}

    return Row(
        name=name, family="policy_loss", paper=paper, formula=_formula(parts, kl), needs=("logp", *needs), hyper=hyper,
        prepare=prepare, loss=loss, additive=all(part.additive for part in parts.values()), claims=claims,
        parts={kind: part.words for kind, part in parts.items() if part.words and (penalised or not kind.startswith("kl_"))},
    )


def _formula(parts: Mapping[str, Part], kl: Penalty) -> str:
    """The loss on the first line, what it is made of below."""
    penalised, bonus = kl.value != "none", bool(parts["entropy"].reads)
    factors = " ".join(f"{symbol}_it" for symbol, kind in (("u", "weights"), ("w", "correction")) if parts[kind].fn)
    surrogate = f"{factors} ({parts['surrogate'].formula})" if factors else parts["surrogate"].formula
    in_loss = [surrogate, parts["kl_placement"].formula if penalised and kl.placement == "loss" else "",
               parts["entropy"].formula if bonus else ""]
    lines = [f"loss = {parts['reduction'].formula} m_it [ {' '.join(filter(None, in_loss))} ]"]
    below = ["kl", "kl_gradient", "kl_controller"] if penalised else []
    if penalised and kl.placement == "reward":
        below += ["kl_placement"]
    below += ["entropy_controller"] if bonus else ["entropy"]
    kinds = ("ratio", "weights", "correction", "advantage", "normalisation", "credit", "shaping", *below, "selection", "filter",
             "critic")
    return "\n".join(lines + [parts[kind].formula for kind in kinds if parts[kind].formula])
