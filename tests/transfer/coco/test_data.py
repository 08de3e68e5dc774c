"""Data sets are given by name or by two paths; bad records end the run, or are skipped."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from fvcore.common.config import CfgNode
from PIL import Image

from pretrain.data import datasets as pretraining_data
from tests.errors import refused
from tests.transfer import tiny_coco
from transfer.coco import data, names
from transfer.coco.checks.classes import read_coco_names
from transfer.coco.reading import read_annotations

CROWD = {"iscrowd": 1}
UNLABELED = {"keypoints": [5, 5, 0] * 17, "num_keypoints": 0}
KEYPOINTS = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1}


def refused_twice(cfg: CfgNode, data_sets: list[str], *words: object, **recorded: Any) -> str:
    """Assert that data sets are refused early, by the command, and again by the run; return the run's error."""
    refused(lambda: data.DataSets(cfg, data_sets).check_small(**recorded), *words)
    return refused(lambda: tiny_coco.check_data_sets(cfg, data_sets, **recorded), *words)


def read_copy(cfg: CfgNode, name: str) -> dict[str, Any]:
    return read_annotations(names.find_checked_copy(name, cfg.OUTPUT_DIR))


def test_bad_records_end_the_run_or_are_skipped(tmp_path, caplog):
    caplog.set_level("INFO")
    name = tiny_coco.write(tmp_path / "data", keypoints=True)
    content = tiny_coco.edit(name, lambda content: content["annotations"][0].update(bbox=[0, 0, 500]))
    cfg = tiny_coco.config(tmp_path / "out", name, **KEYPOINTS)
    refused_twice(cfg, [name], "annotation 1 of image 1", ":skip_bad")
    data.DataSets(cfg, [name]).check_small(large_bytes=1000)  # too slow to read here
    skipping = f"{name}:skip_bad"
    out = tmp_path / "with:colon"
    tiny_coco.check_data_sets(tiny_coco.config(out, skipping, **KEYPOINTS), [skipping])
    logged = caplog.messages
    assert "skipped 1 bad record" in logged[0] and "annotation 1 of image 1" in logged[0]
    assert "DATASETS.TRAIN and DATASETS.TEST share" in logged[-1]
    out = out.rename(tmp_path / "moved")
    source = names.locate_data_set(skipping)
    checked = data.read_checked(source, out)
    assert checked.source.images == tmp_path / "data"
    assert len(checked.content["annotations"]) == len(content["annotations"]) - 1
    refused(lambda: data.read_checked(source, tmp_path / "elsewhere"), "elsewhere/datasets")
    cfg = tiny_coco.config(tmp_path / "out", skipping, MODEL__ROI_HEADS__NUM_CLASSES=80)
    refused(lambda: tiny_coco.check_data_sets(cfg, [skipping]), "MODEL.ROI_HEADS.NUM_CLASSES 1", 80)


@pytest.mark.parametrize("damage", ["truncated", "truncated JPEG", "empty", "missing", "turned"])
@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
def test_bad_images_are_found_before_the_training(tmp_path: Path, damage: str, split: str) -> None:
    good = tiny_coco.write(tmp_path / "good")
    bad = tiny_coco.write(tmp_path / "bad")
    path = tmp_path / "bad" / "1.png"
    exif = Image.Exif()
    if damage == "truncated JPEG":
        Image.open(path).save(path, "JPEG")
    if damage.startswith("truncated"):
        path.write_bytes(path.read_bytes()[:300])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    else:
        exif[0x0112] = 6
        Image.open(path).save(path, exif=exif)

    def prepare(name: str) -> dict[str, Any]:
        cfg = tiny_coco.config(tmp_path / "out", good, **{f"DATASETS__{split}": (name,)})
        data.DataSets(cfg, [good, name]).check_small()
        tiny_coco.check_data_sets(cfg, [good, name])
        return read_copy(cfg, name)

    refused(lambda: prepare(bad), bad.split(":")[1], "image 1: ", path, ":skip_bad")
    content = prepare(f"{bad}:skip_bad")
    assert [image["id"] for image in content["images"]] == [2, 3, 4, 5, 6]
    assert 1 not in {record["image_id"] for record in content["annotations"]} and len(content["skipped_records"]) == 3


def test_test_images_are_decoded_before_the_training_and_those_that_may_be_skipped(tmp_path: Path, name: str) -> None:
    good = tiny_coco.write(tmp_path / "good")
    path = tmp_path / "data" / "3.png"
    whole = path.read_bytes()
    path.write_bytes(whole[:3000] + bytes(200) + whole[3200:])

    def prepare(train: str, test: str) -> list[Any]:
        """Return the ids of the training images."""
        cfg = tiny_coco.config(tmp_path / "out", good, DATASETS__TRAIN=(train,), DATASETS__TEST=(test,))
        data_sets = data.DataSets(cfg, [train, test])
        data_sets.check_small()  # which reads the headers
        data_sets.check(cfg.OUTPUT_DIR)
        return [image["id"] for image, _ in data_sets[train].images or ()]

    refused(lambda: prepare(good, name), "image 3: ", path)
    assert prepare(good, f"{name}:skip_bad") == [1, 2, 3, 4, 5, 6]
    assert prepare(f"{name}:skip_bad", good) == [1, 2, 4, 5, 6]
    assert prepare(name, good) == [1, 2, 3, 4, 5, 6]  # an iteration that draws the image names it


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
def test_a_data_set_without_usable_images_is_refused(tmp_path: Path, split: str) -> None:
    good = tiny_coco.write(tmp_path / "good")
    lost = tiny_coco.write(tmp_path / "lost")
    cfg = tiny_coco.config(tmp_path / "out", good, **{f"DATASETS__{split}": (f"{lost}:skip_bad",)})
    for name in tmp_path.glob("lost/*.png"):
        name.unlink()
    refused_twice(cfg, [good, f"{lost}:skip_bad"], lost.split(":")[1], "no image can be used", "1.png")
    refused_twice(cfg, [good, lost], f"is {tmp_path}/lost the folder of its images?", "1.png")
    tiny_coco.edit(lost, lambda content: content.update(images=[], annotations=[]))
    refused(lambda: tiny_coco.check_data_sets(cfg, [f"{lost}:skip_bad"]), "no images")


def test_both_engines_read_the_checked_copy(tmp_path: Path, name: str) -> None:
    """Detectron2 refuses repeated ids, `ignore` and a byte-order mark, so it must not read the file itself."""
    content = tiny_coco.edit(name, lambda content: content["annotations"][0].update(id=2, ignore=1, segmentation=[[]]))
    path = Path(name.split(":")[1])
    cfg = tiny_coco.config(tmp_path / "out", name)
    for encoding in ("utf-8-sig", "utf-16"):
        path.write_text(json.dumps(content, ensure_ascii=False), encoding=encoding)
        tiny_coco.check_data_sets(cfg, [name])
    copy = read_copy(cfg, name)
    assert [record["id"] for record in copy["annotations"]] == list(range(1, 11)) and copy["skipped_records"] == []
    assert [record["iscrowd"] for record in copy["annotations"]].count(1) == 2
    path.write_text(json.dumps(content | {"info": "紅"}, ensure_ascii=False), encoding="gbk")
    refused(lambda: tiny_coco.check_data_sets(cfg, [name]), path, "UTF-8")


@pytest.mark.parametrize(
    ("change", "keys", "allowed", "names"),
    [
        (CROWD, {}, {"DATALOADER__FILTER_EMPTY_ANNOTATIONS": False}, ["iscrowd 1"]),
        (UNLABELED, KEYPOINTS, {"MODEL__ROI_KEYPOINT_HEAD__MIN_KEYPOINTS_PER_IMAGE": 0}, ["no keypoint is labeled"]),
        ({}, {"MODEL__MASK_ON": True}, {"INPUT__MASK_FORMAT": "bitmask"}, ["RLE", "INPUT.MASK_FORMAT"]),
    ],
)
def test_a_set_that_cannot_be_trained_on_is_refused_with_the_reason(tmp_path, change, keys, allowed, names):
    name = tiny_coco.write(tmp_path / "data", keypoints=keys is KEYPOINTS, rle="MODEL__MASK_ON" in keys)
    tiny_coco.edit(name, lambda content: [record.update(change) for record in content["annotations"]])
    cfg = tiny_coco.config(tmp_path / "out", name, **keys)
    refused_twice(cfg, [name], name.split(":")[1], *names)
    data.DataSets(tiny_coco.config(tmp_path / "out", name, **keys, **allowed), [name]).check_small()
    good = tiny_coco.write(tmp_path / "good", keypoints=keys is KEYPOINTS)
    data.DataSets(tiny_coco.config(tmp_path / "out", good, DATASETS__TEST=(name,), **keys), [good, name]).check_small()


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    refused(lambda: names.locate_data_set("coco_2017_val"), tmp_path / "coco/annotations/instances_val2017.json")
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    (tmp_path / "coco" / "annotations" / "person_keypoints_train2017.json").write_text("{}")
    refused(lambda: names.locate_data_set("keypoints_coco_2017_train"), tmp_path / "coco/train2017")
    (tmp_path / "coco" / "train2017").mkdir()
    assert names.locate_data_set("keypoints_coco_2017_train").images == tmp_path / "coco" / "train2017"
    monkeypatch.setenv("HOME", str(tmp_path))  # in a YAML file, no shell expands these
    file = "coco/annotations/person_keypoints_train2017.json"
    for name in (f"coco:$DETECTRON2_DATASETS/{file}:$HOME/coco", f"coco:~/{file}:~/coco"):
        assert names.locate_data_set(name).images == tmp_path / "coco"
    refused(lambda: names.check_not_in_catalog(["coco_2017_vall"]), "'coco_2017_val'", "--engine detectron2")
    for bad in ("coco:a.json", "coco:a.json:", "coco:a.json:b:maybe"):
        refused(lambda bad=bad: names.locate_data_set(bad), bad, "coco:ANNOTATIONS")
    (tmp_path / "a.json").write_text("{}")
    refused(lambda: read_annotations(tmp_path / "a.json"), tmp_path / "a.json", "images")


@pytest.mark.parametrize("folder", ["datasets/digits", "datasets/trees", "a b/datasets/digits"])
def test_missing_example_data_are_named_with_the_command_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    kind = Path(folder).name
    remedy = f"make_data.py {kind} --output {shlex.quote(folder)}"
    missing = f"coco:{folder}/coco/annotations/instances_val.json:{folder}/coco/val"
    refused(lambda: names.locate_data_set(missing), remedy)
    refused(lambda: pretraining_data.load(f"folder:{folder}/images", "train"), f"no image folder at {folder}/", remedy)
    Path(folder).mkdir(parents=True)  # made, perhaps from other data
    text = refused(lambda: pretraining_data.load(f"folder:{folder}/images", "train"), "no image folder at")
    assert "make_data.py" not in text
    assert "make_data.py" not in refused(lambda: names.locate_data_set(f"coco:{kind}/val.json:{kind}"), "val.json")


def test_images_in_both_train_and_test_and_boxes_that_occur_twice_are_reported(tmp_path, caplog, name):
    """Of a box that two annotators drew, a detector can only find one."""
    caplog.set_level("INFO")
    test = name.replace(".json", "_test.json")
    shutil.copy(name.split(":")[1], test.split(":")[1])
    tiny_coco.edit(test, lambda content: content.update(images=content["images"][:2], annotations=[]))
    tiny_coco.edit(test, lambda content: content["images"][0].update(file_name="./1.png"))
    tiny_coco.edit(name, lambda content: content["annotations"].append({**content["annotations"][3], "id": 99}))
    (tmp_path / "link").symlink_to(tmp_path / "data")
    cfg = tiny_coco.config(tmp_path / "out", name, DATASETS__TEST=(f"{test.rpartition(':')[0]}:{tmp_path / 'link'}",))
    tiny_coco.check_data_sets(cfg, [*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST])
    logged = caplog.messages
    assert "1 boxes occur more than once" in logged[0] and "of image 2" in logged[0]
    assert test.split(":")[1] in logged[1] and "nothing is scored" in logged[1]
    assert str(tmp_path / "data/1.png") in logged[2] and str(tmp_path / "data/3.png") not in logged[2]


@pytest.mark.parametrize(("section", "field"), [("images", "neg_category_ids"), ("categories", "frequency")])
def test_a_federated_test_set_is_pointed_out(tmp_path: Path, caplog, name: str, section: str, field: str) -> None:
    good = tiny_coco.write(tmp_path / "good")
    tiny_coco.edit(name, lambda content: content[section][0].update({field: "f"}))
    tiny_coco.check_data_sets(tiny_coco.config(tmp_path / "out", name, DATASETS__TEST=(good,)), [name, good])
    assert "LVIS" not in caplog.text
    tiny_coco.check_data_sets(tiny_coco.config(tmp_path / "out", good, DATASETS__TEST=(name,)), [good, name])
    assert f"LVIS's {field}" in caplog.text and "lvis_v1_val" in caplog.text


def test_every_data_set_has_its_own_files(tmp_path: Path) -> None:
    """This holds even if two annotation files have the same base name."""
    twins = [f"{tiny_coco.write(tmp_path / split)}:skip_bad" for split in ("train", "valid")]
    for name in twins:
        tiny_coco.edit(name, lambda c, name=name: c.update(info=name) or c["annotations"][0].update(bbox=[0, 0, 0]))
    cfg = tiny_coco.config(tmp_path / "out", twins[0], DATASETS__TEST=(twins[1],))
    tiny_coco.check_data_sets(cfg, twins)
    contents = [read_copy(cfg, name) for name in twins]
    assert [content["info"] for content in contents] == twins
    assert all("box [0, 0, 0] is not" in content["skipped_records"][0] for content in contents)
    assert len({names.folder_name(name) for name in twins}) == 2


@pytest.mark.parametrize("position", [1, 2])
def test_a_category_that_one_file_has_is_named_before_the_number_of_classes(tmp_path: Path, position: int) -> None:
    names = [tiny_coco.write(tmp_path / split) for split in ("train", "test")]
    tiny_coco.edit(names[1], lambda content: content["categories"].pop(position) and content["annotations"].clear())
    cfg = tiny_coco.config(tmp_path / "out", names[0], MODEL__ROI_HEADS__NUM_CLASSES=2)
    missing = f"category {position + 1} in the order of ids is 'c{position + 1}' in {names[0]}, but "
    assert "NUM_CLASSES" not in refused_twice(cfg, names, missing, names[1])


def test_keypoints_in_another_order_are_refused(tmp_path: Path) -> None:
    """They are matched by their order alone: left eyes would be scored as right ones."""
    train = tiny_coco.write(tmp_path / "train", keypoints=True)
    test = tiny_coco.write(tmp_path / "test", keypoints=True)
    cfg = tiny_coco.config(tmp_path / "out", train, DATASETS__TEST=(test,), **KEYPOINTS)
    names = tiny_coco.NAMES

    def rename(keypoints: object) -> None:
        tiny_coco.edit(test, lambda content: content["categories"][0].update(keypoints=keypoints))

    rename([names[0], names[2], names[1], *names[3:]])
    words = ["keypoint 2 is 'left_eye' in", train, "'right_eye' in", test, "the same order"]
    refused_twice(cfg, [train, test], *words)
    for spelled in ([], [name.upper().replace("_", " ") for name in names]):  # without names: nothing to compare
        rename(spelled)
        data.DataSets(cfg, [train, test]).check_small()
        tiny_coco.check_data_sets(cfg, [train, test])
    rename(17)  # nobody reads it for boxes
    data.DataSets(tiny_coco.config(tmp_path / "out", test, MODEL__ROI_HEADS__NUM_CLASSES=1), [test]).check_small()


def test_classes_that_a_run_keeps(tmp_path: Path, name: str) -> None:
    cfg = tiny_coco.config(tmp_path / "out", name)
    names = tiny_coco.check_data_sets(cfg, [name])
    assert names == ["c1", "c2", "c3"] == tiny_coco.check_data_sets(cfg, [name], recorded={"kept.json": names})
    refused_twice(cfg, [name], "category 2", "'c3' in kept.json", name, recorded={"kept.json": ["c1", "c3", "c2"]})


def test_categories_of_another_number_of_one_name_and_none_are_refused(tmp_path: Path, name: str) -> None:
    cfg = tiny_coco.config(tmp_path / "out", name)
    cfg.MODEL.META_ARCHITECTURE = "RetinaNet"  # which has its own number of classes
    refused(lambda: tiny_coco.check_data_sets(cfg, [name]), "MODEL.RETINANET.NUM_CLASSES 3", 80)
    cfg.merge_from_list(["MODEL.RETINANET.NUM_CLASSES", "3", "MODEL.ROI_HEADS.NUM_CLASSES", "80"])
    tiny_coco.check_data_sets(cfg, [name])
    tiny_coco.edit(name, lambda content: content["categories"][2].update(name="c1"))
    refused(lambda: data.DataSets(cfg, [name]).check_small(), "annotations.json", "[7, 21]", "'c1'")
    tiny_coco.edit(name, lambda content: content.update(categories=[]))
    refused(lambda: data.DataSets(cfg, [name]).check_small(), "annotations.json", "empty")


@pytest.mark.detectron2
def test_cocos_names_are_those_of_detectron2() -> None:
    from detectron2.data import MetadataCatalog

    assert read_coco_names() == MetadataCatalog.get("coco_2017_train").thing_classes


def test_only_cocos_own_file_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files with that name are checked; COCO's categories are compared with those of other data sets."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    name = tiny_coco.write(tmp_path / "coco" / "val2017")
    content = tiny_coco.edit(name, lambda content: content["annotations"][0].update(bbox=[]))
    path = tmp_path / "coco" / "annotations" / "instances_val2017.json"
    path.parent.mkdir()
    content["categories"] = [{"id": i, "name": label} for i, label in enumerate(read_coco_names())]
    path.write_text(json.dumps(content))
    cfg = tiny_coco.config(tmp_path / "out", "coco_2017_val", MODEL__ROI_HEADS__NUM_CLASSES=80)
    refused(lambda: tiny_coco.check_data_sets(cfg, ["coco_2017_val"]), "annotation 1 of image 1")
    monkeypatch.setitem(data._RELEASED_BYTES, path.name, path.stat().st_size)
    few = tiny_coco.config(tmp_path / "out", "coco_2017_val")
    refused(lambda: tiny_coco.check_data_sets(few, ["coco_2017_val"]), "80 categories")
    tiny_coco.check_data_sets(cfg, ["coco_2017_val"])
    content |= {"annotations": [], "categories": [*content["categories"][:79], {"id": 79, "name": "x"}]}
    (tmp_path / "other.json").write_text(json.dumps(content))
    other = f"coco:{tmp_path / 'other.json'}:{tmp_path / 'coco' / 'val2017'}"
    words = ("category 80", "'x' in coco:", "'toothbrush' in coco_2017_val")
    refused(lambda: tiny_coco.check_data_sets(cfg, [other, "coco_2017_val"]), *words)


def text_ids(content: dict[str, Any]) -> None:
    for record in content["annotations"]:
        record["image_id"] = str(record["image_id"])


ALL_BAD = {  # a change of the file -> what the error says
    "ids of two types": (text_ids, "no annotation can be used", "image_id '1' is not a number like the ids of images"),
    "boxes": (lambda c: [r.pop("bbox") for r in c["annotations"]], "no annotation can be used", "bbox is missing"),
    "sizes": (lambda c: [r.pop("width") for r in c["images"]], "no image can be used", "width is missing; correct"),
    "classes": (lambda c: [r.pop("name") for r in c["categories"]], "no category can be used", "name is missing"),
    "no images": (lambda c: c["images"].clear(), "has no images: the export is empty"),
}


@pytest.mark.parametrize("kind", ALL_BAD)
@pytest.mark.parametrize("suffix", ["", ":skip_bad"])
def test_what_is_wrong_with_all_records_is_said_once_and_not_skipped(
    tmp_path, name: str, kind: str, suffix: str
) -> None:
    change, *words = ALL_BAD[kind]
    tiny_coco.edit(name, change)
    text = refused_twice(tiny_coco.config(tmp_path / "out", name + suffix), [name + suffix], *words)
    assert text.count("annotation ") <= 2 and "skip_bad" not in text


def test_classes_without_objects_and_names_that_are_alike_are_warned_of(tmp_path, name: str, caplog) -> None:
    tiny_coco.edit(name, lambda content: content["categories"].insert(0, {"id": 0, "name": "shapes"}))
    tiny_coco.edit(name, lambda content: content["categories"][1].update(name="C2 "))
    cfg = tiny_coco.config(tmp_path / "out", name, MODEL__ROI_HEADS__NUM_CLASSES=4)
    tiny_coco.check_data_sets(cfg, [name])
    assert "DATASETS.TRAIN has no object of shapes, so" in caplog.text
    assert "'C2 ' and 'c2' are separate classes" in caplog.text
    caplog.clear()
    other = tiny_coco.write(tmp_path / "other")
    tiny_coco.edit(other, lambda content: content["categories"].insert(0, {"id": 0, "name": "shapes"}))
    tiny_coco.edit(other, lambda content: content["categories"][1].update(name="C2 "))
    tiny_coco.edit(other, lambda content: content["annotations"][0].update(category_id=0))
    tiny_coco.check_data_sets(
        tiny_coco.config(tmp_path / "out", name, DATASETS__TRAIN=(name, other), MODEL__ROI_HEADS__NUM_CLASSES=4),
        [name, other],
    )
    assert "has no object of" not in caplog.text, "one of two sets has it"


def test_two_lists_of_a_section_are_refused_and_other_repeated_keys_are_not(tmp_path: Path) -> None:
    """Files that were merged by hand: Python would read the last list alone."""
    file = tmp_path / "merged.json"
    start = '{"images": [{"attributes": {"a": 1, "a": 2}}], "annotations": [], "categories": []'
    file.write_text(start + "}")
    assert read_annotations(file)["images"] == [{"attributes": {"a": 2}}]
    file.write_text(start + ', "images": []}')
    line = refused(lambda: read_annotations(file), "merged.json has images twice", "merge both")
    assert "JSON" not in line
