"""Fine-tuning of a Hugging Face folder on a JSONL or on generated tasks, start to report.

    OUT/finetune/<hash>/  config.json  chunks/{before,finetune,after}  metrics.jsonl  curves.npz  figure.png  report.md  model/
                          held_out.jsonl (of grpo: each held-out prompt, its completions before and after, their rewards)

The files of chunks are those of experiments (lab.store). What a run is stands in lab.finetune_job, its steps in
lab.finetune_steps.
"""

import inspect
import shlex
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxpt
from jaxpt.lab import checkpoint, identity, safetensors, store
from jaxpt.lab.errors import UserError
from jaxpt.lab.finetune_job import STAGE, Job, Settings, make_job
from jaxpt.lab.finetune_report import answers, curves_of, picture, report
from jaxpt.lab.finetune_steps import compute, looks
from jaxpt.lab.merge import metric_lines
from jaxpt.lab.prompts import Verifier
from jaxpt.models.layouts import layout_of
from jaxpt.models.tensors import tensors_of


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
        steps = {"before": looks(job), STAGE: settings.steps, "after": looks(job)}
        on_progress({"kind": "plan", "folder": folder, "seeds": [settings.seed], "steps": steps, "workers": 1})
        start = [job.start]  # taken out by whoever trains: of what was read the device keeps only what is used
        job = job._replace(read=job.read._replace(params={}))
        chunks, params = compute(job, start, folder, identity.digest(same_run), on_progress)
        place = folder / "model" if save is None else Path(save).expanduser()
        _save(job, place, params)
        record["runs"][-1] = entry | {"finished": True, "model": str(place)}
        return _publish(job, folder, place, record, chunks)


def _words(settings: Settings) -> list[str]:
    """The command that means these settings."""
    words = ["jaxpt", "run", STAGE]
    for f in fields(settings):
        flag, value = "--" + f.name.replace("_", "-"), getattr(settings, f.name)
        if value != f.default:
            words += ["--full"] if value is None else [flag] if value is True else [flag, str(value)]
    return words


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
