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
from transfer.coco import data
from transfer.coco.check import box_format_problem, check, leave_out

Content = dict[str, Any]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a good data set of people, its annotations beside the images."""
    folder = tmp_path_factory.mktemp("data")
    tiny_coco.write(folder, keypoints=True)
    return folder


@pytest.fixture
def people(images: Path) -> Content:
    return data.read(images / "annotations.json")


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
    "missing image": (lambda c: c["images"][5].update(file_name="gone.png"), "image 6: missing image"),
    "image twice": (lambda c: c["images"].append(dict(c["images"][0])), "image 1: duplicate id"),
    "image size": (lambda c: c["images"][5].update(width=0), "image 6: width 0"),
    "box": (lambda c: c["annotations"][0].update(bbox=[5, 5, 20]), r"is not [x, y, width, height]"),
    "nan": (lambda c: c["annotations"][0].update(bbox=[5, 5, float("nan"), 4]), r"is not [x, y, width, height]"),
    "no mask": (lambda c: c["annotations"][0].update(segmentation=[]), "empty polygon or no mask"),
    "empty polygon": (lambda c: c["annotations"][0].update(segmentation=[[]]), "empty polygon (it has 0 numbers"),
    "short polygon": (
        lambda c: c["annotations"][0].update(segmentation=[[1, 1, 2, 2]]),
        "empty polygon (it has 4 numbers",
    ),
    "rle": (
        lambda c: c["annotations"][0].update(segmentation={"size": [9, 9], "counts": "x"}),
        "RLE mask of size [9, 9]",
    ),
    "category": (lambda c: c["annotations"][0].update(category_id=99), "unknown category 99"),
    "no image": (lambda c: c["annotations"][0].update(image_id=99), "annotation 1 of image 99: unknown image"),
    "annotation twice": (lambda c: c["annotations"][1].update(id=1), "duplicate id"),
    "keypoints": (lambda c: c["annotations"][0].update(keypoints=[1, 1, 2] * 16), "wrong keypoint count: 16, not 17"),
    "num_keypoints": (
        lambda c: c["annotations"][0].update(num_keypoints=30),
        "wrong keypoint count: num_keypoints is 30",
    ),
    "no keypoints": (lambda c: c["annotations"][0].pop("keypoints"), "no keypoints"),
    "category twice": (lambda c: c["categories"].append(dict(c["categories"][0])), "category 7: duplicate id"),
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
    "long id": (object_with(id=10**400), "the id is neither a number nor a string"),
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
    "list as image id": (lambda c: c["images"][5].update(id=[6]), "the id is neither a number nor a string"),
    "list as id": (object_with(id=[1]), "the id is neither a number nor a string"),
    "list as image": (object_with(image_id=[1]), "of image [1]: image_id [1] is neither a number nor a string"),
    "list as category": (object_with(category_id=[7]), "category_id [7] is neither a number nor a string"),
    "file name": (lambda c: c["images"][5].update(file_name=7), "file_name 7 is not a string"),
    "file name's length": (lambda c: c["images"][5].update(file_name="a" * 999), "missing image"),
    "category's keypoints": (
        lambda c: c["categories"].append({"id": 9, "name": "a", "keypoints": 5}),
        "keypoints 5 is not a list of names",
    ),
    "category's name": (lambda c: c["categories"].append({"id": 9, "name": 5}), "category 9: no name"),
    "category's name, obeyed": (
        lambda c: c["categories"].append({"id": 9, "name": "a\x1b]0;owned\x07"}),
        "category 9: control characters in a name, which a terminal would obey",
    ),
    "no id": (lambda c: c["annotations"][0].pop("id"), "annotation None of image 1: no id"),
    "segmentation": (object_with(segmentation=5), "segmentation 5 is neither polygons nor RLE"),
    "keypoints are a number": (object_with(keypoints=5), "keypoints 5 is not a list of numbers"),
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
def test_a_bad_record_is_named_once_and_can_be_skipped(people: Content, images: Path, kind: str) -> None:
    spoil, message = BAD[kind]
    spoil(people)
    problems = list(check(people, images, masks=True, keypoints=17))
    assert len(problems) == 1 and message in problems[0].text
    kept = leave_out(people, problems)
    assert not list(check(kept, images, masks=True, keypoints=17))
    assert len(kept[problems[0].section]) == len(people[problems[0].section]) - 1


def test_an_images_annotations_go_with_it(people: Content, images: Path) -> None:
    people["images"][0]["file_name"] = "gone.png"
    problems = list(check(people, images))
    assert [problem.section for problem in problems] == ["images"]  # its annotations are not named again
    assert all(record["image_id"] != 1 for record in leave_out(people, problems)["annotations"])


def test_good_records_are_good(people: Content, images: Path) -> None:
    assert not list(check(people, images, masks=True, keypoints=17))
    people["categories"][0]["keypoints"] = None  # means none
    for record in people["annotations"]:
        del record["keypoints"]
    assert not list(check(people, images))
    rng = np.random.default_rng(0)
    for density in [0, 0.001, 0.1, 0.5, 1] * 4:
        full = np.asfortranarray(rng.random((64, 96)) < density, dtype=np.uint8)
        rle: Any = coco_mask.encode(full)
        for counts in (rle["counts"].decode(), [0, 64 * 96]):
            mask_of(counts)(people)
            assert not list(check(people, images))
    size = [8000, 9000]
    people["images"][0].update(height=size[0], width=size[1])
    rle = coco_mask.merge(coco_mask.frPyObjects([[9.0, 9.0, 8000.0, 5000.0, 30.0, 7999.0]], *size))
    object_with(segmentation={"size": size, "counts": rle["counts"].decode()})(people)
    assert not list(check(people, images))


# Every way from an annotation file to pycocotools, with records that it must not see, then with what is accepted at the
# very limit: far coordinates, a long outline, a tiny box, a large image. A regression ends the process, which is why
# another one runs it.
READERS = """
import json, sys
from pathlib import Path
import numpy as np
from pycocotools import mask as coco_mask
from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.coco import data, pictures, results
from transfer.torchvision_engine.data import load_coco
from transfer.torchvision_engine.heads import rasterize

folder = Path(sys.argv[1])
name = tiny_coco.write(folder)
path = folder / "annotations.json"
content = json.loads(path.read_text())
far, short = [[0, 0, 1e9, 0, 9, 9]], {"size": [64, 96], "counts": "55"}
for mask in (far, [[0, 0, float("nan"), 0, 9, 9]], short, short | {"counts": [5, 5]}, short | {"counts": [0, 10**9]}):
    content["annotations"][0]["segmentation"] = mask
    path.write_text(json.dumps(content))
    for reader in (
        lambda: load_coco(name),
        lambda: results.evaluate(path, [], ["segm"]),
        lambda: pictures.draw(path, folder, [], folder / "out", count=6),
    ):
        try:
            reader()
            print("accepted")
        except UserError as error:
            print("refused" if "annotation 1 of image 1: " in str(error) else error)

for side, box, polygon in (
    (90, [0, 0, 90, 90], [-90, -90, 180, 180] * 800),
    (90, [5, 5, 1e-9, 1e-9], [0, 0, 90, 0, 0, 90]),
    (46_000, [0, 0, 46_000, 46_000], [-46_000, -46_000, 92_000, -46_000, 92_000, 92_000]),
):
    content["images"][0].update(width=side, height=side)
    content["annotations"][0].update(bbox=box, segmentation=[polygon])
    path.write_text(json.dumps(content))
    (outline,) = data.read(path)["annotations"][0]["segmentation"]
    coco_mask.area(coco_mask.merge(coco_mask.frPyObjects([outline], side, side)))
    x, y, w, h = box
    rasterize([np.array(outline, np.float64)], np.array([x, y, x + w, y + h], np.float32), 28)
    print("survived")
"""


def test_no_reader_gives_pycocotools_what_crashes_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READERS, str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 15 + ["survived"] * 3), done.stderr


def test_boxes_in_another_format_are_named() -> None:
    images = [{"id": 1, "width": 100, "height": 80}]

    def problem(*boxes: list[float]) -> str:
        return box_format_problem({"images": images, "annotations": [{"image_id": 1, "bbox": box} for box in boxes]})

    assert "between 0 and 1" in problem([0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5])
    assert "[x0, y0, x1, y1]" in problem([60, 50, 90, 70], [50, 10, 80, 30], [1, 1, 9, 9])
    assert (
        problem([60, 50, 60, 70], [50, 10, 20, 30], [20, 20, 0, 0]) == ""
    )  # over the border, and without area: clipped, dropped
