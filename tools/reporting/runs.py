"""The scores of a run, one class per kind; `Stage.read_scores` reads those of a stage."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.config.yaml_io import flatten, parse_yaml
from pretrain.common.errors import count_noun
from pretrain.common.weights.provenance import Provenance
from tools.stages.completion import find_recorded_kind

from .files import Run, RunCollection
from .origins import Origin, build_origin, read_origin
from .protocols import Protocol, normalize_detector_protocol, normalize_protocol

RANKME = "RankMe"
TASK_NAMES = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}


@dataclass(frozen=True)
class Clean:
    """Metrics without the test images that are nearly training images.

    Attributes:
        excluded: number of these images.
        total: number of all test images.
        compared: data sets of DATASETS.TRAIN with which the test images were compared.
        not_compared: the others.
        files: the tables that list the images.
        metrics: as in `DetectorScore`, on the remaining images; empty if no image was excluded, or all were.
    """

    excluded: int
    total: int
    compared: Sequence[str]
    not_compared: Sequence[str]
    files: Sequence[str]
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class Score:
    """Metrics on one data set, and the protocol with which they were measured.

    Attributes:
        stage: name of the stage that measured them.
        origin: origin of the backbone, as the run recorded it.
        test: the data set that was scored; for probes, the one whose validation images were classified.
        metrics: see the classes of scores.
        protocol: settings that change what is measured.
    """

    folder: Path
    stage: str
    origin: Origin
    test: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    protocol: Protocol = field(default_factory=dict)

    def list_columns(self, name: str) -> dict[str, float]:
        """Map columns in the table of a study to values; ``name`` is that of the stage in its branch."""
        raise NotImplementedError


class BackboneScore(Score):
    """Score of frozen features: of a probe, or of kNN at the end of pretraining.

    Its metrics, ``top1`` and ``top5``, are from 0 to 100. A pretraining has no ``top1`` if its data have no labels or
    no val split, which ``rankme`` (from 1 to the dimensions of an embedding) does not need.
    """

    @property
    def kind(self) -> str:
        """Name of the probe in a table."""
        return find_recorded_kind(self.stage).probe

    @property
    def is_of_pretraining(self) -> bool:
        """Whether the run itself trained the backbone."""
        return find_recorded_kind(self.stage).trains_backbone

    def list_columns(self, name: str) -> dict[str, float]:
        main = find_recorded_kind(self.stage).metrics[0]
        label = name.removeprefix(self.stage).removeprefix("_")  # the config file, if there are several
        suffix = "after pretraining" if self.is_of_pretraining else label
        columns = {f"{self.kind} {main.replace('top', 'top-')} {suffix}".strip(): main, RANKME: "rankme"}
        values = {column: self.metrics.get(metric) for column, metric in columns.items()}
        return {column: value for column, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DetectorScore(Score):
    """Score of a detector on one data set.

    Its metrics, ``bbox/AP`` and so on for each task, are from 0 to 100, or None if the data have no such objects.

    Attributes:
        detector: faster | mask | keypoint.
        engine: name of the engine.
        headline: main points of the protocol: detector, engine, schedule, heads, data.
        evaluated_only: whether the run was started with --eval-only; the detector was trained elsewhere.
        predictions: file of the predictions, relative to the run folder.
        trained_on: the data sets of DATASETS.TRAIN.
        clean: metrics without duplicates of training images; None if no table lists them (see `duplicates`).
        remarks: what else a reader of the scores needs to know.
        ended_early: why and when TEST.PATIENCE ended the training; empty if it did not.
    """

    detector: str = ""
    engine: str = ""
    headline: tuple[str, ...] = ()
    evaluated_only: bool = False
    predictions: str = ""
    trained_on: tuple[str, ...] = ()
    clean: Clean | None = None
    remarks: tuple[str, ...] = ()
    ended_early: str = ""

    def list_columns(self, name: str) -> dict[str, float]:
        values = {f"{name} {label} AP": self.metrics.get(f"{task}/AP") for task, label in TASK_NAMES.items()}
        return {column: value for column, value in values.items() if value is not None}


def read_scores(collection: RunCollection) -> list[Score]:
    """Read the scores of all runs; a run whose results are damaged gets a line in ``unreadable``."""
    scores: list[Score] = []
    for run in collection.runs:
        try:
            scores += find_recorded_kind(run.results["stage"]).read_scores(run)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            collection.unreadable.append(f"{run.folder / 'results.json'} cannot be shown: {reason}")
    return scores


def read_pretraining(run: Run) -> BackboneScore:
    results = run.results
    weights = {name: results[name] for name in ("method", "arch")}
    record = Provenance(sha256=results["checkpoint_sha256"], epoch=results["epochs"], **weights)
    origin = build_origin(record, run.config)
    metrics = results["metrics"]
    rankme = {} if metrics.get("rankme") is None else {"rankme": _read_number("rankme", metrics["rankme"])}
    if "knn_top1" not in metrics:
        return BackboneScore(run.folder, results["stage"], origin, metrics=rankme)
    test, protocol = normalize_protocol("kNN", results["knn_protocol"])
    metrics = {"top1": _read_number("knn_top1", metrics["knn_top1"]), **rankme}
    return BackboneScore(run.folder, results["stage"], origin, test, metrics, protocol)


def read_probe(run: Run) -> BackboneScore:
    stage = run.results["stage"]
    source = Provenance.from_json(run.results["source"]) or Provenance()
    recorded = run.results["metrics"]
    metrics = {name: _read_number(name, recorded[name]) for name in ("top1", "top5") if name in recorded}
    encoder = "key" if source.encoder == "key" else "query"
    test, protocol = normalize_protocol(find_recorded_kind(stage).probe, run.results["protocol"], encoder)
    return BackboneScore(run.folder, stage, read_origin(source), test, metrics, protocol)


def read_detections(run: Run) -> Iterable[DetectorScore]:
    """Yield one score per data set that the detector was evaluated on, in the order of DATASETS.TEST."""
    results = run.results
    summary = results["protocol"]
    origin = _read_detector_origin(results["weights"])
    protocol = normalize_detector_protocol(dict(flatten(parse_yaml(results["config"]))))
    for test, tasks in results["datasets"].items():
        metrics: dict[str, float | None] = {}
        for task, values in tasks.items():
            for name, value in values.items():
                metrics[f"{task}/{name}"] = None if value is None else _read_number(f"{task}/{name}", value)
        yield DetectorScore(
            run.folder,
            results["stage"],
            origin,
            test,
            metrics,
            protocol,
            detector=summary["detector"],
            engine=results["engine"]["name"],
            headline=(*_describe_detector(results), f"{', '.join(summary['train'])} -> {test}"),
            evaluated_only=results["iteration"] is None,
            predictions=results["predictions"].get(test, ""),
            trained_on=tuple(summary["train"]),
            remarks=tuple(text for text in [results.get("unscored", {}).get(test)] if text),
            ended_early=results.get("ended_early", ""),
        )


def _read_number(name: str, value: Any) -> float:
    """Return a metric; raise ValueError for one that is not finite: a mean over seeds would not be, either."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, not a number")
    return float(value)


def _read_detector_origin(weights: Mapping[str, Any]) -> Origin:
    if not weights.get("path"):
        return Origin("random")
    origin = read_origin(Provenance.from_json(weights.get("provenance")) or Provenance())
    if origin.source:
        return origin
    sha = weights.get("sha256") or ""
    return Origin("", source=f"{Path(weights['path']).name} ({sha[:8]})", sha256=sha)


def _describe_detector(results: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return detector and engine, schedule, and heads."""
    summary = results["protocol"]
    schedule = results["schedule"]
    engine = results["engine"]
    name = f"{schedule['name']}, " if schedule["name"].endswith("x") else ""  # no other schedule has a name
    size = f"{count_noun(schedule['iterations'], 'iteration')} of {count_noun(schedule['images_per_batch'], 'image')}"
    frozen = ", frozen ResNet" if summary["freeze_at"] == 5 else ""
    return (
        f"{summary['detector']} R-CNN, {summary['backbone']}, engine {engine['name']} {engine['version']}",
        f"{name}{size}, lr {schedule['base_lr']:g}",
        f"{summary['norm']}, {summary['heads']} box head{frozen}",
    )
