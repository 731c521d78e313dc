"""Worker: a layer of experts in jaxpt, dispatched in sorted blocks."""

import jax
import jax.numpy as jnp
from jobs import asked, turns

from jaxpt.models import ModelConfig, MoeConfig
from jaxpt.models.moe import MoE


def main():
    job = asked()
    moe = MoeConfig(
        experts=job.experts, top_k=job.top_k, d_ff=job.d_ff, shared=job.shared, score="sigmoid" if job.shared else "softmax"
    )
    layer = MoE(ModelConfig(8, d_model=job.d_model, moe=moe))
    x, back = jax.random.normal(jax.random.key(0), (2, 1, job.tokens, job.d_model))
    told = {"mask": jnp.ones((1, job.tokens), bool)}
    params = jax.jit(lambda key: layer.init(key, x, told, False))(jax.random.key(1))["params"]
    run = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(layer.apply({"params": p}, x, told, False)[0] * back), (0, 1)))
    out = None
    for _ in turns(job.block, sum(w.size for w in jax.tree.leaves(params)), lambda: float(jax.block_until_ready(out)[0]) * 0):
        out = run(params, x)


if __name__ == "__main__":
    main()
