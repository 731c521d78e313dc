"""The jobs that all libraries do, and how a worker process is asked to do them. Imports no library.

A worker prints one line of JSON when it is warm, then does one block of the job for every line that it reads and
prints the block's seconds. So the parent can alternate workers that stay compiled and loaded.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

WARM = 4  # updates or decodes before a worker is ready: compilation and first touches


@dataclass(frozen=True)
class Job:
    """A Llama-like decoder (RMSNorm, rotary attention, SwiGLU, tied embeddings, float32) and a batch for it.

    Prompts are `prompt_len` random tokens. No token ends a response: all are `new_tokens` long, drawn at
    temperature 1. The reward is the share of a response's tokens in the lower half of the vocabulary.
    """

    kind: str  # grpo, decode or sft: AdamW on the next tokens of `prompts` rows of `prompt_len` random ones
    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    vocab: int
    prompts: int
    group: int
    new_tokens: int
    block: int  # updates, or decoded batches, between two looks at the clock
    prompt_len: int = 16
    learning_rate: float = 1e-3
    kv_heads: int | None = None  # None: n_heads
    dots: str = "float32"  # or bfloat16: inputs of products, torch's autocast

    @property
    def parameters(self) -> int:
        shared = (self.kv_heads or self.n_heads) / self.n_heads  # width of keys and of values over that of queries
        layer = int((2 + 2 * shared) * self.d_model**2) + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return self.n_layers * layer + self.vocab * self.d_model + self.d_model


@dataclass(frozen=True)
class MoeJob:
    """Value and gradients (weights, inputs) of one layer of experts on 2048 tokens, float32, no token dropped."""

    experts: int
    top_k: int
    d_ff: int
    shared: int
    kind: str = "moe"
    d_model: int = 128
    tokens: int = 2048
    block: int = 10

    @property
    def parameters(self) -> int:
        return (self.experts + self.shared) * 3 * self.d_model * self.d_ff + self.experts * self.d_model


SMOLLM2 = (576, 30, 9, 1536, 49152)  # SmolLM2-135M's shape
TEN = (320, 8, 5, 864, 512)  # 10M parameters
SMALL, MIDDLE, LARGE = (32, 2, 2, 88, 32), (64, 2, 2, 176, 128), (128, 4, 4, 344, 128)
JOBS = {
    "grpo-26k": Job("grpo", *SMALL, prompts=32, group=8, new_tokens=48, block=10),
    "grpo-110k": Job("grpo", *MIDDLE, prompts=32, group=8, new_tokens=48, block=10),
    "grpo-0.8M": Job("grpo", *LARGE, prompts=16, group=8, new_tokens=32, block=5),
    "decode-1": Job("decode", *LARGE, prompts=1, group=1, new_tokens=112, block=8),
    "decode-16": Job("decode", *LARGE, prompts=16, group=1, new_tokens=112, block=4),
    "decode-128": Job("decode", *LARGE, prompts=128, group=1, new_tokens=112, block=2),
    "sft-1M": Job("sft", *LARGE, prompts=16, group=1, new_tokens=0, block=10, prompt_len=128),
    "sft-10M": Job("sft", *TEN, prompts=8, group=1, new_tokens=0, block=3, prompt_len=256),
    "sft-10M-bf16": Job("sft", *TEN, prompts=8, group=1, new_tokens=0, block=3, prompt_len=256, dots="bfloat16"),
    "smollm2-1": Job("decode", *SMOLLM2, prompts=1, group=1, new_tokens=64, block=1, kv_heads=3),
    "smollm2-8": Job("decode", *SMOLLM2, prompts=8, group=1, new_tokens=64, block=1, kv_heads=3),
    "moe-8": MoeJob(experts=8, top_k=2, d_ff=256, shared=0),
    "moe-64": MoeJob(experts=64, top_k=6, d_ff=64, shared=2),
}


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def asked() -> Job | MoeJob:
    """The job named on the command line."""
    return JOBS[sys.argv[1]]


def turns(block: int, parameters: int, settle: Callable[[], float], warm: int = WARM) -> Iterator[None]:
    """Yields at the start of every piece of work: `warm` pieces, then `block` for each line of the standard input.

    The clock stops when the piece after the block is asked for, and settle() has waited for what still runs.
    settle returns the mean reward of late (or 0.0), which shows that the worker learns.
    """
    sys.stdout, out = sys.stderr, sys.stdout  # what a library prints must not mix with the answers
    tell = lambda **answer: print(json.dumps(answer), file=out, flush=True)  # noqa: E731
    yield from (None for _ in range(warm))
    settle()
    tell(parameters=parameters)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        yield from (None for _ in range(block))
        reward = settle()
        tell(seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu, reward=reward)
