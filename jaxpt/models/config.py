"""ModelConfig: what fixes a transformer's shapes and arithmetic. Static: it never holds an array."""

from dataclasses import dataclass
from typing import Any

from jaxpt.ops.dots import DOTS
from jaxpt.ops.routing import SCORES

CHOICES = ("token", "expert", "hash", "random")
DISPATCHES = ("dense", "capacity", "blocks", "ragged")
POOLS = ("batch", "position")
ADAPTERS = ("lora", "rslora", "dora")
TARGETS = {  # names of the matrices that get an adapter
    "attention": ("qkv", "query", "narrow_query", "narrow", "widen", "out"),
    "mlp": ("gate_up", "down", "shared_gate_up", "shared_down"),
}
TARGETS["layers"] = (*TARGETS["attention"], "router", *TARGETS["mlp"])
TARGETS["all"] = ("embed", "unembed", *TARGETS["layers"])


@dataclass(frozen=True)
class MoeConfig:
    """Experts in the place of a layer's SwiGLU. Numbers that only training needs (weights of the balance losses, the
    bias' rate, jitter, expert dropout) are not here: they are leaves. Raises ValueError, naming the field."""

    experts: int = 8  # E, routed ones
    top_k: int = 2  # k
    d_ff: int | None = None  # hidden units of an expert; None: the model's over top_k, so that a token costs what it did
    shared: int = 0  # experts of the same size that every token goes through (Dai et al. 2024, arXiv:2401.06066)
    choice: str = "token"  # who chooses: the token, the expert, or nobody who learns (hash of the token, random)
    score: str = "softmax"  # or sigmoid
    normalise: bool = True  # the gates of a token sum to `scale`
    scale: float = 1.0
    bias: bool = False  # a bias per expert that decides the choice and never weighs (ops.balance.moved_bias)
    groups: int = 1  # of experts, of which a token may use `top_groups`
    top_groups: int = 1
    dispatch: str = "blocks"  # ops.dispatch
    capacity: float = 1.25  # of dispatch capacity: an expert's places over its fair share. Decoding never drops
    first: int = 0  # layers before the first with experts, which keep SwiGLU
    pool: str = "batch"  # of expert choice: whom a token competes with; "position": those at its index in other rows

    def __post_init__(self):
        for field in ("experts", "top_k", "groups", "top_groups"):
            _check(getattr(self, field) >= 1, self, field, "at least 1")
        _check(self.experts >= 2, self, "experts", "at least 2")
        _check(self.top_k <= self.experts, self, "top_k", f"at most experts ({self.experts})")
        _check(self.d_ff is None or self.d_ff >= 1, self, "d_ff", "at least 1")
        _check(self.first >= 0, self, "first", "at least 0")
        _check(0 <= self.shared <= self.experts, self, "shared", f"a number from 0 to experts ({self.experts})")
        for field, choices in (("choice", CHOICES), ("score", tuple(SCORES)), ("dispatch", DISPATCHES), ("pool", POOLS)):
            _check(getattr(self, field) in choices, self, field, " or ".join(map(repr, choices)))
        _check(self.experts % self.groups == 0, self, "groups", f"a divisor of experts ({self.experts})")
        _check(self.top_groups <= self.groups, self, "top_groups", f"at most groups ({self.groups})")
        _check(self.top_k <= self.experts // self.groups * self.top_groups, self, "top_k",
               f"at most the experts of top_groups groups ({self.experts // self.groups * self.top_groups})")
        _check(self.capacity > 0, self, "capacity", "a number above 0")
        _check(self.scale > 0, self, "scale", "a number above 0")
        _check(self.choice != "token" or self.top_k > 1 or not self.normalise, self, "normalise",
               "False where top_k is 1, because a single normalised gate is always 1 and the router learns nothing")
        _check(self.choice == "token" or not (self.bias or self.groups > 1), self, "choice",
               "'token' where bias or groups are used")

    @property
    def per_token(self) -> int:
        """Experts that a token goes through, shared ones included."""
        return self.top_k + self.shared


def fine_grained(moe: MoeConfig, d_ff: int, m: int) -> MoeConfig:
    """m times as many experts of 1/m of d_ff, m times as many for each token: equal parameters and products, but for the
    router's (Dai et al. 2024, arXiv:2401.06066, section 3.1)."""
    if m < 1 or d_ff % m:
        raise ValueError(f"m: got {m!r}, expected a divisor of the experts' d_ff ({d_ff}).")
    fields = {**vars(moe), "experts": m * moe.experts, "top_k": m * moe.top_k, "d_ff": d_ff // m}
    return MoeConfig(**fields)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on a frozen base (models.lora). alpha and the rank in use are leaves of the parameters."""

    rank: int = 8  # columns that are stored; the leaf `rank` may use fewer
    alpha: float = 32.0
    targets: str = "layers"
    kind: str = "lora"

    def __post_init__(self):
        _check(self.rank >= 1, self, "rank", "at least 1")
        _check(self.alpha > 0, self, "alpha", "a number above 0")
        _check(self.targets in TARGETS, self, "targets", " or ".join(map(repr, TARGETS)))
        _check(self.kind in ADAPTERS, self, "kind", " or ".join(map(repr, ADAPTERS)))


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotary frequencies for texts longer than those of training, as Llama 3.1 has them (models.rotary)."""

    factor: float = 8.0  # by which pairs that turn slowly are slowed down
    low: float = 1.0  # pairs that turn less often than this within `length` are slow,
    high: float = 4.0  # those that turn more often than this stay as they are, and between the two it is gradual
    length: int = 8192  # longest text before

    def __post_init__(self):
        _check(self.factor >= 1, self, "factor", "at least 1")
        _check(self.length >= 1, self, "length", "at least 1")
        _check(0 < self.low < self.high, self, "low", f"a number between 0 and high ({self.high})")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Raises ValueError, naming the field, when a value cannot be built."""

    vocab: int
    d_model: int = 32
    n_layers: int = 2
    n_heads: int = 2
    n_kv_heads: int | None = None  # key/value heads; None: n_heads
    d_head: int | None = None  # entries of a head; None: d_model over n_heads
    d_ff: int | None = None  # hidden units of SwiGLU; None: 8/3 d_model, rounded up to a multiple of 8
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6  # added to the mean square of what RMSNorm divides
    qkv_bias: bool = False  # queries, keys and values are shifted by learned constants (Qwen2, arXiv:2407.10671)
    qk_norm: bool = False  # RMSNorm of queries and keys (Dehghani et al. 2023, arXiv:2302.05442)
    tied: bool = True  # the unembedding is the transposed embedding
    scan: bool = False  # one compiled layer, scanned: compiles faster when deep, runs slower when not
    remat: bool = False  # a layer's inner values are computed again for the gradient, not kept
    dots: str = "float32"  # input type of matrix products, or "bfloat16"; all else is float32
    moe: MoeConfig | None = None  # experts in the place of SwiGLU
    lora: LoraConfig | None = None  # the parameters are adapters on a frozen base
    loops: int = 1  # times that the layers are gone through, with the same weights (Dehghani et al. 2018, arXiv:1807.03819)
    window: int | None = None  # a token sees itself and so many less one before it (Beltagy et al. 2020, arXiv:2004.05150)
    softcap: float | None = None  # scores s become c tanh(s / c) (Gemma 2, arXiv:2408.00118, section 2)
    latent: int | None = None  # width of what latent attention caches (models.transformer); None: keys and values
    latent_query: int | None = None  # width that latent attention makes its queries of; None: the model's
    d_rope: int | None = None  # entries of a head beside its d_head that know positions, in latent attention; None: half of it
    d_value: int | None = None  # entries of a head's value in latent attention; None: d_head
    parallel: bool = False  # attention and the feed-forward part of a layer read the same norm (PaLM, arXiv:2204.02311)

    def __post_init__(self):
        for field in ("vocab", "d_model", "n_layers", "n_heads", "kv_heads", "ff", "loops"):
            _check(getattr(self, field) >= 1, self, field, "at least 1")
        _check(self.d_head is not None or self.d_model % self.n_heads == 0, self, "n_heads",
               f"a divisor of d_model ({self.d_model})")
        _check(self.d_head is None or self.d_head >= 2 and self.d_head % 2 == 0, self, "d_head",
               "an even number of at least 2, for rotary positions")
        _check(self.head_dim % 2 == 0, self, "n_heads",
               f"a number that leaves heads of even width for rotary positions (d_model is {self.d_model})")
        _check(self.n_heads % self.kv_heads == 0, self, "kv_heads", f"a divisor of n_heads ({self.n_heads})")
        _check(self.rope_theta > 0, self, "rope_theta", "a positive number")
        _check(self.norm_eps >= 0, self, "norm_eps", "at least 0")
        _check(self.dots in DOTS, self, "dots", " or ".join(map(repr, DOTS)))
        _check(self.window is None or self.window >= 1, self, "window", "at least 1")
        if self.latent is not None:
            _check(self.latent >= 1, self, "latent", "at least 1")
            plain = self.n_kv_heads is None and not self.qk_norm and not self.qkv_bias
            _check(self.d_rope is None or self.d_rope % 2 == 0, self, "d_rope", "an even number")
            _check(self.rope_dim % 2 == 0 and plain, self, "latent",
                   "None where heads are no multiple of 4 wide, share keys, are shifted or are normalised")
        for field in ("latent_query", "d_rope", "d_value"):
            value = getattr(self, field)
            _check(value is None or value >= 1 and self.latent is not None, self, field, "at least 1, and None without latent")
        _check(self.softcap is None or self.softcap > 0, self, "softcap", "a positive number")
        if self.moe is not None:
            _check(self.moe.d_ff is not None or self.ff % self.moe.top_k == 0, self, "moe",
                   f"a top_k that divides d_ff ({self.ff}), or a d_ff of its own")
            _check(self.moe.dispatch != "ragged" or self.dots == "float32" and self.lora is None, self, "moe",
                   "a dispatch other than 'ragged' with bfloat16 dots or adapters")
            _check(self.moe.first == 0 or self.moe.first < self.n_layers and not self.scan and self.loops == 1, self, "moe",
                   f"first = 0, or with unrolled layers that are gone through once one below n_layers ({self.n_layers})")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def rope_dim(self) -> int:
        """Of a head: entries that know positions in latent attention."""
        return self.head_dim // 2 if self.d_rope is None else self.d_rope

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.d_value is None else self.d_value

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ff(self) -> int:
        return -(-self.d_model // 3) * 8 if self.d_ff is None else self.d_ff

    @property
    def depth(self) -> int:
        """Layers that a token goes through."""
        return self.n_layers * self.loops

    @property
    def dense_layers(self) -> int:
        """Layers before the first with experts; without any, 0."""
        return 0 if self.moe is None else self.moe.first

    @property
    def expert_ff(self) -> int:
        """Hidden units of one expert."""
        return self.ff // self.moe.top_k if self.moe.d_ff is None else self.moe.d_ff


_FIELD = {"kv_heads": "n_kv_heads", "ff": "d_ff"}


def _check(holds: bool, cfg: Any, name: str, expected: str) -> None:
    if not holds:
        field, value = _FIELD.get(name, name), getattr(cfg, name)
        raise ValueError(f"{type(cfg).__name__}.{field} is {value!r}: expected {expected}.")
