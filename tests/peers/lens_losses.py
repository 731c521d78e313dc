"""Losses of tokens and what they are made of: policy losses, reductions, estimators of the KL, critics, functions of
logits. The calls are those of the parity tests' cases; what is new here is the order of arguments."""

from functools import partial

import by_hand as hand
import cases_pairs
import cases_policy
import cases_terms
import jax
import numpy as np
from lens_target import CORE, FEWER, OPENRLHF, SKYRL, TUNIX, UTILS, VERL_F, Target
from wheels import Config

# --- policy losses


def policy(case):
    def call(function, logp, old_logp, advantages, mask):
        x = {"logp": logp, "old_logp": old_logp, "ref_logp": old_logp, "advantages": advantages, "advantage": advantages}
        return case(function, {**x, "m": mask, "mask": mask > 0})

    return call


def of_tokens(case):
    """Of a function without a mask: it is given the tokens that count."""

    def call(function, logp, old_logp, advantages, mask):
        on = mask > 0
        return case(function, {"logp": logp[on], "old_logp": old_logp[on], "advantages": advantages[on]})

    return call


def policy_target(peer, mode, case, hand, claims=(), framework="torch", by=policy, **more):
    return Target(peer, mode, "policy_loss", by(case), hand, framework, claims, examples=FEWER, **more)


GRPO = "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
trl, verl, openrlhf, tunix, skyrl = (getattr(cases_policy, name) for name in ("trl", "verl", "openrlhf", "tunix", "skyrl"))
by_tokens, by_rows, by_all_rows = hand.token_mean, hand.row_mean, hand.all_rows_mean
POLICY = [
    policy_target(GRPO, "dapo", partial(trl, loss_type="dapo", epsilon_high=0.28), hand.ppo(by_tokens, high=0.28),
                  ("token_mean",)),
    policy_target(GRPO, "gspo", partial(trl, loss_type="grpo", level="sequence"), hand.gspo(by_all_rows)),
    policy_target(GRPO, "cispo", partial(trl, loss_type="cispo", epsilon_high=1.3), hand.cispo(by_tokens, 0.0, 1.3)),
    policy_target(f"{CORE}:compute_policy_loss_vanilla", "", verl, hand.ppo(by_tokens, cap=3.0),
                  ("token_mean", "dual_clip_negative_only")),
    policy_target(f"{CORE}:compute_policy_loss_gspo", "", partial(verl, agg="seq-mean-token-mean"),
                  hand.gspo(by_rows, token=True), ("sequence_mean",)),
    policy_target(f"{CORE}:compute_policy_loss_cispo", "", verl, hand.cispo(by_tokens, 0.8, 1.2), ("token_mean",)),
    policy_target(f"{CORE}:compute_policy_loss_gpg", "", verl, hand.reinforce(by_tokens), ("token_mean",)),
    policy_target(f"{OPENRLHF}:PolicyLoss", "ppo", openrlhf, hand.ppo(by_tokens), ("token_mean",)),
    policy_target(f"{OPENRLHF}:PolicyLoss", "gspo", partial(openrlhf, policy_loss_type="gspo"), hand.gspo(by_rows)),
    policy_target(f"{TUNIX}:grpo_loss_fn", "", tunix, hand.ppo(by_rows), ("sequence_mean",), "jax"),
    policy_target(f"{TUNIX}:ppo_policy_loss_fn", "", tunix, hand.ppo(by_tokens), (), "jax"),
    policy_target(f"{SKYRL}:ppo_policy_loss", "token_mean", skyrl, hand.ppo(by_tokens), ("token_mean",)),
    policy_target(f"{SKYRL}:gspo_policy_loss", "sequence_mean", partial(skyrl, reduction="sequence_mean"),
                  hand.gspo(by_all_rows, token=True), ("sequence_mean",)),
    policy_target(f"{SKYRL}:compute_policy_loss_cispo", "token_mean", skyrl, hand.cispo(by_tokens, 0.0, 5.0),
                  ("token_mean", "no_dead_zone")),
    policy_target("rlax:clipped_surrogate_pg_loss", "", cases_policy.rlax_clipped, hand.ppo(by_tokens), (), "jax", of_tokens,
                  spared=("all_masked",)),
    # its argument are logits, which the case makes of log-probabilities as no float32 can at the ends
    policy_target("rlax:policy_gradient_loss", "", cases_policy.rlax_gradient, hand.reinforce(by_tokens), (), "jax", of_tokens,
                  spared=("all_masked", "finite")),
]  # fmt: skip

# --- what losses are made of


def aggregate(peer, mode, reduction, claims, framework="torch", call=None):
    call = call or (lambda function, per_token, mask: function(per_token, mask, mode))
    return Target(peer, mode, "aggregate", call, hand.mean_of(reduction), framework, claims, examples=FEWER)


def by_token_level(token):
    return lambda function, per_token, mask: function(per_token, mask, token_level_loss=token)


AGGREGATES = [
    aggregate(f"{CORE}:agg_loss", "token-mean", by_tokens, ("token_mean",)),
    aggregate(f"{CORE}:agg_loss", "seq-mean-token-mean", by_rows, ("sequence_mean",)),
    aggregate(f"{OPENRLHF}:aggregate_loss", "token", by_tokens, ("token_mean",), call=by_token_level(True)),
    aggregate(f"{OPENRLHF}:aggregate_loss", "sequence", by_rows, ("sequence_mean",), call=by_token_level(False)),
    aggregate("tunix.rl.common:aggregate_loss", "token-mean", by_tokens, ("token_mean",), "jax"),
    aggregate("tunix.rl.common:aggregate_loss", "sequence-mean-token-mean", by_rows, ("sequence_mean",), "jax"),
]


def estimator(peer, mode, ours, claims, framework="torch", call=None):
    call = call or (lambda function, logp, ref_logp: function(logp, ref_logp, mode))
    return Target(peer, mode, "kl", call, ours, framework, claims)


def of_openrlhf(mode, **settings):
    return lambda function, logp, ref_logp: function(logp, ref_logp, kl_estimator=mode, **settings)


def of_skyrl(mode):
    return lambda function, logp, ref_logp: function(logp, ref_logp, None, mode)


APPROX = f"{UTILS}:compute_approx_kl"
KL = [  # that k1 and k3 are unbiased is said in verl's and Tunix's words, and in the page that the other two cite
    estimator(f"{CORE}:kl_penalty", "k1", hand.kl(hand.k1), ("unbiased",)),
    estimator(f"{CORE}:kl_penalty", "k3", hand.kl(hand.k3), ("unbiased",)),
    estimator(f"{CORE}:kl_penalty", "k3+", hand.kl(hand.k3, hand.k2), ("unbiased", "gradient_of_kl")),
    estimator(APPROX, "k2", hand.kl(hand.k2), ("non_negative",), call=of_openrlhf("k2")),
    estimator(APPROX, "k3", hand.kl(hand.k3), ("unbiased", "non_negative"), call=of_openrlhf("k3")),
    estimator(APPROX, "k1, unbiased gradient", hand.kl(hand.k1, hand.k2), ("unbiased", "gradient_of_kl"),
              call=of_openrlhf("k1", unbiased_gradient=True)),
    estimator(f"{SKYRL}:compute_approx_kl", "k3", hand.kl(hand.k3), ("unbiased",), call=of_skyrl("k3")),
    estimator("tunix.rl.common:compute_kl_divergence", "kl", hand.kl(hand.k1), ("unbiased",), "jax"),
    estimator("tunix.rl.common:compute_kl_divergence", "low_var_kl", hand.kl(hand.k3), ("unbiased",), "jax"),
]  # fmt: skip


def critic(peer, call, reduction, claims=("half_square", "pessimistic"), framework="torch"):
    return Target(peer, "", "value_loss", call, hand.critic(reduction, 0.5), framework, claims, examples=FEWER)


def of_batch(case):
    def call(function, values, old_values, returns, mask):
        return case(function, {"values": values, "old_values": old_values, "returns": returns, "m": mask})

    return call


CRITICS = [
    critic(f"{CORE}:compute_value_loss", lambda f, v, old, r, m: f(v, r, old, m, 0.5)[0], by_tokens),
    critic(f"{OPENRLHF}:ValueLoss", lambda cls, *x: cls(clip_eps=0.5)(*x), by_tokens),
    critic(f"{TUNIX}:ppo_value_loss_fn", of_batch(cases_terms.tunix_critic), by_tokens, framework="jax"),
    critic(f"{SKYRL}:ppo_critic_loss", lambda f, v, old, r, m: f(v, old, r, Config(value_clip=0.5), m)[0], by_all_rows),
]


def entropy(peer, call=lambda function, logits: function(logits), framework="torch"):
    return Target(peer, "", "entropy", call, hand.entropy, framework)


def logprobs(peer, framework="torch", sign=1):
    """Logits at t decide the token at t + 1."""
    call = lambda function, logits, tokens: sign * function(logits[:, :-1], tokens[:, 1:])  # noqa: E731
    return Target(peer, "", "logprobs", call, hand.logprobs, framework)


LOGITS = [
    entropy("trl.trainer.utils:entropy_from_logits"),
    entropy(f"{VERL_F}:entropy_from_logits"),
    entropy(f"{UTILS}:compute_entropy", lambda function, logits: function._torchdynamo_orig_callable(logits)),  # uncompiled
    entropy(f"{SKYRL.replace('ppo_utils', 'torch_utils')}:chunked_entropy_from_logits",
            lambda function, logits: function(logits, requires_grad=True)),
    entropy(f"{TUNIX}:compute_entropy_from_logits", framework="jax"),
    logprobs("trl.trainer.utils:selective_log_softmax"),
    logprobs(f"{VERL_F}:logprobs_from_logits_v2"),
    logprobs(f"{UTILS}:log_probs_from_logits"),
    logprobs(f"{SKYRL.replace('ppo_utils', 'torch_utils')}:logprobs_from_logits_v2"),
    logprobs("tunix.rl.common:selective_log_softmax", "jax"),
    logprobs("optax:softmax_cross_entropy_with_integer_labels", "jax", -1),
]  # fmt: skip


def distillation(peer, mode, call, of, claims, framework="jax", **more):
    return Target(peer, mode, "distillation", call, of, framework, claims, **more)


def everything(of):
    """By hand, of a function without a mask."""
    return lambda x, at: of({**x, "mask": np.ones(np.shape(x["mask"]))}, at)


def of_log_softmax(function, student, teacher, mask):
    return function(jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)).mean()


def of_probabilities(function, student, teacher, mask):
    return function(jax.nn.log_softmax(student), jax.nn.softmax(teacher)).mean()


def gkd(function, student, teacher, mask):
    import torch

    tokens = torch.zeros(mask.shape, dtype=torch.long)
    return cases_pairs.gkd(function, {"logits": student, "teacher_logits": teacher, "tokens": tokens, "mask": mask > 0})


def logit(cls, student, teacher, mask):
    return cases_pairs.logit(cls, {"logits": student, "teacher_logits": teacher})


NO_MASK = ("mask_poison", "padding", "empty_rows", "all_masked", "compaction")
DISTILLATION = [
    distillation("trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss", "beta 0.3", gkd,
                 hand.divergence(hand.mixed(0.3)), (), "torch"),
    distillation("tunix.distillation.strategies.logit:LogitStrategy", "alpha 1", logit,
                 everything(hand.divergence(hand.forward, temperature=2.0)), (), spared=NO_MASK),
    distillation("optax.losses:kl_divergence_with_log_targets", "", of_log_softmax, everything(hand.divergence(hand.forward)),
                 ("forward_kl",), spared=NO_MASK),
    # its words: targets are strictly positive
    distillation("optax.losses:kl_divergence", "", of_probabilities, everything(hand.divergence(hand.forward)), ("forward_kl",),
                 spared=(*NO_MASK, "vocabulary_padding")),
    distillation("rlax:categorical_kl_divergence", "", lambda f, student, teacher, mask: f(teacher, student).mean(),
                 everything(hand.divergence(hand.forward)), ("forward_kl",), spared=NO_MASK),
]  # fmt: skip

LOSSES = [*POLICY, *AGGREGATES, *KL, *CRITICS, *LOGITS, *DISTILLATION]
