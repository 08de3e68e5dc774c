"""The formats weights come in (torch, `.pkl` of arrays, `.safetensors`), read without running code of theirs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import checkpoint
from .errors import UserError, one_line
from .files import empty_or_text, existing_file
from .run_folder import read_json

_PREFIX = "backbone.bottom_up."  # in digests' names; a `.pkl` leaves it out
_AGAIN = "convert again from the original checkpoint"


def read_file(path: str | Path, unsafe_pickle: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of a `.safetensors`, `.pkl` or torch file, and its metadata (safetensors only).

    Raises:
        UserError: missing, unreadable, damaged, or holding more than tensors, arrays and plain types.
    """
    if os.path.isdir(path):
        held = sorted(p.name for p in Path(path).iterdir() if p.suffix in (".pth", ".pkl", ".safetensors"))
        raise UserError(f"{path} is a folder; name a weights file in it ({', '.join(held[:5]) or 'there is none'})")
    path = existing_file(path, "weights file")
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        return (_read_pickle if path.suffix == ".pkl" else checkpoint.read)(path, unsafe_pickle), {}
    except MemoryError as error:
        raise UserError(f"there is not enough memory to read {path}: {one_line(error)}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; try again, or copy the file anew") from error


def state_tensors(content: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """The name -> tensor part of a file's content: under ``state_dict`` or ``model``, or the content itself.

    Raises:
        UserError: something in it is not a tensor or an array, or a tensor without a value in every place.
    """
    state: Any = next(
        (content[key] for key in ("state_dict", "model") if isinstance(content.get(key), Mapping)), content
    )
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            try:  # a copy: torch wants it writable, in this machine's byte order
                value = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
            except TypeError as error:
                raise UserError(f"{path}: {name} is an array of {value.dtype}, which no tensor can hold") from error
        if not isinstance(value, Tensor):
            raise UserError(
                f"{path}: {name} is a {type(value).__name__}, not a tensor; this is no checkpoint of weights"
            )
        if value.layout != torch.strided or value.is_meta:
            kind = "without values (meta)" if value.is_meta else f"of layout {value.layout}"
            raise UserError(f"{path}: {name} is a tensor {kind}; save it again as a dense tensor, with its values")
        tensors[str(name)] = value
    return tensors


def sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """16 hexadecimal digits that change with any value, shape or type of ``tensor``."""
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # NumPy has no bfloat16
    return hashlib.sha256(head + values.numpy().tobytes()).hexdigest()[:16]


def read_provenance(content: Mapping[str, Any], metadata: Mapping[str, str], path: str | Path) -> dict[str, Any]:
    """What a conversion wrote about where the file came from, into the file or beside it; {} where nothing stands.

    A plain state dict, as torchvision's files are, has no place for it inside; then it is in FILE.json.

    Raises:
        UserError: it is not an object of plain values, as a conversion writes it.
    """
    try:
        found: Any = content.get("provenance") or json.loads(metadata.get("provenance") or "{}") or _beside(path)
        json.dumps(found)  # it goes into results.json
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: its provenance is damaged ({one_line(error)}); {_AGAIN}") from error
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise UserError(f"{path}: its provenance is a {type(found).__name__}, not an object with names; {_AGAIN}")
    if not isinstance(found.get("tensors", {}), Mapping):
        raise UserError(f"{path}: the digests in its provenance are a {type(found['tensors']).__name__}; {_AGAIN}")
    return dict(found)


def check_digests(tensors: Mapping[str, Tensor], provenance: Mapping[str, Any], path: str | Path) -> None:
    """Compares a converted file's tensors with the digests of its conversion.

    A square tensor that was transposed has its shape still, and a changed value is a value: only the digest tells.

    Raises:
        UserError: a tensor is missing or not what was converted.
    """
    for name, value in provenance.get("tensors", {}).items():
        tensor = tensors.get(name, tensors.get(name.removeprefix(_PREFIX)))
        if tensor is None:
            raise UserError(f"{path} lacks {name}, which it held when it was converted; {_AGAIN}")
        if tensor_digest(tensor) != value:
            raise UserError(f"{path}: {name} is not what was converted (damaged or transposed); {_AGAIN}")


def _beside(path: str | Path) -> dict[str, Any]:
    """The provenance in FILE.json, if a conversion wrote that."""
    try:
        found = read_json(f"{path}.json")
    except UserError:
        return {}
    return {key: value for key, value in found.items() if key != "file_sha256"} if "file_sha256" in found else {}


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (MemoryError, OSError):
        raise
    except Exception as error:  # its own, or torch's for a type that it does not know
        reason = empty_or_text(path) or one_line(error)
        raise UserError(f"{path} is damaged or not a safetensors file: {reason}") from error


def _read_pickle(path: Path, unsafe: bool) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        content = pickle.loads(data, encoding="latin1") if unsafe else _PlainUnpickler(io.BytesIO(data)).load()
    except MemoryError:
        raise
    except _NotPlain as error:
        raise UserError(f"{path} holds {error}, more than arrays; {checkpoint.unsafe_remedy(path)}") from error
    except Exception as error:  # a damaged pickle raises anything
        reason = empty_or_text(path) or one_line(error)
        raise UserError(f"{path} is damaged or not a pickle: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dictionary of arrays")
    return content


class _NotPlain(Exception):
    """A pickle asks for something else than arrays and plain types."""


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays and plain types, runs nothing else."""

    _ALLOWED = frozenset(
        {("collections", "OrderedDict"), ("_codecs", "encode"), ("numpy", "ndarray"), ("numpy", "dtype")}
        | {(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")}
        | {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
    )

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise _NotPlain(f"{module}.{name}")
        return super().find_class(module, name)
