"""C4 detectors and VOC: MoCo's recipes, their weights, and VOC's metrics on data in VOC's own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from pretrain.common.weights.resnet_names import from_c4
from tests.errors import refused
from tests.resnets import resnet_state
from tests.transfer import tiny_coco
from tests.transfer.test_configs import CONFIGS
from transfer import preflight
from transfer.coco import catalog
from transfer.config import load_config
from transfer.weights.convert import convert
from transfer.weights.load import load_weights, read_weights

VOC = ("aeroplane", "person", "dog")  # three of its twenty classes, and colors in which the images show them
COLORS = ((255, 40, 40), (40, 255, 40), (40, 40, 255))
SMALL = {
    "MODEL.WEIGHTS": "",
    "MODEL.DEVICE": "cpu",
    "INPUT.MIN_SIZE_TRAIN": (64,),
    "INPUT.MIN_SIZE_TEST": 64,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 2,
    "SOLVER.STEPS": (),
    "TEST.PRECISE_BN.NUM_ITER": 1,
    "DATALOADER.NUM_WORKERS": 0,
    "SEED": 3,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 32,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 50,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 30,
}


def write_voc(root: Path) -> None:
    """VOC2007 (trainval and test) and VOC2012 (trainval) with four images per list, as the archives have them."""
    rng = np.random.default_rng(0)
    for year, splits in (("2007", ("trainval", "test")), ("2012", ("trainval",))):
        folder = root / f"VOC{year}"
        for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (folder / name).mkdir(parents=True)
        for split in splits:
            ids = [f"{len(splits)}{number:05}" if split == "test" else f"{year}_{number:06}" for number in range(4)]
            (folder / f"ImageSets/Main/{split}.txt").write_text("\n".join(ids) + "\n")
            for image_id in ids:
                _write_image(folder, image_id, rng)


def _write_image(folder: Path, image_id: str, rng: np.random.Generator) -> None:
    picture, objects = Image.fromarray(rng.integers(0, 90, (64, 96, 3), dtype=np.uint8)), ""
    for slot in range(2):
        kind = int(rng.integers(3))
        x, y = 4 + 46 * slot, int(rng.integers(2, 20))
        box = (x, y, x + int(rng.integers(20, 40)), y + int(rng.integers(20, 40)))  # 1-based, inclusive
        ImageDraw.Draw(picture).rectangle([value - 1 for value in box], fill=COLORS[kind])
        bounds = "".join(f"<{k}>{v}</{k}>" for k, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
        objects += f"<object><name>{VOC[kind]}</name><pose>Frontal</pose><truncated>0</truncated>"
        objects += f"<difficult>0</difficult><bndbox>{bounds}</bndbox></object>"
    picture.save(folder / f"JPEGImages/{image_id}.jpg", quality=95)
    size = "<size><width>96</width><height>64</height><depth>3</depth></size>"
    (folder / f"Annotations/{image_id}.xml").write_text(f"<annotation>{size}{objects}</annotation>")


def command(recipe: str, *flags: str, **more: Any) -> list[str]:
    keys = SMALL | {key.replace("__", "."): value for key, value in more.items()}
    return ["--config-file", str(CONFIGS / recipe), "--engine", "detectron2", *flags, *tiny_coco.words(keys)]


def go(recipe: str, *flags: str, **more: Any) -> dict[str, Any]:
    return tiny_coco.fine_tune(command(recipe, *flags, **more))


@pytest.mark.detectron2
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # of classes without boxes
def test_voc_trains_from_a_converted_backbone_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_voc(tmp_path / "datasets")
    torch.save(resnet_state("resnet50", head=False), "r50.pth")
    convert(Path("r50.pth"), Path("w.pth"))
    keys = {"MODEL__WEIGHTS": "w.pth", "OUTPUT_DIR": "out"}
    results = go("voc_R50_C4_24k.yaml", "--visualize", "2", **keys)
    assert results["metrics"]["bbox"].keys() == {"AP", "AP50", "AP75"} and results["iteration"] == 2
    protocol = results["protocol"]
    assert (protocol["backbone"], protocol["heads"]) == ("R50-C4", "Res5ROIHeadsExtraNorm")
    assert results["predictions"] == {} and "no figures of voc_2007_test" in Path("out/log.txt").read_text()
    lines = [json.loads(line) for line in Path("out/metrics.json").read_text().splitlines()]
    assert "bbox/AP50" in lines[-1]
    saved = torch.load("out/model_final.pth")["model"]
    assert {
        "backbone.res4.5.conv3.weight",
        "roi_heads.res5.2.conv3.weight",
        "roi_heads.res5.norm.weight",
    } <= saved.keys()
    again = go("voc_R50_C4_24k.yaml", "--eval-only", MODEL__WEIGHTS="out/model_final.pth", OUTPUT_DIR="eval")
    assert again["metrics"] == results["metrics"]
    more = go("voc_R50_C4_24k.yaml", "--resume", SOLVER__MAX_ITER=3, **keys)
    assert more["iteration"] == 3 and "resuming from out/model_final.pth" in Path("out/log.txt").read_text()


@pytest.mark.detectron2
def test_every_tensor_of_a_backbone_reaches_the_c4_detector(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from detectron2.modeling import build_model

    from transfer.detectron2_engine.engine import detectron2_config

    torch.save(resnet_state("resnet50", head=False), tmp_path / "r50.pth")
    convert(tmp_path / "r50.pth", tmp_path / "w.pth")
    cfg = load_config(CONFIGS / "voc_R50_C4_24k.yaml", ["MODEL.DEVICE", "cpu"])
    model = build_model(detectron2_config(cfg))
    caplog.set_level("INFO")
    weights = read_weights(tmp_path / "w.pth")
    load_weights(model.state_dict, weights)
    detector = from_c4(model.state_dict())
    loaded = [name for name in detector if name in weights.state]
    assert len(loaded) == len(weights.state) and all(torch.equal(detector[n], weights.state[n]) for n in loaded)
    assert caplog.messages[-1].endswith("random: proposal_generator.rpn_head, roi_heads.box_predictor, roi_heads.res5")


@pytest.mark.detectron2
def test_missing_and_damaged_voc_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_config(CONFIGS / "voc_R50_C4_24k.yaml")
    refused(lambda: preflight.check_inputs(cfg, eval_only=False, weights=False), "datasets/VOC2007 of voc_2007")
    write_voc(tmp_path / "datasets")
    preflight.check_inputs(cfg, eval_only=False, weights=False)
    next(Path("datasets/VOC2012/Annotations").iterdir()).write_text("<annotation>")
    refused(lambda: catalog.prepare("voc_2012_trainval", None), "voc_2012_trainval")
    refused(lambda: preflight.data.check_not_in_catalog(["voc_2007_test"]), "voc_2007_test", "--engine detectron2")


@pytest.mark.detectron2
def test_rois_keep_their_corners_under_bfloat16() -> None:
    """Beyond 512 pixels, bfloat16 has multiples of 4: a small box would be pooled somewhere else."""
    from detectron2.layers import ROIAlign

    from transfer.detectron2_engine.heads import keep_rois_in_float32

    x = torch.rand(1, 1, 200, 334, generator=torch.Generator().manual_seed(0))
    features, rois = x.bfloat16(), torch.tensor([[0, 1001.3, 601.7, 1033.9, 640.2]])
    pool = ROIAlign((7, 7), 0.25, 0)
    expected = pool(features.float(), rois)
    with torch.autocast("cpu", torch.bfloat16):
        shifted = pool(features, rois).float()
        keep_rois_in_float32(torch.nn.Sequential(pool))
        exact = pool(features, rois)
    assert exact.dtype == torch.bfloat16 and torch.equal(exact, expected.bfloat16())
    assert not torch.allclose(shifted, expected, rtol=0.1)
