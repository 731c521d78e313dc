"""The steps of a fine-tuning run: updates and looks at held-out rows, kept on the disk as they are done.

What a step does is a function of the state, the seed and the step's number alone, so that a run that is killed at any moment
goes on from the last chunk.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.lab import prompts, store
from jaxpt.lab.errors import RunFailed
from jaxpt.lab.finetune_job import DRAW, HELD, ORDER, STAGE, Job, judge_of
from jaxpt.lab.prompts import Text
from jaxpt.lab.worker import from_leaves, to_leaves
from jaxpt.ops.sampling import row_keys
from jaxpt.train import finetune as tuning
from jaxpt.types import bare_trajectory


class Compiled(NamedTuple):
    """update(frozen, state, batch), examine(frozen, trained, batch), sample and probe(frozen, trained, prompts, n, keys)."""

    update: Callable
    examine: Callable
    sample: Callable
    probe: Callable


def compute(job: Job, start: list, folder: Path, mark: str, on_progress: Callable
            ) -> tuple[dict[tuple[str, int], list[store.Chunk]], Any]:
    """(the chunks of every stage, the parameters at the end)."""
    s, cfg = job.settings, job.cfg
    compiled = Compiled(jax.jit(partial(tuning.update, cfg), donate_argnums=1), *(
        jax.jit(partial(f, cfg)) for f in (tuning.examine, tuning.sample, tuning.probe)))
    frozen, state = start.pop()
    before = _examined(job, compiled, folder, mark, "before", frozen, state["trained"], on_progress)
    bounds, owner = store.chunk_bounds(s.steps, s.every), store.owner(mark, s.seed)
    done, leaves = store.progress(folder, STAGE, s.seed, owner, bounds)
    structure = jax.tree.structure(state)
    state = from_leaves(to_leaves(state) if leaves is None else leaves, structure)  # no buffer is shared with `frozen`
    for index, (first, count) in list(enumerate(bounds))[done:]:
        began, rows = time.perf_counter(), []
        for step in range(first, first + count):
            state, metrics = compiled.update(frozen, state, _batch_of(job, compiled, step, frozen, state["trained"]))
            rows.append({name: float(x) for name, x in metrics.items()})
            if not np.isfinite(rows[-1]["loss"]):
                raise RunFailed(f"the loss is {rows[-1]['loss']} at step {step}: expected a number; a smaller --learning-rate "
                                f"than {cfg.optim.learning_rate:g} may help; what was finished is kept in {folder}")
            told = {name: rows[-1][name] for name in ("reward", "loss", "grad_norm", "length") if name in rows[-1]}
            on_progress({"kind": "progress", "seed": s.seed, "stage": STAGE, "steps": step + 1, "metrics": told})
        metrics = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        chunk = store.Chunk(owner, first, count, time.perf_counter() - began, metrics, to_leaves(state))
        store.save_chunk(store.chunk_path(folder, STAGE, s.seed, index), chunk)
        if index > 0:
            store.drop_state(store.chunk_path(folder, STAGE, s.seed, index - 1))
    after = _examined(job, compiled, folder, mark, "after", frozen, state["trained"], on_progress)
    stored = [store.load_own(store.chunk_path(folder, STAGE, s.seed, i), owner, b) for i, b in enumerate(bounds)]
    chunks = {("before", s.seed): [before], (STAGE, s.seed): stored, ("after", s.seed): [after]}
    return chunks, tuning.whole_params(cfg, frozen, state["trained"])


def _batch_of(job: Job, compiled: Compiled, step: int, frozen: Any, trained: Any) -> Any:
    """The batch of a step: rows of the file or, with grpo, completions of its prompts under the present policy."""
    s = job.settings
    numbers = tuning.order(jax.random.fold_in(job.key, ORDER), step, s.batch, len(job.train))
    texts = [job.train[i] for i in numbers]
    if s.method != "grpo":
        return _batch(job, texts)
    key = jax.random.fold_in(jax.random.fold_in(job.key, DRAW), step)
    traj, _, rewards = _judged(job, compiled.sample, frozen, trained, texts, s.batch, s.group, key)
    rewards = jnp.asarray(rewards, jnp.float32)
    return traj._replace(reward=rewards, gold=rewards)


def _batch(job: Job, texts: Sequence[Text]) -> Any:
    """Rows as arrays; what fills the batch counts nowhere."""
    filled = _filled(texts, job.settings.batch)
    answers = zip(*(text.answers for text in filled), strict=True)
    sides = [tuning.responses([text.prompt for text in filled], list(side), job.width) for side in answers]
    for _, mask in sides:
        mask[len(texts) :] = False
    if job.settings.method == "sft":
        return bare_trajectory(*map(jnp.asarray, sides[0]))
    named = zip(("chosen", "rejected"), sides, strict=True)
    return {name: jnp.asarray(x) for side, pair in named for name, x in zip((side, f"{side}_mask"), pair, strict=True)}


def _filled(texts: Sequence[Text], size: int) -> list[Text]:
    """The texts again and again until they are `size`: batches have one shape."""
    return [texts[i % len(texts)] for i in range(size)]


def _judged(job: Job, draw: Callable, frozen: Any, trained: Any, texts: Sequence[Text], size: int, group: int, key: jax.Array
            ) -> tuple[Any, list[str], list[float]]:
    """(a trajectory with `group` completions of each of `size` texts, those that fill it up included; the texts' completions,
    and the verifier's rewards of them)."""
    tokens, n = tuning.padded([text.prompt for text in _filled(texts, size)], job.width)
    keys = row_keys(key, jnp.arange(len(tokens) * group))
    traj = draw(frozen, trained, jnp.asarray(tokens), jnp.asarray(n), keys)
    rows, length = np.asarray(traj.tokens), np.asarray(traj.length)
    said, rewards = [], []
    for i, row in enumerate(rows[: len(texts) * group]):
        written = row[n[i // group] : length[i]].tolist()
        if written and written[-1] in job.tokenizer.ends:
            written.pop()
        said.append(job.tokenizer.decode(written))
        rewards.append(prompts.judge(job.verifier, judge_of(job.settings), texts[i // group], said[-1]))
    return traj, said, rewards


def looks(job: Job) -> int:
    """The batches of held-out rows."""
    return -(-len(job.held) // _at_once(job))


def _at_once(job: Job) -> int:
    """Held-out rows of a look. With grpo looks are alike, and draw no more completions, two of each row, than an update."""
    if job.settings.method != "grpo":
        return job.settings.batch
    held, most = len(job.held), max(1, job.settings.batch * job.settings.group // 2)
    count = max(1, -(-held // most))
    return max(1, -(-held // count))


def _examined(job: Job, compiled: Compiled, folder: Path, mark: str, stage: str, frozen: Any, trained: Any,
              on_progress: Callable) -> store.Chunk:
    """The held-out rows under `trained`, from the disk where they are there."""
    path, owner = store.chunk_path(folder, stage, job.settings.seed, 0), store.owner(mark, job.settings.seed)
    told = {"kind": "progress", "seed": job.settings.seed, "stage": stage}
    tell = lambda steps, metrics: on_progress(told | {"steps": steps, "metrics": metrics})  # noqa: E731
    if not path.exists():
        began, size, said, sums, means = time.perf_counter(), _at_once(job), [], {}, {}
        for start in range(0, len(job.held), size):
            texts = job.held[start : start + size]
            if job.settings.method == "grpo":
                key = jax.random.fold_in(jax.random.fold_in(job.key, HELD), start)
                _, completions, rewards = _judged(job, compiled.probe, frozen, trained, texts, size, 2, key)
                said += zip(completions, rewards, strict=True)
                found = {"greedy": (sum(rewards[::2]), len(texts)), "reward": (sum(rewards[1::2]), len(texts))}
            else:
                found = compiled.examine(frozen, trained, _batch(job, texts))
            for name, pair in found.items():
                sums[name] = sums.get(name, 0) + np.array(pair, np.float64)
            means = {name: total / max(weight, 1) for name, (total, weight) in sums.items()}
            tell(start // size + 1, means)
        metrics = {name: np.array([x]) for name, x in means.items()}
        kept = to_leaves(np.frombuffer(json.dumps(said).encode(), np.uint8))
        store.save_chunk(path, store.Chunk(owner, 0, 1, time.perf_counter() - began, metrics, kept))
    tell(looks(job), {})
    return store.load_own(path, owner, (0, 1))
