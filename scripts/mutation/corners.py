"""A row before and after a change, on inputs from the corners of its family."""

from collections.abc import Mapping
from typing import Any

import numpy as np

INPUTS = 10_000
SHARES = (500, 2000, INPUTS)  # of one row, where several share them: few, so that what the unchanged row gives is kept
SIZES = {"B": 4, "T": 4, "K": 4, "V": 5}
GROUPS = np.array([[0, 0, 1, 1], [3, -1, 3, 3], [0, 1, 2, 3], [5, 5, 5, 5]])
VALUES = {  # of half of the batches; the others are drawn from a normal law
    "logp": [0.0, -1e-6, -0.1, -0.7, -1.0, -1.2, -3.0, -20.0, -30.0, -1e3, -1e4],
    "logits": [0.0, 1e-6, 1.0, -1.0, 2.0, 20.0, -20.0, 1e3, -1e4, -np.inf], "score": [0.0, 1e-6, 0.5, 1.0, -1.0, -2.0, 20.0, 1e4, -1e4],
    "advantage": [0.0, 1e-6, 0.5, 1.0, -1.0, -2.0, 20.0, -1e4], "count": [0.0, 0.3, 0.5, 1.0, 3.0], "label": [0.0, 1.0, 0.3],
    "length": [0.0, 1.0, 2.0, 3.0, 100.0, 299.0, 1000.0, 5000.0, 16384.0, 20480.0, 3e4],
}
POISON = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
KNOWN: dict[tuple[str, int], Any] = {}  # (row, number) -> inputs and outcomes of the unchanged row
REWARDS = [0.0, 1.0, 1.0, 0.3, -2.0, 1e4, np.nan, np.inf]


def values(kind: str, shape: tuple[int, ...], rng: np.random.Generator, corner: bool) -> np.ndarray:
    if kind == "mask":
        mask = rng.random(shape) < rng.choice([0.0, 0.4, 0.8, 1.0], (shape[0], shape[1]) + (1,) * (len(shape) - 2))
        return mask
    if kind == "token":
        return rng.integers(0, SIZES["V"], shape).astype(np.int32)
    if kind == "group":
        return GROUPS[rng.integers(0, len(GROUPS), shape[0])].astype(np.int32)
    if corner or kind in ("label", "length", "count"):
        return rng.choice(VALUES[kind], shape).astype(np.float32)
    x = rng.normal(0, 1.5, shape)
    return np.float32(-np.abs(x) if kind == "logp" else x)


def batches(base: Any, row: Any, number: int, seed: int = 0) -> dict[str, np.ndarray]:
    """{argument: [number, ...]} of the row's family, poison at half of the masked slots; of a policy loss also what its
    prepare reads."""
    rng, half = np.random.default_rng(seed), number // 2
    args = base.get("jaxpt.objectives.families").FAMILIES[row.family].args

    def some(kind, axes):
        shape = tuple(SIZES[a] for a in axes)
        return np.concatenate([values(kind, (n, *shape), rng, corner) for n, corner in ((half, True), (number - half, False))])

    batch = {name: some(arg.kind, arg.axes) for name, arg in args.items() if not arg.optional or arg.optional in row.needs}
    if row.family == "policy_loss":
        near = rng.random((number, 1, 1)) < 0.7  # policies that have not drifted far
        for name in ("old_logp", "ref_logp", "sampler_logp"):
            drifted = some("logp", "BT") if name not in batch else batch[name]
            batch[name] = np.where(near, batch["logp"] + np.float32(0.3) * some("score", "BT").clip(-3, 3), drifted)
        batch |= {"values": some("score", "BT"), "process": some("count", "BT"), "entropy": some("count", "BT")}
        batch |= {"final_values": some("score", "B"), "baseline": some("count", "B"), "group": some("group", "B")}
        batch |= {"reward": rng.choice(REWARDS, (number, SIZES["B"])).astype(np.float32), "parts": some("count", "BT")[..., :2]}
        batch |= {"turn": np.cumsum(rng.integers(0, 2, (number, SIZES["B"], SIZES["T"])), -1).astype(np.int32)}
        batch |= {"truncated": rng.random((number, SIZES["B"])) < 0.3}
        batch["anchor"] = (batch["turn"] % 2).astype(np.int32)
    for name, arg in args.items():
        if arg.mask in batch and name in batch and batch[name].dtype == np.float32:
            kept = batch[arg.mask] if arg.axes != "BTV" else batch[arg.mask][..., None]
            dirty = rng.random((number,) + (1,) * (batch[name].ndim - 1)) < 0.5
            batch[name] = np.where(kept | ~dirty, batch[name], rng.choice(POISON, batch[name].shape)).astype(np.float32)
    return batch


def outcome(base: Any, row: Any, batch: Mapping[str, Any], hyper: Mapping[str, float]) -> Any:
    """What prepare gives, the loss and its gradients, of one batch."""
    import jax
    import jax.numpy as jnp

    if row.family == "policy_loss":
        fields = {k: batch[k] for k in ("reward", "old_logp", "group")}
        traj = base.get("jaxpt.types").bare_trajectory(
            jnp.zeros_like(batch["turn"]), batch["mask"], length=jnp.sum(batch["mask"], 1), **fields
        )._replace(turn=batch["turn"], truncated=batch["truncated"], parts=batch["parts"])
        given = {k: batch[k] for k in ("ref_logp", "values", "final_values", "process", "baseline", "anchor", "sampler_logp")}
        ready = row.prepare(traj, **given, **hyper)
        read = ("ref_logp", "entropy", "vocab_kl", "sampler_logp", "weights", "prompt_tokens")
        names = ("old_logp", "advantages", "mask", *(k for k in read if k in row.needs))
        arguments = {k: {**batch, **ready}[k] for k in ("logp", *names)}
        shared = {"totals": ready["totals"]}
    else:
        ready = shared = row.prepare(dict(batch), **hyper)
        arguments = dict(batch)
    moving = {k: x for k, x in arguments.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def loss(moving):
        out = row.loss(**{**arguments, **moving}, **shared, **hyper)
        return jnp.sum(out[0] if isinstance(out, tuple) else out), out

    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(moving)
    return ready, out, grads


def traced(base: Any, row: Any) -> None:
    """The row's prepare, loss and gradient, traced once."""
    import jax

    batch = {k: x[0] for k, x in batches(base, row, 2).items()}
    with base.inside():
        jax.eval_shape(lambda batch: outcome(base, row, batch, dict(row.hyper)), batch)


def compared(base: Any, other: Any, rows: frozenset[str] | None) -> str:
    """"agree on N inputs", or where the two differ, or why they were not compared."""
    if not rows:
        return "no row reaches it: to be judged by hand"
    before, after = base.rows(), other.rows()
    names = [name for name in sorted(rows) if name in before and name in after]
    if len(names) < len(rows):
        for module in base.modules:  # the tests' own rows
            if module.startswith("test_"):
                other.get(module)
        after = other.rows()
        names = [name for name in sorted(rows) if name in before and name in after]
    share = next(n for n in SHARES if n * len(names) >= INPUTS or n == INPUTS)
    for name in names:
        if (name, share) not in KNOWN:
            batch = batches(base, before[name], share)
            KNOWN[name, share] = batch, outcomes(base, before[name], batch)
        batch, one = KNOWN[name, share]
        two = outcomes(other, after[name], batch)
        for x, y in zip(one, two, strict=True):
            same = np.isclose(np.float64(x), np.float64(y), rtol=1e-5, atol=1e-6, equal_nan=True)
            if not same.all():
                k = int(np.argwhere(~same)[0][0])
                return f"{name} differs on {(~same.reshape(len(same), -1).all(1)).mean():.1%} of its inputs, first on {k}"
    return f"agree on {share * len(names)} inputs of {len(names)} rows, with two sets of constants each"


def outcomes(world: Any, row: Any, batch: Mapping[str, Any]) -> list[np.ndarray]:
    """[number, ...] each, under the row's constants and under others, by one compiled function."""
    import jax

    run = jax.jit.args[0](jax.vmap(lambda b, hyper: outcome(world, row, b, hyper), (0, None)))
    hypers = dict(row.hyper), {k: x * 0.7 + 0.15 for k, x in row.hyper.items()}
    return [np.asarray(x) for hyper in hypers for x in jax.tree.leaves(jax.device_get(run(batch, hyper)))]
