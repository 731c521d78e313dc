"""Worker: cached decoding by transformers' generate, and the model that TRL trains."""

import torch
from jobs import Job, asked, turns
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


def make_model(job: Job) -> LlamaForCausalLM:
    """A float32 Llama of the job's shape. No token of its vocabulary ends a response."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=job.vocab, hidden_size=job.d_model, intermediate_size=job.d_ff, num_hidden_layers=job.n_layers,
        num_attention_heads=job.n_heads, num_key_value_heads=job.kv_heads or job.n_heads, tie_word_embeddings=True, use_cache=True,
        max_position_embeddings=job.prompt_len + job.new_tokens, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, attn_implementation="sdpa", dtype="float32",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main():
    job = asked()
    model = make_model(job).eval()
    sampling = GenerationConfig(
        max_new_tokens=job.new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    reward = 0.0
    with torch.inference_mode():
        for _ in turns(job.block, model.num_parameters(), lambda: reward):
            prompts = torch.randint(job.vocab, (job.prompts, job.prompt_len))
            tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=sampling)
            assert tokens.shape[1] == job.prompt_len + job.new_tokens
            reward = float((tokens[:, job.prompt_len :] < job.vocab // 2).float().mean())


if __name__ == "__main__":
    main()
