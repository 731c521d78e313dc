"""Hugging Face folders: config.json, weights as safetensors in one file or several, and what goes with them.

A folder is read by its config.json alone; code that it brings is not run, and pickled weights are not opened. It is written
under another name beside its place and renamed when it is whole. Layouts: jaxpt.models.layouts.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.lab import safetensors
from jaxpt.lab.errors import UserError
from jaxpt.lab.store import TEMPORARY
from jaxpt.models import ModelConfig
from jaxpt.models.layouts import agree, config_of, json_of, layout_of
from jaxpt.models.tensors import FLOATS, params_of, tensors_of
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
    dtypes: Mapping[str, str]  # of the tensors on disk


def read_config(path: str | Path) -> tuple[dict[str, Any], ModelConfig]:
    """A folder's config.json and the model that it describes; its weights are not looked at. UserError as `read`."""
    folder = Path(path).expanduser()
    config = _json(folder, "config.json")
    try:
        return config, config_of(config)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None


def read(path: str | Path) -> Checkpoint:
    """The model in a folder. UserError, in one sentence, where it is not whole or not of a known layout."""
    folder = Path(path).expanduser()
    config, cfg = read_config(folder)
    tensors = _tensors(folder)
    try:
        params = params_of(cfg, layout_of(config), tensors)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    dtypes = {name: str(tensor.dtype) for name, tensor in tensors.items()}
    return Checkpoint(folder, config, cfg, jax.tree.map(jnp.asarray, params), dtypes)


def write(path: str | Path, cfg: ModelConfig, params: Params, *, like: Checkpoint | None = None, dtype: str | None = None,
          context: int = 2048, shard: int = SHARD) -> None:
    """A new folder that transformers loads; adapters are merged.

    like: a folder that was read; its config.json, its dtypes (unless one is given) and its tokenizer are kept. Without it
    config.json is made of `cfg`, for rows of at most `context` tokens, and weights are float32 unless said otherwise.
    shard: bytes that a file of weights has at most, unless a single tensor is larger.
    UserError where the place is taken, cannot be written, or no layout holds the model.
    """
    try:
        config = json_of(cfg, context) if like is None else like.config
        agree(cfg, config)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if dtype not in (None, *FLOATS):
        raise UserError(f"{path}: dtype {dtype!r}: expected {' or '.join(FLOATS)}.")
    if like is None or dtype is not None:
        name = "dtype" if "dtype" in config else "torch_dtype"
        config = config | {name: dtype or "float32"}
    tensors = tensors_of(cfg, layout_of(config), params)
    dtypes = like.dtypes if like is not None and dtype is None else dict.fromkeys(tensors, dtype or "float32")
    copied = () if like is None else [file for name in COMPANIONS if (file := like.folder / name).is_file()]
    write_folder(path, {"config.json": config}, tensors, dtypes, copied, shard)


def write_folder(path: str | Path, files: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str],
                 copied: Sequence[Path] = (), shard: int = SHARD) -> None:
    """JSON files by name, weights as dtypes by name, and copies of files: all of it or, with a UserError, nothing."""
    folder = Path(path).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: expected the name of a new folder.")
    aside = folder.with_name(f"{TEMPORARY}{os.getpid()}-{folder.name}")
    try:
        aside.mkdir(parents=True)
        for file in copied:
            shutil.copyfile(file, aside / file.name)
        for name, value in files.items():
            (aside / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _write_weights(aside, tensors, dtypes, shard)
        os.replace(aside, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; nothing is left of it.") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_weights(folder: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str], shard: int) -> None:
    sizes = {name: tensor.size * np.dtype(dtypes[name]).itemsize for name, tensor in tensors.items()}
    shards: list[dict[str, np.ndarray]] = [{}]
    room = shard
    for name, tensor in tensors.items():
        if shards[-1] and sizes[name] > room:
            shards.append({})
            room = shard
        shards[-1][name] = tensor
        room -= sizes[name]
    if len(shards) == 1:
        return safetensors.write(folder / WEIGHTS, tensors, dtypes)
    places = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors.write(folder / file, part, dtypes)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
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
