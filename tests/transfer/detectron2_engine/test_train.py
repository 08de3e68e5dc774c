"""The Detectron2 engine on six drawn images: keypoints, figures, two processes and augmentation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.errors import UserError
from pretrain.common.run.state import RunContext
from tests import tiny
from tests.transfer import tiny_coco
from tests.transfer.torchvision_engine.test_train import saved
from transfer.api import start
from transfer.train_net import main, parse, prepare

pytest.importorskip("detectron2", reason="Detectron2 is not installed")
pytestmark = pytest.mark.detectron2

KEYPOINT: dict[str, Any] = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1}
PRECISE_BN = {"TEST__PRECISE_BN__ENABLED": True, "TEST__PRECISE_BN__NUM_ITER": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_coco.write_backbone(tmp_path_factory.mktemp("weights"))


def command(tmp_path: Path, name: str, *flags: str, **keys: Any) -> list[str]:
    return tiny_coco.command(tmp_path, name, "detectron2", *flags, **{**PRECISE_BN, **keys})


def go(tmp_path: Path, name: str, *flags: str, **keys: Any) -> dict[str, Any]:
    return tiny_coco.fine_tune(command(tmp_path, name, *flags, **keys))


def test_trains_and_evaluates_keypoints(tmp_path: Path, weights: Path) -> None:
    """A learning rate of 0 leaves the initial weights unchanged; the recipes' smoke forms train other detectors."""
    name = tiny_coco.write(tmp_path / "data", keypoints=True)
    results = go(tmp_path, name, "--visualize", "2", MODEL__WEIGHTS=str(weights), SOLVER__BASE_LR=0.0, **KEYPOINT)
    out = tmp_path / "out"
    assert list(results["metrics"]) == ["bbox", "keypoints"]
    assert json.loads((out / "results.json").read_text()) == results
    assert results["engine"] == {"name": "detectron2", "version": "0.6"}
    assert results["iteration"] == 2 and results["protocol"]["detector"] == "keypoint"
    assert results["protocol"]["heads"] == "0conv2fc" and results["weights"]["provenance"]["source"] == "s.pth"
    last = json.loads((out / "metrics.json").read_text().splitlines()[-1])
    assert {"bbox/AP", "keypoints/AP", "total_loss", "rpn/num_pos_anchors"} <= last.keys()
    for key, tensor in torch.load(weights)["model"].items():
        if "running_" not in key and "num_batches" not in key:
            assert torch.equal(saved(out)["model"][key], tensor), key
    assert len(list((out / "visualizations").glob("*.png"))) == 2
    assert isinstance(json.loads((out / results["predictions"][name]).read_text()), list)
    assert {"config.yaml", "environment.txt", "log.txt", "model_final.pth"} <= {p.name for p in out.iterdir()}
    evaluated = go(tmp_path, name, "--eval-only", "--resume", **KEYPOINT)
    assert evaluated["metrics"] == results["metrics"] and evaluated["iteration"] is None


def test_pictures_of_training_go_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    go(tmp_path, tiny_coco.write(tmp_path / "data"), DATASETS__TEST=(), VIS_PERIOD=2, SOLVER__MAX_ITER=3)
    events = EventAccumulator(str(tmp_path / "out")).Reload()
    tag, *_ = events.Tags()["images"]
    assert [image.step for image in events.Images(tag)] == [0, 2]


@pytest.mark.slow
def test_two_processes(tmp_path: Path, weights: Path, name: str) -> None:
    words = command(tmp_path, name, "--num-gpus", "2", MODEL__WEIGHTS=str(weights), MODEL__ROI_BOX_HEAD__NORM="")
    main(words)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["metrics"]) == {"bbox"} and results["iteration"] == 2
    assert "MODEL.RESNETS.NORM is naiveSyncBN instead of SyncBN" in (tmp_path / "out" / "log.txt").read_text()
    with pytest.raises(UserError, match="contains an earlier run"):  # raised by a rank, and again by its parent
        start(prepare(parse(words)), RunContext(), 2)


def test_augmentation_at_test_time_is_added(tmp_path, monkeypatch, name):
    """With two sizes and their flips, each of the six images passes the network four times, and once unchanged."""
    from detectron2.modeling import GeneralizedRCNN

    tiny.use(monkeypatch)
    seen: list[int] = []
    inference = GeneralizedRCNN.inference
    monkeypatch.setattr(GeneralizedRCNN, "inference", lambda *args, **keys: seen.append(1) or inference(*args, **keys))
    keys = {"TEST__AUG__ENABLED": True, "TEST__AUG__MIN_SIZES": [64, 80]}
    metrics = go(tmp_path, name, SOLVER__MAX_ITER=1, **keys)["metrics"]
    assert metrics.keys() == {"bbox", "bbox_TTA"} and metrics["bbox"] != metrics["bbox_TTA"]
    assert len(seen) >= 6 + 6
