"""Small transformers behind a pure-function boundary: `make_model(ModelConfig(...))`."""

from jaxpt.models.config import ModelConfig
from jaxpt.models.make import Cache, Model, make_model, stack_layers, unstack_layers

__all__ = ["Cache", "Model", "ModelConfig", "make_model", "stack_layers", "unstack_layers"]
