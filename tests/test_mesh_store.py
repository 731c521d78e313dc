"""A state saved on one mesh and read on another is the same state, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.lab.errors import UserError
from jaxpt.lab.mesh_store import load_state, save_state
from jaxpt.models import ModelConfig, make_model
from jaxpt.train import parallel
from jaxpt.train.optim import OptimConfig, start_optimizer


def start(key, width=16):
    model = make_model(ModelConfig(vocab=8, d_model=width, n_layers=1, n_heads=2))
    params, opt = start_optimizer(OptimConfig(weights="bfloat16"), model.init(key))
    return {"params": params, "opt": opt, "key": key, "step": jnp.int32(7)}


def test_a_state_moves_between_meshes(tmp_path):
    state = jax.jit(start)(jax.random.key(5))
    save_state(tmp_path / "saved", parallel.place(state, parallel.make_mesh(8)))
    mesh = parallel.make_mesh(2, tensor=2)
    like = jax.eval_shape(start, jax.random.key(0))
    found = load_state(tmp_path / "saved", like, mesh)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_array_equal(a, b)
    assert found["params"]["layer_0"]["attn"]["qkv"].sharding == parallel.shardings(like, mesh)["params"]["layer_0"]["attn"]["qkv"]

    with pytest.raises(UserError, match="it exists already"):
        save_state(tmp_path / "saved", state)
    with pytest.raises(UserError, match="there is no such folder"):
        load_state(tmp_path / "nothing", like, mesh)
    other = jax.eval_shape(lambda key: start(key, width=32), jax.random.key(0))
    with pytest.raises(UserError, match="holds another state"):
        load_state(tmp_path / "saved", other, mesh)
