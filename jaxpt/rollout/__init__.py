"""Generation: forced tokens, shared prefill, stored support."""

from jaxpt.rollout.complete import complete
from jaxpt.rollout.generate import demonstrate, generate

__all__ = ["complete", "demonstrate", "generate"]
