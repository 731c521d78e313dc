"""Other libraries' policy objectives: one row each, named LIBRARY.name, with that library's own constants.

A row is the whole of what the library computes of one batch: advantages, ratio, surrogate, denominators. Where these
depend on how a batch is cut into micro-batches, the batch is taken as one. KL terms are there where they are on by
default, or where the name says so. What the algebra cannot say is said in the row's citation. tests/peers compares
every row with the library's own functions.
"""

from functools import partial

from jaxpt.objectives import algebra
from jaxpt.objectives.parts import Penalty
from jaxpt.objectives.peer_parts import MORE
from jaxpt.objectives.policy import CLIP
from jaxpt.objectives.row import Row

compose = partial(algebra.compose, more=MORE)

TRL, VERL, OPENRLHF = "TRL 1.16.0, ", "verl 0.9.1, ", "OpenRLHF 0.11.2, "
TUNIX, SKYRL, RLAX = "Tunix 0.1.7, ", "SkyRL 0.4.0, ", "rlax 0.1.9, "


def same(name: str, row: Row, paper: str) -> Row:
    """`row` under the name that a library has for it, where the library does the same."""
    return row._replace(name=name, paper=paper, claims=(), alias_of=row.alias_of or row.name)


# --- TRL: no clamp of ratios or KL; all rows are counted, empty ones too; GRPOConfig's beta is 0

TRL_GROUP = {"std_eps": 1e-4, "ddof": 1.0}
TRL_CLIPPED = dict(advantage="standardised", ratio="token", surrogate="clipped", hyper={**CLIP, **TRL_GROUP})
TRL_GRPO = compose(
    "trl.grpo", TRL + "trainer/grpo_trainer.py:2786 and 3112-3154, loss_type grpo",
    reduction="all_rows_sequence_mean", **TRL_CLIPPED,
)
TRL_GRPO_KL = compose(
    "trl.grpo_kl", TRL + "trainer/grpo_trainer.py:3094-3148, loss_type grpo with a beta (here 0.04; its default is 0) and "
    "use_bias_correction_kl",
    reduction="all_rows_sequence_mean", kl=Penalty("k3", gradient="importance"),
    **{**TRL_CLIPPED, "hyper": {**TRL_CLIPPED["hyper"], "beta": 0.04}},
)
TRL_GRPO_DELTA = compose(
    "trl.grpo_delta", TRL + "trainer/grpo_trainer.py:3115, loss_type grpo with a delta (here 4; it has no default)",
    advantage="standardised", ratio="token", surrogate="bounded_ratio", reduction="all_rows_sequence_mean",
    hyper={**CLIP, **TRL_GROUP, "ratio_cap": 4.0},
)
TRL_GRPO_OPSM = compose(
    "trl.grpo_opsm",
    TRL + "trainer/grpo_trainer.py:2945, loss_type grpo with an off_policy_mask_threshold (here 0.5; it has no default)",
    advantage="standardised", ratio="token", surrogate="clipped_in_reach", reduction="all_rows_sequence_mean",
    hyper={**CLIP, **TRL_GROUP, "drift_max": 0.5},
)
TRL_DAPO = compose(
    "trl.dapo", TRL + "trainer/grpo_trainer.py:3168, loss_type dapo, its default; neither overlong shaping nor dynamic sampling",
    reduction="token_mean", **TRL_CLIPPED,
)
TRL_BNPO = same("trl.bnpo", TRL_DAPO, TRL + "trainer/grpo_trainer.py:3159, loss_type bnpo, on a batch that is not cut")
TRL_DR_GRPO = compose(
    "trl.dr_grpo", TRL + "trainer/grpo_trainer.py:3164, loss_type dr_grpo; scale_rewards still divides by the group's deviation, "
    "and max_length is max_completion_length",
    reduction="all_rows_budget_mean", **{**TRL_CLIPPED, "hyper": {**TRL_CLIPPED["hyper"], "max_length": 512.0}},
)
TRL_LUSPO = compose(
    "trl.luspo", TRL + "trainer/grpo_trainer.py:3175, loss_type luspo with importance_sampling_level sequence; a token form "
    "whose rows count n_i times, as its mask makes of them",
    advantage="standardised", ratio="sequence", surrogate="clipped", reduction="all_rows_sequence_sum",
    hyper={**CLIP, **TRL_GROUP},
)
TRL_GSPO = compose(
    "trl.gspo", TRL + "trainer/grpo_trainer.py:3086, loss_type grpo with importance_sampling_level sequence",
    advantage="standardised", ratio="sequence", surrogate="clipped", reduction="all_rows_sequence_mean",
    hyper={**CLIP, **TRL_GROUP},
)
TRL_CISPO = compose(
    "trl.cispo", TRL + "trainer/grpo_trainer.py:3109, loss_type cispo; the cap is epsilon_high itself (5, as its manual "
    "advises), not 1 + epsilon_high",
    advantage="standardised", ratio="token", surrogate="capped_weight", reduction="token_mean",
    hyper={**TRL_GROUP, "ratio_cap": 5.0},
)
TRL_SAPO = compose(
    "trl.sapo", TRL + "trainer/grpo_trainer.py:3121, loss_type sapo",
    advantage="standardised", ratio="token", surrogate="soft_gate", reduction="all_rows_sequence_mean",
    hyper={**TRL_GROUP, "tau_pos": 1.0, "tau_neg": 1.05},
)
TRL_VESPO = compose(
    "trl.vespo", TRL + "trainer/grpo_trainer.py:2970 and 3125, loss_type vespo",
    advantage="standardised", ratio="none", surrogate="gamma_weight", reduction="token_mean",
    hyper={**TRL_GROUP, "k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
)
TRL_GMPO = compose(
    "trl.gmpo", TRL + "experimental/gmpo/gmpo_trainer.py:73; its empty rows add -A, a constant, which is left out",
    advantage="standardised", ratio="token", surrogate="geometric", reduction="all_rows_sequence_mean",
    hyper={**TRL_GROUP, "log_low": 0.4, "log_high": 0.4},
)
TRL_RLOO = compose(
    "trl.rloo", TRL + "trainer/rloo_trainer.py:1664-1699 and 1798; its empty rows add -A, a constant, which is left out",
    advantage="leave_one_out", ratio="sequence_product", surrogate="clipped", reduction="all_rows_sequence_mean",
    kl=Penalty("k1", placement="reward"), hyper={**CLIP, "beta": 0.05},
)

# --- verl: log-ratios clamped to 20 nats, dual clip always on

VERL_GROUP = {"std_eps": 1e-6, "ddof": 1.0}
VERL_CLIP = {**CLIP, "dual_clip": 3.0}
VERL_WHITENED = {"var_eps": 1e-8, "ddof": 1.0}
VANILLA = dict(ratio="token_clamped", surrogate="dual_clip", reduction="token_mean")
VERL_LOSS = VERL + "trainer/ppo/core_algos.py:1322-1369, policy loss vanilla, after "

VERL_PPO = compose(
    "verl.ppo", VERL_LOSS + ":215, gae; critic of :2125",
    advantage="gae_unbootstrapped", normalisation="batch_rsqrt", **VANILLA,
    hyper={**VERL_CLIP, **VERL_WHITENED, "gamma": 1.0, "lam": 1.0, "value_clip": 0.5},
)
VERL_GRPO = compose(
    "verl.grpo", VERL_LOSS + ":267, grpo", advantage="standardised_or_raw", **VANILLA, hyper={**VERL_CLIP, **VERL_GROUP}
)
VERL_GRPO_KL = compose(
    "verl.grpo_kl", VERL_LOSS + ":267, grpo, with use_kl_loss: low_var_kl of :2234",
    advantage="standardised_or_raw", **VANILLA, kl=Penalty("k3_clamped"), hyper={**VERL_CLIP, **VERL_GROUP, "beta": 0.001},
)
VERL_DR_GRPO = compose(
    "verl.dr_grpo", VERL_LOSS + ":267, grpo without norm_adv_by_std_in_grpo; loss_agg_mode seq-mean-token-sum-norm (:1191), "
    "whose divisor is the padded width unless loss_scale_factor is set",
    advantage="centred_or_raw", **{**VANILLA, "reduction": "padded_mean"}, hyper=VERL_CLIP,
)
VERL_PASSK = compose(
    "verl.grpo_passk", VERL_LOSS + ":468, grpo_passk", advantage="best_over_second", **VANILLA,
    hyper={**VERL_CLIP, **VERL_GROUP},
)
VERL_GDPO = compose(
    "verl.gdpo", VERL_LOSS + ":354, gdpo, every part of weight 1", advantage="standardised_parts", normalisation="batch_rsqrt",
    **VANILLA, hyper={**VERL_CLIP, **VERL_GROUP, "var_eps": 1e-8},
)
VERL_RLOO = compose(
    "verl.rloo", VERL_LOSS + ":590, rloo", advantage="leave_one_out_or_raw", **VANILLA, hyper=VERL_CLIP
)
VERL_RLOO_VECTORIZED = compose(
    "verl.rloo_vectorized", VERL_LOSS + ":832, rloo_vectorized, which gives 0 to a group of one where rloo keeps its reward",
    advantage="leave_one_out", **VANILLA, hyper=VERL_CLIP,
)
VERL_RF = compose(
    "verl.reinforce_plus_plus", VERL_LOSS + ":693, reinforce_plus_plus",
    advantage="returns", normalisation="batch_rsqrt", **VANILLA, hyper={**VERL_CLIP, **VERL_WHITENED, "gamma": 1.0},
)
VERL_RF_BASELINE = compose(
    "verl.reinforce_plus_plus_baseline", VERL_LOSS + ":536, reinforce_plus_plus_baseline",
    advantage="centred_or_raw", normalisation="batch_rsqrt", **VANILLA, hyper={**VERL_CLIP, **VERL_WHITENED},
)
VERL_OPO = compose(
    "verl.opo", VERL_LOSS + ":643, opo", advantage="less_length_weighted", **VANILLA, hyper=VERL_CLIP
)
VERL_REMAX = compose(
    "verl.remax", VERL_LOSS + ":733, remax", advantage="above_baseline", **VANILLA, hyper=VERL_CLIP
)
OF_GRPO = VERL + "trainer/ppo/core_algos.py:267, grpo, and policy loss "
VERL_GSPO = compose(
    "verl.gspo", OF_GRPO + "gspo (:1545)", advantage="standardised_or_raw", ratio="sequence_token_capped",
    surrogate="clipped", reduction="sequence_mean", hyper={**CLIP, **VERL_GROUP},
)
VERL_SAPO = compose(
    "verl.sapo", OF_GRPO + "sapo (:1622), always by sequence means", advantage="standardised_or_raw", ratio="token_clamped",
    surrogate="soft_gate", reduction="sequence_mean", hyper={**VERL_GROUP, "tau_pos": 1.0, "tau_neg": 1.05},
)
VERL_CISPO = compose(
    "verl.cispo", OF_GRPO + "cispo (:2047)", advantage="standardised_or_raw", ratio="token_clamped",
    surrogate="clipped_weight", reduction="token_mean", hyper={**CLIP, **VERL_GROUP},
)
VERL_GMPO = compose(
    "verl.geo_mean", OF_GRPO + "geo_mean (:1928), clipped in logs by the same constants; its empty rows add 0",
    advantage="standardised_or_raw", ratio="token", surrogate="geometric", reduction="all_rows_sequence_mean",
    hyper={**VERL_GROUP, "log_low": 0.2, "log_high": 0.2},
)
VERL_DPPO_TV = compose(
    "verl.dppo_tv", OF_GRPO + "dppo_tv (:1379), with the cap of clip_ratio_c's default in ActorConfig, 3",
    advantage="standardised_or_raw", ratio="token_clamped", surrogate="tv_mask", reduction="token_mean",
    hyper={**VERL_GROUP, "tv_low": 0.2, "tv_high": 0.2, "ratio_cap": 3.0},
)
VERL_DPPO_KL = compose(
    "verl.dppo_kl", OF_GRPO + "dppo_kl (:1460), with the cap of clip_ratio_c's default in ActorConfig, 3; it adds 1e-8 to "
    "the probabilities of the rest",
    advantage="standardised_or_raw", ratio="token_clamped", surrogate="kl_mask", reduction="token_mean",
    hyper={**VERL_GROUP, "kl_low": 0.2, "kl_high": 0.2, "ratio_cap": 3.0},
)
VERL_GPG = compose(
    "verl.gpg", VERL + "trainer/ppo/core_algos.py:1707, policy loss gpg, after :770, gpg", advantage="centred_or_raw",
    normalisation="nonzero_share", ratio="none", surrogate="score", reduction="token_mean",
)
VERL_CLIP_COV = compose(
    "verl.clip_cov", OF_GRPO + "clip_cov (:1743), which draws the tokens at random from the band, at least one",
    advantage="standardised_or_raw", ratio="token", surrogate="clip_cov", reduction="token_mean",
    hyper={**CLIP, **VERL_GROUP, "cov_share": 0.0002, "cov_low": 1.0, "cov_high": 5.0},
)
VERL_KL_COV = compose(
    "verl.kl_cov", OF_GRPO + "kl_cov (:1848); its number of tokens is rounded down, ours up",
    advantage="standardised_or_raw", ratio="token", surrogate="kl_cov", reduction="token_mean",
    hyper={**VERL_GROUP, "cov_share": 0.0002, "old_coef": 1.0},
)
VERL_DRO = compose(
    "verl.dro", OF_GRPO + "dro (:2014) with a dro_beta (here 0.1; it has no default)", advantage="standardised_or_raw",
    ratio="none", surrogate="quadratic", reduction="token_mean", hyper={**VERL_GROUP, "old_coef": 0.1},
)

# --- OpenRLHF: log-ratios clamped to 20 nats; places that the policy did not decide are steps of value 0

OPENRLHF_LOSS = dict(ratio="token_clamped", surrogate="clipped", reduction="token_mean")
OPENRLHF_AT = OPENRLHF + "models/loss.py:189 after trainer/ppo_utils/experience_maker.py, estimator "
OPENRLHF_PPO = compose(
    "openrlhf.ppo", OPENRLHF_AT + "gae (:366, normalised :315); k1 in the reward; critic of models/loss.py:262",
    advantage="gae_every_place", normalisation="batch_floor", **OPENRLHF_LOSS, kl=Penalty("k1_clamped", placement="reward"),
    hyper={**CLIP, "gamma": 1.0, "lam": 1.0, "var_floor": 1e-8, "beta": 0.01, "value_clip": 0.5},
)
OPENRLHF_REINFORCE = compose(
    "openrlhf.reinforce", OPENRLHF_AT + "reinforce (:407, normalised :315); k1 in the reward",
    advantage="returns_every_place", normalisation="batch_floor", **OPENRLHF_LOSS,
    kl=Penalty("k1_clamped", placement="reward"), hyper={**CLIP, "gamma": 1.0, "var_floor": 1e-8, "beta": 0.01},
)
NO_KL = "; without its KL, which is taken from the reward behind the baseline"
OPENRLHF_RLOO = compose(
    "openrlhf.rloo", OPENRLHF_AT + "rloo (:264)" + NO_KL, advantage="leave_one_out", **OPENRLHF_LOSS, hyper=CLIP
)
OPENRLHF_BASELINE = compose(
    "openrlhf.reinforce_baseline", OPENRLHF_AT + "reinforce_baseline (:267, normalised :315)" + NO_KL,
    advantage="centred", normalisation="batch_floor", **OPENRLHF_LOSS, hyper={**CLIP, "var_floor": 1e-8},
)
OPENRLHF_GROUP_NORM = compose(
    "openrlhf.group_norm", OPENRLHF_AT + "group_norm (:269)" + NO_KL, advantage="standardised", **OPENRLHF_LOSS,
    hyper={**CLIP, "std_eps": 1e-9, "ddof": 1.0},
)
OPENRLHF_DR_GRPO = compose(
    "openrlhf.dr_grpo", OPENRLHF_AT + "dr_grpo (:267), by tokens of the batch" + NO_KL, advantage="centred", **OPENRLHF_LOSS,
    hyper=CLIP,
)
OPENRLHF_FLASH = compose(
    "openrlhf.flash_reinforce", OPENRLHF_AT + "flash_reinforce (:274)" + NO_KL, advantage="monte_carlo",
    normalisation="batch_mean", **OPENRLHF_LOSS, hyper=CLIP,
)
OPENRLHF_GSPO = compose(
    "openrlhf.gspo", OPENRLHF + "models/loss.py:193, policy_loss_type gspo, after estimator group_norm" + NO_KL,
    advantage="standardised", ratio="sequence", surrogate="clipped", reduction="sequence_mean",
    hyper={**CLIP, "std_eps": 1e-9, "ddof": 1.0},
)

# --- Tunix

TUNIX_GROUP = {"std_eps": 1e-6, "ddof": 1.0}
TUNIX_GRPO = compose(
    "tunix.grpo", TUNIX + "rl/algo_core.py:342-560, kl_loss_mode kl: k1 in the loss, whose gradient is 0 on average",
    advantage="standardised", ratio="token_clamped", surrogate="clipped", reduction="sequence_mean", kl=Penalty("k1"),
    hyper={**CLIP, **TUNIX_GROUP, "beta": 0.04},
)
TUNIX_GRPO_K3 = compose(
    "tunix.grpo_low_var_kl", TUNIX + "rl/algo_core.py:342-560, kl_loss_mode low_var_kl, no clamp",
    advantage="standardised", ratio="token_clamped", surrogate="clipped", reduction="sequence_mean", kl=Penalty("k3"),
    hyper={**CLIP, **TUNIX_GROUP, "beta": 0.04},
)
TUNIX_GSPO = compose(
    "tunix.gspo_token", TUNIX + "rl/algo_core.py:412-430, loss_algo gspo-token, beta 0",
    advantage="standardised", ratio="sequence_token_clamped", surrogate="clipped", reduction="sequence_mean",
    hyper={**CLIP, **TUNIX_GROUP},
)
TUNIX_DRGRPO = compose(
    "tunix.drgrpo", TUNIX + "rl/algo_core.py:604, drgrpo, and rl/common.py:566, sequence-mean-token-scale, whose divisor is "
    "the padded width; beta 0",
    advantage="centred", ratio="token_clamped", surrogate="clipped", reduction="padded_mean", hyper=CLIP,
)
TUNIX_PPO = compose(
    "tunix.ppo", TUNIX + "rl/algo_core.py:34 and 181, critic of :287; without its KL in the reward",
    advantage="gae_unbootstrapped", normalisation="batch_rsqrt", ratio="token", surrogate="clipped", reduction="token_mean",
    hyper={**CLIP, **VERL_WHITENED, "gamma": 1.0, "lam": 0.95, "value_clip": 0.2},
)

# --- SkyRL: its normaliser stands in the advantages and the loss is a sum, which is the same where the loss is linear
# --- in them; its KL term, a mean of the micro-batch's row means, is left out

SKYRL_REGULAR = compose(
    "skyrl.regular", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:555 after :1344, grpo; token_mean",
    advantage="standardised_or_raw", ratio="token_clamped", surrogate="clipped", reduction="token_mean",
    hyper={**CLIP, **VERL_GROUP},
)
SKYRL_DUAL_CLIP = same("skyrl.dual_clip", VERL_GRPO, SKYRL + "backends/skyrl_train/utils/ppo_utils.py:565, dual_clip")
SKYRL_GSPO = compose(
    "skyrl.gspo", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:663 after :1344, grpo; sequence_mean",
    advantage="standardised_or_raw", ratio="sequence_token_capped", surrogate="clipped", reduction="all_rows_sequence_mean",
    hyper={**CLIP, **VERL_GROUP},
)
SKYRL_SAPO = compose(
    "skyrl.sapo", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:590 after :1344, grpo; sequence_mean",
    advantage="standardised_or_raw", ratio="token_clamped", surrogate="soft_gate", reduction="all_rows_sequence_mean",
    hyper={**VERL_GROUP, "tau_pos": 1.0, "tau_neg": 1.05},
)
SKYRL_CISPO = compose(
    "skyrl.cispo", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:732 after :1344, grpo; ratios from 0 to 5; token_mean",
    advantage="standardised_or_raw", ratio="token_clamped", surrogate="clipped_weight", reduction="token_mean",
    hyper={**VERL_GROUP, "eps_low": 1.0, "eps_high": 4.0},
)
SKYRL_ROLLOUT_IS = compose(
    "skyrl.rollout_is",
    SKYRL + "backends/skyrl_train/utils/ppo_utils.py:824 after :1344, grpo; old_logp is the sampler's; token_mean",
    advantage="standardised_or_raw", ratio="token_clamped", surrogate="hard_zero_weight", reduction="token_mean",
    hyper={**CLIP, **VERL_GROUP},
)
SKYRL_DPPO = compose(
    "skyrl.dppo", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:866, binary_tv, after :1344, grpo; token_mean",
    advantage="standardised_or_raw", ratio="token_clamped", surrogate="hard_tv_mask", reduction="token_mean",
    hyper={**VERL_GROUP, "tv_low": 0.2, "tv_high": 0.2},
)
SKYRL_DR_GRPO = compose(
    "skyrl.dr_grpo", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:555 and 1201, seq_mean_token_sum_norm, after :1344 without "
    "grpo_norm_by_std; max_length is max_seq_len, prompt and response (it has no default)",
    advantage="centred_or_raw", ratio="token_clamped", surrogate="clipped", reduction="all_rows_budget_mean",
    hyper={**CLIP, "max_length": 4096.0},
)
SKYRL_PROMPT_MEAN = compose(
    "skyrl.prompt_mean", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:555 and 1209, prompt_mean, after :1344, grpo",
    advantage="standardised_or_raw", ratio="token_clamped", surrogate="clipped", reduction="prompt_mean",
    hyper={**CLIP, **VERL_GROUP},
)
SKYRL_RLOO = same(
    "skyrl.rloo", OPENRLHF_RLOO, SKYRL + "backends/skyrl_train/utils/ppo_utils.py:555 after :1261, rloo; token_mean"
)
SKYRL_MAXRL = compose(
    "skyrl.maxrl", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:555 after :1395, maxrl; token_mean",
    advantage="over_mean_plus", ratio="token_clamped", surrogate="clipped", reduction="token_mean",
    hyper={**CLIP, "mean_eps": 1e-6},
)
SKYRL_IS = compose(
    "skyrl.importance_sampling", SKYRL + "backends/skyrl_train/utils/ppo_utils.py:1095 after :1344, grpo; a sum over tokens",
    advantage="standardised_or_raw", ratio="token", surrogate="unclipped", reduction="token_sum", hyper=VERL_GROUP,
)

# --- rlax: no mask and no groups; what it takes as advantages is up to its user

RLAX_CLIPPED = compose(
    "rlax.clipped_surrogate", RLAX + "policy_gradients.py:258, of the rewards themselves",
    advantage="monte_carlo", ratio="token", surrogate="clipped", reduction="every_place_mean", hyper=CLIP,
)
RLAX_PG = compose(
    "rlax.policy_gradient", RLAX + "policy_gradients.py:89, of the rewards themselves",
    advantage="monte_carlo", ratio="none", surrogate="score", reduction="every_place_mean",
)

ROWS = (
    TRL_GRPO, TRL_GRPO_KL, TRL_GRPO_DELTA, TRL_GRPO_OPSM, TRL_DAPO, TRL_BNPO, TRL_DR_GRPO, TRL_LUSPO, TRL_GSPO, TRL_CISPO,
    TRL_SAPO, TRL_VESPO, TRL_GMPO, TRL_RLOO,
    VERL_PPO, VERL_GRPO, VERL_GRPO_KL, VERL_DR_GRPO, VERL_PASSK, VERL_GDPO, VERL_RLOO, VERL_RLOO_VECTORIZED, VERL_RF, VERL_RF_BASELINE,
    VERL_OPO, VERL_REMAX, VERL_GSPO, VERL_SAPO, VERL_CISPO, VERL_GMPO, VERL_DPPO_TV, VERL_DPPO_KL, VERL_GPG, VERL_CLIP_COV,
    VERL_KL_COV, VERL_DRO,
    OPENRLHF_PPO, OPENRLHF_REINFORCE, OPENRLHF_RLOO, OPENRLHF_BASELINE, OPENRLHF_GROUP_NORM, OPENRLHF_DR_GRPO, OPENRLHF_FLASH,
    OPENRLHF_GSPO,
    TUNIX_GRPO, TUNIX_GRPO_K3, TUNIX_GSPO, TUNIX_DRGRPO, TUNIX_PPO,
    SKYRL_REGULAR, SKYRL_DUAL_CLIP, SKYRL_GSPO, SKYRL_SAPO, SKYRL_CISPO, SKYRL_ROLLOUT_IS, SKYRL_DPPO, SKYRL_DR_GRPO,
    SKYRL_PROMPT_MEAN, SKYRL_RLOO, SKYRL_MAXRL, SKYRL_IS,
    RLAX_CLIPPED, RLAX_PG,
)
