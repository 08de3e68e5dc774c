"""Sources of images by number: files, arrays, and combinations of other sources."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..common import images


class Source(Protocol):
    """The pixels of a data set: `read` returns them as `images.decode` does, `name` is for messages."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> np.ndarray: ...
    def name(self, index: int) -> str: ...


@dataclass(frozen=True)
class PackedNames:
    """File names in two arrays, which forked workers share: they would copy Python strings.

    Attributes:
        text: the concatenated names, as the file system's own bytes; uint8.
        ends: int64, the end of each name in ``text``.
    """

    text: np.ndarray
    ends: np.ndarray

    @classmethod
    def pack(cls, names: Iterable[str]) -> PackedNames:
        text = bytearray()
        ends = array("q")
        for name in names:
            text += os.fsencode(name)
            ends.append(len(text))
        return cls(np.frombuffer(text, np.uint8), np.frombuffer(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.text[start : int(self.ends[index])].tobytes())

    def __iter__(self) -> Iterator[str]:
        text = self.text.tobytes()  # slicing bytes takes a third of the time of slicing arrays
        start = 0
        for end in self.ends.tolist():
            yield os.fsdecode(text[start:end])
            start = end


class Files:
    """Image files in a folder."""

    def __init__(self, folder: str | Path, names: Iterable[str]) -> None:
        self.folder = str(folder)
        self.names = PackedNames.pack(names)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return os.path.join(self.folder, self.names[index])

    def read(self, index: int) -> np.ndarray:
        return images.decode(images.read_file(self.name(index)), self.name(index))


class Array:
    """Decoded images in memory or in a memory-mapped file.

    Args:
        images: (N, H, W) or (N, H, W, 3) uint8, or (N, 3, W, H) with ``transposed`` (STL10 is stored column by column).
        origin: their name in messages.
    """

    def __init__(self, images: np.ndarray, origin: str, transposed: bool = False) -> None:
        self.images = images
        self.origin = origin
        self.transposed = transposed

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"{self.origin}[{index}]"

    def read(self, index: int) -> np.ndarray:
        image = np.asarray(self.images[index])
        if self.transposed:
            image = image.transpose(2, 1, 0)
        elif image.ndim == 2:
            image = np.repeat(image[:, :, None], 3, axis=2)
        return np.ascontiguousarray(image)


class Concatenated:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _locate(self, index: int) -> tuple[Source, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[part], index - int(self._ends[part] - len(self.sources[part]))

    def read(self, index: int) -> np.ndarray:
        source, position = self._locate(index)
        return source.read(position)

    def name(self, index: int) -> str:
        source, position = self._locate(index)
        return source.name(position)


class Subset:
    """Some of another source's images, by their positions in it."""

    def __init__(self, source: Source, positions: np.ndarray) -> None:
        self.source = source
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, index: int) -> np.ndarray:
        return self.source.read(int(self.positions[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.positions[index]))
