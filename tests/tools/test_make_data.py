"""Generated data sets are complete or absent, fixed by the seed, valid for pycocotools, and without shortcuts."""

import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from pretrain.data.datasets import load
from tests.errors import refused
from tools import make_data
from tools.data import digits as make_digits

DIGITS = ["--images", "60", "--val-images", "30", "--scenes", "12", "--val-scenes", "6", "--size", "24"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "digits"
    make_data.main(["digits", "--output", str(folder), *DIGITS])
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_same_seed_makes_the_same_bytes(digits: Path, tmp_path: Path):
    make_data.main(["digits", "--output", str(tmp_path / "again"), *DIGITS])
    assert files(tmp_path / "again") == files(digits)
    make_data.main(["digits", "--output", str(tmp_path / "other"), *DIGITS, "--seed", "1"])
    other = files(tmp_path / "other")
    same = files(digits)
    assert all(other[name] != same[name] for name in same.keys() & other.keys())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_used_folder_is_left_as_it_is(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = {p: p.stat().st_mtime_ns for p in digits.rglob("*")}
    words = ["digits", "--output", str(digits), *DIGITS]
    make_data.main(words)
    assert capsys.readouterr().out == f"{digits} already exists\n"
    refused(lambda: make_data.main([*words, "--seed", "5"]), digits, "differ in seed")
    assert {p: p.stat().st_mtime_ns for p in digits.rglob("*")} == before
    (tmp_path / "mine.txt").write_text("precious")
    refused(lambda: make_data.main(["digits", "--output", str(tmp_path), *DIGITS]), tmp_path, "contains something else")
    assert files(tmp_path) == {"mine.txt": b"precious"}


def test_digits_as_an_image_folder(digits: Path):
    train = load(f"folder:{digits / 'images'}", "train")
    val = load(f"folder:{digits / 'images'}", "val")
    assert train.classes == val.classes == [str(i) for i in range(10)]
    assert train.labels is not None and np.bincount(train.labels).tolist() == [6] * 10
    assert len(val) == 30 and train.read(0).shape == (24, 24, 3)


def test_the_background_tells_images_apart_no_better_than_chance(tmp_path: Path):
    """At the borders, brightness and noise vary as much within an image as between images."""
    make_data.main(["digits", "--output", str(tmp_path / "d"), "--images", "200", "--scenes", "1", "--val-scenes", "1"])
    data = load(f"folder:{tmp_path / 'd' / 'images'}", "train")
    corners = np.array([[np.median(data.read(i)[s]) for s in (np.s_[:4, :4], np.s_[-4:, -4:])] for i in range(200)])
    assert abs(np.corrcoef(corners.T)[0, 1]) < 0.25
    assert corners.std() < 6


def test_train_and_val_digits_are_disjoint():
    split = make_digits.split_digits(0)
    train = {ink.tobytes() for part in split["train"] for ink in part}
    assert not any(ink.tobytes() in train for part in split["val"] for ink in part)
    assert sum(map(len, split["train"])) + sum(map(len, split["val"])) == 1797


@pytest.mark.parametrize("split", ["train", "val"])
def test_digits_as_coco(digits: Path, split: str):
    coco: Any = COCO(str(digits / "coco" / "annotations" / f"instances_{split}.json"))
    assert [c["name"] for c in coco.loadCats(sorted(coco.getCatIds()))] == [str(i) for i in range(10)]
    assert len(coco.getImgIds()) == {"train": 12, "val": 6}[split]
    for image in coco.loadImgs(coco.getImgIds()):
        pixels: Any = cv2.imread(str(digits / "coco" / split / image["file_name"]), cv2.IMREAD_GRAYSCALE)
        assert pixels.shape == (image["height"], image["width"])
        annotations = coco.loadAnns(coco.getAnnIds(image["id"]))
        assert 2 <= len(annotations) <= 5
        masks = np.array([coco.annToMask(a).astype(bool) for a in annotations])
        for annotation, mask in zip(annotations, masks, strict=True):
            check_record(annotation, mask)
            assert pixels[mask].mean() > 120  # ink, holes filled, against a background of 72
        assert np.median(pixels[~masks.any(axis=0)]) < 90


def check_record(annotation: dict, mask: np.ndarray) -> None:
    """Check that box and area are those of the mask that pycocotools decodes; a study's tests call this, too."""
    rows = np.flatnonzero(mask.any(axis=1))
    columns = np.flatnonzero(mask.any(axis=0))
    box = [columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1]
    assert annotation["bbox"] == box and annotation["area"] == mask.sum() > 0


def test_a_second_run_beside_the_first_is_refused(tmp_path: Path):
    output = tmp_path / "digits"
    arguments = {"kind": "digits", "seed": 0}

    def write(folder: Path) -> None:
        words = (f"{output} is in use: a data set being written on ", f", process {os.getpid()}; wait")
        refused(lambda: make_data.make(output, arguments, lambda _: pytest.fail("written twice")), *words)
        (folder / "a.txt").write_text("whole")

    make_data.make(output, arguments, write)
    assert files(output).keys() == {"a.txt", "made.json"} and os.listdir(tmp_path) == ["digits"]
