"""Policy objectives that differ in the loss: other surrogates, KL and entropy terms, which tokens count, and for whom
they were drawn. The plain ones, and what is said of constants, are in policy.py.
"""

from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.policy import CLIP, DAPO_PARTS, STANDARDISED

# --- surrogates

CISPO = compose(
    "cispo",
    "MiniMax 2025, arXiv 2506.13585, eq. 4-5: the weight is clipped, no token's gradient; no lower bound (eps_low = 1), the "
    "upper one tuned and not stated (5, as in Khatri et al. 2025, arXiv 2510.13786)",
    advantage="standardised", ratio="token", surrogate="clipped_weight", reduction="token_mean",
    hyper={**STANDARDISED, "eps_low": 1.0, "eps_high": 4.0},
    claims=("additive",),
)
SAPO = compose(
    "sapo",
    "Gao et al. 2025, arXiv 2511.20347: a sigmoid gate of the ratio in place of the clip",
    advantage="standardised", ratio="token", surrogate="soft_gate", reduction="sequence_mean",
    hyper={**STANDARDISED, "tau_pos": 1.0, "tau_neg": 1.05},
    claims=("additive", "gradient_of_standardised_reward", "scale_invariance"),
)
GMPO = compose(
    "gmpo",
    "Zhao et al. 2025, arXiv 2507.20673: geometric mean of ratios clipped to [e^-0.4, e^0.4]",
    advantage="standardised", ratio="token", surrogate="geometric", reduction="sequence_mean",
    hyper={**STANDARDISED, "log_low": 0.4, "log_high": 0.4},
    claims=("additive", "gradient_of_standardised_reward", "scale_invariance"),
)
PPO_DUAL_CLIP = compose(
    "ppo_dual_clip",
    "Ye et al. 2020, arXiv 1912.09729: PPO with a floor under the objective of negative advantages; gamma, lam and c theirs",
    advantage="gae", ratio="token", surrogate="dual_clip", reduction="token_mean",
    hyper={**CLIP, "dual_clip": 3.0, "gamma": 0.997, "lam": 0.95, "bootstrap": 1.0, "value_clip": 0.2},
    claims=("additive",),
)
CLIP_COV = compose(
    "clip_cov",
    "Cui et al. 2025, arXiv 2505.22617, section 4.2: of the tokens of high covariance a share gets no gradient",
    advantage="standardised", ratio="token", surrogate="clip_cov", reduction="token_mean",
    hyper={**CLIP, **STANDARDISED, "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
)
KL_COV = compose(
    "kl_cov",
    "Cui et al. 2025, arXiv 2505.22617, section 4.2: the tokens of highest covariance are held at the old policy",
    advantage="standardised", ratio="token", surrogate="kl_cov", reduction="token_mean",
    hyper={**STANDARDISED, "cov_share": 2e-4, "old_coef": 1.0},
)
TRUSTED = dict(advantage="centred", ratio="token", reduction="token_mean", claims=("additive",))
DPPO_TV = compose(
    "dppo_tv",
    "Qi et al. 2026, arXiv 2602.04879: trust region by the total variation of each token's own probability; the cap is verl's",
    surrogate="tv_mask", **TRUSTED, hyper={"tv_low": 0.15, "tv_high": 0.15, "ratio_cap": 20.0},
)
DPPO_KL = compose(
    "dppo_kl",
    "Qi et al. 2026, arXiv 2602.04879: trust region by the KL of each token's own probability; the cap is verl's",
    surrogate="kl_mask", **TRUSTED, hyper={"kl_low": 0.05, "kl_high": 0.05, "ratio_cap": 20.0},
)
DPPO_TV_SYMMETRIC = compose(
    "dppo_tv_symmetric",
    "prime-rl's ipo loss: the mask of Qi et al. 2026, arXiv 2602.04879, whichever way the advantage pulls, and a squared "
    "log-ratio",
    surrogate="symmetric_tv_mask", **TRUSTED, hyper={"tv_low": 0.2, "tv_high": 0.2, "old_coef": 1e-3},
)

# --- KL and entropy

GRPO_UNBIASED_KL = compose(
    "grpo_unbiased_kl",
    "DeepSeek-AI 2025, arXiv 2512.02556, section 3.1: grpo, its k3 times the importance ratio, whose gradient is the reverse "
    "KL's on-policy and off",
    advantage="standardised", ratio="token", surrogate="clipped", reduction="sequence_mean", kl=Penalty("k3", "importance"),
    hyper={**CLIP, **STANDARDISED, "beta": 0.04},
    claims=("additive",),
)
GRPO_VOCAB_KL = compose(
    "grpo_vocab_kl",
    "Amini, Vieira, Cotterell 2025, arXiv 2504.10637: grpo, its KL Rao-Blackwellised, exact over the vocabulary at every decision",
    advantage="standardised", ratio="token", surrogate="clipped", reduction="sequence_mean", kl=Penalty("vocabulary"),
    hyper={**CLIP, **STANDARDISED, "beta": 0.04},
    claims=("additive",),
)
MAXENT = compose(
    "maxent",
    "Haarnoja et al. 2017, arXiv 1702.08165, eq. 1 (the coefficient is the task's), by the score function as Williams and Peng "
    "1991, Connection Science 3: surprise is rewarded, so the policy seeks states of high entropy too",
    advantage="leave_one_out", ratio="none", surrogate="score", reduction="sequence_sum", entropy="reward",
    hyper={"entropy_coef": 0.01},
    claims=("additive", "leave_one_out_independence"),
)
MAGIC = compose(
    "magic",
    "He et al. 2025, arXiv 2505.22312, section 3: token mean, groups with signal, entropy held above a target",
    advantage="standardised", selection="signal", ratio="token", surrogate="clipped", reduction="token_mean",
    entropy="bonus", entropy_controller="adaptive",
    hyper={
        **CLIP, **STANDARDISED, "max_rounds": 1.0, "entropy_coef": 0.0, "entropy_target": 0.2, "entropy_step": 0.005,
        "entropy_last": 0.0,
    },
    claims=("additive",),
)

# --- which tokens count, and for whom they were drawn

DAPO_PROMPT_MEAN = compose(
    "dapo_prompt_mean",
    "Yu et al. 2025, arXiv 2503.14476, eq. 8 as it reads: the mean over the tokens of one prompt's group, expected over prompts",
    reduction="prompt_mean", **DAPO_PARTS, claims=("additive",),
)
TOP_ENTROPY = compose(
    "top_entropy",
    "Wang et al. 2025, arXiv 2506.01939, section 5: dapo on the fifth of the batch's tokens with the largest entropy, divided "
    "by all tokens",
    reduction="token_mean", weights="top_entropy", **DAPO_PARTS | {"hyper": {**DAPO_PARTS["hyper"], "entropy_share": 0.2}},
)
PLAIN_GRPO = dict(advantage="standardised", ratio="token", surrogate="clipped", reduction="sequence_mean", claims=("additive",))
CONSTANTS = {**CLIP, **STANDARDISED}
ENTROPY_ADVANTAGE = compose(
    "entropy_advantage",
    "Cheng et al. 2025, arXiv 2506.14758, section 3: min(alpha H, |A| / kappa) added to the advantage of grpo; "
    "alpha (of GRPO; 0.1 for PPO) and kappa of section 4",
    weights="entropy_advantage", **PLAIN_GRPO, hyper={**CONSTANTS, "entropy_gain": 0.4, "entropy_limit": 2.0},
)
GRPO_TOKEN_WEIGHTS = compose(
    "grpo_token_weights",
    "as grpo_no_kl, each token weighed as the batch says (the arguments of a tool call above the words around it)",
    weights="given", **PLAIN_GRPO, hyper=CONSTANTS,
)
GRPO_TIS = compose(
    "grpo_tis",
    "Yao et al. 2025, fengyao.notion.site/off-policy-rl, C = 2: grpo_no_kl, token weights pi_old / sampler, truncated",
    correction="token_truncated", **PLAIN_GRPO, hyper={**CONSTANTS, "is_high": 2.0},
)
GRPO_SEQUENCE_TIS = compose(
    "grpo_sequence_tis",
    "Liu et al. 2025, richardli.xyz/rl-collapse: grpo_no_kl, one weight a row, the product of its tokens', truncated",
    correction="sequence_truncated", **PLAIN_GRPO, hyper={**CONSTANTS, "is_high": 2.0},
)
GRPO_SEQUENCE_MIS = compose(
    "grpo_sequence_mis",
    "Liu et al. 2025, richardli.xyz/rl-collapse: as grpo_sequence_tis, but rows of too large a weight are thrown out; the "
    "bound is TRL's",
    correction="sequence_masked", **PLAIN_GRPO, hyper={**CONSTANTS, "is_high": 3.0},
)
GRPO_GEOMETRIC_MASK = compose(
    "grpo_geometric_mask",
    "Liu et al. 2025, richardli.xyz/rl-collapse: grpo_no_kl without rows whose mean log-weight is off; the "
    "bounds are those of verl 0.9.1's decoupled_geo_rs",
    correction="geometric_masked", **PLAIN_GRPO, hyper={**CONSTANTS, "is_low": 0.999, "is_high": 1.001},
)
GRPO_OPSM = compose(
    "grpo_opsm",
    "DeepSeek-AI 2025, arXiv 2512.02556, section 3.1, eq. 9 (off-policy sequence masking): grpo_no_kl without the rows of "
    "negative advantage that the policy has left; the bound is the one that TRL's documentation starts from",
    advantage="standardised", ratio="token", surrogate="clipped_in_reach", reduction="sequence_mean",
    hyper={**CONSTANTS, "drift_max": 0.5}, claims=("additive",),
)
ICEPOP = compose(
    "icepop",
    "Ling Team 2025, arXiv 2510.18855: grpo_no_kl, token weights pi_old / sampler, tokens outside [0.5, 5] (the default "
    "range of its ablation, figure 13) thrown out",
    correction="token_masked", **PLAIN_GRPO, hyper={**CONSTANTS, "is_low": 0.5, "is_high": 5.0},
)

ROWS = (
    CISPO, SAPO, GMPO, PPO_DUAL_CLIP, CLIP_COV, KL_COV, DPPO_TV, DPPO_KL, DPPO_TV_SYMMETRIC, GRPO_UNBIASED_KL,
    GRPO_VOCAB_KL, MAXENT, MAGIC, DAPO_PROMPT_MEAN, TOP_ENTROPY, ENTROPY_ADVANTAGE, GRPO_TOKEN_WEIGHTS, GRPO_TIS, GRPO_SEQUENCE_TIS,
    GRPO_SEQUENCE_MIS, GRPO_GEOMETRIC_MASK, GRPO_OPSM, ICEPOP,
)
