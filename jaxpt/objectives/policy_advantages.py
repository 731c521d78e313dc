"""Policy objectives that differ from those of policy.py in what a reward is compared with: other baselines, other
scales, best of k, several rewards, steps of an episode. Their losses are those of policy.py."""

from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.policy import CLIP, STANDARDISED

SCORE = dict(ratio="none", surrogate="score", reduction="sequence_sum")
CLIPPED = dict(ratio="token", surrogate="clipped")

REINFORCE_BASELINE = compose(
    "reinforce_baseline",
    "Williams 1992, Machine Learning 8, eq. 3, with the mean reward of the batch as reinforcement baseline",
    advantage="monte_carlo", normalisation="batch_mean", **SCORE,
    claims=("additive", "gradient_of_expected_reward_scaled"),
)

RLOO_KL = compose(
    "rloo_kl",
    "Ahmadian et al. 2024, arXiv 2402.14740, eq. 8 on the reward of its eq. 2, which has the KL of the whole sequence in "
    "it; beta of appendix C (summarisation)",
    advantage="leave_one_out", kl=Penalty("k1", placement="reward"), **SCORE, hyper={"beta": 0.03},
    claims=("additive", "leave_one_out_independence"),
)

REMAX = compose(
    "remax",
    "Li et al. 2023, arXiv 2310.10505, section 4: the reward of the greedy answer as baseline",
    advantage="above_baseline", **SCORE,
    claims=("additive", "gradient_of_expected_reward", "leave_one_out_independence"),
)

OPO = compose(
    "opo",
    "Hao et al. 2025, arXiv 2505.23585, section 3: the baseline of least variance, weighed by length; on-policy",
    advantage="less_length_weighted", **SCORE,
    claims=("additive",),
)

GPG = compose(
    "gpg",
    "Chu et al. 2025, arXiv 2504.02546, section 3, with F_norm = 1 and alpha = B / (B - M) for M samples without signal",
    advantage="centred", normalisation="signal_share", ratio="none", surrogate="score", reduction="token_mean",
    claims=("additive",),
)

MAXRL = compose(
    "maxrl",
    "Tajwar et al. 2026, arXiv 2602.02710: maximum likelihood of success, to the order of the group",
    advantage="over_mean", **SCORE,
    claims=("additive", "gradient_of_truncated_log_success", "scale_invariance"),
)

PKPO = compose(
    "pkpo",
    "Walder and Karkhanis 2025, arXiv 2505.15201, eq. 33: the best of k rewards, less that of the k - 1 others; "
    "k is varied there",
    advantage="best_of_k", **SCORE, hyper={"k": 2.0},
    claims=("additive", "gradient_of_best_of_k", "leave_one_out_independence"),
)

PASS_AT_K = compose(
    "pass_at_k",
    "Chen et al. 2025, arXiv 2508.10751, section 2 (analytical derivation), for rewards of 0 and 1; k is varied there; "
    "loss and clip of arXiv 2503.14476 (DAPO)",
    advantage="pass_at_k", **CLIPPED, reduction="token_mean", hyper={"eps_low": 0.2, "eps_high": 0.28, "k": 2.0},
    claims=("additive", "scale_invariance"),
)

GRPO_BATCH_STD = compose(
    "grpo_batch_std",
    "as grpo without the reference, over the standard deviation of the batch's rewards in place of the group's (Liu et al. "
    "2025, arXiv 2508.08221; TRL's scale_rewards = batch)",
    advantage="centred", normalisation="batch_deviation", **CLIPPED, reduction="sequence_mean",
    hyper={**CLIP, "std_eps": 0.0},
    claims=("additive", "scale_invariance"),
)

LITE_PPO = compose(
    "lite_ppo",
    "Liu et al. 2025, arXiv 2508.08221: mean of the group, standard deviation of the batch, token-level loss",
    advantage="centred", normalisation="batch_deviation", **CLIPPED, reduction="token_mean",
    hyper={**CLIP, "std_eps": 0.0},
    claims=("additive", "scale_invariance"),
)

GDPO = compose(
    "gdpo",
    "Liu et al. 2026, arXiv 2601.05242, section 3: parts of the reward normalised one by one, then their sum over the batch",
    advantage="standardised_parts", normalisation="batch_rows", **CLIPPED, reduction="sequence_mean",
    hyper={**CLIP, **STANDARDISED},
    claims=("additive",),
)

GRPO_PROCESS = compose(
    "grpo_process",
    "Shao et al. 2024, arXiv 2402.03300, section 4.1.3 (process supervision), a turn as the step",
    advantage="standardised", credit="steps", **CLIPPED, reduction="sequence_mean", kl=Penalty("k3"),
    hyper={**CLIP, **STANDARDISED, "beta": 0.04},
    claims=("additive", "scale_invariance"),
)

GIGPO = compose(
    "gigpo",
    "Feng et al. 2025, arXiv 2505.10978, section 4: episodes of the group, and turns that begin in the same state; beta, gamma "
    "and omega of the authors' code (verl-agent)",
    advantage="standardised", credit="anchor_state", **CLIPPED, reduction="token_mean", kl=Penalty("k3"),
    hyper={**CLIP, **STANDARDISED, "gamma": 0.95, "step_weight": 1.0, "beta": 0.01},
    claims=("additive", "scale_invariance"),
)

AWR = compose(
    "awr",
    "Peng et al. 2019, arXiv 1910.00177, eq. 10, the group's mean in place of the critic; constants of the authors' code",
    advantage="exponential", ratio="none", surrogate="score", reduction="token_mean",
    hyper={"temperature": 1.0, "weight_max": 20.0},
    claims=("additive",),
)

A2C = compose(
    "a2c",
    "Mnih et al. 2016, arXiv 1602.01783, section 4 and algorithm S3, synchronous and on tokens: 5-step returns, a critic "
    "that is not clipped, an entropy bonus",
    advantage="n_step", ratio="none", surrogate="score", reduction="token_mean", entropy="bonus",
    hyper={"gamma": 0.99, "n_steps": 5.0, "bootstrap": 0.0, "value_clip": 1e9, "entropy_coef": 0.01},
    claims=("additive",),
)

IMPALA = compose(
    "impala",
    "Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2, on tokens: V-trace of an actor that lags, a critic that "
    "learns its targets, an entropy bonus; constants of its Atari runs",
    advantage="v_trace", ratio="none", surrogate="score", reduction="token_mean", entropy="bonus",
    hyper={
        "gamma": 0.99, "bootstrap": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "value_clip": 1e9, "entropy_coef": 0.01,
    },
    claims=("additive",),
)

ROWS = (
    REINFORCE_BASELINE, RLOO_KL, REMAX, OPO, GPG, MAXRL, PKPO, PASS_AT_K, GRPO_BATCH_STD, LITE_PPO, GDPO, GRPO_PROCESS,
    GIGPO, AWR, A2C, IMPALA,
)
