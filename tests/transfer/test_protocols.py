"""The protocols beyond JCL's run on COCO's own layout: few labels, frozen features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision.models._meta import _COCO_CATEGORIES

from tests.transfer import tiny_coco
from tools import make_data
from transfer import train_net

CONFIGS = Path(__file__).parents[2] / "configs"
COUNT = 100  # images of train2017
SMALL: dict[str, Any] = {
    "MODEL.WEIGHTS": "", "MODEL.DEVICE": "cpu", "MODEL.RESNETS.DEPTH": 18, "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
    "INPUT.MIN_SIZE_TRAIN": (64,), "INPUT.MIN_SIZE_TEST": 64, "SOLVER.IMS_PER_BATCH": 2, "SOLVER.MAX_ITER": 1,
    "SOLVER.STEPS": (), "TEST.PRECISE_BN.NUM_ITER": 1, "DATALOADER.NUM_WORKERS": 0, "SEED": 3, "OUTPUT_DIR": "out",
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 32, "MODEL.RPN.POST_NMS_TOPK_TRAIN": 50,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 30,
}  # fmt: skip


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """datasets/coco with train2017 and val2017, each image with a person and its keypoints."""
    root = tmp_path_factory.mktemp("coco")
    rng = np.random.default_rng(0)
    (root / "datasets/coco/annotations").mkdir(parents=True)
    kinds = [{"id": i, "name": name} for i, name in enumerate(_COCO_CATEGORIES) if i and name != "N/A"]
    person = {"id": 1, "name": "person", "keypoints": tiny_coco.NAMES, "skeleton": [[1, 2]]}
    for split, count in (("train2017", COUNT), ("val2017", 3)):
        (root / f"datasets/coco/{split}").mkdir()
        images, annotations = [], []
        for number in range(1, count + 1):
            name = f"{number:012}.jpg"
            Image.fromarray(rng.integers(0, 255, (64, 80, 3), dtype=np.uint8)).save(
                root / f"datasets/coco/{split}/{name}"
            )
            images.append({"id": number, "file_name": name, "height": 64, "width": 80})
            x, y, w, h = 8.0, 6.0, 40.0, 50.0
            points = np.stack([rng.uniform(x, x + w, 17), rng.uniform(y, y + h, 17), np.full(17, 2)], 1)
            annotations.append({
                "id": number, "image_id": number, "category_id": 1, "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0,
                "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]], "keypoints": points.flatten().tolist(),
                "num_keypoints": 17,
            })  # fmt: skip
        plain = [{key: one[key] for key in one if "keypoints" not in key} for one in annotations]
        for prefix, categories, kept in (
            ("instances", kinds, plain), ("person_keypoints", [person], annotations),
        ):  # fmt: skip
            content = {"images": images, "annotations": kept, "categories": categories}
            (root / f"datasets/coco/annotations/{prefix}_{split}.json").write_text(json.dumps(content))
    return root


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        ("coco_R50_FPN_1pct", "torchvision"),
        pytest.param("coco_R50_FPN_1pct", "detectron2", marks=pytest.mark.detectron2),
        ("coco_R50_FPN_1x_frozen", "torchvision"),
    ],
)
def test_a_protocol_runs(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, engine: str
) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/coco").symlink_to(layout / "datasets/coco")
    monkeypatch.chdir(tmp_path)
    if "pct" in config:
        make_data.main(
            ["subset", "datasets/coco/annotations/instances_train2017.json", "datasets/coco_subsets", "--folds", "1",
             "--percent", "1"]
        )  # fmt: skip
    words = ["--config-file", str(CONFIGS / f"{config}.yaml"), "--engine", engine]
    frozen = {"SOLVER.FROZEN_BN_ITER": 2} if "frozen" in config else {}
    args = train_net.parse([*words, *tiny_coco.words(SMALL | frozen)])
    results = train_net.work(args)
    assert results["metrics"]["bbox"]["AP"] is not None
    assert (results["protocol"]["freeze_at"] == 5) == ("frozen" in config)
    if "pct" in config:
        assert results["protocol"]["train"] == ["coco:datasets/coco_subsets/1pct_fold0.json:datasets/coco/train2017"]
