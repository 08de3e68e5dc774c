"""A pretrained backbone -> a folder for timm or transformers, or an ONNX file; each is proven from the raw image on.

timm's folder and transformers' hold config.json, model.safetensors and a model card (README.md), transformers' also
preprocessor_config.json. The ONNX file holds the normalization: its input is pixels.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor, nn
from torchvision.models import ResNet

from pretrain.common.config.yaml_io import parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.files import atomic_writer, json_text
from pretrain.common.weights.resnet_names import DEPTHS, is_bottleneck, to_detectron2, to_transformers
from pretrain.data.views import center_view, normalize
from pretrain.model.encoder import build_backbone, feature_dim
from pretrain.probe.protocol import evaluation_size
from transfer.weights.convert import open_source, read_source
from transfer.weights.verify import compare

from . import card

if TYPE_CHECKING:
    from transformers import ResNetConfig

_OPSET = 18
# Of ImageNet's pixels, for files that do not record theirs.
_USUAL_STATISTICS = {"MEAN": [0.485, 0.456, 0.406], "STD": [0.229, 0.224, 0.225]}
_USUAL_SIZE = (224, 256)  # of files that record no config, as in ImageNet's evaluation


@dataclass(frozen=True)
class Backbone:
    """What is exported.

    Attributes:
        path: the file it was read from.
        resnet: without classifier, in evaluation mode: normalized images (N, 3, H, W) -> features (N, F).
        mean, std: of the RGB channels in its pretraining, from 0 to 1; ImageNet's if the file does not record them.
        size, resize: pixels of the evaluation's crop, and of the shorter side before it; 0: straight to the crop.
    """

    path: Path
    resnet: ResNet
    arch: str
    stem: str
    mean: list[float]
    std: list[float]
    size: int
    resize: int
    provenance: dict[str, Any]

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """Pixels (N, 3, H, W) uint8 -> (N, F), as the project's own evaluation computes them."""
        return self.resnet(normalize(pixels, self.mean, self.std))

    def view(self, image: np.ndarray) -> Tensor:
        """The evaluation's crop (1, 3, S, S) of an image (H, W, 3), uint8, RGB."""
        return torch.from_numpy(center_view(image, self.size, self.resize).copy()).permute(2, 0, 1)[None]


def read(source: Path) -> Backbone:
    """The backbone of a run folder or a file.

    Raises:
        UserError: unreadable, no backbone in it, or one that torchvision's ResNet on RGB images cannot compute.
    """
    weights = open_source(source)
    path, (file, known) = weights.path, read_source(weights)
    if known["MODEL.RESNETS.STRIDE_IN_1X1"] and is_bottleneck(file.arch):
        raise UserError(f"{path} strides in the 1x1 convolutions; only ResNets that stride in the 3x3 are exported")
    if known["INPUT.FORMAT"] != "RGB":
        raise UserError(f"{path} was trained on {known['INPUT.FORMAT']} images; only backbones for RGB are exported")
    resnet = build_backbone(file.arch, file.stem)
    resnet.load_state_dict(file.state_dict)
    mean, std = (
        [round(value / 255, 6) for value in known[key]] if (key := f"MODEL.PIXEL_{name}") in known else usual
        for name, usual in _USUAL_STATISTICS.items()
    )
    size = _USUAL_SIZE
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
        size = evaluation_size(CfgNode(parse_yaml(known["config"])))
    return Backbone(path, resnet.eval().requires_grad_(False), file.arch, file.stem, mean, std, *size, known)


def sample_image(backbone: Backbone) -> np.ndarray:
    """(H, W, 3) uint8: shapes and noise, always the same, of other statistics in each channel; wide if it is cropped.

    Its shorter side has the evaluation's size: no library has to resample it, which each does in its own way.
    """
    height = backbone.resize or backbone.size
    width = height * 5 // 4 if backbone.resize else height
    rows, columns = np.mgrid[-3 : 3 : height * 1j, -4 : 4 : width * 1j]
    waves = np.stack([np.sin(rows + columns), np.cos(2 * rows), np.sin(3 * columns)], -1)
    noise = np.random.default_rng(0).normal(0, 12, waves.shape)
    return np.clip([150, 110, 70] + 50 * waves + noise, 0, 255).astype(np.uint8)


def export(backbone: Backbone, output: Path, target: str) -> dict[str, float]:
    """Writes ``output`` for ``target`` (timm | transformers | onnx) and returns the largest relative difference.

    Raises:
        UserError: the target cannot represent the backbone, or computes other features; nothing was written.
        OSError: the disk is full, or the folder cannot be written.
    """
    if target == "onnx":
        return _export_onnx(backbone, output)
    if backbone.stem == "cifar":
        raise UserError(
            f"{backbone.path} has the CIFAR stem (3x3, no pooling), which {target}'s ResNet lacks; use --format onnx"
        )
    write, features = {"timm": (_write_timm, _timm), "transformers": (_write_transformers, _transformers)}[target]
    image = sample_image(backbone)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        folder = Path(temporary, output.name)
        folder.mkdir()
        write(backbone, folder)
        shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors hides it from other users
        errors = compare({"features": backbone.features(backbone.view(image))}, {"features": features(folder, image)},
                         "the exported model")  # fmt: skip
        (folder / "README.md").write_text(card.text(backbone, target, output, errors["features"]), encoding="utf-8")
        folder.rename(output)
    return errors


def _write_timm(backbone: Backbone, folder: Path) -> None:
    from safetensors.torch import save_file

    size, resize = backbone.size, backbone.resize
    pretrained = {
        "input_size": [3, size, size], "mean": backbone.mean, "std": backbone.std, "num_classes": 0,
        # timm divides by it and rounds down, where a quotient just below the whole number would lose a pixel.
        "crop_pct": math.nextafter(size / resize, 0) if resize else 1.0,
        "crop_mode": "center" if resize else "squash", "interpolation": "bilinear", "first_conv": "conv1",
        "classifier": "fc",
    }  # fmt: skip
    config = {"architecture": backbone.arch, "num_classes": 0, "num_features": feature_dim(backbone.resnet),
              "pretrained_cfg": pretrained}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(backbone.resnet.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def _timm(folder: Path, image: np.ndarray) -> Tensor:
    import timm
    from timm.data import create_transform, resolve_model_data_config

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform: Any = create_transform(**resolve_model_data_config(model))
    return model(transform(Image.fromarray(image))[None])


def _write_transformers(backbone: Backbone, folder: Path) -> None:
    from transformers import BitImageProcessor, ResNetModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model, size = ResNetModel(_transformers_config(backbone.arch)), backbone.size
    state = to_detectron2(backbone.resnet.state_dict(), backbone.arch)
    model.load_state_dict({to_transformers(name): tensor for name, tensor in state.items()})
    model.save_pretrained(folder)
    square = {"height": size, "width": size}
    BitImageProcessor(
        size={"shortest_edge": backbone.resize} if backbone.resize else square, resample=Image.Resampling.BILINEAR,
        do_center_crop=bool(backbone.resize), crop_size=square, image_mean=backbone.mean, image_std=backbone.std,
    ).save_pretrained(folder)  # fmt: skip


def _transformers_config(arch: str) -> ResNetConfig:
    from transformers import ResNetConfig

    wide = 4 if is_bottleneck(arch) else 1
    return ResNetConfig(
        layer_type="bottleneck" if wide == 4 else "basic", depths=list(DEPTHS[arch]), embedding_size=64,
        hidden_sizes=[64 * 2**i * wide for i in range(4)],
    )  # fmt: skip


@torch.no_grad()
def _transformers(folder: Path, image: np.ndarray) -> Tensor:
    from transformers import AutoImageProcessor, AutoModel

    processor, model = AutoImageProcessor.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    return model(**processor(Image.fromarray(image), return_tensors="pt")).pooler_output.flatten(1)


class _FromPixels(nn.Module):
    """Pixels (N, 3, H, W) uint8, RGB -> features (N, F)."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.resnet = backbone.resnet
        self.register_buffer("mean", 255 * torch.tensor(backbone.mean).view(3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(backbone.std).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.resnet((images - self.get_buffer("mean")) / self.get_buffer("std"))


def _export_onnx(backbone: Backbone, output: Path) -> dict[str, float]:
    """One file with the provenance in its metadata, which is kept only if ONNX Runtime computes the same features."""
    import onnxruntime

    image = sample_image(backbone)
    view, whole = backbone.view(image), torch.from_numpy(image).permute(2, 0, 1)[None]
    batch = torch.cat([view, view.flip(3)])
    wanted = {"features": backbone.features(batch), "features of one image of another size": backbone.features(whole)}

    rows = torch.export.Dim.DYNAMIC
    with warnings.catch_warnings(action="ignore"):  # about the exporter's own code
        program = torch.onnx.export(
            _FromPixels(backbone), (torch.zeros(2, 3, 96, 128, dtype=torch.uint8),), input_names=["images"],
            output_names=["features"], dynamic_shapes=({0: rows, 2: rows, 3: rows},), opset_version=_OPSET,
            dynamo=True, verbose=False,
        )  # fmt: skip
    assert program is not None
    model = program.model_proto
    model.metadata_props.add(key="provenance", value=json_text(backbone.provenance))
    with atomic_writer(output) as stream:
        stream.write(model.SerializeToString())
        stream.flush()
        session = onnxruntime.InferenceSession(stream.name, providers=["CPUExecutionProvider"])
        found = [torch.from_numpy(session.run(None, {"images": pixels.numpy()})[0]) for pixels in (batch, whole)]
        return compare(wanted, dict(zip(wanted, found, strict=True)), "the exported model")
