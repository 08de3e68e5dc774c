"""Prepares images for a backbone as the probes do: resized, cropped to the middle, normalized."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.config.yaml_io import parse_yaml
from ..common.image_checks.pixels import read_any
from ..common.weights.backbone import BackboneFile
from ..config import default_config
from ..data import views
from .protocol import choose_evaluation_size


@dataclass(frozen=True)
class Transform:
    """Maps an image to the input of a backbone.

    Attributes:
        size: S, pixels per side.
        resize: the shorter side before the middle is cut out; 0 resizes the whole image to S x S.
        mean, std: of the RGB channels, from 0 to 1.
    """

    size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Any) -> Tensor:
        """Return an image as (3, S, S) float32, or a list of N images as (N, 3, S, S).

        Args:
            image: a path, a PIL image, an array (H, W, 3) of uint8 RGB or a tensor (3, H, W) of uint8 RGB.

        Raises:
            UserError: an image cannot be read, or is of another type or form.
        """
        if isinstance(image, (list, tuple)):
            prepared = [self._prepare(item, f"image {number}") for number, item in enumerate(image, 1)]
            return torch.stack(prepared) if prepared else torch.empty(0, 3, self.size, self.size)
        return self._prepare(image, "image")

    def _prepare(self, image: Any, name: str) -> Tensor:
        view_SS3 = views.make_center_view(read_any(image, name), self.size, self.resize)
        return views.normalize(torch.from_numpy(view_SS3).permute(2, 0, 1), self.mean, self.std)


def build_transform(file: BackboneFile) -> Transform:
    """Build the transform of a backbone from what its file records, and otherwise the defaults of the keys.

    These are the sizes of VIEWS and PROBE in the config of its pretraining, and its pixel statistics.
    """
    cfg = default_config()
    cfg.MODEL.STEM = file.stem
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):  # another project's config, or none
        recorded = parse_yaml(file.provenance.config or "")
        for section, names in {"VIEWS": ("IMAGE_SIZE",), "PROBE": ("IMAGE_SIZE", "CROP", "RESIZE")}.items():
            for name in names:
                cfg[section][name] = recorded[section].get(name, cfg[section][name])
    size, resize = choose_evaluation_size(cfg)
    trained_with = file.provenance.input
    if trained_with and trained_with.mean and trained_with.std:
        cfg.VIEWS.MEAN = [value / 255 for value in trained_with.mean]
        cfg.VIEWS.STD = [value / 255 for value in trained_with.std]
    return Transform(size, resize, tuple(cfg.VIEWS.MEAN), tuple(cfg.VIEWS.STD))
