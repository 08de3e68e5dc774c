"""Unpickles arrays and plain types, and nothing that can run code or harm the process.

NumPy restores its arrays in C, and trusts what the pickle says about them: a damaged file can end the process with a
segmentation fault, and a made one may do more. Here each array is made anew from its checked parts.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

_TYPES = re.compile(r"[biufcSU]\d{1,9}")  # without objects ("O8"), records ("V8"), and times
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT")
_CORES = ("core", "_core")  # of NumPy 1 and 2


def load(content: bytes) -> Any:
    """The object that ``content`` holds; a NumPy scalar becomes Python's, and bytes of Python 2 become text (Latin-1).

    Raises:
        pickle.UnpicklingError: it holds another class or function (the message names it) than plain types,
            NumPy's arrays of numbers or text, ``OrderedDict`` and ``argparse.Namespace``.
        Exception: of any other type: ``content`` is damaged.
    """
    for operation, argument, _ in pickletools.genops(content):
        # Python makes room for every index below the largest, eight bytes each.
        if operation.name in _MEMO and int(argument or 0) > len(content):
            raise pickle.UnpicklingError(f"it counts {argument} objects in {len(content)} bytes")
    return _Unpickler(io.BytesIO(content), encoding="latin1").load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"Unsupported class {module}.{name}")
        return _ALLOWED[module, name]()


class _Type:
    """In place of ``numpy.dtype``."""

    dtype: np.dtype[Any]

    def __init__(self, name: str, align: bool = False, copy: bool = False) -> None:
        if not _TYPES.fullmatch(name):
            raise pickle.UnpicklingError(f"Unsupported class numpy.dtype({name!r})")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *parts = state
        if any(part is not None for part in parts[:3]):
            raise pickle.UnpicklingError("Unsupported class numpy.dtype of several parts")
        self.dtype = self.dtype.newbyteorder(order)


class _Array(np.ndarray[Any, Any]):
    """In place of ``numpy.ndarray``, because ``__setstate__`` has to change the object itself."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *_, shape, kind, fortran, data = state  # a version comes first, except in files of old
        data = _bytes(data)
        checked = np.frombuffer(data, _dtype(kind)).reshape(shape, order="F" if fortran else "C")
        restored: Any = (1, checked.shape, checked.dtype, bool(fortran), data)
        super().__setstate__(restored)

    def __setitem__(self, *_: Any) -> None:
        """A pickle may assign anything, also what names memory by its address (``__array_interface__``)."""
        raise pickle.UnpicklingError("it assigns to an item of an array")


def _dtype(kind: Any) -> np.dtype[Any]:
    if type(kind) is not _Type:
        raise pickle.UnpicklingError("Unsupported class in place of numpy.dtype")
    return kind.dtype


def _bytes(data: str | bytes | bytearray) -> bytes:
    return data.encode("latin1") if isinstance(data, str) else bytes(memoryview(data))


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"Unsupported class _codecs.encode to {encoding!r}")
    return text.encode("latin1")


def _scalar(kind: _Type, data: str | bytes) -> Any:
    (value,) = np.frombuffer(_bytes(data), _dtype(kind))
    return value.item()


def _from_buffer(data: bytes | bytearray, kind: _Type, shape: tuple[int, ...], order: str) -> _Array:
    array = _empty()
    array.__setstate__((shape, kind, order == "F", data))
    return array


def _empty(*_: Any) -> _Array:
    return np.ndarray.__new__(_Array, (0,))


# Each makes a class or function anew for every file, because a pickle can set attributes of what it is given.
_ALLOWED: dict[tuple[str, str], Callable[[], Any]] = {
    ("collections", "OrderedDict"): lambda: collections.OrderedDict,
    ("argparse", "Namespace"): lambda: type("Namespace", (), {}),
    ("__builtin__", "bytes"): lambda: lambda: b"",  # how protocols 0 to 2 write bytes without content
    ("_codecs", "encode"): lambda: lambda *args: _encode(*args),
    ("numpy", "ndarray"): lambda: None,  # an argument of _reconstruct
    ("numpy", "dtype"): lambda: lambda *args: _Type(*args),
}
for _core in _CORES:
    _ALLOWED |= {
        (f"numpy.{_core}.multiarray", "_reconstruct"): lambda: lambda *_: _empty(),
        (f"numpy.{_core}.multiarray", "scalar"): lambda: lambda *args: _scalar(*args),
        (f"numpy.{_core}.numeric", "_frombuffer"): lambda: lambda *args: _from_buffer(*args),
    }
