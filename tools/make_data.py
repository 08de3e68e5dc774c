"""Makes small data sets, and draws subsets of COCO annotations.

python tools/make_data.py digits datasets/digits
python tools/make_data.py trees datasets/trees
python tools/make_data.py subset datasets/coco/annotations/instances_train2017.json datasets/coco_subsets
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.lock import claim
from pretrain.common.run_folder import cannot_write
from tools.data.digits import write_digits
from tools.data.people import write_people

_MANIFEST = "made.json"
# Raise a kind's when the same arguments would make other data.
_VERSIONS = {"digits": 1, "people": 2, "trees": 1, "subset": 1}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; ``argv`` without the program's name.

    Raises:
        UserError: a count below 1, or a folder that holds something else.
    """
    args = vars(_parser().parse_args(argv))
    if args["kind"] == "subset":
        _subset(**args)
        return
    if args["kind"] == "trees":
        _trees(**args)
        return
    output, kind = Path(os.path.abspath(args.pop("output"))), args["kind"]
    for name, value in args.items():
        if isinstance(value, int) and value < (0 if name == "seed" else 1):
            raise UserError(f"--{name.replace('_', '-')} is {value}; give at least {0 if name == 'seed' else 1}")
    images = {"train": args["images"], "val": args["val_images"]}
    least = {"digits": 16, "people": 64}[kind]
    if args["size"] < least:
        raise UserError(f"--size is {args['size']}; {kind} need at least {least} pixels")
    args["version"] = _VERSIONS[kind]
    if kind == "digits":
        scenes = {"train": args["scenes"], "val": args["val_scenes"]}
        numbers = (images, args["size"], scenes, args["seed"], "clutter" in args)
        make(output, args, lambda folder: write_digits(folder, *numbers))
    else:
        make(output, args, lambda folder: write_people(folder, images, args["size"], args["seed"]))


def _subset(
    kind: str, annotations: str, output: str, percent: list[float], folds: int, seed: int | None, published: str
) -> None:
    from pretrain.common.files import existing_file, sha256
    from tools.data.subset import write_subsets
    from transfer.coco.data import read

    if published and seed is not None:
        raise UserError("--seed has no effect with --list, whose images are drawn already; leave one of them out")
    seed = seed or 0
    if not all(0 < one < 100 for one in percent) or folds < 1 or seed < 0:
        raise UserError(
            f"--percent is {' '.join(f'{one:g}' for one in percent)}, --folds is {folds} and --seed is {seed}; give "
            "--percent between 0 and 100, --folds at least 1 and --seed at least 0"
        )
    file = existing_file(annotations, "annotation file", "*.json")
    arguments = {"kind": kind, "annotations": sha256(file), "percent": percent, "folds": folds, "seed": seed,
                 "version": _VERSIONS[kind]}  # fmt: skip
    positions = existing_file(published, "list of positions", "*.txt") if published else None
    if positions:
        arguments["list"] = sha256(positions)
    place = Path(os.path.abspath(output))
    make(place, arguments, lambda folder: write_subsets(folder, read(file), percent, folds, seed, positions))


def _trees(kind: str, output: str, test_region: int, window: int, patch: int, wheel: str) -> None:
    from pretrain.common.files import existing_file
    from tools.data.trees import REGIONS, write_trees

    if not (0 <= test_region < REGIONS and 64 <= window <= 400 and 32 <= patch <= 400):
        raise UserError(
            f"--test-region is {test_region}, --window is {window} and --patch is {patch}; give --test-region from 0 "
            f"to {REGIONS - 1}, --window from 64 to 400 and --patch from 32 to 400"
        )
    file = existing_file(wheel, "wheel", "*.whl") if wheel else None
    arguments = {"kind": kind, "test_region": test_region, "window": window, "patch": patch, "version": _VERSIONS[kind]}
    place = Path(os.path.abspath(output))
    make(place, arguments, lambda folder: write_trees(folder, test_region, window, patch, file))


def make(output: Path, arguments: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Fills a temporary folder and renames it to ``output`` once it is complete; the same data are not made again.

    Raises:
        UserError: ``output`` holds other data, cannot be written, or another process is making it.
    """
    manifest = json.dumps(arguments, sort_keys=True) + "\n"
    if _is_made(output, manifest):
        print(f"{output} already exists")
        return
    with claim(output.parent, "making data", of=output.name):
        if _is_made(output, manifest):  # by another process in the meantime
            print(f"{output} already exists")
            return
        folder = output.parent / f".{output.name}.making"
        try:
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed run
            folder.mkdir()
            (folder / _MANIFEST).write_text(manifest)
            write(folder)
            _sync(folder)
            folder.rename(output)
            _sync_one(output.parent)
        except OSError as error:
            raise cannot_write(output, error) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"made {output}")


def _sync(folder: Path) -> None:
    """Waits until a folder and all in it are on the disk."""
    for above, _, names in os.walk(folder):
        for path in (*(os.path.join(above, name) for name in names), above):
            _sync_one(path)


def _sync_one(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_made(output: Path, manifest: str) -> bool:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    found = _manifest_in(output)
    if found == manifest:
        return True
    held = f"data made with {found.strip()}" if found else "something else"
    raise UserError(f"{output} holds {held}; name another folder, or remove it")


def _manifest_in(folder: Path) -> str:
    return (folder / _MANIFEST).read_text(errors="replace") if (folder / _MANIFEST).is_file() else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    digits = kinds.add_parser(
        "digits", allow_abbrev=False, help="scikit-learn's handwritten digits: OUTPUT/images and OUTPUT/coco"
    )
    digits.add_argument("output", help="folder to make")
    digits.add_argument("--images", type=int, default=1300, help="training images of the image folder")
    digits.add_argument("--val-images", type=int, default=400)
    digits.add_argument("--size", type=int, default=32, help="pixels per side of an image of the image folder")
    digits.add_argument("--scenes", type=int, default=100, help="training images of the COCO data set")
    digits.add_argument("--val-scenes", type=int, default=100)
    digits.add_argument(
        "--clutter",
        action="store_true",
        default=argparse.SUPPRESS,  # absent from the manifest of plain digits
        help="parts of other digits, a bar and more noise in the image folder",
    )
    people = kinds.add_parser(
        "people", allow_abbrev=False, help="drawn figures with COCO's 17 keypoints: OUTPUT/images and OUTPUT/coco"
    )
    people.add_argument("output", help="folder to make")
    people.add_argument("--images", type=int, default=400, help="training scenes")
    people.add_argument("--val-images", type=int, default=100)
    people.add_argument("--size", type=int, default=160, help="pixels of a scene's longer side")
    trees = kinds.add_parser(
        "trees", allow_abbrev=False, help="aerial photographs with boxes of tree crowns: OUTPUT/images and OUTPUT/coco"
    )
    trees.add_argument("output", help="folder to make")
    trees.add_argument("--test-region", type=int, default=0, help="0 to 4: no pixel of it is in the training set (0)")
    trees.add_argument("--window", type=int, default=256, help="pixels per side of a labeled image (256)")
    trees.add_argument("--patch", type=int, default=96, help="pixels per side of an unlabeled image (96)")
    trees.add_argument("--wheel", default="", metavar="FILE", help="wheel of deepforest 2.1.0, instead of a download")
    for command in (digits, people):
        command.add_argument("--seed", type=int, default=0)
    subset = kinds.add_parser(
        "subset", allow_abbrev=False, help="shares of the images of a COCO annotation file, several draws of each"
    )
    subset.add_argument("annotations", help="file in COCO's format")
    subset.add_argument("output", help="folder to make")
    subset.add_argument("--percent", type=float, nargs="+", default=[1, 2, 5, 10], metavar="P", help="(1 2 5 10)")
    subset.add_argument("--folds", type=int, default=5, help="draws of each share (5)")
    subset.add_argument("--seed", type=int, default=None, help="of the draws (0)")
    subset.add_argument(
        "--list",
        dest="published",
        default="",
        metavar="FILE",
        help="a published list instead, as Unbiased Teacher's COCO_supervision.txt",
    )
    return parser


if __name__ == "__main__":
    run_command_line(main)
