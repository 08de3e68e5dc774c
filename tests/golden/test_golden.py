"""Files of an earlier version, one per format that must stay readable; and MoCo's own code reads our files.

Short runs of that version wrote them, with a ResNet-18 of 2 to 16 channels, which stands here for every ResNet-18 as
well. They never change; a new format adds a new file.
"""

import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torchvision

import pretrain
from pretrain.common.weights import checkpoint
from pretrain.config import load_config
from pretrain.probe.heads import Heads
from pretrain.probe.linear import restore_heads
from pretrain.state import build_train_state
from tests import tiny
from tests.transfer import tiny_coco
from transfer.torchvision_engine.model import build_model
from transfer.torchvision_engine.solver import build_optimizer
from transfer.training import checkpoints
from transfer.weights.load import read_weights

GOLDEN = Path(__file__).parent
PREFIX = "module.encoder_q."


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    tiny.use(monkeypatch, 2)


def _features(path: Path, encoder: str = "query") -> list[float]:
    image = torch.linspace(-2, 2, 3 * 32 * 32).view(1, 3, 32, 32)
    with torch.no_grad():
        return pretrain.load_backbone(path, encoder)(image)[0, 5:7].tolist()


@pytest.mark.parametrize(
    ("name", "encoder", "features"),
    [
        ("pretraining.pth", "query", [0.133703, 0.026657]),
        ("pretraining.pth", "key", [0.258526, 0.137082]),
        ("backbone.pkl", "query", [0.133703, 0.026657]),
        ("detector.pth", "query", [0.084617, 0.302474]),
    ],
)
def test_a_backbone_computes_what_it_did(name, encoder, features):
    assert _features(GOLDEN / name, encoder) == pytest.approx(features, rel=1e-3)


def test_pretraining_resumes():
    keys = (
        "METHOD.NAME mocov2 MODEL.ARCH resnet18 MODEL.HEAD_HIDDEN_DIMS [16] MODEL.EMBEDDING_DIM 8 MODEL.QUEUE_SIZE 16 "
        "SOLVER.IMS_PER_BATCH 8 DEVICE cpu"
    )
    cfg = load_config(None, keys.split())
    saved = checkpoint.read(GOLDEN / "pretraining.pth")
    run = build_train_state(cfg, torch.device("cpu"), 4, saved["images"])
    run.load_state_dict(saved)
    assert run.step == 2
    state = run.objective.model.state_dict()
    assert state["encoder_q.conv1.weight"].sum().item() == pytest.approx(13.416725, abs=1e-5)
    assert len(run.optimizer.state) == len(list(run.objective.encoder.network.parameters()))


def test_a_linear_probe_resumes():
    heads = Heads(16, 2, load_config(None, ["LINEAR.STEPS", "[]", "LINEAR.EPOCHS", "1"]).LINEAR)
    step, losses = restore_heads(heads, checkpoint.read(GOLDEN / "linear_probe.pth"), torch.zeros(1))
    assert (step, losses.tolist()) == (2, [0.0])
    assert heads.state()["state_dict"]["0.bias"].tolist() == pytest.approx([8.412827, -8.412827])


def test_a_detector_resumes_and_is_evaluated(tmp_path):
    sizes = {"MODEL__FPN__OUT_CHANNELS": 4, "MODEL__ROI_BOX_HEAD__FC_DIM": 8}
    cfg = tiny_coco.config(tmp_path, "unused", **sizes)
    model = build_model(cfg, torch.device("cpu"))
    shutil.copy(GOLDEN / "detector.pth", tmp_path / "model_final.pth")
    newest = checkpoints.load_newest(tmp_path)
    assert newest is not None and newest[1]["iteration"] == 3
    model.load_state_dict(newest[1]["model"], strict=True)
    build_optimizer(cfg, model).load_state_dict(newest[1]["optimizer"])
    weights = read_weights(GOLDEN / "detector.pth").state
    assert weights.keys() == model.state_dict().keys()
    assert weights["roi_heads.box_predictor.cls_score.bias"].tolist() == pytest.approx(
        [-0.00955766, -0.00922097, -0.00883034, 0.02760897]
    )


@pytest.mark.core
def test_mocos_linear_classification_reads_ours():
    state = torch.load(GOLDEN / "pretraining.pth", weights_only=True)["state_dict"]
    head = PREFIX + "fc"
    backbone = {k.removeprefix(PREFIX): v for k, v in state.items() if k.startswith(PREFIX) and not k.startswith(head)}
    result = torchvision.models.resnet18().load_state_dict(backbone, strict=False)
    assert set(result.missing_keys) == {"fc.weight", "fc.bias"} and not result.unexpected_keys


def test_mocos_conversion_for_detection_makes_what_ours_does(tmp_path):
    renames = [
        (r"^(?!layer)", "stem."),
        (r"layer(\d)", lambda m: f"res{int(m[1]) + 1}"),
        (r"bn(\d)", r"conv\1.norm"),
        (r"downsample\.0", "shortcut"),
        (r"downsample\.1", "shortcut.norm"),
    ]
    model = {}
    for name, tensor in torch.load(GOLDEN / "pretraining.pth", weights_only=True)["state_dict"].items():
        if name.startswith(PREFIX):
            name = name.removeprefix(PREFIX)
            for pattern, replacement in renames:
                name = re.sub(pattern, replacement, name)
            model[name] = tensor.numpy()
    content = {"model": model, "__author__": "MOCO", "matching_heuristics": True}
    (tmp_path / "moco.pkl").write_bytes(pickle.dumps(content))
    theirs = read_weights(tmp_path / "moco.pkl").state
    ours = read_weights(GOLDEN / "backbone.pkl").state
    assert ours.keys() <= theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(".fc." in name or name.endswith("num_batches_tracked") for name in theirs.keys() - ours.keys())
