"""Aerial photographs of forests with hand-drawn boxes around tree crowns, as unlabeled patches and as COCO windows.

The photographs are the examples in the ``deepforest`` package (MIT license). They were taken by the
National Ecological Observatory Network, whose data are in the public domain (CC0 1.0,
https://www.neonscience.org/usage-policies); cite NEON and Weinstein et al., DeepForest: A Python package for RGB deep
learning tree crown delineation, Methods in Ecology and Evolution 11, 2020. They are downloaded, never redistributed.

There are five regions of about equal size: the quadrants of one tile, and a second tile. One is the test region: none
of its pixels is in the training set, with or without labels. Three small plots of other sites are always in the
training set.
"""

import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from pretrain.common.errors import UserError
from pretrain.common.files import sha256
from tools.data.coco_writer import CocoWriter, write_jpeg

_WINDOW = 256  # pixels per side of a labeled image
_PATCH = 96  # pixels per side of an unlabeled image
_PACKAGE = "deepforest==2.1.0"
_SHA256 = "8c2798d8e9be7f0004b194fe207b76c1d9fff6e711b3db67b9508dcd5d00ae54"
_LARGE = "2019_YELL_2_528000_4978000_image_crop2"
_SMALL = "2019_YELL_2_541000_4977000_image_crop"
_PLOTS = {"OSBS_029": True, "SOAP_061": True, "SOAP_031": False}  # plot -> whether it is labeled
# Minimum visible fraction of a crown; below it, COCO's crowd flag excludes the crown from training and scores.
_MIN_VISIBLE_FRACTION = 0.5

# (H, W, 3) uint8 RGB, and (N, 4) x0, y0, x1, y1, which may lie outside the image, or None if it is not labeled.
Region = tuple[np.ndarray, np.ndarray | None]


def write_trees(folder: Path, test_region: int, wheel: Path | None) -> None:
    """Write ``folder/images/train/*.jpg``, unlabeled, and ``folder/coco/{train,val}`` with its annotations.

    Labeled images do not overlap; unlabeled images overlap by half.

    Args:
        test_region: region from 0 to 4 that becomes val.
        wheel: wheel of the package; None downloads it with pip.

    Raises:
        UserError: the download failed, or the file is not this wheel.
    """
    regions, plots = _read_regions(wheel)
    test = regions.pop(test_region)
    images = folder / "images" / "train"
    images.mkdir(parents=True)
    for number, (pixels, _) in enumerate(regions + plots):
        for top, left in _list_corners(pixels, _PATCH, _PATCH // 2):
            write_jpeg(images / f"{number}_{top:04d}_{left:04d}.jpg", pixels[top : top + _PATCH, left : left + _PATCH])
    for split, areas in {"train": regions + plots, "val": [test]}.items():
        writer = CocoWriter(folder / "coco", split, [{"id": 1, "name": "tree", "supercategory": "plant"}])
        for pixels, boxes in areas:
            if boxes is None:
                continue
            for top, left in _list_corners(pixels, _WINDOW, _WINDOW):
                image_id = writer.add_image(pixels[top : top + _WINDOW, left : left + _WINDOW])
                clipped = (boxes - (left, top, left, top)).clip(0, _WINDOW)
                fractions = _compute_areas(clipped) / _compute_areas(boxes)
                for box, fraction in zip(clipped, fractions, strict=True):
                    if fraction > 0:
                        writer.add_box(image_id, 1, box, crowd=bool(fraction < _MIN_VISIBLE_FRACTION))
        writer.write("instances")


def _read_regions(wheel: Path | None) -> tuple[list[Region], list[Region]]:
    """Read the five regions and the plots."""
    with tempfile.TemporaryDirectory() as folder:
        file = wheel or _download(Path(folder))
        if sha256(file) != _SHA256:
            raise UserError(f"{file} is not the wheel of {_PACKAGE} (SHA-256 {_SHA256}); download it again")
        with zipfile.ZipFile(file) as archive:
            large, boxes = _read(archive, _LARGE)
            plots = [_read(archive, name, labeled) for name, labeled in _PLOTS.items()]
            small = _read(archive, _SMALL)
    assert boxes is not None
    height = large.shape[0] // 2
    width = large.shape[1] // 2
    quadrants: list[Region] = [
        (large[y : y + height, x : x + width], boxes - (x, y, x, y)) for y in (0, height) for x in (0, width)
    ]
    return [*quadrants, small], plots


def _download(folder: Path) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, _PACKAGE]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1:] or ["no message"]
        remedy = "download its wheel elsewhere and add --wheel FILE"
        raise UserError(f"pip could not download {_PACKAGE}: {reason[0]}; {remedy}")
    return next(folder.glob("*.whl"))


def _read(archive: zipfile.ZipFile, name: str, labeled: bool = True) -> Region:
    pixels = np.asarray(Image.open(io.BytesIO(archive.read(f"deepforest/data/{name}.png"))).convert("RGB"))
    if not labeled:
        return pixels, None
    tree = ElementTree.parse(io.BytesIO(archive.read(f"deepforest/data/{name}.xml")))
    sides = ("xmin", "ymin", "xmax", "ymax")
    corners = [[float(box.findtext(side) or "nan") for side in sides] for box in tree.iter("bndbox")]
    return pixels, np.array(corners) - (1, 1, 0, 0)  # VOC counts pixels from 1 and includes the last one


def _list_corners(pixels: np.ndarray, side: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield top and left of all squares of ``side`` pixels, ``step`` pixels apart."""
    height, width = pixels.shape[:2]
    for top in range(0, height - side + 1, step):
        for left in range(0, width - side + 1, step):
            yield top, left


def _compute_areas(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
