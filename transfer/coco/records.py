"""Records of images in one block of bytes: Python objects take several times the memory."""

import pickle
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class PackedList(Sequence[Any]):
    """Items as one block of bytes, which forked workers share; each access returns a new copy."""

    def __init__(self, items: Iterable[Any]) -> None:
        packed = bytearray()
        ends = array("q", [0])
        for item in items:
            packed += pickle.dumps(item, -1)
            ends.append(len(packed))
        self._bytes = np.frombuffer(packed, np.uint8)
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        return pickle.loads(self._bytes[self._ends[index] : self._ends[index + 1]].data)


def pack_images(images: Sequence[dict[str, Any]], annotations: Iterable[dict[str, Any]]) -> PackedList:
    """Pack COCO's images, each as (image, its annotations), in their order."""
    by_image: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in images}
    for annotation in annotations:
        by_image[annotation["image_id"]].append(annotation)
    return PackedList((image, by_image.pop(image["id"])) for image in images)
