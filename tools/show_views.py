"""Draw the views that the encoder sees: one row per image, which shows the image itself and several views.

python tools/show_views.py --augmentation moco_v2 --data folder:/path/to/images --output views.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("tools.show_views")

from pretrain.common.command_line import Parser
from pretrain.common.config import extensions
from pretrain.common.errors import UserError, count_noun, suggest_name
from pretrain.common.files import check_writable
from pretrain.data import datasets, names
from pretrain.data.augmentations import AUGMENTATIONS


def main(argv: Sequence[str] | None = None) -> None:
    args = _build_parser().parse_args(argv)
    if min(args.size, args.images, args.views) < 1:
        raise UserError("--size, --images and --views must be at least 1")
    if Path(args.output).suffix.lower() != ".png":
        raise UserError(f"--output is {args.output}; its name must end in .png")
    check_writable(args.output, "--output")
    names.check_outside(args.output, args.data, "--output")
    with extensions.using(args.extensions):
        _draw(args)


def _draw(args: argparse.Namespace) -> None:
    extensions.load()
    if args.augmentation not in AUGMENTATIONS:
        hint = suggest_name(args.augmentation, AUGMENTATIONS)
        raise UserError(f"no augmentation {args.augmentation!r}; choose {', '.join(AUGMENTATIONS)}{hint}")
    data = datasets.load(args.data, "train", args.root)
    from pretrain.data import view_grid  # imports torch

    columns = {f"view {n}": AUGMENTATIONS[args.augmentation] for n in range(1, args.views + 1)}
    view_grid.write(args.output, view_grid.draw(data, columns, args.size, args.images, seed=0))
    print(f"{args.output}: {args.augmentation}, {count_noun(args.views, 'view')} of {count_noun(args.images, 'image')}")


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    text = f"augmentation of the views: {', '.join(AUGMENTATIONS)}, or one of yours (default: moco_v2)"
    parser.add_argument("--augmentation", default="moco_v2", metavar="NAME", help=text)
    parser.add_argument("--data", required=True, help="data set as in DATA.TRAIN: a name, or folder:/path")
    parser.add_argument("--root", default="datasets", help="folder of the named data sets (default: datasets)")
    parser.add_argument("--size", type=int, default=224, help="pixels per side of a view (default: 224)")
    parser.add_argument("--images", type=int, default=6, help="rows, evenly spaced over the data set (default: 6)")
    parser.add_argument("--views", type=int, default=8, help="views per image (default: 8)")
    parser.add_argument("--output", default="views.png", help="output file, a .png (default: views.png)")
    extensions.add_option(parser)
    return parser
