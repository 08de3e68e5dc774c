"""LVIS and Cityscapes: the recipes train on data in their own formats, and are scored by their own metrics."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from pretrain.common.errors import UserError
from tests.transfer.detectron2_engine.test_c4 import go
from tests.transfer.test_configs import CONFIGS
from transfer import early
from transfer.coco import catalog, data
from transfer.config import load_config

PACKAGES = ("lvis", "cityscapesscripts", "shapely", "pyquaternion")
NEEDS_PACKAGES = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PACKAGES)), reason=f"needs: pip install --no-deps {' '.join(PACKAGES)}"
)
CITYSCAPES = "cityscapes_mask_R50_FPN_24k.yaml"
RECIPES = {"lvis_v1_mask_R50_FPN_2x.yaml": "lvis_v1", "lvis_v0.5_mask_R50_FPN_1x.yaml": "lvis_v0.5"}
SMALL = {
    "MODEL__RESNETS__DEPTH": 18, "MODEL__RESNETS__RES2_OUT_CHANNELS": 64, "MODEL__ROI_BOX_HEAD__FC_DIM": 32,
    "MODEL__FPN__OUT_CHANNELS": 16, "MODEL__ROI_MASK_HEAD__CONV_DIM": 16, "MODEL__ROI_HEADS__SCORE_THRESH_TEST": 0.0,
    "TEST__DETECTIONS_PER_IMAGE": 20,
}  # fmt: skip


def write_lvis(root: Path, name: str) -> None:
    """Train and val with four images each, in COCO's folders; three categories, of which none is rare."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        images, annotations = [], []
        folder = root / f"coco/{split}2017"
        folder.mkdir(parents=True)
        for number in range(1, 5):
            picture = Image.fromarray(rng.integers(0, 90, (64, 96, 3), dtype=np.uint8))
            x, y = (int(value) for value in rng.integers(4, 24, 2))
            corners = [x, y, x + 40, y, x + 40, y + 30, x, y + 30]
            ImageDraw.Draw(picture).polygon(corners, fill=(255, 40, 40))
            picture.save(folder / f"{number:012}.jpg")
            images.append({"id": number, "height": 64, "width": 96, "neg_category_ids": [3],
                           "not_exhaustive_category_ids": [],
                           "coco_url": f"http://images.cocodataset.org/{split}2017/{number:012}.jpg"})  # fmt: skip
            annotations.append({"id": number, "image_id": number, "category_id": 1 + number % 2, "area": 1200.0,
                                "bbox": [x, y, 40, 30], "segmentation": [corners]})  # fmt: skip
        categories = [
            {"id": number, "name": f"thing{number}", "synset": f"thing{number}.n.01", "synonyms": [f"thing{number}"],
             "def": "a thing", "frequency": frequency, "image_count": 4, "instance_count": 4}
            for number, frequency in ((1, "f"), (2, "c"), (3, "c"))
        ]  # fmt: skip
        (root / "lvis").mkdir(exist_ok=True)
        content = {"info": {}, "licenses": [], "images": images, "annotations": annotations, "categories": categories}
        (root / f"lvis/{name}_{split}.json").write_text(json.dumps(content))


@NEEDS_PACKAGES
@pytest.mark.detectron2
@pytest.mark.filterwarnings("ignore:The 'warn' method:DeprecationWarning")  # of LVIS's package
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_and_is_scored(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lvis(tmp_path / "datasets", RECIPES[recipe])
    results = go(recipe, OUTPUT_DIR="out", **SMALL)
    assert list(results["metrics"]) == ["bbox", "segm"]
    box = results["metrics"]["bbox"]
    assert {"AP", "APr", "APc", "APf"} <= box.keys() and box["APr"] is None and box["APf"] >= 0
    assert results["protocol"]["test"] == [f"{RECIPES[recipe]}_val"]
    again = go(recipe, "--eval-only", OUTPUT_DIR="eval", **SMALL | {"MODEL__WEIGHTS": "out/model_final.pth"})
    assert again["metrics"] == results["metrics"]


def write_cityscapes(root: Path) -> None:
    """Train and val with two images of one city each: a car that hides part of a person, on a road."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        images, truth = root / f"cityscapes/leftImg8bit/{split}/aachen", root / f"cityscapes/gtFine/{split}/aachen"
        for folder in (images, truth):
            folder.mkdir(parents=True)
        for number in range(2):
            name, x = f"aachen_{number:06}_000019", 10 + 20 * number
            picture = Image.fromarray(rng.integers(0, 90, (64, 128, 3), dtype=np.uint8))
            instances = np.full((64, 128), 7, np.uint16)  # road
            objects = [{"label": "road", "polygon": [[0, 0], [127, 0], [127, 63], [0, 63]]}]
            for kind, label, left in (("person", 24, x), ("car", 26, x + 20)):
                corners = [(left, 12), (left + 36, 12), (left + 36, 44), (left, 44)]
                ImageDraw.Draw(picture).polygon(corners, fill=(255, 40, 40) if kind == "car" else (40, 255, 40))
                instances[12:45, left : left + 37] = 1000 * label
                objects.append({"label": kind, "polygon": [list(corner) for corner in corners]})
            picture.save(images / f"{name}_leftImg8bit.png")
            Image.fromarray(instances).save(truth / f"{name}_gtFine_instanceIds.png")
            labels = np.where(instances < 1000, instances, instances // 1000).astype(np.uint8)
            Image.fromarray(labels).save(truth / f"{name}_gtFine_labelIds.png")
            content = {"imgHeight": 64, "imgWidth": 128, "objects": objects}
            (truth / f"{name}_gtFine_polygons.json").write_text(json.dumps(content))


@NEEDS_PACKAGES
@pytest.mark.detectron2
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Detectron2 reads the files in a pool
def test_cityscapes_trains_and_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_config(CONFIGS / CITYSCAPES)
    with pytest.raises(UserError, match=r"no folder datasets/cityscapes/gtFine/train/? of cityscapes_fine"):
        early.refuse_inputs(cfg, eval_only=False, weights=False)
    write_cityscapes(tmp_path / "datasets")
    results = go(CITYSCAPES, OUTPUT_DIR="out", **SMALL)
    assert list(results["metrics"]) == ["segm"] and results["metrics"]["segm"].keys() == {"AP", "AP50"}
    again = go(CITYSCAPES, "--eval-only", OUTPUT_DIR="eval", **SMALL | {"MODEL__WEIGHTS": "out/model_final.pth"})
    assert again["metrics"] == results["metrics"]
    with pytest.raises(UserError, match=r"'cityscapes_fine_instance_seg_val' is not coco:.* need --engine detectron2"):
        data.refuse_catalog(["cityscapes_fine_instance_seg_val"])


@NEEDS_PACKAGES
@pytest.mark.detectron2
@pytest.mark.parametrize(("recipe", "name"), RECIPES.items())
def test_what_is_missing_is_named(recipe: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_config(CONFIGS / recipe)
    with pytest.raises(UserError, match=rf"no annotations at datasets/lvis/{name}_train.json of {name}_train"):
        early.refuse_inputs(cfg, eval_only=False, weights=False)
    with pytest.raises(UserError, match=rf"'{name}_val' is not coco:.* need --engine detectron2"):
        data.refuse_catalog([f"{name}_val"])
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda package: None if package == "lvis" else 1)
    with pytest.raises(UserError, match=rf"{name}_val needs: pip install --no-deps lvis \("):
        catalog.files(f"{name}_val")
