"""Runs a detector on images: pictures of its predictions, and COCO's files of them.

python tools/predict.py /data/new_photos --run runs/photos_faster --output predictions
python tools/predict.py a.jpg b.jpg --config-file CONFIG.yaml --output predictions MODEL.WEIGHTS detector.pth

Writes into OUTPUT:
  pictures/         the images with boxes, masks, keypoints and class names, under the images' own names
  predictions.json  all predictions in COCO's result format, as an evaluation keeps them, whatever the threshold
  images.json       the images (id, file_name, size) and categories in COCO's format;
                    COCO("images.json").loadRes("predictions.json") reads both
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file: the packages lie one folder up

from fvcore.common.config import CfgNode

from pretrain.common.config import extensions, overrides
from pretrain.common.config.yaml_io import get
from pretrain.common.errors import UserError, run_command_line
from pretrain.common.files import (
    atomic_write,
    check_name,
    check_writable,
    existing_file,
    json_text,
    read_json,
    write_json,
)
from pretrain.common.run.folder import stage_of
from pretrain.data.folders import images_below
from transfer import preflight
from transfer.coco import catalog, data
from transfer.config import classes_key, load_config
from transfer.config_keys import check_ranges, describe_keys
from transfer.train_net import pick_engine


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    extensions.add(args.extensions)
    images, (engine, cfg, classes) = _listed(args.images), _configure(args)
    output = Path(args.output)
    for name in ("predictions.json", "images.json", *["pictures"] * (not args.no_pictures)):
        if (output / name).exists():
            raise UserError(f"--output {output} holds {name} already; choose another folder, or remove it")
    check_writable(output / "predictions.json")
    predict(engine, cfg, images, classes, output, None if args.no_pictures else args.threshold)


def predict(
    engine_name: str, cfg: CfgNode, images: dict[str, str], classes: list[dict[str, Any]], output: Path,
    threshold: float | None,
) -> None:  # fmt: skip
    """Writes what a detector finds on images, one per batch as in an evaluation, and names those that are unreadable.

    Args:
        cfg: MODEL.WEIGHTS is the detector's file.
        images: name -> path.
        classes: COCO's category records, in the order of the detector's labels.
        threshold: the least score in pictures; None: no pictures.

    Raises:
        UserError: the weights do not fit, or no image can be read.
    """
    import torch

    from pretrain.common.run.stage import translate_torch_errors
    from pretrain.common.run.workers import SignalSafeDataLoader
    from transfer.coco.visualize import draw_predictions, picture_file
    from transfer.distributed import join, log_progress
    from transfer.train import build
    from transfer.weights.load import read_weights

    engine: Any = importlib.import_module(f"transfer.{engine_name}_engine.engine")
    device, weights = join(cfg.MODEL.DEVICE), read_weights(cfg.MODEL.WEIGHTS)
    records = [{"file_name": path, "image_id": id_, "annotations": []} for id_, path in enumerate(images.values(), 1)]
    names, category_ids = dict(enumerate(images, 1)), [category["id"] for category in classes]
    seen: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs, translate_torch_errors("prediction"), torch.no_grad():
        cfg.OUTPUT_DIR = logs  # Detectron2's
        cfg, model = build(engine, cfg, device, weights)
        batches = [[(index, index)] for index in range(len(records))]
        loader = SignalSafeDataLoader(
            engine.test_images(cfg, records), batches, cfg.DATALOADER.NUM_WORKERS, collate_fn=list
        )
        model.eval()
        began = time.perf_counter()
        for (image,) in log_progress(loader, len(batches), "prediction", print):
            if isinstance(image, UserError):
                print(f"skipped: {image}", file=sys.stderr)
                continue
            predictions, name = engine.results(model, [image], category_ids), names[image["image_id"]]
            size = {side: image[side] for side in ("height", "width")}
            seen.append({"id": image["image_id"], "file_name": name, **size})
            results += predictions
            if threshold is not None:
                file = picture_file(output / "pictures", name)
                draw_predictions(image["file_name"], predictions, classes, threshold, file)
        seconds = time.perf_counter() - began
    if not seen:
        raise UserError(f"none of the {len(images)} images can be read; the lines above say why")
    write_json(output / "images.json", {"images": seen, "annotations": [], "categories": classes})
    atomic_write(output / "predictions.json", json_text(results))
    print(
        f"{output}: {len(results)} predictions on {len(seen)} images, {len(images) - len(seen)} skipped; "
        f"{len(seen) / seconds:.1f} images/s on {device} with the {engine_name} engine"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="image files, or folders of images at any depth")
    detector = parser.add_mutually_exclusive_group(required=True)
    detector.add_argument(
        "--run", default="", metavar="RUN",
        help="run folder of train_net.py: its config, engine and model_best.pth (without TEST.BEST: model_final.pth)",
    )  # fmt: skip
    detector.add_argument("--config-file", metavar="FILE", help="Detectron2 YAML; MODEL.WEIGHTS names the detector")
    parser.add_argument("--output", required=True, metavar="OUTPUT", help="folder to write into")
    parser.add_argument(
        "--engine", choices=("auto", "detectron2", "torchvision"), default="auto",
        help="what runs the detector (auto: what trained it; without a run, Detectron2 if it is installed)",
    )  # fmt: skip
    parser.add_argument("--threshold", type=float, default=0.5, metavar="T", help="least score in pictures (0.5)")
    parser.add_argument("--no-pictures", action="store_true", help="write the JSON files only, which is faster")
    extensions.add_option(parser)
    overrides.add_keys(parser, describe_keys)
    overrides.add_usage(parser)
    args, words = overrides.parse(parser, argv)
    images = list(takewhile(lambda word: not word.isupper() or os.path.exists(word), args.images))  # up to a KEY
    args.images, args.opts = images, args.images[len(images) :] + words
    if not 0 <= args.threshold <= 1:
        raise UserError(f"--threshold is {args.threshold:g}; scores are between 0 and 1")
    check_name(args.output, "--output")
    return args


def _listed(given: Sequence[str]) -> dict[str, str]:
    """Name -> path: of a file its own name, of the images in a folder their paths in that folder.

    Raises:
        UserError: nothing is there, a folder has no images, or two images have one name.
    """
    images: dict[str, str] = {}
    for path in given:
        is_folder = os.path.isdir(path)
        names = images_below(Path(path)) if is_folder else [existing_file(path, "image or folder").name]
        if not names:
            raise UserError(f"no images in {path}")
        for name in names:
            if name in images:
                raise UserError(f"two images are called {name}; name the folder that holds both")
            images[name] = os.path.join(path, name) if is_folder else path
    return images


def _configure(args: argparse.Namespace) -> tuple[str, CfgNode, list[dict[str, Any]]]:
    """The engine's name, the detector's config with its weights and without data sets, and its `_categories`.

    Raises:
        UserError: not the run folder of a detector, no weights, or an engine that cannot run this config.
    """
    run, wanted, opts = Path(args.run), args.engine, list(args.opts)
    if args.run:
        if not (run / "config.yaml").is_file() or stage_of(run) != "transfer":
            raise UserError(f"--run {run} is not the run folder of a detector (train_net.py's OUTPUT_DIR)")
        best = run / "model_best.pth"
        opts = ["MODEL.WEIGHTS", str(best if best.is_file() else run / "model_final.pth"), *opts]
        if wanted == "auto" and (run / "results.json").is_file():
            wanted = read_json(run / "results.json")["engine"]["name"]
    engine = pick_engine(wanted)
    cfg = load_config(run / "config.yaml" if args.run else args.config_file, opts)
    if not cfg.MODEL.WEIGHTS:
        raise UserError("MODEL.WEIGHTS is empty; name the file of a fine-tuned detector")
    classes = _categories(cfg)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (), ()
    check_ranges(cfg)
    preflight.check_inputs(cfg, eval_only=True, weights=True)
    preflight.check_engine(cfg, engine, eval_only=True)
    return engine, cfg, classes


def _categories(cfg: CfgNode) -> list[dict[str, Any]]:
    """COCO's category records in the order of the labels: of the data sets that the config names, where they are.

    Elsewhere ids count from 1, and the names are those that the run records; classes of a detector without any of these
    are called by their number.

    Raises:
        UserError: the data sets' classes are no longer the run's.
    """
    count, names = get(cfg, classes_key(cfg)), (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)
    recorded = preflight.read_recorded_classes(cfg, eval_only=True)
    for name in names:
        known: list[dict[str, Any]] = []
        with contextlib.suppress(UserError):
            if files := data.find(name):
                known = data.read(files.annotations)["categories"]
        with contextlib.suppress(UserError):
            known = known or [{"id": i, "name": n} for i, n in enumerate(catalog.read_metadata(name).thing_classes, 1)]
        if known and recorded:
            names_now = {name: data.category_names({"categories": known})}
            data.check_same_categories({**recorded, **names_now}, "restore it, or set DATASETS.TRAIN and TEST to '()'")
        if len(known) == count:
            return sorted(known, key=lambda category: category["id"])
    of_classes = next(iter(recorded.values()), [f"class {number}" for number in range(1, count + 1)])
    print(f"no annotations of {' or '.join(names) or 'this detector'} here: categories are {', '.join(of_classes)}")
    return [{"id": number, "name": name} for number, name in enumerate(of_classes, 1)]


if __name__ == "__main__":
    run_command_line(main)
