"""Worker: the same GRPO job in TRL's GRPOTrainer, on a tiny Llama; logging, checkpoints and progress bars are off."""

import tempfile

import torch
from datasets import Dataset
from jobs import asked, turns
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from with_hf import make_model


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """One word per token. The end of a response is a word behind the model's vocabulary: it is never drawn."""
    words = {**{str(i): i for i in range(vocab)}, "<end>": vocab}
    core = Tokenizer(WordLevel(words, unk_token="<end>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>", padding_side="left")


class Turns(TrainerCallback):
    def __init__(self, turns):
        self.turns = turns

    def on_step_begin(self, args, state, control, **kwargs):
        next(self.turns, None)  # blocks until the parent asks for more

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = control.should_save = control.should_evaluate = False


def main():
    job = asked()
    model = make_model(job)
    last = {"reward": 0.0}

    def reward(completion_ids, **_):
        values = [sum(token < job.vocab // 2 for token in row) / job.new_tokens for row in completion_ids]
        assert all(len(row) == job.new_tokens for row in completion_ids)
        last["reward"] = sum(values) / len(values)
        return values

    prompts = torch.randint(job.vocab, (64 * job.prompts, job.prompt_len)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=10**6,
            per_device_train_batch_size=job.prompts * job.group, gradient_accumulation_steps=1,
            steps_per_generation=1, num_iterations=1, num_generations=job.group,
            max_completion_length=job.new_tokens, temperature=1.0, top_p=1.0, top_k=0, beta=0.0, loss_type="grpo",
            scale_rewards="group", learning_rate=job.learning_rate, lr_scheduler_type="constant", weight_decay=0.0,
            max_grad_norm=1.0, adam_beta2=0.99, logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        updates = turns(job.block, model.num_parameters(), lambda: last["reward"])
        trainer = GRPOTrainer(
            model=model, args=args, reward_funcs=reward, processing_class=tokenizer(job.vocab),
            train_dataset=Dataset.from_dict({"prompt": [" ".join(map(str, row)) for row in prompts]}),
            callbacks=[Turns(updates)],
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
