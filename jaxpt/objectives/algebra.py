"""The row algebra: `compose` joins parts into a Row.

    objective = shaping, selection, filter            which rewards and tokens count
              x advantage, credit, normalisation      what a token is worth
              x ratio, surrogate, reduction           the loss
              (+ KL, entropy bonus, critic)
"""

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

from jaxpt.objectives import parts as tables
from jaxpt.objectives import reduction as reductions
from jaxpt.objectives.parts import Part, Penalty
from jaxpt.objectives.row import Row
from jaxpt.objectives.shaping import on_last_token, slots, to_go
from jaxpt.ops.masked import keep, stop, weighed
from jaxpt.types import Array, Trajectory

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
    kl: Penalty = Penalty(),
    entropy: str = "none",
    hyper: Mapping[str, float] | None = None,
    claims: tuple[str, ...] = (),
) -> Row:
    """Joins named parts into a row. `hyper` must give exactly the constants that the parts use.

    An advantage of parts.STEPWISE knows every decision as a step, so `credit` has no say; "gae" brings a critic.
    """
    stepwise = advantage in tables.STEPWISE
    critic = "clipped" if advantage == "gae" else "none"
    penalised = kl.value != "none"
    parts = {
        "shaping": tables.SHAPINGS[shaping], "selection": tables.SELECTIONS[selection], "filter": tables.FILTERS[filter],
        "advantage": (tables.STEPWISE if stepwise else tables.ADVANTAGES)[advantage],
        "credit": tables.CREDITS["step" if stepwise else credit],
        "normalisation": tables.NORMALISATIONS[normalisation], "ratio": tables.RATIOS[ratio],
        "surrogate": tables.SURROGATES[surrogate], "reduction": tables.REDUCTIONS[reduction],
        "kl": tables.KL_VALUES[kl.value], "kl_gradient": tables.KL_GRADIENTS[kl.gradient],
        "kl_placement": tables.KL_PLACEMENTS[kl.placement], "kl_controller": tables.KL_CONTROLLERS[kl.controller],
        "entropy": tables.ENTROPIES[entropy], "critic": tables.CRITICS[critic],
    }
    hyper = dict(hyper or {})
    used = {constant for part in parts.values() for constant in part.uses}
    if used != set(hyper):
        raise ValueError(f"row {name!r}: hyper has {sorted(hyper)}, its parts use {sorted(used)}")

    def constants_with(overrides: Mapping[str, float]) -> dict[str, float]:
        unknown = set(overrides) - set(hyper)
        if unknown:
            raise TypeError(f"row {name!r} has no constant {sorted(unknown)[0]!r}, only {sorted(hyper)}")
        return {**hyper, **overrides}

    def apply(kind: str, *arrays, **constants: float):
        return parts[kind].fn(*arrays, **{k: constants[k] for k in parts[kind].uses})

    def token_rewards(traj: Trajectory, ref_logp, process, constants) -> Array:
        """[B,T]: the shaped reward at the last decision, process rewards and the KL at their own."""
        rewards = on_last_token(_at_least_float32(apply("shaping", traj, **constants)), traj.mask)
        if process is not None:
            rewards = rewards + keep(process, traj.mask).astype(rewards.dtype)
        if penalised and kl.placement == "reward":
            old_logp, ref_logp = (keep(_at_least_float32(x), traj.mask) for x in (traj.old_logp, ref_logp))
            rewards = rewards - constants["beta"] * parts["kl"].fn(old_logp, ref_logp)
        return rewards

    def prepare(
        traj: Trajectory, *, ref_logp=None, values=None, final_values=None, process=None, total=lambda tree: tree,
        **overrides: float,
    ) -> dict:
        constants = constants_with(overrides)
        decided = traj.mask > 0
        rewards = token_rewards(traj, ref_logp, process, constants)
        scored = decided & jnp.all(jnp.isfinite(rewards), axis=1, keepdims=True)
        returns = jnp.zeros_like(rewards)
        if stepwise:
            rewards = keep(rewards, scored)
            values = jnp.zeros_like(rewards) if values is None else keep(_at_least_float32(values), decided)
            final = jnp.zeros_like(rewards[:, 0]) if final_values is None else keep(final_values, traj.truncated)
            advantages = apply("advantage", rewards, values, scored, final.astype(rewards.dtype), **constants)
            returns = advantages + values  # a row whose reward is missing teaches the critic nothing
        else:
            places = 1 if credit == "trajectory" else decided.shape[1]
            slot = slots(credit, traj)
            worth, there = to_go(rewards, decided, slot, places)
            of_slot = lambda worth: apply("advantage", worth, traj.group, **constants)  # noqa: E731
            by_slot = jax.vmap(of_slot, 1, 1)(jnp.where(there, worth, jnp.nan))
            advantages = jnp.take_along_axis(by_slot, slot, axis=1)
        mask = apply("filter", traj, apply("selection", traj, decided, **constants), **constants)
        if normalisation == "batch":
            advantages = apply("normalisation", advantages, mask & scored, total, **constants)
        return {
            "advantages": keep(advantages, mask), "returns": keep(returns, mask), "mask": mask,
            "totals": total(reductions.totals_of(mask)),
        }

    def loss(logp, old_logp, advantages, mask, *, totals, ref_logp=None, entropy=None, **overrides):
        chex.assert_equal_shape([logp, old_logp, advantages, mask])
        constants = constants_with(overrides)
        logp, old_logp, advantages = (
            keep(_at_least_float32(x), mask) for x in (logp, stop(old_logp), stop(advantages))
        )
        rho = apply("ratio", logp, old_logp, mask)
        per_token, metrics = apply("surrogate", logp, rho, advantages, **constants)
        if ratio != "none":
            metrics["ratio"] = rho
        if penalised:
            ref = keep(_at_least_float32(stop(ref_logp)), mask)
            metrics["kl"] = parts["kl"].fn(logp, ref)
            if kl.placement == "loss":
                per_token += constants["beta"] * parts["kl_gradient"].fn(parts["kl"].fn, logp, old_logp, ref)
        if parts["entropy"].uses:
            per_token -= constants["entropy_coef"] * keep(_at_least_float32(entropy), mask)
        measured = {k: weighed(x, mask) for k, x in metrics.items()}
        nothing = (jnp.zeros_like(per_token[0, 0]), jnp.float32(0))
        return apply("reduction", per_token, mask, totals, **constants), {k: measured.get(k, nothing) for k in METRICS}

    needs = [("ref_logp", penalised), ("entropy", entropy == "bonus"), ("values", critic != "none")]
    return Row(
        name=name, paper=paper, formula=_formula(parts, kl),
        needs=("logp", *(what for what, wanted in needs if wanted)),
        hyper=hyper, prepare=prepare, loss=loss, additive=True, claims=claims,
        parts={kind: part.words for kind, part in parts.items() if penalised or not kind.startswith("kl_")},
    )


def _formula(parts: Mapping[str, Part], kl: Penalty) -> str:
    """The loss on the first line, what it is made of below."""
    penalised = kl.value != "none"
    in_loss = [parts["surrogate"].formula, parts["kl_placement"].formula if penalised and kl.placement == "loss" else "",
               parts["entropy"].formula]
    lines = [f"loss = {parts['reduction'].formula} m_it [ {' '.join(filter(None, in_loss))} ]"]
    below = ["kl", "kl_gradient", "kl_controller"] if penalised else []
    if penalised and kl.placement == "reward":
        below += ["kl_placement"]
    kinds = ("ratio", "advantage", "normalisation", "credit", "shaping", *below, "selection", "filter", "critic")
    return "\n".join(lines + [parts[kind].formula for kind in kinds if parts[kind].formula])


def _at_least_float32(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
