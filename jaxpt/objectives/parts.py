"""The parts an objective is made of, by kind: a function, its formula and its words. Those of rewards and advantages
are here, those of the loss in loss_parts.py.

What `describe` prints is made of the same pieces as what is computed. {constants} in a formula are filled from
the row's hyper; `uses` names the constants a part needs, `reads` what its function is given beyond the arrays of its
kind. A part that is not `additive` looks at all rows that are given together, so partial losses do not add up.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpt.objectives import advantages as adv
from jaxpt.objectives import credit, normalisation, shaping, value
from jaxpt.objectives.row import replaced
from jaxpt.types import Array, Trajectory


class Part(NamedTuple):
    fn: Callable | None
    formula: str
    words: str
    uses: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    additive: bool = True


def bind(name: str, parts: Mapping[str, Part], hyper: Mapping[str, float]) -> tuple[Callable, Callable]:
    """(apply, constants_with): a part called with its own constants (and what it reads, as `given`), and the row's
    constants with some replaced. ValueError where hyper is not exactly what the parts use."""
    used = {constant for part in parts.values() for constant in part.uses}
    if used != set(hyper):
        raise ValueError(f"row {name!r}: hyper has {sorted(hyper)}, its parts use {sorted(used)}")

    def apply(kind: str, *arrays, given: Mapping[str, Any] = MappingProxyType({}), **constants: float):
        return parts[kind].fn(*arrays, **given, **{k: constants[k] for k in parts[kind].uses})

    return apply, partial(replaced, name, hyper)


class Penalty(NamedTuple):
    """A KL term: the value that is reported, whose gradient pulls, where it stands, and who sets beta."""

    value: str = "none"
    gradient: str = "own"
    placement: str = "loss"
    controller: str = "fixed"


# rewards [N] of what is compared, group [N] -> advantages [N]; see advantages.py for the contract. What a part reads
# beyond that: length, outcome [B] of rows, traj.parts; baseline, anchor and process as given to prepare; total.
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
    "standardised_parts": Part(
        adv.standardised_parts,
        "A_i = sum_q (r_iq - mean_g r_q) / (std_g r_q + {std_eps}) over the parts q of the reward, std_g over n - {ddof}",
        "each part of the reward minus its group's mean, over its own standard deviation",
        ("std_eps", "ddof"), reads=("parts",),
    ),
    "above_baseline": Part(
        adv.above_baseline, "A_i = r_i - b_i, b_i the reward of the greedy answer to the prompt",
        "reward minus that of the greedy answer", reads=("baseline",),
    ),
    "less_length_weighted": Part(
        adv.less_length_weighted, "A_i = r_i - sum_g n_j r_j / sum_g n_j",
        "reward minus the group's mean weighed by length", reads=("length",),
    ),
    "over_mean": Part(
        adv.over_mean, "A_i = (r_i - mean_g r) / mean_g r, 0 where mean_g r <= 0",
        "reward minus the group's mean, over the group's mean",
    ),
    "pass_at_k": Part(
        adv.pass_at_k,
        "A_i = (F - [0 if r_i > 0 else C(f-1,{k}-1) / C(n-1,{k}-1)]) / sqrt(F (1 - F)), F = C(f,{k}) / C(n,{k}), "
        "f of n fail",
        "standardised success of draws of k from the group, shared among their members", ("k",),
    ),
    "best_of_k": Part(
        adv.best_of_k, "A_i = {k} mean over J of max(0, r_i - max_J r), J: {k} - 1 other members of the group",
        "what the sample adds to the best of k", ("k",),
    ),
    "exponential": Part(
        adv.exponential, "A_i = min(exp((r_i - mean_g r) / {temperature}), {weight_max})",
        "a weight that grows exponentially with the reward above the group's mean", ("temperature", "weight_max"),
    ),
}


Steps = tuple[Array, Array]


def targets_and(advantages: Array, values: Array) -> Steps:
    """A critic learns what the policy is compared with: A + V."""
    return advantages + values, advantages


def _returns(rewards: Array, values: Array, mask: Array, final_values: Array, *, gamma: float) -> Steps:
    return targets_and(value.gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0), values)


def _gae(
    rewards: Array, values: Array, mask: Array, final_values: Array, *, gamma: float, lam: float, bootstrap: float
) -> Steps:
    return targets_and(value.gae(rewards, values, mask, gamma, lam, bootstrap * final_values), values)


def _n_step(
    rewards: Array, values: Array, mask: Array, final_values: Array, *, gamma: float, n_steps: float, bootstrap: float
) -> Steps:
    return targets_and(value.n_step(rewards, values, mask, gamma, n_steps, bootstrap * final_values), values)


def _v_trace(
    rewards: Array, values: Array, mask: Array, final_values: Array, *, old_logp: Array, sampler_logp: Array, gamma: float,
    bootstrap: float, rho_bar: float, c_bar: float,
) -> Steps:
    return value.v_trace(
        rewards, values, old_logp - sampler_logp, mask, gamma, bootstrap * final_values, rho_bar=rho_bar, c_bar=c_bar
    )


# rewards, values, mask [B,T], final_values [B] (0 unless truncated) -> (what a critic learns, advantages) [B,T], every
# decision a step. What a part reads beyond that: old_logp, sampler_logp [B,T].
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
    "n_step": Part(
        _n_step,
        "A_it = sum_(s<{n_steps}) {gamma}^s r_it+s + {gamma}^{n_steps} V_it+{n_steps} - V_it, "
        "V behind a truncated row: {bootstrap} V",
        "reward of the next n trainable tokens and what a critic expects behind them, less its value",
        ("gamma", "n_steps", "bootstrap"),
    ),
    "v_trace": Part(
        _v_trace,
        "A_it = rho_it (r_it + {gamma} v_it+1 - V_it), v_it = V_it + rho_it (r_it + {gamma} V_it+1 - V_it) + {gamma} c_it "
        "(v_it+1 - V_it+1), rho_it = min({rho_bar}, x_it), c_it = min({c_bar}, x_it), x_it = exp(old_logp_it - sampler_logp_it); "
        "R = v; V behind a truncated row: {bootstrap} V",
        "V-trace: what the trainer's policy would earn, from another's decisions and a critic",
        ("gamma", "bootstrap", "rho_bar", "c_bar"), reads=("old_logp", "sampler_logp"),
    ),
}
WITH_CRITIC = ("gae", "n_step", "v_trace")
# (of, rewards [B,T], trajectory) -> advantages [B,T], of(worth [N], group [N]) an advantage from above
CREDITS = {
    "trajectory": Part(credit.trajectory, "", "one advantage for the whole response"),
    "turn": Part(
        credit.turn, "r_i: reward from the beginning of the turn on",
        "one advantage a turn, among the same turns of the group",
    ),
    "token": Part(
        credit.token, "r_i: reward from the token on", "one advantage a token, among the same places of the group"
    ),
    "steps": Part(
        credit.steps,
        "r_i: reward of a turn, g: all turns of the group; A_it := sum of A over the token's turn and those behind",
        "one advantage a turn, among all turns of the group, summed from the token's own on",
    ),
    "anchor_state": Part(
        credit.anchor_state,
        "A_it := A_i + {step_weight} A of the turn, r_i there: reward from it on, discounted by {gamma} a turn, "
        "g: turns of the group that begin in the same state",
        "one for the whole response and one a turn, among turns that begin in the same state",
        ("gamma", "step_weight"), reads=("anchor",),
    ),
    "channels": Part(
        credit.channels,
        "A_it := A_i of the outcome + {path_weight} tokens/(tokens of turns with a verified reward) p_it, "
        "p_it that of the turn",
        "the outcome for the whole response, verified rewards at their turn, each over its own tokens",
        ("path_weight",), reads=("outcome", "process", "total"),
    ),
    "step": Part(None, "", "every decision is a step of its own"),
}
NORMALISATIONS = {  # advantages [B,T], rewards [B], group [B], mask [B,T], total -> advantages [B,T]
    "none": Part(None, "", "advantages as they are"),
    "batch": Part(
        normalisation.tokens_whitened, "A_it := (A_it - mean A) / sqrt(var A + {std_eps}^2) over the batch's tokens",
        "whitened over the whole batch", ("std_eps",),
    ),
    "batch_rows": Part(
        normalisation.rows_whitened, "A_i := (A_i - mean A) / sqrt(var A + {std_eps}^2) over the batch's rows",
        "whitened over the rows of the batch", ("std_eps",),
    ),
    "batch_mean": Part(
        normalisation.less_batch_mean, "A_i := A_i - mean of r over the batch's rows", "minus the batch's mean reward"
    ),
    "batch_deviation": Part(
        normalisation.over_batch_deviation, "A_i := A_i / (std r + {std_eps}) over the batch's rows, std over n - 1",
        "over the standard deviation of the batch's rewards", ("std_eps",),
    ),
    "signal_share": Part(
        normalisation.over_share_with_signal, "A_i := A_i rows / (rows of groups whose rewards differ)",
        "scaled up by the share of rows that carry a signal",
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
CRITICS = {
    "none": Part(None, "", "no critic"),
    "clipped": Part(
        value.clipped_value_loss,
        "critic: 1/tokens sum max((V_it - R_it)^2, (clip(V_it, Vold_it +- {value_clip}) - R_it)^2) / 2, R = A + Vold",
        "a critic with the clipped value loss", ("value_clip",),
    ),
}
