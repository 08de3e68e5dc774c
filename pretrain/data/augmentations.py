"""Augmentations of views as data. Command lines read their names, so this module imports neither torch nor OpenCV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..common.errors import UserError

if TYPE_CHECKING:
    from numpy.random import Generator

Operation = tuple[Callable[..., None], float]  # (image, value) -> None, which works in place, and the value


@dataclass(frozen=True)
class RandomResizedCrop:
    """Random crop whose area fraction is in ``scale`` and aspect ratio log-uniform in ``ratio``, resized to a view."""

    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class PadCrop:
    """Image resized to the view's size and padded with black, of which a random box of the view's size is cropped."""

    padding: int = 4  # pixels per side


@dataclass(frozen=True)
class CenterCrop:
    """Middle of the image, with its shorter side resized to the view's size."""


class ColorOperation(Protocol):
    """A color operation: the probability that it is applied, and its random parameters."""

    @property
    def p(self) -> float: ...

    def sample(self, rng: Generator) -> list[Operation]: ...


@dataclass(frozen=True)
class ColorJitter:
    """Brightness, contrast, saturation by a factor in [max(0, 1 - x), 1 + x], hue by [-hue, hue], in random order."""

    brightness: float
    contrast: float
    saturation: float
    hue: float  # in turns of the color circle, at most 0.5
    p: float

    def sample(self, rng: Generator) -> list[Operation]:
        from . import color  # imports OpenCV

        factors = {color.brightness: self.brightness, color.contrast: self.contrast, color.saturation: self.saturation}
        operations: list[Operation] = [(op, uniform(rng, max(0.0, 1 - x), 1 + x)) for op, x in factors.items() if x]
        if self.hue:
            operations.append((color.hue, uniform(rng, -self.hue, self.hue)))
        for i in range(len(operations) - 1, 0, -1):  # Fisher-Yates; for so few cheaper than rng.permutation
            j = randint(rng, i + 1)
            operations[i], operations[j] = operations[j], operations[i]
        return operations


@dataclass(frozen=True)
class RandomGrayscale:
    """Conversion to gray levels."""

    p: float

    def sample(self, rng: Generator) -> list[Operation]:
        from .color import gray

        return [(gray, 0.0)]


@dataclass(frozen=True)
class GaussianBlur:
    """Gaussian blur, sigma uniform in ``sigma`` pixels at every view size, as in MoCo v2, SCE and solo-learn."""

    p: float
    sigma: tuple[float, float] = (0.1, 2.0)

    def sample(self, rng: Generator) -> list[Operation]:
        from .color import blur

        return [(blur, uniform(rng, *self.sigma))]


@dataclass(frozen=True)
class Augmentation:
    """Steps of a view: crop, flip (which commutes with the others), AutoAugment's policy, color operations."""

    crop: RandomResizedCrop | PadCrop | CenterCrop
    flip: float = 0.5  # probability of a horizontal flip
    policy: str = ""  # "" | imagenet | cifar10: AutoAugment's published policies
    colors: tuple[ColorOperation, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.crop, (RandomResizedCrop, PadCrop, CenterCrop)):
            raise UserError(f"{self.crop!r} is not a crop; choose RandomResizedCrop, PadCrop or CenterCrop")
        for color in self.colors:
            if not hasattr(color, "sample"):
                raise UserError(f"{color!r} is not a color operation; give it a method sample(rng)")


def uniform(rng: Generator, low: float, high: float) -> float:
    """Return a number in [low, high); a quarter of the cost of rng.uniform."""
    return low + (high - low) * rng.random()


def randint(rng: Generator, count: int) -> int:
    """Return a whole number in [0, count)."""
    return int(rng.random() * count)


_JITTER = ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8)
_STRONG_JITTER = ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8)  # color distortion of strength 1
_GRAYSCALE = RandomGrayscale(0.2)
_MOCO_V2 = (_JITTER, _GRAYSCALE, GaussianBlur(0.5))
_ANY_SCALE = RandomResizedCrop(scale=(0.08, 1.0))

AUGMENTATIONS: dict[str, Augmentation] = {
    "moco_v1": Augmentation(RandomResizedCrop(), colors=(_GRAYSCALE, ColorJitter(0.4, 0.4, 0.4, 0.4, p=1.0))),
    "moco_v2": Augmentation(RandomResizedCrop(), colors=_MOCO_V2),
    "sce_strong": Augmentation(RandomResizedCrop(), colors=_MOCO_V2),  # color distortion of strength 0.5 is MoCo v2's
    "sce_weak": Augmentation(RandomResizedCrop()),
    # TCL calls it SimAugment
    "simclr": Augmentation(_ANY_SCALE, colors=(_STRONG_JITTER, _GRAYSCALE, GaussianBlur(0.5))),
    "simaugment": Augmentation(RandomResizedCrop(), colors=(_JITTER, _GRAYSCALE)),  # SupCon's and TCL's
    "autoaugment": Augmentation(PadCrop(), policy="imagenet"),
    "autoaugment_cifar": Augmentation(PadCrop(), policy="cifar10"),
    "digits": Augmentation(RandomResizedCrop((0.6, 1.0)), flip=0.0, colors=(ColorJitter(0.2, 0.2, 0.0, 0.0, p=0.8),)),
    "crop_flip": Augmentation(_ANY_SCALE),  # torchvision's and MoCo's linear probe
    "pad_flip": Augmentation(PadCrop()),
    "flip": Augmentation(PadCrop(padding=0)),
    "none": Augmentation(CenterCrop(), flip=0.0),
}
