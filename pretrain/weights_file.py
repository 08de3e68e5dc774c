"""The formats weights come in (torch, `.pkl` of arrays, `.safetensors`), read without running code of theirs."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import checkpoint
from .common.errors import UserError, nearest


def read_file(path: str | Path, unsafe_pickle: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of a `.safetensors`, `.pkl` or torch file, and its metadata (safetensors only).

    Raises:
        UserError: missing, damaged, or holding more than tensors, arrays and plain types.
    """
    path = Path(path)
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise UserError(f"no weights file at {path}{nearest(path.name, siblings)}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix != ".pkl":
        return checkpoint.read(path, unsafe_pickle), {}
    try:
        data = path.read_bytes()
        content = pickle.loads(data, encoding="latin1") if unsafe_pickle else _PlainUnpickler(io.BytesIO(data)).load()
    except _NotPlain as error:
        raise UserError(
            f"{path} holds {error}, more than arrays; if you trust its source, add --unsafe-pickle"
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(f"{path} is damaged or not a pickle: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dictionary of arrays")
    return content, {}


def state_tensors(content: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    """The name -> tensor part of a file's content: under ``state_dict`` or ``model``, or the content itself.

    Raises:
        UserError: something in it is not a tensor or an array.
    """
    state: Any = next(
        (content[key] for key in ("state_dict", "model") if isinstance(content.get(key), Mapping)), content
    )
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.array(value))  # a copy: torch wants it writable
        if not isinstance(value, Tensor):
            raise UserError(
                f"{path}: {name} is a {type(value).__name__}, not a tensor; this is no checkpoint of weights"
            )
        tensors[str(name)] = value
    return tensors


def sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """16 hexadecimal digits that change with any value, shape or type of ``tensor``."""
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error


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
