"""The parts a policy loss is made of, by kind, as in parts.py: ratio, surrogate, weights, correction, reduction, KL,
entropy."""

from jaxpt.objectives import entropy, kl, ratios, reduction, surrogates
from jaxpt.objectives.parts import Part

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
CLIP = ("eps_low", "eps_high")
SURROGATES = {
    "score": Part(surrogates.score, "-A_it logp_it", "score function, no clip"),
    "clipped": Part(
        surrogates.clipped,
        "-min(rho_it A_it, clip(rho_it, 1 - {eps_low}, 1 + {eps_high}) A_it)",
        "pessimistic clip of the ratio", CLIP,
    ),
    "dual_clip": Part(
        surrogates.dual_clip,
        "-min(rho_it A_it, clip(rho_it, 1 - {eps_low}, 1 + {eps_high}) A_it), at most -{dual_clip} A_it where A_it < 0",
        "pessimistic clip of the ratio, with a floor where the advantage is negative", (*CLIP, "dual_clip"),
    ),
    "clipped_in_reach": Part(
        surrogates.clipped_in_reach,
        "-min(rho_it A_it, clip(rho_it, 1 - {eps_low}, 1 + {eps_high}) A_it), 0 where A_it < 0 and "
        "1/n_i sum_t (old_logp_it - logp_it) > {drift_max}",
        "pessimistic clip of the ratio; rows that the policy has left are not pushed down further", (*CLIP, "drift_max"),
    ),
    "clipped_weight": Part(
        surrogates.clipped_weight, "-sg(clip(rho_it, 1 - {eps_low}, 1 + {eps_high})) A_it logp_it",
        "score function weighed by the clipped ratio, held constant", CLIP,
    ),
    "soft_gate": Part(
        surrogates.soft_gate,
        "-4/tau_it sigmoid(tau_it (rho_it - 1)) A_it, tau_it = {tau_pos} if A_it > 0 else {tau_neg}",
        "a smooth gate of the ratio in place of a clip", ("tau_pos", "tau_neg"),
    ),
    "geometric": Part(
        surrogates.geometric,
        "-A_it exp(1/n_i sum_t sgn(A_it) min(sgn(A_it) log rho_it, sgn(A_it) clip(log rho_it, -{log_low}, {log_high})))",
        "geometric mean of the row's clipped ratios", ("log_low", "log_high"),
    ),
    "tv_mask": Part(
        surrogates.tv_mask,
        "-sg(min(rho_it, {ratio_cap})) A_it logp_it, 0 where p_it - pold_it > {tv_high} and A_it > 0, or "
        "< -{tv_low} and A_it <= 0; p = exp(logp)",
        "score function weighed by the ratio, off where the probability has moved too far along the advantage",
        ("tv_low", "tv_high", "ratio_cap"),
    ),
    "kl_mask": Part(
        surrogates.kl_mask,
        "-sg(min(rho_it, {ratio_cap})) A_it logp_it, 0 where KL(pold_it || p_it) of two outcomes > {kl_high} and p_it > pold_it "
        "and A_it > 0, or > {kl_low} and p_it < pold_it and A_it <= 0; p = exp(logp)",
        "score function weighed by the ratio, off where the token's KL has grown too large along the advantage",
        ("kl_low", "kl_high", "ratio_cap"),
    ),
    "symmetric_tv_mask": Part(
        surrogates.symmetric_tv_mask,
        "-rho_it A_it [-{tv_low} <= p_it - pold_it <= {tv_high}] + {old_coef} (logp_it - old_logp_it)^2; p = exp(logp)",
        "the ratio, off where the probability has moved too far either way, and a square that pulls it back",
        ("tv_low", "tv_high", "old_coef"),
    ),
    "clip_cov": Part(
        surrogates.clip_cov,
        "-min(rho_it A_it, clip(rho_it, 1 - {eps_low}, 1 + {eps_high}) A_it), 0 at the {cov_share} of the tokens with the largest "
        "c_it in ({cov_low}, {cov_high}); c_it = (A_it - mean A) (logp_it - mean logp)",
        "pessimistic clip of the ratio; tokens whose advantage and log-probability vary together are left out",
        (*CLIP, "cov_share", "cov_low", "cov_high"), additive=False,
    ),
    "kl_cov": Part(
        surrogates.kl_cov,
        "-rho_it A_it + {old_coef} |logp_it - old_logp_it| [c_it > 0 among the largest {cov_share}]; "
        "c_it = (A_it - mean A) (logp_it - mean logp)",
        "the ratio; tokens whose advantage and log-probability vary most together are held back",
        ("cov_share", "old_coef"), additive=False,
    ),
}
WEIGHTS = {  # advantages, mask, what it reads -> [B,T] what the token's surrogate is multiplied by
    "none": Part(None, "", ""),
    "given": Part(
        lambda advantages, mask, weights: weights, "u_it = weights_it, given with the batch", "importance of each token, given",
        reads=("weights",),
    ),
    "top_entropy": Part(
        entropy.top_entropy, "u_it = 1 at the {entropy_share} of the batch's tokens with the largest H_it, else 0",
        "tokens of high entropy alone; the others stay in the denominators",
        ("entropy_share",), ("entropy",), additive=False,
    ),
    "entropy_advantage": Part(
        entropy.entropy_advantage, "u_it = 1 + sgn(A_it) min({entropy_gain} sg(H_it) / |A_it|, 1 / {entropy_limit})",
        "advantages raised where the entropy is high", ("entropy_gain", "entropy_limit"), ("entropy",),
    ),
}
SAMPLER = ("sampler_logp",)
CORRECTIONS = {  # old_logp, mask, sampler_logp -> [B,T] a constant weight of the token's surrogate
    "none": Part(None, "", ""),
    "token_truncated": Part(
        ratios.token_truncated, "w_it = min(exp(old_logp_it - sampler_logp_it), {is_high})",
        "weight of each token towards the trainer's policy, truncated", ("is_high",), SAMPLER,
    ),
    "token_masked": Part(
        ratios.token_masked, "w_it = exp(old_logp_it - sampler_logp_it), 0 outside [{is_low}, {is_high}]",
        "weight of each token towards the trainer's policy, 0 where it is far from 1; such tokens stay in the denominators",
        ("is_low", "is_high"), SAMPLER,
    ),
    "sequence_truncated": Part(
        ratios.sequence_truncated, "w_it = min(exp(sum_t (old_logp_it - sampler_logp_it)), {is_high})",
        "weight of each row towards the trainer's policy, truncated", ("is_high",), SAMPLER,
    ),
    "sequence_masked": Part(
        ratios.sequence_masked, "w_it = exp(sum_t (old_logp_it - sampler_logp_it)), 0 above {is_high}",
        "weight of each row towards the trainer's policy, 0 where it is large; such rows stay in the denominators",
        ("is_high",), SAMPLER,
    ),
    "geometric_masked": Part(
        ratios.geometric_masked, "w_it = 1 where exp(1/n_i sum_t (old_logp_it - sampler_logp_it)) in [{is_low}, {is_high}], else 0",
        "rows whose tokens agree on average with the trainer's policy; other rows stay in the denominators",
        ("is_low", "is_high"), SAMPLER,
    ),
}
REDUCTIONS = {
    "token_sum": Part(reduction.token_sum, "sum_i sum_t", "tokens are summed, over nothing"),
    "token_mean": Part(reduction.token_mean, "1/tokens sum_i sum_t", "every token weighs the same"),
    "sequence_mean": Part(
        reduction.sequence_mean, "1/rows sum_i 1/n_i sum_t", "every sequence weighs the same, whatever its length"
    ),
    "sequence_sum": Part(reduction.sequence_sum, "1/rows sum_i sum_t", "tokens of a sequence are summed"),
    "prompt_mean": Part(
        reduction.prompt_mean, "1/prompts sum_i 1/N_i sum_t", "every prompt weighs the same, its N_i tokens share",
        reads=("prompt_tokens",),
    ),
    "budget_mean": Part(
        reduction.budget_mean, "1/(rows {max_length}) sum_i sum_t", "tokens are summed, over a constant budget", ("max_length",)
    ),
}
REF = ("ref_logp",)
KL_VALUES = {
    "none": Part(None, "", "no KL term"),
    "k1": Part(kl.k1, "k_it = logp_it - ref_logp_it", "k1 towards the reference", ("beta",), REF),
    "k2": Part(kl.k2, "k_it = (logp_it - ref_logp_it)^2 / 2", "k2 towards the reference", ("beta",), REF),
    "k3": Part(kl.k3, "k_it = exp(d_it) - 1 - d_it, d_it = ref_logp_it - logp_it", "k3 towards the reference", ("beta",), REF),
    "abs": Part(kl.absolute, "k_it = |logp_it - ref_logp_it|", "absolute log-ratio to the reference", ("beta",), REF),
    "forward": Part(
        kl.forward, "k_it = 1 - exp(d_it) (1 - d_it), d_it = ref_logp_it - logp_it", "KL from the reference", ("beta",), REF
    ),
    "alpha": Part(
        kl.alpha, "k_it = ({alpha} r_it + 1 - {alpha} - r_it^{alpha}) / ({alpha} (1 - {alpha})), r_it = exp(ref_logp_it - logp_it)",
        "alpha divergence to the reference (alpha -> 0: k3; 1: KL from the reference)", ("beta", "alpha"), REF,
    ),
    "jensen_shannon": Part(
        kl.jensen_shannon,
        "k_it = [r_it log r_it - (1 + r_it) log((1 + r_it) / 2)] / 2, r_it = exp(ref_logp_it - logp_it)",
        "Jensen-Shannon divergence to the reference", ("beta",), REF,
    ),
    "vocabulary": Part(
        kl.vocabulary, "k_it = sum_v pi_it(v) log(pi_it(v) / ref_it(v)) over the vocabulary",
        "KL towards the reference, exact at every decision", ("beta",), ("vocab_kl",),
    ),
}
KL_GRADIENTS = {
    "own": Part(kl.own_gradient, "", "differentiated as it stands"),
    "k2": Part(kl.k2_gradient, "grad k_it := (logp_it - ref_logp_it) grad logp_it", "pulling as k2"),
    "score": Part(
        kl.score_gradient, "grad k_it := rho_it (logp_it - ref_logp_it) grad logp_it", "pulling as the reverse KL, off-policy too"
    ),
    "importance": Part(
        kl.importance_gradient, "k_it := rho_it k_it, differentiated too", "times the importance ratio, differentiated as it stands"
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
    "bonus": Part(None, "- {entropy_coef} H_it", "entropy of the policy's distribution, rewarded", ("entropy_coef",), ("entropy",)),
    "reward": Part(
        lambda old_logp, *, entropy_coef: -entropy_coef * old_logp, "r_it := r_it - {entropy_coef} logp_it at the sampler's logp",
        "surprise added to the reward of its token", ("entropy_coef",),
    ),
}
ENTROPY_CONTROLLERS = {  # entropy_coef -> the coefficient of the bonus
    "fixed": Part(lambda entropy_coef: entropy_coef, "", ""),
    "adaptive": Part(
        entropy.bonus_below_target,
        "entropy_coef := max(0, entropy_coef +- {entropy_step}) after every batch, + while its entropy is below {entropy_target}; "
        "no bonus after a batch above it (the last one: {entropy_last})",
        "entropy_coef follows a target entropy", ("entropy_target", "entropy_step", "entropy_last"),
    ),
}
