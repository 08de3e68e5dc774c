"""The names of a detector's classes. Labels are matched by their order, so a run has one list of them."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.config.yaml_io import get
from pretrain.common.errors import UserError, count_noun

from ...config import classes_key

CLASSES = "classes.json"  # in a run folder: the names of the detector's classes, in the order of its labels
Classes = Mapping[str, Sequence[str]]  # a data set's name, or the path of a run's `CLASSES` -> names of its categories


def category_names(content: Mapping[str, Any]) -> list[str]:
    """Return the categories' names in the order of their ids, which is the order of the detector's labels."""
    return [str(category["name"]) for category in sorted(content["categories"], key=lambda category: category["id"])]


def check_same_categories(
    classes: Classes,
    remedy: str = "give both the same categories in the same order",
    item: str = "category {} in the order of ids",
    normalize: Callable[[str], str] = str,
) -> None:
    """Raise UserError, which names the first difference, if two differ: labels are matched by their order alone.

    Args:
        normalize: removes what makes no difference between two names.
    """
    for (first, expected), (name, labels) in itertools.pairwise(classes.items()):
        for number, (a, b) in enumerate(itertools.zip_longest(expected, labels), 1):
            if normalize(str(a)) != normalize(str(b)):
                raise UserError(f"{item.format(number)} is {a!r} in {first}, but {b!r} in {name}; {remedy}")


def check_classes(cfg: CfgNode, classes: Classes, keypoints: Classes) -> None:
    """Check that a label and a keypoint mean the same in all data sets, and that the detector has as many classes.

    Args:
        keypoints: the keypoints' names in each data set; [] where it does not name them, or for other detectors.

    Raises:
        UserError: two data sets differ, or the number of classes does.
    """
    check_same_categories(classes)
    keypoints = {name: labels for name, labels in keypoints.items() if labels}
    check_same_categories(keypoints, "give both the same keypoints in the same order", "keypoint {}", _normalize)
    key = classes_key(cfg)
    for name, labels in classes.items():
        if len(labels) != get(cfg, key):
            count = count_noun(len(labels), "category", "categories")
            raise UserError(f"{name} has {count}; set {key} {len(labels)}, not {get(cfg, key)}")


def _normalize(name: str) -> str:
    """Return a keypoint's name without case and separators: left_eye, Left Eye and leftEye are the same."""
    return re.sub(r"[\W_]+", "", name).lower() or name


def read_coco_names() -> list[str]:
    """Return the names of COCO's 80 categories, without reading its large files."""
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights  # slow to import

    names = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    return [name for name in names if name not in ("__background__", "N/A")]
