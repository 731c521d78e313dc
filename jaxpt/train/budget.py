"""What an update costs in FLOPs of matrix products, so that arms can be compared at equal cost.

Rollouts are counted at full response length, although a batch that ends early stops early; a backward pass
counts as two forward passes, as the products of its gradients do.
"""

from jaxpt.envs.protocol import Spec
from jaxpt.models import ModelConfig
from jaxpt.models.counts import extend_flops, forward_flops
from jaxpt.rollout.generate import whole_strides


def update_flops(model: ModelConfig, spec: Spec, rows: int) -> int:
    """Forward and backward over `rows` whole rows, logits included."""
    return 3 * scoring_flops(model, spec, rows)


def scoring_flops(model: ModelConfig, spec: Spec, rows: int) -> int:
    """One forward pass with the logits of every decision (a reference's share of an update)."""
    width = spec.prompt_len + spec.response_len
    logits = 2 * rows * (width - 1) * model.d_model * model.vocab
    return forward_flops(model, rows, width) + logits


def value_flops(model: ModelConfig, spec: Spec, rows: int) -> int:
    """One forward pass of a critic with a trunk of its own, the head included."""
    width = spec.prompt_len + spec.response_len
    return forward_flops(model, rows, width) + 2 * rows * width * model.d_model


def rollout_flops(model: ModelConfig, spec: Spec, prompts: int, group: int) -> int:
    """Shared prefill of the prompts, then cached decoding of every row."""
    steps = whole_strides(spec.response_len)
    size = spec.prompt_len + steps
    rows = prompts * group
    decode = extend_flops(model, rows, 1, size) + 2 * rows * model.d_model * model.vocab
    return extend_flops(model, prompts, spec.prompt_len, size) + steps * decode
