"""Reference files: safetensors, with one JSON text that says what the tensors are. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Reference = TypeVar("Reference")

# One key, so that equal references are equal files: safetensors does not promise an order of several.
KEY = "st_cached_extras.nystrom_reference"
VERSION = 1
TENSORS = ("landmarks", "center", "alpha")
NUMBER = (int, float)
FIELDS: dict[str, Callable[[Any], bool]] = {
    "sigma": lambda value: _is_list_of(value, NUMBER),
    "k_rr": lambda value: _is_list_of(value, NUMBER),
    "kernel": lambda value: isinstance(value, str),
    "scales": lambda value: _is_list_of(value, NUMBER),
    "layout": lambda value: isinstance(value, str),
    "name": lambda value: isinstance(value, str),
    "sample_shape": lambda value: value is None or _is_list_of(value, (int,)),
    "condition_size": lambda value: type(value) is int,
    "condition_weight": lambda value: _is_list_of([value], NUMBER),
    "identity": lambda value: isinstance(value, dict) and _is_list_of(list(value.values()), (str,)),
}


class ReferenceFileError(ValueError):
    """A file that is no whole reference of this version; the message says why, and what to do."""


def write(path: str | PathLike[str], tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Write tensors and fields to one file, whole or not at all."""
    path = Path(path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"version": VERSION, "checksum": _checksum(tensors), **fields}
    unfinished = path.with_name(f"{path.name}.unfinished")
    save_file(tensors, unfinished, metadata={KEY: json.dumps(header, sort_keys=True)})
    os.replace(unfinished, path)


def read(path: str | PathLike[str], make: Callable[[dict[str, Tensor], dict[str, Any]], Reference]) -> Reference:
    """Read one file and hand tensors and fields to ``make``, whose ValueErrors become the file's."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such reference file. Make one with NystromReference.fit.")
    try:
        tensors, text = _open(path)
        fields = _parse(text)
        _check_tensors(tensors, fields.pop("checksum"))
        return make(tensors, fields)
    except (ValueError, TypeError, SafetensorError, OSError) as error:
        cause = f"not a whole safetensors file ({error})" if isinstance(error, SafetensorError) else error
        raise ReferenceFileError(
            f"{path} is not a reference that can be loaded: {cause}. Fetch it again, or make a new one with "
            "NystromReference.fit."
        ) from error


def _open(path: Path) -> tuple[dict[str, Tensor], str]:
    with safe_open(path, framework="pt", device="cpu") as file:
        metadata = file.metadata() or {}
        if KEY not in metadata:
            raise ValueError(f"a safetensors file without {KEY!r} in its metadata, so something else was saved in it")
        return {name: file.get_tensor(name) for name in file.keys()}, metadata[KEY]  # noqa: SIM118


def _parse(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"its description is not JSON ({error})") from error
    if not isinstance(fields, dict) or "version" not in fields:
        raise ValueError("its description has no version")
    if (version := fields.pop("version")) != VERSION:
        raise ValueError(f"it has version {version!r}, and this release reads version {VERSION}")
    expected = {*FIELDS, "checksum"}
    if fields.keys() != expected:
        missing, unknown = sorted(expected - fields.keys()), sorted(fields.keys() - expected)
        raise ValueError(f"its description misses {missing or 'nothing'} and has unknown {unknown or 'nothing'}")
    for name, fits in FIELDS.items():
        if not fits(fields[name]):
            raise ValueError(f"its {name} is {fields[name]!r}, which is of the wrong type")
    return fields


def _check_tensors(tensors: Mapping[str, Tensor], checksum: Any) -> None:
    if tensors.keys() != set(TENSORS):
        raise ValueError(f"it holds the tensors {sorted(tensors)}, expected {sorted(TENSORS)}")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"its {name} are {tensor.dtype}, expected torch.float32")
    if _checksum(tensors) != checksum:
        raise ValueError("its tensors do not have the checksum that was written with them: it is damaged")


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_list_of(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(isinstance(x, types) and not isinstance(x, bool) for x in value)
