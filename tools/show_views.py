"""Draws what the encoder sees: several images (rows), each unchanged and in several views (columns).

python tools/show_views.py --recipe moco_v2 --data folder:/path/to/images --out views.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pretrain.common.errors import UserError, nearest, run_command_line
from pretrain.common.run_folder import atomic_write
from pretrain.recipes import RECIPES

if TYPE_CHECKING:
    import numpy as np

    from pretrain.datasets import ImageData

_GAP = 4  # white pixels between pictures


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; ``argv`` without the program's name.

    Raises:
        UserError: unknown recipe, unreadable data, a count below 1.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="moco_v2", help=f"one of {', '.join(RECIPES)}")
    parser.add_argument("--data", required=True, help="a named data set or folder:/path, as in DATA.TRAIN")
    parser.add_argument("--root", default="datasets", help="folder of the named data sets")
    parser.add_argument("--split", default="train", choices=("train", "val", "unlabelled"))
    parser.add_argument("--size", type=int, default=224, help="pixels per side of a view")
    parser.add_argument("--images", type=int, default=6, help="rows, evenly spaced over the data set")
    parser.add_argument("--views", type=int, default=8, help="columns next to the image itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--out", default="views.png")
    args = parser.parse_args(argv)
    for name in ("size", "images", "views"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.recipe not in RECIPES:
        raise UserError(f"no recipe {args.recipe!r}; choose {', '.join(RECIPES)}{nearest(args.recipe, RECIPES)}")
    import cv2

    from pretrain import datasets

    data = datasets.load(args.data, args.split, args.root)
    picture = draw_grid(data, args.recipe, args.size, args.images, args.views, args.seed, args.epoch)
    atomic_write(args.out, cv2.imencode(".png", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))[1].tobytes())
    print(f"{args.out}: {args.recipe}, {args.views} views of {args.images} images")


def draw_grid(data: ImageData, recipe: str, size: int, images: int, views: int, seed: int, epoch: int) -> np.ndarray:
    """The picture (rows, columns, 3) uint8; its views are those that training with this seed and epoch sees."""
    import numpy as np

    from pretrain.loader import stream
    from pretrain.views import center_view, make_views

    rows: list[np.ndarray] = []
    for index in np.linspace(0, len(data) - 1, images).round().astype(int).tolist():
        image = data.read(index)
        made = make_views(image, [RECIPES[recipe]] * views, size, lambda v, i=index: stream(seed, epoch, 0, i, v))
        cells = [center_view(image, size, size), *made]
        rows.append(
            np.concatenate([np.pad(c, ((0, _GAP), (0, _GAP), (0, 0)), constant_values=255) for c in cells], axis=1)
        )
    return np.concatenate(rows)


if __name__ == "__main__":
    run_command_line(main)
