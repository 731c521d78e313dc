"""The functions of other libraries that `jaxpt verify` is asked about, each called as a member of a family of the
verifier, with what its own name, docstring or comments claim and what it is by hand (by_hand.py).

The calls are those of the cases that the parity tests hold against our rows; what is new here is the order of arguments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import by_hand as hand
import cases_advantages
import cases_pairs
import cases_policy
import cases_terms
import jax
import jax.numpy as jnp
import numpy as np
from wheels import Config

CORE, SKYRL, OPENRLHF, TUNIX = cases_terms.CORE, cases_policy.SKYRL_AT, "openrlhf.models.loss", "tunix.rl.algo_core"
FUNCTIONAL, UTILS, MAKER = "verl.utils.torch_functional", "openrlhf.models.utils", "openrlhf.trainer.ppo_utils.experience_maker"
EXAMPLES = 60
FEWER = 24  # of families whose members take many calls: still every pattern of a mask beside every kind of advantage


class Target(NamedTuple):
    peer: str  # "module:qualified.name"
    mode: str  # which of its branches; "" where it has one
    family: str
    call: Callable[..., Any]  # (the peer's function, the family's arguments) -> its result
    by_hand: Callable[[dict, dict], Any]
    framework: str = "torch"
    claims: tuple[str, ...] = ()  # contract laws that the peer's own words claim, and waivers
    spared: tuple[str, ...] = ()  # laws that are not asked, because the function has no mask or its words exclude them
    examples: int = EXAMPLES

    @property
    def package(self) -> str:
        return self.peer.split(".")[0].split(":")[0]

    @property
    def id(self) -> str:
        return self.peer + (f"[{self.mode}]" if self.mode else "")


def function_of(target: Target, load: Callable[[str], Any]) -> Callable:
    """The family's function. load: a module's full name -> the module."""
    module, _, path = target.peer.partition(":")
    function = load(module)
    for name in path.split("."):
        function = getattr(function, name)
    return partial(target.call, function)


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
    policy_target(GRPO, "dapo", partial(trl, loss_type="dapo", epsilon_high=0.28), hand.ppo(by_tokens, high=0.28), ("token_mean",)),
    policy_target(GRPO, "gspo", partial(trl, loss_type="grpo", level="sequence"), hand.gspo(by_all_rows)),
    policy_target(GRPO, "cispo", partial(trl, loss_type="cispo", epsilon_high=1.3), hand.cispo(by_tokens, 0.0, 1.3)),
    policy_target(f"{CORE}:compute_policy_loss_vanilla", "", verl, hand.ppo(by_tokens, cap=3.0),
                  ("token_mean", "dual_clip_negative_only")),
    policy_target(f"{CORE}:compute_policy_loss_gspo", "", partial(verl, agg="seq-mean-token-mean"), hand.gspo(by_rows, token=True),
                  ("sequence_mean",)),
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
    entropy(f"{FUNCTIONAL}:entropy_from_logits"),
    entropy(f"{UTILS}:compute_entropy", lambda function, logits: function._torchdynamo_orig_callable(logits)),  # uncompiled
    entropy(f"{SKYRL.replace('ppo_utils', 'torch_utils')}:chunked_entropy_from_logits",
            lambda function, logits: function(logits, requires_grad=True)),
    entropy(f"{TUNIX}:compute_entropy_from_logits", framework="jax"),
    logprobs("trl.trainer.utils:selective_log_softmax"),
    logprobs(f"{FUNCTIONAL}:logprobs_from_logits_v2"),
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
    distillation("tunix.distillation.strategies.logit:LogitStrategy.compute_loss", "alpha 1", logit,
                 everything(hand.divergence(hand.forward, temperature=2.0)), (), spared=NO_MASK),
    distillation("optax.losses:kl_divergence_with_log_targets", "", of_log_softmax, everything(hand.divergence(hand.forward)),
                 ("forward_kl",), spared=NO_MASK),
    # its words: targets are strictly positive
    distillation("optax.losses:kl_divergence", "", of_probabilities, everything(hand.divergence(hand.forward)), ("forward_kl",),
                 spared=(*NO_MASK, "vocabulary_padding")),
    distillation("rlax:categorical_kl_divergence", "", lambda f, student, teacher, mask: f(teacher, student).mean(),
                 everything(hand.divergence(hand.forward)), ("forward_kl",), spared=NO_MASK),
]  # fmt: skip

# --- advantages


def of_outcome(function, rewards, group):
    """Of responses of one token."""
    return cases_advantages.outcome(function, {"token_rewards": rewards[:, None], "m": 0 * rewards[:, None] + 1, "group": group})


def grouped(peer, call, of, claims, framework="torch", mode="", **more):
    whole = lambda function, rewards, group: call(function, rewards, group)["advantages"][:, 0]  # noqa: E731
    return Target(peer, mode, "group_advantage", whole, of, framework, claims, **more)


def one_by_one(call):
    """Of a function that takes groups of one size side by side: one group a call. Groups of one are refused by the
    trainers' own settings, and have 0 here."""

    def of_groups(function, rewards, group):
        out = np.zeros((len(rewards), 1))
        for label in np.unique(group):
            mine = np.flatnonzero(group == label)
            if len(mine) > 1:
                out[mine, 0] = call(function, rewards[mine])
        return {"advantages": out}

    return of_groups


def maker(estimator):
    def call(method, rewards):
        import torch

        x = {"untied": torch.tensor(rewards, dtype=torch.float32), "m": torch.ones(len(rewards), 1)}
        x |= {"values": 0 * x["m"], "group": np.zeros(len(rewards), int)}
        return cases_advantages.openrlhf(method, x, estimator)["advantages"][:, 0]

    return one_by_one(call)


METHOD = f"{MAKER}:RemoteExperienceMaker.compute_advantages_and_returns"
of_size = one_by_one(lambda function, rewards: np.asarray(function(np.float32(rewards), len(rewards))))
itself, nothing = (lambda mine: mine), (lambda mine: 0.0)
LOO = ("leave_one_out_independence", "sums_to_zero", "scale_equivariance")
STD = ("scale_invariance", "sums_to_zero")
ADVANTAGES = [
    grouped(f"{CORE}:compute_grpo_outcome_advantage", of_outcome, hand.groups(hand.standardised(1e-6, itself)), STD),
    grouped(f"{CORE}:compute_rloo_outcome_advantage", of_outcome, hand.groups(hand.left_out(itself)), LOO),
    grouped(f"{CORE}:compute_rloo_vectorized_outcome_advantage", of_outcome, hand.groups(hand.left_out(nothing)), LOO),
    grouped(f"{SKYRL}:compute_grpo_outcome_advantage", of_outcome, hand.groups(hand.standardised(1e-6, itself)), STD),
    grouped(f"{SKYRL}:compute_rloo_outcome_advantage", of_outcome, hand.groups(hand.left_out(nothing)), LOO),
    grouped(f"{SKYRL}:compute_maxrl_advantage", of_outcome, hand.groups(hand.over_mean), ("reward_has_a_zero",)),
    grouped(METHOD, maker("group_norm"), hand.groups(hand.standardised(1e-9, nothing)), STD, "numpy", "group_norm"),
    grouped(METHOD, maker("rloo"), hand.groups(hand.left_out(nothing)), ("leave_one_out_independence",), "numpy", "rloo"),
    grouped(f"{TUNIX}:compute_advantages", of_size, hand.groups(hand.standardised(1e-6, nothing)), STD, "numpy"),
    grouped(f"{TUNIX}:compute_rloo_advantages", of_size, hand.groups(hand.left_out(nothing)), LOO, "numpy"),
]  # fmt: skip


def beside_others(call):
    """With two rows of ones more: the whitening, which is not looked at, refuses fewer than two tokens."""

    def of_rows(function, *x):
        import torch

        arrays = [torch.cat([v, torch.ones(2, v.shape[1])]) for v in x if hasattr(v, "shape")]
        return call(function, *arrays, *(v for v in x if not hasattr(v, "shape")))[:-2]

    return of_rows


def of_returns(function, rewards, values, mask, gamma, lam):
    """Before they are whitened, advantages are returns less values."""
    return function(rewards, values, mask, gamma, lam)[1] - values


def rlax_gae(function, rewards, values, mask, gamma, lam):
    """Without a mask: it is given the tokens that count."""
    out = jnp.zeros(mask.shape)
    for i, row in enumerate(mask):
        on = np.flatnonzero(np.asarray(row) > 0)
        if len(on):
            r, v = rewards[i, on], jnp.append(values[i, on], 0.0)
            out = out.at[i, on].set(function(r, jnp.full_like(r, gamma), lam, v))
    return out


def along(peer, family, call, framework="torch", **more):
    of = hand.gae if family == "gae" else hand.returns
    return Target(peer, "", family, call, of, framework, examples=FEWER, **more)


GAE = "compute_gae_advantage_return"
REINFORCE = "compute_reinforce_plus_plus_outcome_advantage"
ALONG = [
    along(f"{CORE}:{GAE}", "gae", beside_others(of_returns)),
    along(f"{SKYRL}:{GAE}", "gae", beside_others(of_returns)),
    along(f"{MAKER}:RemoteExperienceMaker.get_advantages_and_returns", "gae",
          lambda method, rewards, values, *rest: method(None, values, rewards, *rest)[0]),
    along(f"{TUNIX}:compute_gae_advantages", "gae", of_returns, "jax"),
    along("rlax:truncated_generalized_advantage_estimation", "gae", rlax_gae, "jax"),
    along(f"{CORE}:{REINFORCE}", "returns", beside_others(lambda f, r, mask, gamma: f(r, mask, config=Config(gamma=gamma))[1])),
    along(f"{SKYRL}:{REINFORCE}", "returns", beside_others(lambda f, r, mask, gamma: f(r, mask, gamma=gamma)[1])),
    along(f"{MAKER}:RemoteExperienceMaker.get_cumulative_returns", "returns", lambda method, *x: method(None, *x)),
]  # fmt: skip


def of_two_or_more(function, x, mask):
    """It refuses fewer than two tokens, in words: that is not looked at."""
    return function(x, mask) if mask.sum() > 1 else 0 * mask


WHITENING = [
    Target(f"{FUNCTIONAL}:masked_whiten", "", "whiten", of_two_or_more, hand.whitened()),
    Target(f"{SKYRL}:masked_whiten", "", "whiten", of_two_or_more, hand.whitened()),
    Target(f"{UTILS}:masked_normalize", "", "whiten", lambda f, x, mask: f(x, mask), hand.whitened(by_row=True, ddof=0)),
    Target(f"{TUNIX}:masked_whiten", "", "whiten", lambda f, x, mask: f(x, mask), hand.whitened(), "jax"),
]

# --- comparisons


def dpo_of_tokens(function, chosen_logp, rejected_logp, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp):
    return cases_pairs.dpo(function, {
        "logp": chosen_logp, "rejected_logp": rejected_logp, "mask": chosen_mask > 0, "rejected_mask": rejected_mask > 0,
        "ref_logp": ref_chosen_logp, "ref_rejected_logp": ref_rejected_logp, "collision": 0 * chosen_mask,
    })  # fmt: skip


def of_sums(case):
    """Of responses of one token."""

    def call(function, *logps):
        names, one = ("logp", "rejected_logp", "ref_logp", "ref_rejected_logp"), 0 * logps[0][:, None] + 1
        ones = {"m": one, "mask": one > 0, "rejected_mask": one}
        return case(function, {**{k: v[:, None] for k, v in zip(names, logps, strict=True)}, **ones})

    return call


def kto(function, logp, ref_logp, desirable, kl_logp, kl_ref_logp):
    return of_sums(lambda f, x: cases_pairs.kto(f, {**x, "desirable": desirable > 0}))(function, logp, kl_logp, ref_logp, kl_ref_logp)


def rewards(case):
    def call(function, chosen_score, rejected_score, margin=None):
        x = {"chosen_score": chosen_score, "rejected_score": rejected_score, "margin": margin}
        return case(function, x, margin=margin is not None)

    return call


LOGISTIC = ("log2_at_margin_0", "monotone")
PAIRS = [
    Target("trl.trainer.dpo_trainer:DPOTrainer._compute_loss", "sigmoid", "preference_tokens", dpo_of_tokens, hand.dpo_of_tokens,
           claims=LOGISTIC, examples=FEWER),
    Target(f"{OPENRLHF}:DPOLoss", "", "preference", of_sums(cases_pairs.on_sums), hand.dpo, claims=(*LOGISTIC, "log_ratios_only")),
    Target("tunix.sft.dpo.dpo_trainer:dpo_loss_fn", "dpo", "preference", of_sums(cases_pairs.tunix), hand.dpo, "jax",
           (*LOGISTIC, "log_ratios_only")),
    Target("trl.trainer.kto_trainer:KTOTrainer._compute_loss", "kto", "kto", kto, hand.kto, claims=("one_reference_point",)),
    Target("trl.trainer.reward_trainer:RewardTrainer.compute_loss", "margin", "reward_model", rewards(cases_pairs.rewards),
           hand.bradley_terry, claims=("shift_invariance",)),
    Target(f"{OPENRLHF}:PairWiseLoss", "", "reward_model", rewards(cases_pairs.on_scores), hand.bradley_terry,
           claims=("shift_invariance",)),
    Target(f"{OPENRLHF}:LogExpLoss", "", "reward_model",
           lambda cls, chosen_score, rejected_score, margin=None: cls()(chosen_score, rejected_score, margin), hand.bradley_terry,
           claims=("shift_invariance",)),
]  # fmt: skip

# --- lengths


def of_ids(make, length, max_length, buffer):
    return np.array(make(int(max_length), int(buffer))([[0] * int(n) for n in length]))


def of_words(function, length, max_length, buffer):
    """A letter stands for a token."""
    settings = {"overlong_buffer_length": buffer, "overlong_buffer_penalty": 1.0, "max_response_length": max_length}
    return np.array(function([], ["a" * int(n) for n in length], None, settings), float)


LENGTHS = [
    Target("trl.rewards:get_soft_overlong_punishment", "", "length_shaping", of_ids, hand.overlong, "numpy", ("linear_slope",)),
    Target("tunix.rl.grpo.dapo_learner:reward_shaping", "", "length_shaping", of_words, hand.overlong, "numpy"),
]

TARGETS = [*POLICY, *AGGREGATES, *KL, *CRITICS, *LOGITS, *DISTILLATION, *ADVANTAGES, *ALONG, *WHITENING, *PAIRS, *LENGTHS]
