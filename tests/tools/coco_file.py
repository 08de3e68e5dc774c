"""A small annotation file in COCO's format without images, for the tests of tools/make_data.py."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(path: Path, classes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Write a file whose image ``n``, with the id 2n, has a box of each of ``classes[n]``; return its content."""
    size = {"height": 8, "width": 8}
    images = [{"id": 2 * n, "file_name": f"{n}.png", **size, "camera": n} for n in range(len(classes))]
    boxes = [(2 * n, label) for n, labels in enumerate(classes) for label in labels]
    record = {"bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0, "by": "me"}
    annotations = [
        {"id": number, "image_id": image, "category_id": label, **record} for number, (image, label) in enumerate(boxes)
    ]
    labels = sorted({label for _, label in boxes}, reverse=True)
    categories = [{"id": label, "name": f"c{label}", "supercategory": "all"} for label in labels]
    content = {"info": {"year": 2017}, "images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(content))
    return content
