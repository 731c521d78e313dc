"""One rule for where a state lies, and the same updates on every mesh: FSDP, tensor, expert and sequence axes."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.models import LoraConfig, ModelConfig, MoeConfig, make_model
from jaxpt.models.mesh import spec_of
from jaxpt.train import parallel
from jaxpt.train.common import EnvConfig, EvalConfig
from jaxpt.train.optim import OptimConfig, make_optimizer
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.train.sft import SftConfig, make_sft

DEVICES = 8
ENV = EnvConfig("tree", {"vocab": 3, "depth": 2})
# Shared experts are dense matrices beside the stacked ones: one model meets every axis.
MODEL = ModelConfig(
    vocab=8, d_model=16, n_layers=1, n_heads=2, moe=MoeConfig(experts=4, top_k=2, shared=1, dispatch="capacity"),
)
# eps: where a gradient is 0 but for rounding, plain Adam makes steps of the whole rate from its sign.
COMMON = {"env": ENV, "model": MODEL, "optim": OptimConfig(learning_rate=1e-2, eps=1e-4), "eval": EvalConfig(5, 8)}
PROGRAMS = {
    "sft": (make_sft, SftConfig(**COMMON, batch=16, style="best")),
    "policy": (make_policy, PolicyConfig(**COMMON, prompts=8, group=4, temperature=4.0)),
}
MESHES = {
    "fsdp": {"data": 8}, "tensor": {"data": 4, "tensor": 2}, "expert": {"data": 2, "expert": 4},
    "sequence": {"data": 4, "sequence": 2}, "mixed": {"data": 2, "tensor": 2, "expert": 2},
}
STEPS = 20
CORE = [("sft", "mixed")]  # test_devices has the policy of every row under FSDP
SLOW = [(kind, name) for kind in PROGRAMS for name in MESHES if (kind, name) not in CORE]


@pytest.fixture(scope="module")
def run():
    """kind -> (the state after 2 updates on one device, the states and losses of the updates that follow)."""
    done = {}

    def reference(kind):
        if kind not in done:
            make, cfg = PROGRAMS[kind]
            program = make(cfg)
            step = jax.jit(program.step)
            state = jax.jit(program.init)(jax.random.key(0), {k: jnp.float32(v) for k, v in program.hyper.items()})
            for _ in range(2):
                state, _ = step(state)
            begun, states, metrics = state, [], []
            for _ in range(STEPS if kind == "sft" else 1):
                state, measured = step(state)
                states.append(state)
                metrics.append(measured)
            done[kind] = begun, states, metrics
        return done[kind]

    return reference


@pytest.mark.parametrize("kind, name", [*CORE, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_updates_agree_with_one_device(run, kind, name):
    begun, states, metrics = run(kind)
    mesh = parallel.make_mesh(**MESHES[name])
    state = parallel.place(begun, mesh)
    step = parallel.step_by_jit(*PROGRAMS[kind], mesh)
    for number, (expected, measured) in enumerate(zip(states, metrics, strict=True)):
        state, got = step(state)
        if number == 0:
            for a, b in zip(*map(jax.tree.leaves, (expected["params"], state["params"])), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
            for metric, value in measured.items():
                np.testing.assert_allclose(value, got[metric], rtol=1e-4, atol=1e-5, err_msg=metric)
        np.testing.assert_allclose(measured["loss"], got["loss"], atol=1e-4)
    for leaf in jax.tree.leaves([state["opt"], state["params"]]):
        assert leaf.ndim < 2 or leaf.addressable_shards[0].data.size < leaf.size  # every matrix and moment stays cut


def test_a_fresh_state_is_made_where_it_lies():
    make, cfg = PROGRAMS["sft"]
    program, mesh = make(cfg), parallel.make_mesh(**MESHES["expert"])
    start = jax.random.key(3), {k: jnp.float32(v) for k, v in program.hyper.items()}
    whole, cut = jax.jit(program.init)(*start), parallel.start_on(make, cfg, mesh, *start)
    for a, b in zip(*map(jax.tree.leaves, (whole["params"], cut["params"])), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert cut["params"]["layer_0"]["moe"]["down"].sharding.spec[0] == "expert"


def specs(cfg, **sizes):
    sizes = {"data": 1, "tensor": 1, "expert": 1, "sequence": 1, **sizes}
    params = jax.eval_shape(make_model(cfg).init, jax.random.key(0))
    tree = {"params": params, "opt": jax.eval_shape(make_optimizer(OptimConfig()).init, params)}
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (spec_of(path, x.shape, sizes), x) for path, x in found}, sizes


@pytest.mark.parametrize("more", [
    {}, {"scan": True}, {"tied": False}, {"latent": 8}, {"moe": MoeConfig(experts=4)},
    {"moe": MoeConfig(experts=4, shared=1), "scan": True}, {"lora": LoraConfig(rank=3, targets="all", kind="dora")},
])
def test_every_matrix_is_cut_and_the_cuts_divide(more):
    """By the rule alone: the largest share of a device, of parameters and of both moments, is near 1 / devices."""
    cfg = ModelConfig(vocab=32, d_model=32, n_layers=2, n_heads=4, **more)
    found, sizes = specs(cfg, data=2, tensor=2, expert=2)
    local = 0
    for name, (spec, x) in found.items():
        cut = [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in spec]
        used = [axis for axes in cut for axis in axes]
        assert len(set(used)) == len(used), name
        shares = [prod(sizes[axis] for axis in axes) for axes in cut]
        assert all(size % share == 0 for size, share in zip(x.shape, shares, strict=False)), name
        local += x.size / prod(shares)
    total = sum(x.size for _, x in found.values())
    assert total / 8 <= local < total / (4 if "lora" in more else 6)  # an adapter's low rank stays whole


def test_the_rule_by_hand():
    found, _ = specs(ModelConfig(vocab=8, d_model=8, n_heads=2, moe=MoeConfig(experts=2)), data=2, tensor=2, expert=2)
    layer = "['params']['layer_0']"
    rows = ("data", "expert", "sequence")
    assert tuple(found["['params']['embed']"][0]) == ("tensor", rows)
    assert tuple(found[f"{layer}['attn']['qkv']"][0]) == (rows, "tensor")
    assert tuple(found[f"{layer}['attn']['out']"][0]) == ("tensor", rows)
    assert tuple(found[f"{layer}['moe']['gate_up']"][0]) == ("expert", ("data", "sequence"), "tensor")
    assert tuple(found[f"{layer}['attn_norm']['scale']"][0]) == ()
    moment = [spec for name, (spec, _) in found.items() if ".mu" in name and name.endswith("['qkv']")]
    assert [tuple(spec) for spec in moment] == 2 * [(rows, "tensor")]


def test_what_does_not_divide_is_said():
    cfg = ModelConfig(vocab=9, d_model=8, n_heads=2, moe=MoeConfig(experts=3))
    with pytest.raises(ValueError, match=r"tensor=2 does not divide 9 of .*embed \[9, 8\], expected a divisor"):
        specs(cfg, tensor=2)
    with pytest.raises(ValueError, match=r"expert=2 does not divide 3 of .*moe/down"):
        specs(cfg, expert=2)
    with pytest.raises(ValueError, match="data=4, tensor=4 takes 16 devices, expected at most the 8"):
        parallel.make_mesh(4, tensor=4)
    with pytest.raises(ValueError, match="tensor=0, expected at least 1"):
        parallel.make_mesh(tensor=0)
    rows = parallel.sharded(parallel.make_mesh(8))
    with pytest.raises(ValueError, match="12 rows do not divide over 8 shards"):
        jax.eval_shape(rows.spread, jnp.zeros(12))
