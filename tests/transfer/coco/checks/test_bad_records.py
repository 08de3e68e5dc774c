"""A bad record of an annotation file is named once, whatever JSON it contains, and can be skipped."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from pretrain.common.images import read_image
from tests.transfer import tiny_coco
from transfer.coco.checks.bad_records import Rules, drop_bad, find_box_format_problem, find_problems, normalize
from transfer.coco.checks.image_sizes import read_upright_size
from transfer.coco.checks.masks import find_mask_problem
from transfer.coco.reading import read_annotations

NAN = float("nan")
STRICTEST = Rules(masks=True, keypoints=17)
PIXELS = np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a valid data set of people, with the annotations next to the images."""
    folder = tmp_path_factory.mktemp("data")
    tiny_coco.write(folder, keypoints=True)
    return folder


@pytest.fixture
def people(images: Path) -> dict[str, Any]:
    return read_annotations(images / "annotations.json")


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("images", {"file_name": "gone.png"}, "image 1: cannot read image"),
        ("images", {"file_name": None}, "image 1: file_name None is not text"),
        ("images", {"id": "1"}, "image '1': id '1' is not a number like most ids"),
        ("images", {"width": 0}, "image 1: width 0 and height 64 are not whole numbers above 0"),
        ("images", {"width": 95.5}, "image 1: width 95.5 and height 64 are not whole numbers"),
        ("images", {"width": 64, "height": 96}, "1.png has 96 x 64 pixels (after any EXIF rotation"),
        ("images", lambda c: c["images"].append(5), "image 5: malformed"),
        ("categories", lambda c: c["categories"].append({"id": "8", "name": "a"}), "id '8' is not a number"),
        ("categories", lambda c: c["categories"].append({"id": 9, "name": ""}), "category 9: no name"),
        ("categories", lambda c: c["categories"].append({"id": 9, "name": "a", "keypoints": "b"}), "names 1 keypoints"),
        ("annotations", {"bbox": [5, 5, 20]}, "box [5, 5, 20] is not [x, y, width, height]"),
        ("annotations", {"bbox": [5, 5, NAN, 4]}, "is not [x, y, width, height]"),
        ("annotations", {"bbox": [20, 30, 10, -24]}, "box [20, 30, 10, -24] has width 10 and height -24"),
        ("annotations", {"bbox": [20, 30, 0, 9]}, "has width 0 and height 9"),
        ("annotations", {"bbox": [96, 20, 9, 9]}, "box [96, 20, 9, 9] lies outside its image, 96 x 64"),
        ("annotations", {"bbox": [20, -9, 9, 9]}, "lies outside its image, 96 x 64"),
        ("annotations", {"category_id": 99}, "annotation 1 of image 1: unknown category 99"),
        ("annotations", {"image_id": 99}, "annotation 1 of image 99: unknown or bad image"),
        ("annotations", {"area": None}, "area None is not a number"),
        ("annotations", {"iscrowd": "0"}, "iscrowd '0' is not 0 or 1"),
        ("annotations", {"segmentation": []}, "no mask (if none has one, set MODEL.MASK_ON False)"),
        ("annotations", {"segmentation": [[-9, -9, -2, -9, -2, -2]]}, "-9 to -2 in x, have no area in its box"),
        ("annotations", {"segmentation": [[0.3, 0.1, 0.5, 0.1, 0.5, 0.4]]}, "0.3 to 0.5 in x, have no area in its box"),
        ("annotations", {"bbox": [9, 9, 20, 20], "segmentation": [[15, 15] * 3]}, "its polygons, 15 to 15 in x, have"),
        ("annotations", {"segmentation": {"size": [9, 9], "counts": "x"}}, "RLE mask of size [9, 9], not [64, 96]"),
        ("annotations", {"keypoints": [1, 1, 2] * 16}, "wrong keypoint count: 16, not 17"),
        ("annotations", {"keypoints": [None, 1, 2] * 17}, "keypoints [None, 1, 2, None, 1, 2, ...] are not numbers"),
        ("annotations", {"num_keypoints": 30}, "wrong keypoint count: num_keypoints is 30"),
        ("annotations", {"keypoints": None}, "no keypoints (if no object has any, set MODEL."),
    ],
)
def test_a_bad_record_is_named_once_and_can_be_skipped(people, images, section, change, message):
    if callable(change):
        change(people)
    else:
        people[section][0].update(change)
    problems = find_problems(people, images, STRICTEST)
    assert message in problems[0].text and problems[0].section == section
    remaining = drop_bad(people, problems)
    assert not find_problems(remaining, images, STRICTEST)
    assert len(remaining[section]) == len(people[section]) - 1


@pytest.mark.parametrize("spelled", ["1.png", "./1.png", "sub/../1.png", "sub/link/1.png"])
def test_images_that_share_a_file_are_bad(people: dict[str, Any], images: Path, spelled: str) -> None:
    """Each would be trained and scored with some of the objects of the file alone."""
    (images / "sub").mkdir(exist_ok=True)
    if not (images / "sub" / "link").is_symlink():
        (images / "sub" / "link").symlink_to(images)
    people["images"][1] |= {"file_name": spelled, "width": 96, "height": 64}
    problems = find_problems(people, images, Rules())
    texts = [problem.text for problem in problems if problem.section == "images"]
    assert texts == [
        f"image {i}: 2 images are the file {name!r}; merge them, or give each its own file"
        for i, name in ((1, "1.png"), (2, spelled))
    ]
    assert not {1, 2} & {record["image_id"] for record in drop_bad(people, problems)["annotations"]}
    assert not find_problems(people, images, Rules(strict=False))


def test_a_file_whose_name_only_looks_the_same_is_pointed_out(people: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "gro\u0308\u00dfe.png").touch()  # as macOS writes the name
    people["images"][0]["file_name"] = "gr\u00f6\u00dfe.png"
    problem = find_problems(people, tmp_path, Rules())[0]
    assert "No such file" in problem.text and "exists in Unicode's form NFD: rename it" in problem.text
    (tmp_path / "2.png").touch()
    assert "Unicode" not in find_problems(people, tmp_path, Rules())[1].text


def test_numbers_are_names_of_categories(people: dict[str, Any]) -> None:
    people["categories"][0]["name"] = 0  # of the digit
    assert not find_problems(people, None, Rules())
    assert normalize(people, masks=False, keypoints=False)["categories"][0]["name"] == "0"


@pytest.mark.parametrize("section", ["images", "categories"])
def test_all_records_of_an_ambiguous_id_are_bad_and_all_their_objects(people: dict[str, Any], section: str) -> None:
    people["categories"].append({"id": 8, "name": "b"})
    people["annotations"][0]["category_id"] = 8
    first, second, *good_records = people[section]
    second["id"] = first["id"]
    problems = find_problems(people, None, Rules())
    assert [p.text.partition(": ")[2] for p in problems if p.section == section] == ["duplicate id"] * 2
    remaining = drop_bad(people, problems)
    assert remaining[section] == good_records
    named = {"images": "image_id", "categories": "category_id"}[section]
    assert not any(record[named] == first["id"] for record in remaining["annotations"])


def test_valid_records_have_no_problems(people: dict[str, Any], images: Path) -> None:
    x, y, w, _ = people["annotations"][0]["bbox"]
    people["annotations"][1]["bbox"] = [x, y, 500, 500]  # over the border: clipped
    people["annotations"][2]["segmentation"].insert(0, [1, 1, 2, 2])  # next to a good polygon
    people["annotations"][5] |= {"iscrowd": 1, "segmentation": [[15, 15] * 3]}
    people["annotations"][3]["id"] = people["annotations"][4]["id"]  # ids that start again in each image
    people["images"][0] |= {"width": 96.0, "height": 64.0}
    assert not find_problems(people, images, STRICTEST)
    people["annotations"][0] |= {"bbox": [x, y, w, 0], "keypoints": "not read", "segmentation": [[]]}
    assert not find_problems(people, images, Rules(strict=False)), "as two boxes of COCO's own train2017"


def test_both_engines_read_one_form(people: dict[str, Any]) -> None:
    stray = [5, 5, 9, 9]
    people["images"][0] |= {"width": 96.0}
    people["annotations"][0] |= {"ignore": 1, "id": 7}
    people["annotations"][1]["segmentation"].append(stray)
    masks = normalize(people, masks=True, keypoints=True)
    assert type(masks["images"][0]["width"]) is int
    first, second, third, *_ = masks["annotations"]
    assert first["iscrowd"] == 1 and "ignore" not in first and second["iscrowd"] == 0
    assert stray not in second["segmentation"] and len(second["segmentation"]) == 1
    assert [record["id"] for record in masks["annotations"]] == list(range(1, 11))
    assert third == people["annotations"][2], "what is in order is not changed"
    people["annotations"][0]["segmentation"] = [1, 1, 9, 1, 9, 9]  # flat, which only masks would be refused for
    boxes = normalize(people, masks=False, keypoints=False)
    assert not any({"segmentation", "keypoints", "num_keypoints"} & set(record) for record in boxes["annotations"])


def test_boxes_in_another_format_are_named() -> None:
    images = [{"id": 1, "width": 100, "height": 80}]

    def problem(*boxes: list[float], **fields: Any) -> str:
        records = [{"image_id": 1, "bbox": box, **fields} for box in boxes]
        return find_box_format_problem({"images": images, "annotations": records})

    assert "between 0 and 1" in problem([0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5])
    normalized = [[0.1, 0.2, 0.3, 0.4]] * 2
    assert "2 of 5 boxes" in problem(*[[30.0, 8.0, 20.0, 30.0]] * 3, *normalized), "the second part of a merged file"
    assert "normalized" in problem(*[[30.0, 8.0, 20.0, 30.0]] * 11_000, *normalized * 500), "a large one"
    assert problem(*[[30.0, 8.0, 20.0, 30.0]] * 3, normalized[0]) == "", "a single small box"
    assert "[x0, y0, x1, y1]" in problem([60, 50, 90, 70], [50, 10, 80, 30], [1, 1, 9, 9])
    assert problem([60, 50, 60, 70], [50, 10, 20, 30], [20, 20, 0, 0]) == "", "over the border, and without area"
    box: list[float] = [30, 8, 20, 30]
    outline = [0.3, 0.1, 0.5, 0.1, 0.5, 0.4]
    assert "its polygons lie between 0 and 1" in problem(box, segmentation=[outline])
    assert "its keypoints lie between 0 and 1" in problem(box, keypoints=[0.3, 0.1, 2, 0.5, 0.4, 1])
    assert problem(box, keypoints=[0, 0, 0] * 2) == "", "not labeled"


@pytest.mark.parametrize("seed", range(8))
def test_rle_is_read_as_pycocotools_writes_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = rng.integers(2, 300, 2).tolist()
    pixels = rng.random((height, width)) < (0.5 if seed % 2 else 0.001)
    pixels[: height // 2, width // 3 :] = True
    code: Any = coco_mask.encode(np.asfortranarray(pixels, np.uint8))
    size = [height, width]
    counts = code["counts"].decode()
    runs = np.diff(np.flatnonzero(np.diff(pixels.ravel("F"), prepend=False, append=not pixels[-1, -1])), prepend=0)
    for good in (counts, runs.tolist()):
        assert find_mask_problem({"size": size, "counts": good}, [], width, height) == ""
    shorter: Any = coco_mask.encode(np.asfortranarray(pixels[:-1], np.uint8))
    for bad in (shorter["counts"].decode(), runs[:-1].tolist(), [*runs.tolist()[:-1], 99999]):
        text = find_mask_problem({"size": size, "counts": bad}, [], width, height)
        assert f"do not sum to {height * width}" in text


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"size": [8, 6]}, "None do not sum to 48"),
        ({"size": [8, 6], "counts": "garbage!!"}, "'garbage!!' do not sum to 48"),
        ({"size": [8, 6], "counts": "T"}, "'T' do not sum to 48"),  # ends in the middle of a number
        ({"size": [8, 6], "counts": "\u7ea2"}, "do not sum to 48"),
        ({"size": [8, 6], "counts": [50, -2]}, "[50, -2] do not sum to 48"),
        ({"size": [8, 6], "counts": [24.5, 23.5]}, "[24.5, 23.5] do not sum to 48"),
        ({"size": [8, 6], "counts": [48]}, "or are empty"),
        ({"size": [6, 8], "counts": [0, 48]}, "size [6, 8], not [8, 6]"),
        (None, "no mask"),
        ([[]], "has no polygon of 3 points"),
        ([[1, 1, 2, 2], [1, 2, 3, 4, 5, 6, 7]], "has no polygon of 3 points"),
        ([1, 1, 5, 5, 1, 5], "neither RLE nor a list of polygons"),
        ([[[1, 1], [5, 5], [1, 5]]], "neither RLE nor a list of polygons"),
        ([[1, 1, 5, 5, 1, float("nan")]], "neither RLE nor a list of polygons"),
        ([{"size": [8, 6], "counts": [0, 48]}], "neither RLE nor a list of polygons"),
        ("mask.png", "neither RLE nor a list of polygons"),
    ],
)
def test_an_invalid_mask_is_named(mask: Any, message: str) -> None:
    assert message in find_mask_problem(mask, [], 6, 8)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif", "bmp"])
@pytest.mark.parametrize("decode", [False, True])
def test_sizes_are_the_decoded_images(tmp_path: Path, kind: str, decode: bool) -> None:
    paths = [str(tmp_path / f"{orientation}.{kind}") for orientation in (1, 3, 6, 8)]
    for orientation, path in zip((1, 3, 6, 8), paths, strict=True):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(PIXELS).save(path, exif=exif)  # a BMP has none
    sizes = {path: read_image(path).shape[1::-1] for path in paths}
    assert {path: read_upright_size(path, decode=decode) for path in paths} == sizes
    assert kind == "bmp" or set(sizes.values()) == {(40, 30), (30, 40)}


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif", "bmp"])
def test_a_damaged_image_has_no_size(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    Image.fromarray(PIXELS).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"appended by a telephone")
    assert read_upright_size(str(path)) == (40, 30)
    for damaged in (whole[: len(whole) // 2], b"", b"<html></html>"):
        path.write_bytes(damaged)
        assert read_upright_size(str(path)) is None
    path.unlink()
    os.mkfifo(path)  # opening it would wait for somebody who writes to it
    assert read_upright_size(str(path)) is None
