"""Losses of comparisons: preferences, desirable or not, scores of a reward model."""

import numpy as np
from exhibit import Exhibit


def softplus(x):
    return np.logaddexp(0, x)


def sigmoid(x):
    return np.exp(-softplus(-x))


def sums(x, mask):
    return np.where(mask > 0, x, 0).sum(1)


def means(x, mask):
    return sums(x, mask) / np.maximum((mask > 0).sum(1), 1)


def bare_means(x, mask):
    return sums(x, mask) / (mask > 0).sum(1)


# --- IPO and ORPO, of tokens


def ipo(chosen, rejected, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp, score=means):
    of_chosen = score(chosen, chosen_mask) - score(ref_chosen_logp, chosen_mask)
    of_rejected = score(rejected, rejected_mask) - score(ref_rejected_logp, rejected_mask)
    return ((of_chosen - of_rejected - 5) ** 2).mean()  # 1 / (2 tau)


def ipo_of_sums(chosen, rejected, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp):
    return ipo(chosen, rejected, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp, sums)


def ipo_of_nothing(chosen, rejected, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp):
    return ipo(chosen, rejected, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp, bare_means)


def log_odds(logp):
    logp = np.minimum(logp, -1e-6)
    return logp - np.log(-np.expm1(logp))


def orpo(chosen, rejected, chosen_mask, rejected_mask, score=means):
    return softplus(log_odds(score(rejected, rejected_mask)) - log_odds(score(chosen, chosen_mask))).mean()


def orpo_of_sums(chosen, rejected, chosen_mask, rejected_mask):
    return orpo(chosen, rejected, chosen_mask, rejected_mask, sums)


def odds_that_cancel(chosen, rejected, chosen_mask, rejected_mask):
    def careless(logp):
        logp = logp.astype(np.float32)
        return logp - np.log1p(-np.exp(logp))

    return softplus(careless(means(rejected, rejected_mask)) - careless(means(chosen, chosen_mask))).mean()


# --- DPO


def dpo_tokens(chosen, rejected, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp):
    of_chosen = sums(chosen, chosen_mask) - sums(ref_chosen_logp, chosen_mask)
    of_rejected = sums(rejected, rejected_mask) - sums(ref_rejected_logp, rejected_mask)
    return softplus(-0.1 * (of_chosen - of_rejected)).mean()


def mask_inside_out(chosen, rejected, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp):
    """What is to be ignored is kept, and the chosen's mask stands over the rejected too."""
    margin = ((chosen - ref_chosen_logp - rejected + ref_rejected_logp) * (1 - chosen_mask)).mean(1)
    return softplus(-0.1 * margin).mean()


def first_token_left_out(chosen, rejected, chosen_mask, rejected_mask, ref_chosen_logp, ref_rejected_logp):
    later = [mask * (np.cumsum(mask > 0, axis=1) > 1) for mask in (chosen_mask, rejected_mask)]
    return dpo_tokens(chosen, rejected, *later, ref_chosen_logp, ref_rejected_logp)


def dpo(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp):
    return softplus(-0.1 * (chosen_logp - ref_chosen_logp - rejected_logp + ref_rejected_logp))


def no_reference(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp):
    return softplus(-0.1 * (chosen_logp - rejected_logp))


# --- KTO


def kto_at(reference_point, logp, ref_logp, desirable):
    gain = 0.1 * (logp - ref_logp - reference_point)
    return np.mean(1 - sigmoid(np.where(desirable > 0, gain, -gain)))


def kto(logp, ref_logp, desirable, kl_logp, kl_ref_logp):
    return kto_at(max((kl_logp - kl_ref_logp).mean(), 0), logp, ref_logp, desirable)


def kto_of_an_empty_stream(logp, ref_logp, desirable, kl_logp, kl_ref_logp):
    """The mismatched pairs are those rows of the batch that are not desirable."""
    return kto_at(np.maximum((kl_logp - kl_ref_logp)[desirable == 0].mean(), 0), logp, ref_logp, desirable)


# --- reward models


def bradley_terry(chosen_score, rejected_score, margin):
    return softplus(rejected_score - chosen_score + margin).mean()


def log_of_one_plus_exp(chosen_score, rejected_score, margin):
    return np.log(1 + np.exp(rejected_score - chosen_score + margin)).mean()


def margins_of_all_pairs(chosen_score, rejected_score, margin):
    """Scores [N, 1] and margins [N] make [N, N]."""
    return softplus((rejected_score - chosen_score)[:, None] + margin).mean()


EXHIBITS = [
    Exhibit("IPO of summed log-probabilities depends on lengths.", "TRL #1265, #1677; torchtune #1291",
            "preference_tokens", "length_normalised", ipo_of_sums, ipo, ("length_normalised",)),
    Exhibit("A response that was truncated to nothing: 0/0.", "TRL #1033; open-instruct #1625",
            "preference_tokens", "all_masked", ipo_of_nothing, ipo, ("length_normalised",)),
    Exhibit("Odds of summed log-probabilities.", "google-tunix 0.1.7, ORPO",
            "preference_tokens", "length_normalised", orpo_of_sums, orpo, ("length_normalised",)),
    Exhibit("log1p(-exp(x)) of an x near 0 is -inf in float32.",
            "TRL #1473, #2564, #3237; axolotl #3910; ColossalAI #6407",
            "preference_tokens", "finite", odds_that_cancel, orpo, ("length_normalised",)),
    Exhibit("The mask is inside out.", "CosyVoice #1449",
            "preference_tokens", "mask_poison", mask_inside_out, dpo_tokens),
    Exhibit("The mask begins one token late.", "minimind #621",
            "preference_tokens", "descends", first_token_left_out, dpo_tokens),
    Exhibit("DPO without its reference.", "Liger-Kernel #387",
            "preference", "reference_matters", no_reference, dpo),
    Exhibit("The reference point is the mean of an empty set.", "TRL #1380, #1402",
            "kto", "one_kind", kto_of_an_empty_stream, kto),
    Exhibit("log(1 + exp(x)) overflows.", "OpenRLHF 0.11.2, LogExpLoss",
            "reward_model", "finite", log_of_one_plus_exp, bradley_terry),
    Exhibit("Every pair meets every margin.", "ms-swift #9927",
            "reward_model", "partition", margins_of_all_pairs, bradley_terry),
]
