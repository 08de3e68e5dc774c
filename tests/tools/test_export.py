"""Exports compute what their source computes from a raw image; others are refused, and nothing is written."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import functional

from pretrain.common.files import sha256
from pretrain.model.encoder import build_backbone
from tests.errors import refused
from tests.resnets import caffe2, resnet_state, write_run
from tools import export
from tools.exporting import formats, source

MEAN = [0.6, 0.5, 0.3]  # no library's default
STD = [0.2, 0.25, 0.3]
SIZE = 40
RESIZE = 53  # of which timm's arithmetic makes 52 unless its crop_pct is rounded down


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; pip install -e '.[export]'")


ONNX = needs("onnxscript", "onnxruntime")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run folder of pretraining with a random ResNet-18."""
    folder = tmp_path / "pretrain"
    keys = ["SEED", "3", "VIEWS.MEAN", str(MEAN), "VIEWS.STD", str(STD)]
    write_run(folder, "resnet18", [*keys, "VIEWS.IMAGE_SIZE", str(SIZE), "PROBE.RESIZE", str(RESIZE)])
    return folder


def photo() -> Image.Image:
    noise = np.random.default_rng(1).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((83, 61), Image.Resampling.BICUBIC)


def check_features(features: Tensor) -> None:
    """Compare features of the photo with those by torchvision's transforms and network."""
    resized = functional.resize(cast(Any, photo()), [RESIZE])  # bilinear, as the probes resize
    crop = cast(Any, functional.center_crop(resized, [SIZE, SIZE]))
    pixels = functional.normalize(functional.to_tensor(crop), MEAN, STD)
    resnet = torchvision.models.resnet18(weights=None)
    resnet.fc = nn.Identity()  # type: ignore[assignment]
    resnet.load_state_dict(resnet_state("resnet18", head=False))
    with torch.no_grad():
        expected = resnet.eval()(pixels[None])
    assert (features - expected).abs().max() < 2e-3 * expected.abs().max()  # Pillow and torch round pixels differently


def test_the_cards_lines_give_the_features_of_a_photo(run: Path, tmp_path: Path) -> None:
    export.main([str(run), "--format", "timm", "--output", str(tmp_path / "out")])
    text = (tmp_path / "out/README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code and yaml.safe_load(text.split("---")[1])["library_name"] == "timm"
    scope: dict[str, Any] = {}
    exec(code[1], scope)
    with torch.no_grad():
        check_features(scope["model"](scope["transform"](photo())[None]))


@needs("transformers")
def test_transformers_reads_the_folder_for_timm(run: Path, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, AutoModel

    export.main([str(run), "--format", "timm", "--output", str(tmp_path / "out")])
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        check_features(model(**processor(photo(), return_tensors="pt")).pooler_output)


@pytest.mark.parametrize("target", ["timm", pytest.param("onnx", marks=ONNX)])
def test_a_wrong_export_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    write = formats._write_timm
    monkeypatch.setattr(formats, "_write_timm", lambda source, out: write(replace(source, resize=0), out))
    monkeypatch.setattr(formats._PixelBackbone, "forward", lambda self, images: self.resnet(images / 255))
    output = tmp_path / ("out.onnx" if target == "onnx" else "out")
    words = [str(run), "--format", target, "--output", str(output)]
    refused(lambda: export.main(words), "features of the exported model differs by ", "; nothing was written")
    assert list(tmp_path.iterdir()) == [run]


@ONNX
@pytest.mark.parametrize("stem", ["imagenet", pytest.param("cifar", marks=pytest.mark.slow)])
def test_onnx_takes_pixels_of_any_number_and_size(tmp_path: Path, stem: str) -> None:
    import onnxruntime

    resnet = build_backbone("resnet18", stem)
    state = resnet_state("resnet18", head=False)
    if stem == "cifar":
        state["conv1.weight"] = state["conv1.weight"][:, :, 2:5, 2:5].clone()
    resnet.load_state_dict(state)
    torch.save(state, tmp_path / "weights.pth")
    export.main([str(tmp_path / "weights.pth"), "--format", "onnx", "--output", str(tmp_path / "out.onnx")])
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    for shape in ((1, 3, 32, 32), (3, 3, 65, 40)):
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = resnet.eval()((pixels / 255 - mean) / std)
        (features,) = session.run(None, {"images": pixels.numpy()})
        assert np.abs(features - expected.numpy()).max() < 1e-4 * expected.abs().max()
    provenance = json.loads(session.get_modelmeta().custom_metadata_map["provenance"])
    assert provenance["source_sha256"] == sha256(tmp_path / "weights.pth")


def test_what_a_target_cannot_represent_is_refused(run: Path, tmp_path: Path) -> None:
    state = resnet_state("resnet18", head=False)
    torch.save({**state, "conv1.weight": state["conv1.weight"][:, :, :3, :3].clone()}, tmp_path / "cifar.pth")
    torch.save({"model": {k: torch.from_numpy(v) for k, v in caffe2().items()}}, tmp_path / "msra.pth")
    torch.save({"model": state, "provenance": {"INPUT.FORMAT": "HSV"}}, tmp_path / "hsv.pth")
    (tmp_path / "used").mkdir()
    for name, output, target, message in (
        ("cifar.pth", "out", "timm", "use --format onnx"),
        ("msra.pth", "out", "timm", "strides in the 1x1"),
        ("hsv.pth", "out", "timm", "was trained on HSV images"),
        ("pretrain", "used", "timm", "used exists; choose another output"),
        ("pretrain", "out", "onnx", "must end in .onnx"),
        ("pretrain", "out.onnx", "timm", "must not end in .onnx"),
    ):
        words = [str(tmp_path / name), "--format", target, "--output", str(tmp_path / output)]
        refused(lambda: export.main(words), message)  # noqa: B023
    assert not list(tmp_path.glob("*out*"))


def test_a_missing_library_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    words = [str(run), "--format", "onnx", "--output", str(tmp_path / "out.onnx")]
    refused(lambda: export.main(words), "needs onnxscript and onnxruntime; ", "pip install -e '.[export]'")


def test_a_card_says_what_is_recorded_and_no_more(run: Path, tmp_path: Path) -> None:
    sha = sha256(run / "checkpoint_final.pth")
    text = formats._render_card(source.read_export_source(run), tmp_path / "out", 2e-7)
    facts = ["pretrained on: cifar10", "epochs: 200", "seed: 3", f"checkpoint: checkpoint_final.pth, SHA-256 {sha}"]
    assert "# resnet18 pretrained by jcl" in text and {f"- {fact}" for fact in facts} < set(text.splitlines())
    torch.save(resnet_state("resnet18"), tmp_path / "plain.pth")
    text = formats._render_card(source.read_export_source(tmp_path / "plain.pth"), tmp_path / "out", 0.0)
    assert "pretrained by an unknown method" in text and "ImageNet's, not recorded" in text
    assert "epochs" not in text and "seed" not in text
