"""A run's results: where its backbone came from, its scores, and the protocol by which they were measured.

A protocol maps names to values; two scores may share a column or a table only if their protocols are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.config_io import flatten, parse_yaml
from transfer.config import FREE_ANYWHERE, OWN, keys

from .files import Run

Protocol = dict[str, Any]
_KINDS = {"knn": "kNN", "linear": "linear"}  # by stage
# Prefixes of keys of a detector's config that do not change what is measured, or that have their own place in a table.
FREE_IN_TRANSFER = (*FREE_ANYWHERE, "SEED", "MODEL.WEIGHTS", "DATASETS.TEST")


@dataclass(frozen=True)
class Origin:
    """Where a backbone came from.

    Attributes:
        method: the objective, or ``random``; empty if the weights do not record it.
        data: what it was pretrained on, and the weights from which that began, if any.
        epochs: completed, and of how many if not all of them.
        source: the checkpoint and the first digits of its SHA-256.
        sha256: of that checkpoint; empty if none was read.
        config: of the pretraining, ``{"SOLVER.EPOCHS": 200, ...}``; empty if the weights do not record it.
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
class Probe:
    """Scores (from 0 to 100) of a frozen backbone.

    Attributes:
        kind: kNN | linear.
        origin: of the backbone, as the probe recorded it.
        scored_on: the data set whose validation images were classified.
    """

    folder: Path
    kind: str
    scores: dict[str, float]
    origin: Origin
    scored_on: str
    protocol: Protocol


@dataclass(frozen=True)
class Pretraining:
    """A finished pretraining, and its own kNN (None if its data have no labels, or no val split)."""

    folder: Path
    origin: Origin
    probe: Probe | None


@dataclass(frozen=True)
class Detection:
    """Metrics of a detector on one data set, from 0 to 100 (None: the data have no such objects).

    Attributes:
        headline: the main points of the protocol: detector, engine, schedule, heads, data.
        protocol: the keys of its config that change what is measured.
        evaluated_only: by --eval-only; the detector was trained elsewhere.
        predictions: their file.
    """

    folder: Path
    origin: Origin
    detector: str
    engine: str
    headline: tuple[str, ...]
    protocol: Protocol
    test: str
    metrics: dict[str, dict[str, float | None]]
    evaluated_only: bool
    predictions: Path


Item = Pretraining | Probe | Detection


def parse(run: Run) -> list[Item]:
    """The rows of tables; nothing for stages without a score (a map of features, distributions).

    Raises:
        KeyError, TypeError, AttributeError, ValueError: results.json is not what a stage writes.
    """
    results, stage = run.results, run.results["stage"]
    if stage == "pretrain":
        return [_pretraining(run)]
    if stage in _KINDS:
        source, metrics = results["source"], results["metrics"]
        scores = {key: float(metrics[key]) for key in ("top1", "top5") if key in metrics}
        protocol = probe_protocol(_KINDS[stage], results["protocol"], source.get("encoder") or "query")
        return [Probe(run.folder, _KINDS[stage], scores, origin_of(source), *protocol)]
    return list(_detections(run)) if stage == "transfer" else []


def origin_of(provenance: Mapping[str, Any]) -> Origin:
    """The origin of a backbone, from what a conversion or a probe recorded about its checkpoint."""
    text = provenance.get("config")
    try:  # the checkpoint of another project may hold another kind of config
        config = dict(flatten(parse_yaml(text))) if isinstance(text, str) else {}
    except ValueError:
        config = {}
    return _origin(provenance, config)


def _origin(provenance: Mapping[str, Any], config: dict[str, Any]) -> Origin:
    if provenance.get("source") == "random":
        return Origin("random", arch=_text(provenance.get("arch")), seed=_text(provenance.get("seed")))
    epochs = provenance.get("epoch")
    method, epochs = _text(provenance.get("method")), _text(round(epochs, 2) if isinstance(epochs, float) else epochs)
    altered = []
    if "SOLVER.EPOCHS" in config and epochs and epochs != _text(config["SOLVER.EPOCHS"]):
        epochs = f"{epochs} of {_text(config['SOLVER.EPOCHS'])}"
        altered.append(f"epoch {epochs}")
    if provenance.get("encoder") == "key":
        altered.append("the key encoder")
    names = [str(name) for name in provenance.get("fine_tuned_on", ())]
    if tuned := ", ".join(Path(name.split(":")[1]).name if name.startswith("coco:") else name for name in names):
        method = f"{method or '?'}, then {tuned}"
        altered.append(f"fine-tuned on {tuned}")
    data = _text(config.get("DATA.TRAIN"))
    if begun := Path(_text(config.get("MODEL.WEIGHTS"))).name:
        data = f"{data}, from {begun}"
    sha = _text(provenance.get("source_sha256"))
    # The checkpoint's run folder, unless another conversion, or a fine-tuning, came between.
    folder = () if "earlier_source" in provenance else Path(_text(config.get("OUTPUT_DIR"))).parts[-2:]
    file = "/".join([*folder, _text(provenance.get("source"))])
    return Origin(
        method=method,
        arch=_text(provenance.get("arch")),
        data=data,
        epochs=epochs,
        seed=_text(config.get("SEED")),
        source=f"{file} ({sha[:8]})" if sha else file,
        sha256=sha,
        config=config,
        altered=", ".join(altered),
    )


def probe_protocol(kind: str, recorded: Mapping[str, Any], encoder: str = "query") -> tuple[str, Protocol]:
    """What a probe was scored on, and its protocol, without the settings that have no effect in it."""
    unused = {"val"}
    if kind != "kNN":
        unused |= {"BASE_LR"} if recorded.get("LRS") else {"LRS"}
        unused |= {"STEPS", "GAMMA"} if recorded.get("LR_SCHEDULE") == "cosine" else set()
    settings = {key.lower().replace("_", " "): value for key, value in recorded.items() if key not in unused}
    return str(recorded["val"]), {**settings, "encoder": encoder}


def differing(protocols: Sequence[Protocol]) -> list[str]:
    """The names whose values are not the same in all of ``protocols``."""
    names = dict.fromkeys(name for protocol in protocols for name in protocol)
    return [name for name in names if any(p.get(name) != protocols[0].get(name) for p in protocols)]


def words(protocol: Protocol, names: Iterable[str]) -> str:
    """``k 200, temperature 0.07``: those of ``names`` that the protocol has."""
    return ", ".join(f"{name} {_text(protocol[name]) or '-'}" for name in names if name in protocol) or "not recorded"


def _pretraining(run: Run) -> Pretraining:
    results, probe = run.results, None
    done = {"method": results["method"], "arch": results["arch"], "epoch": results["epochs"],
            "source_sha256": results["checkpoint_sha256"]}  # fmt: skip
    origin = _origin(done, dict(flatten(run.config)))
    if "knn_top1" in results["metrics"]:
        scores = {"top1": float(results["metrics"]["knn_top1"])}
        probe = Probe(run.folder, "kNN", scores, origin, *probe_protocol("kNN", results["knn_protocol"]))
    return Pretraining(run.folder, origin, probe)


def _detections(run: Run) -> Iterable[Detection]:
    """The result, once per data set it was evaluated on."""
    results = run.results
    summary, schedule, engine, weights = (results[key] for key in ("protocol", "schedule", "engine", "weights"))
    origin = Origin("random") if not weights.get("path") else origin_of(weights.get("provenance") or {})
    if weights.get("path") and not origin.source:
        name, sha = Path(weights["path"]).name, weights.get("sha256") or ""
        origin = Origin("", source=f"{name} ({sha[:8]})", sha256=sha)
    times = f"{schedule['name']}, " if schedule["name"].endswith("x") else ""  # others have no name of their own
    named = (
        f"{summary['detector']} R-CNN, {summary['backbone']}, engine {engine['name']} {engine['version']}",
        f"{times}{schedule['iterations']} iterations of {schedule['images_per_batch']} images, "
        f"lr {schedule['base_lr']:g}",
        f"{summary['norm']}, {summary['heads']} box head" + (", frozen ResNet" if summary["freeze_at"] == 5 else ""),
    )
    # A config has this project's own keys only where it sets them.
    config = keys(OWN) | dict(flatten(parse_yaml(results["config"])))
    protocol = {key: value for key, value in config.items() if not key.startswith(FREE_IN_TRANSFER)}
    for test, tasks in results["datasets"].items():
        yield Detection(
            run.folder, origin, summary["detector"], engine["name"],
            (*named, f"{', '.join(summary['train'])} -> {test}"), protocol, test,
            {task: {name: value if value is None else float(value) for name, value in row.items()}
             for task, row in tasks.items()},
            evaluated_only=results["iteration"] is None, predictions=run.folder / results["predictions"].get(test, ""),
        )  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_text, value)) or "none"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
