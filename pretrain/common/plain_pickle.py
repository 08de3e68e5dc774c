"""Unpickles arrays and plain types, and nothing that can run code or harm the process.

NumPy restores its arrays in C, and trusts what the pickle says about them: a damaged file can end the process with a
segmentation fault, and a made one may do more. So each array is made anew from its checked parts. Hashing can do as
much: a deeply nested tuple overflows C's stack as the key of a dictionary, so keys are plain.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import re
import struct
from collections.abc import Callable, Iterable
from typing import IO, Any, ClassVar

import numpy as np

_TYPES = re.compile(r"[biufcSU]\d{1,9}")  # without objects ("O8"), records ("V8"), and times
_CORES = ("core", "_core")  # of NumPy 1 and 2
_KEYS = (str, bytes, int, float, bool, type(None))
_DICTIONARIES = (dict, collections.OrderedDict)
_REFUSED = [
    code[0] for code in (
        pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX,
        pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
    )
]  # fmt: skip


def load(content: bytes) -> Any:
    """The object that ``content`` holds; a NumPy scalar becomes Python's, and bytes of Python 2 become text (Latin-1).

    Raises:
        pickle.UnpicklingError: it holds another class or function (the message names it) than plain types,
            NumPy's arrays of numbers or text, ``OrderedDict`` and ``argparse.Namespace``.
        Exception: of any other type: ``content`` is damaged.
    """
    return Unpickler(io.BytesIO(content), len(content), encoding="latin1").load()


_Python: Any = pickle._Unpickler  # the types of its methods are not published


class Unpickler(_Python):
    """Python's unpickler, written in Python, with plain keys and without objects that it could change.

    Args:
        file: where the pickle begins.
        size: number of bytes that the pickle may have.
    """

    def __init__(self, file: IO[bytes], size: int, encoding: str) -> None:
        super().__init__(_Whole(file), encoding=encoding)
        self._left = 2 * size  # an array of protocol 2 takes its bytes twice; more would name the same bytes again
        self._allowed: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): _ordered,
            ("argparse", "Namespace"): argparse.Namespace,
            ("__builtin__", "bytes"): lambda: b"",  # how protocols 0 to 2 write bytes without content
            ("_codecs", "encode"): self._encode,
            ("numpy", "ndarray"): None,  # an argument of _reconstruct
            ("numpy", "dtype"): _Type,
        }
        for core in _CORES:
            self._allowed |= {
                (f"numpy.{core}.multiarray", "_reconstruct"): _empty,
                (f"numpy.{core}.multiarray", "scalar"): _scalar,
                (f"numpy.{core}.numeric", "_frombuffer"): self._from_buffer,
            }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"Unsupported class {module}.{name}")
        return self._allowed[module, name]

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise pickle.UnpicklingError("its parts are longer than itself")

    def _encode(self, text: str, encoding: str = "latin1") -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"Unsupported class _codecs.encode to {encoding!r}")
        self._take(len(text))
        return text.encode("latin1")

    def _from_buffer(self, data: bytes | bytearray, kind: _Type, shape: tuple[int, ...], order: str) -> _Array:
        self._take(len(data))
        array = _empty()
        array.__setstate__((shape, kind, order == "F", data))
        return array

    def load_build(self) -> None:
        made, state = self.stack[-2:]
        if type(made) is _Array:
            self._take(len(state[-1]))
        elif type(made) in (argparse.Namespace, collections.OrderedDict):
            if type(state) is not dict or any(type(name) is not str or hasattr(made, name) for name in state):
                raise pickle.UnpicklingError(f"Unsupported class {type(made).__name__} with a state that changes it")
        elif type(made) is not _Type:
            raise pickle.UnpicklingError(f"Unsupported class {type(made).__name__} with a state")
        super().load_build()

    def load_append(self) -> None:
        _check(self.stack[-2], list)
        super().load_append()

    def load_appends(self) -> None:
        _check(self.metastack[-1][-1], list)
        super().load_appends()

    def load_dict(self) -> None:
        check_keys(self.stack[::2])
        super().load_dict()

    def load_setitem(self) -> None:
        _check(self.stack[-3], *_DICTIONARIES)
        check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check(self.metastack[-1][-1], *_DICTIONARIES)
        check_keys(self.stack[::2])
        super().load_setitems()

    def load_bytearray8(self) -> None:
        """Python makes room for the length that the file says, before it reads."""
        self.append(bytearray(self.read(*struct.unpack("<Q", self.read(8)))))

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("Unsupported class, set or buffer")

    def load_unknown(self) -> None:
        raise pickle.UnpicklingError("it is no pickle")

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **dict.fromkeys(range(256), load_unknown),
        **_Python.dispatch,
        **dict.fromkeys(_REFUSED, load_refused),
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


class _Whole:
    """A file whose end is not taken for the end of a name or a string."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("it ends too early")
        return data

    def readline(self) -> bytes:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise EOFError("it ends too early")
        return line


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


def _check(target: Any, *kinds: type) -> None:
    if type(target) not in kinds:
        raise pickle.UnpicklingError(f"Unsupported class {type(target).__name__} with items")


def check_keys(keys: Iterable[Any]) -> None:
    """Their hashes take no time, and no stack."""
    for key in keys:
        parts = key if type(key) is tuple and len(key) < 9 else (key,)
        if any(type(part) not in _KEYS or (type(part) is int and part.bit_length() > 64) for part in parts):
            raise pickle.UnpicklingError(f"Unsupported class {type(key).__name__} as a key")


def _ordered(items: Iterable[Any] = ()) -> collections.OrderedDict[Any, Any]:
    pairs = [(key, value) for key, value in items]
    check_keys(key for key, _ in pairs)
    return collections.OrderedDict(pairs)


def _dtype(kind: Any) -> np.dtype[Any]:
    if type(kind) is not _Type:
        raise pickle.UnpicklingError("Unsupported class in place of numpy.dtype")
    return kind.dtype


def _bytes(data: str | bytes | bytearray) -> bytes:
    return data.encode("latin1") if isinstance(data, str) else bytes(memoryview(data))


def _scalar(kind: _Type, data: str | bytes) -> Any:
    (value,) = np.frombuffer(_bytes(data), _dtype(kind))
    return value.item()


def _empty(*_: Any) -> _Array:
    return np.ndarray.__new__(_Array, (0,))
