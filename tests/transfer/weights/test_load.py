"""Loading is strict, and the config must describe the network and input that the weights were pretrained with."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.common.run.state import update_state
from pretrain.common.weights.backbone import read_backbone
from pretrain.common.weights.provenance import MSRA as MSRA_INPUT
from pretrain.common.weights.provenance import Provenance
from pretrain.common.weights.resnet_names import PREFIX, to_detectron2
from tests.errors import refused
from tests.resnets import resnet_state
from tests.transfer import tiny_coco
from tests.transfer.weights.test_caffe2 import MSRA
from transfer.weights.convert import convert
from transfer.weights.load import Weights, check_weights_fit, load_weights, read_weights

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
R50 = {"MODEL__RESNETS__DEPTH": 50, "MODEL__RESNETS__RES2_OUT_CHANNELS": 256}


def in_detectron2s_names(arch: str) -> dict[str, torch.Tensor]:
    return {PREFIX + name: tensor for name, tensor in to_detectron2(resnet_state(arch, head=False), arch).items()}


@pytest.fixture(scope="module")
def r50() -> Weights:
    provenance = {
        "INPUT.FORMAT": "RGB",
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
        "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
        "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    }
    return Weights("w.pth", "0", in_detectron2s_names("resnet50"), Provenance.from_json(provenance))


@pytest.fixture(scope="module")
def r18(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return read_weights(tiny_coco.write_backbone(tmp_path_factory.mktemp("w")))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MODEL.RESNETS.STRIDE_IN_1X1", True),
        ("INPUT.FORMAT", "BGR"),
        ("MODEL.PIXEL_STD", [58.395, 57.12, 57.42]),  # a digit off
        ("MODEL.RESNETS.DEPTH", 101),
    ],
)
def test_wrong_key_is_named(tmp_path, r50: Weights, key: str, value: Any) -> None:
    check_weights_fit(r50, tiny_coco.config(tmp_path, "x", **R50))
    cfg = tiny_coco.config(tmp_path, "x", **(R50 | {key.replace(".", "__"): value}))
    refused(lambda: check_weights_fit(r50, cfg), key, value, "w.pth")


def test_basic_blocks_have_no_1x1_to_stride_in(tmp_path, r18: Weights) -> None:
    check_weights_fit(r18, tiny_coco.config(tmp_path, "x", MODEL__RESNETS__STRIDE_IN_1X1=True))


@pytest.mark.core
def test_load_names_what_does_not_fit(r50: Weights, caplog) -> None:
    caplog.set_level("INFO")
    state = {name: torch.zeros_like(tensor) for name, tensor in r50.state.items()}
    state["roi_heads.box_predictor.cls_score.weight"] = torch.ones(4, 8)
    anchors = {f"proposal_generator.anchor_generator.cell_anchors.{i}": torch.ones(3, 4) for i in range(5)}
    zoo = dataclasses.replace(r50, state=r50.state | anchors)  # as the model zoo's files
    load_weights(lambda: {**r50.state}, zoo, require_heads=True)
    caplog.clear()
    load_weights(lambda: state, r50)
    assert torch.equal(state[f"{PREFIX}res5.2.conv3.weight"], r50.state[f"{PREFIX}res5.2.conv3.weight"])
    assert caplog.messages == [f"loaded {len(r50.state)} tensors from {r50.path}; random: roi_heads.box_predictor"]
    refused(lambda: load_weights(lambda: state, r50, require_heads=True), "w.pth", "not a detector")
    head = {"roi_heads.box_predictor.bbox_pred.weight": torch.ones(1)}
    other = dataclasses.replace(r50, state=r50.state | head)
    refused(lambda: load_weights(lambda: state, other, require_heads=True), "box_predictor.cls_score.weight")
    state[f"{PREFIX}res6.0.conv1.weight"] = torch.zeros(1)
    refused(lambda: load_weights(lambda: state, r50), f"lacks {PREFIX}res6.0.conv1.weight")
    del state[f"{PREFIX}res6.0.conv1.weight"], state[f"{PREFIX}stem.conv1.norm.running_mean"]  # GN has none
    refused(lambda: load_weights(lambda: state, r50), f"contains {PREFIX}stem.conv1.norm.running_mean")
    state[f"{PREFIX}stem.conv1.norm.running_mean"] = torch.zeros(64)
    state[f"{PREFIX}res4.0.shortcut.weight"] = torch.zeros(512, 1024, 1, 1)
    refused(lambda: load_weights(lambda: state, r50), "res4.0.shortcut.weight", (1024, 512, 1, 1), (512, 1024, 1, 1))


def test_other_files_are_refused(tmp_path) -> None:
    torch.save(resnet_state(), tmp_path / "torchvision.pth")
    refused(lambda: read_weights(tmp_path / "torchvision.pth"), PREFIX, "convert_to_d2.py")
    refused(lambda: read_weights(tmp_path / "torchvison.pth"), "did you mean 'torchvision.pth'")
    update_state(tmp_path, stage="transfer")
    refused(lambda: read_weights(tmp_path), tmp_path / "model_final.pth")


def test_detectron2s_own_backbone_file(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    names = to_detectron2(resnet_state(head=False), "resnet18")
    model = {k: v.numpy() for k, v in names.items() if "tracked" not in k} | {"stem.fc.weight": np.zeros((2, 2))}
    content = {"model": model, "__author__": "someone", "matching_heuristics": True}
    (tmp_path / "R-18.pkl").write_bytes(pickle.dumps(content))
    weights = read_weights(tmp_path / "R-18.pkl")
    assert set(weights.state) == {PREFIX + name for name in names if "tracked" not in name}
    check_weights_fit(weights, tiny_coco.config(tmp_path, "x"))
    assert "does not record MODEL.RESNETS.STRIDE_IN_1X1, MODEL.PIXEL_MEAN" in caplog.messages[0]


def test_a_detector_of_the_model_zoo_needs_its_config(tmp_path) -> None:
    model = {name: tensor.numpy() for name, tensor in in_detectron2s_names("resnet50").items()}
    content = {"model": model, "__author__": "Detectron2 Model Zoo"}
    (tmp_path / "model_final.pkl").write_bytes(pickle.dumps(content))
    zoo = read_weights(tmp_path / "model_final.pkl")
    refused(lambda: check_weights_fit(zoo, tiny_coco.config(tmp_path, "x", **R50)), "STRIDE_IN_1X1 is False", "True")
    refused(lambda: read_backbone(tmp_path / "model_final.pkl"), "BGR", "1x1")
    check_weights_fit(zoo, tiny_coco.config(tmp_path, "x", **MSRA))
    convert(tmp_path / "model_final.pkl", tmp_path / "w.pth")
    converted = read_weights(tmp_path / "w.pth").provenance
    assert converted and converted.input == MSRA_INPUT
    model["pixel_std"] = np.array([57.375, 57.12, 58.395]).reshape(3, 1, 1)  # one that was trained from random values
    (tmp_path / "scratch.pkl").write_bytes(pickle.dumps(content))
    assert read_weights(tmp_path / "scratch.pkl").summary()["provenance"] == {}


def test_a_detector_is_read_from_a_file_with_other_content(tmp_path, r18: Weights) -> None:
    torch.save({"model": r18.state, "optimizer": {"state": {}}, "loss": torch.ones(1)}, tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").state.keys() == r18.state.keys()
    torch.save({"model": r18.state, "ema": r18.state}, tmp_path / "w.pth")
    refused(lambda: read_weights(tmp_path / "w.pth"), tmp_path / "w.pth", "model, ema")


def test_a_detectors_config_replaces_its_provenance(tmp_path, r18: Weights) -> None:
    torch.save({"model": r18.state, "iteration": 5}, tmp_path / "model_final.pth")
    (tmp_path / "config.yaml").write_text(tiny_coco.config(tmp_path, "x", INPUT__FORMAT="BGR").dump())
    cfg = tiny_coco.config(tmp_path, "x", INPUT__FORMAT="RGB")
    refused(lambda: check_weights_fit(read_weights(tmp_path / "model_final.pth"), cfg), "INPUT.FORMAT", "BGR")
    (tmp_path / "config.yaml").write_text(tiny_coco.config(tmp_path, "x", INPUT__FORMAT="HSV").dump())
    refused(lambda: read_backbone(tmp_path / "model_final.pth"), "HSV", "detectors only")
    (tmp_path / "config.yaml").write_text("METHOD: []")  # written by another program
    assert read_weights(tmp_path / "model_final.pth").summary()["provenance"] == {}
