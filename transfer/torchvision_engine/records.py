"""Records as one block of bytes: COCO's as Python objects take several times the memory, in every worker again."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np


class Records(Sequence[dict[str, Any]]):
    """Records that are unpacked when they are asked for; forked workers share the bytes."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        packed, ends = bytearray(), array("q", [0])
        for record in records:
            packed += pickle.dumps(record, -1)
            ends.append(len(packed))
        self._bytes, self._ends = np.frombuffer(packed, np.uint8), np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Records:
        """A record, or successive ones that share these bytes."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1
            part = Records(())
            part._bytes, part._ends = self._bytes, self._ends[start : max(start, stop) + 1]
            return part
        if not 0 <= index < len(self):
            raise IndexError(index)
        return pickle.loads(self._bytes[self._ends[index] : self._ends[index + 1]].data)
