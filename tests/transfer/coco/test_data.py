"""Data sets by name or two paths; every kind of bad record is named, and can be left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.coco import data as coco_data


@pytest.fixture
def people(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    name = tiny_coco.write(tmp_path / "data", keypoints=True)
    return name, coco_data.read(coco_data.resolve(name)[0])


def messages(content: dict[str, Any], name: str, **wanted: Any) -> list[str]:
    return [problem.text for problem in coco_data.check(content, coco_data.resolve(name)[1], **wanted)]


def test_good_data_set_has_no_problems(people: tuple[str, dict[str, Any]]) -> None:
    name, content = people
    assert messages(content, name, masks=True, keypoints=17) == []


def first(content: dict[str, Any]) -> dict[str, Any]:
    return content["annotations"][0]


BAD = {
    "missing image": (lambda c: c["images"][5].update(file_name="gone.png"), "image 6: missing image"),
    "image twice": (lambda c: c["images"].append(dict(c["images"][0])), "image 1: duplicate id"),
    "image size": (lambda c: c["images"][5].update(width=0), "image 6: width 0"),
    "outside": (lambda c: first(c).update(bbox=[0, 0, 500, 20]), "is outside the image of 96 x 64"),
    "no area": (lambda c: first(c).update(bbox=[5, 5, 0, 20]), "has no area"),
    "box": (lambda c: first(c).update(bbox=[5, 5, 20]), r"is not [x, y, width, height]"),
    "nan": (lambda c: first(c).update(bbox=[5, 5, float("nan"), 4]), r"is not [x, y, width, height]"),
    "no mask": (lambda c: first(c).update(segmentation=[]), "empty polygon or no mask"),
    "empty polygon": (lambda c: first(c).update(segmentation=[[]]), "empty polygon (it has 0 numbers"),
    "short polygon": (lambda c: first(c).update(segmentation=[[1, 1, 2, 2]]), "empty polygon (it has 4 numbers"),
    "rle": (lambda c: first(c).update(segmentation={"size": [9, 9], "counts": "x"}), "RLE mask of size [9, 9]"),
    "category": (lambda c: first(c).update(category_id=99), "unknown category 99"),
    "no image": (lambda c: first(c).update(image_id=99), "annotation 1 of image 99: unknown image"),
    "annotation twice": (lambda c: c["annotations"][1].update(id=1), "duplicate id"),
    "keypoints": (lambda c: first(c).update(keypoints=[1, 1, 2] * 16), "wrong keypoint count: 16, not 17"),
    "num_keypoints": (lambda c: first(c).update(num_keypoints=30), "wrong keypoint count: num_keypoints is 30"),
    "no keypoints": (lambda c: first(c).pop("keypoints"), "no keypoints"),
    "category twice": (lambda c: c["categories"].append(dict(c["categories"][0])), "category 7: duplicate id"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_record_is_named_once_and_can_be_left_out(people: tuple[str, dict[str, Any]], kind: str) -> None:
    name, content = people
    spoil, message = BAD[kind]
    spoil(content)
    problems = list(coco_data.check(content, coco_data.resolve(name)[1], masks=True, keypoints=17))
    assert len(problems) == 1 and message in problems[0].text
    kept = coco_data.leave_out(content, problems)
    assert messages(kept, name, masks=True, keypoints=17) == []
    section = problems[0].section
    assert len(kept[section]) == len(content[section]) - 1


def test_an_images_annotations_go_with_it(people: tuple[str, dict[str, Any]]) -> None:
    name, content = people
    content["images"][0]["file_name"] = "gone.png"
    problems = list(coco_data.check(content, coco_data.resolve(name)[1]))
    assert [problem.section for problem in problems] == ["images"]  # its annotations are not named again
    assert all(record["image_id"] != 1 for record in coco_data.leave_out(content, problems)["annotations"])


def test_prepare_fails_or_leaves_out(people: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    name, content = people
    first(content)["bbox"] = [0, 0, 500, 20]
    annotations, images = coco_data.resolve(name)
    annotations.write_text(json.dumps(content))
    keys = {"MODEL__ROI_HEADS__NUM_CLASSES": 1, "MODEL__KEYPOINT_ON": True}
    with pytest.raises(UserError, match=r"annotation 1 of image 1: box .* add :skip_bad"):
        coco_data.prepare(tiny_coco.config(tmp_path / "out", name, **keys))
    said: list[str] = []
    prepared = coco_data.prepare(tiny_coco.config(tmp_path / "out", f"{name}:skip_bad", **keys), said.append)
    assert "left out bad records: 1 annotations" in said[0] and "annotation 1 of image 1" in said[1]
    checked = coco_data.read(coco_data.resolve(prepared.DATASETS.TRAIN[0])[0])
    assert len(checked["annotations"]) == len(content["annotations"]) - 1
    assert prepared.DATASETS.TEST == prepared.DATASETS.TRAIN
    assert coco_data.resolve(prepared.DATASETS.TEST[0])[1] == images
    with pytest.raises(UserError, match=r"has 1 categories; set MODEL.ROI_HEADS.NUM_CLASSES 1, not 80"):
        coco_data.prepare(tiny_coco.config(tmp_path / "out", f"{name}:skip_bad", MODEL__ROI_HEADS__NUM_CLASSES=80))


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    with pytest.raises(
        UserError, match=r"no annotation file at .*coco/annotations/instances_val2017.json of coco_2017_val"
    ):
        coco_data.resolve("coco_2017_val")
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    (tmp_path / "coco" / "annotations" / "person_keypoints_train2017.json").write_text("{}")
    with pytest.raises(UserError, match=r"no image folder at .*train2017"):
        coco_data.resolve("keypoints_coco_2017_train")
    (tmp_path / "coco" / "train2017").mkdir()
    found = coco_data.find("keypoints_coco_2017_train")
    assert found.standard and found.images == tmp_path / "coco" / "train2017"
    with pytest.raises(UserError, match="did you mean 'coco_2017_val'"):
        coco_data.resolve("coco_2017_vall")
    for bad in ("coco:a.json", "coco:a.json:", "coco:a.json:b:maybe"):
        with pytest.raises(UserError, match="is not coco:ANNOTATIONS"):
            coco_data.resolve(bad)
    for text, message in (
        ("[]", "holds a JSON list, not an object"),
        ("{}", "has no list of images"),
        ("{", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (f'{{"images": [{"9" * 5000}]}}', "is not JSON"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(UserError, match=message):
            coco_data.read(tmp_path / "a.json")


@pytest.fixture
def twins(tmp_path: Path) -> list[str]:
    """Two data sets whose annotation files have the same base name, a bad record in each."""
    names = []
    for split in ("train", "valid"):
        name = tiny_coco.write(tmp_path / split)
        path = coco_data.resolve(name)[0]
        content = coco_data.read(path)
        first(content)["bbox"] = [0, 0, 0, 0]
        content["info"] = split
        path.write_text(json.dumps(content))
        names.append(f"{name}:skip_bad")
    return names


def test_every_data_set_has_files_of_its_own(twins: list[str], tmp_path: Path) -> None:
    cfg = tiny_coco.config(tmp_path / "out", twins[0], DATASETS__TEST=(twins[1],))
    prepared = coco_data.prepare(cfg)
    names = (*prepared.DATASETS.TRAIN, *prepared.DATASETS.TEST)
    contents = [coco_data.read(coco_data.resolve(name)[0]) for name in names]
    assert [content["info"] for content in contents] == ["train", "valid"]
    assert all("box [0, 0, 0, 0] has no area" in content["left_out"]["records"][0] for content in contents)
    assert len({coco_data.folder_name(name) for name in (*names, *twins)}) == 4
    assert coco_data.prepare(cfg).DATASETS == prepared.DATASETS  # a resumed run finds its own


def test_a_colon_in_output_dir_is_named(twins: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"OUTPUT_DIR .*a:b has a colon"):
        coco_data.prepare(tiny_coco.config(tmp_path / "a:b", twins[0]))


@pytest.mark.parametrize("key", ["MASK_ON", "KEYPOINT_ON"])
def test_a_detector_for_other_data_is_named(tmp_path: Path, key: str) -> None:
    name = tiny_coco.write(tmp_path / "data")
    content = coco_data.read(coco_data.resolve(name)[0])
    for record in content["annotations"]:
        record["segmentation"] = []
    coco_data.resolve(name)[0].write_text(json.dumps(content))
    for chosen in (name, f"{name}:skip_bad"):
        with pytest.raises(UserError, match=f"none of its 10 objects has .*; set MODEL.{key} False"):
            coco_data.prepare(tiny_coco.config(tmp_path / "out", chosen, **{f"MODEL__{key}": True}))


@pytest.mark.parametrize("change", ["order", "names"])
def test_labels_mean_the_same_in_all_data_sets(tmp_path: Path, change: str) -> None:
    names = [tiny_coco.write(tmp_path / split) for split in ("train", "test")]
    path = coco_data.resolve(names[1])[0]
    content = coco_data.read(path)
    categories = content["categories"]
    if change == "order":
        categories[0]["name"], categories[1]["name"] = "c2", "c1"
    else:
        categories[0] = {"id": 1, "name": "cat"}
        content["annotations"] = [record for record in content["annotations"] if record["category_id"] != 7]
    path.write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=f"category 1 in the order of ids is 'c1' in {names[0]}, but '.*' in {names[1]}"
    ):
        coco_data.prepare(tiny_coco.config(tmp_path / "out", names[0], DATASETS__TEST=(names[1],)))


def test_other_categories_than_cocos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    (tmp_path / "coco" / "val2017").mkdir()
    own = {"images": [], "annotations": [], "categories": [{"id": i, "name": f"n{i}"} for i in range(80)]}
    (tmp_path / "own.json").write_text(json.dumps(own))
    own["categories"][79]["name"] = "toothbrush"
    (tmp_path / "coco" / "annotations" / "instances_val2017.json").write_text(json.dumps(own))
    name = f"coco:{tmp_path / 'own.json'}:{tmp_path}"
    keys = {"DATASETS__TEST": ("coco_2017_val",), "MODEL__ROI_HEADS__NUM_CLASSES": 80}
    with pytest.raises(UserError, match=r"category 80 .* is 'n79' in .*own.json.*, but 'toothbrush' in coco_2017_val"):
        coco_data.prepare(tiny_coco.config(tmp_path / "out", name, **keys))
