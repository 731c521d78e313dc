"""Our layer of experts against transformers' Mixtral, Qwen3-MoE and DeepSeek-V3 blocks, on random weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.models import ModelConfig, MoeConfig
from jaxpt.models.moe import MoE

pytestmark = pytest.mark.peers
D, F, E, K, B, T = 16, 12, 8, 2, 2, 10


def mixtral():
    from transformers.models.mixtral import modeling_mixtral as m

    config = m.MixtralConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K, router_jitter_noise=0.0,
    )
    return config, m.MixtralSparseMoeBlock, MoeConfig(experts=E, top_k=K, d_ff=F)


def qwen3(normalise=False):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as m

    config = m.Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K, norm_topk_prob=normalise,
    )
    return config, m.Qwen3MoeSparseMoeBlock, MoeConfig(experts=E, top_k=K, d_ff=F, normalise=normalise)


def deepseek_v3():
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as m

    config = m.DeepseekV3Config(
        hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=K, n_shared_experts=1, n_group=4,
        topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
    )
    ours = MoeConfig(
        experts=E, top_k=K, d_ff=F, shared=1, score="sigmoid", bias=True, groups=4, top_groups=2, scale=2.5,
    )
    return config, m.DeepseekV3MoE, ours


def of_theirs(block) -> dict:
    """Their weights as our parameters: matrices are transposed, gate and up stand side by side in both."""
    t = lambda x: np.swapaxes(x.detach().numpy(), -1, -2)  # noqa: E731
    params = {"router": t(block.gate.weight), "gate_up": t(block.experts.gate_up_proj), "down": t(block.experts.down_proj)}
    if hasattr(block, "shared_experts"):
        shared = block.shared_experts
        gate_up = np.concatenate([t(shared.gate_proj.weight), t(shared.up_proj.weight)], axis=-1)
        params |= {"shared_gate_up": gate_up, "shared_down": t(shared.down_proj.weight)}
        params["bias"] = block.gate.e_score_correction_bias.numpy()
    return params


@pytest.mark.parametrize("dispatch", ["dense", "blocks", "ragged"])
@pytest.mark.parametrize("theirs", [mixtral, qwen3, partial(qwen3, True), deepseek_v3], ids=["mixtral", "qwen3", "qwen3-norm", "deepseek"])
def test_values_and_gradients_are_theirs(theirs, dispatch):
    import torch

    config, kind, moe = theirs()
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = kind(config).float()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if moe.bias:
        block.gate.e_score_correction_bias.normal_(std=0.3)
    x = torch.randn(B, T, D, requires_grad=True)
    back = torch.randn(B, T, D)
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    (y * back).sum().backward()

    ours = MoE(ModelConfig(8, d_model=D, d_ff=F, moe=MoeConfig(**{**vars(moe), "dispatch": dispatch})))
    told = {"mask": jnp.ones((B, T), bool), "tokens": jnp.zeros((B, T), jnp.int32), "positions": jnp.zeros((1, T), jnp.int32)}
    params = jax.tree.map(jnp.asarray, of_theirs(block))

    def loss(params, x):
        out, _ = ours.apply({"params": params}, x, told, False)
        return jnp.sum(out * back.numpy()), out

    (_, out), (grads, grad_x) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x.detach().numpy())
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * (1 + np.abs(b).max()))  # noqa: E731
    close(out, y.detach().numpy())
    close(grad_x, x.grad.numpy())
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected = of_theirs(block)
    for name in grads:
        if name != "bias":
            close(grads[name], expected[name])
