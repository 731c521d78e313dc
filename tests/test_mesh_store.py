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


def test_another_state_is_refused_before_any_array_is_read(tmp_path):
    save_state(tmp_path / "saved", jax.jit(start)(jax.random.key(5)))
    mesh, like = parallel.make_mesh(2), jax.eval_shape(start, jax.random.key(0))
    wider = jax.eval_shape(lambda key: start(key, width=32), jax.random.key(0))
    others = [
        (wider, r"opt/inner/1/mu/embed: float32\[8, 16\], expected float32\[8, 32\]"),
        (like | {"step": jax.ShapeDtypeStruct((), jnp.float32)}, r"step: int32\[\], expected float32\[\]"),
        (like | {"seen": jax.ShapeDtypeStruct((3,), jnp.int32)}, r"seen: no such array, expected int32\[3\]"),
        ({name: x for name, x in like.items() if name != "step"}, r"step: int32\[\], expected no such array"),
    ]
    for other, said in others * 5:  # reads begun and left would end here and there in a closed loop, and warn
        with pytest.raises(UserError, match=f"holds another state than this program's .{said}"):
            load_state(tmp_path / "saved", other, mesh)


def test_a_damaged_checkpoint_is_told(tmp_path):
    save_state(tmp_path / "saved", jax.jit(start)(jax.random.key(5)))
    file = tmp_path / "saved" / "_METADATA"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match="it is damaged"):
        load_state(tmp_path / "saved", jax.eval_shape(start, jax.random.key(0)), parallel.make_mesh(2))
