"""Reads what ``torch.save`` wrote, as a zip or in the format before torch 1.6, without trusting it.

``torch.load(weights_only=True)`` runs no code, but a made file can overflow its stack, fill the memory from a few
compressed bytes, or have uninitialized memory taken for weights. Here each tensor is a view of bytes that the file has.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from . import plain_pickle

_MAGIC, _VERSION = bytes.fromhex("6cfc9c46f9206aa85019"), 1001  # of the format before torch 1.6
_MOST_REPEATED = 2**28  # bytes of expanded tensors beyond those that the file has
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip

_DTYPES = re.compile(r"u?int(8|16|32|64)|float(16|32|64|8_e\w+)|bfloat16|complex(64|128)|bool")  # none without values
_TENSOR_TYPES = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"))
_Storage = Callable[[str, torch.dtype, int], Tensor]


def load(path: Path, with_tensors: bool = True) -> Any:
    """The content of a torch file, with its tensors on the CPU.

    Args:
        with_tensors: False reads only the rest, and puts None in place of each tensor.

    Raises:
        pickle.UnpicklingError: it holds another class or function (the message names it) than dense tensors, NumPy's
            arrays, plain types and containers, and ``argparse.Namespace``.
        OSError: it cannot be read.
        MemoryError: there is too little memory.
        Exception: of any other type: it is damaged, or no torch file.
    """
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\3\4"
        file.seek(0)
        return _load_zip(file, with_tensors) if is_zip else _load_old(file, with_tensors)


def _load_zip(file: IO[bytes], with_tensors: bool) -> Any:
    with zipfile.ZipFile(file) as archive:
        root = archive.namelist()[0].split("/")[0]
        left = file.seek(0, io.SEEK_END)

        def read(name: str) -> bytes:  # verifies the checksum, which torch does not
            nonlocal left
            part = archive.getinfo(f"{root}/{name}")
            left -= part.file_size
            if part.compress_type != zipfile.ZIP_STORED or left < 0:
                raise ValueError(f"{name} is compressed, or longer than the file")
            return archive.read(part)

        def storage(key: str, dtype: torch.dtype, length: int) -> Tensor:
            data = bytearray(read(f"data/{key}"))
            if len(data) != length * dtype.itemsize:
                raise ValueError(f"data/{key} has {len(data)} bytes, not {length} x {dtype.itemsize}")
            return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)

        if f"{root}/byteorder" in archive.namelist() and read("byteorder") != sys.byteorder.encode():
            raise ValueError("it was written by a machine of another byte order")
        content = read("data.pkl")
        return _Unpickler(io.BytesIO(content), len(content), storage, with_tensors).load()


def _load_old(file: IO[bytes], with_tensors: bool) -> Any:
    content = file.read()
    stream = io.BytesIO(content)
    left = len(content)
    storages: dict[str, Tensor] = {}

    def storage(key: str, dtype: torch.dtype, length: int) -> Tensor:
        """Its values follow when all is unpickled."""
        nonlocal left
        left -= length * dtype.itemsize
        if left < 0:
            raise ValueError("its tensors are longer than the file")
        storages[key] = torch.empty(length, dtype=dtype)
        return storages[key]

    def unpickled() -> Any:
        return plain_pickle.Unpickler(stream, len(content), "utf-8").load()

    if _MAGIC not in content[:32] or (unpickled(), unpickled()) != (int.from_bytes(_MAGIC, "little"), _VERSION):
        raise ValueError("it does not begin as torch's files do")
    unpickled()  # about the machine that wrote it
    found = _Unpickler(stream, len(content), storage, with_tensors).load()
    if not with_tensors:
        return found
    keys = unpickled()
    if sorted(keys) != sorted(storages):
        raise ValueError("it lists other tensors than it holds")
    for key in keys:
        values = storages[key].view(torch.uint8).numpy()
        (length,) = struct.unpack("<q", stream.read(8))
        if length != len(storages[key]) or stream.readinto(values.data) != len(values):
            raise ValueError("it ends in the middle of a tensor")
    return found


class _Unpickler(plain_pickle.Unpickler):
    """Takes a flat tensor for each storage, and makes its tensors as views of them.

    Args:
        storage: the values of a storage, given its key, type and number of elements.
    """

    def __init__(self, file: IO[bytes], size: int, storage: _Storage, with_tensors: bool) -> None:
        super().__init__(file, size, "utf-8")
        self._storage, self._with_tensors = storage, with_tensors
        self._storages: dict[str, Tensor] = {}
        self._repeated = 0
        self._allowed |= {
            ("collections", "Counter"): _counter,
            ("__builtin__", "set"): _set,
            ("builtins", "set"): _set,
            ("torch", "Size"): torch.Size,
            ("torch", "device"): torch.device,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_of_type,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, *_: tensor,
            ("torch._tensor", "_rebuild_from_type_v2"): lambda rebuild, _type, arguments, _state: rebuild(*arguments),
        }
        self._allowed |= dict.fromkeys(_TENSOR_TYPES)
        self._allowed |= {("torch", name): dtype for name, dtype in _STORAGES.items()}
        self._allowed |= {("torch.storage", "UntypedStorage"): torch.uint8}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and _DTYPES.fullmatch(name) and hasattr(torch, name):
            return getattr(torch, name)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Tensor | None:
        what, dtype, key, _device, length, *view = pid
        if what != "storage" or type(key) is not str or type(length) is not int or not isinstance(dtype, torch.dtype):
            raise ValueError("it names a tensor's values in no known way")
        if not self._with_tensors:
            return None
        if key not in self._storages:
            self._storages[key] = self._storage(key, dtype, length)
        found = self._storages[key]
        if not length:  # torch may write several types for one that is empty
            return torch.empty(0, dtype=dtype)
        if found.dtype != dtype:
            raise ValueError(f"it names the values of {key} as {found.dtype} and {dtype}")
        if view and view[0] is not None:  # part of a storage, in the format before torch 1.6
            _, offset, length = view[0]
            return found[offset : offset + length]
        return found

    def _tensor(self, storage: Tensor | None, offset: int, size: Any, stride: Any, *rest: Any) -> Tensor | None:
        if storage is None:
            return None
        if len(rest) > 2 and rest[2]:  # after requires_grad and hooks: it is to be conjugated or negated
            raise pickle.UnpicklingError("Unsupported class of lazily conjugated tensors")
        if any(type(length) is not int or length < 0 for length in size) or math.prod(map(_at_least_1, size)) >= 2**60:
            raise ValueError("a tensor has an impossible shape")
        self._repeated += max(0, math.prod(size) - storage.numel()) * storage.itemsize
        if self._repeated > _MOST_REPEATED:
            raise ValueError("its tensors repeat their values; save them again with .clone()")
        return storage.as_strided(size, stride, storage.storage_offset() + offset)

    def _tensor_of_type(
        self, storage: Tensor | None, offset: int, size: Any, stride: Any, grad: bool, hooks: Any, dtype: Any,
        metadata: Any = None,
    ) -> Tensor | None:  # fmt: skip
        return self._tensor(
            None if storage is None else storage.view(dtype), offset, size, stride, grad, hooks, metadata
        )


def _at_least_1(length: int) -> int:
    return max(length, 1)


def _counter(counts: Any) -> collections.Counter[Any]:
    return collections.Counter(counts if type(counts) is dict else {})


def _set(items: Any = ()) -> set[Any]:
    plain_pickle.check_keys(items := list(items))
    return set(items)
