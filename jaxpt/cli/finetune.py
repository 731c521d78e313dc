"""`jaxpt finetune`, which `jaxpt run finetune` is too: a checkpoint, a JSONL, and a folder that transformers loads."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from jaxpt.cli.options import Option, help_text, no_more, one_of, positive, split, whole
from jaxpt.lab.compiling import keep_programs
from jaxpt.lab.errors import UserError

OPTIONS = {
    "--checkpoint": Option(str, None, "the folder of a model: config.json, safetensors, tokenizer.json"),
    "--data": Option(str, None, "a JSONL; its keys are below"),
    "--tasks": Option(str, None, "in the place of --data: reasoning_gym:NAME[,size=500][,seed=0][,PARAMETER=VALUE ...]"),
    "--template": Option(str, None, "a text file in which {prompt} stands for each row's prompt: a chat template, shots, ..."),
    "--method": Option(one_of("sft", "dpo", "grpo"), "sft", "sft (the default), dpo or grpo"),
    "--objective": Option(str, None, "a row of `jaxpt list objectives` of that kind; the method's own by default"),
    "--verifier": Option(str, None, "grpo: module:function or file.py:function, (prompt, completion, row) -> reward"),
    "--lora-rank": Option(whole, 8, "of adapters on every matrix of the layers (8)"),
    "--full": Option(None, False, "train all parameters, without adapters"),
    "--learning-rate": Option(positive, None, "2e-4 for adapters, 2e-5 for all parameters"),
    "--steps": Option(whole, 100, "updates (100)"),
    "--batch": Option(whole, 8, "rows of the file per update (8)"),
    "--micro": Option(whole, 0, "rows per share of a batch, whose gradients are summed: less memory (0: all at once)"),
    "--offload": Option(None, False, "with --full: the reference lies in the host's memory, not the device's"),
    "--length": Option(whole, 256, "tokens of prompt and answer at most (256); answers are cut there"),
    "--group": Option(whole, 8, "grpo: completions of each prompt (8)"),
    "--new": Option(whole, 64, "grpo: tokens of a completion at most (64), part of --length"),
    "--temperature": Option(positive, 1.0, "grpo: of completions (1)"),
    "--held-out": Option(whole, None, "rows kept apart and examined before and after; a tenth, at most 64"),
    "--every": Option(whole, 10, "updates between two saved states (10)"),
    "--seed": Option(whole, 0, "of adapters, order and draws (0)"),
    "--skip-bad": Option(None, False, "leave out rows that are broken or too long, and list them in the report"),
    "--bytes": Option(None, False, "texts are UTF-8 bytes; the folder's tokenizer is not read"),
    "--save": Option(str, None, "a new folder for the trained model; model/ in the run folder by default"),
    "--out": Option(str, "runs", "the folder of run folders (runs)"),
    "--resume": Option(None, False, "go on with an unfinished run"),
    "--help": Option(None, False, "this text"),
}
USAGE = "jaxpt run finetune --checkpoint DIR (--data FILE.jsonl | --tasks reasoning_gym:NAME) [options]"
WHAT = ("""Trains a Hugging Face folder on texts and writes it as a folder that transformers loads; adapters are merged.

  --method sft   {"prompt", "response"}            maximum likelihood of responses
  --method dpo   {"prompt", "chosen", "rejected"}  a preference objective; the reference is the model as it was
  --method grpo  {"prompt", and anything else}     sampled completions, judged by a verifier, which must give a finite
                                                   number for every text, the empty one included

Prompts are taken as they stand, or inside the text of --template, of which one newline at the very end counts as the
editor's; a verifier is given the row's own prompt.

With --tasks the prompts are reasoning-gym's questions, each with a newline behind it where no template is given, and the
held-out ones are of other seeds; sft learns their answers, and grpo's reward is the task's own score of what stands in the
completion's last <answer>...</answer>, or of all of it where there is none (0 where the scorer fails on it).

OUT/finetune/<hash>/ holds report.md, figure.png, metrics.jsonl, curves.npz and config.json; with grpo also held_out.jsonl:
of every held-out prompt the most probable completion and a drawn one, before and after, and their rewards.""")
OF_GRPO = ("--group", "--new", "--temperature")


def finetune_command(words: Sequence[str]) -> int:
    values, rest = split(["--help" if word == "-h" else word for word in words], OPTIONS)
    if values.pop("--help"):
        print(help_text(USAGE, WHAT, OPTIONS))
        return 0
    no_more(rest, OPTIONS)
    for name, other in (("--checkpoint", "--checkpoint"), ("--data", "--tasks")):
        if values[name] is None and values[other] is None:
            raise UserError(f"{name} is missing: {USAGE} is expected")
    for name in OF_GRPO:
        if values["--method"] != "grpo" and values[name] != OPTIONS[name].default:
            raise UserError(f"{name} {values[name]}: expected with --method grpo only")
    if values["--full"] and values["--lora-rank"] != OPTIONS["--lora-rank"].default:
        raise UserError(f"--lora-rank {values['--lora-rank']}: expected without --full")
    out, save, resume = (values.pop(name) for name in ("--out", "--save", "--resume"))
    if values.pop("--full"):
        values["--lora-rank"] = None
    from jaxpt.cli.run import progress
    from jaxpt.lab.finetune import Settings, run

    try:
        settings = Settings(**{name.lstrip("-").replace("-", "_"): value for name, value in values.items()})
    except ValueError as error:
        raise UserError(str(error)) from None
    verifier = None if settings.verifier is None else _verifier(settings.verifier)
    keep_programs()
    with progress() as on_progress:
        result = run(settings, verifier, out=out, save=save, resume=resume, on_progress=on_progress)
    for name, value in result.before.items():
        print(f"held-out {name} {value:.4g} before, {result.after[name]:.4g} after")
    print(f"model {result.model}\nreport {result.report}\nfigure {result.figure}", flush=True)
    return 0


def _verifier(name: str) -> Any:
    from jaxpt.verify.target import TargetError, load

    sys.path[:0] = [] if os.getcwd() in sys.path else [os.getcwd()]
    try:
        return load(name)
    except TargetError as error:
        raise UserError(str(error).replace(f"target {name!r}", f"--verifier {name}", 1)) from None
