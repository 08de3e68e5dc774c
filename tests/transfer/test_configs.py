"""The recipes are plain Detectron2 YAML with the values of the published protocol; each detector has a smoke form."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.errors import refused
from tests.transfer import tiny_coco
from transfer import preflight
from transfer.config import load_config
from transfer.preflight import check_supported

CONFIGS = Path(__file__).parents[2] / "configs"
FPN = sorted(path.name for path in CONFIGS.glob("coco_*FPN_*.yaml"))
C4 = sorted(path.name for path in CONFIGS.glob("*C4*.yaml"))
# A recipe's own heads on 64-96 pixels with a ResNet-18, 2 iterations of 2 images on a CPU.
PRECISE_BN = {"TEST.PRECISE_BN.ENABLED": True, "TEST.PRECISE_BN.NUM_ITER": 1}
SMOKE = tiny_coco.MODEL_KEYS | PRECISE_BN | {"SOLVER.MAX_ITER": 2, "SOLVER.STEPS": [], "MODEL.WEIGHTS": ""}


def smoke_words(tmp_path: Path, recipe: str) -> list[str]:
    keypoints = "keypoint" in recipe.lower()
    name = tiny_coco.write(tmp_path / "data", keypoints=keypoints)
    data = {"DATASETS.TRAIN": (name,), "DATASETS.TEST": (name,), "OUTPUT_DIR": str(tmp_path / "out")}
    return tiny_coco.words(SMOKE | data | {"MODEL.ROI_HEADS.NUM_CLASSES": 1 if keypoints else 3})


def test_a_schedule_is_mixed_into_a_recipe(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(f"_BASE_: [{CONFIGS}/coco_mask_R50_FPN_1x_jcl.yaml, {CONFIGS}/parts/schedule_2x.yaml]\n")
    solver = load_config(mixed).SOLVER
    assert (solver.MAX_ITER, tuple(solver.STEPS), solver.BASE_LR) == (180000, (120000, 160000), 0.02)


@pytest.mark.parametrize("recipe", FPN)
def test_the_torchvision_engine_honors_it(recipe: str) -> None:
    check_supported(load_config(CONFIGS / recipe))


@pytest.mark.detectron2
@pytest.mark.parametrize("recipe", [*FPN, *C4])
def test_detectron2_reads_it_as_this_project_does(recipe: str) -> None:
    from detectron2.config import get_cfg

    theirs = get_cfg()
    theirs.merge_from_file(str(CONFIGS / recipe))
    ours = get_cfg()
    ours.merge_from_other_cfg(tiny_coco.strip_own_keys(load_config(CONFIGS / recipe)))
    assert json.loads(json.dumps(ours)) == json.loads(json.dumps(theirs))  # JSON has lists for tuples


# Four convolutions and one linear layer in the box head and SyncBN in the heads, as InfoMin, DenseCL and PixPro report.
CONVOLUTIONS = {
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 4,
    "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    "MODEL.ROI_BOX_HEAD.NORM": "SyncBN",
    "MODEL.ROI_MASK_HEAD.NORM": "SyncBN",
}
FROZEN = {"MODEL.BACKBONE.FREEZE_AT": 5, "SOLVER.FROZEN_BN_ITER": 2}
# A smoke form keeps only what defines the detector; each engine has separate tests of other keys.
FORMS = [
    pytest.param("coco_mask_R50_FPN_1x.yaml", CONVOLUTIONS, "detectron2", marks=pytest.mark.detectron2),
    ("coco_keypoint_R50_FPN_1x.yaml", {}, "torchvision"),
    ("examples/own_faster_R18_FPN.yaml", {}, "torchvision"),
    ("coco_R50_FPN_1pct.yaml", {}, "torchvision"),
    ("coco_R50_FPN_1x.yaml", FROZEN, "torchvision"),
    pytest.param("coco_mask_R50_FPN_1x.yaml", {}, "torchvision", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("recipe", "overrides", "engine"), FORMS)
def test_smoke_form_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, overrides: dict[str, Any], engine: str
) -> None:
    tiny.use(monkeypatch)
    words = ["--config-file", str(CONFIGS / recipe), "--engine", engine, *smoke_words(tmp_path, recipe)]
    results: dict[str, Any] = tiny_coco.fine_tune([*words, *tiny_coco.words(overrides)])
    second = [task for task, word in (("segm", "mask"), ("keypoints", "keypoint")) if word in recipe]
    assert results["engine"]["name"] == engine and list(results["metrics"]) == ["bbox", *second]
    assert results["metrics"]["bbox"]["AP"] is not None
    assert results["protocol"]["heads"].startswith("4conv1fc" if overrides is CONVOLUTIONS else "0conv2fc")
    assert (results["protocol"]["freeze_at"] == 5) == (overrides is FROZEN)


@pytest.mark.detectron2
def test_detectron2s_default_trainer_trains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detectron2's default trainer runs a leaf from a converted backbone, on data that Detectron2 itself registers."""
    from detectron2.config import get_cfg
    from detectron2.data import DatasetCatalog
    from detectron2.data.datasets import register_coco_instances
    from detectron2.engine import DefaultTrainer

    weights = tiny_coco.write_backbone(tmp_path, name="w.pkl")
    _, annotations, images = tiny_coco.write(tmp_path / "data").split(":")
    name = f"registered_{tmp_path.name}"
    register_coco_instances(name, {}, annotations, images)
    cfg = get_cfg()
    cfg.merge_from_file(str(CONFIGS / "coco_mask_R50_FPN_1x_jcl.yaml"))
    data = {"DATASETS.TRAIN": (name,), "DATASETS.TEST": (), "OUTPUT_DIR": str(tmp_path)}
    cfg.merge_from_list(tiny_coco.words(SMOKE | data | {"MODEL.WEIGHTS": str(weights)}))
    trainer: Any = DefaultTrainer(cfg)
    trainer.resume_or_load(False)
    loaded = trainer.model.backbone.bottom_up.state_dict()["res4.0.shortcut.norm.running_var"]
    assert torch.equal(loaded, torch.load(tmp_path / "s.pth")["layer3.0.downsample.1.running_var"])
    monkeypatch.setattr(DefaultTrainer, "test", classmethod(lambda cls, cfg, model, evaluators=None: {}))
    trainer.train()
    DatasetCatalog.remove(name)
    assert (tmp_path / "model_final.pth").is_file()


def test_detectron2_is_requested_but_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    refused(lambda: preflight.choose_engine("detectron2"), "make detectron2")
    assert preflight.choose_engine("auto") == "torchvision"
