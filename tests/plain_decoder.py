"""A model of every layout, and a decoder in float64 that reads its tensors by their published names."""

from dataclasses import replace

import jax
import numpy as np

from jaxpt.models import ModelConfig, MoeConfig, RopeScaling, make_model

BASE = ModelConfig(vocab=23, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=12, norm_eps=1e-3)
LATENT = replace(BASE, n_kv_heads=None, norm_eps=1e-6, latent=5, d_head=6, d_rope=4, d_value=3)
MODELS = {
    "llama": replace(BASE, rope_scaling=RopeScaling(length=20), d_head=6),
    "mistral": replace(BASE, window=3, tied=False),
    "qwen2": replace(BASE, qkv_bias=True, rope_theta=100.0),
    "qwen3": replace(BASE, qk_norm=True, d_head=6),
    "mixtral": replace(BASE, moe=MoeConfig(experts=4, d_ff=10)),
    "qwen3_moe": replace(BASE, qk_norm=True, moe=MoeConfig(experts=5, top_k=2, d_ff=10, normalise=False)),
    "deepseek_v2": replace(LATENT, moe=MoeConfig(experts=4, d_ff=10, shared=2, normalise=False, scale=1.5, first=1)),
    "deepseek_v3": replace(LATENT, latent_query=7, tied=False, moe=MoeConfig(
        experts=6, d_ff=10, shared=1, score="sigmoid", bias=True, groups=3, top_groups=2, scale=2.5)),
}
TOKENS = np.random.default_rng(0).integers(0, BASE.vocab, (2, 9))


def drawn(cfg, seed=0):
    """Parameters none of which is as it starts."""
    shapes, draw = jax.eval_shape(make_model(cfg).init, jax.random.key(0)), np.random.default_rng(seed)
    return jax.tree.map(lambda x: draw.normal(0.3, 0.3, x.shape).astype(np.float32), shapes)


def decoder(config, tensors, tokens):
    """[B,T,V] float64: the layouts as their papers and model cards tell them, with nothing of jaxpt."""
    w = {name.removeprefix("model."): x.astype(np.float64) for name, x in tensors.items()}
    H, G, K = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    B, T = tokens.shape

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name + ".weight"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    def swiglu(x, gate, up, down):
        g = linear(x, gate)
        return linear(g / (1 + np.exp(-g)) * linear(x, up), down)

    def experts(x, here):
        module, names = here + "mlp", ("gate_proj", "up_proj", "down_proj")
        if config["model_type"] == "mixtral":
            module, names = here + "block_sparse_moe", ("w1", "w3", "w2")
        out = np.zeros_like(x)
        for at in np.ndindex(x.shape[:-1]):
            p = np.exp(linear(x[at], module + ".gate"))
            p = p / (1 + p) if config["model_type"] == "deepseek_v3" else p / p.sum()
            ranked = p + w.get(module + ".gate.e_score_correction_bias", 0)
            if (groups := config.get("n_group", 1)) > 1:
                each = np.split(np.arange(p.size), groups)
                each.sort(key=lambda group: -np.sort(ranked[group])[-2:].sum())
                ranked[np.concatenate(each[config["topk_group"] :])] = -np.inf
            best = np.argsort(-ranked)[: config["num_experts_per_tok"]]
            scale = config.get("routed_scaling_factor", 1) / (p[best].sum() if config.get("norm_topk_prob", True) else 1)
            for e in best:
                out[at] += scale * p[e] * swiglu(x[at], *(f"{module}.experts.{e}.{name}" for name in names))
        if module + ".shared_experts.up_proj.weight" in w:
            out = out + swiglu(x, *(f"{module}.shared_experts.{name}" for name in names))
        return out

    def frequency(i):
        f = config["rope_theta"] ** (-2 * i / K)
        if (said := config.get("rope_scaling")) is None:
            return f
        wave, old = 2 * np.pi / f, said["original_max_position_embeddings"]
        if wave < old / said["high_freq_factor"]:
            return f
        if wave > old / said["low_freq_factor"]:
            return f / said["factor"]
        s = (old / wave - said["low_freq_factor"]) / (said["high_freq_factor"] - said["low_freq_factor"])
        return (1 - s) * f / said["factor"] + s * f

    def rotate(x):
        y = x.copy()
        for t, i in np.ndindex(T, K // 2):
            c, s = np.cos(t * frequency(i)), np.sin(t * frequency(i))
            y[:, t, :, i], y[:, t, :, i + K // 2] = (c * x[:, t, :, i] - s * x[:, t, :, i + K // 2],
                                                     s * x[:, t, :, i] + c * x[:, t, :, i + K // 2])
        return y

    def attention(x, here):
        q, k, v = (linear(x, f"{here}self_attn.{n}_proj").reshape(B, T, -1, K) for n in "qkv")
        if f"{here}self_attn.q_norm.weight" in w:
            q, k = norm(q, f"{here}self_attn.q_norm"), norm(k, f"{here}self_attn.k_norm")
        q, k, out = rotate(q), rotate(k), np.zeros((B, T, H, K))
        for b, t, h in np.ndindex(B, T, H):
            first = max(0, t + 1 - (config.get("sliding_window") or T))
            p = np.exp(k[b, first : t + 1, h // (H // G)] @ q[b, t, h] / np.sqrt(K))
            out[b, t, h] = p / p.sum() @ v[b, first : t + 1, h // (H // G)]
        return linear(out.reshape(B, T, H * K), f"{here}self_attn.o_proj")

    def latent_attention(x, here):
        here, N, R = here + "self_attn.", config["qk_nope_head_dim"], config["kv_lora_rank"]
        narrow = here + "q_a_proj.weight" in w
        q = linear(norm(linear(x, here + "q_a_proj"), here + "q_a_layernorm") if narrow else x, here + f"q{'_b' * narrow}_proj")
        both = linear(x, here + "kv_a_proj_with_mqa")
        kv = linear(norm(both[..., :R], here + "kv_a_layernorm"), here + "kv_b_proj").reshape(B, T, H, -1)
        turn = np.exp(1j * np.arange(T)[:, None] * [frequency(i) for i in range(K // 2)])  # of neighbours, as a complex number
        pair = lambda y: (y[..., ::2] + 1j * y[..., 1::2]) * (turn[:, None] if y.ndim == 4 else turn)  # noqa: E731
        q, k_turned, out = q.reshape(B, T, H, N + K), pair(both[..., R:]), np.zeros((B, T, H, config["v_head_dim"]))
        q_turned = pair(q[..., N:])
        for b, t, h in np.ndindex(B, T, H):
            score = kv[b, : t + 1, h, :N] @ q[b, t, h, :N] + (k_turned[b, : t + 1] @ q_turned[b, t, h].conj()).real
            p = np.exp(score / np.sqrt(N + K))
            out[b, t, h] = p / p.sum() @ kv[b, : t + 1, h, N:]
        return linear(out.reshape(B, T, -1), here + "o_proj")

    x = w["embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        here = f"layers.{layer}."
        x = x + (latent_attention if "kv_lora_rank" in config else attention)(norm(x, here + "input_layernorm"), here)
        y = norm(x, here + "post_attention_layernorm")
        if any(name.startswith(here) and ".experts." in name for name in w):
            x = x + experts(y, here)
        else:
            x = x + swiglu(y, *(f"{here}mlp.{name}_proj" for name in ("gate", "up", "down")))
    return norm(x, "norm") @ w["embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T
