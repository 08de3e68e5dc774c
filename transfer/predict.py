"""Runs a fine-tuned detector on images: images -> detections, figures of them, and COCO's files."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from pretrain.common.config.yaml_io import get
from pretrain.common.errors import UserError, count_noun, shorten_list
from pretrain.common.files import atomic_write, check_file, json_text, read_json, write_json
from pretrain.common.interface import list_words, read_path, set_torch_modes
from pretrain.common.run import file_names
from pretrain.common.run.state import read_working_folder
from pretrain.common.shell import shorten_path

from . import preflight
from .coco import catalog
from .coco.checks.classes import category_names, check_same_categories
from .coco.names import locate_data_set
from .coco.reading import read_annotations
from .config import check_ranges, classes_key, load_config
from .run_folder import is_training

if TYPE_CHECKING:  # they import torch
    import torch

    from .coco.results import Detection
    from .engine import Engine
    from .training.samplers import ModelInput

log = logging.getLogger(__name__)
PREDICTIONS_FILE = "predictions.json"
IMAGES_FILE = "images.json"
Categories = list[dict[str, Any]]  # COCO's records (id, name) in the order of the detector's labels


@dataclass(frozen=True)
class Detector:
    """A fine-tuned detector, ready to run.

    Attributes:
        categories: COCO's records (id, name) in the order of the detector's labels.
    """

    engine: Engine
    model: Any
    device: torch.device
    categories: Categories

    def predict(self, image: Any) -> Any:
        """Return the detections on an image, best first, as an evaluation computes them.

        Each is a dictionary in COCO's result format: ``image_id`` (1), ``category_id`` (see ``categories``), ``bbox``
        (x, y, width, height in pixels of the upright image), ``score`` (0 to 1) and, of mask and keypoint
        detectors, ``segmentation`` (compressed RLE of the whole image) or ``keypoints`` (x, y, score of each).
        There are at most TEST.DETECTIONS_PER_IMAGE, with scores above MODEL.ROI_HEADS.SCORE_THRESH_TEST.

        Args:
            image: a path, a PIL image (turned upright as its EXIF data say), an array (H, W, 3) of uint8 RGB, or a
                tensor (3, H, W) of uint8 RGB; or a list of them, whose ``image_id`` counts from 1.

        Returns:
            A list of detections; for a list of images, a list of such lists.

        Raises:
            UserError: an image cannot be read, or is of another type or form.
        """
        if not isinstance(image, (list, tuple)):
            return next(self._predict_in_turn([_name_image(image, "image")]))
        return list(self._predict_in_turn([_name_image(one, f"image {i}") for i, one in enumerate(image, 1)]))

    def _predict_in_turn(self, names: Sequence[str]) -> Iterator[list[Detection]]:
        for result in self.predict_all(names):
            if isinstance(result, UserError):
                raise result
            yield result[1]

    def predict_all(
        self, paths: Sequence[str], num_workers: int = 0
    ) -> Iterator[tuple[ModelInput, list[Detection]] | UserError]:
        """Yield each image and its detections; for an unreadable image, its error.

        Image ids count from 1.

        Args:
            paths: image files, or `images.DecodedImage`s.
            num_workers: processes that read images.
        """
        import torch

        from pretrain.common.run.workers import SignalSafeDataLoader

        records: Any = [{"file_name": path, "image_id": i, "annotations": []} for i, path in enumerate(paths, 1)]
        batches = [[(index, index)] for index in range(len(records))]
        images = self.engine.test_images(records)
        category_ids = [category["id"] for category in self.categories]
        self.model.eval()
        loader = SignalSafeDataLoader(images, batches, num_workers, describe=images.image_name, collate_fn=list)
        for (image,) in loader:
            if isinstance(image, UserError):
                yield image
                continue
            with torch.no_grad():
                detections = self.engine.detect(self.model, [image], category_ids)
            yield image, detections


def _name_image(image: Any, name: str) -> str:
    """Return an image's path, or its name with its pixels if it is none."""
    if isinstance(image, (str, os.PathLike)):
        return read_path(image, name)
    from pretrain.common.image_checks.pixels import read_any
    from pretrain.common.images import name_pixels

    return name_pixels(name, read_any(image, name))


def load_detector(source: str | Path, overrides: Mapping[str, Any] | None = None, *, engine: str = "auto") -> Detector:
    """Load a fine-tuned detector.

    Args:
        source: a run folder of fine-tuning (its model_best.pth, or without TEST.BEST its model_final.pth), or a
            config file whose MODEL.WEIGHTS names the detector.
        overrides: config keys and their values, such as ``{"MODEL.DEVICE": "cpu"}``.
        engine: detectron2, torchvision, or auto: the one that trained the detector; for a config file, Detectron2 if
            it is installed.

    Raises:
        UserError: not a run folder of fine-tuning, no weights, weights that do not fit, or an engine that is not
            installed or cannot honor the config.
    """
    return build_detector(read_path(source, "source"), list_words(overrides or {}), engine)


def build_detector(path: str, words: Sequence[Any], engine: str) -> Detector:
    """Build the detector of `load_detector` with KEY VALUE overrides."""
    source = Path(path)
    config_file = source
    if source.is_dir():
        config_file = source / file_names.CONFIG
        if not config_file.is_file() or not is_training(source):
            remedy = "pass an OUTPUT_DIR of train_net.py, or a config file"
            raise UserError(f"{source} is not the run folder of a detector; {remedy}")
        best = source / preflight.BEST
        words = ["MODEL.WEIGHTS", str(best if best.is_file() else source / preflight.FINAL), *words]
        if engine == "auto" and (source / file_names.RESULTS).is_file():
            engine = read_json(source / file_names.RESULTS)["engine"]["name"]
    else:
        check_file(source, "run folder or config file")
    engine = preflight.choose_engine(engine)
    cfg = load_config(config_file, words)
    if not cfg.MODEL.WEIGHTS:
        raise UserError("MODEL.WEIGHTS is empty; pass the file of a fine-tuned detector")
    categories = _find_categories(cfg, read_working_folder(source) if source.is_dir() else "")
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ()
    check_ranges(cfg)
    preflight.check_inputs(cfg, eval_only=True, reads_weights=True)
    preflight.check_engine(cfg, engine, eval_only=True)

    with set_torch_modes():  # after the checks: it imports torch
        return _build(cfg, engine, categories)


def _build(cfg: CfgNode, engine: str, categories: Categories) -> Detector:
    from pretrain.common.device import set_float32_precision

    from .distributed import join
    from .train import build_model, load_engine
    from .weights.load import check_weights_fit, read_weights

    device = join(cfg.MODEL.DEVICE)
    set_float32_precision(cfg.FLOAT32_PRECISION)
    weights = read_weights(cfg.MODEL.WEIGHTS)
    check_weights_fit(weights, cfg)
    loaded_engine = load_engine(engine)(cfg, {})
    return Detector(loaded_engine, build_model(loaded_engine, device, weights), device, categories)


def _find_categories(cfg: CfgNode, folder: str) -> Categories:
    """Find COCO's category records in the order of the labels, in the data sets that the config names.

    If these are not on this machine, ids count from 1, and the names are those that the run records, or numbers if it
    records none.

    Args:
        folder: the folder of relative names, where the detector was trained (default: the working folder).

    Raises:
        UserError: the data sets' classes are no longer the run's.
    """
    count = get(cfg, classes_key(cfg))
    names = (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)
    recorded = preflight.read_recorded_classes(cfg, eval_only=True)
    for name in names:
        categories = _read_categories(name, folder)
        if categories and recorded:
            labels = category_names({"categories": categories})
            remedy = "restore it, or set DATASETS.TRAIN and TEST to '()'"
            check_same_categories({**recorded, name: labels}, remedy)
        if len(categories) == count:
            return sorted(categories, key=lambda category: category["id"])
    class_names = next(iter(recorded.values()), [f"class {number}" for number in range(1, count + 1)])
    problem = f"the annotations of {' or '.join(names) or 'this detector'} are not on this machine"
    log.warning(f"{problem}; the categories are {shorten_list(class_names)}, and their ids count from 1")
    return [{"id": number, "name": name} for number, name in enumerate(class_names, 1)]


def _read_categories(name: str, folder: str) -> Categories:
    """Read the category records of a data set; [] if neither its annotations nor its metadata are on this machine."""
    with contextlib.suppress(UserError):
        annotations = locate_data_set(name, folder).annotations
        if annotations:
            return read_annotations(annotations, needs_objects=False)["categories"]
    with contextlib.suppress(UserError):
        classes = catalog.read_metadata(name).thing_classes
        return [{"id": number, "name": class_name} for number, class_name in enumerate(classes, 1)]
    return []


def predict_files(detector: Detector, images: Mapping[str, str], output_dir: Path, threshold: float | None) -> str:
    """Write the detections on images as COCO's files, and figures of them; log which images are unreadable.

    Args:
        images: name -> path.
        threshold: minimum score to draw; None for no figures.

    Returns:
        A line with the numbers of images and predictions, and the speed.

    Raises:
        UserError: no image can be read.
    """
    from pretrain.common.device import translate_torch_errors

    from .distributed import log_progress

    readable: list[dict[str, Any]] = []
    detections: list[Detection] = []
    started = time.perf_counter()
    with translate_torch_errors():
        results = detector.predict_all(list(images.values()), detector.engine.cfg.DATALOADER.NUM_WORKERS)
        for name, result in zip(images, log_progress(results, len(images), "prediction"), strict=True):
            if isinstance(result, UserError):
                log.warning(f"skipped: {result}")
                continue
            image, image_detections = result
            size = {"height": image["height"], "width": image["width"]}
            readable.append({"id": image["image_id"], "file_name": name, **size})
            detections += image_detections
    seconds = time.perf_counter() - started
    if not readable:
        raise UserError(f"none of the {count_noun(len(images), 'image')} can be read; the lines above say why")
    sections = {"images": readable, "annotations": [], "categories": detector.categories}
    content = {"info": {}, **sections}  # loadRes of pycocotools 2.0.9 and 2.0.10 reads "info"
    write_json(output_dir / IMAGES_FILE, content)
    atomic_write(output_dir / PREDICTIONS_FILE, json_text(detections))
    counts = f"{count_noun(len(detections), 'prediction')} on {count_noun(len(readable), 'image')}"
    counts += f", {len(images) - len(readable)} skipped"
    speed = f"{len(readable) / seconds:.1f} images/s on {detector.device} with the {detector.engine.name} engine"
    reached = "" if threshold is None else _draw_all(content, detections, images, output_dir / "pictures", threshold)
    return f"{output_dir}: {counts}{reached}; {speed}"


def _draw_all(
    content: Mapping[str, Any],
    detections: Sequence[Detection],
    images: Mapping[str, str],
    folder: Path,
    threshold: float,
) -> str:
    """Draw the detections on all images, unless none scores at least ``threshold``; return how many do.

    Args:
        content: that of images.json.
        images: name -> path.
    """
    from .coco.visualize import draw_predictions, name_figures
    from .distributed import log_progress

    scores = [detection["score"] for detection in detections]
    reached = f"; {sum(score >= threshold for score in scores)} reach --threshold {threshold:g}"
    highest = max(scores, default=0.0)
    if not scores or highest < threshold:
        remedy = "; lower --threshold to draw them" if scores else ""
        return f"{reached}{f' (the highest is {highest:.2g})' if scores else ''}: no pictures{remedy}"
    by_image: dict[int, list[Detection]] = {image["id"]: [] for image in content["images"]}
    for detection in detections:
        by_image[detection["image_id"]].append(detection)
    figures = name_figures(folder, [image["file_name"] for image in content["images"]])
    for image in log_progress(content["images"], len(by_image), "drawing"):
        name = image["file_name"]
        draw_predictions(images[name], by_image[image["id"]], content["categories"], threshold, figures[name])
    return f"{reached}; pictures in {shorten_path(folder)}"
