"""ModelConfig: what fixes a transformer's shapes and arithmetic. Static: it never holds an array."""

from dataclasses import dataclass

from jaxpt.ops.dots import DOTS


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Raises ValueError, naming the field, when a value cannot be built."""

    vocab: int
    d_model: int = 32
    n_layers: int = 2
    n_heads: int = 2
    n_kv_heads: int | None = None  # key/value heads; None: n_heads
    d_ff: int | None = None  # hidden units of SwiGLU; None: 8/3 d_model, rounded up to a multiple of 8
    rope_theta: float = 10_000.0
    qk_norm: bool = False  # RMSNorm of queries and keys (Dehghani et al. 2023, arXiv:2302.05442)
    tied: bool = True  # the unembedding is the transposed embedding
    scan: bool = False  # one compiled layer, scanned: compiles faster when deep, runs slower when not
    dots: str = "float32"  # input type of matrix products, or "bfloat16"; all else is float32

    def __post_init__(self):
        for field in ("vocab", "d_model", "n_layers", "n_heads", "kv_heads", "ff"):
            _check(getattr(self, field) >= 1, self, field, "at least 1")
        _check(self.d_model % self.n_heads == 0, self, "n_heads", f"a divisor of d_model ({self.d_model})")
        _check(self.head_dim % 2 == 0, self, "n_heads",
               f"a number that leaves heads of even width for rotary positions (d_model is {self.d_model})")
        _check(self.n_heads % self.kv_heads == 0, self, "kv_heads", f"a divisor of n_heads ({self.n_heads})")
        _check(self.rope_theta > 0, self, "rope_theta", "a positive number")
        _check(self.dots in DOTS, self, "dots", " or ".join(map(repr, DOTS)))

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ff(self) -> int:
        return -(-self.d_model // 3) * 8 if self.d_ff is None else self.d_ff


_FIELD = {"kv_heads": "n_kv_heads", "ff": "d_ff"}


def _check(holds: bool, cfg: ModelConfig, name: str, expected: str) -> None:
    if not holds:
        field, value = _FIELD.get(name, name), getattr(cfg, name)
        raise ValueError(f"ModelConfig.{field} is {value!r}: expected {expected}.")
