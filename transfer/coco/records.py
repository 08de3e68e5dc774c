"""A data set as an object. Its records are one block of bytes: Python objects take several times the memory."""

import itertools
import pickle
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .checks.bad_records import SECTIONS
from .keypoints import flip_pairs, keypoint_names
from .names import Source


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


@dataclass(frozen=True)
class DataSet:
    """A data set of DATASETS.TRAIN or DATASETS.TEST, whose records are good.

    Attributes:
        source: its name and its files.
        categories: COCO's records (id, name, ...) in the order of their ids.
        images: its images, ordered by id, each as (image, annotations) in COCO's format; None if another evaluator than
            COCO's reads its files.
        file_names: the images' paths in the image folder, in the order of their ids.
        image_sizes: (N, 2), the images' heights and widths in pixels, in the order of their ids.
        counts: number of annotations of each category's id that are no crowds.
        num_empty: number of images without such annotations.
        entries: the records that Detectron2's catalog has for its name; None for a set that is read here.
        evaluator: the metrics that are computed: coco, or one of `catalog.OTHER_EVALUATORS`.
        skipped: descriptions of the bad records that were skipped.
        fields: what else the annotation file contains.
    """

    source: Source
    categories: list[dict[str, Any]]
    images: PackedList | None = None
    file_names: list[str] = field(default_factory=list)
    image_sizes: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    counts: Mapping[Any, int] = field(default_factory=dict)
    num_empty: int = 0
    entries: PackedList | None = None
    evaluator: str = "coco"
    skipped: list[str] = field(default_factory=list)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in the config."""
        return self.source.name

    @property
    def content(self) -> dict[str, Any]:
        """What its file in COCO's format contains, without bad records: a new copy, which may be changed."""
        images = []
        annotations = []
        for image, objects in self.images or ():
            images.append(image)
            annotations += objects
        return {**self.fields, "images": images, "annotations": annotations, "categories": self.categories}

    @property
    def num_objects(self) -> int:
        """Number of annotations that are no crowds."""
        return sum(self.counts.values())

    def count_objects(self, category: str) -> int:
        """Return the number of annotations of a category that are no crowds."""
        return sum(self.counts.get(record["id"], 0) for record in self.categories if record["name"] == category)

    def find_keypoints(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the names of its keypoints, and the pairs of names that a flip exchanges."""
        annotations = (record for _, records in self.images or () for record in records if record.get("keypoints"))
        sample = {"categories": self.categories, "annotations": [*itertools.islice(annotations, 1)]}
        return keypoint_names(sample), flip_pairs(sample) or []


def describe_unscored(name: str) -> str:
    """Describe what an evaluation does with a data set without objects."""
    return f"{name} has no objects, or only crowds (iscrowd 1): predictions are written, and nothing is scored"


def pack(source: Source, content: dict[str, Any], skipped: list[str]) -> DataSet:
    """Make a data set of the content of an annotation file, whose annotations are removed from it."""
    images = sorted(content["images"], key=lambda image: image["id"])
    objects = [record for record in content["annotations"] if not record.get("iscrowd")]
    return DataSet(
        source,
        sorted(content["categories"], key=lambda category: category["id"]),
        file_names=[image["file_name"] for image in images],
        image_sizes=np.array([(image["height"], image["width"]) for image in images], np.int64).reshape(-1, 2),
        counts=Counter(record["category_id"] for record in objects),
        num_empty=len(images) - len({record["image_id"] for record in objects}),
        skipped=skipped,
        fields={name: value for name, value in content.items() if name not in SECTIONS},
        images=_pack_images(images, content["annotations"]),
    )


def _pack_images(images: Sequence[dict[str, Any]], annotations: list[dict[str, Any]]) -> PackedList:
    """Pack COCO's images, each as (image, its annotations), in their order."""
    by_image: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in images}
    for annotation in annotations:
        by_image[annotation["image_id"]].append(annotation)
    annotations.clear()  # what is packed is freed
    return PackedList((image, by_image.pop(image["id"])) for image in images)
