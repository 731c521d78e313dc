"""Parts that only other libraries have, as parts.py: where they clamp, what they divide by, what a step is to them.

TRL 1.16, verl 0.9.1, OpenRLHF 0.11.2, Tunix 0.1.7, SkyRL 0.4.0, rlax 0.1.9; the part's comment or function names the
place. Where a clamp leaves a dead zone, the part has it too. Where a peer lets exp overflow, ours is continued beyond
20 nats as everywhere; masked slots stay out of the arithmetic, and a group without signal gets exactly 0.
"""

import jax.numpy as jnp

from jaxpt.objectives import advantages as adv
from jaxpt.objectives import value
from jaxpt.objectives.loss_parts import CLIP
from jaxpt.objectives.parts import Part, Steps, targets_and
from jaxpt.objectives.reduction import Totals
from jaxpt.ops.masked import bounded_exp, count, keep, less_mean, masked_mean, masked_sum, safe_div, stop
from jaxpt.types import Array

# --- advantages of a group


def _alone(rewards: Array, group: Array) -> Array:
    """[B] bool: the row is the only one of its group."""
    return jnp.sum(group[:, None] == group[None, :], axis=1) == 1


def standardised_or_raw(rewards: Array, group: Array, *, std_eps: float, ddof: float) -> Array:
    """verl core_algos.py:301-313, SkyRL ppo_utils.py:1381: mean 0 and std 1 in a group of one."""
    raw = adv.monte_carlo(rewards, group) / (1.0 + std_eps)
    return jnp.where(_alone(rewards, group), raw, adv.standardised(rewards, group, std_eps=std_eps, ddof=ddof))


def centred_or_raw(rewards: Array, group: Array) -> Array:
    """verl core_algos.py:564: mean 0 in a group of one."""
    return jnp.where(_alone(rewards, group), adv.monte_carlo(rewards, group), adv.centred(rewards, group))


def leave_one_out_or_raw(rewards: Array, group: Array) -> Array:
    """verl core_algos.py:618: a group of one keeps its reward (its vectorised form, and SkyRL, give 0)."""
    return jnp.where(_alone(rewards, group), adv.monte_carlo(rewards, group), adv.leave_one_out(rewards, group))


def over_mean_plus(rewards: Array, group: Array, *, mean_eps: float) -> Array:
    """SkyRL ppo_utils.py:1407, maxrl: (r - mean) / (mean + mean_eps), whatever the mean; a group of one keeps r."""
    at = adv.standing(rewards, group)
    return jnp.where(
        _alone(rewards, group), adv.monte_carlo(rewards, group), safe_div(at.place * at.spread, at.mean + mean_eps)
    )


def best_over_second(rewards: Array, group: Array, *, std_eps: float, ddof: float) -> Array:
    """verl core_algos.py:468, grpo_passk: the group's best gets its lead over the second, over std + std_eps; the
    others get 0. Of equal best ones none leads."""
    at = adv.standing(rewards, group)
    others = (group[:, None] == group[None, :]) & ~jnp.eye(group.size, dtype=bool) & at.signal[None, :]
    second = jnp.max(jnp.where(others, at.place[None, :], -jnp.inf), axis=1)
    lead = keep(at.place - second, at.signal & (at.place > second))
    variance = safe_div(at.total(at.place**2), jnp.maximum(at.n - ddof, 0.0))
    std = jnp.sqrt(jnp.where(variance > 0, variance, 1.0))
    return safe_div(lead * at.spread, std * at.spread + std_eps)


ALONE = ", a group of one: r_i"
STD = ", std_g over n - {ddof}"
ADVANTAGES = {
    "standardised_or_raw": Part(
        standardised_or_raw, "A_i = (r_i - mean_g r) / (std_g r + {std_eps})" + STD + "; a group of one: r_i / (1 + {std_eps})",
        "reward minus the group's mean, over its standard deviation; the reward itself in a group of one", ("std_eps", "ddof"),
    ),
    "centred_or_raw": Part(
        centred_or_raw, "A_i = r_i - mean_g r" + ALONE, "reward minus the group's mean; the reward itself in a group of one"
    ),
    "leave_one_out_or_raw": Part(
        leave_one_out_or_raw, "A_i = r_i - mean of r_j over j in group(i), j != i" + ALONE,
        "reward minus the other members' mean; the reward itself in a group of one",
    ),
    "over_mean_plus": Part(
        over_mean_plus, "A_i = (r_i - mean_g r) / (mean_g r + {mean_eps}), of either sign" + ALONE,
        "reward minus the group's mean, over the group's mean, also where that is near 0 or below", ("mean_eps",),
    ),
    "best_over_second": Part(
        best_over_second, "A_i = (r_i - second largest of g) / (std_g r + {std_eps}) for the largest r_i of g, else 0" + STD,
        "the lead of the group's best over the second, over the standard deviation", ("std_eps", "ddof"),
    ),
}

# --- advantages of tokens


def _every_place(mask: Array) -> Array:
    return jnp.ones(mask.shape, bool)


def gae_every_place(rewards, values, mask, final_values, *, gamma: float, lam: float) -> Steps:
    """OpenRLHF experience_maker.py:366: every place of the row is a step; at those that the policy did not decide
    reward and value are 0 (SkyRL ppo_utils.py:1313 keeps their values)."""
    return targets_and(keep(value.gae(rewards, keep(values, mask), _every_place(mask), gamma, lam), mask), values)


def returns_every_place(rewards, values, mask, final_values, *, gamma: float) -> Steps:
    """OpenRLHF experience_maker.py:407: as gae_every_place, without values."""
    return targets_and(keep(value.gae(rewards, jnp.zeros_like(rewards), _every_place(mask), gamma, 1.0), mask), values)


STEPWISE = {
    "gae_unbootstrapped": Part(
        lambda rewards, values, mask, final_values, *, gamma, lam: targets_and(
            value.gae(rewards, values, mask, gamma, lam), values
        ),
        "A_it = sum_s>=t ({gamma} {lam})^(s-t) (r_is + {gamma} V_is+1 - V_is), V = 0 behind every row",
        "generalized advantage estimation over trainable tokens, with a critic that says nothing of truncated rows",
        ("gamma", "lam"),
    ),
    "gae_every_place": Part(
        gae_every_place,
        "A_it = sum_s>=t ({gamma} {lam})^(s-t) (r_is + {gamma} V_is+1 - V_is), s over all places, r = V = 0 where m = 0",
        "generalized advantage estimation; a place that the policy did not decide is a step of value 0", ("gamma", "lam"),
    ),
    "returns_every_place": Part(
        returns_every_place, "A_it = sum_s>=t {gamma}^(s-t) r_is, s over all places",
        "discounted reward from the token on; a place that the policy did not decide is a step", ("gamma",),
    ),
}
WITH_CRITIC = ("gae_unbootstrapped", "gae_every_place")


def _moments(x: Array, mask: Array, total, ddof: float) -> tuple[Array, Array]:
    """x - mean, and the variance over n - ddof, of the kept tokens of the batch."""
    x, n = keep(x, mask), total(count(mask))
    centred = less_mean(x, mask, n, total)
    return centred, safe_div(total(jnp.sum(centred**2)), jnp.maximum(n - ddof, 0.0))


def whitened_rsqrt(advantages, rewards, group, mask, total, *, var_eps: float, ddof: float) -> Array:
    """verl torch_functional.py:329, Tunix algo_core.py:103, SkyRL ppo_utils.py:147."""
    centred, variance = _moments(advantages, mask, total, ddof)
    return centred / jnp.sqrt(variance + var_eps)


def whitened_floor(advantages, rewards, group, mask, total, *, var_floor: float) -> Array:
    """OpenRLHF experience_maker.py:315."""
    centred, variance = _moments(advantages, mask, total, 0.0)
    return centred / jnp.sqrt(jnp.maximum(variance, var_floor))


def over_nonzero_share(advantages, rewards, group, mask, total) -> Array:
    """verl core_algos.py:807, gpg."""
    rows, right = jnp.float32(mask.shape[0]), jnp.sum(jnp.any(mask, axis=1) & (rewards != 0), dtype=jnp.float32)
    rows, right = total((rows, right))
    return keep(advantages * rows / jnp.maximum(right, 1.0), mask)


NORMALISATIONS = {
    "nonzero_share": Part(
        over_nonzero_share, "A_i := A_i (rows, empty ones too) / (rows whose reward is not 0)",
        "scaled up by the share of rows whose reward is not 0",
    ),
    "batch_rsqrt": Part(
        whitened_rsqrt, "A_it := (A_it - mean A) / sqrt(var A + {var_eps}) over the batch's tokens, var over n - {ddof}",
        "whitened over the whole batch, with a constant in the variance", ("var_eps", "ddof"),
    ),
    "batch_floor": Part(
        whitened_floor, "A_it := (A_it - mean A) / sqrt(max(var A, {var_floor})) over the batch's tokens",
        "whitened over the whole batch, with a least variance", ("var_floor",),
    ),
}

# --- ratios


def token_clamped(logp: Array, old_logp: Array, mask: Array) -> Array:
    """verl core_algos.py:1322, OpenRLHF loss.py:189, Tunix algo_core.py:412, SkyRL torch_utils.py:188."""
    return jnp.exp(jnp.clip(logp - old_logp, -20.0, 20.0))


def sequence_token_capped(logp: Array, old_logp: Array, mask: Array) -> Array:
    """verl core_algos.py:1590, SkyRL ppo_utils.py:709: no gradient where the row's mean log-ratio is above 10."""
    of_row = masked_mean(logp - old_logp, mask, axis=1)[:, None]
    return jnp.exp(jnp.minimum(logp - stop(logp) + stop(of_row), 10.0))


def sequence_token_clamped(logp: Array, old_logp: Array, mask: Array) -> Array:
    """Tunix algo_core.py:412-426: the row's mean is of log-ratios clamped to 20 nats."""
    of_row = masked_mean(jnp.clip(logp - old_logp, -20.0, 20.0), mask, axis=1)[:, None]
    return jnp.exp(jnp.minimum(logp - stop(logp) + stop(of_row), 10.0))


def sequence_product(logp: Array, old_logp: Array, mask: Array) -> Array:
    """TRL rloo_trainer.py:1798: the probability ratio of the whole response."""
    return jnp.broadcast_to(bounded_exp(masked_sum(logp - old_logp, mask, axis=1))[:, None], logp.shape)


S = "s_i = exp(1/n_i sum_t (logp_it - old_logp_it))"
RATIOS = {
    "token_clamped": Part(
        token_clamped, "rho_it = exp(clip(logp_it - old_logp_it, -20, 20))",
        "importance ratio of each token, its log clamped to 20 nats (no gradient beyond)",
    ),
    "sequence_token_capped": Part(
        sequence_token_capped, "rho_it = min(sg(s_i) exp(logp_it - sg(logp_it)), e^10), " + S,
        "the row's ratio in value, the token's own in gradient, none above e^10",
    ),
    "sequence_token_clamped": Part(
        sequence_token_clamped,
        "rho_it = min(sg(s_i) exp(logp_it - sg(logp_it)), e^10), s_i = exp(1/n_i sum_t clip(logp_it - old_logp_it, -20, 20))",
        "the row's ratio of clamped log-ratios in value, the token's own in gradient, none above e^10",
    ),
    "sequence_product": Part(
        sequence_product, "rho_it = prod_t exp(logp_it - old_logp_it)", "importance ratio of the whole row, for all its tokens"
    ),
}

# --- surrogates


def unclipped(logp, old_logp, ratio, advantages, mask):
    """SkyRL ppo_utils.py:1095, importance_sampling."""
    return -ratio * advantages, {}


def capped_weight(logp, old_logp, ratio, advantages, mask, *, ratio_cap: float):
    """TRL grpo_trainer.py:3109, cispo: the cap is of the ratio itself, and there is none below."""
    weight = stop(jnp.minimum(ratio, ratio_cap))
    return -weight * advantages * keep(logp, advantages != 0), {"clip_fraction": (weight != ratio).astype(ratio.dtype)}


def bounded_ratio(logp, old_logp, ratio, advantages, mask, *, eps_low: float, eps_high: float, ratio_cap: float):
    """TRL grpo_trainer.py:3112-3119 with delta: the ratio of the free term is at most ratio_cap."""
    free = jnp.minimum(ratio, ratio_cap) * advantages
    bound = jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantages
    return -jnp.minimum(free, bound), {"clip_fraction": (bound < free).astype(ratio.dtype)}


def gamma_weight(
    logp, old_logp, ratio, advantages, mask, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float
):
    """TRL grpo_trainer.py:2970, vespo: e^lambda w^k e^(-lambda w) of the row's ratio w, held constant."""
    log_w = masked_sum(jnp.clip(logp - old_logp, -20.0, 20.0), mask, axis=1)[:, None]
    log_w = jnp.clip(log_w, jnp.log(1e-8), 20.0)
    k, rate = (jnp.where(advantages >= 0, *x) for x in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    return -stop(jnp.exp(rate + k * log_w - rate * jnp.exp(log_w))) * advantages * keep(logp, advantages != 0), {}


def hard_tv_mask(logp, old_logp, ratio, advantages, mask, *, tv_low: float, tv_high: float):
    """SkyRL ppo_utils.py:866, dppo binary_tv: -ratio A, its gradient the ratio's own."""
    moved = stop(jnp.exp(logp) - jnp.exp(old_logp))
    out = ((advantages > 0) & (moved > tv_high)) | ((advantages < 0) & (-moved > tv_low))
    return -keep(ratio, ~out) * advantages, {"clip_fraction": out.astype(ratio.dtype)}


def hard_zero_weight(logp, old_logp, ratio, advantages, mask, *, eps_low: float, eps_high: float):
    """SkyRL ppo_utils.py:824, rollout_is, with the sampler's logp in the place of old_logp."""
    inside = (ratio > 1.0 - eps_low) & (ratio < 1.0 + eps_high)
    return -stop(keep(ratio, inside)) * advantages * logp, {"clip_fraction": (~inside).astype(ratio.dtype)}


def quadratic(logp, old_logp, ratio, advantages, mask, *, old_coef: float):
    """verl core_algos.py:2014, dro."""
    return -logp * advantages + 0.5 * old_coef * (logp - old_logp) ** 2, {}


SURROGATES = {
    "unclipped": Part(unclipped, "-rho_it A_it", "the ratio, without a clip"),
    "capped_weight": Part(
        capped_weight, "-sg(min(rho_it, {ratio_cap})) A_it logp_it", "score function weighed by the ratio, which has a cap only",
        ("ratio_cap",),
    ),
    "bounded_ratio": Part(
        bounded_ratio, "-min(min(rho_it, {ratio_cap}) A_it, clip(rho_it, 1 - {eps_low}, 1 + {eps_high}) A_it)",
        "pessimistic clip of a ratio that has a cap", (*CLIP, "ratio_cap"),
    ),
    "gamma_weight": Part(
        gamma_weight,
        "-sg(w_i^k exp(l (1 - w_i))) A_it logp_it, w_i = exp(clip(sum_t clip(logp_it - old_logp_it, -20, 20), log 1e-8, 20)), "
        "k, l = {k_pos}, {lambda_pos} if A_it >= 0 else {k_neg}, {lambda_neg}",
        "score function weighed by a gamma density of the row's ratio", ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
    ),
    "hard_tv_mask": Part(
        hard_tv_mask,
        "-rho_it A_it, 0 where p_it - pold_it > {tv_high} and A_it > 0, or < -{tv_low} and A_it < 0; p = exp(logp)",
        "the ratio, off where the probability has moved too far along the advantage", ("tv_low", "tv_high"),
    ),
    "hard_zero_weight": Part(
        hard_zero_weight, "-sg(rho_it [1 - {eps_low} < rho_it < 1 + {eps_high}]) A_it logp_it",
        "score function weighed by the ratio, 0 outside a band", CLIP,
    ),
    "quadratic": Part(
        quadratic, "-A_it logp_it + {old_coef}/2 (logp_it - old_logp_it)^2", "score function and a square that holds it back",
        ("old_coef",),
    ),
}

# --- reductions


def all_rows_sequence_mean(per_token: Array, mask: Array, totals: Totals) -> Array:
    """TRL grpo_trainer.py:3154, SkyRL ppo_utils.py:1197."""
    return safe_div(jnp.sum(masked_mean(per_token, mask, axis=1)), totals["all_rows"])


def all_rows_sequence_sum(per_token: Array, mask: Array, totals: Totals) -> Array:
    """TRL grpo_trainer.py:3179, luspo."""
    return safe_div(masked_sum(per_token, mask), totals["all_rows"])


def all_rows_budget_mean(per_token: Array, mask: Array, totals: Totals, *, max_length: float) -> Array:
    """TRL grpo_trainer.py:3164, SkyRL ppo_utils.py:1201 (there prompt and response)."""
    return safe_div(masked_sum(per_token, mask), totals["all_rows"] * max_length)


def padded_mean(per_token: Array, mask: Array, totals: Totals) -> Array:
    """verl core_algos.py:1191, Tunix common.py:566: the budget is the width that the batch happens to have."""
    return safe_div(masked_sum(per_token, mask), totals["rows"] * mask.shape[1])


def every_place_mean(per_token: Array, mask: Array, totals: Totals) -> Array:
    """rlax policy_gradients.py: no mask; the mean over everything that is given."""
    return safe_div(masked_sum(per_token, mask), totals["all_rows"] * mask.shape[1])


REDUCTIONS = {
    "all_rows_sequence_mean": Part(
        all_rows_sequence_mean, "1/(rows, empty ones too) sum_i 1/n_i sum_t",
        "every sequence weighs the same, and empty ones are counted",
    ),
    "all_rows_sequence_sum": Part(
        all_rows_sequence_sum, "1/(rows, empty ones too) sum_i sum_t", "tokens of a sequence are summed; empty ones are counted"
    ),
    "all_rows_budget_mean": Part(
        all_rows_budget_mean, "1/((rows, empty ones too) {max_length}) sum_i sum_t",
        "tokens are summed, over a constant budget of every row, empty ones too", ("max_length",),
    ),
    "padded_mean": Part(
        padded_mean, "1/(rows T) sum_i sum_t, T the padded width", "tokens are summed, over the batch's padded width"
    ),
    "every_place_mean": Part(
        every_place_mean, "1/(B T) sum_i sum_t, B T all places of the batch", "tokens are summed, over all places of the batch"
    ),
}

# --- KL


def k1_clamped(logp: Array, ref_logp: Array) -> Array:
    """OpenRLHF models/utils.py:108."""
    return jnp.clip(logp - ref_logp, -10.0, 10.0)


def k3_clamped(logp: Array, ref_logp: Array) -> Array:
    """verl core_algos.py:2234, SkyRL ppo_utils.py:109: no gradient beyond a value of 10, which is at logp - ref < -2.6."""
    d = jnp.clip(ref_logp - logp, -20.0, 20.0)
    return jnp.clip(jnp.exp(d) - d - 1.0, -10.0, 10.0)


REF, BETA = ("ref_logp",), ("beta",)
KL_VALUES = {
    "k1_clamped": Part(
        k1_clamped, "k_it = clip(logp_it - ref_logp_it, -10, 10)", "k1 towards the reference, clamped to 10 nats", BETA, REF
    ),
    "k3_clamped": Part(
        k3_clamped, "k_it = min(exp(d_it) - 1 - d_it, 10), d_it = clip(ref_logp_it - logp_it, -20, 20)",
        "k3 towards the reference, clamped to 10 nats (no gradient beyond)", BETA, REF,
    ),
}

MORE = {
    "ADVANTAGES": ADVANTAGES, "STEPWISE": STEPWISE, "WITH_CRITIC": WITH_CRITIC, "NORMALISATIONS": NORMALISATIONS,
    "RATIOS": RATIOS, "SURROGATES": SURROGATES, "REDUCTIONS": REDUCTIONS, "KL_VALUES": KL_VALUES,
}
