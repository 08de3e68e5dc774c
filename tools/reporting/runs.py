"""Scores of a run, the origin of its backbone, and the protocol with which the scores were measured.

A protocol maps settings to values; two scores may share a column or a table only if their protocols are equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.common.config.keys import SAME_RESULT, copy_value
from pretrain.common.config.yaml_io import flatten, parse_yaml
from pretrain.common.errors import count_noun
from pretrain.common.weights.provenance import Provenance
from pretrain.keys import list_keys
from tools.stages.base import find_kind
from transfer.keys import KEYS

from .files import Run

Protocol = dict[str, Any]
TASK_NAMES = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_SHOWN_APART = ("SEED", "MODEL.WEIGHTS", "DATASETS.TEST")  # each score names its own


@dataclass(frozen=True)
class Origin:
    """Origin of a backbone.

    Attributes:
        method: the objective, or ``random``; empty if the weights do not record it.
        data: data set of the pretraining run, and the weights that initialized it, if any.
        epochs: completed epochs, and the planned number if the pretraining run is not finished.
        source: the checkpoint and the first digits of its SHA-256.
        sha256: SHA-256 of the checkpoint; empty if none was read.
        config: config of the pretraining run, ``{"SOLVER.EPOCHS": 200, ...}``; empty if the weights do not record it.
        altered: why this is not the query encoder of the finished pretraining; empty if it is.
    """

    method: str
    arch: str = ""
    data: str = ""
    epochs: str = ""
    seed: str = ""
    source: str = ""
    sha256: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    altered: str = ""


@dataclass(frozen=True)
class Clean:
    """Metrics without the test images that are nearly training images.

    Attributes:
        excluded: number of these images.
        total: number of all test images.
        compared: data sets of DATASETS.TRAIN with which the test images were compared.
        not_compared: the others.
        files: the tables that list the images.
        metrics: as in `Score`, on the remaining images; empty if no image was excluded, or all were.
    """

    excluded: int
    total: int
    compared: Sequence[str]
    not_compared: Sequence[str]
    files: Sequence[str]
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class Score:
    """Metrics of a backbone or a detector on one data set, and the protocol with which they were measured.

    Attributes:
        stage: pretrain | knn | linear | transfer; the score of pretraining is kNN's at its end.
        origin: origin of the backbone, as the run recorded it.
        test: the data set that was scored; for probes, the one whose validation images were classified.
        metrics: values from 0 to 100: ``top1`` and ``top5``, or for each task ``bbox/AP`` and so on. A value is None if
            the data have no such objects. A pretraining has no ``top1`` if its data have no labels or no val split,
            which ``rankme`` (from 1 to the dimensions of an embedding) does not need.
        protocol: settings that change what is measured.
        detector: faster | mask | keypoint; empty for probes, like what follows.
        engine: name of the detector's engine.
        headline: main points of the protocol: detector, engine, schedule, heads, data.
        evaluated_only: whether the run was started with --eval-only; the detector was trained elsewhere.
        predictions: file of the predictions, relative to the run folder.
        trained_on: the data sets of DATASETS.TRAIN.
        clean: metrics without duplicates of training images; None if no table lists them (see `duplicates`).
        remarks: what else a reader of the scores needs to know.
        ended_early: why and when TEST.PATIENCE ended the training; empty if it did not.
    """

    folder: Path
    stage: str
    origin: Origin
    test: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    protocol: Protocol = field(default_factory=dict)
    detector: str = ""
    engine: str = ""
    headline: tuple[str, ...] = ()
    evaluated_only: bool = False
    predictions: str = ""
    trained_on: tuple[str, ...] = ()
    clean: Clean | None = None
    remarks: tuple[str, ...] = ()
    ended_early: str = ""

    @property
    def kind(self) -> str:
        """Name of the probe in a table; empty for a detector."""
        return find_kind(self.stage).probe

    @property
    def is_of_pretraining(self) -> bool:
        """Whether the run itself trained the backbone."""
        return find_kind(self.stage).trains_backbone


def read_scores(run: Run) -> list[Score]:
    """Return the scores of a run; a stage without one (a map of features) has none.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: results.json is not what a stage writes.
    """
    return find_kind(run.results["stage"]).read_scores(run)


def read_origin(provenance: Provenance) -> Origin:
    """Return the origin of a backbone, from what a conversion or a probe recorded about its checkpoint."""
    try:  # the checkpoint of another project may contain another kind of config
        config = dict(flatten(parse_yaml(provenance.config or "")))
    except ValueError:
        config = {}
    return _build_origin(provenance, config)


def _build_origin(provenance: Provenance, config: dict[str, Any]) -> Origin:
    if provenance.source == "random":
        return Origin("random", arch=provenance.arch, seed=_format(provenance.seed))
    method = provenance.method
    epochs = provenance.epoch
    epochs = _format(round(epochs, 2) if isinstance(epochs, float) else epochs)
    altered = []
    if "SOLVER.EPOCHS" in config and epochs and epochs != _format(config["SOLVER.EPOCHS"]):
        epochs = f"{epochs} of {_format(config['SOLVER.EPOCHS'])}"
        altered.append(f"epoch {epochs}")
    if provenance.encoder == "key":
        altered.append("the key encoder")
    names = provenance.fine_tuned_on
    if names:
        tuned = ", ".join(Path(name.split(":")[1]).name if name.startswith("coco:") else name for name in names)
        method = f"{method or '?'}, then {tuned}"
        altered.append(f"fine-tuned on {tuned}")
    data = _format(config.get("DATA.TRAIN"))
    initial_weights = Path(_format(config.get("MODEL.WEIGHTS"))).name
    if initial_weights:
        data = f"{data}, from {initial_weights}"
    sha = provenance.sha256
    # The folder is named only if the checkpoint itself was converted, without a conversion or fine-tuning in between.
    folder = () if provenance.earlier else Path(_format(config.get("OUTPUT_DIR"))).parts[-2:]
    file = "/".join([*folder, provenance.source])
    source = f"{file} ({sha[:8]})" if sha else file
    seed = _format(config.get("SEED"))
    return Origin(method, provenance.arch, data, epochs, seed, source, sha, config, altered=", ".join(altered))


def normalize_protocol(kind: str, recorded: Mapping[str, Any], encoder: str = "query") -> tuple[str, Protocol]:
    """Return the data set that a probe was scored on, and its protocol without the settings that have no effect."""
    unused = {"val"}
    if kind != "kNN":
        unused |= {"BASE_LR"} if recorded.get("LRS") else {"LRS"}
        config = {f"LINEAR.{name}": value for name, value in recorded.items()}
        unused |= {row.leaf for row in list_keys().values() if row.name in config and not row.is_read(config)}
    settings = {key.lower().replace("_", " "): value for key, value in recorded.items() if key not in unused}
    return str(recorded["val"]), {**settings, "encoder": encoder}


def normalize_detector_protocol(config: Mapping[str, Any]) -> Protocol:
    """Return the keys of a detector's config that change what is measured, except those that a table shows apart.

    Keys that the config lacks have their default: this project's own, unless it sets them, and those of later versions.
    """
    config = {row.name: row.default for row in KEYS.values()} | dict(config)
    free = {row.name for row in KEYS.values() if row.effect in SAME_RESULT}
    return {key: copy_value(value) for key, value in config.items() if key not in free and key not in _SHOWN_APART}


def list_differences(protocols: Sequence[Protocol]) -> list[str]:
    """Return the names whose values are not the same in all of ``protocols``."""
    names = dict.fromkeys(name for protocol in protocols for name in protocol)
    return [name for name in names if any(p.get(name) != protocols[0].get(name) for p in protocols)]


def describe(protocol: Protocol, names: Iterable[str]) -> str:
    """Return ``k 200, temperature 0.07`` for those of ``names`` that the protocol has."""
    return ", ".join(f"{name} {_format(protocol[name]) or '-'}" for name in names if name in protocol) or "not recorded"


def read_pretraining(run: Run) -> Score:
    results = run.results
    weights = {name: results[name] for name in ("method", "arch")}
    record = Provenance(sha256=results["checkpoint_sha256"], epoch=results["epochs"], **weights)
    origin = _build_origin(record, run.config)
    metrics = results["metrics"]
    rankme = {} if metrics.get("rankme") is None else {"rankme": float(metrics["rankme"])}
    if "knn_top1" not in metrics:
        return Score(run.folder, "pretrain", origin, metrics=rankme)
    test, protocol = normalize_protocol("kNN", results["knn_protocol"])
    return Score(run.folder, "pretrain", origin, test, {"top1": float(metrics["knn_top1"]), **rankme}, protocol)


def read_probe(run: Run) -> Score:
    stage = run.results["stage"]
    source = Provenance.from_json(run.results["source"]) or Provenance()
    metrics = {name: float(run.results["metrics"][name]) for name in ("top1", "top5") if name in run.results["metrics"]}
    test, protocol = normalize_protocol(
        find_kind(stage).probe, run.results["protocol"], "key" if source.encoder == "key" else "query"
    )
    return Score(run.folder, stage, read_origin(source), test, metrics, protocol)


def read_detections(run: Run) -> Iterable[Score]:
    """Yield one score per data set that the detector was evaluated on."""
    results = run.results
    origin = _read_detector_origin(results["weights"])
    protocol = normalize_detector_protocol(dict(flatten(parse_yaml(results["config"]))))
    for test, tasks in results["datasets"].items():
        metrics: dict[str, float | None] = {}
        for task, values in tasks.items():
            metrics |= {f"{task}/{name}": value and float(value) for name, value in values.items()}
        score = Score(run.folder, "transfer", origin, test, metrics, protocol)
        yield replace(
            score,
            detector=results["protocol"]["detector"],
            engine=results["engine"]["name"],
            headline=(*_describe_detector(results), f"{', '.join(results['protocol']['train'])} -> {test}"),
            evaluated_only=results["iteration"] is None,
            predictions=results["predictions"].get(test, ""),
            trained_on=tuple(results["protocol"]["train"]),
            remarks=tuple(text for text in [results.get("unscored", {}).get(test)] if text),
            ended_early=results.get("ended_early", ""),
        )


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


def _format(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_format, value)) or "none"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
