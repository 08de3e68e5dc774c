"""Run a detector on images; write images with its predictions, and files in COCO's format.

python tools/predict.py /data/new_photos --run runs/photos_faster --output predictions
python tools/predict.py a.jpg b.jpg --config-file CONFIG.yaml --output predictions MODEL.WEIGHTS detector.pth

Writes into OUTPUT:
  pictures/         the images with boxes, masks, keypoints and class names, under the images' names; none if no
                    prediction reaches --threshold
  predictions.json  all predictions in COCO's result format, as an evaluation writes them, regardless of --threshold
  images.json       the images (id, file_name, size) and categories in COCO's format;
                    COCO("images.json").loadRes("predictions.json") reads both
"""

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

if __name__ == "__main__":  # run as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain.common.command_line import run_program

    run_program("tools.predict")

from pretrain.common.command_line import Parser
from pretrain.common.config import extensions, overrides
from pretrain.common.errors import UserError
from pretrain.common.files import check_file, check_writable
from pretrain.common.images import SUFFIXES
from pretrain.common.run.lease import claim
from pretrain.data.folders.images import list_images
from pretrain.data.names import FOLDER, check_outside
from transfer.keys import describe_keys
from transfer.predict import IMAGES_FILE, PREDICTIONS_FILE, build_detector, predict_files


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    with extensions.using(args.extensions):
        _predict(args)


def _predict(args: argparse.Namespace) -> None:
    images = _find_images(args.images)
    output = Path(args.output)
    absolute = Path(os.path.abspath(output))
    for folder in filter(os.path.isdir, args.images):
        check_outside(output, f"{FOLDER}{folder}", "--output")
    check_writable(os.path.join(args.output, PREDICTIONS_FILE), "--output")
    with claim(absolute.parent, "a prediction", file=absolute.name):
        _write_predictions(args, images, output)


def _write_predictions(args: argparse.Namespace, images: dict[str, str], output: Path) -> None:
    for name in (PREDICTIONS_FILE, IMAGES_FILE, *(() if args.no_pictures else ("pictures",))):
        if (output / name).exists():
            raise UserError(f"--output {output} already contains {name}; choose another folder, or remove it")
    detector = build_detector(args.run or args.config_file, args.opts, args.engine)
    print(predict_files(detector, images, output, None if args.no_pictures else args.threshold))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="image files, or folders with images at any depth")
    detector = parser.add_mutually_exclusive_group(required=True)
    text = "run folder of train_net.py, with its config, engine and model_best.pth (or model_final.pth)"
    detector.add_argument("--run", default="", metavar="RUN", help=text)
    detector.add_argument("--config-file", metavar="FILE", help="Detectron2 YAML; MODEL.WEIGHTS names the detector")
    parser.add_argument("--output", required=True, metavar="OUTPUT", help="output folder")
    text = "run the detector with this engine (default: the one that trained it, or Detectron2 if it is installed)"
    parser.add_argument("--engine", choices=("auto", "detectron2", "torchvision"), default="auto", help=text)
    text = "minimum score to draw (default: 0.5)"
    parser.add_argument("--threshold", type=float, default=0.5, metavar="T", help=text)
    parser.add_argument("--no-pictures", action="store_true", help="write only the JSON files, which is faster")
    extensions.add_option(parser)
    overrides.add_keys(parser, describe_keys)
    overrides.add_usage(parser)
    args, words = overrides.parse(parser, argv)
    images = list(takewhile(lambda word: not _is_key(word), args.images))
    args.opts = args.images[len(images) :] + words
    args.images = images
    if not 0 <= args.threshold <= 1:
        raise UserError(f"--threshold is {args.threshold:g}; scores are between 0 and 1")
    return args


def _is_key(word: str) -> bool:
    """Return whether a word is a config key rather than an image or a folder, which may be missing."""
    is_path = os.path.exists(word) or os.sep in word or word.lower().endswith(SUFFIXES)
    return word.isupper() and not is_path


def _find_images(paths: Sequence[str]) -> dict[str, str]:
    """Return image names -> paths: a file has its own name, an image in a folder its path in that folder.

    Raises:
        UserError: nothing is there, a folder has no images, or two images have the same name.
    """
    images: dict[str, str] = {}
    for path in paths:
        is_folder = os.path.isdir(path)
        names = list_images(Path(path)) if is_folder else [check_file(path, "image or folder").name]
        if not names:
            raise UserError(f"no images in {path}; pass a folder with images, or image files")
        for name in names:
            if name in images:
                raise UserError(f"duplicate image name {name}; pass their common parent folder")
            images[name] = os.path.join(path, name) if is_folder else path
    return images
