"""The Detectron2 engine's reader, mapper and loaders."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from pretrain.common.config.yaml_io import flatten
from tests.errors import refused
from tests.transfer import tiny_coco

pytest.importorskip("detectron2", reason="Detectron2 is not installed")
from detectron2.config import CfgNode, get_cfg
from detectron2.data.datasets import load_coco_json

from transfer.coco.checks.classes import read_coco_names
from transfer.coco.data import DataSets
from transfer.detectron2_engine import data
from transfer.detectron2_engine.engine import Detectron2Engine, detectron2_config

pytestmark = pytest.mark.detectron2


def test_what_both_engines_read_is_complete(tmp_path: Path, name: str) -> None:
    """Detectron2 itself refuses `ignore` and repeated ids, and drops a box whose mask has two points."""
    tiny_coco.edit(name, lambda c: c["annotations"][0].update(id=2, ignore=1, segmentation=[[5, 5, 9, 9]]))
    tiny_coco.edit(name, lambda c: c["annotations"][2].update(segmentation=[[]]))
    cfg = tiny_coco.config(tmp_path / "out", name)
    tiny_coco.check_data_sets(cfg, [name])
    data.register(tiny_coco.read_data_sets(cfg)[name], cfg)
    records = [record["annotations"] for record in data.DatasetCatalog.get(name)]
    assert [len(annotations) for annotations in records] == [2, 2, 2, 2, 2, 0]
    assert [annotation["iscrowd"] for annotation in records[0]] == [1, 0]


@pytest.mark.parametrize("kind", ["polygons", "rle", "keypoints"])
def test_a_file_is_read_as_detectron2_reads_it(tmp_path: Path, kind: str) -> None:
    name = tiny_coco.write(tmp_path / "data", keypoints=kind == "keypoints", rle=kind == "rle")
    tiny_coco.edit(name, lambda c: c["annotations"][1].update(segmentation=[[5, 5, 9, 9]]))
    _, file, folder = name.split(":")
    expected = load_coco_json(file, folder, f"{kind} as Detectron2 reads it")
    actual = data.list_entries(tiny_coco.read_data_sets(tiny_coco.config(tmp_path / "out", name))[name])
    assert actual == expected and len(actual[0]["annotations"]) == 1


def test_cocos_files_that_are_checked_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detectron2 drops the box of an object whose polygons have two points, as in COCO's files of 2014."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    name = tiny_coco.write(tmp_path / "coco" / "val2014")
    coco_names = read_coco_names()

    def change(content: dict[str, Any]) -> None:
        content["categories"] = [{"id": i, "name": label} for i, label in enumerate(coco_names)]
        content["annotations"][1].update(segmentation=[[5, 5, 9, 9]])

    tiny_coco.edit(name, change)
    file = tmp_path / "coco" / "annotations" / "instances_val2014.json"
    file.parent.mkdir()
    Path(name.split(":")[1]).rename(file)
    cfg = tiny_coco.config(tmp_path / "out", "coco_2014_val", MODEL__ROI_HEADS__NUM_CLASSES=80)
    data_sets = DataSets(cfg, ["coco_2014_val"])
    data_sets.check(cfg.OUTPUT_DIR)
    expected = load_coco_json(str(file), name.split(":")[2], "2014 as Detectron2 reads it")
    assert data.list_entries(data_sets["coco_2014_val"]) == expected and len(expected[0]["annotations"]) == 1


def test_each_run_reads_its_own_data(tmp_path: Path, name: str) -> None:
    """Of two runs in one process under one name, the second reads what is there now; a user's own sets are kept."""
    data.DatasetCatalog.register("my_own", list)
    keys = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1}
    runs = []
    for number, keypoints in enumerate((False, True, False)):
        shutil.rmtree(tmp_path / "data")
        tiny_coco.write(tmp_path / "data", keypoints=keypoints)
        change = {"name": f"class of run {number}"}
        tiny_coco.edit(name, lambda c, change=change: c["categories"][0].update(change))
        cfg = tiny_coco.config(tmp_path / f"out{number}", name, **(keys if keypoints else {}))
        engine = Detectron2Engine(cfg, tiny_coco.read_data_sets(cfg))
        records, *_ = engine.load_training_set()
        metadata = data.MetadataCatalog.get(name)
        assert data.DatasetCatalog.get(name)[:5] == list(records) and metadata.thing_classes[0] == change["name"]
        assert (metadata.get("keypoint_names") == tuple(tiny_coco.NAMES)) == keypoints
        runs.append(records[0]["annotations"][0].keys())
    assert runs[0] == runs[2] and runs[1] - runs[0] == {"keypoints"}
    assert "my_own" in data.DatasetCatalog
    data.DatasetCatalog.remove("my_own")


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    cfg = tiny_coco.config(tmp_path, "a", OUTPUT_DIR="2024", MODEL__WEIGHTS="1e3")
    merged = detectron2_config(cfg)
    assert (merged.OUTPUT_DIR, merged.MODEL.WEIGHTS) == ("2024", "1e3")


def test_detectron2s_config_is_its_own(tmp_path: Path) -> None:
    """A user's mapper may merge keys into it, and add to its tuples."""
    merged = detectron2_config(tiny_coco.config(tmp_path, "a"))
    types = {key: type(value) for key, value in flatten(get_cfg())}
    assert {key: type(value) for key, value in flatten(merged) if key in types} == types
    assert merged.DATASETS.TRAIN == ("a",) and merged.SOLVER.ACCUMULATE == 1
    users = merged.clone()
    users.merge_from_other_cfg(CfgNode({"INPUT": {"MINE": 1}}))
    assert users.INPUT.MINE == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_images_are_scaled_or_named(tmp_path: Path, workers: int, name: str) -> None:
    keys = {"DATALOADER__NUM_WORKERS": workers, "INPUT__MIN_SIZE_TEST": 0}
    cfg = tiny_coco.config(tmp_path / "out", name, **keys)
    Image.fromarray(np.full((64, 96), 25700, np.uint16)).save(tmp_path / "data" / "1.png")
    engine = Detectron2Engine(cfg, tiny_coco.read_data_sets(cfg))
    records, category_ids = engine.load_test_set(name)
    assert len(records) == 6 and category_ids == [7, 14, 21]
    images = engine.run_on_test_set(nn.Identity(), records, list)
    assert len(images) == 6 and images[0]["image"].unique().tolist() == [100]
    path = tmp_path / "data" / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    refused(lambda: engine.run_on_test_set(nn.Identity(), records, list), path)
    batches = engine.load_training_data().batches(seed=5, start=0, workers=workers)
    refused(lambda: list(itertools.islice(batches, 9)), path)


def test_a_thin_image_keeps_a_pixel():
    data.adapt_detectron2()
    assert data.ResizeShortestEdge.get_output_shape(2, 3000, 96, 128) == (1, 128)
