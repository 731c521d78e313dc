"""What a step takes before it is run: bytes on each device by part, and FLOPs. Nothing is allocated.

Parameters, optimizer state, references, gradients and caches are counted from shapes and from where they lie. What else a
step holds is asked of XLA, which compiles the very program on abstract arrays, or estimated from shapes (`estimate`).
XLA's CPU compiler sums gradients whole before it cuts them; those for accelerators sum and cut at once.
On CPUs a program that decodes few rows for long holds large matrices once more, transposed (rollout.generate), which XLA is
asked about and `estimate` leaves out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, Spec
from jaxpt.models import ModelConfig, make_model
from jaxpt.models.lora import joined, moving
from jaxpt.models.mesh import ROWS, spec_of
from jaxpt.ops.masked import at_least_float32
from jaxpt.rollout.generate import whole_strides
from jaxpt.train.budget import update_flops
from jaxpt.train.common import EvalConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.train.parallel import check_rows, step_by_jit
from jaxpt.train.policy import PolicyConfig, make_policy, policy_flops
from jaxpt.train.sft import SftConfig, make_sft

PARTS = {  # of a state -> what they count as
    "params": "parameters", "opt": "optimizer", "reference": "reference", "sampler": "sampler", "critic": "critic",
    "critic_opt": "optimizer",
}
QUICK = {"xla_backend_optimization_level": 0}  # what is compiled is not run
CHUNK = 16384  # positions whose logits token_stats holds at once
KEPT = (0.7, 1.0)  # XLA's share of what differentiation keeps: fused loops need not; cuts over `tensor` are also moved about
LOGITS = 3  # arrays as large as the logits, at the end of the forward pass


@dataclass(frozen=True)
class Blank:
    """Rows of a given length that mean nothing, in the place of an environment's config."""

    vocab: int
    prompt_len: int
    response_len: int
    name: str = "blank"
    levels: tuple[int, int] = (1, 1)

    def make(self) -> Environment:
        spec = Spec(self.vocab, self.prompt_len, self.response_len, (), (), 1, ("think",), ())
        return Environment(
            "blank", spec, sample=lambda key, level: jnp.int32(0),
            prompt=lambda task: (jnp.zeros(self.prompt_len, jnp.int32), jnp.int32(self.prompt_len)),
            init=lambda task, key: jnp.int32(0),
            pending=lambda task, state: jnp.where(state < self.response_len, POLICY, DONE),
            feed=lambda task, state, token: state + 1, signals=lambda task, state, token: jnp.zeros(0),
            outcome=lambda task, state: Outcome(jnp.float32(0), jnp.float32(0), jnp.zeros(0), jnp.bool_(False)),
            oracle=lambda task, state, key, style: jnp.int32(0),
        )


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """A step of which only the shapes matter. Raises ValueError, naming the field."""

    model: ModelConfig
    method: str = "sft"  # or a row of jaxpt.objectives for policies, as grpo
    batch: int = 32  # rows of an update: demonstrations, or episodes
    length: int = 256  # tokens of a row
    prompt: int | None = None  # of which so many are the prompt; None: half of them
    group: int = 8  # episodes of one prompt
    micro: int = 0  # rows whose gradients are summed at a time; 0: all at once
    optim: OptimConfig = field(default_factory=OptimConfig)

    def program(self, shards: int = 1) -> tuple[Callable, Any]:
        """The maker of the program and its config, as train.parallel takes them. shards: of rows, of which every share and
        the prompts must have as many each."""
        prompts = self.batch // self.group if self.method != "sft" else self.batch
        for rows in (self.batch, self.micro, prompts):
            check_rows(rows, shards)
        prompt = max(self.length // 2, 1) if self.prompt is None else self.prompt
        if not 1 <= prompt < self.length:
            raise ValueError(f"prompt: got {prompt}, expected at least 1 and less than length = {self.length}")
        common = {
            "env": Blank(self.model.vocab, prompt, self.length - prompt), "model": self.model, "optim": self.optim,
            "micro": self.micro, "eval": EvalConfig(1, shards),
        }
        if self.method == "sft":
            return make_sft, SftConfig(**common, batch=self.batch)
        if self.batch % self.group:
            raise ValueError(f"batch: got {self.batch}, expected a multiple of group = {self.group}")
        cfg = PolicyConfig(**common, prompts=prompts, group=self.group, objectives=(self.method,))
        return make_policy, cfg


def resident(cfg: StepConfig, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes on each device of all that follows from shapes alone: what rests between steps by part, gradients, caches.
    sizes: of the mesh's axes. Raises ValueError where the mesh does not divide."""
    make, program_cfg = cfg.program(row_shards(sizes))
    state = abstract_state(make(program_cfg))
    found: dict[str, int] = {}
    for name in sorted(state, key=[*PARTS, *state].index):
        part = PARTS.get(name, "other")
        found[part] = found.get(part, 0) + local_bytes({name: state[name]}, sizes)
    grads = moving({name: state[name] for name in ("params", "critic") if name in state})
    if cfg.micro:  # shares are summed in float32
        grads = jax.eval_shape(lambda tree: jax.tree.map(at_least_float32, tree), grads)
    found["gradients"] = local_bytes(grads, sizes)
    found["cache"] = 0 if cfg.method == "sft" else cache_bytes(cfg, program_cfg.env, sizes)
    return found


def abstract_state(program: Any) -> Any:
    hyper = {name: jnp.float32(x) for name, x in program.hyper.items()}
    return jax.eval_shape(program.init, jax.random.key(0), hyper)


def row_shards(sizes: dict[str, int]) -> int:
    return math.prod(sizes[axis] for axis in ROWS)


def local_bytes(tree: Any, sizes: dict[str, int]) -> int:
    """Of one device, of arrays that lie as the rule says."""

    def of(path, x):
        cut = [axes if isinstance(axes, tuple) else (axes,) for axes in spec_of(path, x.shape, sizes) if axes is not None]
        return x.size * x.dtype.itemsize // math.prod(sizes[axis] for axes in cut for axis in axes)

    return sum(jax.tree.leaves(jax.tree.map_with_path(of, tree)))


def cache_bytes(cfg: StepConfig, env: Blank, sizes: dict[str, int]) -> int:
    """Of the keys and values while episodes are drawn (rollout.generate), where the model puts them (Model.cache)."""
    slots = env.prompt_len + whole_strides(env.response_len)
    cache = jax.eval_shape(lambda: make_model(cfg.model).cache(cfg.batch, slots))
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    heads = sizes["tensor"] if cfg.model.latent is None and cfg.model.kv_heads % sizes["tensor"] == 0 else 1
    return total // (row_shards(sizes) * heads)


def compiled(cfg: StepConfig, mesh: Mesh) -> Any:
    """XLA's plan for the very program: bytes on each device of its arguments, results and temporary arrays. (On CPUs XLA
    merges what remat would compute again with what it is to save, unless layers are scanned.)"""
    make, program_cfg = cfg.program(row_shards(mesh.shape))
    step = step_by_jit(make, program_cfg, mesh)
    return step.lower(abstract_state(make(program_cfg))).compile(QUICK).memory_analysis()


def step_flops(cfg: StepConfig) -> int:
    """Of the products of a whole step, on all devices together."""
    _, program_cfg = cfg.program()
    return update_flops(cfg.model, program_cfg.env.make().spec, cfg.batch) if cfg.method == "sft" else policy_flops(program_cfg)


def parameters(cfg: StepConfig) -> int:
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(make_model(cfg.model).init, jax.random.key(0))))


def estimate(cfg: StepConfig, sizes: dict[str, int]) -> int:
    """The temporary bytes of `compiled`, without compiling: hidden states that differentiation keeps, logits, gradients, and
    what FSDP holds whole: matrices until the backward pass has used them, gradients until they are summed. With remat
    (of scanned layers) those are of one layer at a time.

    KEPT and LOGITS were fitted to what XLA plans for ten small models; tests hold others to 30%.
    """
    rows = max((cfg.micro or cfg.batch) // row_shards(sizes), 1)
    kept = kept_bytes(cfg.model, rows, cfg.length, sizes)
    if cfg.model.remat:  # one layer at a time is computed again
        plain = [kept_bytes(replace(cfg.model, remat=False, n_layers=n), rows, cfg.length, sizes) for n in (1, 2)]
        kept += plain[1] - plain[0]
    logits = 4 * min(rows * (cfg.length - 1), CHUNK) * cfg.model.vocab // sizes["tensor"]
    shown = replace(cfg.model, n_layers=1) if cfg.model.remat else cfg.model  # whole at one time
    gathered = sum(local_bytes(tree, {**sizes, "data": 1, "sequence": 1}) - local_bytes(tree, sizes) for tree in _moved(shown))
    grads = local_bytes(_moved(cfg.model)[1], sizes)
    return int(KEPT[sizes["tensor"] > 1] * kept) + LOGITS * logits + gathered + grads


def _moved(model: ModelConfig) -> tuple[Any, Any]:
    """The parameters, and the part of them that moves."""
    params = {"params": jax.eval_shape(make_model(model).init, jax.random.key(0))}
    return params, moving(params)


def kept_bytes(model: ModelConfig, rows: int, length: int, sizes: dict[str, int]) -> int:
    """Of what differentiation keeps of a forward pass for the backward one, on a device with so many rows: traced, not
    compiled. What has an axis as long as heads or hidden units is cut over `tensor`."""
    net, tokens = make_model(model), jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def pullback(params, tokens):
        return jax.vjp(lambda part: net.forward(joined(params, part), tokens)[0], moving(params))[1]

    params = jax.eval_shape(net.init, jax.random.key(0))
    weights = {shape for x in jax.tree.leaves(params) for shape in (x.shape, x.shape[::-1])}
    inner = {model.n_heads, model.n_heads + 2 * model.kv_heads, model.ff, 2 * model.ff} - {model.d_model}
    total = 0
    for x in jax.tree.leaves(jax.eval_shape(pullback, params, tokens)):
        if x.shape not in weights:
            total += x.size * x.dtype.itemsize // (sizes["tensor"] if inner & set(x.shape[1:]) else 1)
    return total // sizes["sequence"]
