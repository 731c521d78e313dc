"""Families: what a function of one kind takes and gives back. Imports nothing, so that lists are instant.

Arguments are positional in this order. Axes: B rows, N samples or pairs, T tokens, S = T - 1, V vocabulary, E experts,
K experts a token is sent to. Every array has a leading axis of examples in the code of the verifier, none in the
function that is verified.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Arg(NamedTuple):
    kind: str  # how it is drawn, generators.KINDS; and how it is made simpler, shrink.SIMPLE
    axes: str
    mask: str = ""  # the argument that says which slots count
    moving: bool = False  # the gradient with respect to it is looked at
    like: str = ""  # the argument that it is drawn near to


class Family(NamedTuple):
    args: Mapping[str, Arg]
    returns: str  # axes of the result, "" a scalar; "?" a scalar or one number a row
    sizes: tuple[Mapping[str, int], ...]  # the shapes that examples have
    optional: Mapping[str, Arg] = {}  # given by keyword where the function has such a parameter

    def arg(self, name: str) -> Arg:
        return self.args[name] if name in self.args else self.optional[name]


LOGP = Arg("logp", "BT", "mask", moving=True)
NEAR = Arg("near", "BT", "mask", like="logp")
MASK = Arg("mask", "BT")
SMALL, LARGE = {"B": 2, "T": 3}, {"B": 3, "T": 5}
BOTH = (SMALL, LARGE)
SUMS = {"N": 3}

FAMILIES = {
    "policy_loss": Family(
        {"logp": LOGP, "old_logp": NEAR, "advantages": Arg("advantage", "BT", "mask"), "mask": MASK}, "", BOTH,
        {"group": Arg("label", "B"), "totals": Arg("totals", ""), "key": Arg("key", ""), "ref_logp": NEAR,
         "entropy": Arg("positive", "BT", "mask"), "vocab_kl": Arg("positive", "BT", "mask"), "sampler_logp": NEAR,
         "weights": Arg("positive", "BT", "mask"),
         "prompt_tokens": Arg("prompt_tokens", "B")},
    ),
    "kl": Family(
        {"logp": Arg("logp", "BT", moving=True), "ref_logp": Arg("near", "BT", like="logp")}, "BT", BOTH,
        {"old_logp": Arg("near", "BT", like="logp")},
    ),
    "kl_penalty_loss": Family(
        {"logp": LOGP, "ref_logp": NEAR, "mask": MASK}, "", BOTH, {"totals": Arg("totals", "")}
    ),
    "aggregate": Family(
        {"per_token": Arg("score", "BT", "mask", moving=True), "mask": MASK}, "", BOTH,
        {"totals": Arg("totals", ""), "group": Arg("label", "B")},
    ),
    "accumulate": Family(
        {"per_token": Arg("score", "BT", "mask", moving=True), "mask": MASK, "micro": Arg("label", "B")}, "", BOTH,
        {"totals": Arg("totals", "")},
    ),
    "group_advantage": Family({"rewards": Arg("reward", "B"), "group": Arg("label", "B")}, "B", ({"B": 8},)),
    "gae": Family(
        {"rewards": Arg("kept_score", "BT", "mask"), "values": Arg("score", "BT", "mask"), "mask": MASK,
         "gamma": Arg("discount", ""), "lam": Arg("discount", "")}, "BT", BOTH,
    ),
    "returns": Family(
        {"rewards": Arg("kept_score", "BT", "mask"), "mask": MASK, "gamma": Arg("discount", "")}, "BT", BOTH
    ),
    "whiten": Family({"x": Arg("score", "BT", "mask"), "mask": MASK}, "BT", ({"B": 3, "T": 4},)),
    "logprobs": Family(
        {"logits": Arg("logits", "BTV", moving=True), "tokens": Arg("token", "BT")}, "BS", ({"B": 2, "T": 3, "V": 4},),
        {"temperature": Arg("one", "")},
    ),
    "entropy": Family(
        {"logits": Arg("logits", "BTV", moving=True)}, "BT", ({"B": 2, "T": 2, "V": 4},),
            {"temperature": Arg("one", "")}
    ),
    "value_loss": Family(
        {"values": Arg("score", "BT", "mask", moving=True),
        "old_values": Arg("near_score", "BT", "mask", like="values"),
         "returns": Arg("score", "BT", "mask"), "mask": MASK}, "", BOTH, {"totals": Arg("totals", "")},
    ),
    "preference": Family(
        {"chosen_logp": Arg("sum_logp", "N", moving=True), "rejected_logp": Arg("sum_logp", "N", moving=True),
         "ref_chosen_logp": Arg("near_sum", "N", like="chosen_logp"),
         "ref_rejected_logp": Arg("near_sum", "N", like="rejected_logp")}, "?", (SUMS,),
    ),
    "preference_tokens": Family(
        {"chosen_logp": Arg("logp", "NT", "chosen_mask", moving=True),
         "rejected_logp": Arg("logp", "NT", "rejected_mask", moving=True),
         "chosen_mask": Arg("mask", "NT"), "rejected_mask": Arg("mask", "NT")}, "",
             ({"N": 2, "T": 3}, {"N": 3, "T": 5}),
        {"ref_chosen_logp": Arg("near", "NT", "chosen_mask", like="chosen_logp"),
         "ref_rejected_logp": Arg("near", "NT", "rejected_mask", like="rejected_logp")},
    ),
    "kto": Family(
        {"logp": Arg("sum_logp", "N", moving=True), "ref_logp": Arg("near_sum", "N", like="logp"),
        "desirable": Arg("choice", "N"),
         "kl_logp": Arg("sum_logp", "N"), "kl_ref_logp": Arg("near_sum", "N", like="kl_logp")}, "", ({"N": 4},),
    ),
    "reward_model": Family(
        {"chosen_score": Arg("score", "N", moving=True), "rejected_score": Arg("score", "N", moving=True)}, "", (SUMS,),
        {"margin": Arg("positive", "N")},
    ),
    "distillation": Family(
        {"student_logits": Arg("logits", "BTV", "mask", moving=True), "teacher_logits": Arg("logits", "BTV", "mask"),
         "mask": MASK}, "", ({"B": 2, "T": 2, "V": 4}, {"B": 3, "T": 3, "V": 6}),
        {"totals": Arg("totals", ""), "beta": Arg("share", "")},
    ),
    "length_shaping": Family(
        {"length": Arg("length", "N"), "max_length": Arg("limit", ""), "buffer": Arg("buffer", "")}, "N", ({"N": 6},)
    ),
    "router_balance": Family(
        {"router_probs": Arg("probabilities", "NE", moving=True), "expert_index": Arg("experts", "NK")}, "",
        ({"N": 4, "E": 3, "K": 2}, {"N": 5, "E": 4, "K": 1}),
    ),
}

# A loss that is summed over devices by itself names the axis by this parameter; its default, None, is no axis.
AXIS = "axis_name"


def masks(family: Family) -> list[str]:
    return [name for name, arg in family.args.items() if arg.kind == "mask"]
