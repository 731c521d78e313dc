"""Generation: forced tokens, shared prefill, stored support."""

from jaxpt.rollout.generate import demonstrate, generate

__all__ = ["demonstrate", "generate"]
