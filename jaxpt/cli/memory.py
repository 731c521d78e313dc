"""`jaxpt memory`: bytes per device by part and FLOPs per step, before anything is allocated."""

import ast
import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxpt
from jaxpt.cli.fields import read_fields
from jaxpt.cli.options import Option, help_text, pairs, split, whole
from jaxpt.lab.errors import UserError, expected

AXES = ("data", "tensor", "expert", "sequence")
OPTIONS = {
    "--checkpoint": Option(str, None, "the model of this Hugging Face folder; fields change it"),
    "--mesh": Option(pairs(whole), (), "data=8,tensor=4: sizes of its axes data, tensor, expert, sequence (one device)"),
    "--batch": Option(whole, 32, "rows of an update: demonstrations, or episodes (32)"),
    "--length": Option(whole, 256, "tokens of a row (256)"),
    "--method": Option(str, "sft", "sft (the default), or an objective for policies, like grpo"),
    "--group": Option(whole, 8, "episodes of one prompt (8)"),
    "--micro": Option(whole, 0, "rows whose gradients are summed at a time (all)"),
    "--lora": Option(whole, None, "rank of adapters on a frozen base"),
    "--optimizer": Option(str, "adamw", "adamw (the default), muon or lion"),
    "--weights": Option(str, "float32", "float32 (the default), or bfloat16 beside float32 masters"),
    "--fast": Option(None, False, "estimate activations in place of compiling the step"),
    "--json": Option(None, False, "for machines"),
    "--help": Option(None, False, "this text"),
}
USAGE = "jaxpt memory [options] [--field value ...]"
WHAT = ("Prints what a training step takes on each device, by part. Fields are the model's: --vocab, --d-model, --n-layers,\n"
        "--moe.experts ... Activations are what XLA's CPU compiler plans for the step, compiled on shapes alone.")
VOCAB = 32_000  # where nothing is said
UNDONE = "note: XLA's CPU compiler undoes --remat of layers that are not scanned; add --scan for what accelerators need"
WORDS = {"cache": "key/value cache", "activations": "activations"}


def memory_command(words: Sequence[str]) -> int:
    values, fields = split(["--help" if word == "-h" else word for word in words], OPTIONS)
    if values["--help"]:
        print("\n".join([help_text(USAGE, WHAT, OPTIONS), "", "Fields of the model (jaxpt.models):", "", *_model_fields()]))
        return 0
    sizes = _sizes(values["--mesh"])
    _prepare_devices(math.prod(sizes.values()))
    from jaxpt.models import LoraConfig, ModelConfig, MoeConfig

    moe = MoeConfig() if any(word.startswith("--moe.") for word in fields) else None
    default = ModelConfig(vocab=VOCAB, moe=moe)
    if values["--checkpoint"] is not None:
        from jaxpt.lab.checkpoint import read_config

        default = read_config(values["--checkpoint"])[1]
    changed = read_fields(default, fields, OPTIONS)
    try:
        lora = None if values["--lora"] is None else LoraConfig(rank=values["--lora"])
        record = _record(ModelConfig(**{**vars(default), **changed, "lora": lora}), values, sizes)
    except ValueError as error:
        raise UserError(str(error)) from error
    print(json.dumps(record, indent=1) if values["--json"] else _table(record))
    return 0


def _model_fields() -> list[str]:
    """A line for every flag of a ModelConfig, read from its source: help imports no jax."""
    path = Path(jaxpt.__file__).parent / "models" / "config.py"
    text = path.read_text()
    lines, found = text.splitlines(), []
    for node in ast.parse(text).body:
        prefix = {"ModelConfig": "--", "MoeConfig": "--moe."}.get(getattr(node, "name", ""))
        for field in node.body if prefix else ():
            if isinstance(field, ast.AnnAssign) and field.target.id not in ("moe", "lora"):
                flag = prefix + field.target.id.replace("_", "-")
                default = VOCAB if field.value is None else ast.unparse(field.value)
                found.append(" ".join([f"  {flag:18}", *lines[field.lineno - 1].split("  # ")[1:], f"({default})"]))
    return found


def _sizes(mesh: Sequence[tuple[str, int]]) -> dict[str, int]:
    for name, size in mesh:
        if name not in AXES:
            raise UserError(f"--mesh {name}={size}: {expected(name, AXES)}")
        if size < 1:
            raise UserError(f"--mesh {name}={size}: a size of at least 1 is expected")
    return {**dict.fromkeys(AXES, 1), **dict(mesh)}


def _prepare_devices(count: int) -> None:
    """So many virtual CPU devices, where jax has not begun with others."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def _record(model: Any, values: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    from jaxpt.train import memory, parallel
    from jaxpt.train.optim import OptimConfig

    optim = OptimConfig(method=values["--optimizer"], weights=values["--weights"])
    numbers = {name: values[f"--{name}"] for name in ("method", "batch", "length", "group", "micro")}
    cfg = memory.StepConfig(model=model, optim=optim, **numbers)
    parts = memory.resident(cfg, sizes)
    shared = max(parts["gradients"], parts["cache"])  # a cache is gone before there are gradients
    if values["--fast"]:
        temporary = memory.estimate(cfg, sizes)
    else:
        temporary = memory.compiled(cfg, parallel.make_mesh(**sizes)).temp_size_in_bytes
    parts["activations"] = max(temporary - shared, 0)
    total = sum(parts.values()) - parts["gradients"] - parts["cache"] + shared
    flops = memory.step_flops(cfg)
    return {
        "mesh": sizes, "devices": math.prod(sizes.values()), **numbers, "parameters": memory.parameters(cfg),
        "bytes": parts, "total": total, "activations": "estimated" if values["--fast"] else "compiled",
        "flops": flops, "flops_per_device": flops / math.prod(sizes.values()),
        "note": UNDONE if model.remat and not model.scan and not values["--fast"] else "",
    }


def _table(record: dict[str, Any]) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in record["mesh"].items() if size > 1) or "one device"
    lines = [
        f"{record['parameters']:,} parameters, {record['method']}, {record['batch']} rows of {record['length']} tokens, {mesh}",
        "", f"{'part':18}{'bytes per device':>18}",
    ]
    for name, size in record["bytes"].items():
        note = {"activations": f"  {record['activations']}", "cache": "  while episodes are drawn, before gradients"}.get(name, "")
        lines.append(f"{WORDS.get(name, name):18}{size:18,}{note if size else ''}")
    lines += [f"{'total':18}{record['total']:18,}", "",
              f"{record['flops']:.4g} FLOPs of products per step, {record['flops_per_device']:.4g} on each device"]
    lines += [record["note"]] if record["note"] else []
    return "\n".join(lines)
