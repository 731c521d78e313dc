"""Small transformers behind a pure-function boundary: `make_model(ModelConfig(...))`."""

from jaxpt.models.config import LoraConfig, ModelConfig, MoeConfig, RopeScaling, fine_grained
from jaxpt.models.make import Cache, Model, make_model, stack_layers, unrolled, unstack_layers

__all__ = [
    "Cache", "LoraConfig", "Model", "ModelConfig", "MoeConfig", "RopeScaling", "fine_grained", "make_model", "stack_layers",
    "unrolled", "unstack_layers",
]
