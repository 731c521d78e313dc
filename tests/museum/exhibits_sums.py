"""Sums over tokens, their denominators, and what does not count."""

import jax
import jax.numpy as jnp
import numpy as np
from exhibit import Exhibit

BUDGET = 8  # tokens that a response may have


def total(x, mask):
    return np.where(mask > 0, x, 0).sum()


def tokens(mask):
    return max((mask > 0).sum(), 1)


def mean(x, mask):
    return total(x, mask) / tokens(mask)


def row_means(x, mask):
    """Of the rows with a token."""
    on = mask > 0
    return (np.where(on, x, 0).sum(1) / np.maximum(on.sum(1), 1))[on.any(1)]


def parts(per_token, mask, micro):
    return [(per_token[micro == m], mask[micro == m]) for m in np.unique(micro)]


# --- accumulation of micro-batches


def token_mean_accumulated(per_token, mask, micro):
    return mean(per_token, mask)


def mean_of_micro_means(per_token, mask, micro):
    return np.mean([mean(x, m) for x, m in parts(per_token, mask, micro)])


def weighted_by_sequences(per_token, mask, micro):
    return sum(len(x) / len(per_token) * mean(x, m) for x, m in parts(per_token, mask, micro))


def sequence_mean_per_micro(per_token, mask, micro):
    return np.mean([sequence_mean_accumulated(x, m, micro) for x, m in parts(per_token, mask, micro)])


def sequence_mean_accumulated(per_token, mask, micro):
    means = row_means(per_token, mask)
    return means.sum() / max(len(means), 1)


def generation_batch_in_the_denominator(per_token, mask, micro):
    """A window has two micro-batches; the tokens are those of all that were generated."""
    return mean(per_token, mask) * 2 / len(np.unique(micro))


def budget_without_rows(per_token, mask, micro):
    return np.mean([total(x, m) / BUDGET for x, m in parts(per_token, mask, micro)])


def budget_and_rows(per_token, mask, micro):
    return total(per_token, mask) / (BUDGET * len(per_token))


# --- reductions


def token_mean(per_token, mask):
    return mean(per_token, mask)


def truncated_in_the_denominator(per_token, mask):
    """A row's tokens end with the last one that counts: those before it are counted, summed or not."""
    ends = [np.flatnonzero(row)[-1] + 1 if row.any() else 0 for row in mask > 0]
    return total(per_token, mask) / max(sum(ends), 1)


def pads_in_the_scale(per_token, mask):
    return total(per_token, mask) / mask.size


def times_mask(per_token, mask):
    return jnp.sum(per_token * mask) / jnp.maximum(jnp.sum(mask), 1)


def where_mask(per_token, mask):
    return jnp.sum(jnp.where(mask > 0, per_token, 0)) / jnp.maximum(jnp.sum(mask), 1)


def mean_over_devices(per_token, mask, axis_name=None):
    mean = where_mask(per_token, mask)
    return mean if axis_name is None else jax.lax.pmean(mean, axis_name)


def counted_over_devices(per_token, mask, axis_name=None):
    sums = jnp.sum(jnp.where(mask > 0, per_token, 0)), jnp.sum(mask > 0)
    total, count = sums if axis_name is None else jax.lax.psum(sums, axis_name)
    return total / jnp.maximum(count, 1)


def nothing_over_nothing(per_token, mask):
    return total(per_token, mask) / (mask > 0).sum()


def end_of_text_taken_for_padding(per_token, mask):
    """The last token of a response has the id that pads have."""
    kept = mask > 0
    last = kept & (np.cumsum(kept[:, ::-1], axis=1)[:, ::-1] == 1)
    return mean(per_token, kept & ~last)


def writes_into_the_batch(per_token, mask):
    per_token[mask == 0] = 0
    return per_token.sum() / tokens(mask)


def cut_at_the_longest_prompt(per_token, mask):
    """Responses begin at different columns, and the sum at the last of these; the count knows all tokens."""
    start = max((np.flatnonzero(row)[0] for row in mask > 0 if row.any()), default=0)
    return total(per_token[:, start:], mask[:, start:]) / tokens(mask)


EXHIBITS = [
    Exhibit("Micro-batches weigh the same, whatever they hold.", "verl #906, #5625, #5641; ms-swift #10076",
            "accumulate", "assignment", mean_of_micro_means, token_mean_accumulated, ("token_mean",)),
    Exhibit("Micro-batches and ranks weigh by sequences, their means are over tokens.", "SkyRL #925, #1296",
            "accumulate", "assignment", weighted_by_sequences, token_mean_accumulated, ("token_mean",)),
    Exhibit("A mean over sequences for every micro-batch, and a mean over these.",
            "google-tunix 0.1.7, aggregate_loss",
            "accumulate", "assignment", sequence_mean_per_micro, sequence_mean_accumulated,
            ("sequence_mean",)),
    Exhibit("The tokens of the whole generation divide the loss of one accumulation window.",
            "TRL #5619, #6024, #5890",
            "accumulate", "unit_loss", generation_batch_in_the_denominator, token_mean_accumulated,
            ("token_mean",)),
    Exhibit("A fixed budget of tokens divides sums over micro-batches of any number of sequences.",
            "verl #3741, #4510",
            "accumulate", "assignment", budget_without_rows, budget_and_rows, ("fixed_budget",)),
    Exhibit("Truncated tokens leave the numerator and stay in the denominator.", "TRL #6369, #6439",
            "aggregate", "unit_loss", truncated_in_the_denominator, token_mean, ("token_mean",)),
    Exhibit("Padding counts in the scale of the loss.", "prime-rl #674, #583, #102",
            "aggregate", "padding", pads_in_the_scale, token_mean, ("token_mean",)),
    Exhibit("NaN * 0 is NaN.", "OpenRLHF #1240; verl #6349; SkyRL #1633",
            "aggregate", "mask_poison", times_mask, where_mask, framework="jax"),
    Exhibit("Ranks weigh the same, whatever they hold.", "SkyRL #925, #1296",
            "aggregate", "shard", mean_over_devices, counted_over_devices, ("token_mean",), "jax"),
    Exhibit("A micro-batch of which nothing is left: 0/0.", "TRL #5826, #5662, #3700",
            "aggregate", "all_masked", nothing_over_nothing, token_mean, ("token_mean",)),
    Exhibit("Padding is known by its id, which is that of the end of text too.",
            "TRL #4970; Megatron-Bridge #4660",
            "aggregate", "token_mean", end_of_text_taken_for_padding, token_mean, ("token_mean",)),
    Exhibit("Responses are sliced where the longest prompt ends.", "TRL #4719, #6006, #6478",
            "aggregate", "unit_loss", cut_at_the_longest_prompt, token_mean, ("token_mean",)),
    Exhibit("The mask is applied in place, to the caller's array.", "NeMo Automodel #3917, #3918",
            "aggregate", "inputs_untouched", writes_into_the_batch, token_mean, ("token_mean",)),
]
