"""Safetensors files: eight bytes of length, a JSON header, raw numbers. Reading one runs nothing.

The format's own library gives NumPy no bfloat16, which most published weights are, so its few rules stand here: names are
unique, every tensor has as many bytes as its shape and type say, and together they fill the file without gaps or overlaps
(huggingface/safetensors, README, "Format"). What breaks one is refused before a tensor is looked at.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from jaxpt.lab.errors import UserError

TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64,
    "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}
NAMES = {np.dtype(kind).name: name for name, kind in TYPES.items()}
LONGEST_HEADER = 100_000_000  # bytes; the library's limit


def read(path: Path) -> dict[str, np.ndarray]:
    """A file's tensors by name, mapped into memory and read when they are looked at. UserError where it breaks a rule."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start, header = _header(file, size)
        data = np.memmap(path, np.uint8, "r", start) if size > start else np.empty(0, np.uint8)
        return {name: data[begin:end].view(kind).reshape(shape) for name, (kind, shape, begin, end) in header.items()}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def write(path: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    """Writes the tensors one after the other, rounded to a dtype of NAMES each. After an OSError the file may be half-written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.size * np.dtype(dtypes[name]).itemsize
        header[name] = {"dtype": NAMES[dtypes[name]], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            file.write(np.ascontiguousarray(tensor, dtypes[name]).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _header(file: BinaryIO, size: int) -> tuple[int, dict[str, tuple]]:
    """(where the data begin, name -> (type, shape, begin, end)). ValueError where a rule is broken."""
    first = file.read(8)
    if first[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
        raise ValueError("this is a pickle, which is never opened: expected a safetensors file.")
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, LONGEST_HEADER):
        raise ValueError(f"its header claims {length} bytes, the file has {size}: expected a whole safetensors file.")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header cannot be read ({error}): expected JSON that names each tensor once.") from None
    if type(header) is not dict:
        raise ValueError("its header is no JSON object.")
    header.pop("__metadata__", None)
    found = {name: _entry(name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, begin, until) in sorted(found.items(), key=lambda item: item[1][2:]):
        if begin != end:
            raise ValueError(f"tensor {name} begins at byte {begin}, expected {end}: tensors must not overlap or leave gaps.")
        end = until
    if end != size - 8 - length:
        raise ValueError(f"its tensors take {end} bytes, the file has {size - 8 - length}: it is cut off or too long.")
    return 8 + length, found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def _entry(name: str, entry: Any) -> tuple[np.dtype, list[int], int, int]:
    def whole(x: Any) -> bool:
        return type(x) is list and len(x) <= 32 and all(type(n) is int and n >= 0 for n in x)

    shape, at = (entry.get("shape"), entry.get("data_offsets")) if type(entry) is dict else (None, None)
    if not whole(shape) or not whole(at):
        raise ValueError(f"tensor {name} has {entry!r:.100}: expected a dtype, a shape and data_offsets.")
    if type(entry.get("dtype")) is not str or entry["dtype"] not in TYPES:
        raise ValueError(f"tensor {name} has dtype {entry.get('dtype')!r:.100}: expected one of {', '.join(TYPES)}.")
    kind = np.dtype(TYPES[entry["dtype"]])
    if len(at) != 2 or at[1] - at[0] != math.prod(shape) * kind.itemsize:
        where = f"of {entry['dtype']} {shape!r:.100} lies at bytes {at!r:.100}"
        raise ValueError(f"tensor {name} {where}: its size is another.")
    return kind, shape, *at
