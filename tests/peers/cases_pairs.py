"""Preference, reward and distillation: the peer's own loss of pairs, and the row of the same name."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from cases_policy import SAME
from parity import B, Case, T
from wheels import Config

from jaxpt.objectives import families
from jaxpt.objectives.peer_pairs import ROWS

PEERS = {row.name: row for row in ROWS}
PAIR = ("logp", "rejected_logp")
NAMES = {  # argument of a family -> array of the batch
    "chosen_logp": "logp", "chosen_mask": "mask", "ref_chosen_logp": "ref_logp", "chosen_collision": "collision",
    "rejected_collision": "collision", "kl_logp": "rejected_logp", "kl_ref_logp": "ref_rejected_logp", "kl_mask": "rejected_mask",
    "student_logits": "logits",
}  # fmt: skip


def of_row(name):
    row = PEERS[name]

    def ours(x, **constants):
        args = families.FAMILIES[row.family].args
        batch = {k: x[NAMES.get(k, k)] for k, arg in args.items() if not arg.optional or arg.optional in row.needs}
        if row.family == "reward_pair":
            batch["mask"] = jnp.ones(B, bool)
        return row.loss(**batch, **row.prepare(batch, **constants), **constants)

    return ours


def sums(x, *names):
    """Of responses, the batch's log-probabilities over their tokens."""
    masks = {"logp": "m", "ref_logp": "m", "rejected_logp": "rejected_mask", "ref_rejected_logp": "rejected_mask"}
    return [(x[name] * x[masks[name]]).sum(-1) for name in names]


# --- TRL's trainers, on stand-ins


def dpo(call, x, loss_type="sigmoid", **settings):
    import torch

    both = lambda a, b: torch.cat([a, b])  # noqa: E731
    mask = both(x["mask"], x["rejected_mask"])
    zeros = torch.zeros(mask.shape)
    wide = torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.long)
    wide[:, 1:] = mask
    outputs = lambda logp: SimpleNamespace(  # noqa: E731
        log_probs=torch.where(mask, logp, 0.0), entropy=zeros, mean_logits=zeros, is_top1=mask,
        log_sum_sq_probs=both(x["collision"], x["collision"]),
    )
    policy = lambda **kwargs: outputs(both(x["logp"], x["rejected_logp"]))  # noqa: E731
    reference = lambda **kwargs: outputs(both(x["ref_logp"], x["ref_rejected_logp"]))  # noqa: E731
    trainer = SimpleNamespace(**{
        "model": SimpleNamespace(training=False, is_gradient_checkpointing=False), "ref_model": reference,
        "accelerator": SAME, "aux_loss_enabled": False, "ld_alpha": None, "precompute_ref_logps": False, "_tp_size": 1,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "loss_types": [loss_type], "loss_weights": [1.0],
        "beta": 0.1, "label_smoothing": 0.0, "use_weighting": False, "_total_train_tokens": 0,
        "args": SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        "_metrics": defaultdict(lambda: defaultdict(list)), **settings,
    })  # fmt: skip
    inputs = {"input_ids": torch.zeros_like(wide), "attention_mask": torch.ones_like(wide), "completion_mask": wide}
    return call(trainer, policy, inputs, False)


def dpo_case(mode, row, constants=(), dtype="float64", **settings):
    constants = dict(constants or {"beta": 0.1})
    name, call = "trl.trainer.dpo_trainer:DPOTrainer._compute_loss", partial(dpo, **settings)
    return Case(name, mode, call, of_row(row), constants, {}, PAIR, "rows", dtype=dtype)


def kto(call, x):
    import torch

    mask = x["mask"].long()
    zeros, wide = torch.zeros(mask.shape), torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask], 1)
    outputs = lambda logp: SimpleNamespace(  # noqa: E731
        log_probs=logp * mask, entropy=zeros, mean_logits=zeros
    )
    (kl_logp, kl_ref), policy = sums(x, "rejected_logp", "ref_rejected_logp"), lambda **kwargs: outputs(x["logp"])
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False, is_gradient_checkpointing=False), ref_model=lambda **kwargs: outputs(x["ref_logp"]),
        accelerator=SAME, aux_loss_enabled=False, precompute_ref_logps=False, calculate_KL=True, loss_type="kto", beta=0.1,
        desirable_weight=1.0, undesirable_weight=1.5, args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
        _compute_kl_logps=lambda model, batch: kl_logp.detach() if model is policy else kl_ref,
    )  # fmt: skip
    inputs = {"input_ids": torch.zeros_like(wide), "attention_mask": torch.ones_like(wide), "completion_mask": wide,
              "label": x["desirable"]}  # fmt: skip
    return call(trainer, policy, inputs, False)


def cpo(call, x, loss_type="sigmoid", mean=False, **settings):
    chosen, rejected = sums(x, *PAIR)
    if mean:
        chosen, rejected = chosen / x["m"].sum(-1), rejected / x["rejected_mask"].sum(-1)
    trainer = SimpleNamespace(
        **{"alpha": 0.0, "beta": 0.1, "label_smoothing": 0.0, "loss_type": loss_type, "accelerator": SAME, **settings}
    )
    return call(trainer, chosen, rejected)[0].mean()


def cpo_case(mode, row, constants, name="cpo.cpo_trainer:CPOTrainer.cpo_loss", call=cpo, **settings):
    # the likelihood is added elsewhere
    name, given = f"trl.experimental.{name}", {"nll_coef": 0.0}
    return Case(name, mode, partial(call, **settings), of_row(row), constants, given, PAIR, "rows")


def orpo(call, x):
    return -cpo(call, x, mean=True)  # TRL subtracts it from the likelihood


def rewards(call, x, margin=False, center=None):
    import torch

    scores = lambda: torch.cat([x["chosen_score"], x["rejected_score"]])[:, None]  # noqa: E731
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), args=SimpleNamespace(center_rewards_coefficient=center), accelerator=SAME,
        _total_train_tokens=0, _tp_size=1, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    inputs = {"attention_mask": torch.ones(2 * len(x["chosen_score"]), T)} | ({"margin": x["margin"]} if margin else {})
    return call(trainer, lambda **kwargs: SimpleNamespace(logits=scores()), inputs)


def reward_case(mode, row, constants=(), **settings):
    name, call = "trl.trainer.reward_trainer:RewardTrainer.compute_loss", partial(rewards, **settings)
    return Case(name, mode, call, of_row(row), dict(constants), {}, ("chosen_score", "rejected_score"))


def gkd(call, x):
    labels = x["tokens"].masked_fill(~x["mask"], -100)
    return call(x["logits"], x["teacher_logits"], labels=labels, beta=0.3)


SMOOTHED = {"beta": 0.1, "label_smoothing": 0.1}
TRL = [
    dpo_case("sigmoid", "trl.sigmoid"),
    dpo_case("hinge", "trl.hinge", loss_type="hinge"),
    dpo_case("ipo", "trl.ipo", {"tau": 0.1}, loss_type="ipo"),
    dpo_case("exo_pair", "trl.exo_pair", {"beta": 0.1, "label_smoothing": 0.125}, loss_type="exo_pair", label_smoothing=0.125),
    dpo_case("nca_pair", "trl.nca_pair", loss_type="nca_pair"),
    dpo_case("robust", "trl.robust", SMOOTHED, loss_type="robust", label_smoothing=0.1),
    dpo_case("bco_pair", "trl.bco_pair", loss_type="bco_pair"),
    dpo_case("sppo_hard", "trl.sppo_hard", {"eta": 10.0}, loss_type="sppo_hard"),
    dpo_case("aot", "trl.aot", SMOOTHED, loss_type="aot", label_smoothing=0.1),
    dpo_case("aot_unpaired", "trl.aot_unpaired", SMOOTHED, loss_type="aot_unpaired", label_smoothing=0.1),
    dpo_case("apo_zero", "trl.apo_zero", loss_type="apo_zero"),
    dpo_case("apo_down", "trl.apo_down", loss_type="apo_down"),
    dpo_case("discopop", "trl.discopop", {"beta": 0.1, "tau": 0.05}, loss_type="discopop"),
    dpo_case("sigmoid_norm", "trl.sigmoid_norm", loss_type="sigmoid_norm"),
    dpo_case("forward_kl", "trl.dpo_forward_kl", f_divergence_type="forward_kl"),
    dpo_case("js_divergence", "trl.dpo_js_divergence", f_divergence_type="js_divergence"),
    dpo_case("alpha_divergence", "trl.dpo_alpha_divergence", {"beta": 0.1, "alpha": 0.5}, "float32",
             f_divergence_type="alpha_divergence"),
    dpo_case("ld", "trl.ld_dpo", {"beta": 0.1, "ld_alpha": 0.5}, ld_alpha=0.5),
    dpo_case("wpo", "trl.wpo", use_weighting=True),
    Case("trl.trainer.kto_trainer:KTOTrainer._compute_loss", "kto", kto, of_row("trl.kto"),
         {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5}, masks="rows"),
    cpo_case("sigmoid", "trl.cpo", {"beta": 0.1}),
    cpo_case("simpo", "trl.simpo", {"beta": 0.1, "gamma": 0.5}, loss_type="simpo", mean=True, simpo_gamma=0.5),
    cpo_case("hinge", "trl.cpo_hinge", {"beta": 0.1}, loss_type="hinge"),
    cpo_case("ipo", "trl.cpo_ipo", {"tau": 0.1}, loss_type="ipo", mean=True),
    cpo_case("odds", "trl.orpo", {"lam": 0.1}, "orpo.orpo_trainer:ORPOTrainer.odds_ratio_loss", orpo)._replace(dtype="float32"),
    reward_case("default", "trl.reward"), reward_case("margin", "trl.reward_margin", margin=True),
    reward_case("centred", "trl.reward_centred", {"center_coef": 0.01}, center=0.01),
    Case("trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss", "beta", gkd, of_row("trl.gkd"), {"beta": 0.3}, {},
         ("logits",)),
]  # fmt: skip


# --- OpenRLHF


def on_sums(cls, x, **settings):
    return cls(0.1, **settings)(*sums(x, *PAIR, "ref_logp", "ref_rejected_logp"))[0]


def on_scores(cls, x, margin=False):
    return cls()(x["chosen_score"], x["rejected_score"], x["margin"] if margin else None)


def openrlhf(name, mode, call, row, constants, wrt=PAIR):
    return Case(f"openrlhf.models.loss:{name}", mode, call, of_row(row), constants, {}, wrt, "rows")


SCORES = ("chosen_score", "rejected_score")
OPENRLHF = [
    openrlhf("DPOLoss", "dpo", on_sums, "openrlhf.dpo", {"beta": 0.1}),
    openrlhf("DPOLoss", "cdpo", partial(on_sums, label_smoothing=0.1), "openrlhf.cdpo", SMOOTHED),
    openrlhf("DPOLoss", "ipo", partial(on_sums, ipo=True), "openrlhf.ipo", {"tau": 0.1}),
    openrlhf("PairWiseLoss", "default", on_scores, "openrlhf.pairwise", {}, SCORES),
    openrlhf("PairWiseLoss", "margin", partial(on_scores, margin=True), "trl.reward_margin", {}, SCORES),
    openrlhf("LogExpLoss", "default", on_scores, "openrlhf.logexp", {}, SCORES),
]


# --- Tunix, optax


def tunix(call, x, **settings):
    from unittest.mock import patch

    from tunix.sft.dpo import dpo_trainer

    example = Config(
        input_ids=None, positions=None, attention_mask=None, logits_to_keep=None, images=None,
        completion_mask=jnp.concatenate([x["m"], x["rejected_mask"]]),
    )  # fmt: skip
    example.ref_chosen_logps, example.ref_rejected_logps = sums(x, "ref_logp", "ref_rejected_logp")
    with patch.object(dpo_trainer, "compute_logps", lambda *args, **kwargs: sums(x, *PAIR)):
        return call(None, example, **settings)[0]


def tunix_case(mode, row, constants, **settings):
    name, call = "tunix.sft.dpo.dpo_trainer:dpo_loss_fn", partial(tunix, **settings)
    return Case(name, mode, call, of_row(row), constants, {}, PAIR, "rows", "jax")


def logit(cls, x):
    strategy = cls(None, None, None, temperature=2.0, alpha=1.0)
    return strategy.compute_loss(x["logits"], x["teacher_logits"], jnp.zeros_like(x["logits"]))[0]


LOGITS = (("logits",), "full", "jax")
OTHERS = [
    tunix_case("dpo", "tunix.dpo", {"beta": 0.1}),
    tunix_case("orpo", "tunix.orpo", {"lam": 0.1, "nll_coef": 1.0}, algorithm="orpo"),
    Case("tunix.distillation.strategies.logit:LogitStrategy", "alpha-1", logit, of_row("tunix.logit"), {"temperature": 2.0}, {},
         *LOGITS, "float32"),
    Case("optax:softmax_cross_entropy_with_integer_labels", "mean", lambda call, x: call(x["logits"], x["tokens"]).mean(),
         of_row("optax.softmax_cross_entropy"), {}, {}, *LOGITS),
    Case("optax.losses:kl_divergence_with_log_targets", "mean",
         lambda call, x: call(jax.nn.log_softmax(x["logits"]), jax.nn.log_softmax(x["teacher_logits"])).mean(),
         of_row("optax.kl_divergence"), {}, {}, *LOGITS),
]  # fmt: skip


CASES = [*TRL, *OPENRLHF, *OTHERS]
