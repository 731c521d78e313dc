"""The row algebra: a policy objective = advantage x ratio x surrogate x reduction (x KL).

`compose` joins five parts into a Row. A part is a function with its formula and its words, so that what
`describe` prints is made of the same pieces as what is computed.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
import jax.numpy as jnp

from jaxpt.objectives import advantages as adv
from jaxpt.objectives import kl as kls
from jaxpt.objectives import ratios, reduction as reductions, surrogates
from jaxpt.objectives.row import Row
from jaxpt.ops.masked import count, keep, masked_sum, stop
from jaxpt.types import Array, Trajectory


class Part(NamedTuple):
    """fn computes it; `formula` has {hyper} placeholders; `uses` names the constants that stand in it."""

    fn: Callable
    formula: str
    words: str
    uses: tuple[str, ...] = ()


ADVANTAGES = {
    "constant": Part(adv.constant, "A_i = 1", "every token counts +1"),
    "monte_carlo": Part(adv.monte_carlo, "A_i = r_i", "the reward itself, no baseline"),
    "leave_one_out": Part(
        adv.leave_one_out, "A_i = r_i - mean of r_j over j in group(i), j != i", "reward minus the other members' mean"
    ),
    "standardised": Part(
        adv.standardised,
        "A_i = (r_i - mean_g r) / (std_g r + {std_eps}), std_g over n - {ddof}",
        "reward minus the group's mean, over the group's standard deviation",
        ("std_eps", "ddof"),
    ),
}
RATIOS = {
    "none": Part(ratios.no_ratio, "", "no importance ratio"),
    "token": Part(ratios.token_ratio, "rho_it = exp(logp_it - old_logp_it)", "importance ratio of each token"),
}
SURROGATES = {
    "score": Part(surrogates.score, "-A_i logp_it", "score function, no clip"),
    "clipped": Part(
        surrogates.clipped,
        "-min(rho_it A_i, clip(rho_it, 1 - {eps_low}, 1 + {eps_high}) A_i)",
        "pessimistic clip of the ratio",
        ("eps_low", "eps_high"),
    ),
}
REDUCTIONS = {
    "token_mean": Part(reductions.token_mean, "1/tokens sum_i sum_t", "every token weighs the same"),
    "sequence_mean": Part(
        reductions.sequence_mean, "1/rows sum_i 1/n_i sum_t", "every sequence weighs the same, whatever its length"
    ),
    "sequence_sum": Part(reductions.sequence_sum, "1/rows sum_i sum_t", "tokens of a sequence are summed"),
}
KLS = {
    "none": Part(lambda logp, ref_logp: jnp.zeros_like(logp), "", "no KL term"),
    "k3_loss": Part(
        kls.k3,
        "+ {beta} (exp(d_it) - 1 - d_it), d_it = ref_logp_it - logp_it",
        "k3 towards the reference, added to the loss",
        ("beta",),
    ),
}


def compose(
    name: str,
    paper: str,
    *,
    advantage: str,
    ratio: str,
    surrogate: str,
    reduction: str,
    kl: str = "none",
    hyper: Mapping[str, float] | None = None,
    claims: tuple[str, ...] = (),
) -> Row:
    """Joins named parts into a row. `hyper` must give exactly the constants that the parts use."""
    parts = {
        "advantage": ADVANTAGES[advantage], "ratio": RATIOS[ratio], "surrogate": SURROGATES[surrogate],
        "reduction": REDUCTIONS[reduction], "kl": KLS[kl],
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

    def apply(kind: str, *arrays: Array, **constants: float):
        return parts[kind].fn(*arrays, **{k: constants[k] for k in parts[kind].uses})

    def prepare(traj: Trajectory, **overrides: float) -> dict:
        trained = jnp.any(traj.mask > 0, axis=1)  # a row without trainable tokens takes no part in a baseline
        rewards = jnp.where(trained, traj.reward, jnp.nan)
        per_row = apply("advantage", rewards, traj.group, **constants_with(overrides))
        return {
            "advantages": keep(jnp.broadcast_to(per_row[:, None], traj.mask.shape), traj.mask),
            "totals": reductions.totals_of(traj.mask),
        }

    def loss(logp, old_logp, advantages, mask, *, totals, ref_logp=None, **overrides):
        chex.assert_equal_shape([logp, old_logp, advantages, mask])
        constants = constants_with(overrides)
        logp, old_logp, advantages = (
            keep(_at_least_float32(x), mask) for x in (logp, stop(old_logp), stop(advantages))
        )
        rho = apply("ratio", logp, old_logp, mask)
        per_token, extra = apply("surrogate", logp, rho, advantages, **constants)
        metrics = {"ratio": rho, **extra}
        if kl != "none":
            divergence = parts["kl"].fn(logp, keep(_at_least_float32(stop(ref_logp)), mask))
            per_token = per_token + constants["beta"] * divergence
            metrics["kl"] = divergence
        value = parts["reduction"].fn(per_token, mask, totals)
        return value, {k: (masked_sum(stop(x), mask), count(mask)) for k, x in metrics.items()}

    lines = [
        f"loss = {parts['reduction'].formula} m_it [ {parts['surrogate'].formula} {parts['kl'].formula}".rstrip() + " ]"
    ]
    lines += [parts[kind].formula for kind in ("ratio", "advantage") if parts[kind].formula]
    return Row(
        name=name, paper=paper, formula="\n".join(lines),
        needs=("logp",) if kl == "none" else ("logp", "ref_logp"),
        hyper=hyper, prepare=prepare, loss=loss, additive=True, claims=claims,
        parts={kind: part.words for kind, part in parts.items()},
    )


def _at_least_float32(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
