"""A data set as the pipeline sees it: images by number, and their labels."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np

from ..common.errors import UserError
from .sources import Source, Subset


class MissingSplit(UserError):
    """A split that an existing data set lacks."""


@dataclass(frozen=True)
class ImageData:
    """A data set split.

    Attributes:
        source: where the pixels come from.
        labels: (len,) int64 class of each image, -1 where it has none; None where no image has one.
        classes: class names, in the order of the labels.
    """

    source: Source
    labels: np.ndarray | None
    classes: list[str]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> np.ndarray:
        """Read an image as (H, W, 3) uint8 RGB, upright.

        Raises:
            CorruptImage: it cannot be decoded; the message names the file.
        """
        return self.source.read(index)

    def image_name(self, index: int) -> str:
        """Return the file of the image, or its position in a file of many images."""
        return self.source.name(index)

    def digest(self) -> str:
        """Return a digest of image names and labels (not of pixels or location)."""
        digest = hashlib.sha256(repr(self.classes).encode(errors="surrogateescape"))
        for index in range(len(self)):
            digest.update(os.path.basename(self.image_name(index)).encode(errors="surrogateescape") + b"\0")
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()[:16]

    def count_classes(self) -> int:
        """Count the classes that have images."""
        return 0 if self.labels is None else len(np.unique(self.labels[self.labels >= 0]))

    def select_labeled(self) -> ImageData:
        """Return only the images that have a label."""
        if self.labels is None or (self.labels >= 0).all():
            return self
        return self.subset(np.flatnonzero(self.labels >= 0))

    def subset(self, positions: np.ndarray) -> ImageData:
        """Return the images at ``positions``, in that order."""
        labels = None if self.labels is None else self.labels[positions]
        return ImageData(Subset(self.source, positions), labels, self.classes)
