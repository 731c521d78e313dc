"""Rows in words: the formula with every constant, and how two rows differ, in words and on a probe batch."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.objectives import get
from jaxpt.objectives.row import Row
from jaxpt.types import Trajectory, bare_trajectory


def describe(name: str) -> str:
    """Formula with all constants, parts in words, paper."""
    row = get(name)
    lines = [row.name, f"  {row.paper}", ""]
    lines += [f"  {line}" for line in row.formula.format(**{k: f"{v:g}" for k, v in row.hyper.items()}).split("\n")]
    lines += ["  m_it = 1 where the policy chose the token; tokens, rows: totals of the whole batch", ""]
    lines += [f"  {kind:<14} {words}" for kind, words in row.parts.items()]
    constants = ", ".join(f"{k} = {v:g}" for k, v in row.hyper.items()) or "none"
    lines += ["", f"  constants      {constants}", f"  needs          {', '.join(row.needs)}"]
    lines += [f"  additive       {'yes' if row.additive else 'no'}", f"  claims         {', '.join(row.claims) or 'none'}"]
    return "\n".join(lines)


def difference(name_a: str, name_b: str) -> str:
    """Where two rows differ, part by part, and what that does on one fixed batch."""
    a, b = get(name_a), get(name_b)
    lines = [f"{a.name} against {b.name}", ""]
    for kind in {**a.parts, **b.parts}:
        words_a, words_b = (row.parts.get(kind, "absent") for row in (a, b))
        if words_a != words_b:
            lines += [f"  {kind}", f"    {a.name}: {words_a}", f"    {b.name}: {words_b}"]
    for constant in sorted(set(a.hyper) | set(b.hyper)):
        values = [f"{row.hyper[constant]:g}" if constant in row.hyper else "absent" for row in (a, b)]
        if values[0] != values[1]:
            lines.append(f"  {constant}: {values[0]} against {values[1]}")
    if len(lines) == 2:
        lines.append("  the same parts and constants")
    value_a, grad_a = probe(a)
    value_b, grad_b = probe(b)
    norm_a, norm_b = np.linalg.norm(grad_a), np.linalg.norm(grad_b)
    cosine = float(np.sum(grad_a * grad_b) / max(norm_a * norm_b, 1e-30))
    lines += [
        "", "  on the probe batch (2 groups of 4, lengths 3 to 8, off-policy by 0.3 nats a token):",
        f"    loss            {value_a:+.5f}   {value_b:+.5f}",
        f"    |d loss/d logp| {norm_a:.5f}    {norm_b:.5f}",
        f"    cosine of the two gradients {cosine:+.4f}",
    ]
    return "\n".join(lines)


def probe_batch() -> tuple[Trajectory, dict[str, jax.Array]]:
    """A fixed batch with everything that tells rows apart: lengths, masked slots, off-policy ratios."""
    rng = np.random.default_rng(0)
    B, T = 8, 9
    length = np.array([4, 9, 6, 8, 5, 9, 7, 4])
    mask = (np.arange(T)[None] > 0) & (np.arange(T)[None] < length[:, None]) & (rng.random((B, T)) < 0.85)
    mask[:, 1] = True
    logp = rng.normal(-1.2, 0.5, (3, B, T)).clip(max=-0.01)
    logp[1:] = logp[0] + rng.normal(0, 0.3, (2, B, T))
    traj = bare_trajectory(
        jnp.zeros((B, T), jnp.int32), jnp.asarray(mask), reward=jnp.asarray([1.0, 0, 0, 1, 0, 0, 1, 0]),
        old_logp=jnp.asarray(logp[1], jnp.float32), group=jnp.arange(B) // 4, length=jnp.asarray(length),
    )
    stats = {"logp": logp[0], "ref_logp": logp[2], "entropy": -logp[0], "values": rng.random((B, T))}
    return traj, {name: jnp.asarray(x, jnp.float32) for name, x in stats.items()}


def probe(row: Row) -> tuple[float, np.ndarray]:
    """Loss and its gradient with respect to logp on the probe batch."""
    traj, stats = probe_batch()

    @jax.jit
    @jax.value_and_grad
    def loss(logp):
        ready = row.prepare(traj, ref_logp=stats["ref_logp"], values=stats["values"])
        extra = {k: stats[k] for k in row.needs if k in ("ref_logp", "entropy")}
        return row.loss(logp, traj.old_logp, ready["advantages"], ready["mask"], totals=ready["totals"], **extra)[0]

    value, grad = loss(stats["logp"])
    return float(value), np.asarray(grad)
