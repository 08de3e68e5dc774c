"""MoCo's recipes on VOC and LVIS: C4 detectors, their weights, and the metrics of each on tiny data in its format."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.errors import refused
from tests.transfer import tiny_coco
from tests.transfer.test_configs import CONFIGS, SMOKE
from transfer import preflight
from transfer.coco import catalog, names
from transfer.config import load_config

VOC = ("aeroplane", "person", "dog")  # three of its twenty classes
SMALL = {key: value for key, value in SMOKE.items() if "NUM_CLASSES" not in key}  # a recipe's weights


def write_voc(root: Path) -> None:
    """Write VOC2007 (trainval, test) and VOC2012 (trainval) with five images per list, in the archives' layout."""
    content = tiny_coco.edit(tiny_coco.write(root), lambda _: None)
    for year, split in (("2007", "trainval"), ("2007", "test"), ("2012", "trainval")):
        folder = root / f"VOC{year}"
        for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        ids = [f"{year if split == 'trainval' else 0}_{image['id']:06}" for image in content["images"][:5]]
        (folder / f"ImageSets/Main/{split}.txt").write_text("\n".join(ids) + "\n")
        for image_id, image in zip(ids, content["images"], strict=False):
            Image.open(root / image["file_name"]).save(folder / f"JPEGImages/{image_id}.jpg", quality=95)
            objects = "".join(_format(record) for record in content["annotations"] if record["image_id"] == image["id"])
            size = f"<size><width>{image['width']}</width><height>{image['height']}</height><depth>3</depth></size>"
            (folder / f"Annotations/{image_id}.xml").write_text(f"<annotation>{size}{objects}</annotation>")


def _format(record: dict[str, Any]) -> str:
    x, y, w, h = map(round, record["bbox"])
    box = {"xmin": x + 1, "ymin": y + 1, "xmax": x + w, "ymax": y + h}  # 1-based, inclusive
    bounds = "".join(f"<{name}>{value}</{name}>" for name, value in box.items())
    fields = f"<name>{VOC[record['category_id'] // 7 - 1]}</name><truncated>0</truncated><difficult>0</difficult>"
    return f"<object>{fields}<pose>Frontal</pose><bndbox>{bounds}</bndbox></object>"


def go(recipe: str, *flags: str, **more: Any) -> dict[str, Any]:
    keys = SMALL | {key.replace("__", "."): value for key, value in more.items()}
    words = ["--config-file", str(CONFIGS / recipe), "--engine", "detectron2", *flags, *tiny_coco.words(keys)]
    return tiny_coco.fine_tune(words)


@pytest.mark.detectron2
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # AP of classes without boxes
def test_voc_trains_from_a_converted_backbone_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_voc(tmp_path / "datasets")
    tiny_coco.write_backbone(tmp_path, "resnet50")
    keys: dict[str, Any] = {"MODEL__RESNETS__DEPTH": 50, "MODEL__RESNETS__RES2_OUT_CHANNELS": 256}
    keys |= {"MODEL__RPN__POST_NMS_TOPK_TEST": 6, "MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE": 8}  # through res5 each
    keys |= {"INPUT__MIN_SIZE_TRAIN": [64], "INPUT__MIN_SIZE_TEST": 64}
    evaluation = {**keys, "MODEL__WEIGHTS": "out/model_final.pth", "OUTPUT_DIR": "eval"}
    keys |= {"MODEL__WEIGHTS": "w.pth", "OUTPUT_DIR": "out"}
    results = go("voc_R50_C4_24k.yaml", "--visualize", "2", **keys)
    assert results["metrics"]["bbox"].keys() == {"AP", "AP50", "AP75"} and results["iteration"] == 2
    protocol = results["protocol"]
    assert (protocol["backbone"], protocol["heads"]) == ("R50-C4", "Res5ROIHeadsExtraNorm")
    text = Path("out/log.txt").read_text()
    assert results["predictions"] == {} and "no figures of voc_2007_test" in text
    assert "random: proposal_generator.rpn_head, roi_heads.box_predictor, roi_heads.res5\n" in text
    lines = [json.loads(line) for line in Path("out/metrics.json").read_text().splitlines()]
    assert "bbox/AP50" in lines[-1]
    saved = torch.load("out/model_final.pth")["model"]
    names = {"backbone.res4.5.conv3.weight", "roi_heads.res5.2.conv3.weight", "roi_heads.res5.norm.weight"}
    assert names <= saved.keys()
    again = go("voc_R50_C4_24k.yaml", "--eval-only", **evaluation)
    assert again["metrics"] == results["metrics"]
    more = go("voc_R50_C4_24k.yaml", "--resume", SOLVER__MAX_ITER=3, **keys)
    assert more["iteration"] == 3 and "resuming from out/model_final.pth" in Path("out/log.txt").read_text()


@pytest.mark.detectron2
def test_missing_and_damaged_voc_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_config(CONFIGS / "voc_R50_C4_24k.yaml")
    refused(lambda: preflight.check_inputs(cfg, eval_only=False, reads_weights=False), "datasets/VOC2007 of voc_2007")
    write_voc(tmp_path / "datasets")
    preflight.check_inputs(cfg, eval_only=False, reads_weights=False)
    next(Path("datasets/VOC2012/Annotations").iterdir()).write_text("<annotation>")
    refused(lambda: tiny_coco.check_data_sets(cfg, ["voc_2012_trainval"]), "voc_2012_trainval")
    refused(lambda: names.check_not_in_catalog(["voc_2007_test"]), "voc_2007_test", "--engine detectron2")


@pytest.mark.detectron2
@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("Annotations/0_000001.xml", "<pose>Frontal</pose>", "", ["<pose>"]),
        ("Annotations/0_000001.xml", "<ymin>", "<ymin>0.", ["whole numbers"]),
        ("Annotations/0_000001.xml", "</annotation>", "", ["0_000001.xml"]),
        ("Annotations/0_000001.xml", ">96<", ">97<", ["JPEGImages/0_000001.jpg has 96 x 64", "not 97 x 64"]),
        ("ImageSets/Main/test.txt", "0_000001\n", "0_000001\n\n", ["test.txt has a line ''"]),
        ("ImageSets/Main/test.txt", "0_000001\n", "0_000009\n", ["test.txt has a line '0_000009'"]),
        ("ImageSets/Main/test.txt", "\n0_000002\n0_000003\n0_000004\n0_000005", "", ["1 image", "two"]),
    ],
)
def test_what_the_evaluator_of_voc_cannot_read_is_refused_before_the_training(
    tmp_path, monkeypatch, file, old, new, words
):
    monkeypatch.chdir(tmp_path)
    write_voc(tmp_path / "datasets")
    cfg = load_config(CONFIGS / "voc_R50_C4_24k.yaml")
    data_sets = ["voc_2007_trainval", "voc_2007_test"]
    assert len(tiny_coco.check_data_sets(cfg, data_sets)) == 20
    path = Path("datasets/VOC2007", file)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    refused(lambda: tiny_coco.check_data_sets(cfg, data_sets), path.stem, *words)
    if "<pose>" in old:  # training does not need it
        cfg.DATASETS.TRAIN = ("voc_2007_test",)
        cfg.DATASETS.TEST = ()
        tiny_coco.check_data_sets(cfg, ["voc_2007_test"])


@pytest.mark.detectron2
def test_missing_images_and_packages_of_the_catalog_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_voc(tmp_path / "datasets")
    Path("datasets/VOC2007/JPEGImages/0_000001.jpg").unlink()
    cfg = load_config(CONFIGS / "voc_R50_C4_24k.yaml")
    refused(lambda: tiny_coco.check_data_sets(cfg, ["voc_2007_test"]), "voc_2007_test has 1 bad image", "0_000001.jpg")
    cfg.DATASETS.TRAIN = ("cityscapes_fine_instance_seg_train",)
    folder = Path("datasets/cityscapes/leftImg8bit/train")
    for more in (folder, Path("datasets/cityscapes/gtFine/train")):
        refused(lambda: tiny_coco.check_data_sets(cfg, cfg.DATASETS.TRAIN), f"no {more}/ of cityscapes", "DATASETS")
        more.mkdir(parents=True)
    refused(
        lambda: tiny_coco.check_data_sets(cfg, cfg.DATASETS.TRAIN), "cannot be read", f"No images found in {folder}"
    )
    for part, ending in (("leftImg8bit", ""), *(("gtFine", f"_{kind}") for kind in ("instanceIds", "labelIds"))):
        path = Path(f"datasets/cityscapes/{part}/train/a/a_0_0_{part}{ending}.png")
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (96, 64)).save(path)
    Path("datasets/cityscapes/gtFine/train/a/a_0_0_gtFine_polygons.json").write_text("{}")
    refused(lambda: tiny_coco.check_data_sets(cfg, cfg.DATASETS.TRAIN), "needs a package", "coco:ANNOTATIONS.json")


@pytest.mark.detectron2
def test_rois_keep_their_corners_under_bfloat16() -> None:
    """Above 512 pixels, bfloat16 represents only multiples of 4, so a small box would be pooled somewhere else."""
    from detectron2.layers import ROIAlign

    from transfer.detectron2_engine.heads import keep_rois_in_float32

    x = torch.rand(1, 1, 200, 334, generator=torch.Generator().manual_seed(0))
    features = x.bfloat16()
    rois = torch.tensor([[0, 1001.3, 601.7, 1033.9, 640.2]])
    pool = ROIAlign((7, 7), 0.25, 0)
    expected = pool(features.float(), rois)
    with torch.autocast("cpu", torch.bfloat16):
        shifted = pool(features, rois).float()
        keep_rois_in_float32(torch.nn.Sequential(pool))
        exact = pool(features, rois)
    assert exact.dtype == torch.bfloat16 and torch.equal(exact, expected.bfloat16())
    assert not torch.allclose(shifted, expected, rtol=0.1)


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
    refused(lambda: preflight.check_inputs(cfg, eval_only=False, reads_weights=False), "lvis/lvis_v1_train.json")
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda package: None if package == "lvis" else 1)
    refused(lambda: catalog.find_files("lvis_v1_val"), "pip install --no-deps lvis")
