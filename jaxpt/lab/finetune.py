"""Fine-tuning of a Hugging Face folder on a JSONL or on generated tasks, start to report.

    OUT/finetune/<hash>/  config.json  chunks/{before,finetune,after}  metrics.jsonl  curves.npz  figure.png  report.md  model/
                          held_out.jsonl (of grpo: each held-out prompt, its completions before and after, their rewards)

The files of chunks are those of experiments (lab.store): a run that is killed at any moment goes on from the last one. What a
step does is a function of the state, the seed and the step's number alone.
"""

import hashlib
import inspect
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpt
from jaxpt.lab import checkpoint, gym, identity, prompts, safetensors, store, tokenizer
from jaxpt.lab.errors import RunFailed, UserError, expected, within
from jaxpt.lab.finetune_report import answers, curves_of, picture, report
from jaxpt.lab.merge import metric_lines
from jaxpt.lab.prompts import Text, Texts, Verifier
from jaxpt.lab.worker import from_leaves, to_leaves
from jaxpt.models import LoraConfig, stack_layers
from jaxpt.models.layouts import layout_of
from jaxpt.models.tensors import tensors_of
from jaxpt.ops.sampling import row_keys
from jaxpt.train import finetune as tuning
from jaxpt.train.finetune import METHODS, FinetuneConfig
from jaxpt.train.optim import OptimConfig
from jaxpt.types import bare_trajectory

STAGE = "finetune"
RATES = {True: 2e-4, False: 2e-5}  # of adapters; of everything, a tenth of it (models.lora.RATE_RATIO)
SPLIT, ORDER, DRAW, START, HELD = range(5)  # what a run's key is folded with
DEEP = 8  # layers beyond which one is compiled and scanned


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is a function of, beside the contents of its files. Raises ValueError, naming the flag."""

    checkpoint: str
    data: str | None = None
    tasks: str | None = None  # in the place of data: lab.gym
    method: str = "sft"
    objective: str | None = None  # None: the method's own name
    template: str | None = None  # a file: the text in which prompts stand
    verifier: str | None = None  # the name by which the verifier was found
    lora_rank: int | None = 8  # None: everything is trained
    learning_rate: float | None = None  # None: RATES
    steps: int = 100
    batch: int = 8  # rows of the file per step
    micro: int = 0
    group: int = 8
    new: int = 64
    length: int = 256
    temperature: float = 1.0
    held_out: int | None = None  # rows; None: a tenth, 64 at most
    every: int = 10  # steps between two saved states
    seed: int = 0
    offload: bool = False
    skip_bad: bool = False
    bytes: bool = False

    def __post_init__(self):
        within(self, 1, np.inf, "steps", "batch", "group", "new", "every")
        if self.lora_rank is not None:
            within(self, 1, np.inf, "lora_rank")
        within(self, 0, np.inf, "micro")
        within(self, 0, 2**31 - 1, "seed")
        within(self, 2, np.inf, "length")
        if self.method not in METHODS:
            raise ValueError(f"--method {self.method}: {expected(self.method, METHODS)}")
        if self.objective is not None and self.objective not in (known := tuning.objectives(self.method)):
            raise ValueError(f"--objective {self.objective} is none that --method {self.method} can follow: "
                             f"{expected(self.objective, known)}")
        if (self.data is None) == (self.tasks is None):
            raise ValueError("--data FILE.jsonl is missing: it, or --tasks reasoning_gym:NAME, is expected" if self.data is None
                             else f"--tasks {self.tasks}: expected without --data")
        if self.tasks is not None and (self.method == "dpo" or self.verifier is not None):
            raise ValueError(f"--tasks {self.tasks}: expected with --method sft or grpo, and without --verifier")
        if self.tasks is None and (self.method == "grpo") != (self.verifier is not None):
            needs = "is missing: module:function or file.py:function" if self.verifier is None else f"{self.verifier}: nothing"
            raise ValueError(f"--verifier {needs} is expected with --method {self.method}")
        if self.method == "grpo" and self.new >= self.length:
            raise ValueError(f"--new {self.new}: expected less than --length {self.length}, which prompts share")


class Job(NamedTuple):
    """A run before it touches the disk."""

    settings: Settings
    cfg: FinetuneConfig
    read: checkpoint.Checkpoint
    tokenizer: tokenizer.Tokenizer
    texts: Texts
    train: list[Text]
    held: list[Text]
    width: int  # tokens of a row; with grpo, of a prompt
    verifier: Verifier | None
    contents: dict[str, str]  # what was read -> its sha256
    key: jax.Array

    @property
    def start(self):
        """(what never changes, the first state)."""
        params = stack_layers(self.read.params) if self.cfg.model.scan else self.read.params
        frozen, state = tuning.begin(self.cfg, jax.random.fold_in(self.key, START), params)
        return (tuning.offloaded(frozen) if self.settings.offload else frozen), state


class Result(NamedTuple):
    folder: Path
    model: Path
    before: dict[str, float]  # of held-out rows
    after: dict[str, float]
    curves: dict[str, np.ndarray]
    report: Path
    figure: Path


def run(settings: Settings, verifier: Verifier | None = None, *, out: str | Path = "runs", save: str | Path | None = None,
        resume: bool = False, on_progress: Callable[[dict[str, Any]], None] = lambda message: None) -> Result:
    """Trains, saves the model in `save` (the run folder's model/ by default) and reports. UserError for bad input, RunFailed
    where the loss is no number."""
    if save is not None and not resume:
        _free(Path(save).expanduser())
    job = make_job(settings, verifier)
    elsewhere = dict.fromkeys(("checkpoint", "data", "template", "offload"), "")  # where things lie changes no result
    same_run = {"settings": asdict(settings) | elsewhere, "contents": job.contents}
    folder = Path(out) / STAGE / identity.digest(same_run)[:12]
    source = inspect.getsourcefile(inspect.unwrap(verifier)) if inspect.isfunction(verifier) else None
    must_agree = identity.must_agree(Path(source or jaxpt.__file__))
    with store.locked(folder):
        earlier = store.read_config(folder)
        store.check_resumable(folder, earlier, must_agree, resume)
        record = earlier or {
            "experiment": STAGE, "config": asdict(settings), "contents": job.contents, "must_agree": must_agree,
            "stages": {STAGE: settings.steps}, "rows": {"training": len(job.train), "held out": len(job.held)},
            "bad": job.texts.bad, "cut": job.texts.cut, "versions": identity.versions(),
            "git": identity.git_revision(Path(jaxpt.__file__).parent), "runs": [],
        }
        entry = {"command": shlex.join(_words(settings)), "seeds": [settings.seed]}
        record["runs"] = [*record["runs"], entry | {"finished": False}]
        store.write_json(folder / "config.json", record)
        examined = -(-len(job.held) // settings.batch)
        steps = {"before": examined, STAGE: settings.steps, "after": examined}
        on_progress({"kind": "plan", "folder": folder, "seeds": [settings.seed], "steps": steps, "workers": 1})
        start = [job.start]  # taken out by whoever trains: of what was read the device keeps only what is used
        job = job._replace(read=job.read._replace(params={}))
        chunks, params = _compute(job, start, folder, identity.digest(same_run), on_progress)
        place = folder / "model" if save is None else Path(save).expanduser()
        _save(job, place, params)
        record["runs"][-1] = entry | {"finished": True, "model": str(place)}
        return _publish(job, folder, place, record, chunks)


def make_job(settings: Settings, verifier: Verifier | None) -> Job:
    read = checkpoint.read(settings.checkpoint)
    words = (tokenizer.of_bytes if settings.bytes else tokenizer.read)(read.folder, read.cfg.vocab)
    key = jax.random.key(settings.seed)
    texts, train, held, contents, verifier = _texts(settings, words, verifier, jax.random.fold_in(key, SPLIT))
    lora = None if settings.lora_rank is None else LoraConfig(rank=settings.lora_rank)
    rate = RATES[lora is not None] if settings.learning_rate is None else settings.learning_rate
    try:
        cfg = FinetuneConfig(
            model=replace(read.cfg, lora=lora, scan=read.cfg.n_layers > DEEP),
            optim=OptimConfig(learning_rate=rate), method=settings.method, objective=settings.objective or settings.method,
            micro=settings.micro, group=settings.group, new=settings.new, temperature=settings.temperature, ends=words.ends,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    if settings.offload and (lora is not None or "ref_logp" not in cfg.row.needs):
        raise UserError("--offload: expected with --full and an objective with a reference, which is what the host would keep")
    longest = max(len(text.prompt) + max(map(len, text.answers), default=0) for text in texts.kept)
    if verifier is not None:  # a bad one is found before anything is computed
        prompts.judge(verifier, _judge(settings), texts.kept[0], "")
    folder = sorted(path for path in read.folder.iterdir() if path.suffix in (".json", ".safetensors"))
    contents |= {path.name: _digest(path) for path in folder}
    return Job(settings, cfg, read, words, texts, train, held, -(-longest // 8) * 8, verifier, contents, key)


def _texts(settings: Settings, words: tokenizer.Tokenizer, verifier: Verifier | None, key: jax.Array
           ) -> tuple[Texts, list[Text], list[Text], dict[str, str], Verifier | None]:
    """(all texts, those to train on, those held out, what they are, who judges them)."""
    room = settings.new if settings.method == "grpo" else 1
    template = prompts.PROMPT if settings.tasks is None else gym.TEMPLATE
    if settings.template is not None:
        template = prompts.read_template(settings.template)
    how = (settings.method, words, settings.length, room, settings.skip_bad, template)
    contents = {"template": identity.digest(template)}
    if settings.tasks is None:
        texts = prompts.read(settings.data, *how)
        contents |= {"data": _digest(Path(settings.data).expanduser())}
        return texts, *_split(settings, texts.kept, key), contents, verifier
    tasks = gym.tasks(settings.tasks, settings.held_out)
    lines = [json.dumps(row).encode() for row in (*tasks.train, *tasks.held)]
    texts = prompts.of_lines(lines, f"--tasks {settings.tasks}", *how)
    train = [text for text in texts.kept if text.line <= len(tasks.train)]
    if not train:
        raise UserError(f"--tasks {settings.tasks}: no question to train on is left; see --length")
    judge = tasks.verifier if settings.method == "grpo" else None
    contents |= {"tasks": identity.digest(lines), "reasoning-gym": tasks.version}
    return texts, train, texts.kept[len(train) :], contents, judge


def _judge(settings: Settings) -> str:
    return f"--verifier {settings.verifier}" if settings.tasks is None else f"--tasks {settings.tasks}"


def _split(settings: Settings, texts: list[Text], key: jax.Array) -> tuple[list[Text], list[Text]]:
    count = min(64, -(-len(texts) // 10), len(texts) - 1) if settings.held_out is None else settings.held_out
    if not 0 <= count < len(texts):
        raise UserError(f"--held-out {count}: expected less than the {len(texts)} rows of {settings.data}")
    apart = {int(i) for i in np.asarray(tuning.shuffled(key, len(texts)))[:count]}
    return [t for i, t in enumerate(texts) if i not in apart], [t for i, t in enumerate(texts) if i in apart]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _words(settings: Settings) -> list[str]:
    """The command that means these settings."""
    words = ["jaxpt", "run", STAGE]
    for f in fields(settings):
        flag, value = "--" + f.name.replace("_", "-"), getattr(settings, f.name)
        if value != f.default:
            words += ["--full"] if value is None else [flag] if value is True else [flag, str(value)]
    return words


class Compiled(NamedTuple):
    """update(frozen, state, batch), examine(frozen, trained, batch), sample and probe(frozen, trained, prompts, n, keys)."""

    update: Callable
    examine: Callable
    sample: Callable
    probe: Callable


def _compute(job: Job, start: list, folder: Path, mark: str, on_progress: Callable
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
    return chunks, tuning.joined(cfg, frozen, state["trained"])


def _batch_of(job: Job, compiled: Compiled, step: int, frozen: Any, trained: Any) -> Any:
    """The batch of a step: rows of the file or, with grpo, completions of its prompts under the present policy."""
    s = job.settings
    numbers = tuning.order(jax.random.fold_in(job.key, ORDER), step, s.batch, len(job.train))
    texts = [job.train[i] for i in numbers]
    if s.method != "grpo":
        return _batch(job, texts)
    key = jax.random.fold_in(jax.random.fold_in(job.key, DRAW), step)
    traj, _, rewards = _judged(job, compiled.sample, frozen, trained, texts, s.group, key)
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


def _judged(job: Job, draw: Callable, frozen: Any, trained: Any, texts: Sequence[Text], group: int, key: jax.Array
            ) -> tuple[Any, list[str], list[float]]:
    """(a trajectory with `group` completions of each text and of those that fill the batch; the texts' completions, and the
    verifier's rewards of them)."""
    tokens, n = tuning.padded([text.prompt for text in _filled(texts, job.settings.batch)], job.width)
    keys = row_keys(key, jnp.arange(len(tokens) * group))
    traj = draw(frozen, trained, jnp.asarray(tokens), jnp.asarray(n), keys)
    rows, length = np.asarray(traj.tokens), np.asarray(traj.length)
    said, rewards = [], []
    for i, row in enumerate(rows[: len(texts) * group]):
        written = row[n[i // group] : length[i]].tolist()
        if written and written[-1] in job.tokenizer.ends:
            written.pop()
        said.append(job.tokenizer.decode(written))
        rewards.append(prompts.judge(job.verifier, _judge(job.settings), texts[i // group], said[-1]))
    return traj, said, rewards


def _examined(job: Job, compiled: Compiled, folder: Path, mark: str, stage: str, frozen: Any, trained: Any,
              on_progress: Callable) -> store.Chunk:
    """The held-out rows under `trained`, from the disk where they are there."""
    path, owner = store.chunk_path(folder, stage, job.settings.seed, 0), store.owner(mark, job.settings.seed)
    told = {"kind": "progress", "seed": job.settings.seed, "stage": stage}
    tell = lambda steps, metrics: on_progress(told | {"steps": steps, "metrics": metrics})  # noqa: E731
    if not path.exists():
        began, size, said, sums, means = time.perf_counter(), job.settings.batch, [], {}, {}
        for start in range(0, len(job.held), size):
            texts = job.held[start : start + size]
            if job.settings.method == "grpo":
                key = jax.random.fold_in(jax.random.fold_in(job.key, HELD), start)
                _, completions, rewards = _judged(job, compiled.probe, frozen, trained, texts, 2, key)
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
    tell(-(-len(job.held) // job.settings.batch), {})
    return store.load_own(path, owner, (0, 1))


# --- what is left behind


def _free(place: Path) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"--save {place} is there already: expected the name of a new folder.")


def _save(job: Job, place: Path, params: Any) -> None:
    """The model's folder; one that an earlier run has written before it was ended is the same, bit for bit, and stays."""
    if place.is_dir() and any(place.iterdir()):
        kind, types = layout_of(job.read.config), safetensors.TYPES
        as_stored = lambda name, x: x.astype(types[safetensors.NAMES[job.read.dtypes[name]]]).astype(np.float32)  # noqa: E731
        there, ours = checkpoint.read(place), tensors_of(job.cfg.model, kind, params)
        found = tensors_of(there.cfg, kind, there.params) if there.config.get("model_type") == kind else {}
        if found.keys() != ours.keys() or not all(np.array_equal(x, as_stored(name, ours[name])) for name, x in found.items()):
            raise UserError(f"--save {place} is there already and holds another model: expected the name of a new folder.")
        return
    checkpoint.write(place, job.cfg.model, params, like=job.read)


def _publish(job: Job, folder: Path, place: Path, record: dict, chunks: dict) -> Result:
    """Everything that is derived; report.md last, whose presence means finished."""
    curves = curves_of(chunks, job.settings.seed, STAGE)
    command, footer = record["runs"][-1]["command"], f"jaxpt {jaxpt.__version__}, {folder.name}"
    seconds = sum(chunk.seconds for rows in chunks.values() for chunk in rows)
    before, after = ({name: float(x[0]) for name, x in chunks[stage, job.settings.seed][0].metrics.items()}
                     for stage in ("before", "after"))
    store.write_arrays(folder / "curves.npz", curves)
    store.write(folder / "metrics.jsonl", lambda f: f.write(metric_lines(chunks).encode()))
    image = picture(job.settings.method, curves, STAGE, f"{command}   {footer}")
    store.write(folder / "figure.png", lambda f: f.write(image))
    if job.settings.method == "grpo":
        lines = answers(job.held, *(chunks[stage, job.settings.seed][0] for stage in ("before", "after")))
        store.write(folder / "held_out.jsonl", lambda f: f.write(lines.encode()))
    store.write_json(folder / "config.json", record)
    text = report(job.settings.method, job.cfg.objective, record, curves, before, after, place, seconds)
    store.write(folder / "report.md", lambda f: f.write(text.encode()))
    return Result(folder, place, before, after, curves, folder / "report.md", folder / "figure.png")
