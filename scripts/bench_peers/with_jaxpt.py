"""Worker: the job in jaxpt, through the functions that its experiments use; a block is one compiled call.

Rows lie on one virtual device a core (shard_map), because XLA runs the small operations of a decoding step on one thread; where
the weights are larger than the cache, products are what takes the time, and have threads of their own.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jobs import Job, asked, turns

from jaxpt.envs.protocol import DONE, POLICY, Environment, Outcome, Spec
from jaxpt.models import ModelConfig, make_model
from jaxpt.ops.sampling import row_keys, sampler
from jaxpt.rollout import generate
from jaxpt.train import finetune, parallel
from jaxpt.train.common import EnvConfig, EvalConfig, draw_tasks
from jaxpt.train.finetune import FinetuneConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.train.policy import PolicyConfig, make_policy
from jaxpt.types import bare_trajectory

CORES = 2
CACHE = 32 * 2**20  # bytes that cores share


class State(NamedTuple):
    count: jax.Array  # [] int32, tokens read
    low: jax.Array  # [] int32, those in the lower half of the vocabulary


def lower_half(job: Job) -> Environment:
    """Random prompts, responses of one length, rewarded by the share of tokens below vocab / 2."""
    spec = Spec(job.vocab, job.prompt_len, job.new_tokens, (), (), 1, (), tuple(map(str, range(job.vocab))))
    over = lambda state: state.count >= job.new_tokens  # noqa: E731

    def feed(task, state, token):
        new = State(state.count + 1, state.low + (token < job.vocab // 2))
        return jax.tree.map(lambda old, fresh: jnp.where(over(state), old, fresh), state, new)

    def outcome(task, state):
        share = state.low / job.new_tokens
        return Outcome(share, share, jnp.zeros(0), ~over(state))

    return Environment(
        name="lower_half", spec=spec, feed=feed, outcome=outcome, oracle=None,
        sample=lambda key, level: jax.random.randint(key, (job.prompt_len,), 0, job.vocab),
        prompt=lambda task: (task, jnp.int32(job.prompt_len)),
        init=lambda task, key: State(jnp.int32(0), jnp.int32(0)),
        pending=lambda task, state: jnp.where(over(state), DONE, POLICY),
        signals=lambda task, state, token: jnp.zeros(0),
    )  # fmt: skip


@dataclass(frozen=True)
class BenchEnv(EnvConfig):
    job: Job | None = None

    def make(self) -> Environment:
        return lower_half(self.job)


def model_config(job: Job) -> ModelConfig:
    return ModelConfig(
        vocab=job.vocab, d_model=job.d_model, n_layers=job.n_layers, n_heads=job.n_heads, d_ff=job.d_ff, n_kv_heads=job.kv_heads,
    )


def grpo(job: Job) -> tuple:
    """-> (state, run: state -> (state, mean reward of each update)); the state is donated."""
    cfg = PolicyConfig(
        env=BenchEnv("lower_half", job=job), model=model_config(job), objectives=("grpo_no_kl",),
        optim=OptimConfig(learning_rate=job.learning_rate), prompts=job.prompts, group=job.group,
        eval=EvalConfig(every=10**9, tasks=CORES), micro=32,  # shares that fit the cache: half the time of all rows at once
    )  # fmt: skip
    program = make_policy(cfg)
    state = jax.jit(program.init)(jax.random.key(0), {k: jnp.float32(v) for k, v in program.hyper.items()})
    step = parallel.step_by_shard_map(make_policy, cfg, parallel.make_mesh(CORES))

    def run(state):
        state, metrics = jax.lax.scan(lambda s, _: step(s), state, None, length=job.block)
        return state, metrics["reward"]

    return state, jax.jit(run, donate_argnums=0)


def decode(job: Job) -> tuple:
    env, model = lower_half(job), make_model(model_config(job))
    params = model.init(jax.random.key(0))

    def rewards(params, keys):
        return generate(model, params, env, draw_tasks(env, (1, 1), keys), keys, sampler(), job.group).reward

    spread = 4 * job.parameters < CACHE  # else every core would read all the weights
    mesh, rows = parallel.make_mesh(min(CORES, job.prompts) if spread else 1), P(parallel.DATA)
    rewards = jax.shard_map(rewards, mesh=mesh, in_specs=(P(), rows), out_specs=rows, check_vma=False)

    def run(state):
        key, params = state
        here, key = jax.random.split(key)
        return (key, params), rewards(params, row_keys(here, jnp.arange(job.prompts)))

    return (jax.random.key(1), params), jax.jit(run)


def sft(job: Job) -> tuple:
    """Updates of train.finetune, which `jaxpt run finetune --full` makes; a block is one compiled call."""
    cfg = FinetuneConfig(model=replace(model_config(job), dots=job.dots), optim=OptimConfig(learning_rate=job.learning_rate))
    params = jax.jit(make_model(cfg.model).init)(jax.random.key(0))
    _, state = finetune.begin(cfg, jax.random.key(1), params)
    tokens = jax.random.randint(jax.random.key(2), (job.prompts, job.prompt_len), 0, job.vocab)
    texts = bare_trajectory(tokens, jnp.arange(job.prompt_len)[None] > jnp.zeros((job.prompts, 1)))

    def run(state):
        return jax.lax.scan(lambda s, _: (finetune.update(cfg, {}, s, texts)[0], 0.0), state, None, length=job.block)

    return jax.tree.map(jnp.copy, state), jax.jit(run, donate_argnums=0)


def main():
    job = asked()
    if job.kind != "sft":  # wide products have threads of their own
        jax.config.update("jax_num_cpu_devices", CORES)
    state, run = {"grpo": grpo, "decode": decode, "sft": sft}[job.kind](job)
    count = sum(x.size for x in jax.tree.leaves(state[{"grpo": "params", "decode": 1, "sft": "trained"}[job.kind]]))
    rewards = jnp.zeros(1)
    # A scan of `block` updates is one turn; batches are decoded one by one.
    paces = {"block": job.block} if job.kind == "decode" else {"block": 1, "warm": 1}
    for _ in turns(parameters=count, settle=lambda: float(rewards[-1]), **paces):
        state, rewards = run(state)


if __name__ == "__main__":
    main()
