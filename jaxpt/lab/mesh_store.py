"""Checkpoints of a state that lies on a mesh, by Orbax: every process writes what it holds, and any mesh reads it back."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxpt.lab.errors import UserError
from jaxpt.train.parallel import shardings


def save_state(folder: str | Path, state: Any) -> None:
    """Writes the state to a new folder, which appears whole or not at all. All processes call this, with one folder that
    all of them can reach. Raises UserError where it exists."""
    folder = Path(folder).absolute()
    if folder.exists():
        raise UserError(f"checkpoint {folder}: it exists already, a new folder is expected")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, _without_keys(state))


def load_state(folder: str | Path, like: Any, mesh: Mesh) -> Any:
    """The state in the folder, laid out on a mesh, which need not be the one that it was saved on.

    like: its shapes, as jax.eval_shape(program.init, key, hyper) gives them. Raises UserError where there is no such folder,
    it is damaged, or it holds another state.
    """
    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder}: there is no such folder")
    bare = jax.eval_shape(_without_keys, like)
    target = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), bare, shardings(bare, mesh))
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(folder).item_metadata  # None where Orbax cannot make sense of it
            _check_same(folder, _arrays(getattr(stored, "tree", None)), _arrays(bare))
            found = checkpointer.restore(folder, target)
        except (ValueError, OSError) as error:
            raise UserError(_damaged(folder, str(error).strip().partition("\n")[0][:200])) from error
    return jax.tree.map(lambda x, y: jax.random.wrap_key_data(y) if _is_key(x) else y, like, found)


def _without_keys(state: Any) -> Any:
    """Typed keys as their numbers, which are arrays."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _arrays(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of a state's arrays, or of what a checkpoint says of its own."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): (tuple(x.shape), str(x.dtype)) for path, x in leaves}


def _check_same(folder: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    """Before any array is read: Orbax would read them all at once, and the others go on where one does not fit."""
    if not stored:
        raise UserError(_damaged(folder, "no array is named"))
    for name in sorted(stored.keys() | expected.keys()):
        if stored.get(name) != expected.get(name):
            raise UserError(f"checkpoint {folder}: it holds another state than this program's "
                            f"({name}: {_shown(stored.get(name))}, expected {_shown(expected.get(name))})")


def _damaged(folder: Path, why: str) -> str:
    return f"checkpoint {folder}: it is damaged, or no state that was saved on a mesh ({why})"


def _shown(array: tuple[tuple[int, ...], str] | None) -> str:
    return "no such array" if array is None else f"{array[1]}{list(array[0])}"
