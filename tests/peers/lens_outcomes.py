"""What is made of outcomes: advantages, returns, whitening; losses of comparisons; what length costs. The calls are those
of the parity tests' cases; what is new here is the order of arguments."""

import by_hand as hand
import cases_advantages
import cases_pairs
import jax.numpy as jnp
import numpy as np
from lens_target import CORE, FEWER, MAKER, OPENRLHF, SKYRL, TUNIX, UTILS, VERL_F, Target
from wheels import Config

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
    Target(f"{VERL_F}:masked_whiten", "", "whiten", of_two_or_more, hand.whitened()),
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
    call = of_sums(lambda f, x: cases_pairs.kto(f, {**x, "desirable": desirable > 0}))
    return call(function, logp, kl_logp, ref_logp, kl_ref_logp)


def rewards(case):
    def call(function, chosen_score, rejected_score, margin=None):
        x = {"chosen_score": chosen_score, "rejected_score": rejected_score, "margin": margin}
        return case(function, x, margin=margin is not None)

    return call


LOGISTIC = ("log2_at_margin_0", "monotone")
PAIRS = [
    Target("trl.trainer.dpo_trainer:DPOTrainer._compute_loss", "sigmoid", "preference_tokens", dpo_of_tokens, hand.dpo_of_tokens,
           claims=LOGISTIC, examples=FEWER),
    Target(f"{OPENRLHF}:DPOLoss", "", "preference", of_sums(cases_pairs.on_sums), hand.dpo,
           claims=(*LOGISTIC, "log_ratios_only")),
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

OUTCOMES = [*ADVANTAGES, *ALONG, *WHITENING, *PAIRS, *LENGTHS]
