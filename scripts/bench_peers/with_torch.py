"""Worker: updates on texts by torch.compile, on the model of with_hf: AdamW, gradients clipped at a norm of 1."""

import contextlib

import torch
from jobs import asked, turns
from with_hf import make_model


def main():
    job = asked()
    model = make_model(job).train()
    optim = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    tokens = torch.randint(job.vocab, (job.prompts, job.prompt_len))
    rounded = torch.autocast("cpu", torch.bfloat16) if job.dots == "bfloat16" else contextlib.nullcontext()

    @torch.compile
    def loss_of(tokens):
        with rounded:
            logits = model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())

    loss = torch.zeros(())
    for _ in turns(job.block, model.num_parameters(), lambda: float(loss.detach()) * 0):
        optim.zero_grad(set_to_none=True)
        loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()


if __name__ == "__main__":
    main()
