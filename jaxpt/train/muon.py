"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Every singular value of an update becomes about 1, so that rare directions of a weight matrix move as fast
as common ones. The arithmetic is optax's; here stands which matrices of a model it is for.
"""

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from jaxpt.types import Params

NO_MATRIX = ("scale", "bias")  # ends of the names of leaves that are vectors, though layers may be stacked
RMS = 0.2  # of an update's entries, as AdamW's are: one learning rate fits both (Liu et al. 2025, 2502.16982)


def scale_by_muon() -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised, scaled to entries of size RMS. For the matrices of layers.

    Matrices that the model keeps side by side for speed (queries, keys and values; gate and up) are
    orthogonalised one by one. Together they would share their singular values, and the one with the largest
    gradient would leave the others almost no step.
    """
    last_two = lambda tree: jax.tree.map(lambda x: MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), tree)  # noqa: E731
    inner = optax.contrib.scale_by_muon(weight_dimension_numbers=last_two)

    def update(updates: Params, state, params: Params | None = None):
        directions, state = inner.update(apart(updates), state)
        sized = jax.tree.map(lambda x: RMS * max(x.shape[-2:]) ** 0.5 * x, directions)
        together = lambda parts: jnp.concatenate(parts, axis=-1)  # noqa: E731
        return jax.tree.map(together, sized, is_leaf=lambda x: isinstance(x, list)), state

    return optax.GradientTransformation(lambda params: inner.init(apart(params)), update)


def apart(tree: Params) -> Params:
    """The tree with every matrix replaced by the list of the matrices that stand side by side in it."""
    return jax.tree.map_with_path(lambda path, x: jnp.split(x, cuts(path[-1].key, tree[path[0].key]), axis=-1), tree)


def cuts(name: str, layer: Params) -> list[int]:
    """The columns at which the matrix `name` of a layer falls into matrices of their own."""
    if name == "qkv":
        queries = layer["attn"]["out"].shape[-2]  # heads times their width; keys and values share the rest
        return [queries, (queries + layer["attn"]["qkv"].shape[-1]) // 2]
    if name == "narrow":
        return [layer["attn"]["widen"].shape[-2]]
    if name == "widen":
        return [layer["attn"]["widen"].shape[-1] - layer["attn"]["out"].shape[-2]]  # keys, then values as wide as `out` is high
    halves = {"gate_up": ("mlp", "moe"), "shared_gate_up": ("moe",)}.get(name, ())
    return [layer[part][name].shape[-1] // 2 for part in halves if part in layer]


def is_hidden_matrix(params: Params) -> Params:
    """True for the matrices of layers: routers', every expert's. Embeddings, unembedding, norm scales, biases and
    adapters (thin matrices, which may be 0) are not for Muon."""
    return jax.tree.map_with_path(
        lambda path, x: path[0].key.startswith("layer") and not path[-1].key.endswith(NO_MATRIX), params
    )
