"""Policy losses: the peer's own function at given advantages, and the row of the same name."""

import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

from parity import GROUP, Case, G, T, of_loss
from wheels import Config

from jaxpt.objectives.peers import ROWS

PEERS = {row.name: row for row in ROWS}
CLIP = {"eps_low": 0.2, "eps_high": 0.2}
SAME = SimpleNamespace(
    reduce=lambda x, reduction: x, gather=lambda x: x, gather_for_metrics=lambda x: x, num_processes=1, device="cpu",
    sync_gradients=True,
)  # fmt: skip


# --- TRL: _compute_loss on a stand-in for the trainer, which asks no model but hands out the batch


def of_trainer(name):
    from trl.trainer.grpo_trainer import GRPOTrainer

    return getattr(GRPOTrainer, name)


def trl(call, x, level="token", **settings):
    import torch

    args = {"use_bias_correction_kl": True, "delta": None, "steps_per_generation": 1, "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
            "vespo_lambda_neg": 2.0}  # fmt: skip
    args |= {k: settings.pop(k) for k in args.keys() & settings}
    rows, width = x["mask"].shape
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (x["logp"], torch.zeros(rows, width), None), args=SimpleNamespace(**args),
        accelerator=SAME, model=SimpleNamespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False, top_entropy_quantile=1.0, use_vllm=False,
        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1, max_completion_length=T,
        importance_sampling_level=level, **{k: of_trainer(k) for k in ("get_gamma_weights", "get_off_policy_mask")},
        **{"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "off_policy_mask_threshold": None, **settings},
    )  # fmt: skip
    mask = x["mask"].long()
    return call(trainer, None, {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long), "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros(rows, width, dtype=torch.long), "completion_mask": mask, "advantages": x["advantage"],
        "old_per_token_logps": x["old_logp"], "ref_per_token_logps": x["ref_logp"], "num_items_in_batch": mask.sum(),
        "old_logps": (x["old_logp"] * mask).sum(1),
    })  # fmt: skip


def trl_case(name, constants, *, row="", cls="trl.trainer.grpo_trainer:GRPOTrainer", masks="holes", **settings):
    row = PEERS[row or f"trl.{name}"]
    return Case(f"{cls}._compute_loss", name, partial(trl, **settings), of_loss(row, per_row=True), constants, masks=masks)


TRL = [
    trl_case("grpo", CLIP, loss_type="grpo"),
    trl_case("grpo_kl", {**CLIP, "beta": 0.04}, loss_type="grpo", beta=0.04),
    trl_case("grpo_delta", {**CLIP, "ratio_cap": 2.0}, loss_type="grpo", delta=2.0),
    trl_case("grpo_opsm", {**CLIP, "drift_max": 0.05}, loss_type="grpo", off_policy_mask_threshold=0.05),
    trl_case("dapo", {"eps_low": 0.2, "eps_high": 0.28}, loss_type="dapo", epsilon_high=0.28),
    trl_case("bnpo", CLIP, loss_type="bnpo"),
    trl_case("dr_grpo", {**CLIP, "max_length": float(T)}, loss_type="dr_grpo"),
    trl_case("luspo", CLIP, loss_type="luspo", level="sequence"),
    trl_case("gspo", {"eps_low": 0.1, "eps_high": 0.2}, loss_type="grpo", level="sequence", epsilon_low=0.1),
    trl_case("cispo", {"ratio_cap": 1.3}, loss_type="cispo", epsilon_high=1.3),
    trl_case("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, loss_type="sapo"),
    trl_case("vespo", {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}, loss_type="vespo"),
    trl_case("gmpo", {"log_low": 0.4, "log_high": 0.4}, cls="trl.experimental.gmpo.gmpo_trainer:GMPOTrainer", masks="rows",
             epsilon_low=0.4, epsilon_high=0.4),
    trl_case("rloo", CLIP, cls="trl.trainer.rloo_trainer:RLOOTrainer", masks="rows"),
]  # fmt: skip

# --- verl

ACTOR = {  # defaults of ActorConfig and PolicyLossConfig, verl/workers/config/actor.py
    "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05,
    "global_batch_info": {},
}  # fmt: skip


def verl(call, x, agg="token-mean", policy=(), **settings):
    config = Config(**{**ACTOR, **settings}, policy_loss=Config(**dict(policy)))
    return call(x["old_logp"], x["logp"], x["advantages"], x["m"], agg, config)[0]


def verl_case(name, constants, *, row="", function="", masks="extreme", given=(), **settings):
    function = f"verl.trainer.ppo.core_algos:compute_policy_loss_{function or name}"
    ours = of_loss(PEERS[row or f"verl.{name}"])
    return Case(function, name, partial(verl, **settings), ours, constants, dict(given), masks=masks)


DUAL = {**CLIP, "dual_clip": 3.0}
COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.0, "kl_cov_ratio": 0.25, "ppo_kl_coef": 1.0, "dro_beta": 0.1}
VERL = [
    verl_case("vanilla", DUAL, row="verl.grpo"),
    verl_case("vanilla-sum-norm", DUAL, row="verl.dr_grpo", function="vanilla", agg="seq-mean-token-sum-norm"),
    verl_case("gspo", CLIP, agg="seq-mean-token-mean"),
    verl_case("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    verl_case("cispo", CLIP),
    # it divides by the number of tokens and 1e-8, which shows where the rows' losses cancel: the float32 tolerance
    verl_case("geo_mean", {"log_low": 0.2, "log_high": 0.2}, masks="holes")._replace(dtype="float32"),
    verl_case("dppo_tv", {"tv_low": 0.1, "tv_high": 0.05, "ratio_cap": 1.5},
              clip_ratio_low=0.1, clip_ratio_high=0.05, clip_ratio_c=1.5),
    verl_case("dppo_kl", {"kl_low": 0.05, "kl_high": 0.02, "ratio_cap": 1.5},
              clip_ratio_low=0.05, clip_ratio_high=0.02, clip_ratio_c=1.5),
    verl_case("gpg", {}),
    verl_case("clip_cov", {**CLIP, "cov_low": 0.2, "cov_high": 1.0}, masks="holes", policy=COV.items(), given={"cov_share": 1.0}),
    verl_case("kl_cov", {"cov_share": 0.25, "old_coef": 1.0}, masks="full", policy=COV.items()),
    verl_case("dro", {"old_coef": 0.1}, policy=COV.items()),
]  # fmt: skip


# --- OpenRLHF


def openrlhf(cls, x, **settings):
    return cls(**settings)(x["logp"], x["old_logp"], x["advantages"], x["m"])[0]


def openrlhf_case(mode, row, constants=CLIP, masks="extreme", **settings):
    return Case("openrlhf.models.loss:PolicyLoss", mode, partial(openrlhf, **settings), of_loss(row), constants, masks=masks)


OPENRLHF = [
    openrlhf_case("ppo", PEERS["openrlhf.ppo"]),
    openrlhf_case("ppo-asymmetric", PEERS["openrlhf.rloo"], {"eps_low": 0.2, "eps_high": 0.28}, clip_eps_high=0.28),
    openrlhf_case("dual-clip", PEERS["verl.grpo"], DUAL, dual_clip=3.0),
    openrlhf_case("gspo", PEERS["openrlhf.gspo"], policy_loss_type="gspo", masks="holes"),
]

# --- Tunix


def tunix(call, x, **settings):
    import jax.numpy as jnp
    from flax import nnx
    from tunix.rl import common

    config = SimpleNamespace(**{
        "beta": 0.0, "epsilon": 0.2, "epsilon_low": 0.2, "epsilon_high": 0.2, "loss_algo": "grpo", "temperature": 1.0,
        "loss_agg_mode": "sequence-mean-token-mean", "kl_loss_mode": "kl", "kl_clamp_value": None, "entropy_coef": None, **settings,
    })  # fmt: skip
    example = SimpleNamespace(
        prompt_ids=None, completion_ids=None, completion_mask=x["m"], advantages=x["advantages"],
        old_per_token_logps=x["old_logp"], ref_per_token_logps=x["ref_logp"] if config.beta else None,
    )  # fmt: skip
    handed_out = lambda *args, **kwargs: (x["logp"], jnp.zeros((*x["logp"].shape, 2)))  # noqa: E731
    with patch.object(common, "compute_per_token_logps", handed_out):
        return call(nnx.Dict(), example, config, pad_id=0, eos_id=0)[0]


def tunix_case(mode, constants, *, row="", function="grpo_loss_fn", dtype="float32", masks="extreme", **settings):
    row = PEERS[row or f"tunix.{mode}"]
    return Case(f"tunix.rl.algo_core:{function}", mode, partial(tunix, **settings), of_loss(row), constants, masks=masks,
                framework="jax", dtype=dtype)  # fmt: skip


TUNIX = [
    tunix_case("grpo", {**CLIP, "beta": 0.04}, beta=0.04),
    tunix_case("grpo_low_var_kl", {**CLIP, "beta": 0.04}, beta=0.04, kl_loss_mode="low_var_kl", masks="holes"),
    tunix_case("gspo_token", CLIP, loss_algo="gspo-token"),
    tunix_case("drgrpo", CLIP, loss_agg_mode="sequence-mean-token-scale"),
    tunix_case("dual_clip", DUAL, row="verl.grpo", loss_agg_mode="token-mean", epsilon_c=3.0),
    tunix_case("ppo", CLIP, function="ppo_policy_loss_fn", dtype="float64", masks="holes"),
]


# --- SkyRL: its normaliser goes into the advantages first

SKYRL_AT = "skyrl.backends.skyrl_train.utils.ppo_utils"


def skyrl(call, x, reduction="token_mean", **settings):
    module = sys.modules[SKYRL_AT]
    off = Config(
        tis_ratio_type=None, sequence_mask_metric=None, outlier_token_is_threshold_low=None,
        outlier_token_is_threshold_high=None, token_mask_is_threshold_low=None, token_mask_is_threshold_high=None,
    )  # fmt: skip
    config = Config(**{
        "policy_loss_type": "regular", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0,
        "loss_reduction": "sequence_mean", "off_policy_correction": off, "sapo": Config(tau_pos=1.0, tau_neg=1.05),
        "cispo": Config(cispo_anchor="old", cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
        "dppo": Config(dppo_type="binary_tv", delta_low=0.1, delta_high=0.05), **settings,
    })  # fmt: skip
    advantages = x["advantages"]
    if reduction:
        prompts = [(g * G, g * G + G) for g in range(GROUP[-1] + 1)]
        advantages = module.apply_loss_reduction_to_advantages_minibatch(advantages, x["m"], reduction, len(advantages), 10, prompts)
    sampled = x["old_logp"] if call.__name__ == "rollout_is_policy_loss" else None
    return call(x["logp"], x["old_logp"], advantages, config, x["m"], sampled)[0]


def skyrl_case(function, mode, constants, *, row="", masks="extreme", given=(), **settings):
    # torch_utils.safe_exp_delta makes float32 of the ratio
    return Case(f"{SKYRL_AT}:{function}", mode, partial(skyrl, **settings), of_loss(PEERS[row or f"skyrl.{mode}"]), constants,
                dict(given), masks=masks, dtype="float32")  # fmt: skip


SKYRL = [
    skyrl_case("ppo_policy_loss", "regular", CLIP),
    skyrl_case("ppo_policy_loss", "dual_clip", DUAL, policy_loss_type="dual_clip"),
    skyrl_case("ppo_policy_loss", "dr_grpo", {**CLIP, "max_length": 10.0}, reduction="seq_mean_token_sum_norm"),
    skyrl_case("ppo_policy_loss", "prompt_mean", CLIP, reduction="prompt_mean"),
    skyrl_case("gspo_policy_loss", "gspo", CLIP, reduction="sequence_mean"),
    skyrl_case("sapo_policy_loss", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, reduction="sequence_mean"),
    skyrl_case("compute_policy_loss_cispo", "cispo", {"eps_high": 4.0}, given={"eps_low": 1.0}),
    skyrl_case("rollout_is_policy_loss", "rollout_is", CLIP),
    skyrl_case("dppo_policy_loss", "dppo", {"tv_low": 0.1, "tv_high": 0.05}),
    skyrl_case("importance_sampling_loss", "importance_sampling", {}, masks="holes", reduction=None),
]


# --- rlax


def rlax_clipped(call, x):
    import jax.numpy as jnp

    ratios = jnp.exp(x["logp"] - x["old_logp"]).reshape(-1)
    return call(ratios, x["advantages"].reshape(-1), 0.2)


def rlax_gradient(call, x):
    """One decision a place between two tokens, whose log-probabilities are logp and log(1 - p)."""
    import jax.numpy as jnp

    logp = x["logp"].reshape(-1)
    logits = jnp.stack([logp, jnp.log1p(-jnp.exp(logp))], axis=1)
    return call(logits, jnp.zeros(logp.size, jnp.int32), x["advantages"].reshape(-1), jnp.ones(logp.size))


RLAX = [
    Case("rlax:clipped_surrogate_pg_loss", "default", rlax_clipped, of_loss(PEERS["rlax.clipped_surrogate"]), CLIP, masks="full",
         framework="jax"),
    Case("rlax:policy_gradient_loss", "default", rlax_gradient, of_loss(PEERS["rlax.policy_gradient"]), masks="full",
         framework="jax"),
]  # fmt: skip

CASES = [*TRL, *VERL, *OPENRLHF, *TUNIX, *SKYRL, *RLAX]
