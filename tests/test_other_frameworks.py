"""docs/other_frameworks.md is true: its code loads each tensor of a run's backbone."""

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.resnets import resnet_state, write_run
from tests.snippets import ROOT, snippets
from tools import convert_to_d2

PAGE = ROOT / "docs/other_frameworks.md"
MEAN = [0.6, 0.5, 0.3]  # no library's default
STD = [0.2, 0.25, 0.3]
ONEDL = {"onedl-mmdetection": "3.5.1", "onedl-mmengine": "0.10.12", "onedl-mmcv": "2.3.6"}
ONEDL_NEEDS = ["addict", "platformdirs", "rich", "shapely", "six", "termcolor", "terminaltables", "yapf"]
# The wheel contains no operators. Neither building nor loading a backbone calls one.
LOAD_IN_ONEDL = """
import importlib.machinery, sys, types

class Operators(types.ModuleType):
    __spec__ = importlib.machinery.ModuleSpec("mmcv._ext", None)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

sys.modules["mmcv._ext"] = Operators("mmcv._ext")
import torch
import mmdet.models
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

init_default_scope("mmdet")
detector = MODELS.build(Config.fromfile("photos_retinanet.py").model)
detector.init_weights()
assert all(tensor.requires_grad for tensor in detector.backbone.parameters())
torch.save(detector.backbone.state_dict(), "loaded.pth")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the run that the page needs, and convert it by the page's command."""
    folder = tmp_path_factory.mktemp("frameworks")
    write_run(folder / "runs/photos", "resnet50", ["VIEWS.MEAN", str(MEAN), "VIEWS.STD", str(STD)])
    (line,) = next(block for block in snippets("bash") if block.page == PAGE).lines()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        convert_to_d2.main(line.split()[2:])
    return folder


def read_snippet(word: str) -> str:
    """Return the only Python snippet of the page that contains a word."""
    (text,) = [block.text for block in snippets("python") if block.page == PAGE and word in block.text]
    return text


def check_backbone(state: dict[str, Tensor]) -> None:
    """Compare a loaded backbone with the run's query encoder."""
    expected = resnet_state("resnet50", head=False)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.docs
@pytest.mark.parametrize("build", ["retinanet_resnet50_fpn", "fcos_resnet50_fpn"])
def test_torchvision(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, build: str) -> None:
    monkeypatch.chdir(folder)
    variables: dict[str, Any] = {}
    exec(read_snippet("retinanet_resnet50_fpn").replace("retinanet_resnet50_fpn", build), variables)
    assert "<All keys matched successfully>" in capsys.readouterr().out
    detector = variables["detector"]
    check_backbone(detector.backbone.body.state_dict())
    assert all(tensor.requires_grad for tensor in detector.parameters())
    assert detector.transform.image_mean == pytest.approx(MEAN) and detector.transform.image_std == pytest.approx(STD)
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 50.0]]), "labels": torch.tensor([2])}
    detector.transform.min_size = (96,)
    losses = detector([torch.rand(3, 96, 128)], [target])
    assert all(loss.isfinite() for loss in losses.values())


@pytest.mark.docs
def test_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers", reason="not installed: transformers; pip install -e '.[export]'")
    monkeypatch.chdir(folder)
    variables: dict[str, Any] = {}
    exec(read_snippet("RTDetrForObjectDetection"), variables)
    assert "<All keys matched successfully>" in capsys.readouterr().out
    detector = variables["detector"].train()
    check_backbone(variables["backbone"].state_dict())
    assert all(tensor.requires_grad for tensor in variables["backbone"].parameters())
    white = np.full((48, 64, 3), 255, np.uint8)
    inputs = variables["processor"](white, size={"height": 160, "width": 160}, return_tensors="pt")
    expected = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(inputs["pixel_values"][0, :, 0, 0], expected)
    target = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3]])}
    assert detector(**inputs, labels=[target]).loss.isfinite()


@pytest.mark.detectron2
@pytest.mark.parametrize(("suffix", "is_loaded"), [(".pkl", True), (".pth", False)])
def test_a_backbone_without_bottom_up_as_of_detrex(folder: Path, suffix: str, is_loaded: bool) -> None:
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.modeling.backbone.resnet import BasicStem, ResNet

    file = folder / f"weights/detectron2{suffix}"
    convert_to_d2.main([str(folder / "runs/photos"), str(file)])
    stages = ResNet.make_default_stages(50, stride_in_1x1=False, norm="BN")
    resnet = ResNet(BasicStem(norm="BN"), stages, out_features=["res3", "res4", "res5"])
    DetectionCheckpointer(nn.ModuleDict({"backbone": resnet, "class_embed": nn.Linear(8, 3)})).load(str(file))
    expected = resnet_state("resnet50")
    for ours, theirs in (("conv1", "stem.conv1"), ("layer4.2.conv3", "res5.2.conv3")):
        assert torch.equal(resnet.state_dict()[f"{theirs}.weight"], expected[f"{ours}.weight"]) == is_loaded
    variance = resnet.state_dict()["res5.2.conv3.norm.running_var"]
    assert torch.equal(variance, expected["layer4.2.bn3.running_var"]) == is_loaded


@pytest.mark.slow
def test_onedls_mmdetection(folder: Path, tmp_path: Path) -> None:
    """Its packages are installed beside ours, in an environment of the test's own."""
    text = PAGE.read_text()
    assert ONEDL["onedl-mmdetection"] in text and ONEDL["onedl-mmengine"] in text
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    python = tmp_path / "venv/bin/python"
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    names = [f"{name}=={version}" for name, version in ONEDL.items()]
    subprocess.run([python, "-m", "pip", "-q", "install", "--no-deps", *names, *ONEDL_NEEDS], check=True, timeout=900)
    (folder / "photos_retinanet.py").write_text(read_snippet("_base_"))
    done = subprocess.run([python, "-c", LOAD_IN_ONEDL], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    check_backbone(torch.load(folder / "loaded.pth"))
    output = done.stdout + done.stderr
    assert "Loads checkpoint by local backend from path: weights/photos.pth" in output
    assert "missing keys" not in output and "unexpected key" not in output
