"""The only masking arithmetic. Rule: `where` before arithmetic, so that whatever stands at a masked slot
(NaN, infinity, garbage) reaches neither a value nor a gradient.

A mask is bool or a float/int array whose entries are > 0 where the slot counts. Every function broadcasts
the mask against nothing: shapes are equal.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpt.types import Array


def keep(x: Array, mask: Array, fill: float = 0.0) -> Array:
    """x where the mask counts, `fill` elsewhere; the gradient into masked slots is exactly 0.

    This is what must happen to an input before the first operation on it. (0 * NaN is NaN, and the
    backward pass multiplies a zero cotangent with whatever the forward pass stored.)
    """
    return jnp.where(mask > 0, x, jnp.asarray(fill, x.dtype))


def at_least_float32(x: Array) -> Array:
    """float32 for anything narrower; float64 stays."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def masked_sum(x: Array, mask: Array, axis: int | None = None) -> Array:
    """Sum over the slots that count; 0 where there are none."""
    return jnp.sum(keep(x, mask), axis=axis)


def count(mask: Array, axis: int | None = None) -> Array:
    """How many slots count, as float32."""
    return jnp.sum(mask > 0, axis=axis, dtype=jnp.float32)


def safe_div(num: Array, den: Array) -> Array:
    """num / den, and 0 (value and gradient) where den is 0."""
    empty = den == 0
    return jnp.where(empty, 0.0, num / jnp.where(empty, 1.0, den))


def masked_mean(x: Array, mask: Array, axis: int | None = None) -> Array:
    """Mean over the slots that count; 0 where there are none."""
    return safe_div(masked_sum(x, mask, axis), count(mask, axis))


def less_mean(x: Array, mask: Array, n: Array, total: Callable) -> Array:
    """x less its mean over the n slots of the whole batch that count; x is 0 off the mask, and so is the result.
    `total` sums a tree over the shards of the batch."""
    return keep(x - safe_div(total(jnp.sum(x)), n), mask)


def beyond_rounding(squares: Array, size: Array) -> Array:
    """Whether numbers vary by more than float rounding; squares: sum of (x - mean)^2, size: sum of x^2."""
    return squares > (16 * jnp.finfo(squares.dtype).eps) ** 2 * size


def bounded_exp(x: Array, bound: float = 20.0) -> Array:
    """exp(x) for x <= bound, continued by its tangent beyond: finite in value and gradient for every finite
    x, monotone, and without the dead zone that clipping leaves (log-ratios of +-1e3 stay usable)."""
    return jnp.exp(jnp.minimum(x, bound)) * (1.0 + jnp.maximum(x - bound, 0.0))


def bounded_expm1(x: Array, bound: float = 20.0) -> Array:
    """exp(x) - 1 without cancellation near 0, with the linear tail of bounded_exp."""
    return jnp.expm1(jnp.minimum(x, bound)) + jnp.exp(bound) * jnp.maximum(x - bound, 0.0)


def exp_excess(x: Array) -> Array:
    """exp(x) - 1 - x >= 0 without cancellation near 0, and with the linear tail of bounded_exp."""
    near = jnp.abs(x) < 0.1
    y = jnp.where(near, x, 0.0)
    series = 0.5 * y**2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6))))
    far = jnp.where(near, 1.0, x)
    return jnp.where(near, series, bounded_expm1(far) - far)


def group_sum(x: Array, group: Array, mask: Array) -> Array:
    """Sum of x over the rows of the same group that count, given back to each row. x, group, mask [B].

    Any int labels, in any order. Quadratic in B and exact under permutation of rows up to rounding: batches
    of a few thousand rows are what it is for.
    """
    same = group[:, None] == group[None, :]
    return jnp.sum(jnp.where(same & (mask > 0)[None, :], x[None, :], 0.0), axis=1)


def group_extreme(x: Array, group: Array, mask: Array) -> tuple[Array, Array]:
    """Smallest and largest x that counts in each row's group, given back to each row; (inf, -inf) where none."""
    same = (group[:, None] == group[None, :]) & (mask > 0)[None, :]
    low = jnp.min(jnp.where(same, x[None, :], jnp.inf), axis=1)
    high = jnp.max(jnp.where(same, x[None, :], -jnp.inf), axis=1)
    return low, high


def largest(x: Array, mask: Array, number: Array) -> Array:
    """Which slots are among the `number` largest x that count, bool: equal ones all or none of them, none where number
    is 0. With number a share of count(mask), neither padding nor repeating the whole changes the choice."""
    ranked = jnp.sort(keep(x, mask, -jnp.inf), axis=None)
    wanted = jnp.ceil(number * (1 - 1e-6)).astype(jnp.int32)  # a share of a count may round up to the next integer
    wanted = jnp.minimum(wanted, count(mask).astype(jnp.int32))
    return (mask > 0) & (x >= ranked[jnp.minimum(x.size - wanted, x.size - 1)]) & (wanted > 0)


def sorted_groups(keys: tuple[Array, ...]) -> tuple[Callable, Callable]:
    """(sum, extreme) as group_sum(x, mask) and group_extreme(x, mask), for rows [N] of which equal keys make a group.

    Sorted once, then scanned from both ends: n log n in place of n^2, and the same sums in every run.
    """
    order = jnp.lexsort(keys)
    changes = jnp.any(jnp.stack([key[order][1:] != key[order][:-1] for key in keys]), axis=0)
    yes, place = jnp.ones(1, bool), jnp.arange(order.size)
    begins, ends = jnp.concatenate([yes, changes]), jnp.concatenate([changes, yes])
    last = jax.lax.cummin(jnp.where(ends, place, order.size - 1), reverse=True)
    last_of = jnp.zeros_like(last).at[order].set(last)

    def over(op: Callable, x: Array) -> Array:
        def join(a, b):
            return a[0] | b[0], jnp.where(b[0], b[1], op(a[1], b[1]))

        return jax.lax.associative_scan(join, (begins, x[order]))[1][last_of]

    def sum_of(x: Array, mask: Array) -> Array:
        return over(jnp.add, keep(x, mask))

    def extreme_of(x: Array, mask: Array) -> tuple[Array, Array]:
        return over(jnp.minimum, keep(x, mask, jnp.inf)), over(jnp.maximum, keep(x, mask, -jnp.inf))

    return sum_of, extreme_of


def stop(x):
    """Declared constants of a loss: the gradient ends here."""
    return jax.tree.map(jax.lax.stop_gradient, x)


def weighed(x: Array, mask: Array) -> tuple[Array, Array]:
    """(sum, weight) of x over the slots that count, as metrics are passed; no gradient."""
    return masked_sum(stop(x), mask), count(mask)
