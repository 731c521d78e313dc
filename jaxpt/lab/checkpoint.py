"""Hugging Face folders: config.json, weights as safetensors in one file or several, and what goes with them.

A folder is read by its config.json alone; code that it brings is not run, and pickled weights are not opened. It is written
under another name beside its place and renamed when it is whole. Layouts: jaxpt.models.layouts.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.lab import safetensors
from jaxpt.lab.errors import UserError
from jaxpt.lab.store import TEMPORARY
from jaxpt.models import ModelConfig
from jaxpt.models.layouts import FLOATS, agree, config_of, json_of, layout_of, params_of, tensors_of
from jaxpt.types import Params

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
COMPANIONS = (  # what is copied when a folder is written like another: the tokenizer, and how to generate
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "generation_config.json",
)
SHARD = 5_000_000_000  # bytes of a file of weights


class Checkpoint(NamedTuple):
    folder: Path
    config: dict[str, Any]  # config.json as it stands there
    cfg: ModelConfig
    params: Params  # float32
    dtype: str  # of the first tensor on disk


def read(path: str | Path) -> Checkpoint:
    """The model in a folder. UserError, in one sentence, where it is not whole or not of a known layout."""
    folder = Path(path).expanduser()
    config = _json(folder, "config.json")
    try:
        kind, cfg = layout_of(config), config_of(config)
        tensors = _tensors(folder)
        params = params_of(cfg, kind, tensors)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    dtype = str(next(iter(tensors.values())).dtype)
    return Checkpoint(folder, config, cfg, jax.tree.map(jnp.asarray, params), dtype)


def write(path: str | Path, cfg: ModelConfig, params: Params, *, like: Checkpoint | None = None, dtype: str | None = None,
          context: int = 2048, shard: int = SHARD) -> None:
    """A new folder that transformers loads; adapters are merged.

    like: a folder that was read; its config.json, its dtype (unless another is given) and its tokenizer are kept. Without
    it config.json is made of `cfg`, for rows of at most `context` tokens, and weights are float32.
    shard: bytes that a file of weights has at most, unless a single tensor is larger.
    UserError where the place is taken, cannot be written, or no layout holds the model.
    """
    try:
        config = json_of(cfg, context) if like is None else like.config
        agree(cfg, config)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    dtype = dtype or ("float32" if like is None else like.dtype)
    if dtype not in FLOATS:
        raise UserError(f"{path}: dtype {dtype!r}: expected {' or '.join(FLOATS)}.")
    named = {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"torch_dtype": dtype}
    tensors = tensors_of(cfg, layout_of(config), params)
    files: dict[str, Any] = {"config.json": config | named}
    copied = () if like is None else [file for name in COMPANIONS if (file := like.folder / name).is_file()]
    write_folder(path, files, tensors, dtype, copied, shard)


def write_folder(path: str | Path, files: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: str,
                 copied: tuple[Path, ...] | list[Path] = (), shard: int = SHARD) -> None:
    """JSON files by name, weights, and copies of files: all of it or, with a UserError, nothing."""
    folder = Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: expected the name of a new folder.")
    aside = folder.with_name(f"{TEMPORARY}{os.getpid()}-{folder.name}")
    try:
        aside.mkdir(parents=True)
        for file in copied:
            shutil.copyfile(file, aside / file.name)
        for name, value in files.items():
            (aside / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _write_weights(aside, tensors, dtype, shard)
        os.replace(aside, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; nothing is left of it.") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_weights(folder: Path, tensors: Mapping[str, np.ndarray], dtype: str, shard: int) -> None:
    width = np.dtype(safetensors.TYPES[safetensors.NAMES[dtype]]).itemsize
    shards: list[dict[str, np.ndarray]] = [{}]
    room = shard
    for name, tensor in tensors.items():
        if shards[-1] and tensor.size * width > room:
            shards.append({})
            room = shard
        shards[-1][name] = tensor
        room -= tensor.size * width
    if len(shards) == 1:
        return safetensors.write(folder / WEIGHTS, tensors, dtype)
    places = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors.write(folder / file, part, dtype)
        places |= dict.fromkeys(part, file)
    size = sum(tensor.size for tensor in tensors.values()) * width
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder / name}: {error.strerror}; expected the folder of a model, with config.json and "
                        f"{WEIGHTS}.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{folder / name} is no JSON.") from None
    if type(found) is not dict:
        raise UserError(f"{folder / name} is no JSON object.")
    return found


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if (folder / WEIGHTS).is_file():
        return safetensors.read(folder / WEIGHTS)
    pickled = sorted(file.name for file in folder.iterdir() if file.name.endswith(PICKLES))
    if pickled:
        raise UserError(f"{folder / pickled[0]} is a pickle, which is never opened: expected {WEIGHTS}; "
                        "`save_pretrained` of a current transformers writes that.")
    raise UserError(f"{folder} has no weights: expected {WEIGHTS} or {INDEX}.")


def _sharded(folder: Path) -> dict[str, np.ndarray]:
    places = _json(folder, INDEX).get("weight_map")
    if type(places) is not dict or not places or not all(type(file) is str for file in places.values()):
        raise UserError(f"{folder / INDEX}: expected a weight_map from tensors to files.")
    found: dict[str, np.ndarray] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{folder / INDEX} names the file {file!r}: expected safetensors files in the same folder.")
        for name, tensor in safetensors.read(folder / file).items():
            if places.get(name) != file:
                raise UserError(f"{folder / INDEX} puts tensor {name} into {places.get(name)!r}, but it is in {file!r}.")
            found[name] = tensor
    if lost := sorted(places.keys() - found.keys()):
        raise UserError(f"{folder / INDEX} puts tensor {lost[0]} into {places[lost[0]]!r}, but it is not there.")
    return found
