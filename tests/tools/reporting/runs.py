"""Run folders as the stages leave them, and the cells of a report, for the tests of tools/report.py."""

import json
from collections.abc import Iterable
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from fvcore.common.config import CfgNode

from pretrain.common.config.yaml_io import merge
from pretrain.common.run.state import update_state
from pretrain.config import from_yaml_text, load_config
from pretrain.keys import list_keys
from pretrain.probe.protocol import build_knn_protocol, build_linear_protocol
from tools import report
from tools.reporting.document import render_markdown
from transfer import config as transfer_config
from transfer.coco import results as coco_results

CONFIGS = Path(__file__).parents[3] / "configs"
JCL = "coco_mask_R50_FPN_1x_jcl"
AP = {"random": [31.4, 32.2, 32.6], "jcl": [39.3, 41.4, 43.2]}  # of `study_in`
SEEDS = ["1", "2", "3"]
DIGITS = ("DATA.TRAIN", "digits", "MODEL.ARCH", "resnet18", "VIEWS.IMAGE_SIZE", "32", "SOLVER.EPOCHS", "15")


def write(folder: Path, data: dict[str, Any], config: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(data))
    if config:
        (folder / "config.yaml").write_text(config)


def pretrain(
    folder: Path,
    *overrides: str,
    recipe: str = "jcl_R50_IN1k_200ep",
    knn: float | None = 50.0,
    rankme: float | None = None,
) -> str:
    """Write a complete pretraining to ``folder``; return its config."""
    cfg = load_config(CONFIGS / "pretrain" / f"{recipe}.yaml", [*overrides, "OUTPUT_DIR", str(folder)])
    content = {
        "stage": "pretrain",
        "method": cfg.METHOD.NAME,
        "arch": cfg.MODEL.ARCH,
        "epochs": cfg.SOLVER.EPOCHS,
        "metrics": {},
        "checkpoint_sha256": provenance(cfg.dump())["source_sha256"],
    }
    if knn is not None:
        content |= {"metrics": {"knn_top1": knn, "knn_top5": 90.0}, "knn_protocol": protocol(cfg, "knn")}
    if rankme is not None:
        content["metrics"] |= {"rankme": rankme, "rankme_images": 300}
    write(folder, content, cfg.dump())
    return cfg.dump()


def protocol(cfg: CfgNode, stage: str) -> dict[str, Any]:
    """Return the evaluation settings that a probe with ``cfg`` records."""
    build_protocol = {"linear": build_linear_protocol, "knn": build_knn_protocol}[stage]
    return {**build_protocol(cfg), "train_images": 300, "val_images": 100}


def provenance(config: str, **change: Any) -> dict[str, Any]:
    """Return what a probe or a conversion records about the final checkpoint of a pretraining with ``config``.

    A ``change`` of more than the encoder is that of another file.
    """
    cfg = from_yaml_text(config)
    other = {key: value for key, value in change.items() if key != "encoder"}
    digest = sha256(f"{config}{other or ''}".encode()).hexdigest()
    return {
        "source": "checkpoint_final.pth",
        "source_sha256": digest,
        "encoder": "query",
        "arch": cfg.MODEL.ARCH,
        "config": config,
        "method": cfg.METHOD.NAME,
        "epoch": cfg.SOLVER.EPOCHS,
        **change,
    }


def probe(
    folder: Path, config: str, top1: float, *overrides: Any, recipe: str = "", source: dict[str, Any] | None = None
) -> None:
    """Write a kNN probe, or with a ``recipe`` (or ``own``, the pretraining's) a linear probe, of ``config``."""
    cfg = from_yaml_text(config).clone()
    cfg.defrost()
    if recipe not in ("", "own"):
        merge(cfg, list_keys(), CONFIGS / "linear" / f"{recipe}.yaml")
    cfg.merge_from_list(list(overrides))
    stage = "linear" if recipe else "knn"
    source = source or provenance(config)
    metrics = {"top1": top1, "top5": 88.0}
    results = {"stage": stage, "source": source, "protocol": protocol(cfg, stage), "metrics": metrics}
    write(folder, results, cfg.dump())


def detector(
    *overrides: str,
    leaf: str = "coco_mask_R50_FPN_1x",
    weights: dict[str, Any] | None = None,
    engine: str = "detectron2",
    **change: Any,
) -> dict[str, Any]:
    """Return the results.json of a fine-tuning; ``weights`` is their provenance, None a random initialization."""
    cfg = transfer_config.load_config(CONFIGS / f"{leaf}.yaml", overrides)
    metrics = {"bbox": {"AP": 38.0, "AP50": 58.0, "AP75": None}, "segm": {"AP": 36.0, "AP50": 56.0, "AP75": 38.0}}
    summary = {"path": "w.pth" if weights else "", "sha256": "fedcba98" * 8, "provenance": weights or {}}
    with mock.patch.object(coco_results, "write_json"), mock.patch.object(metadata, "version", lambda name: "0.6"):
        datasets = dict.fromkeys(cfg.DATASETS.TEST, metrics)
        return coco_results.write_results(cfg, datasets, engine, summary, cfg.SOLVER.MAX_ITER) | change


def pipeline(folder: Path, *keys: str, **record: Any) -> None:
    """Write the launcher's record of a pipeline with the stages ``keys``; all but those of moco are complete."""
    listed = [{"key": key, "folder": str(folder / key), "fingerprint": key, "spec": {"stage": "knn"}} for key in keys]
    (folder / "launch").mkdir(parents=True)
    (folder / "launch/pipeline.json").write_text(json.dumps({"stages": listed, **record}))
    for key in keys:
        if not key.startswith("moco"):
            update_state(folder / key, state="complete", fingerprint=key)


def study_in(folder: Path) -> Path:
    """Write a pipeline of two branches with `SEEDS`, a kNN probe and two detectors, whose box AP are `AP`."""
    branches = {name: {seed: f"{name}_seed={seed}" for seed in SEEDS} for name in AP}
    stages = {"random": ["mask_40", "knn", "mask_9"], "jcl": ["pretrain", "mask_40", "knn", "mask_9"]}
    keys = [f"{name}_seed={seed}/{stage}" for name in AP for seed in SEEDS for stage in stages[name]]
    pipeline(folder, *keys, study={"branches": branches, "baseline": "random"})
    config = pretrain(folder / "jcl_seed=1/pretrain", *DIGITS, knn=None)
    results = {name: detector(weights=origin) for name, origin in {"random": None, "jcl": provenance(config)}.items()}
    for name, values in AP.items():
        for seed, ap in zip(SEEDS, values, strict=True):
            run = folder / f"{name}_seed={seed}"
            source = {"source": "random", "seed": int(seed), "arch": "resnet18"}
            if name == "jcl":
                config = pretrain(run / "pretrain", *DIGITS, "SEED", seed, knn=None)
                update_state(run / "pretrain", stage="pretrain")
                source = provenance(config)
            for stage, value in (("mask_40", ap), ("mask_9", ap / 2)):
                metrics = {"bbox": {"AP": value}, "segm": {"AP": None}}
                results[name]["weights"]["provenance"] = source if name == "jcl" else {}
                write(run / stage, {**results[name], "metrics": metrics, "datasets": {"coco_2017_val": metrics}})
            probe(run / "knn", config, 50 + ap, source=source)
    return folder


def log(folder: Path, lines: Iterable[dict[str, Any]], environment: str = "") -> None:
    """Write the metrics that a stage logs, and its record of the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "environment.txt").write_text(environment)


def render(folders: list[Path]) -> str:
    return render_markdown(report.build_report(folders))


def cells(text: str, first: str) -> list[str]:
    """Return the cells of the only row that begins with ``first``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def column(text: str, first: str, heading: str) -> str:
    """Return a row's cell under ``heading``; the report may contain several tables."""
    lines = text.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith(f"| {first} ")]
    head = next(line for line in reversed(lines[:place]) if line.startswith("| run "))
    return cells(text, first)[[cell.strip() for cell in head.strip("|").split("|")].index(heading)]
