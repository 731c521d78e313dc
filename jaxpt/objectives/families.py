"""Families: what the objectives of one kind take and give back.

A family names the arguments of its rows' losses in order, what stands in each, which mask says where it counts, and
which of them are constants of the loss, so that one battery of tests and one probe batch serve every row.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Arg(NamedTuple):
    axes: str  # B rows (of pairs: pairs), T tokens, K candidates of one prompt, V vocabulary
    kind: str  # logp, logits, score, advantage, label, token, mask, length, count, group
    mask: str = ""  # the argument that says which slots count
    constant: bool = False  # the loss's gradient with respect to it is exactly 0
    optional: str = ""  # only rows whose `needs` name this are given it


class Family(NamedTuple):
    args: Mapping[str, Arg]
    returns: str = "a scalar and {metric: (sum, weight)}"


FAMILIES = {
    "policy_loss": Family({
        "logp": Arg("BT", "logp", "mask"),
        "old_logp": Arg("BT", "logp", "mask", constant=True),
        "advantages": Arg("BT", "advantage", "mask", constant=True),
        "mask": Arg("BT", "mask"),
        "ref_logp": Arg("BT", "logp", "mask", constant=True, optional="ref_logp"),
        "entropy": Arg("BT", "score", "mask", optional="entropy"),
        "vocab_kl": Arg("BT", "count", "mask", optional="vocab_kl"),  # of each decision, over the whole vocabulary
        "sampler_logp": Arg("BT", "logp", "mask", constant=True, optional="sampler_logp"),
        "weights": Arg("BT", "count", "mask", constant=True, optional="weights"),
        "prompt_tokens": Arg("B", "count", constant=True, optional="prompt_tokens"),
    }),
    "preference": Family({  # one pair of responses a row
        "chosen_logp": Arg("BT", "logp", "chosen_mask"),
        "rejected_logp": Arg("BT", "logp", "rejected_mask"),
        "chosen_mask": Arg("BT", "mask"),
        "rejected_mask": Arg("BT", "mask"),
        "ref_chosen_logp": Arg("BT", "logp", "chosen_mask", constant=True, optional="ref_logp"),
        "ref_rejected_logp": Arg("BT", "logp", "rejected_mask", constant=True, optional="ref_logp"),
        # log sum_v pi(v)^2 of each decision: the chance that two draws agree, at most 0 like a logp
        "chosen_collision": Arg("BT", "logp", "chosen_mask", constant=True, optional="collision"),
        "rejected_collision": Arg("BT", "logp", "rejected_mask", constant=True, optional="collision"),
    }),
    "unpaired": Family({  # one response a row, desirable or not
        "logp": Arg("BT", "logp", "mask"),
        "desirable": Arg("B", "label"),
        "mask": Arg("BT", "mask"),
        "ref_logp": Arg("BT", "logp", "mask", constant=True, optional="ref_logp"),
        # responses behind prompts they were not written for (pairs.mismatched); only prepare looks at them
        "kl_logp": Arg("BT", "logp", "kl_mask", constant=True, optional="kl_logp"),
        "kl_ref_logp": Arg("BT", "logp", "kl_mask", constant=True, optional="kl_logp"),
        "kl_mask": Arg("BT", "mask", optional="kl_logp"),
    }),
    "reward_pair": Family({
        "chosen_score": Arg("B", "score", "mask"),
        "rejected_score": Arg("B", "score", "mask"),
        "mask": Arg("B", "mask"),
        "margin": Arg("B", "count", "mask", constant=True, optional="margin"),
    }),
    "reward_ranking": Family({  # candidates of one prompt, the best first
        "scores": Arg("BK", "score", "mask"),
        "mask": Arg("BK", "mask"),
    }),
    "reward_step": Family({  # a score for every step; one step a row for outcome models
        "scores": Arg("BT", "score", "mask"),
        "labels": Arg("BT", "label", "mask", constant=True),
        "mask": Arg("BT", "mask"),
    }),
    "distillation": Family({
        "student_logits": Arg("BTV", "logits", "mask"),
        "teacher_logits": Arg("BTV", "logits", "mask", constant=True),
        "mask": Arg("BT", "mask"),
    }),
    "supervised": Family({
        "logits": Arg("BTV", "logits", "mask"),
        "tokens": Arg("BT", "token", "mask"),
        "mask": Arg("BT", "mask"),
        "weights": Arg("BT", "count", "mask", constant=True, optional="weights"),
    }),
    "length_shaping": Family({
        "length": Arg("B", "length"),
        "reward": Arg("B", "count", constant=True),
        "target": Arg("B", "length", constant=True, optional="target"),  # tokens that were asked for
        "group": Arg("B", "group", optional="group"),
    }, returns="what is added to the reward, [B]"),
}
