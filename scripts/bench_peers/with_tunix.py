"""Worker: the same GRPO job in Tunix's GRPOLearner, on its own Llama 3 of the same shape."""

import os

os.environ["TQDM_DISABLE"] = "1"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jobs import Job, asked, turns  # noqa: E402
from tunix.models.llama3 import model as llama  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rollout.base_rollout import RolloutConfig  # noqa: E402


class Words:
    """A tokenizer of one word per token; padding and end lie behind the vocabulary, so that they are never drawn."""

    def __init__(self, vocab: int):
        self.end = vocab

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids) -> str:
        return " ".join(str(int(i)) for i in ids)

    eos_id = pad_id = lambda self: self.end  # noqa: E731
    bos_id = lambda self: 0  # Tunix takes 0 for none  # noqa: E731


def make_model(job: Job, mesh) -> llama.Llama3:
    config = llama.ModelConfig(
        num_layers=job.n_layers, vocab_size=job.vocab, embed_dim=job.d_model, hidden_dim=job.d_ff,
        num_heads=job.n_heads, head_dim=job.d_model // job.n_heads, num_kv_heads=job.n_heads, rope_theta=10_000,
        norm_eps=1e-6, weight_tying=True,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        return llama.Llama3(config, rngs=nnx.Rngs(0))


def main():
    job = asked()
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = make_model(job, mesh)
    last = {"reward": 0.0}

    def reward(prompts, completions, **_):
        rows = [[int(word) for word in text.split()] for text in completions]
        assert all(len(row) == job.new_tokens for row in rows), "a response ended early"
        values = [sum(token < job.vocab // 2 for token in row) / job.new_tokens for row in rows]
        last["reward"] = float(np.mean(values))
        return values

    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=model, tokenizer=Words(job.vocab),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0), optax.adam(job.learning_rate, b2=0.99)
                ),
                eval_every_n_steps=10**9, max_steps=10**9,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=job.new_tokens, max_prompt_length=job.prompt_len,
                kv_cache_size=job.prompt_len + job.new_tokens, temperature=1.0, top_p=1.0, top_k=None,
                eos_tokens=[job.vocab],
            ),
        ),
    )  # fmt: skip
    learner = GRPOLearner(
        rl_cluster=cluster, reward_fns=reward, algo_config=GRPOConfig(num_generations=job.group, beta=0.0)
    )

    def settle():
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
        return last["reward"]

    def batches():
        draw = np.random.default_rng(0)
        count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        for _ in turns(job.block, count, settle):
            rows = draw.integers(job.vocab, size=(job.prompts, job.prompt_len))
            yield {"prompts": np.array([" ".join(map(str, row)) for row in rows])}

    learner.train(batches())


if __name__ == "__main__":
    main()
