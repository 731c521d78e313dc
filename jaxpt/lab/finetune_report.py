"""What a fine-tuning run shows: curves, answers, figure.png, report.md."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpt.lab.experiment import Panel
from jaxpt.lab.markdown import table
from jaxpt.lab.prompts import Text
from jaxpt.lab.report import number
from jaxpt.lab.store import Chunk

SHOWN = {  # method -> metric -> what it is
    "sft": {"loss": "negative log-likelihood of a response's token, in nats"},
    "dpo": {
        "loss": "objective",
        "accuracy": "share of pairs whose chosen response has the higher reward: of none, where policy and reference are one",
    },
    "grpo": {"reward": "mean reward of drawn completions", "greedy": "mean reward of the most probable completion"},
}


def curves_of(chunks: Mapping[tuple[str, int], Sequence[Chunk]], seed: int, stage: str) -> dict[str, np.ndarray]:
    """"stage/metric" [1, steps] with stage/step beside them; "held_out/metric" [1, 2], before and after."""
    rows, (before,), (after,) = chunks[stage, seed], chunks["before", seed], chunks["after", seed]
    found = {f"{stage}/{name}": np.concatenate([c.metrics[name] for c in rows])[None] for name in rows[0].metrics}
    steps = next(iter(found.values())).shape[1]
    found[f"{stage}/step"] = np.arange(1.0, steps + 1)[None]
    found |= {f"held_out/{name}": np.array([[before.metrics[name][0], after.metrics[name][0]]]) for name in before.metrics}
    return found | {"held_out/step": np.array([[0.0, steps]]), "seeds": np.array([seed])}


def answers(held: Sequence[Text], before: Chunk, after: Chunk) -> str:
    """held_out.jsonl: of each held-out prompt the most probable completion and a drawn one, before and after, and rewards."""
    lines = [{"line": text.line, "prompt": text.row["prompt"]} for text in held]
    for stage, chunk in (("before", before), ("after", after)):
        said = iter(json.loads(chunk.state[0]["data"].tobytes()))
        for line, *both in zip(lines, said, said, strict=True):
            line[stage] = {how: {"completion": text, "reward": reward} for how, (text, reward) in zip(("greedy", "drawn"), both)}
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def picture(method: str, curves: Mapping[str, np.ndarray], stage: str, footer: str) -> bytes:
    """figure.png: each metric over the steps of training, and of held-out rows before and after it."""
    from jaxpt.lab.figure import figure  # matplotlib takes a second to import

    panels = []
    for name, words in SHOWN[method].items():
        places = {"training": stage, "held out": "held_out"}
        measured = {label: at for label, at in places.items() if f"{at}/{name}" in curves}
        series, steps = ({label: f"{at}/{what}" for label, at in measured.items()} for what in (name, "step"))
        if not measured:
            continue
        panels.append(Panel(name, series, ylabel=words.partition(":")[0].partition(",")[0], x=steps))
    return figure(panels, curves, f"fine-tuning by {method}", footer)


def report(method: str, objective: str, record: Mapping[str, Any], curves: Mapping[str, np.ndarray],
           before: Mapping[str, float], after: Mapping[str, float], place: Path, seconds: float) -> str:
    rows = []
    for name, words in SHOWN[method].items():
        cells = [before.get(name), after.get(name), None, None]
        if f"finetune/{name}" in curves:
            curve = curves[f"finetune/{name}"][0]
            tenth = max(1, curve.size // 10)
            cells[2:] = float(np.mean(curve[:tenth])), float(np.mean(curve[-tenth:]))
        rows.append([name, *(number(x) for x in cells), words])
    facts = {
        "model": str(place), "objective": objective, "rows": ", ".join(f"{k} {v}" for k, v in record["rows"].items()),
        "bad rows left out": "; ".join(f"line {k} {v}" for k, v in list(record["bad"].items())[:20]) or "none",
        "answers cut at --length": str(record["cut"]), "compute": f"{seconds:.0f} s", "git": record["git"] or "no revision",
        "versions": ", ".join(f"{k} {v}" for k, v in record["versions"].items()),
    }
    header = ["metric", "held out before", "held out after", "training, first tenth", "training, last tenth", "what it is"]
    return "\n\n".join([
        "# finetune", f"    {record['runs'][-1]['command']}", table(header, rows), "![curves](figure.png)", "## Run",
        "\n".join(f"- {k}: {v}" for k, v in facts.items()), "```json\n" + json.dumps(record["config"], indent=1) + "\n```",
    ]) + "\n"
