"""A bad record of an annotation file is named once, whatever JSON it holds, and can be dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.transfer import tiny_coco
from transfer.coco import data
from transfer.coco.check import box_format_problem, check, drop_bad

NAN = float("nan")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a good data set of people, its annotations beside the images."""
    folder = tmp_path_factory.mktemp("data")
    tiny_coco.write(folder, keypoints=True)
    return folder


@pytest.fixture
def people(images: Path) -> dict[str, Any]:
    return data.read(images / "annotations.json")


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("images", {"file_name": "gone.png"}, "image 1: missing image"),
        ("images", lambda c: c["images"].append(c["images"][0]), "image 1: duplicate id"),
        ("images", {"width": 0}, "image 1: width 0 and height 64 are not whole numbers above 0"),
        ("images", lambda c: c["images"].append(5), "image 5: malformed"),
        ("categories", lambda c: c["categories"].append(c["categories"][0]), "category 7: duplicate id"),
        ("categories", lambda c: c["categories"].append({"id": 9, "name": ""}), "category 9: no name"),
        ("annotations", {"bbox": [5, 5, 20]}, "box [5, 5, 20] is not [x, y, width, height]"),
        ("annotations", {"bbox": [5, 5, NAN, 4]}, "is not [x, y, width, height]"),
        ("annotations", {"category_id": 99}, "unknown category 99"),
        ("annotations", {"image_id": 99}, "annotation 1 of image 99: unknown or bad image"),
        ("annotations", lambda c: c["annotations"][1].update(id=1), "annotation 1 of image 1: duplicate id"),
        ("annotations", lambda c: c["annotations"][0].pop("id"), "annotation None of image 1: no id"),
        ("annotations", {"iscrowd": None}, "iscrowd None is not 0 or 1"),
        ("annotations", {"segmentation": []}, "no mask (if none has one, set MODEL.MASK_ON False)"),
        ("annotations", {"segmentation": [[1, 1, 2, 2]]}, "polygon of 4 numbers"),
        ("annotations", {"segmentation": [[[0, 0], [5, 5], [0, 9]]]}, "annotation 1 of image 1: malformed"),
        ("annotations", {"segmentation": {"size": [9, 9], "counts": "x"}}, "RLE mask of size [9, 9], not [64, 96]"),
        ("annotations", {"keypoints": [1, 1, 2] * 16}, "wrong keypoint count: 16, not 17"),
        ("annotations", {"num_keypoints": 30}, "wrong keypoint count: num_keypoints is 30"),
        ("annotations", {"keypoints": None}, "no keypoints (if none has any, set MODEL.KEYPOINT_ON False)"),
    ],
)
def test_a_bad_record_is_named_once_and_can_be_skipped(
    people: dict[str, Any], images: Path, section: str, change: Any, message: str
) -> None:
    if callable(change):
        change(people)
    else:
        people[section][0].update(change)
    problems = list(check(people, images, masks=True, keypoints=17))
    assert message in problems[0].text and problems[0].section == section
    remaining = drop_bad(people, problems)
    assert not list(check(remaining, images, masks=True, keypoints=17))
    assert len(remaining[section]) == len(people[section]) - 1


def test_good_records_are_good(people: dict[str, Any], images: Path) -> None:
    x, y, w, _ = people["annotations"][0]["bbox"]
    people["annotations"][0]["bbox"] = [x, y, w, 0]  # as two boxes of COCO's own train2017; the engines drop it
    people["annotations"][1]["bbox"] = [x, y, 500, 500]  # over the border: clipped
    assert not list(check(people, images, masks=True, keypoints=17))
    for record in people["annotations"]:
        del record["keypoints"]
    assert not list(check(people, images))


def test_boxes_in_another_format_are_named() -> None:
    images = [{"id": 1, "width": 100, "height": 80}]

    def problem(*boxes: list[float]) -> str:
        return box_format_problem({"images": images, "annotations": [{"image_id": 1, "bbox": box} for box in boxes]})

    assert "between 0 and 1" in problem([0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5])
    assert "[x0, y0, x1, y1]" in problem([60, 50, 90, 70], [50, 10, 80, 30], [1, 1, 9, 9])
    over_the_border_and_without_area = problem([60, 50, 60, 70], [50, 10, 20, 30], [20, 20, 0, 0])
    assert over_the_border_and_without_area == ""
