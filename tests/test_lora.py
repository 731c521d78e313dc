"""Adapters: that they change nothing at first, merge exactly, train alone, and are batched over ranks and rates."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.models import LoraConfig, ModelConfig, MoeConfig, make_model, stack_layers
from jaxpt.models.lora import attach, init_lora, merge, merged, scale_of, unmerge
from jaxpt.ops.dots import LowRank, Transposed, dot, take
from jaxpt.train.optim import OptimConfig, make_optimizer

BASE = ModelConfig(
    vocab=9, d_model=8, n_heads=2, n_layers=1, tied=False, moe=MoeConfig(experts=3, top_k=2, d_ff=5, shared=1, dispatch="dense")
)
TOKENS = jnp.arange(18).reshape(2, 9) % 9


def stirred(tree, seed=1):
    """numpy, so that nothing is compiled"""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.float32(x + 0.2 * rng.normal(size=x.shape)), tree)


def test_products_with_a_low_rank_matrix_are_those_with_the_merged_one():
    shapes = (("btd,df->btf", (2, 3, 4), (4, 5)), ("rsd,rdf->rsf", (2, 3, 4), (2, 4, 5)), ("nd,edf->enf", (3, 4), (2, 4, 5)),
              ("enf,efd->end", (2, 3, 4), (2, 4, 5)))
    rows = jnp.array([[0, 3], [1, 1]])

    def run(key):
        pairs = []
        for spec, x, (*stack, i, o) in shapes:
            keys = jax.random.split(key, 5)
            x = jax.random.normal(keys[0], x)
            parts = ((*stack, i, o), (*stack, i, 2), (*stack, 2, o), (*stack, o))
            m = LowRank(*(jax.random.normal(k, s) for k, s in zip(keys[1:], parts, strict=True)))
            for matrix in (m, m._replace(gain=None)):
                pairs.append((dot(spec, x, matrix), dot(spec, x, merged(matrix))))
                if not stack:
                    pairs.append((take(matrix, rows), merged(matrix)[rows]))
        return pairs

    for a, b in jax.jit(run)(jax.random.key(0)):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dots", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["btd,df->btf", "nd,de->ne"])
def test_products_with_a_transposed_matrix_are_those_with_the_matrix(spec, dots):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4)[-spec.index(",") :])
    w = jax.random.normal(jax.random.key(1), (4, 5))
    np.testing.assert_allclose(dot(spec, x, Transposed(w.T), dots), dot(spec, x, w, dots), atol=1e-5)
    many = jax.vmap(lambda w: dot(spec, x, Transposed(w), dots))(jnp.stack([w.T, 2 * w.T]))
    np.testing.assert_allclose(many, jnp.stack([dot(spec, x, w, dots), dot(spec, x, 2 * w, dots)]), atol=1e-5)


@pytest.fixture(scope="module")
def base():
    return jax.jit(make_model(BASE).init)(jax.random.key(0))


@pytest.mark.parametrize("kind", ["lora", pytest.param("rslora", marks=pytest.mark.slow), "dora"])
def test_merged_equals_attached_at_every_matrix(kind, base):
    model = make_model(BASE)
    fresh = jax.eval_shape(lambda: init_lora(jax.random.key(1), base, 3, targets="all", kind=kind))
    adapters = stirred(jax.tree.map(lambda x: np.zeros(x.shape), fresh))

    def run(base, adapters):
        logits = lambda p: model.forward(p, TOKENS)[0] @ merged(p["unembed"])  # noqa: E731
        whole = merge(base, adapters, 6.0, 2, kind=kind)
        both = logits(attach(base, adapters, 6.0, 2, kind=kind)), logits(whole)
        back = base if kind == "dora" else unmerge(whole, adapters, 6.0, 2, kind=kind)
        untouched = merge(base, init_lora(jax.random.key(1), base, 3, targets="all", kind=kind), 32.0, 3, kind=kind)
        return both, whole, back, untouched

    (one, other), whole, back, untouched = jax.jit(run)(base, adapters)
    np.testing.assert_allclose(one, other, atol=2e-5)
    for tree in (back, untouched):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), tree, base)
    for path, w in jax.tree_util.tree_leaves_with_path(base):
        new, ab = whole, adapters
        for step in path:
            new, ab = new[step.key], ab.get(step.key, {})
        if not ab:
            assert path[-1].key == "scale"
            continue
        change = ab["a"][..., :2].astype(np.float64) @ ab["b"][..., :2, :] * (6 / 2**0.5 if kind == "rslora" else 3)
        expected = np.asarray(w) + change
        if kind == "dora":
            expected = expected * (ab["m"] / np.linalg.norm(expected, axis=-2))[..., None, :]
        np.testing.assert_allclose(new, expected, atol=1e-5, err_msg=str(path))


def test_merged_dora_cannot_be_taken_out_again(base):
    with pytest.raises(ValueError, match="DoRA"):
        unmerge(base, {}, 6.0, 2, kind="dora")


def adapter_size(params, rank, targets):
    adapters = jax.eval_shape(lambda key, p: init_lora(key, p, rank, targets=targets), jax.random.key(0), params)
    return sum(x.size for x in jax.tree.leaves(adapters))


def test_targets_and_counts(base):
    D, F, E, H, r = 8, 5, 3, 8, 4
    per_layer = {
        "attention": r * (D + 3 * H) + r * (H + D), "mlp": r * E * (D + 2 * F + F + D) + r * (D + 2 * F + F + D),
    }
    per_layer["layers"] = sum(per_layer.values()) + r * (D + E)
    for targets, expected in per_layer.items():
        for params in (base, jax.eval_shape(stack_layers, base)):
            assert adapter_size(params, r, targets) == expected
    assert adapter_size(base, r, "all") == per_layer["layers"] + 2 * r * (9 + D)
    assert scale_of("lora", 32.0, 16) == 2 and scale_of("rslora", 32.0, 16) == 8


def test_a_model_with_adapters_starts_as_its_base_and_only_adapters_have_gradients(base):
    model = make_model(replace(BASE, lora=LoraConfig(rank=2, targets="all")))
    start = jax.jit(model.init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, start["base"], base)
    assert model.begin(jax.random.key(5), start) is start
    params = start | {"lora": stirred(start["lora"])}
    optim = make_optimizer(OptimConfig(weight_decay=0.1), 1e-2)

    def loss(p):
        return (jnp.tanh(model.forward(p, TOKENS)[0] @ model.unembed(p)) ** 2).mean()

    def run(params):
        grads = jax.grad(loss)(params)
        return grads, optim.update(grads, optim.init(params), params)[0]

    for tree in jax.jit(run)(params):
        assert all(np.all(x == 0) for name in ("base", "alpha", "rank") for x in jax.tree.leaves(tree[name]))
        assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(tree["lora"]))


def test_training_is_batched_over_seeds_rates_and_ranks(base):
    """Twelve runs at once on one frozen base; each is the run that it is alone, and all learn."""
    cfg = replace(BASE, moe=None, lora=LoraConfig(rank=4, alpha=4.0, targets="mlp"))
    model, base = make_model(cfg), jax.jit(make_model(replace(cfg, lora=None)).init)(jax.random.key(0))

    def train(key, rate, rank):
        params = {**model.begin(key, base), "rank": rank}

        def loss(lora):
            p = {**params, "lora": lora}
            logp = jax.nn.log_softmax(model.forward(p, TOKENS)[0] @ model.unembed(p))[:, :-1]
            return -jnp.take_along_axis(logp, TOKENS[:, 1:, None], axis=-1).mean()

        def step(lora, _):
            value, grads = jax.value_and_grad(loss)(lora)
            return jax.tree.map(lambda x, g: x - rate * g, lora, grads), value

        lora, losses = jax.lax.scan(step, params["lora"], length=15)
        return lora["layer_0"]["mlp"]["down"]["b"], losses

    keys, rates, ranks = jax.random.split(jax.random.key(7), 2), jnp.array([0.1, 0.2]), jnp.array([1.0, 2.0, 4.0])
    over = jax.vmap(jax.vmap(jax.vmap(train, (None, None, 0)), (None, 0, None)), (0, None, None))
    b, losses = jax.jit(over)(keys, rates, ranks)
    assert losses.shape == (2, 2, 3, 15) and np.all(losses[..., -1] < losses[..., 0] - 0.01)
    _, alone_losses = jax.jit(train)(keys[1], rates[0], ranks[1])
    np.testing.assert_allclose(losses[1, 0, 1], alone_losses, rtol=1e-4)
    # rows of b beyond the rank have never moved
    b = np.asarray(b)
    assert np.all(b[:, :, 0, 1:] == 0) and np.all(b[:, :, 1, 2:] == 0) and np.all(np.abs(b[:, :, 2]).max(-1) > 0)


@pytest.mark.parametrize("field, value, expected", [
    ("rank", 0, "at least 1"), ("alpha", 0.0, "above 0"), ("targets", "mpl", "'attention'"), ("kind", "qlora", "'dora'"),
])
def test_bad_values_are_named(field, value, expected):
    with pytest.raises(ValueError, match=f"LoraConfig.{field} is {value!r}: expected .*{expected}"):
        LoraConfig(**{field: value})
