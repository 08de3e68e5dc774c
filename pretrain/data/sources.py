"""Sources of images by number: files, arrays, and subsets and sequences of other sources."""

from __future__ import annotations

import bisect
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..common import images
from ..common.errors import UserError


class Source(Protocol):
    """The pixels of a data set: `read` returns them as `images.decode` does, `name` is for messages.

    A source whose attribute ``can_reduce`` is true also has `images.decode`'s argument ``choose_reduction``.
    """

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

    can_reduce = True

    def __init__(self, folder: str | Path, names: Iterable[str]) -> None:
        self.folder = str(folder)
        self.names = PackedNames.pack(names)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return os.path.join(self.folder, self.names[index])

    def read(self, index: int, choose_reduction: images.ReductionChooser | None = None) -> np.ndarray:
        name = self.name(index)
        return images.decode(images.read_file(name), name, choose_reduction)


class Array:
    """Decoded images in memory or in memory-mapped files.

    Args:
        parts: their name in messages -> (N, H, W) or (N, H, W, 3) uint8, or (N, 3, W, H) with ``transposed`` (STL10 is
            stored column by column); the parts follow one another.
    """

    def __init__(self, parts: Mapping[str, np.ndarray], transposed: bool = False) -> None:
        if not isinstance(parts, Mapping):
            raise UserError("Array needs a name for its images, which messages contain; write Array({'NAME': images})")
        self.parts = parts
        self.transposed = transposed

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def _locate(self, index: int) -> tuple[str, int]:
        for origin, part in self.parts.items():
            if index < len(part):
                return origin, index
            index -= len(part)
        raise IndexError(index)

    def name(self, index: int) -> str:
        origin, position = self._locate(index)
        return f"{origin}[{position}]"

    def read(self, index: int) -> np.ndarray:
        origin, position = self._locate(index)
        image = np.asarray(self.parts[origin][position])
        if self.transposed:
            image = image.transpose(2, 1, 0)
        elif image.ndim == 2:
            image = np.repeat(image[:, :, None], 3, axis=2)
        return np.ascontiguousarray(image)


def read_pixels(source: Any, index: int, choose_reduction: images.ReductionChooser | None) -> np.ndarray:
    """Read an image of a source, which gets ``choose_reduction`` only if it can reduce images."""
    if choose_reduction and getattr(source, "can_reduce", False):
        return source.read(index, choose_reduction)
    return source.read(index)


class Subset:
    """Some of another source's images, by their positions in it."""

    can_reduce = True

    def __init__(self, source: Source, positions: np.ndarray) -> None:
        self.source = source
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, index: int, choose_reduction: images.ReductionChooser | None = None) -> np.ndarray:
        return read_pixels(self.source, int(self.positions[index]), choose_reduction)

    def name(self, index: int) -> str:
        return self.source.name(int(self.positions[index]))


class Concatenation:
    """The images of several sources, one after the other."""

    can_reduce = True

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.ends = np.cumsum([len(source) for source in sources]).tolist()

    def __len__(self) -> int:
        return self.ends[-1]

    def _locate(self, index: int) -> tuple[Source, int]:
        part = bisect.bisect_right(self.ends, index)
        return self.sources[part], index - (self.ends[part - 1] if part else 0)

    def read(self, index: int, choose_reduction: images.ReductionChooser | None = None) -> np.ndarray:
        source, position = self._locate(index)
        return read_pixels(source, position, choose_reduction)

    def name(self, index: int) -> str:
        source, position = self._locate(index)
        return source.name(position)
