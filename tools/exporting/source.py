"""The backbone that is exported, and the preprocessing of its evaluation."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torchvision.models import ResNet

from pretrain.common.config.yaml_io import parse_yaml
from pretrain.common.errors import UserError
from pretrain.common.weights.provenance import InputFormat, Provenance
from pretrain.common.weights.resnet_names import is_bottleneck
from pretrain.data.views import make_center_view, normalize
from pretrain.keys import IMAGENET_MEAN, IMAGENET_STD
from pretrain.model.encoder import build_backbone
from pretrain.probe.protocol import choose_evaluation_size
from transfer.weights.convert import open_source, read_source

_PIXEL_MEAN = [255 * value for value in IMAGENET_MEAN]
_PIXEL_STD = [255 * value for value in IMAGENET_STD]
_IMAGENET_SIZE = (224, 256)


@dataclass(frozen=True)
class ExportSource:
    """A pretrained ResNet without classifier, and how its images are prepared.

    Attributes:
        path: the file that it was read from.
        resnet: maps normalized images (N, 3, H, W) to features (N, F), in evaluation mode.
        mean, std: statistics of the RGB channels in pretraining, from 0 to 1; ImageNet's if they are not recorded.
        size, resize: pixels of the evaluation's crop, and of the shorter side before it. If ``resize`` is 0, the image
            is resized to the crop directly. They are ImageNet's if the file records no config.
    """

    path: Path
    resnet: ResNet
    arch: str
    stem: str
    mean: list[float]
    std: list[float]
    size: int
    resize: int
    provenance: Provenance

    @torch.no_grad()
    def compute_features(self, pixels: Tensor) -> Tensor:
        """Compute the features (N, F) of pixels (N, 3, H, W) uint8, as in the project's own evaluation."""
        return self.resnet(normalize(pixels, self.mean, self.std))

    def crop(self, image: np.ndarray) -> Tensor:
        """Return the evaluation's crop (1, 3, S, S) of an image (H, W, 3), uint8, RGB."""
        return torch.from_numpy(make_center_view(image, self.size, self.resize).copy()).permute(2, 0, 1)[None]


def read_export_source(source: Path) -> ExportSource:
    """Read the backbone of a run folder or a file.

    Raises:
        UserError: the file cannot be read, contains no backbone, or one that torchvision's ResNet on RGB images cannot
            compute.
    """
    weights = open_source(source)
    path = weights.path
    file = read_source(weights)
    trained_with = file.provenance.input or InputFormat()
    if trained_with.stride_in_1x1 and is_bottleneck(file.arch):
        raise UserError(f"{path} strides in the 1x1 convolutions; only ResNets that stride in the 3x3 are exported")
    if trained_with.format not in (None, "RGB"):
        raise UserError(f"{path} was trained on {trained_with.format} images; only RGB backbones are exported")
    resnet = build_backbone(file.arch, file.stem)
    resnet.load_state_dict(file.state_dict)
    mean = [round(value / 255, 6) for value in trained_with.mean or _PIXEL_MEAN]
    std = [round(value / 255, 6) for value in trained_with.std or _PIXEL_STD]
    size, resize = _IMAGENET_SIZE
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # another project's config, or none
        size, resize = choose_evaluation_size(CfgNode(parse_yaml(file.provenance.config or "")))
    resnet = resnet.eval().requires_grad_(False)
    return ExportSource(path, resnet, file.arch, file.stem, mean, std, size, resize, file.provenance)


def draw_sample_image(backbone: ExportSource) -> np.ndarray:
    """Draw an image (H, W, 3) uint8 of noise, which is always the same, to compare features of.

    Its channels have different statistics, and it is wider than high if the evaluation crops. Its shorter side has the
    evaluation's size, so that no library resamples it, which each does in a different way.
    """
    height = backbone.resize or backbone.size
    width = height * 5 // 4 if backbone.resize else height
    noise = np.random.default_rng(0).normal([150, 110, 70], 40, (height, width, 3))
    return noise.clip(0, 255).astype(np.uint8)
