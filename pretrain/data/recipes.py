"""Recipes of views as data. Command lines read their names, so that this module imports neither torch nor OpenCV."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RandomResizedCrop:
    """A box of a share of the area in ``scale`` and an aspect ratio log-uniform in ``ratio``, resized to the view."""

    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class PadCrop:
    """The image at the view's size, padded with black, and a box of the view's size at random."""

    padding: int = 4  # pixels per side


@dataclass(frozen=True)
class CenterCrop:
    """Shorter side to the view's size, then the middle."""


@dataclass(frozen=True)
class Jitter:
    """Brightness, contrast, saturation by a factor in [max(0, 1 - x), 1 + x], hue by [-hue, hue]; in any order."""

    brightness: float
    contrast: float
    saturation: float
    hue: float  # in turns of the color circle, at most 0.5
    p: float


@dataclass(frozen=True)
class Gray:
    p: float


@dataclass(frozen=True)
class Blur:
    """Gaussian blur, sigma uniform in ``sigma`` pixels at every view size, as in MoCo v2, SCE and solo-learn."""

    p: float
    sigma: tuple[float, float] = (0.1, 2.0)


@dataclass(frozen=True)
class Recipe:
    """How a view is made: crop, flip (which commutes with the rest), AutoAugment's policy, color operations."""

    crop: RandomResizedCrop | PadCrop | CenterCrop
    flip: float = 0.5  # probability of a horizontal flip
    policy: str = ""  # "" | imagenet | cifar10: AutoAugment's published policies
    colors: tuple[Jitter | Gray | Blur, ...] = ()


_MOCO_V2 = (Jitter(0.4, 0.4, 0.4, 0.1, p=0.8), Gray(0.2), Blur(0.5))
_SIMCLR_JITTER = Jitter(0.8, 0.8, 0.8, 0.2, p=0.8)  # color distortion of strength 1
_ANY_SCALE = RandomResizedCrop(scale=(0.08, 1.0))

RECIPES: dict[str, Recipe] = {
    "moco_v1": Recipe(RandomResizedCrop(), colors=(Gray(0.2), Jitter(0.4, 0.4, 0.4, 0.4, p=1.0))),
    "moco_v2": Recipe(RandomResizedCrop(), colors=_MOCO_V2),
    "sce_strong": Recipe(RandomResizedCrop(), colors=_MOCO_V2),  # color distortion of strength 0.5 is MoCo v2's
    "sce_weak": Recipe(RandomResizedCrop()),
    "simclr": Recipe(_ANY_SCALE, colors=(_SIMCLR_JITTER, Gray(0.2), Blur(0.5))),  # TCL calls it SimAugment
    "simaugment": Recipe(RandomResizedCrop(), colors=(Jitter(0.4, 0.4, 0.4, 0.1, p=0.8), Gray(0.2))),  # SupCon's, TCL's
    "autoaugment": Recipe(PadCrop(), policy="imagenet"),
    "autoaugment_cifar": Recipe(PadCrop(), policy="cifar10"),
    "digits": Recipe(RandomResizedCrop(scale=(0.6, 1.0)), flip=0.0, colors=(Jitter(0.2, 0.2, 0.0, 0.0, p=0.8),)),
    "crop_flip": Recipe(_ANY_SCALE),  # torchvision's and MoCo's linear probe
    "pad_flip": Recipe(PadCrop()),
    "flip": Recipe(PadCrop(padding=0)),
    "none": Recipe(CenterCrop(), flip=0.0),
}
