"""Parts of Fashion-MNIST: 10,000 training images, with the test images or other training images for evaluation.

`fashion_mnist_10k` is evaluated on the 10,000 test images, and `fashion_mnist_tune` on training images 20,000 to
29,999, so that the choice of hyperparameters never sees a test image.
"""

from pathlib import Path

import numpy as np

from pretrain import register
from pretrain.data import datasets
from pretrain.data.datasets import LOADERS, ImageData
from pretrain.data.sources import Subset

_TRAIN = range(10_000)  # shuffled: each class has 942 to 1,027 of these images
_HELD_OUT = range(20_000, 30_000)


def load_part(split: str, root: Path) -> ImageData:
    """Load the first 10,000 training images, or all test images."""
    data = datasets.load("fashion_mnist", split, root)
    return select(data, _TRAIN) if split == "train" else data


def load_part_for_tuning(split: str, root: Path) -> ImageData:
    """Load the first 10,000 training images, or 10,000 others."""
    data = datasets.load("fashion_mnist", "train", root)
    return select(data, _TRAIN if split == "train" else _HELD_OUT)


def select(data: ImageData, positions: range) -> ImageData:
    """Return a part of a labeled data set."""
    indices = np.array(positions)
    assert data.labels is not None
    return ImageData(Subset(data.source, indices), data.labels[indices], data.classes)


register(LOADERS, "fashion_mnist_10k", load_part)
register(LOADERS, "fashion_mnist_tune", load_part_for_tuning)
