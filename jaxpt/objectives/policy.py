"""Policy objectives: one row each. The formula of a row is printed by `jaxpt describe NAME`.

A constant in tokens (max_length, buffer) is the paper's budget; a program replaces it by its environment's.
"""

from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty

CLIP = {"eps_low": 0.2, "eps_high": 0.2}
STANDARDISED = {"std_eps": 0.0, "ddof": 1.0}
WHITENED = {"std_eps": 1e-4}  # verl's, which adds its square to the variance; the papers name none

REINFORCE = compose(
    "reinforce",
    "Williams 1992, Machine Learning 8, eq. 3 (no baseline)",
    advantage="monte_carlo", ratio="none", surrogate="score", reduction="sequence_sum",
    claims=("additive", "gradient_of_expected_reward"),
)

RLOO = compose(
    "rloo",
    "Kool, van Hoof, Welling 2019; Ahmadian et al. 2024, arXiv 2402.14740, eq. 8",
    advantage="leave_one_out", ratio="none", surrogate="score", reduction="sequence_sum",
    claims=("additive", "gradient_of_expected_reward", "leave_one_out_independence"),
)

RAFT = compose(
    "raft",
    "Dong et al. 2023, arXiv 2304.06767, with the acceptance of Xiong et al. 2025, arXiv 2504.11343, for rewards of 0 and 1: "
    "maximum likelihood of the samples that earn one (rejection sampling, expert iteration)",
    advantage="constant", selection="rewarded", ratio="none", surrogate="score", reduction="token_mean",
    claims=("additive",),
)

REINFORCE_PLUS_PLUS = compose(
    "reinforce_plus_plus",
    "Hu et al. 2025, arXiv 2501.03262, section 3: k1 in the reward, advantages normalised over the batch",
    advantage="returns", normalisation="batch", ratio="token", surrogate="clipped", reduction="token_mean",
    kl=Penalty("k1", placement="reward"), hyper={**CLIP, **WHITENED, "gamma": 1.0, "beta": 0.01},
    claims=("additive",),
)

REINFORCE_PLUS_PLUS_BASELINE = compose(
    "reinforce_plus_plus_baseline",
    "Hu et al. 2025, arXiv 2501.03262, section 3, with baseline: group mean, batch deviation, k2 in the loss",
    advantage="centred", normalisation="batch", ratio="token", surrogate="clipped", reduction="token_mean",
    kl=Penalty("k2"), hyper={**CLIP, **WHITENED, "beta": 0.01},
    claims=("additive",),
)

PPO = compose(
    "ppo",
    "Schulman et al. 2017, arXiv 1707.06347, eq. 9, on tokens as in Ouyang et al. 2022, arXiv 2203.02155, eq. 2 (beta); "
    "advantages whitened and beta adapted as in Ziegler et al. 2019, arXiv 1909.08593, section 2.2",
    advantage="gae", normalisation="batch", ratio="token", surrogate="clipped", reduction="token_mean",
    kl=Penalty("k1", placement="reward", controller="adaptive"), entropy="bonus",
    hyper={
        **CLIP, **WHITENED, "gamma": 1.0, "lam": 0.95, "bootstrap": 0.0, "value_clip": 0.2, "beta": 0.02, "kl_target": 6.0,
        "kl_horizon": 10000.0, "entropy_coef": 0.0,
    },
    claims=("additive",),
)

GRPO = compose(
    "grpo",
    "Shao et al. 2024, arXiv 2402.03300, eq. 3, section 4.1.2; beta from section 4.2, eps from PPO",
    advantage="standardised", ratio="token", surrogate="clipped", reduction="sequence_mean", kl=Penalty("k3"),
    hyper={**CLIP, **STANDARDISED, "beta": 0.04},
    claims=("additive", "gradient_of_standardised_reward", "scale_invariance"),
)

GRPO_NO_KL = compose(
    "grpo_no_kl",
    "as grpo, without the reference (Yu et al. 2025, arXiv 2503.14476, section 2.3, drop the KL term)",
    advantage="standardised", ratio="token", surrogate="clipped", reduction="sequence_mean",
    hyper={**CLIP, **STANDARDISED},
    claims=("additive", "gradient_of_standardised_reward", "scale_invariance"),
)

DR_GRPO = compose(
    "dr_grpo",
    "Liu et al. 2025, arXiv 2503.20783, section 3.2: neither std nor the row's length; the budget as the constant",
    advantage="centred", ratio="token", surrogate="clipped", reduction="budget_mean",
    hyper={**CLIP, "max_length": 3000.0},
    claims=("additive", "gradient_of_expected_reward_scaled"),
)

DAPO_PARTS = dict(
    advantage="standardised", ratio="token", surrogate="clipped",
    shaping="soft_overlong", selection="signal", filter="overlong",
    hyper={
        "eps_low": 0.2, "eps_high": 0.28, **STANDARDISED, "max_length": 20480.0, "buffer": 4096.0, "overlong_penalty": 1.0,
        "overlong_filter": 1.0, "max_rounds": 10.0,
    },
)
DAPO = compose(
    "dapo",
    "Yu et al. 2025, arXiv 2503.14476, eq. 8-13: clip-higher, dynamic sampling, token-level loss, overlong shaping",
    reduction="token_mean", **DAPO_PARTS, claims=("additive",),
)
DAPO_SEQUENCE_MEAN = compose(
    "dapo_sequence_mean",
    "as dapo, with GRPO's reduction in place of the token-level loss (the ladder of Yu et al. 2025, arXiv 2503.14476, table 1)",
    reduction="sequence_mean", **DAPO_PARTS, claims=("additive",),
)

GSPO = compose(
    "gspo",
    "Zheng et al. 2025, arXiv 2507.18071, eq. 5-7; clip range of section 5.1",
    advantage="standardised", ratio="sequence", surrogate="clipped", reduction="sequence_mean",
    hyper={**STANDARDISED, "eps_low": 3e-4, "eps_high": 4e-4},
    claims=("additive", "gradient_of_standardised_reward", "scale_invariance"),
)
GSPO_TOKEN = compose(
    "gspo_token",
    "Zheng et al. 2025, arXiv 2507.18071, eq. 13-14; clip range of section 5.1",
    advantage="standardised", ratio="sequence_token", surrogate="clipped", reduction="sequence_mean",
    hyper=dict(GSPO.hyper),
    claims=("additive", "gradient_of_standardised_reward", "scale_invariance"),
)

ROWS = (
    REINFORCE, RLOO, RAFT, REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE, PPO, GRPO, GRPO_NO_KL, DR_GRPO, DAPO,
    DAPO_SEQUENCE_MEAN, GSPO, GSPO_TOKEN,
)
