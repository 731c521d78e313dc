"""How a step lies on devices. A program is written once, for a Layout.

ONE         everything on one device
sharded(..) one global program over a mesh; the compiler is told how the state and the rows lie on it
named(...)  the step runs on every shard of a named axis (shard_map, pmap), sees its own rows, and sums

Which axes a mesh has, and where the leaves of a state lie on it, says jaxpt.models.mesh.

Several processes run one step together when each of them, in the same order, does

    jax.distributed.initialize(address, processes, index)      first of all, with process 0's host:port
    mesh = make_mesh(data, tensor=..., ...)
    step = step_by_jit(make, cfg, mesh)                        or step_by_shard_map, over data alone
    state = start_on(make, cfg, mesh, key, hyper)              or place(state, mesh), the same state in every process

and then calls step equally often. Metrics come back replicated: every process can read all of them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpt.models.mesh import AXES, DATA, EXPERT, ROWS, SEQUENCE, TENSOR, spec_of
from jaxpt.types import Array, Key


class Layout(NamedTuple):
    """shards: how many copies of the step run, each with 1/shards of the rows."""

    shards: int
    index: Callable[[], Array]  # number of this shard
    total: Callable[[Any], Any]  # sum of a tree over shards
    spread: Callable[[Any], Any]  # tells the compiler that leading axes are rows
    tokens: Callable[[Mapping[str, Array]], Any]  # the same of a batch with `tokens` [B,T], whose second axes are tokens

    def rows(self, count: int) -> Array:
        """Global numbers of this shard's rows, of `count` in all."""
        check_rows(count, self.shards)
        local = count // self.shards
        return self.index() * local + jnp.arange(local)


def check_rows(count: int, shards: int) -> None:
    if count % shards:
        raise ValueError(f"{count} rows do not divide over {shards} shards")


ONE = Layout(1, lambda: jnp.int32(0), lambda tree: tree, lambda tree: tree, lambda batch: batch)


def named(shards: int, axis: str = DATA) -> Layout:
    return ONE._replace(
        shards=shards, index=lambda: jax.lax.axis_index(axis), total=lambda tree: jax.lax.psum(tree, axis)
    )


def sharded(mesh: Mesh) -> Layout:
    over = lambda x, *axes: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))  # noqa: E731

    def row(x):
        check_rows(len(x), math.prod(mesh.shape[axis] for axis in ROWS))
        return over(x, ROWS)

    def tokens(batch):
        width = batch["tokens"].shape[1]
        cut = lambda x: over(x, ROWS, SEQUENCE) if x.ndim > 1 and x.shape[1] == width else row(x)  # noqa: E731
        return jax.tree.map(cut, batch)

    return ONE._replace(spread=lambda tree: jax.tree.map(row, tree), tokens=tokens)


def make_mesh(data: int | None = None, *, tensor: int = 1, expert: int = 1, sequence: int = 1) -> Mesh:
    """A mesh over the first devices, those of other processes too; `data` takes all that the others leave by default.

    Raises ValueError where there are too few devices. (jax.make_mesh defaults to explicit axes.)
    """
    have, sizes = jax.devices(), {DATA: data, TENSOR: tensor, EXPERT: expert, SEQUENCE: sequence}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"mesh: got {name}={size}, expected at least 1")
    if data is None:
        sizes[DATA] = max(len(have) // (tensor * expert * sequence), 1)
    need = math.prod(sizes.values())
    if need > len(have):
        asked = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ValueError(f"mesh: {asked} takes {need} devices, expected at most the {len(have)} that there are")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 4, devices=have[:need])


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The tree (of arrays or shapes) with a NamedSharding in the place of every leaf."""
    return jax.tree.map_with_path(lambda path, x: NamedSharding(mesh, spec_of(path, x.shape, mesh.shape)), tree)


def place(tree: Any, mesh: Mesh) -> Any:
    """The tree on the mesh, as the rule says. Where the mesh spans processes, each gives its own copy of the same
    values; jax raises where they differ."""

    def put(x, sharding):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put takes typed keys to its own devices only
            return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
        return jax.device_put(np.asarray(x), sharding)

    return jax.tree.map(put, tree, shardings(tree, mesh))


def start_on(make: Callable, cfg: Any, mesh: Mesh, key: Key, hyper: Mapping[str, Array]) -> Any:
    """The state that make(cfg).init begins with, made where it lies: no device ever holds all of it."""
    init = make(cfg).init
    return jax.jit(init, out_shardings=shardings(jax.eval_shape(init, key, hyper), mesh))(key, hyper)


def step_by_jit(make: Callable, cfg: Any, mesh: Mesh) -> Callable:
    """step(state) of make(cfg, layout) as one program over the mesh. The state lies as `place` puts it, and is donated."""
    program = make(cfg, sharded(mesh))
    state = jax.eval_shape(program.init, jax.random.key(0), {name: jnp.float32(x) for name, x in program.hyper.items()})
    where = shardings(state, mesh)

    def step(state):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return program.step(state)

    return jax.jit(step, in_shardings=(where,), out_shardings=(where, NamedSharding(mesh, P())), donate_argnums=0)


def step_by_shard_map(make: Callable, cfg: Any, mesh: Mesh) -> Callable:
    """step(state) run on every shard of a mesh over data alone, with explicit sums; the state is on every device."""
    step = make(cfg, named(mesh.size)).step
    # check_vma off: a scan whose carry starts from constants is not "varying" and would be rejected.
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def step_by_pmap(make: Callable, cfg: Any, devices: int) -> Callable:
    """The same by jax.pmap, which is in maintenance mode: a compatibility path. The state goes in and comes out
    as one copy."""
    run = jax.pmap(make(cfg, named(devices)).step, axis_name=DATA, devices=jax.devices()[:devices])
    copies = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (devices, *x.shape)), tree)  # noqa: E731
    return lambda state: jax.tree.map(lambda x: x[0], run(copies(state)))
