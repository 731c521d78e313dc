"""Right functions for the tests of the verifier, in jax and in numpy, each with the contracts that it claims.

Those in jax are ours, through their public functions. Those in numpy are the float64 loops that ours are compared with
elsewhere: only those without a stopped gradient, since central differences cannot stop one.
"""

from collections.abc import Callable
from typing import NamedTuple

import advantage_loops
import jax
import jax.numpy as jnp
import numpy as np
import policy_loops
import preference_loops

from jaxpt.objectives import ROWS, advantages, kl, reduction, shaping, value
from jaxpt.ops.balance import balance_loss
from jaxpt.ops.masked import keep
from jaxpt.verify import rows


class Right(NamedTuple):
    fn: Callable
    family: str
    claims: tuple[str, ...]
    framework: str


def token_mean(per_token, mask):
    return reduction.token_mean(per_token, mask, reduction.totals_of(mask))


def penalty(logp, ref_logp, mask):
    return token_mean(kl.k3(keep(logp, mask), keep(ref_logp, mask)), mask)


def accumulated(per_token, mask, micro):
    return sum(reduction.token_mean(per_token, mask * (micro == m)[:, None],
        reduction.totals_of(mask)) for m in range(6))


def returns(rewards, mask, gamma):
    return value.gae(rewards, jnp.zeros_like(rewards), mask, gamma, 1.0)


def value_loss(values, old_values, returns, mask):
    return value.clipped_value_loss(values, old_values, returns, mask, totals=reduction.totals_of(mask), value_clip=0.2)


def logprobs(logits, tokens):
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=2)[..., 0]


def entropy(logits, temperature=1.0):
    logp = jax.nn.log_softmax(logits / temperature)
    p = jnp.exp(logp)
    return -jnp.sum(jnp.where(p > 0, p * jnp.where(p > 0, logp, 0), 0), axis=-1)


def row(name, family, *claims):
    """A row of the table with what it claims itself, and more."""
    return Right(rows.function(ROWS[name], family), family, (*rows.claims_of(name, family), *claims), "jax")


def own(fn, family, *claims):
    return Right(fn, family, claims, "jax")


JAX = {  # family -> one of ours
    "policy_loss": row("grpo_no_kl", "policy_loss", "sequence_mean", "homogeneous", "dual_clip_negative_only",
        "empty_rows_not_counted"),
    "kl": own(kl.k3, "kl", "unbiased", "non_negative", "no_clamp"),
    "kl_penalty_loss": own(penalty, "kl_penalty_loss"),
    "aggregate": own(token_mean, "aggregate", "token_mean", "empty_rows_not_counted"),
    "accumulate": own(accumulated, "accumulate", "token_mean"),
    "group_advantage": own(advantages.leave_one_out, "group_advantage", "leave_one_out_independence", "sums_to_zero",
        "singleton_zero", "missing_rewards", "scale_equivariance"),
    "gae": own(value.gae, "gae", "masked_reward_dropped"),
    "returns": own(returns, "returns", "masked_reward_dropped"),
    "whiten": own(value.whiten, "whiten"),
    "logprobs": own(logprobs, "logprobs"),
    "entropy": own(entropy, "entropy", "temperature"),
    "value_loss": own(value_loss, "value_loss", "pessimistic", "half_square", "declared_constants"),
    "preference": row("dpo", "preference"),
    "preference_tokens": row("simpo", "preference_tokens", "length_normalised"),
    "kto": row("kto", "kto"),
    "reward_model": row("bradley_terry", "reward_model"),
    "distillation": row("jsd", "distillation"),
    "length_shaping": own(shaping.soft_overlong, "length_shaping", "linear_slope"),
    "router_balance": own(balance_loss, "router_balance", "one_at_balance", "probabilities_alone"),
}


# --- float64 loops


def near(logp, other):
    """The other log-probabilities, no farther away than 20 nats: the loops have no tails against overflow."""
    return logp - np.clip(logp - other, -20, 20)


def policy(name, logp, old_logp, advantages, mask, ref_logp=None):
    reduction, of_token = policy_loops.PAPER[name]
    on = mask > 0
    clean = lambda x: np.where(on, x, 0)  # noqa: E731
    logp = clean(logp)
    batch = dict.fromkeys(policy_loops.NAMES.values(), np.zeros_like(logp)) | {"logp": logp, "mask": on}
    batch |= {"old_logp": near(logp, clean(old_logp)), "advantages": clean(advantages), "group": np.arange(len(logp))}
    if ref_logp is not None:
        batch["ref_logp"] = near(logp, clean(ref_logp))
    tokens = policy_loops.tokens_of(batch)
    return reduction(tokens, of_token) if tokens else 0.0


def without_reference(name):
    return lambda logp, old_logp, advantages, mask: policy(name, logp, old_logp, advantages, mask)


def with_reference(name):
    return lambda logp, old_logp, advantages, mask, ref_logp: policy(name, logp, old_logp, advantages, mask, ref_logp)


def pairs(name):
    """Losses of pairs, from their sums of log-probabilities."""
    def f(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp):
        facts = zip(chosen_logp - ref_chosen_logp, rejected_logp - ref_rejected_logp, chosen_logp, rejected_logp,
            strict=True)
        of_pair, hyper = preference_loops.PAPER[name], preference_loops.HYPER[name]
        return np.array([of_pair(dict(zip(("zc", "zr", "lc", "lr"), pair, strict=True)), hyper) for pair in facts])

    return f


def groups(name, **constants):
    def f(rewards, group):
        members = [[{"r": r} for r in rewards[(group == g) & (np.arange(len(group)) != i)]]
                   for i, g in enumerate(group)]
        return np.array([advantage_loops.advantage(name, {"r": r}, others, **constants)
                         for r, others in zip(rewards, members, strict=True)])

    return f


def loop(name, family, fn, *claims):
    return Right(fn, family, (*rows.claims_of(name, family), *claims), "numpy")


NUMPY = {
    **{name: loop(name, "policy_loss", without_reference(name))
       for name in ("lite_ppo", "dapo", "dr_grpo", "gspo", "sapo", "gmpo", "ppo_dual_clip")},
    "grpo": loop("grpo", "policy_loss", with_reference("grpo")),
    **{name: loop(name, "preference", pairs(name))
       for name in ("dpo", "cdpo", "robust_dpo", "ipo_sum", "rso_hinge", "nca", "bco_pair", "apo_zero")},
    "centred": Right(groups("centred"), "group_advantage", ("sums_to_zero", "scale_equivariance"), "numpy"),
    "leave_one_out": Right(groups("leave_one_out"), "group_advantage",
        ("leave_one_out_independence", "scale_equivariance", "singleton_zero"), "numpy"),
    "standardised": Right(groups("standardised"), "group_advantage", ("scale_invariance", "sums_to_zero"), "numpy"),
}
