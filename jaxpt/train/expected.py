"""Exact bias and variance of a row: its gradient on every batch that a tabular policy can draw.

A batch is `groups` groups of `group` leaves drawn independently, so there are N^(groups x group) of them;
what a row does with each is weighed by its probability, without sampling error. Off-policy, batches are drawn
by `behaviour`, as from a sampler that lags behind the policy.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpt.envs import exact
from jaxpt.objectives.row import Row
from jaxpt.ops.masked import safe_div, stop
from jaxpt.types import Array, bare_trajectory


class Moments(NamedTuple):
    """Of the gradient of a row's loss by the table of logits. An optimizer goes the other way."""

    mean: Array  # [nodes,V]
    variance: Array  # [] E |gradient - mean|^2, summed over the table


def expected_gradient(
    row: Row, leaves: exact.Leaves, logits: Array, group: int, *, groups: int = 1,
    behaviour: Array | None = None, reference: Array | None = None, values: Array | None = None,
    chunk: int = 4096, **hyper: float,
) -> Moments:
    """Mean and variance of the row's gradient at `logits`, over all batches of `groups` x `group` leaves.

    Args:
      logits, behaviour, reference: [nodes,V]; who is trained, who draws the batches and gives old_logp (sampler_logp to
        rows that need it: old_logp is the trained one's then), and the KL's reference. None: the policy itself, as a
        constant.
      values: [nodes] a critic's values, for rows that need one (exact.node_values are the true ones).
      chunk: batches computed at once; memory grows with chunk x groups x group x T x nodes x V.

    Raises:
      ValueError: the number of batches does not fit an int32.
    """
    size, batches = groups * group, leaves.reward.shape[0] ** (groups * group)
    if batches + chunk > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{leaves.reward.shape[0]} leaves in batches of {size}: {batches} are too many")
    behaviour, reference = (stop(logits if x is None else x) for x in (behaviour, reference))
    drawn_logp, ref_logp = exact.leaf_logp(behaviour, leaves), exact.leaf_logp(reference, leaves)
    corrects = "sampler_logp" in row.needs
    old_logp = exact.leaf_logp(stop(logits), leaves) if corrects else drawn_logp
    chosen_logp = jnp.sum(drawn_logp, axis=1)

    def statistics(logits: Array) -> dict[str, Array]:
        stats = {"logp": exact.leaf_logp(logits, leaves)}
        if "entropy" in row.needs:
            stats["entropy"] = exact.node_entropy(logits, leaves)[leaves.node]
        return stats

    # The chain rule by hand: the table's Jacobian is the same for every batch, [N,T,nodes,V].
    now, jacobian = statistics(logits), jax.jacobian(statistics)(logits)

    def gradient(members: Array) -> Array:
        traj = bare_trajectory(
            leaves.tokens[members], leaves.mask[members], reward=leaves.reward[members],
            old_logp=old_logp[members], group=jnp.arange(size) // group, length=leaves.length[members],
        )
        given = {"ref_logp": ref_logp[members]} if "ref_logp" in row.needs else {}
        sampled = {"sampler_logp": drawn_logp[members]} if corrects else {}
        critic = {"values": values[leaves.node[members]]} if "values" in row.needs else {}
        ready = row.prepare(traj, **given, **critic, **sampled, **hyper)

        def loss(stats):
            return row.loss(
                stats["logp"], traj.old_logp, ready["advantages"], ready["mask"], totals=ready["totals"],
                entropy=stats.get("entropy"), prompt_tokens=ready["prompt_tokens"], **given, **sampled, **hyper,
            )[0]

        pull = jax.grad(loss)({name: x[members] for name, x in now.items()})
        return sum(jnp.tensordot(pull[name], jacobian[name][members], 2) for name in pull)

    chunk = min(chunk, batches)

    def visit(sofar, first):
        number = first + jnp.arange(chunk)
        members = jnp.stack(jnp.unravel_index(number % batches, (leaves.reward.shape[0],) * size), axis=1)
        p = jnp.where(number < batches, jnp.exp(jnp.sum(chosen_logp[members], axis=1)), 0.0)
        grads = jax.vmap(gradient)(members)
        mean = safe_div(jnp.tensordot(p, grads, 1), jnp.sum(p))
        spread = p @ jnp.sum((grads - mean[None]) ** 2, axis=(1, 2))
        return _pooled(sofar, (jnp.sum(p), mean, spread)), None

    nothing = jnp.zeros((), logits.dtype), jnp.zeros_like(logits), jnp.zeros((), logits.dtype)
    firsts = chunk * jnp.arange(math.ceil(batches / chunk), dtype=jnp.int32)
    (_, mean, spread), _ = jax.lax.scan(visit, nothing, firsts)
    return Moments(mean, spread)


def _pooled(a: tuple, b: tuple) -> tuple:
    """Weight, mean and sum of squares about the mean, of two weighed samples together (Chan et al. 1979)."""
    (weight_a, mean_a, spread_a), (weight_b, mean_b, spread_b) = a, b
    weight = weight_a + weight_b
    share = safe_div(weight_b, weight)
    apart = jnp.sum((mean_b - mean_a) ** 2)
    return weight, mean_a + share * (mean_b - mean_a), spread_a + spread_b + weight_a * share * apart
