"""Waivers: claims that say why some laws of mathematics are not meant to hold of a function."""

from typing import NamedTuple

WAIVER = "waiver"


class Waiver(NamedTuple):
    name: str
    families: tuple[str, ...]
    laws: tuple[str, ...]
    statement: str


WAIVERS = (
    Waiver("batch_coupled", ("policy_loss", "group_advantage", "preference", "preference_tokens", "kto"),
           ("partition", "duplication", "on_policy", "groups_apart", "pairs_apart"),
           "Tokens or rows are chosen or normalised over the whole batch."),
    Waiver("weighted", ("policy_loss",), ("on_policy",),
        "Tokens weigh by something else than their number, such as an entropy."),
    Waiver("ranked", ("preference", "preference_tokens"), ("row_permutation",),
           "Rows are sorted by what they are worth: the gradient of equal ones depends on their order."),
    Waiver("bumpy_link", ("preference", "preference_tokens"), ("descends",),
        "The loss rises with the margin around 0."),
    Waiver("reference_free", ("preference",), ("reference_matters",), "The loss has no reference."),
    Waiver("reference_point_free", ("kto",), ("reference_point_matters",),
        "The reference point is no KL of mismatched pairs."),
    Waiver("reward_has_a_zero", ("group_advantage",), ("shift_invariance",),
           "What the reward is measured from has a meaning: a success is above 0, or the mean divides."),
    Waiver("padded_width", ("policy_loss", "aggregate", "accumulate", "value_loss", "kl_penalty_loss"),
           ("padding",), "A contract law: see there."),
)
