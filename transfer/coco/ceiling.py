"""The highest AP and AR that predictions can reach if COCO's metrics count fewer of them than there are objects."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pretrain.common.errors import count_noun

_RECALLS = np.linspace(0, 1, 101)  # at which COCOeval reads the precision


def compute_ceiling(
    annotations: Sequence[Mapping[str, Any]], task: str, per_class: int, per_image: int
) -> dict[str, float | None]:
    """Compute the AP and AR of perfect predictions of which some do not count; {} if there is one for every object.

    An image has at most ``per_image`` predictions, of which at most ``per_class`` of a class count. They are for the
    objects of the rarest classes first. If d_c of the n_c objects of class c have one, its recall is r_c = d_c / n_c,
    and its AP, the mean precision at the recalls 0, 0.01, ..., 1, is (floor(100 r_c) + 1) / 101.

    Args:
        annotations: crowds, and for the task keypoints also objects without labeled ones, are not counted.
        task: bbox | segm | keypoints.

    Returns:
        images_over_limit: the number of images with more objects than predictions that count. AP_ceiling and
        AR_ceiling: the means of that AP and of r_c over the classes, from 0 to 100.
    """
    by_image: dict[Any, Counter[Any]] = {}
    for record in annotations:
        if not record.get("iscrowd") and (task != "keypoints" or record.get("num_keypoints")):
            by_image.setdefault(record["image_id"], Counter())[record["category_id"]] += 1
    objects: Counter[Any] = Counter()
    for counts in by_image.values():
        objects.update(counts)
    predicted: Counter[Any] = Counter()
    images_over_limit = 0
    for counts in by_image.values():
        left = per_image
        for category_id in sorted(counts, key=lambda category_id: objects[category_id]):
            number = min(counts[category_id], per_class, left)
            predicted[category_id] += number
            left -= number
        images_over_limit += per_image - left < sum(counts.values())
    if not images_over_limit:
        return {}
    recalls = [predicted[category_id] / count for category_id, count in objects.items()]
    precisions = [np.mean(recall >= _RECALLS) for recall in recalls]
    ceilings = {"AP_ceiling": 100 * float(np.mean(precisions)), "AR_ceiling": 100 * float(np.mean(recalls))}
    return {"images_over_limit": images_over_limit, **ceilings}


def describe_ceiling(task: str, ceiling: Mapping[str, float | None], where: str) -> str:
    """Describe what `compute_ceiling` returned, in a sentence about the data set ``where``."""
    number = int(ceiling["images_over_limit"] or 0)
    per_class = 20 if task == "keypoints" else 100
    limits = f"TEST.DETECTIONS_PER_IMAGE, or than the {per_class} per class that COCO's metrics count"
    images = f"{count_noun(number, 'image')} of {where} {'has' if number == 1 else 'have'} more objects"
    values = f"at most {ceiling['AP_ceiling']:.1f}, and AR at most {ceiling['AR_ceiling']:.1f}"
    return f"{images} than {limits}: {task} AP is {values}"
