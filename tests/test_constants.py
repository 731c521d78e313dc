"""The constants of every row, as its source states them or, where the row says so, as we chose: a default may not drift unseen."""

import pytest

from jaxpt.objectives import ROWS

GRPO = {"eps_low": 0.2, "eps_high": 0.2, "std_eps": 0.0, "ddof": 1.0}
DAPO = GRPO | {
    "eps_high": 0.28, "max_rounds": 10.0, "overlong_filter": 1.0, "overlong_penalty": 1.0, "max_length": 20480.0, "buffer": 4096.0,
}
CONSTANTS = {
    # supervised
    "z_loss": {"z_coef": 0.0001},
    "label_smoothing": {"smoothing": 0.1},
    "focal": {"gamma": 2.0},
    # policy_loss
    "reinforce_plus_plus": {"eps_low": 0.2, "eps_high": 0.2, "std_eps": 0.0001, "gamma": 1.0, "beta": 0.01},
    "reinforce_plus_plus_baseline": {"eps_low": 0.2, "eps_high": 0.2, "std_eps": 0.0001, "beta": 0.01},
    "ppo": {
        "eps_low": 0.2, "eps_high": 0.2, "std_eps": 0.0001, "gamma": 1.0, "lam": 0.95, "bootstrap": 0.0,
        "value_clip": 0.2, "beta": 0.02, "kl_target": 6.0, "kl_horizon": 1e4, "entropy_coef": 0.0,
    },
    "grpo": GRPO | {"beta": 0.04},
    "grpo_no_kl": GRPO,
    "dr_grpo": {"eps_low": 0.2, "eps_high": 0.2, "max_length": 3000.0},
    "dapo": DAPO,
    "dapo_sequence_mean": DAPO,
    "gspo": {"std_eps": 0.0, "ddof": 1.0, "eps_low": 0.0003, "eps_high": 0.0004},
    "gspo_token": {"std_eps": 0.0, "ddof": 1.0, "eps_low": 0.0003, "eps_high": 0.0004},
    "cispo": {"std_eps": 0.0, "ddof": 1.0, "eps_low": 1.0, "eps_high": 4.0},
    "sapo": {"std_eps": 0.0, "ddof": 1.0, "tau_pos": 1.0, "tau_neg": 1.05},
    "gmpo": {"std_eps": 0.0, "ddof": 1.0, "log_low": 0.4, "log_high": 0.4},
    "ppo_dual_clip": {
        "eps_low": 0.2, "eps_high": 0.2, "dual_clip": 3.0, "gamma": 0.997, "lam": 0.95, "bootstrap": 1.0,
        "value_clip": 0.2,
    },
    "clip_cov": GRPO | {"cov_share": 0.0002, "cov_low": 1.0, "cov_high": 5.0},
    "kl_cov": {"std_eps": 0.0, "ddof": 1.0, "cov_share": 0.0002, "old_coef": 1.0},
    "dppo_tv": {"tv_low": 0.15, "tv_high": 0.15, "ratio_cap": 20.0},
    "dppo_kl": {"kl_low": 0.05, "kl_high": 0.05, "ratio_cap": 20.0},
    "dppo_tv_symmetric": {"tv_low": 0.2, "tv_high": 0.2, "old_coef": 0.001},
    "grpo_unbiased_kl": GRPO | {"beta": 0.04},
    "grpo_vocab_kl": GRPO | {"beta": 0.04},
    "maxent": {"entropy_coef": 0.01},
    "magic": GRPO | {
        "max_rounds": 1.0, "entropy_coef": 0.0, "entropy_target": 0.2, "entropy_step": 0.005,
        "entropy_last": 0.0,
    },
    "dapo_prompt_mean": DAPO,
    "top_entropy": DAPO | {"entropy_share": 0.2},
    "entropy_advantage": GRPO | {"entropy_gain": 0.4, "entropy_limit": 2.0},
    "grpo_token_weights": GRPO,
    "grpo_tis": GRPO | {"is_high": 2.0},
    "grpo_sequence_tis": GRPO | {"is_high": 2.0},
    "grpo_sequence_mis": GRPO | {"is_high": 3.0},
    "grpo_geometric_mask": GRPO | {"is_low": 0.999, "is_high": 1.001},
    "grpo_opsm": GRPO | {"drift_max": 0.5},
    "icepop": GRPO | {"is_low": 0.5, "is_high": 5.0},
    "rloo_kl": {"beta": 0.03},
    "pkpo": {"k": 2.0},
    "pass_at_k": {"eps_low": 0.2, "eps_high": 0.28, "k": 2.0},
    "grpo_batch_std": {"eps_low": 0.2, "eps_high": 0.2, "std_eps": 0.0},
    "lite_ppo": {"eps_low": 0.2, "eps_high": 0.2, "std_eps": 0.0},
    "gdpo": GRPO,
    "grpo_process": GRPO | {"beta": 0.04},
    "gigpo": GRPO | {"gamma": 0.95, "step_weight": 1.0, "beta": 0.01},
    "awr": {"temperature": 1.0, "weight_max": 20.0},
    "a2c": {
        "gamma": 0.99, "n_steps": 5.0, "bootstrap": 0.0, "value_clip": 1e9, "entropy_coef": 0.01,
    },
    "impala": {
        "gamma": 0.99, "bootstrap": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "value_clip": 1e9,
        "entropy_coef": 0.01,
    },
    # preference
    "dpo": {"beta": 0.1},
    "dpo_norm": {"beta": 5.0},
    "cdpo": {"beta": 0.1, "label_smoothing": 0.1},
    "robust_dpo": {"beta": 0.1, "label_smoothing": 0.1},
    "fdpo_forward_kl": {"beta": 0.1},
    "fdpo_js": {"beta": 0.1},
    "fdpo_alpha": {"beta": 0.1, "alpha": 0.5},
    "ld_dpo": {"beta": 0.1, "ld_alpha": 0.5},
    "wpo": {"beta": 0.01},
    "wpo_unaligned": {"beta": 0.01},
    "rpo": {"beta": 0.1, "nll_coef": 1.0},
    "dpop": {"beta": 0.3, "lam": 50.0},
    "slic": {"delta": 1.0, "nll_coef": 1.0},
    "rso_hinge": {"beta": 0.05},
    "ipo": {"tau": 0.1},
    "ipo_sum": {"tau": 0.1},
    "orpo": {"lam": 0.1, "nll_coef": 1.0},
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "alpha_po": {"beta": 2.5, "gamma": 0.1, "alpha": 0.25},
    "cpo": {"beta": 0.1, "nll_coef": 1.0},
    "sppo": {"eta": 1000.0},
    "nca": {"beta": 0.01},
    "exo": {"beta": 0.1, "label_smoothing": 0.001},
    "bco_pair": {"beta": 0.01},
    "aot": {"beta": 0.1, "label_smoothing": 0.0},
    "aot_unpaired": {"beta": 0.1, "label_smoothing": 0.0},
    "apo_zero": {"beta": 0.1},
    "apo_down": {"beta": 0.1},
    "discopop": {"beta": 0.05, "tau": 0.05},
    # unpaired
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "bco": {"beta": 0.01},
    # reward_pair
    "bradley_terry_centred": {"center_coef": 0.01},
    # distillation
    "kd": {"temperature": 2.0},
    "jsd": {"beta": 0.5},
    "gkd": {"beta": 0.5},
    "jsd_rescaled": {"beta": 0.5},
    "skew_kl": {"alpha": 0.1},
    "skew_reverse_kl": {"alpha": 0.1},
    "alpha_divergence": {"alpha": 0.5},
    "top_k_forward_kl": {"k": 4.0},
    "top_k_reverse_kl": {"k": 4.0},
    # policy_loss
    "opd": {"gamma": 0.0, "beta": 1.0},
    # length_shaping
    "soft_overlong": {"max_length": 20480.0, "buffer": 4096.0},
    "length_linear": {"lam": 0.0003},
    "length_quadratic": {"lam": 1e-06},
    "lcpo_exact": {"lam": 0.0003},
    "length_absolute": {"lam": 0.0003},
    "lcpo_max": {"lam": 0.0003, "delta": 0.5},
    "kimi_length": {"length_weight": 1.0},
    "cosine_length": {
        "max_length": 14336.0, "correct_short": 2.0, "correct_long": 1.0, "wrong_short": -10.0,
        "wrong_long": 0.0, "exceeded": -10.0,
    },
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_those_of_the_source(name):
    assert dict(ROWS[name].hyper) == CONSTANTS[name]


def test_every_row_with_constants_is_here():
    assert {name for name, row in ROWS.items() if row.hyper and "." not in name} == set(CONSTANTS)
