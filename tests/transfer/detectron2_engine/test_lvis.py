"""LVIS: the recipe trains, and is scored by LVIS's metrics."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from tests.transfer.detectron2_engine.test_c4 import go
from tests.transfer.test_configs import CONFIGS
from transfer import preflight
from transfer.coco import catalog
from transfer.config import load_config

NEEDS_LVIS = pytest.mark.skipif(  # without Detectron2 the tests are skipped for that reason
    bool(importlib.util.find_spec("detectron2")) and not importlib.util.find_spec("lvis"),
    reason="needs: pip install --no-deps lvis",
)
RECIPE = "lvis_v1_mask_R50_FPN_2x.yaml"


def write_lvis(root: Path, name: str) -> None:
    """Write train and val in COCO's folders, with three categories, none of which is rare."""
    (root / "lvis").mkdir(parents=True)
    for split in ("train", "val"):
        content = tiny_coco.edit(tiny_coco.write(root / f"coco/{split}2017"), lambda _: None)
        content["annotations"] = [record for record in content["annotations"] if not record["iscrowd"]]
        for record in content["annotations"]:
            record["category_id"] //= 7
        for image in content["images"]:
            image["coco_url"] = f"http://images.cocodataset.org/{split}2017/{image.pop('file_name')}"
            image |= {"neg_category_ids": [], "not_exhaustive_category_ids": []}
        for number, (category, frequency) in enumerate(zip(content["categories"], "fcc", strict=True), 1):
            category |= {"id": number, "frequency": frequency, "synonyms": [category["name"]], "synset": "thing.n.01"}
            category |= {"def": "a thing", "image_count": 4, "instance_count": 4}
        content |= {"info": {}, "licenses": []}
        (root / f"lvis/{name}_{split}.json").write_text(json.dumps(content))


@NEEDS_LVIS
@pytest.mark.detectron2
@pytest.mark.filterwarnings("ignore:The 'warn' method:DeprecationWarning")  # the logger of LVIS's package
def test_the_recipe_trains_and_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lvis(tmp_path / "datasets", "lvis_v1")
    results = go(RECIPE, OUTPUT_DIR="lvis", MODEL__ROI_HEADS__SCORE_THRESH_TEST=0.0, TEST__DETECTIONS_PER_IMAGE=20)
    assert list(results["metrics"]) == ["bbox", "segm"]
    box = results["metrics"]["bbox"]
    assert {"AP", "APr", "APc", "APf"} <= box.keys() and box["APr"] is None and box["APf"] >= 0
    assert results["protocol"]["test"] == ["lvis_v1_val"]


@NEEDS_LVIS
@pytest.mark.detectron2
def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_config(CONFIGS / RECIPE)
    refused(lambda: preflight.check_inputs(cfg, eval_only=False, weights=False), "lvis/lvis_v1_train.json")
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda package: None if package == "lvis" else 1)
    refused(lambda: catalog.find_files("lvis_v1_val"), "pip install --no-deps lvis")
