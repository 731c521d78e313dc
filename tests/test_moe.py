"""Experts inside the transformer: decoding, order, replay, causality, layouts, counts, bad input."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.models import LoraConfig, ModelConfig, MoeConfig, fine_grained, make_model, stack_layers
from jaxpt.models.counts import active_flops, active_params, dot_flops, extend_flops, forward_flops, param_counts
from jaxpt.ops.routes import all_routes, reinforced
from jaxpt.train.experts import rebalanced

B, T = 4, 8
MODEL = ModelConfig(vocab=11, d_model=16, n_heads=2, n_layers=1, d_ff=24)
TWO = replace(MODEL, n_layers=2)
MOE = MoeConfig(experts=4, top_k=2)
VARIANTS = {
    "softmax": MOE,
    "deepseek": MoeConfig(
        experts=6, top_k=2, shared=1, score="sigmoid", bias=True, groups=3, top_groups=2, scale=2.5, dispatch="dense"
    ),
    "capacity": replace(MOE, dispatch="capacity", capacity=0.5, normalise=False),
    "expert": replace(MOE, choice="expert", pool="position"),
    "hash": replace(MOE, choice="hash"),
    "random": replace(MOE, choice="random", dispatch="dense"),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (B, T)), jnp.int32)


@cache
def build(name, **more):
    model = make_model(replace(MODEL, moe=VARIANTS[name], **more))
    params = jax.jit(model.init)(jax.random.key(0))
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = treedef.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])
    return model._replace(forward=jax.jit(model.forward), extend=jax.jit(model.extend)), params


@pytest.mark.parametrize("name", ["deepseek", "expert", pytest.param("random", marks=pytest.mark.slow)])
def test_decoding_one_token_at_a_time_equals_forward(name):
    """Dropless token choice; expert choice among the tokens at one index, which is all that a decoder can do."""
    model, params = build(name)
    expected, _ = model.forward(params, TOKENS)
    kv = model.cache(B, T)
    for t in range(T):
        hidden, kv = model.extend(params, TOKENS[:, t : t + 1], kv, jnp.full(B, t, jnp.int32))
        np.testing.assert_allclose(hidden[:, 0], expected[:, t], atol=1e-5)


def test_rows_do_not_depend_on_their_order_unless_places_run_out():
    order = jnp.array([2, 0, 3, 1])
    for name in ("deepseek", "capacity"):
        model, params = build(name)
        straight, aux = model.forward(params, TOKENS)
        turned, turned_aux = model.forward(params, TOKENS[order])
        if name == "deepseek":
            np.testing.assert_allclose(turned, straight[order], atol=1e-5)
            np.testing.assert_allclose(turned_aux["load"], aux["load"], atol=1e-6)
            assert np.all(aux["dropped"] == 0)
        else:
            assert np.abs(turned - straight[order]).max() > 0.01 and np.all(aux["dropped"] > 0.2)


def test_expert_choice_looks_ahead_and_its_causal_pool_does_not():
    """A change of the last token: dropless token choice and the pool by position leave what stands before it alone."""
    other = TOKENS.at[:, -1].set((TOKENS[:, -1] + 3) % 11)
    model, params = build("expert")
    whole = make_model(replace(MODEL, moe=replace(VARIANTS["expert"], pool="batch")))
    leaks = {"causal": model.forward, "batch": jax.jit(whole.forward)}
    moved = {name: np.abs(f(params, other)[0] - f(params, TOKENS)[0])[:, :-1].max() for name, f in leaks.items()}
    assert moved["causal"] < 1e-6 and moved["batch"] > 1e-3
    model, params = build("deepseek")
    assert np.abs(model.forward(params, other)[0] - model.forward(params, TOKENS)[0])[:, :-1].max() < 1e-6


def test_routes_replayed_experts_killed_and_dropped():
    model, params = build("deepseek")
    hidden, aux = model.forward(params, TOKENS)
    replayed, again = model.forward(params, TOKENS, routing={"routes": aux["routes"]})
    np.testing.assert_allclose(replayed, hidden, atol=1e-6)
    other = (aux["routes"] + 1) % 6
    moved, _ = model.forward(params, TOKENS, routing={"routes": other})
    assert np.abs(moved - hidden).max() > 0.01
    np.testing.assert_allclose(again["load"].sum(-1), 1, rtol=1e-6)
    victim = int(jnp.argmax(aux["load"][0]))
    _, killed = model.forward(params, TOKENS, routing={"alive": jnp.ones((1, 6), bool).at[0, victim].set(False)})
    assert killed["load"][0, victim] == 0 < aux["load"][0, victim]
    told = {"key": jax.random.key(0), "jitter": jnp.float32(0.0), "dropout": jnp.float32(0.0)}
    np.testing.assert_allclose(model.forward(params, TOKENS, routing=told)[0], hidden, atol=1e-6)
    noisy = model.forward(params, TOKENS, routing=told | {"jitter": jnp.float32(0.5), "dropout": jnp.float32(0.5)})[1]
    assert np.any(noisy["routes"] != aux["routes"])


def test_a_router_of_the_decoder_learns_by_reinforcement_without_bias():
    """Over all pairs of routes of two tokens, weighed by their probability, REINFORCE is the gradient of the expected loss."""
    cfg = ModelConfig(vocab=5, d_model=8, n_heads=1, n_layers=1, moe=MoeConfig(experts=3, top_k=2, dispatch="dense"))
    model, tokens = make_model(cfg), jnp.array([[1, 3]])
    params = jax.tree.map(lambda w: 2 * w, model.init(jax.random.key(0)))
    one = all_routes(3, 2)
    paths = jnp.asarray([[a, b] for a in one for b in one])[:, None, None]  # [36,L,B,T,k]
    told = {"key": jax.random.key(1), "draw": jnp.float32(1.0)}

    def outcome(params, path):
        hidden, aux = model.forward(params, tokens, routing=told | {"routes": path})
        logits = hidden[0] @ model.unembed(params)
        return jnp.sum(jax.nn.logsumexp(logits, -1) - logits[:, 2]), jnp.sum(aux["route_logp"])

    @jax.jit
    def gradients(params):
        def expected(params):
            loss, logp = jax.vmap(outcome, (None, 0))(params, paths)
            return jnp.sum(jnp.exp(logp) * loss), jnp.sum(jnp.exp(logp))

        def estimated(params):
            loss, logp = jax.vmap(outcome, (None, 0))(params, paths)
            i, j = jnp.meshgrid(jnp.arange(36), jnp.arange(36))
            pairs = reinforced(jnp.stack([loss[i], loss[j]], -1), jnp.stack([logp[i], logp[j]], -1))
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp[i] + logp[j])) * pairs)

        return jax.grad(expected, has_aux=True)(params), jax.grad(estimated)(params)

    (exact, total), found = gradients(params)
    assert total == pytest.approx(1, abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, exact)
    assert np.abs(exact["layer_0"]["moe"]["router"]).max() > 0.01


def test_draws_are_the_best_without_noise_and_stay_among_the_living():
    model, params = build("softmax")
    told = lambda draw: {"key": jax.random.key(0), "draw": jnp.float32(draw)}  # noqa: E731
    calm, aux = model.forward(params, TOKENS, routing=told(0.0))
    np.testing.assert_allclose(calm, model.forward(params, TOKENS)[0], atol=1e-6)
    assert aux["route_logp"].shape == (1, B, T) and np.all(aux["route_logp"] < 0)
    noisy = model.forward(params, TOKENS, routing=told(1.0) | {"alive": jnp.ones((1, 4), bool).at[0, 1].set(False)})[1]
    assert np.any(noisy["routes"] != aux["routes"]) and not np.any(noisy["routes"] == 1)
    assert np.all(np.isfinite(noisy["route_logp"]))
    for name in ("deepseek", "hash"):
        with pytest.raises(ValueError, match="got draw, expected it only where tokens choose"):
            make_model(replace(MODEL, moe=VARIANTS[name])).forward(build(name)[1], TOKENS, routing=told(1.0))


def test_padding_takes_no_places_and_counts_for_nothing():
    model, params = build("deepseek")
    segments = jnp.broadcast_to(jnp.where(jnp.arange(T) < 5, 0, -1), (B, T))
    hidden, aux = model.forward(params, TOKENS, segments=segments)
    short, alone = model.forward(params, TOKENS[:, :5])
    np.testing.assert_allclose(hidden[:, :5], short, atol=1e-5)
    for name in ("load", "balance", "z", "sequence_balance"):
        np.testing.assert_allclose(aux[name], alone[name], rtol=1e-5)


def test_scan_and_loops_are_the_layers_one_after_the_other():
    plain, params = build("deepseek", n_layers=2)
    scan = jax.jit(make_model(replace(TWO, moe=VARIANTS["deepseek"], scan=True)).forward)
    for a, b in zip(
        jax.tree.leaves(scan(stack_layers(params), TOKENS)), jax.tree.leaves(plain.forward(params, TOKENS)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
    model = make_model(replace(MODEL, loops=2))
    one = jax.jit(model.init)(jax.random.key(0))
    twice = one | {"layer_1": one["layer_0"]}
    hidden, _ = jax.jit(model.forward)(one, TOKENS)
    np.testing.assert_allclose(hidden, jax.jit(make_model(TWO).forward)(twice, TOKENS)[0], atol=1e-5)
    prefill, _ = jax.jit(model.extend)(one, TOKENS, model.cache(B, T), jnp.zeros(B, jnp.int32))
    np.testing.assert_allclose(prefill, hidden, atol=1e-5)


def test_gradients_reach_router_and_experts_but_not_the_bias():
    model, params = build("deepseek")

    def loss(p):
        hidden, aux = model.forward(p, TOKENS)
        return (jnp.sin(hidden) ** 2).mean() + aux["balance"].sum() + 0.1 * aux["z"].sum() + aux["sequence_balance"].sum()

    grads = jax.jit(jax.grad(loss))(params)["layer_0"]["moe"]
    assert np.all(grads["bias"] == 0) and np.all(np.abs(grads["router"]).max(0) > 0)
    assert all(np.abs(grads[name]).max() > 0 for name in ("shared_gate_up", "shared_down"))
    used = model.forward(params, TOKENS)[1]["load"][0] > 0
    for name in ("gate_up", "down"):
        np.testing.assert_array_equal(np.abs(grads[name]).max((1, 2)) > 0, used)


def presets():
    for moe in [*VARIANTS.values(), replace(MOE, dispatch="capacity"), replace(MOE, dispatch="ragged"), replace(MOE, choice="expert")]:
        yield replace(TWO, moe=moe)
        if moe.dispatch != "ragged":
            yield replace(TWO, moe=moe, scan=True, loops=2, lora=LoraConfig(rank=3, targets="all", kind="dora"), tied=False)


@pytest.mark.parametrize("cfg", list(presets()), ids=lambda cfg: f"{cfg.moe.choice}-{cfg.moe.dispatch}-{cfg.moe.pool}-{cfg.loops}")
def test_counted_flops_are_the_program_s(cfg):
    model = make_model(cfg)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    assert dot_flops(model.forward, params, tokens) == forward_flops(cfg, B, T)
    one, length = jax.ShapeDtypeStruct((B, 1), jnp.int32), jax.ShapeDtypeStruct((B,), jnp.int32)
    kv = jax.eval_shape(lambda: model.cache(B, 12))
    assert dot_flops(model.extend, params, one, kv, length) == extend_flops(cfg, B, 1, 12)


def test_total_and_active_parameters_and_flops():
    cfg = replace(TWO, moe=MoeConfig(experts=8, top_k=2, shared=1, bias=True))
    params = jax.eval_shape(make_model(cfg).init, jax.random.key(0))
    D, F, L = 16, 12, 2
    attention, norms = 3 * D * D + D * D, 2 * D
    layer = attention + norms + 8 * 3 * D * F + D * 8 + 8 + 3 * D * F
    assert param_counts(params)["non_embedding"] == L * layer + D
    assert active_params(params, cfg) == 11 * D + D + L * (layer - 6 * 3 * D * F)
    tokens = B * T
    hand = 2 * tokens * L * (attention + 2 * T * D + D * 8 + 3 * 3 * D * F)
    assert active_flops(cfg, B, T) == hand
    ragged = replace(cfg, moe=replace(cfg.moe, dispatch="ragged"))
    assert forward_flops(ragged, B, T) == hand  # the path that computes nothing but what is active
    dense = replace(TWO, moe=None)
    assert active_flops(dense, B, T) == forward_flops(dense, B, T)
    no_shared, router = replace(cfg, moe=replace(cfg.moe, shared=0)), 2 * tokens * L * D * 8
    assert active_flops(no_shared, B, T) - router == active_flops(dense, B, T)  # k experts of d_ff / k cost one SwiGLU
    fine = replace(TWO, moe=fine_grained(no_shared.moe, no_shared.expert_ff, 4))
    assert (fine.moe.experts, fine.moe.top_k, fine.expert_ff) == (32, 8, 3)
    assert active_flops(fine, B, T) - 4 * router == active_flops(dense, B, T)


@pytest.mark.parametrize("field, value, expected", [
    ("top_k", 9, r"at most experts \(8\)"), ("top_k", 0, "at least 1"), ("experts", 1, "at least 2"),
    ("shared", 9, r"0 to experts \(8\)"), ("capacity", 0.0, "above 0"), ("capacity", float("nan"), "above 0"),
    ("dispatch", "einsum", "'capacity'"), ("choice", "tokens", "'token'"), ("score", "relu", "'sigmoid'"),
    ("pool", "row", "'position'"), ("groups", 3, "divisor of experts"), ("top_groups", 2, "at most groups"), ("d_ff", 0, "at least 1"),
])
def test_bad_values_are_named(field, value, expected):
    with pytest.raises(ValueError, match=f"MoeConfig.{field} is {value!r}: expected .*{expected}") as error:
        MoeConfig(**{field: value})
    assert str(error.value).count("\n") == 0


def test_bad_combinations_are_named():
    with pytest.raises(ValueError, match="top_k is 3: expected at most the experts of top_groups groups"):
        MoeConfig(experts=8, top_k=3, groups=4, top_groups=1)
    with pytest.raises(ValueError, match="normalise is True: expected False where top_k is 1"):
        MoeConfig(top_k=1)
    with pytest.raises(ValueError, match="choice is 'hash': expected 'token' where bias"):
        MoeConfig(choice="hash", bias=True)
    with pytest.raises(ValueError, match="ModelConfig.moe is .*top_k that divides d_ff"):
        replace(TWO, moe=MoeConfig(experts=8, top_k=5))
    with pytest.raises(ValueError, match="m: got 7, expected a divisor"):
        fine_grained(MOE, 12, 7)
    with pytest.raises(ValueError, match="routing: got routes, expected nothing for a model without experts"):
        make_model(MODEL).forward({}, TOKENS, routing={"routes": 0})


def test_experts_may_begin_at_a_later_layer():
    """Their measures, routes and biases are those of the layers that have experts; a replayed choice is the same pass."""
    cfg = replace(MODEL, n_layers=3, moe=replace(VARIANTS["deepseek"], first=1))
    model = make_model(cfg)
    params = jax.jit(model.init)(jax.random.key(0))
    assert "mlp" in params["layer_0"] and "moe" in params["layer_1"]
    forward = jax.jit(lambda params, routing: model.forward(params, TOKENS, routing=routing))
    hidden, aux = forward(params, {"key": jax.random.key(1), "jitter": 0.0})
    assert {len(x) for x in aux.values()} == {2}
    again, _ = forward(params, {"routes": aux["routes"], "bias": jnp.zeros((2, 6))})
    np.testing.assert_allclose(again, hidden, atol=1e-5)
    other, _ = forward(params, {"routes": (aux["routes"] + 1) % 6, "bias": jnp.zeros((2, 6))})
    assert not np.allclose(other, hidden, atol=1e-3)
    load = jnp.arange(12.0).reshape(2, 6)
    moved = rebalanced(cfg, params, {"router_load": (7 * load, jnp.float32(7))}, {"bias_rate": 0.5})
    for layer in (1, 2):
        np.testing.assert_array_equal(moved[f"layer_{layer}"]["moe"]["bias"], [0.5] * 3 + [-0.5] * 3)
    assert moved["layer_0"] is params["layer_0"]


@pytest.mark.parametrize("more", [{"scan": True}, {"loops": 2}, {"n_layers": 1}])
def test_where_experts_cannot_begin_later(more):
    with pytest.raises(ValueError, match="ModelConfig.moe is .*: expected first = 0, or"):
        replace(TWO, moe=replace(MOE, first=1), **more)
