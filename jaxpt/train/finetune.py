"""Fine-tuning on texts that somebody else brings and, where completions are sampled, judges: tokens in, an update out.

    sft   a Trajectory: demonstrations (types.bare_trajectory)
    dpo   {chosen, chosen_mask, rejected, rejected_mask}, each [B,T]: two responses behind the same prompt
    grpo  a Trajectory of `sample`, whole groups in its order, with rewards

What never changes (the base under adapters; a reference) stands apart from the state, {"trained", "opt"}: no gradient, no
moment and no file is made of it. The reference is the model at the start: the base without its adapters, or a second tree.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.envs.protocol import Spec
from jaxpt.models import Model, ModelConfig, make_model, unrolled
from jaxpt.models.counts import forward_flops
from jaxpt.objectives import ROWS, get
from jaxpt.objectives.row import Row
from jaxpt.ops.logprobs import token_stats
from jaxpt.ops.masked import weighed
from jaxpt.ops.sampling import Chooser, sampler
from jaxpt.rollout import complete
from jaxpt.train.collect import episode_metrics
from jaxpt.train.common import accumulate, check_positive, means, shares
from jaxpt.train.optim import OptimConfig, apply_update, start_optimizer
from jaxpt.train.parallel import ONE
from jaxpt.train.rows import constants
from jaxpt.types import Array, Key, Metrics, Params, Trajectory

LOGITS = 2**26  # numbers of a [positions, V] block that are held at a time
CONTROLLED = ("max_rounds", "kl_target", "entropy_target")  # constants of what only train.policy does
EPISODES = ("reward", "length", "truncated", "no_signal")  # metrics of sampled completions
METHODS = {  # name -> (family of its rows, what they may need)
    "sft": ("policy_loss", ("logp",)),
    "dpo": ("preference", ("logp", "ref_logp")),
    "grpo": ("policy_loss", ("logp", "ref_logp", "entropy", "sampler_logp", "prompt_tokens")),
}


def objectives(method: str) -> list[str]:
    """The rows that a method can follow. Its own name is its default."""
    if method == "sft":
        return ["sft"]
    family, computed = METHODS[method]
    return [
        name for name, row in ROWS.items()
        if row.family == family and name != "sft" and set(row.needs) <= set(computed) and not set(row.hyper) & set(CONTROLLED)
    ]


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    model: ModelConfig  # with lora: adapters are trained; without: everything
    optim: OptimConfig = field(default_factory=OptimConfig)
    method: str = "sft"
    objective: str = "sft"
    micro: int = 0  # rows (pairs) per share of a batch, whose gradients are summed; 0: all at once
    group: int = 8  # G: completions of each prompt
    new: int = 64  # tokens of a completion at most
    temperature: float = 1.0  # of completions; 1 for demonstrations and pairs
    ends: tuple[int, ...] = ()  # tokens that end a completion

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"method: got {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.objective not in objectives(self.method):
            get(self.objective)
            raise ValueError(f"objective: {self.objective!r} is no row that method {self.method!r} can follow")
        if self.micro and not self.row.additive:
            raise ValueError(f"micro: got {self.micro}, expected 0: {self.objective!r} is of whole batches")
        check_positive(self, "group", "new", "temperature")

    @property
    def row(self) -> Row:
        return get(self.objective)


def begin(cfg: FinetuneConfig, key: Key, params: Params) -> tuple[Params, dict[str, Any]]:
    """(what never changes, the state before the first update), from parameters without adapters. The two may share
    buffers: copy the state before it is donated."""
    whole = make_model(cfg.model).begin(key, params)
    if cfg.model.lora is None:
        frozen, trained = ({"reference": params} if "ref_logp" in cfg.row.needs else {}), whole
    else:
        frozen, trained = {name: x for name, x in whole.items() if name != "lora"}, {"lora": whole["lora"]}
    trained, opt = start_optimizer(cfg.optim, trained)
    return frozen, {"trained": trained, "opt": opt}


def whole_params(cfg: FinetuneConfig, frozen: Params, trained: Params) -> Params:
    """The parameters of make_model(cfg.model)."""
    return trained if cfg.model.lora is None else {**frozen, **trained}


def sample(cfg: FinetuneConfig, frozen: Params, trained: Params, prompts: Array, n: Array, keys: Array) -> Trajectory:
    """cfg.group drawn completions of each prompt. Shapes: rollout.complete."""
    return _complete(cfg, frozen, trained, prompts, n, keys, sampler(cfg.temperature), cfg.group)


def probe(cfg: FinetuneConfig, frozen: Params, trained: Params, prompts: Array, n: Array, keys: Array) -> Trajectory:
    """The most probable completion of each prompt and a drawn one, in rows 2p and 2p + 1."""
    drawn = sampler(cfg.temperature)
    chooser = drawn._replace(noise=lambda keys, vocab: drawn.noise(keys, vocab) * (jnp.arange(keys.shape[0]) % 2)[:, None])
    return _complete(cfg, frozen, trained, prompts, n, keys, chooser, 2)


def _complete(
    cfg: FinetuneConfig, frozen: Params, trained: Params, prompts: Array, n: Array, keys: Array, chooser: Chooser, group: int
) -> Trajectory:
    model, params = unrolled(cfg.model, whole_params(cfg, frozen, trained))
    return complete(make_model(model), params, prompts, n, keys, chooser, new=cfg.new, ends=cfg.ends, group=group)


def update(cfg: FinetuneConfig, frozen: Params, state: dict, batch: Any) -> tuple[dict, dict[str, Array]]:
    """One update on a batch. -> (state, metrics)"""
    parts, totals, hyper = _prepared(cfg, frozen, state["trained"], batch)

    def loss(trained, part):
        return _loss(cfg, frozen, trained, part, totals, hyper)

    value, metrics, grads = accumulate(loss, state["trained"], parts, cfg.micro, ONE)
    trained, opt, norm = apply_update(cfg.optim, cfg.optim.learning_rate, grads, state["opt"], state["trained"])
    if cfg.method == "grpo":
        metrics |= {name: x for name, x in episode_metrics(batch).items() if name in EPISODES}
    return {"trained": trained, "opt": opt}, {"loss": value, "grad_norm": norm, **means(metrics)}


def examine(cfg: FinetuneConfig, frozen: Params, trained: Params, batch: Any) -> Metrics:
    """Of demonstrations the loss of a token, in nats; of pairs the objective and the share of them whose chosen
    response has the higher reward by its row: of none, where the policy is its own reference."""
    if cfg.method == "sft":
        model = make_model(cfg.model)
        logp = _stats(cfg, model, whole_params(cfg, frozen, trained), ("logp",), batch.tokens)["logp"]
        return {"loss": weighed(-logp, batch.mask)}
    parts, totals, hyper = _prepared(cfg, frozen, trained, batch)
    value, metrics = _loss(cfg, frozen, trained, parts, totals, hyper)
    return {"loss": (value * totals["pairs"], totals["pairs"]), "accuracy": metrics["accuracy"]}


def _prepared(cfg: FinetuneConfig, frozen: Params, trained: Params, batch: Any) -> tuple[dict[str, Array], dict, dict]:
    """(arrays [B, ...] that a share is cut from, totals, the row's constants); no gradient."""
    row, spec = cfg.row, Spec(0, 0, cfg.new, (), (), 1, (), ())
    hyper = constants(row, spec)

    def score(model: Model, params: Params, *rows: Array) -> Array:
        """Log-probabilities of (tokens) or of the decisions of (tokens, first), as many rows at a time as an update holds."""
        run = lambda rows: _stats(cfg, model, params, ("logp",), *rows)["logp"]  # noqa: E731
        if cfg.micro == 0:
            return run(rows)
        tokens = rows[0]
        return jax.lax.map(run, shares(rows, cfg.micro)).reshape(-1, tokens.shape[1])[: tokens.shape[0]]

    if row.family == "preference":
        ready = row.prepare(batch, **hyper)
        parts = dict(batch)
        if "ref_logp" in row.needs:
            reference = _reference(cfg, frozen)
            parts |= {f"ref_{side}": score(*reference, batch[side]) for side in ("chosen", "rejected")}
        return parts, ready["totals"], hyper
    rows = (batch.tokens,) if cfg.method == "sft" else (batch.tokens, jnp.argmax(batch.mask, axis=1))
    given = {"ref_logp": score(*_reference(cfg, frozen), *rows)} if "ref_logp" in row.needs else {}
    old_logp = batch.old_logp
    if "sampler_logp" in row.needs:  # the policy as it is trained, beside the one that has drawn
        old_logp = score(make_model(cfg.model), whole_params(cfg, frozen, trained), *rows)
    ready = row.prepare(batch._replace(old_logp=old_logp), sampler_logp=batch.old_logp, **given, **hyper)
    parts = dict(zip(("tokens", "first"), rows, strict=False)) | {"old_logp": old_logp, "sampler_logp": batch.old_logp, **given}
    parts |= {name: ready[name] for name in ("mask", "advantages", "prompt_tokens")}
    return parts, ready["totals"], hyper


def _loss(
    cfg: FinetuneConfig, frozen: Params, trained: Params, part: Mapping[str, Array], totals: dict, hyper: dict
) -> tuple[Array, Metrics]:
    """The row's loss on a share."""
    model, params, row = make_model(cfg.model), whole_params(cfg, frozen, trained), cfg.row
    if row.family == "preference":
        both = _stats(cfg, model, params, ("logp",), jnp.concatenate([part["chosen"], part["rejected"]]))["logp"]
        chosen, rejected = jnp.split(both, 2)
        return row.loss(
            chosen, rejected, part["chosen_mask"], part["rejected_mask"], totals=totals,
            ref_chosen_logp=part.get("ref_chosen"), ref_rejected_logp=part.get("ref_rejected"), **hyper,
        )
    want = ("logp", "entropy") if cfg.method == "grpo" else ("logp",)
    now = _stats(cfg, model, params, want, part["tokens"], part.get("first"))
    value, metrics = row.loss(
        now["logp"], part["old_logp"], part["advantages"], part["mask"], totals=totals, ref_logp=part.get("ref_logp"),
        entropy=now.get("entropy"), sampler_logp=part["sampler_logp"], prompt_tokens=part["prompt_tokens"], **hyper,
    )
    return value, metrics | {name: weighed(now[name], part["mask"]) for name in want[1:]}


def offloaded(frozen: Params) -> Params:
    """What never changes, with the reference in the host's memory: on the device it is only while it scores a batch."""
    host = lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))  # noqa: E731
    return frozen | {"reference": jax.tree.map(host, frozen["reference"])}


def _reference(cfg: FinetuneConfig, frozen: Params) -> tuple[Model, Params]:
    if cfg.model.lora is None:
        return make_model(cfg.model), jax.device_put(frozen["reference"], jax.memory.Space.Device)
    return make_model(replace(cfg.model, lora=None)), frozen["base"]


def _stats(
    cfg: FinetuneConfig, model: Model, params: Params, want: tuple[str, ...], tokens: Array, first: Array | None = None
) -> dict[str, Array]:
    """ops.logprobs.token_stats [B,T] of every token or, with `first` [B], of completions that begin there."""
    if first is not None:
        return _completion_stats(cfg, model, params, want, tokens, first)
    return _of_hidden(cfg, model, params, want, model.forward(params, tokens)[0], tokens)


def _of_hidden(
    cfg: FinetuneConfig, model: Model, params: Params, want: tuple[str, ...], hidden: Array, tokens: Array
) -> dict[str, Array]:
    chunk = max(1, LOGITS // cfg.model.vocab)
    return token_stats(hidden, model.unembed(params), tokens, want=want, temperature=cfg.temperature, chunk=chunk)


def _completion_stats(
    cfg: FinetuneConfig, model: Model, params: Params, want: tuple[str, ...], tokens: Array, first: Array
) -> dict[str, Array]:
    """Of the cfg.new tokens from first [B] on; 0 elsewhere. A group's rows are neighbours and begin alike.

    A prompt is gone through once for the completions that stand behind it in one row (Liu et al. 2025, Prefix Grouper,
    arXiv:2506.05433), and logits are made at their places only.
    """
    (B, T), new = tokens.shape, cfg.new
    width = T - new
    each = completions_per_row(cfg, width)
    row = side_by_side(tokens, first, new, each)
    hidden, _ = model.forward(params, **row)
    said = row["tokens"][:, width:].reshape(B, new)
    last = jnp.take_along_axis(hidden, jnp.maximum(first[::each] - 1, 0)[:, None, None], axis=1)
    hidden = jnp.concatenate([jnp.repeat(last, each, axis=0), hidden[:, width:].reshape(B, new, -1)], axis=1)
    found = _of_hidden(cfg, model, params, want, hidden, jnp.pad(said, ((0, 0), (1, 0))))
    at = jnp.arange(T)[None] - first[:, None] + 1
    inside = (at > 0) & (at <= new)
    return {name: jnp.where(inside, jnp.take_along_axis(x, jnp.clip(at, 0, new), axis=1), 0.0) for name, x in found.items()}


def side_by_side(tokens: Array, first: Array, new: int, each: int) -> dict[str, Array]:
    """What `forward` is given so that `each` completions, of `new` tokens from first [B] on, stand behind the prompt that they
    have in common: tokens, positions, segments and branches [B / each, T + (each - 1) new]. tokens [B,T]."""
    rows, width = tokens.shape[0] // each, tokens.shape[1] - new
    said = jnp.take_along_axis(tokens, first[:, None] + jnp.arange(new)[None], axis=1).reshape(rows, each * new)
    n, prompt, behind = first[::each, None], jnp.arange(width)[None], jnp.arange(each * new)[None]

    def beside(left, right):
        return jnp.concatenate([jnp.broadcast_to(left, (rows, width)), jnp.broadcast_to(right, (rows, each * new))], axis=1)

    return {
        "tokens": beside(tokens[::each, :width], said), "positions": beside(prompt, n + behind % new),
        "segments": beside(jnp.where(prompt < n, 0, -1), 0), "branches": beside(0, 1 + behind // new),
    }


def completions_per_row(cfg: FinetuneConfig, width: int) -> int:
    """Of the counts that divide a group and a share of a batch, the one with the fewest products, where its prompts have
    `width` tokens. Each completion sees much that is masked, so the counts that make more than twice as many scores of
    attention are left out."""
    most = math.gcd(cfg.group, cfg.micro)
    scores = lambda count: (width + count * cfg.new) ** 2 / count  # noqa: E731
    products = lambda count: forward_flops(cfg.model, most // count, width + count * cfg.new)  # noqa: E731
    return min((n for n in range(1, most + 1) if most % n == 0 and scores(n) <= 2 * scores(1)), key=products)


# --- batches of token lists


def order(key: Key, step: int, batch: int, rows: int) -> np.ndarray:
    """Numbers of the rows of a batch [batch]: epoch e goes through all rows once, in an order addressed by (key, e)."""
    epochs, places = np.divmod(step * batch + np.arange(batch), rows)
    orders = {e: np.asarray(shuffled(jax.random.fold_in(key, e), rows)) for e in np.unique(epochs).tolist()}
    return np.array([orders[e][place] for e, place in zip(epochs.tolist(), places, strict=True)])


shuffled: Callable = jax.jit(jax.random.permutation, static_argnums=1)


def padded(texts: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens [B,width] int32, 0 behind each text, and lengths [B]."""
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return tokens, np.array([len(text) for text in texts], np.int32)


def responses(prompts: list[list[int]], answers: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens and mask [B,width]: answers behind their prompts; the first token of a row is no decision."""
    tokens, length = padded([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)], width)
    first = np.maximum([len(prompt) for prompt in prompts], 1)
    at = np.arange(width)[None]
    return tokens, (at >= first[:, None]) & (at < length[:, None])
