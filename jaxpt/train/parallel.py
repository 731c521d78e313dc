"""How the rows of a batch lie on devices. A program is written once, for a Layout.

ONE         everything on one device
named(...)  the step runs on every shard of a named axis (shard_map, pmap), sees its own rows, and sums
sharded(..) one global program; the compiler is told that rows are spread over the mesh

Several processes run one step together when each of them, in the same order, does

    jax.distributed.initialize(address, processes, index)      first of all, with process 0's host:port
    mesh = make_mesh()
    step = step_by_jit(make, cfg, mesh)                        or step_by_shard_map
    state = replicate(state, mesh)                             the same state in every process

and then calls step equally often. What comes back is replicated: every process can read all of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpt.types import Array

AXIS = "data"


class Layout(NamedTuple):
    """shards: how many copies of the step run, each with 1/shards of the rows."""

    shards: int
    index: Callable[[], Array]  # number of this shard
    total: Callable[[Any], Any]  # sum of a tree over shards
    spread: Callable[[Any], Any]  # tells the compiler that leading axes are rows

    def rows(self, count: int) -> Array:
        """Global numbers of this shard's rows, of `count` in all."""
        if count % self.shards:
            raise ValueError(f"{count} rows do not divide over {self.shards} shards")
        local = count // self.shards
        return self.index() * local + jnp.arange(local)


ONE = Layout(1, lambda: jnp.int32(0), lambda tree: tree, lambda tree: tree)


def named(shards: int, axis: str = AXIS) -> Layout:
    return Layout(shards, lambda: jax.lax.axis_index(axis), lambda tree: jax.lax.psum(tree, axis), lambda tree: tree)


def sharded(mesh: jax.sharding.Mesh) -> Layout:
    rows = NamedSharding(mesh, P(AXIS))
    spread = lambda tree: jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), tree)  # noqa: E731
    return ONE._replace(spread=spread)


def make_mesh(devices: int | None = None) -> jax.sharding.Mesh:
    """A mesh of that many devices over the rows; by default all of them, those of other processes too.
    (jax.make_mesh defaults to explicit axes.)"""
    chosen = jax.devices()[:devices]
    return jax.make_mesh((len(chosen),), (AXIS,), axis_types=(AxisType.Auto,), devices=chosen)


def replicate(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """The tree on every device of the mesh. Where the mesh spans processes, each gives its own copy of the same
    values; jax raises where they differ."""
    everywhere = NamedSharding(mesh, P())

    def put(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put takes typed keys to its own devices only
            return jax.random.wrap_key_data(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jax.device_put(np.asarray(x), everywhere)

    return jax.tree.map(put, tree)


def step_by_jit(make: Callable, cfg: Any, mesh: jax.sharding.Mesh) -> Callable:
    """step(state) of make(cfg, layout) as one sharded program; the state is replicated."""
    everywhere = NamedSharding(mesh, P())
    return jax.jit(make(cfg, sharded(mesh)).step, in_shardings=everywhere, out_shardings=everywhere)


def step_by_shard_map(make: Callable, cfg: Any, mesh: jax.sharding.Mesh) -> Callable:
    """step(state) run on every shard with explicit sums."""
    step = make(cfg, named(mesh.size)).step
    # check_vma off: a scan whose carry starts from constants is not "varying" and would be rejected.
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def step_by_pmap(make: Callable, cfg: Any, devices: int) -> Callable:
    """The same by jax.pmap, which is in maintenance mode: a compatibility path. The state goes in and comes out
    as one copy."""
    run = jax.pmap(make(cfg, named(devices)).step, axis_name=AXIS, devices=jax.devices()[:devices])
    copies = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (devices, *x.shape)), tree)  # noqa: E731
    return lambda state: jax.tree.map(lambda x: x[0], run(copies(state)))
