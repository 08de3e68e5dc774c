"""Whatever JSON an annotation file holds, its bad records are named: no traceback, no silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from tests.transfer import tiny_coco
from transfer.coco import data as coco_data
from transfer.coco.check import check, leave_out

Content = dict[str, Any]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def people(tmp_path: Path) -> tuple[Content, Path]:
    annotations, images = coco_data.resolve(tiny_coco.write(tmp_path / "data", keypoints=True))
    return coco_data.read(annotations), images


def object_with(**keys: Any) -> Any:
    return lambda c: c["annotations"][0].update(keys)


def mask_of(counts: Any) -> Any:
    return object_with(segmentation={"size": [64, 96], "counts": counts})


def deep() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


def outline(*numbers: Any) -> Any:
    return object_with(segmentation=[list(numbers)])


BAD = {
    "polygon far to the right": (outline(0, 0, 1e9, 0, 9, 9), "polygon reaches from 0 to 1e+09 where the image has 0"),
    "polygon far above": (outline(0, -65, 5, 0, 9, 9), "polygon reaches from -65 to 9 where the image has 0 to 64"),
    "polygon all far away": (outline(*[1e9] * 6), "polygon reaches from 1e+09 to 1e+09"),
    "polygon with NaN": (outline(0, 0, float("nan"), 0, 9, 9), "polygon [0, 0, nan, 0, 9, 9] is not a list of numbers"),
    "polygon with inf": (outline(0, 0, float("inf"), 0, 9, 9), "polygon [0, 0, inf, 0, 9, 9] is not a list of numbers"),
    "polygon of long numbers": (outline(0, 0, 10**400, 0, 9, 9), "is not a list of numbers"),
    "polygon of texts": (outline(0, 0, "5", 0, 9, 9), "polygon [0, 0, '5', 0, 9, 9] is not a list of numbers"),
    "polygon of points": (outline([0, 0], [5, 5], [0, 9]), "polygon [[0, 0], [5, 5], [0, 9]] is not a list of numbers"),
    "endless outline": (outline(*[0, 0, 96, 64] * 30_000), "times across its box, more than 10000"),
    "long number": (object_with(bbox=[0, 0, 10**400, 5]), "is not [x, y, width, height]"),
    "long id": (object_with(id=10**400), "the id is neither a number nor a text"),
    "deep record": (lambda c: c["images"].append(deep()), "image (nested too deeply): not a record"),
    "long width": (lambda c: c["images"][5].update(width=10**400), "has 2^31 pixels or more"),
    "pixels": (lambda c: c["images"][5].update(width=65536, height=65536), "65536 x 65536 has 2^31 pixels or more"),
    "half a pixel": (lambda c: c["images"][5].update(height=64.5), "width 96 and height 64.5 are not whole numbers"),
    "size of fractions": (
        object_with(segmentation={"size": [64.0, 96.0], "counts": [6144]}),
        "RLE mask of size [64.0, 96.0], not [64, 96]",
    ),
    "keypoint far away": (object_with(keypoints=[1e10, 1, 2] * 17), "a keypoint reaches from 1e+10 to 1e+10"),
    "image is no record": (lambda c: c["images"].append(5), "image 5: not a record"),
    "object is no record": (lambda c: c["annotations"].append(["a"]), "annotation ['a'] of image None: not a record"),
    "category is no record": (lambda c: c["categories"].append(None), "category None: not a record"),
    "text id among numbers": (
        lambda c: c["images"][5].update(id="6"),
        "image 6: the id is a str, unlike the first one, 1",
    ),
    "list as image id": (lambda c: c["images"][5].update(id=[6]), "the id is neither a number nor a text"),
    "list as id": (object_with(id=[1]), "the id is neither a number nor a text"),
    "list as image": (object_with(image_id=[1]), "of image [1]: unknown image"),
    "list as category": (object_with(category_id=[7]), "unknown category [7]"),
    "file name": (lambda c: c["images"][5].update(file_name=7), "file_name 7 is not a text"),
    "file name's length": (lambda c: c["images"][5].update(file_name="a" * 999), "missing image"),
    "category's keypoints": (
        lambda c: c["categories"].append({"id": 9, "name": "a", "keypoints": 5}),
        "keypoints 5 is not a list of names",
    ),
    "category's name": (lambda c: c["categories"].append({"id": 9, "name": 5}), "category 9: no name"),
    "no id": (lambda c: c["annotations"][0].pop("id"), "annotation None of image 1: no id"),
    "segmentation": (object_with(segmentation=5), "segmentation 5 is neither polygons nor RLE"),
    "keypoints": (object_with(keypoints=5), "keypoints 5 is not a list of numbers"),
    "crowd as text": (object_with(iscrowd="0"), "iscrowd '0' is not 0 or 1"),
    "crowd is null": (object_with(iscrowd=None), "iscrowd None is not 0 or 1"),
    "area as text": (object_with(area="12"), "area '12' is not a number"),
    "area is null": (object_with(area=None), "area None is not a number"),
    "counts": (mask_of(5), "RLE counts 5 cannot be decoded"),
    "counts of garbage": (mask_of("\x01~~"), "cannot be decoded"),
    "counts cut": (mask_of("ZZZ"), "cannot be decoded"),
    "counts without end": (mask_of("o" * 40 + "0"), "cannot be decoded"),
    "counts too short": (mask_of("55"), "RLE counts of 10 pixels, not 6144"),
    "list of counts": (mask_of([6144, 1]), "RLE counts of 6145 pixels, not 6144"),
    "negative counts": (mask_of([6145, -1]), "cannot be decoded"),
}


@pytest.mark.parametrize("kind", BAD)
def test_malformed_record_is_named_once_and_can_be_left_out(people: tuple[Content, Path], kind: str) -> None:
    content, images = people
    spoil, message = BAD[kind]
    spoil(content)
    problems = list(check(content, images, masks=True, keypoints=17))
    assert len(problems) == 1 and message in problems[0].text
    assert not list(check(leave_out(content, problems), images, masks=True, keypoints=17))


def test_null_keypoints_of_a_category_are_none(tmp_path: Path) -> None:
    annotations, images = coco_data.resolve(tiny_coco.write(tmp_path))
    content = coco_data.read(annotations)
    content["categories"][0]["keypoints"] = None
    assert not list(check(content, images))


@pytest.mark.parametrize("seed", range(20))
def test_good_run_lengths_are_good(people: tuple[Content, Path], seed: int) -> None:
    content, images = people
    rng = np.random.default_rng(seed)
    full = np.asfortranarray(rng.random((64, 96)) < rng.choice([0, 0.001, 0.1, 0.5, 1]), dtype=np.uint8)
    rle: Any = coco_mask.encode(full)
    for counts in (rle["counts"].decode(), [0, 64 * 96]):
        mask_of(counts)(content)
        assert not list(check(content, images))


def test_large_run_lengths_are_good(people: tuple[Content, Path]) -> None:
    content, images = people
    size = [8000, 9000]
    content["images"][0].update(height=size[0], width=size[1])
    rle: Any = coco_mask.merge(coco_mask.frPyObjects([[9.0, 9.0, 8000.0, 5000.0, 30.0, 7999.0]], *size))
    object_with(segmentation={"size": size, "counts": rle["counts"].decode()})(content)
    assert not list(check(content, images))


# Every way from an annotation file to pycocotools. A regression ends the process, which is why another one runs it.
READERS = """
import json, sys
from pathlib import Path
from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.coco import data as coco_data
from transfer.coco import pictures as visualize
from transfer.coco import results as coco_results
from transfer.torchvision_engine.data import load_coco

folder = Path(sys.argv[1])
name = tiny_coco.write(folder)
path = folder / "annotations.json"
good = json.loads(path.read_text())
far, short = [[0, 0, 1e9, 0, 9, 9]], {"size": [64, 96], "counts": "55"}
for mask in (far, [[0, 0, float("nan"), 0, 9, 9]], short, short | {"counts": [5, 5]}, short | {"counts": [0, 10**9]}):
    good["annotations"][0]["segmentation"] = mask
    path.write_text(json.dumps(good))
    for reader in (
        lambda: load_coco(name),
        lambda: coco_results.evaluate(path, [], ["segm"]),
        lambda: visualize.draw(path, folder, [], folder / "out", count=6),
    ):
        try:
            reader()
            print("accepted")
        except UserError as error:
            print("refused" if "annotation 1: " in str(error) else error)
"""


def test_no_reader_gives_pycocotools_what_crashes_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READERS, str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 15), done.stderr


# What is accepted at the very limit: far coordinates, a long outline, a tiny box, a large image.
LIMITS = """
import json, sys
import numpy as np
from pathlib import Path
from pycocotools import mask as coco_mask
from tests.transfer import tiny_coco
from transfer.coco import data as coco_data
from transfer.torchvision_engine.heads import rasterize

tiny_coco.write(Path(sys.argv[1]))
path = Path(sys.argv[1]) / "annotations.json"
content = json.loads(path.read_text())
for side, box, polygon in (
    (90, [0, 0, 90, 90], [-90, -90, 180, 180] * 800),
    (90, [5, 5, 1e-9, 1e-9], [0, 0, 90, 0, 0, 90]),
    (46_000, [0, 0, 46_000, 46_000], [-46_000, -46_000, 92_000, -46_000, 92_000, 92_000]),
):
    content["images"][0].update(width=side, height=side)
    content["annotations"][0].update(bbox=box, segmentation=[polygon])
    path.write_text(json.dumps(content))
    (outline,) = coco_data.read(path)["annotations"][0]["segmentation"]
    coco_mask.area(coco_mask.merge(coco_mask.frPyObjects([outline], side, side)))
    x, y, w, h = box
    rasterize([np.array(outline, np.float64)], np.array([x, y, x + w, y + h], np.float32), 28)
    print("survived")
"""


def test_what_is_accepted_is_safe(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITS, str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stdout.split()) == (0, ["survived"] * 3), done.stderr
