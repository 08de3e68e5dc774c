"""A data set as the pipeline sees it: images by number, and their labels."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass

import numpy as np

from ..common.errors import UserError, shorten_list
from ..common.images import ReductionChooser
from .sources import Concatenation, Source, Subset, read_pixels


class MissingSplit(UserError):
    """A split that an existing data set lacks."""


@dataclass(frozen=True)
class ImageData:
    """A data set split. One that a user's loader returns is checked by `contract.open_images`.

    Attributes:
        source: where the pixels come from.
        labels: (len,) int64 class of each image, -1 where it has none; None where no image has one. A user's loader
            may also return another kind of whole numbers, such as a list.
        classes: class names, in the order of the labels.
        name: the data set, for errors; `datasets.load` sets it.
    """

    source: Source
    labels: np.ndarray | None
    classes: list[str]
    name: str = ""

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int, choose_reduction: ReductionChooser | None = None) -> np.ndarray:
        """Read an image as (H, W, 3) uint8 RGB, upright.

        Args:
            choose_reduction: see `images.decode`; sources other than image files ignore it.

        Raises:
            CorruptImage: it cannot be decoded; the message names the file.
            UserError: a user's source returned anything else; the message says what a source must return.
        """
        return read_pixels(self.source, index, choose_reduction)

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
        return ImageData(Subset(self.source, positions), labels, self.classes, self.name)

    def relabel(self, classes: list[str]) -> ImageData:
        """Return the same images with labels that are positions in ``classes``, found by the names of classes.

        Raises:
            UserError: ``classes`` lack one of them, or two have the same name.
        """
        if self.labels is None or self.classes == classes[: len(self.classes)]:
            return dataclasses.replace(self, classes=classes)
        repeated = [name for names in (classes, self.classes) for name in names if names.count(name) > 1]
        if repeated:
            raise UserError(
                f"data set {self.name!r}: several classes are named {repeated[0]!r}; give each its own name"
            )
        missing = sorted(set(self.classes) - set(classes))
        if missing:
            raise UserError(
                f"data set {self.name!r}: its classes {shorten_list(missing)} are not in the other data set"
            )
        positions = np.array([*map(classes.index, self.classes), -1], np.int64)  # the last: no label
        return dataclasses.replace(self, labels=positions[self.labels], classes=classes)


def merge(parts: list[ImageData], name: str) -> ImageData:
    """Return several data sets as one; classes of the same name are one class, and all of them are sorted by name."""
    source = Concatenation([part.source for part in parts])
    if all(part.labels is None for part in parts):
        return ImageData(source, None, [], name)
    classes = sorted({class_name for part in parts for class_name in part.classes})
    labels = []
    for part in parts:
        part_labels = part.relabel(classes).labels
        labels.append(np.full(len(part), -1, np.int64) if part_labels is None else part_labels)
    return ImageData(source, np.concatenate(labels), classes, name)
