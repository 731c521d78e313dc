"""Muon against the singular value decomposition, and its place in the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpt.models import ModelConfig, MoeConfig, make_model, stack_layers
from jaxpt.models.mesh import AXES, spec_of
from jaxpt.train.muon import RMS, is_hidden_matrix, scale_by_muon
from jaxpt.train.optim import OptimConfig, make_optimizer


def one_layer(heads=2, kv_heads=2):
    """A layer's matrices, and random gradients for them."""
    cfg = ModelConfig(vocab=8, d_model=16, n_layers=1, n_heads=heads, n_kv_heads=kv_heads)
    layer = make_model(cfg).init(jax.random.key(0))["layer_0"]
    matrices = {"layer_0": {"attn": layer["attn"], "mlp": layer["mlp"]}}
    return matrices, jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), matrices)


def test_directions_have_the_gradient_s_singular_vectors_and_even_values():
    """Oracle: numpy's singular value decomposition."""
    matrices, grads = one_layer()
    opt = scale_by_muon()
    update = jax.jit(lambda g: opt.update(g, opt.init(matrices))[0])(grads)
    for name in (("attn", "out"), ("mlp", "down")):
        G, D = (np.asarray(tree["layer_0"][name[0]][name[1]]) for tree in (grads, update))
        U, _, Vt = np.linalg.svd(G, full_matrices=False)
        inside = U.T @ D @ Vt.T / (RMS * max(G.shape) ** 0.5)
        assert (0.6 < np.diag(inside)).all() and (np.diag(inside) < 1.3).all()
        np.testing.assert_allclose(inside, np.diag(np.diag(inside)), atol=2e-3)


def test_layers_get_muon_and_the_rest_gets_adam_in_either_layout():
    params = make_model(ModelConfig(vocab=8, d_model=16, n_layers=2, tied=False)).init(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(is_hidden_matrix(params))
    chosen = {"/".join(key.key for key in path) for path, hidden in leaves if hidden}
    names = ("attn/qkv", "attn/out", "mlp/gate_up", "mlp/down")
    assert chosen == {f"layer_{i}/{name}" for i in range(2) for name in names}
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    muon, adam = OptimConfig(method="muon"), OptimConfig(method="adamw")

    def first_update(cfg, params, grads):
        opt = make_optimizer(cfg, 1.0)
        return jax.jit(lambda: opt.update(grads, opt.init(params), params)[0])()

    by_muon, by_adam = first_update(muon, params, grads), first_update(adam, params, grads)
    np.testing.assert_array_equal(by_muon["embed"], by_adam["embed"])
    np.testing.assert_array_equal(by_muon["layer_0"]["mlp_norm"]["scale"],
                                  by_adam["layer_0"]["mlp_norm"]["scale"])
    for x in [x for x in jax.tree.leaves(by_muon["layer_1"]) if x.ndim == 2]:
        np.testing.assert_allclose(jnp.sqrt(jnp.mean(x * x)), RMS, rtol=0.15)
    stacked = first_update(muon, stack_layers(params), stack_layers(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), stacked, stack_layers(by_muon))


def test_queries_keys_and_values_are_orthogonalised_one_by_one():
    """A large gradient of the values takes nothing from queries and keys, with grouped keys too."""
    matrices, grads = one_layer(heads=4, kv_heads=2)
    opt = scale_by_muon()
    update = jax.jit(lambda g: opt.update(g, opt.init(matrices))[0]["layer_0"]["attn"]["qkv"])
    louder = jax.tree.map(lambda x: x, grads)
    louder["layer_0"]["attn"]["qkv"] = louder["layer_0"]["attn"]["qkv"].at[:, 24:].multiply(100.0)
    np.testing.assert_allclose(update(louder), update(grads), atol=1e-3)
    for part in (slice(0, 16), slice(16, 24), slice(24, 32)):
        values = np.linalg.svd(np.asarray(update(grads))[:, part], compute_uv=False) / (RMS * 4)
        assert (values > 0.6).all() and (values < 1.3).all()


def test_every_expert_and_router_is_orthogonalised_by_itself_in_either_layout():
    """One expert's gradient is a thousand times the others': all updates have singular values near one size."""
    moe = MoeConfig(experts=3, top_k=2, d_ff=8, shared=1, bias=True)
    init = make_model(ModelConfig(vocab=8, d_model=16, n_layers=2, moe=moe)).init
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(init, jax.random.key(0)))
    for tree in (params, stack_layers(params)):
        chosen = {
            "/".join(key.key for key in path[1:]) for path, hidden in jax.tree_util.tree_leaves_with_path(is_hidden_matrix(tree))
            if hidden
        }
        moes = ("router", "gate_up", "down", "shared_gate_up", "shared_down")
        assert chosen == {"attn/qkv", "attn/out", *(f"moe/{name}" for name in moes)}
    layers = {name: stack_layers(params)["layers"][name] for name in ("attn", "moe")}
    layers["moe"] = {name: x for name, x in layers["moe"].items() if name != "bias"}
    grads = {"layers": jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), layers)}
    grads["layers"]["moe"]["gate_up"] = grads["layers"]["moe"]["gate_up"].at[1, 2].multiply(1000.0)
    opt = scale_by_muon()
    update = jax.jit(lambda g: opt.update(g, opt.init({"layers": layers}))[0]["layers"])(grads)
    halves = {name: np.split(np.asarray(update["moe"][name]), 2, axis=-1) for name in ("gate_up", "shared_gate_up")}
    whole = {name: [np.asarray(update["moe"][name])] for name in ("router", "down", "shared_down")}
    for name, parts in {**halves, **whole}.items():
        for part in parts:
            values = np.linalg.svd(part, compute_uv=False) / (RMS * max(part.shape[-2:]) ** 0.5)
            assert (values > 0.5).all() and (values < 1.3).all(), name


WIDE = {"n_heads": 2, "latent": 8, "latent_query": 8, "d_head": 8, "d_rope": 4, "d_value": 6}


@pytest.mark.parametrize("fields", [{"qkv_bias": True}, {"qkv_bias": True, "scan": True}, WIDE, {**WIDE, "scan": True}],
                         ids=["bias", "bias-stacked", "latent", "latent-stacked"])
def test_biases_are_no_matrices_and_matrices_of_any_width_fall_apart(fields):
    """Vectors move as by Adam, stacked or not; of latent attention keys and values are orthogonalised one by one, where
    heads' values are narrower than their keys too. And of every matrix of layers a mesh knows how it is cut."""
    cfg = ModelConfig(vocab=8, d_model=16, n_layers=2, **fields)
    params = jax.eval_shape(make_model(cfg).init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    grads = jax.tree.map_with_path(lambda path, x: jax.random.normal(jax.random.key(len(str(path))), x.shape), params)
    louder = jax.tree.map_with_path(
        lambda path, x: x.at[..., 2 * 8 :].multiply(100.0) if path[-1].key == "widen" else x, grads)

    def directions(method, grads):
        opt = make_optimizer(OptimConfig(method=method, clip=1e9), 1.0)
        return jax.jit(lambda: opt.update(grads, opt.init(params), params)[0])()

    muon, adam, loud = directions("muon", grads), directions("adamw", grads), directions("muon", louder)
    for path, x in jax.tree_util.tree_leaves_with_path(muon):
        name, other = path[-1].key, jax.tree_util.tree_leaves_with_path(adam)
        by_adam = next(y for at, y in other if at == path)
        vector = name.endswith(("scale", "bias"))
        assert np.array_equal(x, by_adam) == (vector or not path[0].key.startswith("layer")), path
        if path[0].key.startswith("layer") and not vector:
            assert spec_of(path, x.shape, dict.fromkeys(AXES, 2)) != PartitionSpec(), path
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), muon, loud)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="method: got 'sgd', expected one of adamw, muon"):
        OptimConfig(method="sgd")
