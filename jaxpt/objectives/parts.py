"""The parts an objective is made of, by kind: a function, its formula and its words.

What `describe` prints is made of the same pieces as what is computed. {constants} in a formula are filled from
the row's hyper; `uses` names the constants a part needs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxpt.objectives import advantages as adv
from jaxpt.objectives import kl, ratios, reduction, shaping, surrogates, value
from jaxpt.types import Array, Trajectory


class Part(NamedTuple):
    fn: Callable | None
    formula: str
    words: str
    uses: tuple[str, ...] = ()


class Penalty(NamedTuple):
    """A KL term: the value that is reported, whose gradient pulls, where it stands, and who sets beta."""

    value: str = "none"
    gradient: str = "own"
    placement: str = "loss"
    controller: str = "fixed"


# rewards [B] of one slot of every row, group [B] -> advantages [B]
ADVANTAGES = {
    "constant": Part(adv.constant, "A_i = 1", "every token counts +1"),
    "monte_carlo": Part(adv.monte_carlo, "A_i = r_i", "the reward itself, no baseline"),
    "leave_one_out": Part(
        adv.leave_one_out, "A_i = r_i - mean of r_j over j in group(i), j != i", "reward minus the other members' mean"
    ),
    "centred": Part(adv.centred, "A_i = r_i - mean_g r", "reward minus the group's mean"),
    "standardised": Part(
        adv.standardised,
        "A_i = (r_i - mean_g r) / (std_g r + {std_eps}), std_g over n - {ddof}",
        "reward minus the group's mean, over the group's standard deviation",
        ("std_eps", "ddof"),
    ),
}


def _returns(rewards: Array, values: Array, mask: Array, final_values: Array, *, gamma: float) -> Array:
    return value.gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0)


def _gae(
    rewards: Array, values: Array, mask: Array, final_values: Array, *, gamma: float, lam: float, bootstrap: float
) -> Array:
    return value.gae(rewards, values, mask, gamma, lam, bootstrap * final_values)


# rewards, values, mask [B,T], final_values [B] (0 unless truncated) -> advantages [B,T], every decision a step
STEPWISE = {
    "returns": Part(
        _returns, "A_it = sum_s>=t {gamma}^(s-t) r_is", "discounted reward from the token on, no critic", ("gamma",)
    ),
    "gae": Part(
        _gae,
        "A_it = sum_s>=t ({gamma} {lam})^(s-t) (r_is + {gamma} V_is+1 - V_is), V behind a truncated row: {bootstrap} V",
        "generalized advantage estimation over trainable tokens, with a critic",
        ("gamma", "lam", "bootstrap"),
    ),
}
CREDITS = {
    "trajectory": Part(None, "", "one advantage for the whole response"),
    "turn": Part(None, "r_i: reward from the beginning of the turn on", "one advantage a turn, among the same turns of the group"),
    "token": Part(None, "r_i: reward from the token on", "one advantage a token, among the same places of the group"),
    "step": Part(None, "", "every decision is a step of its own"),
}
NORMALISATIONS = {
    "none": Part(None, "", "advantages as they are"),
    "batch": Part(
        value.whiten, "A_it := (A_it - mean A) / sqrt(var A + {std_eps}^2) over the batch's tokens",
        "whitened over the whole batch", ("std_eps",),
    ),
}


def _soft_overlong(traj: Trajectory, *, max_length: float, buffer: float, overlong_penalty: float) -> Array:
    length = jnp.sum(traj.mask > 0, axis=1, dtype=jnp.float32)
    return traj.reward + overlong_penalty * shaping.soft_overlong(length, max_length, buffer)


SHAPINGS = {  # trajectory -> reward [B]
    "none": Part(lambda traj: traj.reward, "", "the environment's reward"),
    "soft_overlong": Part(
        _soft_overlong,
        "r_i := r_i - {overlong_penalty} clip((n_i - ({max_length} - {buffer})) / {buffer}, 0, 1)",
        "plus a penalty that grows over the last tokens of the budget",
        ("max_length", "buffer", "overlong_penalty"),
    ),
}
def _signal(traj: Trajectory, mask: Array, *, max_rounds: float) -> Array:
    reward = jnp.where(jnp.any(mask, axis=1), traj.reward, jnp.nan)  # a row that decided nothing tells nothing
    return mask & shaping.has_signal(reward, traj.group)[:, None]


SELECTIONS = {  # trajectory, mask [B,T] -> mask [B,T]
    "all": Part(lambda traj, mask: mask, "", "every group"),
    "signal": Part(
        _signal,
        "m_it = 0 in groups whose rewards are all equal; at most {max_rounds} rounds draw others in their place",
        "groups whose rewards differ (dynamic sampling)",
        ("max_rounds",),
    ),
    "rewarded": Part(
        lambda traj, mask: mask & ((traj.reward > 0) & jnp.isfinite(traj.reward))[:, None],
        "m_it = 0 in rows whose reward is not above 0",
        "rows that earn a reward (rejection sampling)",
    ),
}
FILTERS = {  # trajectory, mask [B,T] -> mask [B,T]
    "none": Part(lambda traj, mask: mask, "", "every row"),
    "overlong": Part(
        shaping.without_overlong, "m_it = 0 in truncated rows (weight {overlong_filter})",
        "rows that the budget did not end", ("overlong_filter",),
    ),
}
RATIOS = {
    "none": Part(ratios.no_ratio, "", "no importance ratio"),
    "token": Part(ratios.token_ratio, "rho_it = exp(logp_it - old_logp_it)", "importance ratio of each token"),
    "sequence": Part(
        ratios.sequence_ratio, "rho_it = s_i = exp(1/n_i sum_t (logp_it - old_logp_it))",
        "geometric mean of the row's ratios, one for all its tokens",
    ),
    "sequence_token": Part(
        ratios.sequence_token_ratio, "rho_it = sg(s_i) exp(logp_it - sg(logp_it)), s_i = exp(1/n_i sum_t (logp_it - old_logp_it))",
        "the row's ratio in value, the token's own in gradient",
    ),
}
SURROGATES = {
    "score": Part(surrogates.score, "-A_it logp_it", "score function, no clip"),
    "clipped": Part(
        surrogates.clipped,
        "-min(rho_it A_it, clip(rho_it, 1 - {eps_low}, 1 + {eps_high}) A_it)",
        "pessimistic clip of the ratio",
        ("eps_low", "eps_high"),
    ),
}
REDUCTIONS = {
    "token_mean": Part(reduction.token_mean, "1/tokens sum_i sum_t", "every token weighs the same"),
    "sequence_mean": Part(
        reduction.sequence_mean, "1/rows sum_i 1/n_i sum_t", "every sequence weighs the same, whatever its length"
    ),
    "sequence_sum": Part(reduction.sequence_sum, "1/rows sum_i sum_t", "tokens of a sequence are summed"),
    "budget_mean": Part(
        reduction.budget_mean, "1/(rows {max_length}) sum_i sum_t", "tokens are summed, over a constant budget", ("max_length",)
    ),
}
KL_VALUES = {
    "none": Part(None, "", "no KL term"),
    "k1": Part(kl.k1, "k_it = logp_it - ref_logp_it", "k1 towards the reference", ("beta",)),
    "k2": Part(kl.k2, "k_it = (logp_it - ref_logp_it)^2 / 2", "k2 towards the reference", ("beta",)),
    "k3": Part(kl.k3, "k_it = exp(d_it) - 1 - d_it, d_it = ref_logp_it - logp_it", "k3 towards the reference", ("beta",)),
}
KL_GRADIENTS = {
    "own": Part(kl.own_gradient, "", "differentiated as it stands"),
    "k2": Part(kl.k2_gradient, "grad k_it := (logp_it - ref_logp_it) grad logp_it", "pulling as k2"),
    "score": Part(
        kl.score_gradient, "grad k_it := rho_it (logp_it - ref_logp_it) grad logp_it", "pulling as the reverse KL, off-policy too"
    ),
}
KL_PLACEMENTS = {
    "loss": Part(None, "+ {beta} k_it", "added to the loss of its token"),
    "reward": Part(None, "r_it := r_it - {beta} k_it at the sampler's logp", "taken from the reward of its token"),
}
KL_CONTROLLERS = {
    "fixed": Part(None, "", "beta is constant"),
    "adaptive": Part(
        kl.adapted, "beta := beta (1 + clip(KL / {kl_target} - 1, -0.2, 0.2) rows / {kl_horizon}) after every batch",
        "beta follows a target KL", ("kl_target", "kl_horizon"),
    ),
}
ENTROPIES = {
    "none": Part(None, "", "no entropy bonus"),
    "bonus": Part(None, "- {entropy_coef} H_it", "entropy of the policy's distribution, rewarded", ("entropy_coef",)),
}
CRITICS = {
    "none": Part(None, "", "no critic"),
    "clipped": Part(
        value.clipped_value_loss,
        "critic: 1/tokens sum max((V_it - R_it)^2, (clip(V_it, Vold_it +- {value_clip}) - R_it)^2) / 2, R = A + Vold",
        "a critic with the clipped value loss", ("value_clip",),
    ),
}
