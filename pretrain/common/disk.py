"""The disk that a run's checkpoints take, from its config alone, and whether there is so much."""

from __future__ import annotations

import shutil
from pathlib import Path

from .errors import UserError

# Weights and statistics of batch normalization of a ResNet without its classifier.
BACKBONE = {"resnet18": 11_186_132, "resnet34": 21_301_732, "resnet50": 23_561_205, "resnet101": 42_605_608}
BYTES = 4  # per value: every checkpoint is in float32


def linear(inputs: int, outputs: int) -> int:
    """Weights of a linear layer or a 1x1 convolution, with its bias."""
    return (inputs + 1) * outputs


def free_bytes(folder: str | Path) -> int:
    """Free space on the disk that ``folder`` is on or would be made on."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def held_bytes(folder: str | Path) -> int:
    """Bytes of the checkpoints that a run folder holds already."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.pth"))


def refuse_full(folder: str | Path, needed: int) -> None:
    """Raises UserError unless the disk of ``folder`` has room for ``needed`` further bytes of checkpoints."""
    if needed > (free := free_bytes(folder)):
        raise UserError(
            f"the checkpoints in {folder} need about {needed / 2**30:.2f} GiB, but its disk has {free / 2**30:.2f} GiB "
            "left; free space, keep fewer by SOLVER.CHECKPOINT_* (pretraining, detection), or choose another OUTPUT_DIR"
        )
