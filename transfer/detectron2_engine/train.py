"""The reference engine: Detectron2's DefaultTrainer, and only what it lacks.

Added: strict weights, the SyncBN rule of a CPU, BN statistics that agree across ranks after PRECISE_BN, refusal of a
used OUTPUT_DIR without --resume, data sets by two paths, one schema of results, checkpoints that are whole and finite,
one when a stop is requested, random choices that depend on the seed and the iteration only, so that a resumed run is
the uninterrupted one. An iteration is stock Detectron2's.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from detectron2.config import get_cfg
from detectron2.data import MetadataCatalog
from detectron2.engine import AMPTrainer, DefaultTrainer, HookBase, default_setup, defaults, hooks
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.modeling import build_model
from detectron2.utils import comm
from fvcore.common.config import CfgNode

from pretrain.common.config_io import merge_file, merge_overrides
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.process_group import data_parallel
from pretrain.common.run_folder import drop_metrics, make_folder, write_environment

from .. import checkpoints
from ..coco import data as coco_data
from ..coco import pictures as drawing
from ..coco import results as coco_results
from ..distributed import check_not_beyond, check_same_start, join, raise_if_stopped, settle_seed
from ..weights import Weights, check_config, load_weights, read_weights
from .data import TrainingBatches, register, test_batches
from .hooks import (
    Checkpointer,
    CountSkippedSteps,
    Evaluation,
    PreciseBatchNorm,
    SaveBeforeEvaluation,
    SeedIteration,
    StopOnRequest,
)

log = logging.getLogger("detectron2.transfer")
_NORMS = ("RESNETS", "FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD")


def load_config(config_file: str | Path | None, opts: Sequence[str] = ()) -> CfgNode:
    """Detectron2's own defaults, then the file (and its `_BASE_`), then ``KEY VALUE`` overrides.

    Raises:
        UserError: missing file, unknown key (the nearest known one is named), wrong type.
    """
    cfg = get_cfg()
    if config_file:
        merge_file(cfg, config_file)
    merge_overrides(cfg, opts)
    return cfg


def run(cfg: CfgNode, *, resume: bool = False, eval_only: bool = False, visualize: int = 0) -> dict[str, Any]:
    """Trains and evaluates, or evaluates only, in each process of RANK and WORLD_SIZE (none: a single process).

    Args:
        cfg: of `load_config` here or in transfer.config; its SEED is set to the one that is used.
        resume: go on from OUTPUT_DIR's newest good checkpoint (none: start with MODEL.WEIGHTS).
        visualize: draw the predictions on that many test images, into OUTPUT_DIR/visualizations.

    Returns:
        The last evaluation's metrics, ``{"bbox": {"AP": ...}}``, on rank 0 (under the data set's name if there are
        several); {} elsewhere or without DATASETS.TEST.

    Raises:
        UserError: weights, data or keys that do not fit, a loss or weights that
            are not finite, ranks that do not see the same checkpoint.
        Stopped: a stop was requested; the checkpoint is written.
    """
    out = Path(cfg.OUTPUT_DIR)
    own, notes = _adapt(cfg)
    join(own.MODEL.DEVICE)
    make_folder(out)
    found = checkpoints.agreed(out, notes.append) if resume and not eval_only else None
    state = found[1] if found else None
    if found and state:
        if not isinstance(state.get("trainer"), dict):
            raise UserError(f"{found[0]} holds no state of Detectron2's trainer; resume with the engine that wrote it")
        check_not_beyond(cfg, state["iteration"] + 1)
        weights = Weights(str(found[0]), "", state["model"], {})
    else:
        check_config(weights := read_weights(cfg.MODEL.WEIGHTS), own, notes.append)
    settle_seed(cfg, state["trainer"].get("seed") if state else None, notes.append)
    own.defrost()
    own.SEED = cfg.SEED
    own.freeze()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        comm.create_local_process_group(int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    logging.getLogger("detectron2.engine.train_loop").addFilter(_is_unplanned)
    default_setup(own, argparse.Namespace(config_file="", resume=resume, eval_only=eval_only))
    if comm.is_main_process():
        write_environment(out)
    for note in notes:
        log.info(note)
    for name in (*own.DATASETS.TRAIN, *own.DATASETS.TEST):
        register(name)
    if eval_only:
        model = build_model(own)
        load_weights(model.state_dict, weights, whole=True, log=log.info)
        return _named(evaluate(own, model, visualize))
    start = state["iteration"] + 1 if state else 0
    if comm.is_main_process():
        drop_metrics(out, start)  # before the trainer opens the file; stock Detectron2 writes them twice
    trainer = Trainer(own, visualize)
    trainer.begin(weights, state, pending=found is not None and found[0].name == checkpoints.EVALUATING)
    del found, state, weights
    try:
        trainer.train()
    except FloatingPointError as error:
        raise UserError(
            f"training diverged: {' '.join(str(error).split())}; lower SOLVER.BASE_LR or lengthen SOLVER.WARMUP_ITERS"
        ) from error
    return _named(trainer.results)


def _is_unplanned(record: logging.LogRecord) -> bool:
    """Stock logs the traceback of everything that ends a training; a planned end has its one line."""
    return not (record.exc_info and isinstance(record.exc_info[1], Stopped | UserError | FloatingPointError))


class Trainer(DefaultTrainer):
    """DefaultTrainer with strict weights and this project's evaluation; ``results`` is the last evaluation's."""

    def __init__(self, cfg: CfgNode, visualize: int = 0) -> None:
        self.results: dict[str, coco_results.Metrics] = {}
        self._visualize = visualize
        self.precise_bn: PreciseBatchNorm | None = None
        self.pending = False  # precise BN and the evaluation before the first iteration were not finished
        self.seed: int = cfg.SEED
        # Stock passes the local rank as device id: wrong on a CPU, and where a job sees one GPU of several.
        with (
            mock.patch.object(defaults, "create_ddp_model", lambda model, **_: data_parallel(model, model.device)),
            mock.patch.object(defaults, "DetectionCheckpointer", Checkpointer),
        ):
            super().__init__(cfg)

    def begin(self, weights: Weights, state: Mapping[str, Any] | None, *, pending: bool = False) -> None:
        """Takes ``weights``; with the ``state`` of a checkpoint, whose weights they are, goes on from there."""
        model = self.checkpointer.model
        load_weights(model.state_dict, weights, whole=state is not None, log=log.info)
        if state:
            self.load_state_dict(state["trainer"])
            self.start_iter, self.pending = state["iteration"] + 1, pending
            log.info(f"resuming from {weights.path}")
        check_same_start(self.start_iter, model.state_dict())
        data: Any = self._trainer.data_loader
        data.start = self.start_iter

    def build_train_loader(self, cfg: CfgNode) -> Any:  # type: ignore[override]  # stock's is a class's method
        return TrainingBatches(cfg, self.seed)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed}

    def save(self, name: str) -> None:
        """Rank 0 writes a checkpoint."""
        self.checkpointer.save(name, iteration=self.iter)

    def build_hooks(self) -> list[HookBase]:
        built: list[HookBase] = [SeedIteration()]
        if isinstance(self._trainer, AMPTrainer):
            built.append(CountSkippedSteps(self._trainer.grad_scaler))
        for hook in super().build_hooks():
            if isinstance(hook, hooks.EvalHook):
                hook = Evaluation(self.cfg.TEST.EVAL_PERIOD, self._evaluate)
            elif isinstance(hook, hooks.PreciseBN):
                period, count = self.cfg.TEST.EVAL_PERIOD, self.cfg.TEST.PRECISE_BN.NUM_ITER
                # Stock makes the hook only where there are BN layers.
                hook = PreciseBatchNorm(period, self._trainer.model, hook._data_loader, count)
                self.precise_bn = hook
            elif isinstance(hook, hooks.LRScheduler):
                built.append(hook)
                hook = SaveBeforeEvaluation()
            built.extend([] if hook is None else [hook])
        return [*built, StopOnRequest()]

    def _evaluate(self) -> dict[str, Any]:
        """For EvalHook: nested numbers; what has no value is left out (metrics.json would hold a bare NaN)."""
        self.results = evaluate(self.cfg, self._trainer.model, self._visualize)
        named = _named(self.results)
        several = len(self.results) > 1
        self._last_eval_results = {k: _numbers(v) for k, v in named.items()} if several else _numbers(named)
        return self._last_eval_results


class CocoPredictions(DatasetEvaluator):
    """Gathers every rank's detections in COCO's result format, under the annotation file's category ids."""

    def __init__(self, category_ids: Mapping[int, int]) -> None:
        self._category_ids = category_ids

    def reset(self) -> None:
        self._found: list[dict[str, Any]] = []

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        for image, output in zip(inputs, outputs, strict=True):
            for record in instances_to_coco_json(output["instances"].to("cpu"), image["image_id"]):
                self._found.append({**record, "category_id": self._category_ids[record["category_id"]]})

    def evaluate(self) -> dict[str, Any]:
        gathered: list[list[dict[str, Any]]] = comm.gather(self._found, dst=0)  # type: ignore[assignment]
        return {"predictions": [record for part in gathered for record in part]}


def evaluate(cfg: CfgNode, model: torch.nn.Module, pictures: int = 0) -> dict[str, coco_results.Metrics]:
    """Data set -> its metrics, on rank 0; {} elsewhere. Predictions are kept in OUTPUT_DIR/inference/<data set>."""
    results: dict[str, coco_results.Metrics] = {}
    for name in cfg.DATASETS.TEST:
        loader: Any = test_batches(cfg, name)  # reads the file, which gives the metadata its ids
        ids = {label: own for own, label in MetadataCatalog.get(name).thing_dataset_id_to_contiguous_id.items()}
        found = inference_on_dataset(model, loader, CocoPredictions(ids))
        raise_if_stopped()
        if not comm.is_main_process():
            continue
        annotations, images = coco_data.resolve(name)
        predictions = found["predictions"]
        coco_results.write_predictions(Path(cfg.OUTPUT_DIR) / "inference" / coco_data.folder_name(name), predictions)
        tasks = coco_results.tasks_of(cfg)
        results[name] = coco_results.evaluate(annotations, predictions, tasks, cfg.TEST.KEYPOINT_OKS_SIGMAS)
        log.info(f"{name}: {len(predictions)} predictions\n{coco_results.table(results[name])}")
        if pictures:
            folder = drawing.folder_of(cfg, name)
            drawing.draw(annotations, images, predictions, folder, count=pictures)
    return results


def _adapt(cfg: CfgNode) -> tuple[CfgNode, list[str]]:
    """``cfg`` as Detectron2's own, with the device and the norms this machine can run; and what was changed."""
    own = get_cfg()
    own.merge_from_other_cfg(cfg)
    notes: list[str] = []
    if own.TEST.AUG.ENABLED:
        raise UserError("TEST.AUG.ENABLED is True; test-time augmentation needs Detectron2's own train_net.py")
    if own.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        own.MODEL.DEVICE = "cpu"
        notes.append("MODEL.DEVICE is cuda, but there is no CUDA device: running on the CPU")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if own.MODEL.DEVICE == "cpu" and world > 1:
        for part in _NORMS:
            if own.MODEL[part].NORM == "SyncBN":  # PyTorch's needs CUDA as soon as there is a process group
                own.MODEL[part].NORM = "naiveSyncBN"
                notes.append(f"MODEL.{part}.NORM is naiveSyncBN instead of SyncBN: several processes on a CPU")
    if own.SOLVER.AMP.ENABLED and own.MODEL.DEVICE == "cpu":
        raise UserError("SOLVER.AMP.ENABLED is True, but half precision needs a CUDA device; set it False")
    if own.SOLVER.IMS_PER_BATCH % world:
        raise UserError(f"SOLVER.IMS_PER_BATCH is {own.SOLVER.IMS_PER_BATCH}, not a multiple of the {world} processes")
    own.freeze()
    return own, notes


def _named(results: Mapping[str, Any]) -> dict[str, Any]:
    return dict(results) if len(results) != 1 else dict(next(iter(results.values())))


def _numbers(metrics: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    return {task: {name: v for name, v in row.items() if v is not None} for task, row in metrics.items()}
