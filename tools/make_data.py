"""Makes small data sets, converts boxes to COCO's format, and splits and draws subsets of COCO annotations.

python tools/make_data.py digits datasets/digits
python tools/make_data.py trees datasets/trees
python tools/make_data.py voc VOC2007/Annotations datasets/boxes --images VOC2007/JPEGImages
python tools/make_data.py yolo data/labels datasets/boxes --images data/images --names data/data.yaml
python tools/make_data.py split datasets/boxes/annotations.json datasets/own --val 0.2
python tools/make_data.py subset datasets/coco/annotations/instances_train2017.json datasets/coco_subsets
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.files import existing_file, sha256
from pretrain.common.lock import claim
from pretrain.common.run_folder import cannot_write
from tools.data.boxes import read_boxes
from tools.data.digits import write_digits
from tools.data.people import write_people
from tools.data.split import print_counts, write_split
from tools.data.subset import write_subsets
from tools.data.trees import write_trees
from tools.launcher.spec import read_record
from transfer.coco.data import read

_MANIFEST = "made.json"
# Raise a kind's when the same arguments would make other data.
_VERSIONS = {"digits": 1, "people": 2, "trees": 1, "subset": 2, "split": 1, "voc": 1, "yolo": 1}
_LEAST_SIZE = {"digits": 16, "people": 64}  # pixels


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    for name, value in vars(args).items():
        least = 0 if name in ("seed", "test_region") else _LEAST_SIZE[args.kind] if name == "size" else 1
        if isinstance(value, int) and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; {args.kind} need at least {least}")
    output = Path(os.path.abspath(args.output))
    arguments = {name: value for name, value in vars(args).items() if name != "output"}
    make(output, *_writer(args, arguments | {"version": _VERSIONS[args.kind]}))


_Writer = tuple[dict[str, Any], Callable[[Path], None]]  # what the data depend on, and what fills a folder with them


def _writer(args: argparse.Namespace, arguments: dict[str, Any]) -> _Writer:
    """What fills a folder with data of the kind that ``args`` name."""
    images = {"train": args.images, "val": args.val_images} if args.kind in ("digits", "people") else {}
    match args.kind:
        case "digits":
            scenes, clutter = {"train": args.scenes, "val": args.val_scenes}, "clutter" in args
            return arguments, lambda folder: write_digits(folder, images, args.size, scenes, args.seed, clutter)
        case "people":
            return arguments, lambda folder: write_people(folder, images, args.size, args.seed)
        case "trees":
            wheel = existing_file(arguments.pop("wheel"), "wheel", "*.whl") if args.wheel else None
            return arguments, lambda folder: write_trees(folder, args.test_region, wheel)
        case "subset":
            return _subset(args, arguments)
        case "split":
            file = existing_file(args.annotations, "annotation file", "*.json")
            arguments |= {"annotations": sha256(file)}
            return arguments, lambda folder: write_split(folder, read(file), args.val, args.seed, args.images)
        case _:
            return _boxes(args, arguments)


def _subset(args: argparse.Namespace, arguments: dict[str, Any]) -> _Writer:
    if not all(0 < percent < 100 for percent in args.percent):
        raise UserError(f"--percent is {' '.join(f'{one:g}' for one in args.percent)}; give values between 0 and 100")
    file = existing_file(args.annotations, "annotation file", "*.json")
    arguments |= {"annotations": sha256(file)}
    positions = existing_file(args.list, "list of positions", "*.txt") if arguments.pop("list") else None
    if positions:
        arguments |= {"list": sha256(positions)}
    return arguments, lambda folder: write_subsets(folder, read(file), args.percent, args.folds, args.seed, positions)


def _boxes(args: argparse.Namespace, arguments: dict[str, Any]) -> _Writer:
    if not os.path.isdir(args.labels):
        raise UserError(f"no folder at {args.labels}")
    names = existing_file(args.names, "file of names") if args.kind == "yolo" else None
    content = read_boxes(Path(args.labels), Path(args.images or args.labels), names)
    text = json.dumps(content)

    def write(folder: Path) -> None:
        (folder / "annotations.json").write_text(text)
        print_counts({"annotations.json": content})

    return arguments | {"content": hashlib.sha256(text.encode()).hexdigest()}, write


def make(output: Path, arguments: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Fills a temporary folder and renames it to ``output`` once it is complete; the same data are not made again.

    Raises:
        UserError: ``output`` holds other data, cannot be written, or another process is making it.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        earlier = read_record(output / _MANIFEST)
        if differing := [key for key in {**earlier, **arguments} if arguments.get(key) != earlier.get(key)]:
            held = f"data that differ in {', '.join(differing)}" if earlier else "something else"
            raise UserError(f"{output} holds {held}; name another folder, or remove it")
        print(f"{output} already exists")
        return
    with claim(output.parent, "making data", of=output.name):
        folder = output.parent / f".{output.name}.making"
        try:
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
            folder.mkdir()
            (folder / _MANIFEST).write_text(json.dumps(arguments, sort_keys=True) + "\n")
            write(folder)
            os.sync()  # before the name that says they are complete: a power cut would leave empty files
            folder.rename(output)
        except OSError as error:
            raise cannot_write(output, error) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"made {output}")


def share_or_number(text: str) -> int | float:
    if not text.isdecimal() and not 0 < float(text) < 1:
        raise ValueError
    return int(text) if text.isdecimal() else float(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)

    def kind(name: str, text: str) -> argparse.ArgumentParser:
        sub = kinds.add_parser(name, help=text, allow_abbrev=False)
        if name in ("subset", "split"):
            sub.add_argument("annotations", help="file in COCO's format")
        if name in ("voc", "yolo"):
            sub.add_argument("labels", help="folder of the files with boxes, at any depth")
        sub.add_argument("output", help="folder to make")
        if name not in ("trees", "voc", "yolo"):
            sub.add_argument("--seed", type=int, default=0, help="of all that is drawn at random (0)")
        return sub

    digits = kind("digits", "scikit-learn's handwritten digits: OUTPUT/images and OUTPUT/coco")
    digits.add_argument("--images", type=int, default=1300, help="training images of the image folder")
    digits.add_argument("--val-images", type=int, default=400)
    digits.add_argument("--size", type=int, default=32, help="pixels per side of an image of the image folder")
    digits.add_argument("--scenes", type=int, default=100, help="training images of the COCO data set")
    digits.add_argument("--val-scenes", type=int, default=100)
    digits.add_argument(
        "--clutter", action="store_true", default=argparse.SUPPRESS,  # absent from the manifest of plain digits
        help="parts of other digits, a bar and more noise in the image folder",
    )  # fmt: skip
    people = kind("people", "drawn figures with COCO's 17 keypoints: OUTPUT/images and OUTPUT/coco")
    people.add_argument("--images", type=int, default=400, help="training scenes")
    people.add_argument("--val-images", type=int, default=100)
    people.add_argument("--size", type=int, default=160, help="pixels of a scene's longer side")
    trees = kind("trees", "aerial photographs with boxes of tree crowns: OUTPUT/images and OUTPUT/coco")
    trees.add_argument(
        "--test-region", type=int, default=0, choices=range(5), help="no pixel of it is in the training set (0)"
    )
    trees.add_argument("--wheel", default="", metavar="FILE", help="wheel of deepforest 2.1.0, instead of a download")
    subset = kind("subset", "shares of the images of a COCO annotation file, several draws of each")
    subset.add_argument("--percent", type=float, nargs="+", default=[1, 2, 5, 10], metavar="P", help="(1 2 5 10)")
    subset.add_argument("--folds", type=int, default=5, help="draws of each share (5)")
    subset.add_argument(
        "--list", default="", metavar="FILE",
        help="a published list instead of the draws, such as Unbiased Teacher's COCO_supervision.txt",
    )  # fmt: skip
    split = kind("split", "train.json and val.json of a COCO annotation file, by image, with the classes in proportion")
    split.add_argument(
        "--val", type=share_or_number, default=0.2, metavar="N", help="share of the images, or their number (0.2)"
    )
    split.add_argument("--images", default="", metavar="DIR", help="folder of the images, to check that they are there")
    for name, text in (("voc", "VOC's XML files"), ("yolo", "YOLO's text files, of boxes or outlines")):
        boxes = kind(name, f"annotations.json in COCO's format from {text}; images stay where they are")
        boxes.add_argument(
            "--images", default="", metavar="DIR",
            help="folder of the images, whose names and subfolders are those of the files with boxes (the same folder)",
        )  # fmt: skip
    boxes.add_argument(
        "--names",
        required=True,
        metavar="FILE",
        help="data.yaml with names, or one name per line; keypoints (kpt_shape) are left out",
    )
    return parser


if __name__ == "__main__":
    run_command_line(main)
