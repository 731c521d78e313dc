"""Policy objectives: one row each. The formula of a row is printed by `jaxpt describe NAME`."""

from jaxpt.objectives.algebra import compose

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

GRPO = compose(
    "grpo",
    "Shao et al. 2024, arXiv 2402.03300, eq. 3, section 4.1.2; beta from section 4.2, eps from PPO",
    advantage="standardised", ratio="token", surrogate="clipped", reduction="sequence_mean", kl="k3_loss",
    hyper={"eps_low": 0.2, "eps_high": 0.2, "beta": 0.04, "std_eps": 0.0, "ddof": 1.0},
    claims=("additive", "gradient_of_standardised_reward", "scale_invariance"),
)

GRPO_NO_KL = compose(
    "grpo_no_kl",
    "as grpo, without the reference (Yu et al. 2025, arXiv 2503.14476, section 2.3, drop the KL term)",
    advantage="standardised", ratio="token", surrogate="clipped", reduction="sequence_mean",
    hyper={k: v for k, v in GRPO.hyper.items() if k != "beta"},
    claims=("additive", "gradient_of_standardised_reward", "scale_invariance"),
)

ROWS = (REINFORCE, RLOO, GRPO, GRPO_NO_KL)
