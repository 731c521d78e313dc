"""Worker: Mixtral's layer of experts in transformers, or DeepSeek-V3's where some experts are shared; grouped products."""

import torch
from jobs import asked, turns
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.mixtral import modeling_mixtral as mixtral


def make_layer(job):
    torch.manual_seed(0)
    if job.shared:
        config = deepseek.DeepseekV3Config(
            hidden_size=job.d_model, moe_intermediate_size=job.d_ff, n_routed_experts=job.experts, n_shared_experts=job.shared,
            num_experts_per_tok=job.top_k, n_group=1, topk_group=1, routed_scaling_factor=1.0,
        )  # fmt: skip
        kind = deepseek.DeepseekV3MoE
    else:
        config = mixtral.MixtralConfig(
            hidden_size=job.d_model, intermediate_size=job.d_ff, num_local_experts=job.experts, num_experts_per_tok=job.top_k
        )
        kind = mixtral.MixtralSparseMoeBlock
    config._experts_implementation = "grouped_mm"
    layer = kind(config).float()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return layer


def main():
    job = asked()
    layer = make_layer(job)
    x = torch.randn(1, job.tokens, job.d_model, requires_grad=True)
    back = torch.randn(1, job.tokens, job.d_model)
    for _ in turns(job.block, sum(w.numel() for w in layer.parameters()), lambda: 0.0):
        layer.zero_grad(set_to_none=True)
        x.grad = None
        y = layer(x)
        ((y[0] if isinstance(y, tuple) else y) * back).sum().backward()


if __name__ == "__main__":
    main()
