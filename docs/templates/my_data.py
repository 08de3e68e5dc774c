"""Your own data set, here of images in memory: gray squares on black, with their size as the class.

    python tools/launch.py pretrain --import docs/templates/my_data.py \
        --config-file configs/examples/demo_mocov2_R18_digits.yaml DATA.TRAIN squares
"""

from pathlib import Path

import numpy as np

from pretrain import register
from pretrain.data.datasets import LOADERS, ImageData


class Squares:
    """A source of images; `pretrain.data.sources` has others, for files and arrays.

    What it returns is checked: a mistake ends the run before its first step, in a line that says what to return.
    """

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.sides = np.arange(count) % 3
        self._corners = rng.integers(0, 12, (count, 2))

    def __len__(self) -> int:
        return len(self.sides)

    def read(self, index: int) -> np.ndarray:
        """Return (32, 32, 3) uint8 RGB, always the same for one index."""
        image = np.zeros((32, 32, 3), np.uint8)
        side = 6 * (self.sides[index] + 1)
        top, left = self._corners[index]
        image[top : top + side, left : left + side] = 160
        return image

    def name(self, index: int) -> str:
        """Return text that names the image in errors, such as its file."""
        return f"square {index}"


def load(split: str, _root: Path) -> ImageData:
    """Load the train or val split; where there is no val split, raise `MissingSplit`, which skips kNN.

    Labels are whole numbers from 0 in the order of the classes, -1 for an image without a label, or None.
    """
    source = Squares(count={"train": 256, "val": 64}[split], seed=len(split))
    return ImageData(source, source.sides, ["small", "middle", "large"])


register(LOADERS, "squares", load)
