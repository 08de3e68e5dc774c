"""What the loader of a user's data set must provide: labels, classes, names and the pixels of each image.

Each check returns its value in the form that the pipeline uses, or raises one line with the remedy.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Set
from numbers import Integral
from typing import Any

import numpy as np
from PIL import Image

from ..common.errors import UserError, count_noun
from ..common.image_checks import pixels
from ..common.image_checks.pixels import describe
from ..common.images import ReductionChooser
from .image_data import ImageData
from .sources import Source

_TEMPLATE = "as docs/templates/my_data.py does"
_NUMBER_THEM = "number them: classes, labels = np.unique(labels, return_inverse=True)"


def open_images(loaded: Any, name: str, split: str) -> ImageData:
    """Check what the loader of the data set ``name`` returned; its images are checked when they are read.

    Raises:
        UserError: it is not an `ImageData`, or does not keep to the contract.
    """
    where = f"data set {name!r}"
    if not isinstance(loaded, ImageData):
        expected = "a loader must return ImageData(source, labels, classes), as docs/templates/my_data.py does"
        remedy = "or raise MissingSplit if the data set has no such split"
        raise UserError(f"{where}: its loader returned {describe(loaded)} for {split}; {expected}, {remedy}")
    check_source(loaded.source, where)
    source = CheckedSource(loaded.source, where)
    classes = convert_classes(loaded.classes, where)
    labels = convert_labels(loaded.labels, classes, len(source), where)
    try:
        source.name(len(source) - 1)
    except IndexError as error:
        raise UserError(
            f"{where} has {count_noun(len(source), 'image')}, but no name({len(source) - 1}); name all of them"
        ) from error
    return dataclasses.replace(loaded, source=source, labels=labels, classes=classes)


class CheckedSource:
    """A user's source, of which every name and image is checked; errors of its code name the image.

    Args:
        where: names the data set in errors, as in the functions here.
    """

    def __init__(self, source: Source, where: str) -> None:
        self.can_reduce = getattr(source, "can_reduce", False)
        self._source = source
        self._where = where

    def __len__(self) -> int:
        return len(self._source)

    def name(self, index: int) -> str:
        name = self._call("name", index)
        if not isinstance(name, (str, os.PathLike)):
            raise UserError(f"{self._where}: name({index}) returned {describe(name)}; return text, such as its file")
        return os.fspath(name)

    def read(self, index: int, choose_reduction: ReductionChooser | None = None) -> np.ndarray:
        image = self._call("read", index, choose_reduction) if choose_reduction else self._call("read", index)
        rule = "read() must return (H, W, 3) uint8 RGB"
        return pixels.check_image(
            image, lambda: f"image {index} ({self.name(index)}) of the {self._where}", rule, _advise
        )

    def _call(self, method: str, index: int, *options: Any) -> Any:
        """Call a method of the source, whose error keeps its traceback: only it shows where the mistake is."""
        try:
            return getattr(self._source, method)(index, *options)
        except UserError:
            raise
        except Exception as error:
            error.add_note(f"{method}({index}) of the {self._where} failed")
            raise


def check_source(source: Any, where: str) -> None:
    """Raise UserError unless ``source`` is a `sources.Source` that contains an image.

    Args:
        where: names the data set in errors, as in the other functions here.
    """
    methods = ("__len__", "read", "name")
    missing = [method for method in methods if not callable(getattr(source, method, None))]
    if missing or isinstance(source, type):
        remedy = f"its source needs __len__(), read(index) and name(index), {_TEMPLATE}"
        if isinstance(source, np.ndarray):
            remedy = "for an array of images, write sources.Array({'NAME': images})"
        raise UserError(f"{where}: {describe(source)} is not a source of images; {remedy}")
    if len(source) == 0:
        raise UserError(f"{where} has no images; its source's __len__() returned 0")


def convert_classes(classes: Any, where: str) -> list[str]:
    """Return the class names as a list of text; None means that there are none."""
    is_ordered = isinstance(classes, Iterable) and not isinstance(classes, (str, bytes, Mapping, Set))
    names = list(classes) if is_ordered else [classes]
    wrong = [name for name in names if not isinstance(name, str)]
    if classes is None:
        return []
    if not is_ordered or wrong:
        example = f", which contains {wrong[0]!r}" if is_ordered else ""
        remedy = "write a list of text, in the order of the labels, such as ['cat', 'dog']"
        raise UserError(f"{where}: classes is {describe(classes)}{example}; {remedy}")
    return [str(name) for name in names]


def convert_labels(labels: Any, classes: list[str], count: int, where: str) -> np.ndarray | None:
    """Return the labels of ``count`` images as (N,) int64, or None if there are none.

    Args:
        labels: whole numbers from 0 to C-1, or -1 where an image has none: a list, an array or a tensor.
    """
    if labels is None:
        return None
    if hasattr(labels, "detach"):  # a torch tensor, which may be on a GPU
        labels = labels.detach().cpu()
    try:
        array = np.asarray(labels)
    except ValueError as error:  # lists of different lengths
        raise UserError(f"{where}: labels is a nested {type(labels).__name__}; write one label per image") from error
    if array.shape != (count,):
        remedy = "write one label per image, in a list or an array"
        if array.ndim == 2 and len(array) == count:
            remedy += ": labels.reshape(-1)" if array.shape[1] == 1 else ": labels.argmax(axis=1)"
        problem = count_noun(len(array), "label") if array.ndim == 1 else f"its labels are {describe(labels)}"
        raise UserError(f"{where} has {count_noun(count, 'image')}, but {problem}; {remedy}")
    _check_whole_numbers(array, where)
    _check_range(int(array.min()), int(array.max()), len(classes), where)
    return np.ascontiguousarray(array, np.int64)


def _check_whole_numbers(array: np.ndarray, where: str) -> None:
    if array.dtype.kind in "biu":
        return
    values = array.tolist()
    wrong = [value for value in values if not isinstance(value, Integral)]
    if not wrong:  # Python's own numbers, as in pandas
        return
    missing = [value for value in wrong if value is None or value != value]  # NaN is not equal to itself
    fractions = [value for value in wrong if isinstance(value, float) and not value.is_integer()]
    remedy = "convert them: np.asarray(labels).astype(np.int64)"
    if missing:
        remedy = "write -1 where an image has no label"
    elif fractions or not isinstance(wrong[0], float):
        remedy = _NUMBER_THEM
    example = [*missing, *fractions, *wrong][0]
    raise UserError(f"{where}: labels must be whole numbers, but one is {example!r:.40} ({array.dtype}); {remedy}")


def _check_range(low: int, high: int, classes: int, where: str) -> None:
    if low >= -1 and high < classes:
        return
    limit = (
        f"{count_noun(classes, 'class', 'classes')} allow 0 to {classes - 1}, and -1 for no label"
        if classes
        else "classes is empty"
    )
    remedy = f"name every class, or {_NUMBER_THEM}"
    if low < -1:
        remedy = "write -1 where an image has no label"
    elif low == 1 and high == classes:
        remedy = "subtract 1"
    raise UserError(f"{where}: labels are from {low} to {high}, but {limit}; {remedy}")


def _advise(image: Any) -> str:
    """Return what a user's read() should return instead of ``image``."""
    if image is None:
        return "its return statement is missing"
    if isinstance(image, Image.Image):
        return 'np.asarray(image.convert("RGB"))'
    if isinstance(image, (bytes, bytearray)):
        return "pretrain.common.images.decode(encoded, name)"
    if isinstance(image, (str, os.PathLike)):
        return "pretrain.common.images.decode(open(path, 'rb').read(), path)"
    if isinstance(image, (tuple, Mapping)):
        return "return the image alone; labels are an argument of ImageData"
    return pixels.advise_array(image)
