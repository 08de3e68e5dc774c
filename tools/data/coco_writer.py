"""Writer of a COCO data set, image by image: images, boxes, polygons or run lengths, categories."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from pycocotools import mask as run_lengths

_FINE = 4  # outlines are traced at this many points per pixel, so that they run between pixels and not through them


class CocoWriter:
    """One split of a COCO data set that is being written.

    Args:
        folder: folder of the data set; images go to ``folder/split``, annotations to ``folder/annotations``.
        split: train or val.
        categories: COCO's category records.
    """

    def __init__(self, folder: Path, split: str, categories: list[dict[str, Any]]) -> None:
        self._folder = folder
        self._split = split
        self._content: dict[str, Any] = {
            "info": {"description": f"drawn by tools/make_data.py, {split}"},
            "licenses": [],
            "categories": categories,
            "images": [],
            "annotations": [],
        }
        (folder / split).mkdir(parents=True)

    def add_image(self, image: np.ndarray) -> int:
        """Write (H, W, 3) uint8 RGB as JPEG and return its id, which starts at 1."""
        image_id = len(self._content["images"]) + 1
        name = f"{image_id:012d}.jpg"
        write_jpeg(self._folder / self._split / name, image)
        height, width = image.shape[:2]
        self._content["images"].append({"id": image_id, "file_name": name, "height": height, "width": width})
        return image_id

    def add_object(self, image_id: int, category_id: int, mask: np.ndarray, **more: Any) -> None:
        """Add an object from its visible pixels: polygons, and the box and area that they enclose.

        Args:
            mask: (H, W) bool, at least one pixel.
            more: further keys of the record (keypoints).
        """
        outlines = trace_polygons(mask)
        encoded = run_lengths.merge(run_lengths.frPyObjects(outlines, *mask.shape))  # pyright: ignore
        box = run_lengths.toBbox(encoded).tolist()
        area = float(run_lengths.area(encoded))
        self.add_record(image_id, category_id, box, area, iscrowd=0, segmentation=outlines, **more)

    def add_box(self, image_id: int, category_id: int, box: np.ndarray, *, crowd: bool = False) -> None:
        """Add an object that has a box (x0, y0, x1, y1) in pixels and no outline."""
        x0, y0, x1, y1 = box.tolist()
        self.add_record(image_id, category_id, [x0, y0, x1 - x0, y1 - y0], (x1 - x0) * (y1 - y0), iscrowd=int(crowd))

    def add_record(self, image_id: int, category_id: int, box: list[float], area: float, **more: Any) -> None:
        """Add a record of an object with its box (x, y, width, height); ``more`` are its further keys."""
        records = self._content["annotations"]
        record = {"id": len(records) + 1, "image_id": image_id, "category_id": category_id, "bbox": box, "area": area}
        records.append({**record, **more})

    def write(self, kind: str) -> None:
        """Write ``annotations/<kind>_<split>.json``."""
        path = self._folder / "annotations" / f"{kind}_{self._split}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(self._content, sort_keys=True))


def write_jpeg(path: Path, image: np.ndarray) -> None:
    """Write (H, W, 3) uint8 RGB as JPEG of quality 92; the same pixels give the same bytes."""
    encoded = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 92])[1]
    path.write_bytes(encoded.tobytes())


def trace_polygons(mask: np.ndarray) -> list[list[float]]:
    """Return outer outlines of (H, W) bool as COCO's polygons, [x0, y0, x1, y1, ...] in pixels; holes are filled."""
    fine = np.kron(mask.astype(np.uint8), np.ones((_FINE, _FINE), np.uint8))
    outlines: Sequence[np.ndarray] = cv2.findContours(fine, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)[0]
    simplified = [cv2.approxPolyDP(outline, 1.0, True)[:, 0] for outline in outlines]
    return [((points + 0.5) / _FINE).ravel().round(2).tolist() for points in simplified if len(points) >= 3]
