"""Policy losses: ratios, clips, reductions that were meant otherwise; value losses and length rewards."""

import jax
import jax.numpy as jnp
import numpy as np
from exhibit import Exhibit
from jax.lax import stop_gradient

BUDGET = 8
DROPOUT = np.random.default_rng(0)


def ratio(logp, old_logp, on):
    return np.exp(np.clip(np.where(on, logp - old_logp, 0), -20, 20))


def clipped(logp, old_logp, advantages, mask):
    """PPO's loss of every token, 0 where nothing counts."""
    on = mask > 0
    a, r = np.where(on, advantages, 0), ratio(logp, old_logp, on)
    return np.where(on, -np.minimum(r * a, np.clip(r, 0.8, 1.2) * a), 0)


def ppo(logp, old_logp, advantages, mask):
    return clipped(logp, old_logp, advantages, mask).sum() / max((mask > 0).sum(), 1)


def grpo(logp, old_logp, advantages, mask):
    on = mask > 0
    rows = clipped(logp, old_logp, advantages, mask).sum(1) / np.maximum(on.sum(1), 1)
    return rows.sum() / max(on.any(1).sum(), 1)


def dr_grpo(logp, old_logp, advantages, mask):
    return clipped(logp, old_logp, advantages, mask).sum() / (BUDGET * len(mask))


def dr_grpo_by_the_width(logp, old_logp, advantages, mask):
    return clipped(logp, old_logp, advantages, mask).sum() / mask.size


def dr_grpo_by_the_tokens(logp, old_logp, advantages, mask):
    return ppo(logp, old_logp, advantages, mask)


def grpo_by_the_tokens(logp, old_logp, advantages, mask):
    return ppo(logp, old_logp, advantages, mask)


def cispo(logp, old_logp, advantages, mask):
    on = mask > 0
    logp, old_logp, a = (jnp.where(on, x, 0) for x in (logp, old_logp, advantages))
    weight = stop_gradient(jnp.clip(jnp.exp(jnp.clip(logp - old_logp, -20, 20)), 0.8, 1.28))
    return jnp.sum(-weight * a * logp) / jnp.maximum(jnp.sum(on), 1)


def cispo_masked_behind(logp, old_logp, advantages, mask):
    """The value is clean: NaN meets a cotangent of 0 on the way back."""
    weight = stop_gradient(jnp.clip(jnp.exp(jnp.clip(logp - old_logp, -20, 20)), 0.8, 1.28))
    return jnp.sum(jnp.where(mask > 0, -weight * advantages * logp, 0)) / jnp.maximum(jnp.sum(mask > 0), 1)


def infinite_weight_times_zero(logp, old_logp, advantages, mask, sampler_logp):
    """Tokens whose weight is above 2 are rejected by a factor of 0."""
    on = mask > 0
    weight = np.exp(np.where(on, old_logp - sampler_logp, 0))
    loss = clipped(logp, old_logp, advantages, mask) * weight * (weight <= 2)
    return loss.sum() / max(on.sum(), 1)


def weight_rejected(logp, old_logp, advantages, mask, sampler_logp):
    on = mask > 0
    gap = np.where(on, old_logp - sampler_logp, 0)
    weight = np.where(gap <= np.log(2), np.exp(np.minimum(gap, 1)), 0)
    return (clipped(logp, old_logp, advantages, mask) * weight).sum() / max(on.sum(), 1)


def rejected_in_the_denominator(logp, old_logp, advantages, mask, sampler_logp):
    """Tokens that the sampler would hardly have drawn are rejected, and counted."""
    on = mask > 0
    rejected = np.where(on, old_logp - sampler_logp, 0) > 2
    return clipped(logp, old_logp, advantages, on & ~rejected).sum() / max(on.sum(), 1)


def rejected_not_counted(logp, old_logp, advantages, mask, sampler_logp):
    on = mask > 0
    return ppo(logp, old_logp, advantages, on & (np.where(on, old_logp - sampler_logp, 0) <= 2))


def advantage_of_the_last_step(logp, old_logp, advantages, mask):
    """A trajectory's advantage is laid over the mask of its last turn: the run of tokens at the end."""
    last = np.zeros_like(mask)
    for i, row in enumerate(mask > 0):
        t = np.flatnonzero(row)[-1] if row.any() else -1
        while t >= 0 and row[t]:
            last[i, t], t = 1, t - 1
    return ppo(logp, old_logp, np.where(last > 0, advantages, 0), mask)


def shifted_by_one(logp, old_logp, advantages, mask):
    return ppo(np.roll(logp, -1, axis=1), old_logp, advantages, mask)


def reinforce(logp, old_logp, advantages, mask):
    """The ratio of whole sequences, and one advantage for them."""
    on = mask > 0
    change = np.clip(np.where(on, logp - old_logp, 0).sum(1), -20, 20)
    a = np.where(on, advantages, 0).sum(1) / np.maximum(on.sum(1), 1)
    return -(a * np.exp(change) * on.any(1)).sum() / max(on.any(1).sum(), 1)


def sum_of_ratios(logp, old_logp, advantages, mask):
    on = mask > 0
    a = np.where(on, advantages, 0).sum(1) / np.maximum(on.sum(1), 1)
    return -(a * np.where(on, ratio(logp, old_logp, on), 0).sum(1)).sum() / max(on.any(1).sum(), 1)


def baseline_of_the_stopping_time(logp, old_logp, advantages, mask):
    """A turn's baseline is made of the rows that are still there: it depends on how long a row goes on."""
    going_on = (mask > 0).sum(1, keepdims=True)
    return reinforce(logp, old_logp, advantages - 0.4 * going_on, mask)


def dual(logp, old_logp, advantages, mask, where):
    on = mask > 0
    a = np.where(on, advantages, 0)
    r = ratio(logp, old_logp, on)
    gain = np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)
    return -np.where(on, np.where(where(a), np.maximum(gain, 3 * a), gain), 0).sum() / max(on.sum(), 1)


def dual_clip_of_every_sign(logp, old_logp, advantages, mask):
    return dual(logp, old_logp, advantages, mask, lambda a: np.full(a.shape, True))


def dual_clip(logp, old_logp, advantages, mask):
    return dual(logp, old_logp, advantages, mask, lambda a: a < 0)


def dropout_left_on(logp, old_logp, advantages, mask):
    return ppo(logp - 0.1 * (DROPOUT.random(logp.shape) < 0.1), old_logp, advantages, mask)


def gradient_into_the_old_policy(logp, old_logp, advantages, mask):
    on = mask > 0
    change, a = jnp.where(on, logp - old_logp, 0), jnp.where(on, advantages, 0)
    ratio = jnp.exp(jnp.clip(change, -20, 20))
    return -jnp.sum(jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)) / jnp.maximum(jnp.sum(on), 1)


def old_policy_detached(logp, old_logp, advantages, mask):
    return gradient_into_the_old_policy(logp, stop_gradient(old_logp), stop_gradient(advantages), mask)


# --- values


def value_loss(values, old_values, returns, mask, pick=jnp.maximum):
    on = mask > 0
    v, old, r = (jnp.where(on, x, 0) for x in (values, old_values, returns))
    errors = pick((v - r) ** 2, (old + jnp.clip(v - old, -0.2, 0.2) - r) ** 2)
    return 0.5 * jnp.sum(errors) / jnp.maximum(jnp.sum(on), 1)


def optimistic_value_clip(values, old_values, returns, mask):
    return value_loss(values, old_values, returns, mask, jnp.minimum)


def squares(error):
    return error**2 / 2


@jax.custom_vjp
def fused_squares(error):
    return squares(error)


def backward(error, weights):
    """The weights that a token's loss is multiplied by later on are read as if they were one number."""
    return (weights.ravel()[0] * error,)


fused_squares.defvjp(lambda error: (squares(error), error), backward)


def regression(values, old_values, returns, mask, of_token=squares):
    on = mask > 0
    v, r = (jnp.where(on, x, 0) for x in (values, returns))
    return jnp.sum(of_token(v - r) * on / jnp.maximum(jnp.sum(on), 1))


def backward_pass_of_its_own(values, old_values, returns, mask):
    return regression(values, old_values, returns, mask, fused_squares)


def every_return_meets_every_value(values, old_values, returns, mask):
    """Values [B] and returns [B, 1] make [B, B]."""
    v, r = (jnp.where(mask > 0, x, 0) for x in (values, returns))
    kept = (mask > 0)[:, None] & (mask > 0)[None]
    return 0.5 * jnp.sum(jnp.where(kept, (v[:, None] - r[None]) ** 2, 0)) / jnp.maximum(jnp.sum(kept), 1)


# --- lengths


def characters_counted(length, max_length, buffer):
    return np.minimum((max_length - buffer - 4 * length) / buffer, 0)


def without_a_floor(length, max_length, buffer):
    return np.minimum((max_length - buffer - length) / buffer, 0)


def soft_overlong(length, max_length, buffer):
    return np.clip((max_length - buffer - length) / buffer, -1, 0)


UNBIASED = ("gradient_of_expected_reward", "gradient_off_policy")

EXHIBITS = [
    Exhibit("Dr. GRPO's constant is the width that a batch happens to be padded to.",
            "verl 0.9.1, seq-mean-token-sum-norm; google-tunix 0.1.7",
            "policy_loss", "padding", dr_grpo_by_the_width, dr_grpo, ("fixed_budget",)),
    Exhibit("Dr. GRPO divides by the batch's tokens.", "TRL #3138, #3178, #3256",
            "policy_loss", "fixed_budget", dr_grpo_by_the_tokens, dr_grpo, ("fixed_budget",)),
    Exhibit("GRPO's mean over sequences is one over tokens.", "TRL #2995",
            "policy_loss", "sequence_mean", grpo_by_the_tokens, grpo, ("sequence_mean",)),
    Exhibit("Masked behind the product: a finite loss, NaN in the gradient.",
            "verl 0.9.1, cispo under token-mean",
            "policy_loss", "mask_poison", cispo_masked_behind, cispo, framework="jax"),
    Exhibit("An infinite weight is rejected by a product with 0.", "OpenRLHF #1295",
            "policy_loss", "finite", infinite_weight_times_zero, weight_rejected, ("batch_coupled",)),
    Exhibit("Rejected tokens stay in the denominator.", "verl #3915; slime #657",
            "policy_loss", "rejected_not_counted", rejected_in_the_denominator, rejected_not_counted,
            ("rejected_not_counted", "token_mean", "batch_coupled")),
    Exhibit("Earlier steps of a trajectory get an advantage of 0.", "SkyRL #1492, #1507",
            "policy_loss", "on_policy", advantage_of_the_last_step, ppo),
    Exhibit("The trainer's log-probabilities stand one token off the sampler's.",
            "prime-rl #1525; gpt-neox #1285",
            "policy_loss", "on_policy", shifted_by_one, ppo),
    Exhibit("A sequence's ratio is the sum of its tokens' ratios.", "unsloth-zoo #870",
            "policy_loss", "gradient_off_policy", sum_of_ratios, reinforce, UNBIASED),
    Exhibit("A baseline that knows when the row stops is a hidden bonus.", "verl #7244",
            "policy_loss", "gradient_of_expected_reward", baseline_of_the_stopping_time, reinforce, UNBIASED),
    Exhibit("The dual clip has lost its condition.", "tianshou #433",
            "policy_loss", "dual_clip_negative_only", dual_clip_of_every_sign, dual_clip,
            ("dual_clip_negative_only",)),
    Exhibit("The clip makes the error smaller.", "ray #2233",
            "value_loss", "pessimistic", optimistic_value_clip, value_loss, ("pessimistic", "half_square"),
            "jax"),
    Exhibit("Dropout is on while the ratio is taken.", "TRL #744, #3234; trlX #107",
            "policy_loss", "same_twice", dropout_left_on, ppo),
    Exhibit("Gradient flows into the old policy's log-probabilities.", "miles #1832, #1966",
            "policy_loss", "declared_constants", gradient_into_the_old_policy, old_policy_detached,
            ("declared_constants",), "jax"),
    Exhibit("A fused loss has a backward pass of its own, which reads one token's weight for all.",
            "Liger-Kernel #968, #1298",
            "value_loss", "gradient_of_value", backward_pass_of_its_own, regression,
            ("gradient_of_value", "non_negative", "half_square"), "jax"),
    Exhibit("Every value is trained on every return.", "RLinf #1568",
            "value_loss", "zero_at_target", every_return_meets_every_value, value_loss,
            ("pessimistic", "half_square"), "jax"),
    Exhibit("Characters are counted for tokens.", "google-tunix 0.1.7, dapo_learner",
            "length_shaping", "free_below", characters_counted, soft_overlong, ("linear_slope",)),
    Exhibit("The length penalty has no floor.", "verl 0.9.1, the DAPO reward manager",
            "length_shaping", "length_range", without_a_floor, soft_overlong, ("linear_slope",)),
]
