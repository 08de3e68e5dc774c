"""Records as one block of bytes: COCO's as Python objects take several times the memory, in every worker again."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

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

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return pickle.loads(self._bytes[self._ends[index] : self._ends[index + 1]].data)
