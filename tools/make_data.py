"""Make small data sets, convert boxes to COCO's format, split or draw subsets of annotations, and find duplicates.

python tools/make_data.py digits --output datasets/digits
python tools/make_data.py trees --output datasets/trees
python tools/make_data.py voc VOC2007/Annotations --output datasets/boxes --images VOC2007/JPEGImages
python tools/make_data.py yolo data/labels --output datasets/boxes --images data/images --names data/data.yaml
python tools/make_data.py split datasets/boxes/annotations.json --output datasets/own --val 0.2
python tools/make_data.py split /data/photos --output datasets/photos --val 0.2
python tools/make_data.py duplicates folder:data/train folder:data/test --output duplicates
python tools/make_data.py subset datasets/coco/annotations/instances_train2017.json --output datasets/coco_subsets
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("tools.make_data")

from pretrain.common.command_line import Parser
from pretrain.common.config import extensions
from pretrain.common.errors import UserError
from pretrain.common.files import check_file, check_output_path, sha256, translate_write_errors
from pretrain.common.run.lease import claim
from pretrain.common.run.state import read_json_or_empty
from pretrain.common.shell import shorten_path
from pretrain.data.names import FOLDER, check_outside
from tools.data.boxes import read_boxes
from tools.data.class_folders import list_class_images, write_class_folders
from tools.data.digits import write_digits
from tools.data.split import print_counts, write_split, write_subsets
from tools.data.trees import write_trees
from transfer.coco.reading import read_annotations

_MANIFEST = "made.json"
# Increase the version of a kind when the same arguments produce different data.
_VERSIONS = {"digits": 1, "trees": 1, "subset": 2, "split": 1, "voc": 1, "yolo": 1, "duplicates": 3}
# Arguments of which the manifest needs no record: the digests of what is read tell the rest.
_WITHOUT_EFFECT = ("output", "wheel", "from_zero", "extensions")
_MIN_SIZE = 16  # pixels


def main(argv: Sequence[str] | None = None) -> None:
    args = _build_parser().parse_args(argv)
    _check_numbers(args)
    check_output_path(args.output, "--output")
    with extensions.using(vars(args).get("extensions", [])):
        write, digests = _build_writer(args)
        arguments = {name: value for name, value in vars(args).items() if name not in _WITHOUT_EFFECT}
        make(Path(os.path.abspath(args.output)), {**arguments, "version": _VERSIONS[args.kind], **digests}, write)


def _check_numbers(args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        minimum = 0 if name in ("seed", "test_region") else _MIN_SIZE if name == "size" else 1
        if type(value) is int and value < minimum:  # not bool
            raise UserError(f"--{name.replace('_', '-')} must be at least {minimum} for {args.kind}, got {value}")


def _build_writer(args: argparse.Namespace) -> tuple[Callable[[Path], None], dict[str, str | None]]:
    """Return the function that fills a folder with the data, and the SHA-256 of the files that they are made from."""
    match args.kind:
        case "digits":
            images = {"train": args.images, "val": args.val_images}
            scenes = {"train": args.scenes, "val": args.val_scenes}
            return lambda folder: write_digits(folder, images, args.size, scenes, args.seed), {}
        case "trees":
            wheel = check_file(args.wheel, "wheel", "*.whl") if args.wheel else None
            return lambda folder: write_trees(folder, args.test_region, wheel), {}
        case "voc" | "yolo":
            if not os.path.isdir(args.labels):
                raise UserError(f"no folder at {args.labels}")
            names = check_file(args.names, "file of names") if args.kind == "yolo" else None
            from_zero = args.kind == "voc" and args.from_zero
            content = read_boxes(Path(args.labels), Path(args.images or args.labels), names, from_zero=from_zero)
            digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
            return lambda folder: _write_annotations(folder, content), {"content": digest}
        case "duplicates":
            from tools.data.duplicates import find_duplicates, write_duplicates  # imports torch

            extensions.load()
            for name in (args.train, args.test):
                check_outside(args.output, name, "--output")
            content = find_duplicates(args.train, args.test, args.weights)
            digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
            return lambda folder: write_duplicates(folder, content), {"content": digest}
    if args.kind == "split" and os.path.isdir(args.annotations):
        return _build_class_split(args)
    file = check_file(args.annotations, "annotation file", "*.json")
    digests: dict[str, str | None] = {"annotations": sha256(file)}
    if args.kind == "split":
        options = (args.val, args.seed, args.images, args.group_by)
        return lambda folder: write_split(folder, read_annotations(file), *options), digests
    positions = check_file(args.list, "list of positions", "*.txt") if args.list else None
    digests["list"] = sha256(positions) if positions else None
    draws = (args.percent, args.folds, args.seed, positions)
    return lambda folder: write_subsets(folder, read_annotations(file), *draws), digests


def _build_class_split(args: argparse.Namespace) -> tuple[Callable[[Path], None], dict[str, str | None]]:
    """Return the same of a split of class folders."""
    if args.images:
        raise UserError(
            f"--images checks the images of an annotation file, and {args.annotations} is a folder; omit it"
        )
    source = Path(args.annotations)
    check_outside(args.output, f"{FOLDER}{source}", "--output")
    classes = list_class_images(source)
    digest = hashlib.sha256(json.dumps([str(source.absolute()), classes]).encode()).hexdigest()
    options = (args.val, args.seed, args.group_by)
    return lambda folder: write_class_folders(folder, source, classes, *options), {"images": digest}


def _write_annotations(folder: Path, content: dict[str, Any]) -> None:
    with_info = {"info": {}, **content}  # which loadRes of pycocotools 2.0.9 and 2.0.10 reads
    (folder / "annotations.json").write_text(json.dumps(with_info))
    print_counts({"annotations.json": content})


def make(output: Path, arguments: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Fill a temporary folder and rename it to ``output`` once it is complete; existing equal data are left unchanged.

    Raises:
        UserError: ``output`` contains other data, cannot be written, or another process is making it.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        earlier = read_json_or_empty(output / _MANIFEST)
        differences = [key for key in {**earlier, **arguments} if arguments.get(key) != earlier.get(key)]
        if differences:
            content = f"data that differ in {', '.join(differences)}" if earlier else "something else"
            raise UserError(f"{output} contains {content}; choose another folder, or remove it")
        print(f"{shorten_path(output)} already exists")
        return
    with claim(output.parent, "a data set being written", file=output.name):
        folder = output.parent / f".{output.name}.making"
        shutil.rmtree(folder, ignore_errors=True)  # a killed run may have left it
        try:
            with translate_write_errors(output):
                folder.mkdir()
                (folder / _MANIFEST).write_text(json.dumps(arguments, sort_keys=True) + "\n")
                write(folder)
                os.sync()  # before the rename, which marks the data as complete: a power failure would empty files
                folder.rename(output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"made {shorten_path(output)}")


def _parse_fraction_or_number(text: str) -> int | float:
    if text.isdecimal():
        return int(text)
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction between 0 and 1 nor a number of images")


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    _add_drawn_kinds(kinds)
    _add_coco_kinds(kinds)
    _add_duplicates(kinds)
    return parser


def _add_kind(kinds: Any, name: str, text: str) -> argparse.ArgumentParser:
    sub = kinds.add_parser(name, help=text)
    if name == "subset":
        sub.add_argument("annotations", help="file in COCO's format")
    if name == "split":
        text = "file in COCO's format, or a folder with one folder of images per class"
        sub.add_argument("annotations", metavar="FILE_OR_FOLDER", help=text)
    if name in ("voc", "yolo"):
        sub.add_argument("labels", help="folder of the label files, at any depth")
    sub.add_argument("--output", required=True, metavar="FOLDER", help="output folder")
    if name not in ("trees", "voc", "yolo", "duplicates"):
        _add_number(sub, "--seed", 0, "random seed")
    return sub


def _add_number(sub: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    sub.add_argument(option, type=int, default=default, help=f"{text} (default: {default})")


def _add_drawn_kinds(kinds: Any) -> None:
    digits = _add_kind(kinds, "digits", "scikit-learn's handwritten digits: FOLDER/images and FOLDER/coco")
    _add_number(digits, "--images", 1300, "number of training images in the image folder")
    _add_number(digits, "--val-images", 400, "number of validation images in the image folder")
    _add_number(digits, "--size", 32, "image size of the image folder in pixels")
    _add_number(digits, "--scenes", 100, "number of training images in the COCO data set")
    _add_number(digits, "--val-scenes", 100, "number of validation images in the COCO data set")
    trees = _add_kind(kinds, "trees", "aerial photographs with boxes of tree crowns: FOLDER/images and FOLDER/coco")
    text = "region held out for validation (default: 0)"
    trees.add_argument("--test-region", type=int, default=0, choices=range(5), help=text)
    trees.add_argument("--wheel", default="", metavar="FILE", help="wheel of deepforest 2.1.0, instead of a download")


def _add_coco_kinds(kinds: Any) -> None:
    subset = _add_kind(kinds, "subset", "random subsets of a COCO annotation file")
    text = "percentages of the images (default: 1 2 5 10)"
    subset.add_argument("--percent", type=float, nargs="+", default=[1, 2, 5, 10], metavar="P", help=text)
    _add_number(subset, "--folds", 5, "subsets per percentage")
    text = "use a published list, such as Unbiased Teacher's COCO_supervision.txt, instead of random subsets"
    subset.add_argument("--list", default="", metavar="FILE", help=text)
    text = (
        "train.json and val.json from a COCO annotation file, or train/ and val/ of links to images in class folders, "
    )
    text += "split by image, with equal proportions of the classes"
    split = _add_kind(kinds, "split", text)
    text = "fraction or number of the images for validation (default: 0.2)"
    split.add_argument("--val", type=_parse_fraction_or_number, default=0.2, metavar="N", help=text)
    split.add_argument("--images", default="", metavar="DIR", help="folder of the images, to check that they exist")
    text = (
        "keep images together that have the same value in FIELD (video_id, or extra.video for a field in a field); if "
        "no image record has such a field, that have the same first capture group, or else match, of the regular "
        "expression REGEX in file_name ('^(.*)_[0-9]+' for video_0001.jpg); the fraction for validation then becomes "
        "approximate"
    )
    split.add_argument("--group-by", metavar="REGEX_OR_FIELD", help=text)
    for name, source in (("voc", "VOC's XML files"), ("yolo", "YOLO's text files of boxes or outlines")):
        boxes = _add_kind(kinds, name, f"annotations.json in COCO's format from {source}; the images are not copied")
        text = "folder of the images, with the names and subfolders of the label files (default: the labels' folder)"
        boxes.add_argument("--images", default="", metavar="DIR", help=text)
        if name == "voc":
            text = "read boxes as edges in pixels from 0, which some tools write; VOC has first and last pixels from 1"
            boxes.add_argument("--from-zero", action="store_true", help=text)
    text = "data.yaml with names, or a text file with one name per line; keypoints (kpt_shape) are not converted"
    boxes.add_argument("--names", required=True, metavar="FILE", help=text)  # yolo only


def _add_duplicates(kinds: Any) -> None:
    text = "test images that are training images, or nearly so: FOLDER/duplicates.json and duplicates.png"
    duplicates = _add_kind(kinds, "duplicates", text)
    text = "training images: a data set as in DATASETS.TRAIN or DATA.TRAIN, such as coco:FILE:DIR or folder:DIR"
    duplicates.add_argument("train", help=text)
    duplicates.add_argument("test", help="test images: another one; of a folder with splits, its val split")
    text = "run folder or checkpoint whose frozen features are compared (default: a random ResNet-18)"
    duplicates.add_argument("--weights", default="random", metavar="RUN", help=text)
    extensions.add_option(duplicates)
