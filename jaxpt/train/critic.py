"""The critic: its own decoder with a scalar head, or a head on the policy's hidden states."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpt.models import Model, ModelConfig, make_model
from jaxpt.models.heads import at_end, init_head, scores
from jaxpt.train.optim import OptimConfig
from jaxpt.types import Array, Params

TRUNKS = ("own", "shared")


@dataclass(frozen=True)
class CriticConfig:
    trunk: str = "own"  # "shared": the value loss also trains the policy's layers
    model: ModelConfig | None = None  # of an own trunk; None: the policy's, begun from the policy's parameters
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3))

    def __post_init__(self):
        if self.trunk not in TRUNKS:
            raise ValueError(f"trunk: got {self.trunk!r}, expected one of {', '.join(TRUNKS)}")
        if self.trunk == "shared" and self.model is not None:
            raise ValueError("model: a shared trunk is the policy's, expected None")


def init_critic(cfg: CriticConfig, policy: ModelConfig, params: Params, key: Array) -> Params:
    """Parameters of a critic that says 0 everywhere."""
    width = (cfg.model or policy).d_model
    head = {"head": init_head(width)}
    if cfg.trunk == "shared":
        return head
    # A copy: the state is donated, and one buffer must not be given away twice.
    trunk = jax.tree.map(jnp.copy, params) if cfg.model is None else make_model(cfg.model).init(key)
    return {**head, "trunk": trunk}


def critic_values(
    cfg: CriticConfig, policy: Model, critic: Params, hidden: Array, tokens: Array, length: Array
) -> tuple[Array, Array]:
    """V before each token's decision [B,T] (0 at index 0), and behind the last token [B].

    hidden [B,T,D]: the policy's, for a shared trunk.
    """
    if cfg.trunk == "own":
        model = policy if cfg.model is None else make_model(cfg.model)
        hidden, _ = model.forward(critic["trunk"], tokens)
    behind = scores(critic["head"], hidden)  # V of the state behind each token
    return jnp.pad(behind[:, :-1], ((0, 0), (1, 0))), at_end(behind, length)
