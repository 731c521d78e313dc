"""A function of another library as a member of a family of the verifier, with what its own name, docstring or comments
claim and what it is by hand (by_hand.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import cases_policy
import cases_terms

CORE, SKYRL = cases_terms.CORE, cases_policy.SKYRL_AT
VERL_F, OPENRLHF, UTILS = "verl.utils.torch_functional", "openrlhf.models.loss", "openrlhf.models.utils"
MAKER, TUNIX = "openrlhf.trainer.ppo_utils.experience_maker", "tunix.rl.algo_core"
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
