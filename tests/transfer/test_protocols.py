"""The protocols beyond JCL's run on COCO's own layout: few labels, frozen features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchvision.models._meta import _COCO_CATEGORIES

from tests.transfer import tiny_coco
from tools import make_data
from transfer import train_net

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL: dict[str, Any] = {
    "MODEL.WEIGHTS": "", "MODEL.DEVICE": "cpu", "MODEL.RESNETS.DEPTH": 18, "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
    "INPUT.MIN_SIZE_TRAIN": (64,), "INPUT.MIN_SIZE_TEST": 64,
    "SOLVER.IMS_PER_BATCH": 2, "SOLVER.MAX_ITER": 1, "SOLVER.STEPS": (), "TEST.PRECISE_BN.NUM_ITER": 1,
    "DATALOADER.NUM_WORKERS": 0, "SEED": 3, "OUTPUT_DIR": "out", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 32,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 50, "MODEL.RPN.POST_NMS_TOPK_TEST": 30,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        ("coco_R50_FPN_1pct", "torchvision"),
        pytest.param("coco_R50_FPN_1pct", "detectron2", marks=pytest.mark.detectron2),
        ("coco_R50_FPN_1x_frozen", "torchvision"),
    ],
)
def test_a_protocol_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, engine: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("datasets/coco/annotations").mkdir(parents=True)
    categories = [{"id": i, "name": name} for i, name in enumerate(_COCO_CATEGORIES) if i and name != "N/A"]
    for split in ("train2017", "val2017"):
        tiny_coco.write(folder := Path("datasets/coco", split))
        content = json.loads((folder / "annotations.json").read_text()) | {"categories": categories}
        Path(f"datasets/coco/annotations/instances_{split}.json").write_text(json.dumps(content))
    subset = "coco:datasets/coco_subsets/50pct_fold0.json:datasets/coco/train2017"
    make_data.main(
        ["subset", "datasets/coco/annotations/instances_train2017.json", "datasets/coco_subsets", "--folds", "1",
         "--percent", "50"]
    )  # fmt: skip
    words = ["--config-file", str(CONFIGS / f"{config}.yaml"), "--engine", engine]
    own = {"SOLVER.FROZEN_BN_ITER": 2} if "frozen" in config else {"DATASETS.TRAIN": (subset,)}
    results = train_net.work(train_net.parse([*words, *tiny_coco.words(SMALL | own)]))
    assert results["metrics"]["bbox"]["AP"] is not None
    assert (results["protocol"]["freeze_at"] == 5) == ("frozen" in config)
    assert results["protocol"]["train"] == ["coco_2017_train" if "frozen" in config else subset]
