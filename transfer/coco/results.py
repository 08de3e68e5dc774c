"""Computes either engine's COCO metrics with pycocotools, in one schema: Detectron2's names, from 0 to 100 or null."""

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from fvcore.common.config import CfgNode
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tabulate import tabulate

from pretrain.common.errors import UserError, count_noun
from pretrain.common.files import atomic_write, json_text, read_json, write_json
from pretrain.common.run import file_names

from ..config import dump, list_tasks
from .ceiling import compute_ceiling, describe_ceiling
from .names import folder_name
from .records import DataSet, describe_unscored
from .visualize import draw

log = logging.getLogger(__name__)
_BOX = {"AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5, "AR": 8, "ARs": 9, "ARm": 10, "ARl": 11}
_KEYPOINTS = {"AP": 0, "AP50": 1, "AP75": 2, "APm": 3, "APl": 4, "AR": 5, "ARm": 8, "ARl": 9}
_STATS = {"bbox": _BOX, "segm": _BOX, "keypoints": _KEYPOINTS}  # task -> name -> position in COCOeval.stats
TASKS = tuple(_STATS)
_TABLE_LIMIT = 100  # predictions of a class in an image that count in COCO's tables of boxes and masks
_DETECTORS = {"bbox": "faster", "segm": "mask", "keypoints": "keypoint"}  # by the last task
Metrics = dict[str, dict[str, float | None]]  # task -> name -> value


class Detection(TypedDict):
    """A detection in COCO's result format."""

    image_id: Any
    category_id: Any  # the annotation file's
    bbox: list[float]  # x, y, width, height
    score: float
    segmentation: NotRequired[dict[str, Any]]  # RLE
    keypoints: NotRequired[list[float]]


def score(cfg: CfgNode, data_set: DataSet, predictions: Sequence[Detection], *, keep: bool = True) -> Metrics:
    """Compute the metrics of the predictions on one data set of DATASETS.TEST.

    Args:
        keep: write the predictions into OUTPUT_DIR; see `predictions_file`.
    """
    name = data_set.name
    if keep:
        atomic_write(Path(cfg.OUTPUT_DIR) / predictions_file(name), json_text(list(predictions)))
    content = data_set.content
    most = cfg.TEST.DETECTIONS_PER_IMAGE
    metrics = evaluate(content, predictions, list_tasks(cfg), cfg.TEST.KEYPOINT_OKS_SIGMAS, most)
    table = format_table(metrics) if data_set.num_objects else describe_unscored(name)
    log.info(f"{name}: {count_noun(len(predictions), 'prediction')}\n{table}")
    for task, row in metrics.items():
        if "AP_ceiling" in row:
            log.warning(describe_ceiling(task, row, name), extra={"once": f"{task} ceiling of {name}"})
    return metrics


def draw_saved(cfg: CfgNode, data_set: DataSet, count: int) -> None:
    """Draw the predictions that `score` has written on ``count`` images of one data set of DATASETS.TEST.

    The figures are in OUTPUT_DIR/visualizations, with one folder per data set if there are several.
    """
    name = data_set.name
    file = Path(cfg.OUTPUT_DIR) / predictions_file(name)
    if not file.is_file():
        log.info(f"no figures of {name}: they are drawn only where COCO's metrics are computed")
        return
    folder = file.parents[2] / "visualizations" / (folder_name(name) if len(cfg.DATASETS.TEST) > 1 else "")
    draw(data_set.content, data_set.source.images, read_json(file, list), folder, count=count)
    log.info(f"ground truth and predictions side by side: {folder}")


def predictions_file(name: str) -> str:
    """Return the file of the predictions on a set of DATASETS.TEST, in COCO's result format, relative to OUTPUT_DIR."""
    return f"inference/{folder_name(name)}/coco_instances_results.json"


def evaluate(
    content: Mapping[str, Any],
    predictions: Sequence[Detection],
    tasks: Sequence[str],
    oks_sigmas: Sequence[float] = (),
    detections_per_image: int = _TABLE_LIMIT,
) -> Metrics:
    """Compute COCO's metrics.

    Args:
        content: the annotation file's.
        predictions: if there are none, every metric is 0.
        tasks: some of `TASKS`; a prediction needs a segmentation for segm and keypoints for keypoints.
        oks_sigmas: one per keypoint, for keypoints other than COCO's 17.
        detections_per_image: the most predictions that an image may have.

    Returns:
        {task: {AP, AP50, AP75, APs, APm, APl, AR, ARs, ARm, ARl, "AP-<category>"...}} from 0 to 100 (no APs and ARs for
        keypoints), or None if the ground truth has no such object. As in COCO's tables, 100 predictions of a class in
        an image count at most (20 with keypoints). Where this or ``detections_per_image`` is less than the objects, a
        row also has what `compute_ceiling` returns. If ``detections_per_image`` is above 100, it has AP and AR for
        which so many count, such as AP@300 and AR@300.
    """
    truth = _build_ground_truth(content)
    if all(record["iscrowd"] for record in truth.dataset["annotations"]):
        predictions = ()  # every metric is None: test-dev's 20,000 images would be compared with nothing
    results: Metrics = {}
    for task in tasks:
        # Without its box, pycocotools takes a prediction's area, which decides small, medium or large, from its mask.
        records = [{k: v for k, v in r.items() if task != "segm" or k != "bbox"} for r in predictions]
        iou_type: Any = task  # pycocotools' stubs name the three
        with contextlib.redirect_stdout(io.StringIO()):
            coco_eval: Any = COCOeval(truth, truth.loadRes(records) if records else _index(content, []), iou_type)
            if len(oks_sigmas):
                coco_eval.params.kpt_oks_sigmas = np.array(oks_sigmas)
            limits = coco_eval.params.maxDets  # (1, 10, 100), or (20) with keypoints
            per_class = limits[-1]
            is_above = detections_per_image > _TABLE_LIMIT
            if is_above:  # with another limit, which leaves the metrics of the others as they are
                coco_eval.params.maxDets = [*limits, detections_per_image]
            coco_eval.evaluate()
            coco_eval.accumulate()
            coco_eval.summarize()
        row = {name: _to_percent(coco_eval.stats[i]) for name, i in _STATS[task].items()}
        precision = coco_eval.eval["precision"]  # IoU thresholds x recalls x categories x areas x detections
        for k, category_id in enumerate(coco_eval.params.catIds):
            row[f"AP-{truth.cats[category_id]['name']}"] = _average(precision[:, :, k, 0, len(limits) - 1])
        if is_above:
            row[f"AP@{detections_per_image}"] = _average(precision[:, :, :, 0, -1])
            row[f"AR@{detections_per_image}"] = _average(coco_eval.eval["recall"][:, :, 0, -1])
        ceiling = compute_ceiling(truth.dataset["annotations"], task, per_class, detections_per_image)
        results[task] = row | ceiling
    return results


def flatten_metrics(results: Mapping[str, Metrics]) -> dict[str, float]:
    """Flatten each data set's metrics into ``{"bbox/AP": 38.1, ...}`` without the empty ones, for metrics.json.

    If there are several data sets, the set's name comes first, as in Detectron2.
    """
    return {
        f"{name}/{task}/{key}" if len(results) > 1 else f"{task}/{key}": value
        for name, metrics in results.items()
        for task, row in metrics.items()
        for key, value in row.items()
        if value is not None
    }


def format_table(metrics: Metrics) -> str:
    """Format the metrics for the log, with one row per task; if all of them are 0, as one line."""
    columns = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    rows = [[task, *(row.get(name) for name in columns)] for task, row in metrics.items()]
    values = [value for _, *row in rows for value in row if isinstance(value, float)]
    if values and not any(round(value, 2) for value in values):
        remedy = "the detector finds no object yet; train it for longer (SOLVER.MAX_ITER)"
        return f"every AP of {' and '.join(metrics)} is 0.00: {remedy}"
    return tabulate(rows, ["task", *columns], floatfmt=".2f", missingval="-")


def check_expected_results(cfg: CfgNode, metrics: Metrics) -> None:
    """Raise UserError, which names each difference, unless the ``metrics`` are TEST.EXPECTED_RESULTS."""
    wrong: list[str] = []
    for task, name, value, tolerance in cfg.TEST.EXPECTED_RESULTS:
        actual = metrics.get(task, {}).get(name)
        if actual is None:
            wrong.append(f"{task}/{name} was not measured, not {value:g}")
        elif abs(actual - value) > tolerance:
            wrong.append(f"{task}/{name} is {actual:.4f}, not {value:g} within {tolerance:g}")
    if wrong:
        remedy = f"{cfg.OUTPUT_DIR}/results.json has all results; compare config and data, or correct the key"
        raise UserError(f"the results are not TEST.EXPECTED_RESULTS: {'; '.join(wrong)}; {remedy}")


def write_results(
    cfg: CfgNode,
    metrics: Mapping[str, Metrics],
    engine: str,
    weights: Mapping[str, Any],
    iteration: int | None,
    ended_early: str = "",
) -> dict[str, Any]:
    """Write the results.json of a transfer run into OUTPUT_DIR, and return its content.

    Args:
        metrics: those of `evaluate`, by data set.
        weights: `Weights.summary()` of the initial weights, or of the detector that was evaluated.
        iteration: optimizer steps done, or None if nothing was trained.
        ended_early: why and when TEST.PATIENCE ended the run; empty if it did not.
    """
    output_dir = Path(cfg.OUTPUT_DIR)
    depth = cfg.MODEL.RESNETS.DEPTH
    predictions = {name: predictions_file(name) for name in metrics}  # relative, since the run folder may be moved
    content = {
        "stage": "transfer",
        "engine": {"name": engine, "version": metadata.version(engine)},
        "metrics": next(iter(metrics.values()), {}),
        "datasets": dict(metrics),
        "predictions": {name: file for name, file in predictions.items() if (output_dir / file).is_file()},
        "iteration": iteration,
        "protocol": {
            "detector": _DETECTORS[list_tasks(cfg)[-1]],
            "backbone": f"R{depth}-{'FPN' if 'fpn' in cfg.MODEL.BACKBONE.NAME else 'C4'}",
            "norm": cfg.MODEL.RESNETS.NORM,
            "heads": _describe_heads(cfg),
            "freeze_at": cfg.MODEL.BACKBONE.FREEZE_AT,
            "precise_bn": cfg.TEST.PRECISE_BN.ENABLED,
            "train": list(cfg.DATASETS.TRAIN),
            "test": list(cfg.DATASETS.TEST),
        },
        "schedule": {
            "iterations": cfg.SOLVER.MAX_ITER,
            "steps": list(cfg.SOLVER.STEPS),
            "images_per_batch": cfg.SOLVER.IMS_PER_BATCH,
            "base_lr": cfg.SOLVER.BASE_LR,
            "name": _name_schedule(cfg),
        },
        "weights": dict(weights),
        "config": dump(cfg),
    }
    unscored = {name: describe_unscored(name) for name, tasks in metrics.items() if _is_unscored(tasks)}
    if unscored:
        content["unscored"] = unscored
    if ended_early:
        content["ended_early"] = ended_early
    write_json(output_dir / file_names.RESULTS, content)
    return content


def _is_unscored(metrics: Metrics) -> bool:
    """Return whether no metric has a value, since the data set has no objects."""
    values = [value for row in metrics.values() for value in row.values()]
    return bool(values) and not any(value is not None for value in values)


def _describe_heads(cfg: CfgNode) -> str:
    box = cfg.MODEL.ROI_BOX_HEAD
    name = cfg.MODEL.ROI_HEADS.NAME
    if name != "StandardROIHeads":
        return name
    return f"{box.NUM_CONV}conv{box.NUM_FC}fc" + (f" {box.NORM}" if box.NORM else "")


def _name_schedule(cfg: CfgNode) -> str:
    """Name the length of the schedule: 1x is 90,000 iterations of 16 images."""
    times = cfg.SOLVER.MAX_ITER * cfg.SOLVER.IMS_PER_BATCH / (90_000 * 16)
    return f"{times:g}x" if times * 100 == round(times * 100) else f"{cfg.SOLVER.MAX_ITER} iterations"


def _build_ground_truth(content: Mapping[str, Any]) -> Any:
    """Build pycocotools' COCO with the fields that COCOeval needs, and ids from 1, since it takes 0 for no match."""
    records: list[dict[str, Any]] = []
    for number, record in enumerate(content["annotations"], start=1):
        completed = {"iscrowd": 0, **record, "area": _compute_area(record), "id": number}
        if completed.get("keypoints") is not None:  # null means none
            completed.setdefault("num_keypoints", sum(v > 0 for v in completed["keypoints"][2::3]))
        records.append(completed)
    return _index(content, records)


def _compute_area(record: Mapping[str, Any]) -> float:
    """Return an object's area in pixels, or its box's if the record has no plausible one."""
    area = record.get("area", 0)
    box_area = record["bbox"][2] * record["bbox"][3]
    return area if area > 0 and area >= min(1, box_area / 100) else box_area


def _index(content: Mapping[str, Any], records: list[dict[str, Any]]) -> Any:
    coco: Any = COCO()
    sections = {"images": content["images"], "categories": content["categories"], "annotations": records}
    coco.dataset = {"info": {}, **sections}  # loadRes of pycocotools 2.0.9 and 2.0.10 reads "info"
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def _average(values: np.ndarray) -> float | None:
    """Return the mean, from 0 to 100, of those values that are defined."""
    values = values[values > -1]
    return _to_percent(values.mean() if values.size else -1)


def _to_percent(value: float) -> float | None:
    """Convert a value from 0 to 1 (-1 if undefined) to one from 0 to 100 (None if undefined)."""
    return float(value) * 100 if value > -1 else None
