#!/usr/bin/env python
"""Speeds of jaxpt, each beside what bounds it, on this machine.

Command: .venv/bin/python scripts/bench.py [--rounds 5] [--json FILE]
         .venv/bin/python scripts/bench.py --peers [--only grpo|decode|sft|moe|smollm2|grpo-26k|...]
         .venv/bin/python scripts/bench.py objectives [--only trl|verl|openrlhf|skyrl|...]
         .venv/bin/python scripts/bench.py verify [--only jax|numpy|torch]
         .venv/bin/python scripts/bench.py laws [--only LAW]     scripts/bench.py scaling [--only jaxpt|SciPy|...]
Every pair is measured alternately, A B A B ..., and medians are printed. A ratio above 1 means that ours is the
better of the two (less time, or more per second). Nothing here is asserted: shared machines are noisy, and a
test that times is a test that fails by chance.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import bench_verify
from bench_peers.compare import Missing, peer_rows
from bench_peers.losses import losses, summary
from bench_scaling import laws, scaling

ROUNDS = 5


def settings():
    """The program that most experiments run: 26k parameters, 32 prompts x 8 samples."""
    from jaxpt.models import ModelConfig
    from jaxpt.train.common import EnvConfig, EvalConfig
    from jaxpt.train.policy import PolicyConfig
    from jaxpt.train.sft import SftConfig

    env = EnvConfig("chain", {"p": 7, "max_level": 4}, (1, 4))
    model = ModelConfig(vocab=env.make().spec.vocab)
    never = EvalConfig(every=10**6, tasks=8)
    policy = PolicyConfig(env=env, model=model, objectives=("grpo_no_kl",), eval=never)
    return policy, SftConfig(env=env, model=model, batch=256, eval=never)


def median_times(*variants, rounds):
    """Median seconds of each function, run alternately."""
    times = [[] for _ in variants]
    for _ in range(rounds):
        for variant, spent in zip(variants, times, strict=True):
            start = time.perf_counter()
            variant()
            spent.append(time.perf_counter() - start)
    return [statistics.median(spent) for spent in times]


def runner(program, steps):
    """A function that runs `steps` updates in one compiled call, and the seconds that compiling took."""
    import jax
    import jax.numpy as jnp

    state = jax.jit(program.init)(jax.random.key(0), {k: jnp.float32(v) for k, v in program.hyper.items()})
    scan = jax.jit(lambda s: jax.lax.scan(lambda s, _: program.step(s), s, None, length=steps)[0])
    start = time.perf_counter()
    compiled = scan.lower(state).compile()
    seconds = time.perf_counter() - start
    jax.block_until_ready(compiled(state))
    return (lambda: jax.block_until_ready(compiled(state))), seconds


def matmul_peak(rounds):
    """FLOPs per second of a product of 1024 x 1024 matrices."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((1024, 1024))
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    return 2 * 1024**3 / median_times(lambda: jax.block_until_ready(product(x)), rounds=4 * rounds)[0]


def pretrain(rounds):
    """Updates of a decoder of 10M parameters on texts, 8 rows of 256 tokens: the share of the matmul peak."""
    import jax
    from bench_peers import jobs

    sys.path.insert(0, os.path.dirname(jobs.__file__))  # a worker's files find each other by name
    from bench_peers.with_jaxpt import model_config, sft

    from jaxpt.train.rung import update_flops

    job = jobs.JOBS["sft-10M"]
    state, run = sft(job)
    compiled = run.lower(state).compile()
    state, _ = compiled(state)

    def block():
        nonlocal state
        state, _ = jax.block_until_ready(compiled(state))

    seconds, peak = median_times(block, rounds=rounds)[0] / job.block, matmul_peak(rounds)
    cost = update_flops(model_config(job), job.prompts, job.prompt_len)
    yield "pretrain 10M, GFLOP/s of products", cost / seconds / 1e9, "matmul peak", peak / 1e9


def updates(rounds):
    """One update in a scan of 20 against one call per update; and the share of the matmul peak."""
    from jaxpt.train.budget import update_flops
    from jaxpt.train.policy import make_policy, policy_flops
    from jaxpt.train.sft import make_sft

    policy, sft = settings()
    peak = matmul_peak(rounds)
    cost = {"grpo": policy_flops(policy), "sft": update_flops(sft.model, sft.env.make().spec, sft.batch)}
    for name, program in (("grpo", make_policy(policy)), ("sft", make_sft(sft))):
        (scan, compile_seconds), (single, _) = runner(program, 20), runner(program, 1)
        per_scan, per_call = median_times(scan, single, rounds=rounds)
        yield f"{name} update in a scan of 20, ms", 1e3 * per_scan / 20, "one call per update, ms", 1e3 * per_call
        yield f"{name} update, GFLOP/s of products", cost[name] / (per_scan / 20) / 1e9, "matmul peak", peak / 1e9
        yield f"{name} compile, s", compile_seconds, None, None


def rollouts(rounds):
    """Sampled tokens per second, environment and sampling included, against the bare decode steps."""
    import jax
    import jax.numpy as jnp

    from jaxpt.models import make_model
    from jaxpt.ops.sampling import row_keys, sampler
    from jaxpt.rollout import generate
    from jaxpt.rollout.generate import whole_strides
    from jaxpt.train.common import draw_tasks

    policy, _ = settings()
    env, model = policy.env.make(), make_model(policy.model)
    B, steps = policy.prompts * policy.group, whole_strides(env.spec.response_len)
    params = model.init(jax.random.key(0))
    tasks = draw_tasks(env, policy.env.levels, row_keys(jax.random.key(1), jnp.arange(policy.prompts)))
    keys = row_keys(jax.random.key(2), jnp.arange(B))

    @jax.jit
    def sampled(params):
        return generate(model, params, env, tasks, keys, sampler(), policy.group)

    @jax.jit
    def bare(params):
        def step(carry, at):
            hidden, cache = model.extend(params, carry[0][:, None], carry[1], jnp.full(B, at))
            return (jnp.argmax(hidden[:, 0] @ model.unembed(params), axis=-1), cache), None

        start = (jnp.zeros(B, jnp.int32), model.cache(B, env.spec.prompt_len + steps))
        return jax.lax.scan(step, start, env.spec.prompt_len + jnp.arange(steps))[0][0]

    ours, bound = median_times(
        lambda: jax.block_until_ready(sampled(params)), lambda: jax.block_until_ready(bare(params)), rounds=4 * rounds
    )
    yield "rollout, k tokens/s", B * steps / ours / 1e3, "decode steps alone", B * steps / bound / 1e3


def seeds(rounds):
    """Two seeds at once in pinned one-thread processes, against one after the other with two threads."""
    code = (
        "import os, sys; sys.path.insert(0, 'scripts'); import bench\n"
        "if len(sys.argv) > 2 and hasattr(os, 'sched_setaffinity'): os.sched_setaffinity(0, {int(sys.argv[2])})\n"
        "from jaxpt.train.policy import make_policy\n"
        "run, _ = bench.runner(make_policy(bench.settings()[0]), 20)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for _ in range(int(sys.argv[1])): run()\n"
        "print('done', flush=True)\n"
    )
    one_thread = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

    def timed(workers):
        for worker in workers:
            worker.stdout.readline()
        start = time.perf_counter()
        for worker in workers:
            worker.stdin.write("\n"), worker.stdin.flush()
        for worker in workers:
            worker.stdout.readline()
        return time.perf_counter() - start

    def start(repeats, core=None):
        env = {**os.environ, **({} if core is None else {"XLA_FLAGS": one_thread})}
        command = [sys.executable, "-c", code, str(repeats), *([] if core is None else [str(core)])]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    ratio = []
    for _ in range(max(1, rounds // 2)):
        together = timed([start(4, 0), start(4, 1)])
        apart = timed([start(8)])
        ratio.append((40 * 4 / together, 20 * 8 / apart))
    ours, bound = (statistics.median(x) for x in zip(*ratio, strict=True))
    yield "2 seeds in 2 processes, updates/s", ours, "one after the other, 2 threads", bound


def start_up(rounds):
    """A process that imports, traces and loads its program from the cache, against one that compiles."""
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import bench\n"
        "from jaxpt.train.policy import make_policy\n"
        "bench.runner(make_policy(bench.settings()[0]), 20)\n"
    )
    with tempfile.TemporaryDirectory() as cache:
        env = {
            **os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        run = lambda: subprocess.run([sys.executable, "-c", code], env=env, check=True)  # noqa: E731
        cold = median_times(run, rounds=1)[0]
        warm = median_times(run, rounds=rounds)[0]
    yield "start from the cache, s", warm, "start with compiling, s", cold


def own_rows(args):
    for part in (updates, pretrain, rollouts, seeds, start_up):
        if args.only in (None, part.__name__):
            yield from part(args.rounds)


def objectives(args):
    """Losses beside the peers' own torch functions, milliseconds of one value and gradient."""
    rows = []
    for row in losses(args.rounds, args.only):
        if not rows:
            print(f"{'peer function':<66} {'jaxpt':>8} {'eager':>8} {'ratio':>6} {'compiled':>9} {'ratio':>6}")
        rows.append(row)
        compiled = f"{'-':>9} {'-':>6}" if row.compiled is None else f"{1e3 * row.compiled:9.2f} {row.compiled / row.jaxpt:6.2f}"
        times = f"{1e3 * row.jaxpt:8.2f} {1e3 * row.eager:8.2f} {row.eager / row.jaxpt:6.2f} {compiled}"
        print(f"{row.name:<66} {times}  {row.note}".rstrip(), flush=True)
    print(summary(rows))
    return [row._asdict() for row in rows]


def verify(args):
    """The command that verifies a policy loss, each time in a process of its own."""
    rows = []
    for row in bench_verify.times(args.only):
        rows.append(row._asdict())
        print(f"{row.what:<20} {row.seconds:6.1f} s of {row.bound:.0f} s {row.examples_per_s:8.0f} examples/s", flush=True)
    return rows


def fits(args):
    """CPU-seconds of whole commands; beside other fitters also the objective that they reached."""
    rows = []
    for row in laws(args.only) if args.what == "laws" else scaling(args.only):
        rows.append(row)
        beside = "" if len(row) == 2 else f"   objective {row[2]:.10g}   {row[1] / rows[0][1]:.1f} times the first"
        print(f"{row[0]:<32} {row[1]:8.2f} CPU-s{beside}", flush=True)
    return rows


def speeds(args):
    """The other benchmarks: ours beside a bound or a peer, each with its ratio."""
    rows = []
    for name, ours, bound_name, bound in peer_rows(args.rounds, args.only) if args.peers else own_rows(args):
        rows.append({"what": name, "ours": ours, "bound": bound_name, "bound_value": bound})
        less_is_better = name.endswith((", s", ", ms"))
        ratio = None if bound is None else (bound / ours if less_is_better else ours / bound)
        rows[-1]["ratio"] = ratio
        beside = "" if bound is None else f"   {bound_name} {bound:.2f}   ratio {ratio:.2f}"
        print(f"{name:<42} {ours:10.2f}{beside}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "what", nargs="?", choices=("objectives", "verify", "laws", "scaling"),
        help="losses beside the peers' torch functions; jaxpt verify; fits of every law; a fit beside other fitters",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="repeats of every measurement (5)")
    parser.add_argument("--only", help="updates, pretrain, rollouts, seeds or start_up; a framework; else how a job's name starts")
    parser.add_argument("--peers", action="store_true", help="the same jobs in TRL, Tunix, transformers and torch.compile instead")
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    try:
        chosen = {"objectives": objectives, "verify": verify, "laws": fits, "scaling": fits, None: speeds}
        rows = chosen[args.what](args)
    except Missing as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"load": os.getloadavg(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
