"""Export of a backbone to a folder for timm or to an ONNX file, verified end to end from an image's pixels.

timm's folder contains config.json, model.safetensors and a model card (README.md); transformers reads the same folder.
The ONNX graph contains the normalization: its input is pixels.
"""

import json
import math
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pretrain.common.errors import UserError
from pretrain.common.files import atomic_writer, json_text
from pretrain.model.encoder import count_channels
from tools.reporting.origins import read_origin
from transfer.weights.verify import check_features_agree

from .source import ExportSource, draw_sample_image

_OPSET = 18
_CARD = """\
---
library_name: timm
pipeline_tag: image-feature-extraction
---
# {arch} pretrained by {method}

A backbone without classifier, exported by pretrain-to-transfer. The features of one image, computed by its source and
by this folder, differ by at most {difference:.1e} (relative). Its owner states the license: add a `license:` field.

{facts}

```python
import timm
model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))  # takes a PIL image
```
"""


def export_timm(backbone: ExportSource, output: Path) -> dict[str, float]:
    """Write the folder ``output`` for timm and return the largest relative difference of the features.

    Raises:
        UserError: timm's ResNet cannot represent the backbone, or computes other features; nothing was written.
        OSError: the disk is full, or the folder cannot be written.
    """
    if backbone.stem == "cifar":
        problem = f"{backbone.path} has the CIFAR stem (3x3, no pooling), which timm's ResNet lacks"
        raise UserError(f"{problem}; use --format onnx")
    image = draw_sample_image(backbone)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        folder = Path(temporary, output.name)
        folder.mkdir()
        _write_timm(backbone, folder)
        expected = {"features": backbone.compute_features(backbone.crop(image))}
        actual = {"features": _compute_timm_features(folder, image)}
        differences = check_features_agree(expected, actual, "the exported model")
        card = _render_card(backbone, output, differences["features"])
        (folder / "README.md").write_text(card, encoding="utf-8")
        folder.rename(output)
    return differences


def _write_timm(backbone: ExportSource, folder: Path) -> None:
    from safetensors.torch import save_file

    size = backbone.size
    resize = backbone.resize
    pretrained = {
        "input_size": [3, size, size],
        "mean": backbone.mean,
        "std": backbone.std,
        "num_classes": 0,
        # timm divides by it and rounds down, so a quotient just below the whole number would lose a pixel.
        "crop_pct": math.nextafter(size / resize, 0) if resize else 1.0,
        "crop_mode": "center" if resize else "squash",
        "interpolation": "bilinear",
        "first_conv": "conv1",
        "classifier": "fc",
    }
    width = count_channels(backbone.resnet)
    config = {"architecture": backbone.arch, "num_classes": 0, "num_features": width, "pretrained_cfg": pretrained}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(backbone.resnet.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors hides it from other users


def _render_card(backbone: ExportSource, folder: Path, difference: float) -> str:
    """Return README.md of the export in ``folder``.

    Args:
        difference: largest relative difference between the features of the source and of the export.
    """
    origin = read_origin(backbone.provenance)
    has_statistics = "MODEL.PIXEL_MEAN" in backbone.provenance.to_keys()
    facts = {
        "pretrained on": origin.data,
        "epochs": origin.epochs,
        "seed": origin.seed,
        "encoder": backbone.provenance.encoder,
        "other than the finished pretraining": origin.altered,
        "checkpoint": f"{backbone.path.name}, SHA-256 {origin.sha256}",
        "mean and standard deviation": "" if has_statistics else "ImageNet's, not recorded",
    }
    return _CARD.format(
        arch=backbone.arch,
        method=origin.method or "an unknown method",
        difference=difference,
        facts="\n".join(f"- {name}: {value}" for name, value in facts.items() if value),
        folder=folder,
    )


@torch.no_grad()
def _compute_timm_features(folder: Path, image: np.ndarray) -> Tensor:
    import timm
    from timm.data import create_transform, resolve_model_data_config

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform: Any = create_transform(**resolve_model_data_config(model))
    return model(transform(Image.fromarray(image))[None])


class _PixelBackbone(nn.Module):
    """A backbone that maps pixels (N, 3, H, W) uint8, RGB, to features (N, F)."""

    def __init__(self, backbone: ExportSource) -> None:
        super().__init__()
        self.resnet = backbone.resnet
        self.register_buffer("mean", 255 * torch.tensor(backbone.mean).view(3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(backbone.std).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.resnet((images - self.get_buffer("mean")) / self.get_buffer("std"))


def export_onnx(backbone: ExportSource, output: Path) -> dict[str, float]:
    """Write the file ``output`` with the provenance in its metadata; return the largest relative differences.

    Raises:
        UserError: ONNX Runtime computes other features; nothing was written.
        OSError: the disk is full, or the file cannot be written.
    """
    import onnxruntime

    image = draw_sample_image(backbone)
    crop = backbone.crop(image)
    batch = torch.cat([crop, crop.flip(3)])
    whole_image = torch.from_numpy(image).permute(2, 0, 1)[None]
    inputs = {"features": batch, "features of one image of another size": whole_image}
    size = torch.export.Dim.DYNAMIC
    with warnings.catch_warnings(action="ignore"):  # about the exporter's own code
        program = torch.onnx.export(
            _PixelBackbone(backbone),
            (torch.zeros(2, 3, 96, 128, dtype=torch.uint8),),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: size, 2: size, 3: size},),
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    model.metadata_props.add(key="provenance", value=json_text(backbone.provenance.to_json()))
    with atomic_writer(output) as stream:
        stream.write(model.SerializeToString())
        stream.flush()
        session = onnxruntime.InferenceSession(stream.name, providers=["CPUExecutionProvider"])
        expected = {name: backbone.compute_features(pixels) for name, pixels in inputs.items()}
        exported = {name: session.run(None, {"images": pixels.numpy()})[0] for name, pixels in inputs.items()}
        features = {name: torch.from_numpy(array) for name, array in exported.items()}
        return check_features_agree(expected, features, "the exported model")
