"""Fine-tune and evaluate detectors: the functions of the Python interface, and the core that every command calls."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common import interface
from pretrain.common.config import extensions
from pretrain.common.errors import UserError, shorten_list, suggest_name
from pretrain.common.files import read_json, write_json
from pretrain.common.interrupt import Stopped
from pretrain.common.logs import setup_logging
from pretrain.common.ranks.environment import is_first_process, read_world_size
from pretrain.common.run import wandb
from pretrain.common.run.state import RunContext

from . import preflight
from .coco.checks.classes import CLASSES
from .coco.data import DataSets
from .config import (
    check_batch_division,
    check_ranges,
    check_training,
    dump,
    from_yaml_text,
    load_config,
    scale_to_world,
)
from .predict import load_detector
from .run_folder import EVALUATION, TRAINING, find_output_dir, remove_unfinished, resolve_evaluation

__all__ = ["Run", "evaluate", "fine_tune", "load_detector", "prepare", "run_rank", "start"]
log = logging.getLogger(__name__)
_MEMORY_REMEDY = "raise SOLVER.ACCUMULATE, use half precision (SOLVER.AMP.ENABLED)"  # for training


@dataclass(frozen=True)
class Run:
    """A training with its evaluations, or an evaluation, that may start; see `prepare`.

    Attributes:
        cfg: the config, checked and scaled to the number of processes.
        engine: detectron2 | torchvision.
        resume: continue from the newest undamaged checkpoint in OUTPUT_DIR, if any; of an evaluation, evaluate it.
        eval_only: evaluate MODEL.WEIGHTS, a fine-tuned detector, instead of training.
        visualize: number of test images per data set on which to draw the predictions.
    """

    cfg: CfgNode
    engine: str
    resume: bool = False
    eval_only: bool = False
    visualize: int = 0


def fine_tune(
    config_file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    engine: str = "auto",
    resume: bool = False,
    eval_only: bool = False,
) -> dict[str, Any]:
    """Fine-tune or evaluate a detector in this process, and return the content of results.json.

    Ctrl-C (in a notebook: interrupting the cell) stops after the current step and writes a checkpoint.

    Args:
        config_file: a Detectron2 YAML file, as in configs/coco_*.yaml.
        overrides: config keys and their values, as in ``{"SOLVER.BASE_LR": 0.01}``.
        engine: detectron2, torchvision, or auto for Detectron2 if it is installed.
        resume: continue from the newest checkpoint in OUTPUT_DIR, if any.
        eval_only: evaluate MODEL.WEIGHTS, a fine-tuned detector; see `evaluate`.

    Raises:
        pretrain.common.errors.UserError: bad input, in one line.
        pretrain.common.interrupt.Stopped: the run was interrupted; its ``remedy`` says how to continue.
    """
    config_file = interface.read_path(config_file, "config_file")
    words = interface.list_words(overrides or {})
    context = RunContext()
    with context.stop.handle_signals(), interface.take_turn(context.stop), interface.set_torch_modes():
        try:
            run = prepare(load_config(config_file, words), engine, resume=resume, eval_only=eval_only)
            return run_rank(run, context, _check_inputs(run))
        except Stopped as stop:
            stop.add_note(stop.remedy)  # a notebook shows only the exception
            raise


def evaluate(
    config_file: str | Path, overrides: Mapping[str, Any] | None = None, *, engine: str = "auto", resume: bool = False
) -> dict[str, Any]:
    """Evaluate a fine-tuned detector in this process, and return the content of results.json.

    In the folder of a training run, all output goes to its eval_only/, so that the run's own results are kept.

    Args:
        config_file: a Detectron2 YAML file, such as the config.yaml of a run folder.
        overrides: config keys and their values; MODEL.WEIGHTS is the detector's file.
        engine: detectron2, torchvision, or auto for Detectron2 if it is installed.
        resume: evaluate the newest checkpoint in OUTPUT_DIR instead of MODEL.WEIGHTS, if there is one.

    Raises:
        pretrain.common.errors.UserError: bad input, in one line.
        pretrain.common.interrupt.Stopped: the evaluation was interrupted.
    """
    return fine_tune(config_file, overrides, engine=engine, resume=resume, eval_only=True)


def prepare(
    cfg: CfgNode,
    engine: str = "auto",
    world_size: int | None = None,
    *,
    resume: bool = False,
    eval_only: bool = False,
    visualize: int = 0,
) -> Run:
    """Choose the engine, check the config and scale it to the number of processes.

    Args:
        cfg: a config as `load_config` returns it.
        world_size: the number of processes (default: WORLD_SIZE of the environment, or else 1).
        engine, resume, eval_only, visualize: see `Run`; the engine may be auto, Detectron2 if it is installed.

    Raises:
        UserError: the engine is not installed or cannot honor the config, or the config has a mistake.
    """
    name = preflight.choose_engine(engine)
    if (engine, name) == ("auto", "torchvision") and is_first_process():
        print(preflight.FALLBACK_NOTE, file=sys.stderr)
    world_size = world_size or read_world_size()
    check_ranges(cfg)
    if not eval_only:
        check_training(cfg)
    preflight.check_engine(cfg, name, eval_only=eval_only)
    cfg = scale_to_world(cfg, world_size)
    if not eval_only:
        check_training(cfg)  # as scaled
        check_batch_division(cfg, world_size)
    return Run(cfg, name, resume, eval_only, visualize)


def start(run: Run, context: RunContext, num_processes: int = 1) -> None:
    """Check the run's folder, data and weights; run it in this process or, if it is to be several, in new ones.

    If the environment has WORLD_SIZE, this process is one rank and starts no others.

    Raises:
        UserError: a mistake in the data or the weights, or a run folder that is in use or another run's.
        Stopped: a stop was requested; the checkpoint is written.
    """
    data_sets = _check_inputs(run)
    if num_processes > 1 and not read_world_size(0):
        _run_ranks(run, context, num_processes)
    else:
        run_rank(run, context, data_sets)


def _run_ranks(run: Run, context: RunContext, count: int) -> None:
    """Run ``count`` processes to their end; each reads the run from a file in a new log folder of the run folder."""
    from pretrain.common.ranks.parent import name_log_folder, run_ranks

    folder = find_output_dir(run.cfg) if run.eval_only else run.cfg.OUTPUT_DIR
    logs = name_log_folder(folder)
    write_json(logs / "run.json", {**vars(run), "cfg": dump(run.cfg)})
    run_ranks("transfer.api:run_recorded", [str(logs / "run.json")], count, folder, logs, context.stop)


def run_recorded(context: RunContext, file: str) -> None:
    """Run one rank of the run in ``file``."""
    record = read_json(file)
    run_rank(Run(**{**record, "cfg": from_yaml_text(record["cfg"])}), context)


def _check_inputs(run: Run) -> DataSets | None:
    """Check run folder, data and weights, and try the config, on rank 0 only.

    Other ranks may start after it has written to the folder.
    """
    if not is_first_process():
        return None
    wandb.check_logger()
    if not run.eval_only:
        preflight.check_output_dir(run.cfg, run.resume)
    reads_weights = not run.resume  # a resumed run does not need them
    data_sets = preflight.check_inputs(run.cfg, eval_only=run.eval_only, reads_weights=reads_weights)
    try_config(run)
    return data_sets


def try_config(run: Run) -> None:
    """Raise UserError if a library that the engine uses refuses the config; see `trial`. This imports torch.

    Configs that differ only in weights, seed or folder are tried once.
    """
    extensions.load()
    cfg = run.cfg.clone()
    cfg.defrost()
    cfg.MODEL.WEIGHTS = cfg.OUTPUT_DIR = ""
    cfg.SEED = 0
    _try_once(run.engine, dump(cfg), run.eval_only)


@functools.cache
def _try_once(engine: str, config: str, eval_only: bool) -> None:
    from . import train, trial

    trial.try_config(train.load_engine(engine), from_yaml_text(config), eval_only=eval_only)


def run_rank(run: Run, context: RunContext, data_sets: DataSets | None = None) -> dict[str, Any]:
    """Run one rank; rank 0 writes results.json, and every rank returns its content.

    Args:
        context: what this process was started with, such as the request to stop it.
        data_sets: those of the run, if this process has located them.
    """
    from pretrain.common.distributed import rank
    from pretrain.common.ranks.agreement import on_every_rank, on_first_rank
    from pretrain.common.ranks.process_group import enter_process_group
    from pretrain.common.run.stage import enter_run_folder

    from . import train
    from .coco.results import check_expected_results
    from .distributed import join

    with enter_process_group(run.cfg.OUTPUT_DIR, join, run.cfg.MODEL.DEVICE) as device:
        on_every_rank(extensions.load)
        if run.eval_only:
            run = replace(run, cfg=on_first_rank(resolve_evaluation, run.cfg, run.resume))
        cfg = run.cfg
        output_dir = Path(cfg.OUTPUT_DIR)
        check = None if run.eval_only else partial(preflight.check_output_dir, cfg, run.resume)
        name, memory_remedy = (EVALUATION, "") if run.eval_only else (TRAINING, _MEMORY_REMEDY)
        with enter_run_folder(name, output_dir, context, check, memory_remedy):
            setup_logging(output_dir, rank())
            on_first_rank(remove_unfinished, output_dir)
            names = preflight.data_names(cfg, run.eval_only)
            data_sets = on_every_rank(lambda: data_sets or DataSets(cfg, names))
            _open_data_sets(cfg, data_sets, run.eval_only)
            with extensions.mark_errors():
                results = train.run(run, device, data_sets, context.stop)
            on_first_rank(check_expected_results, cfg, results["metrics"])
            return results


def _open_data_sets(cfg: CfgNode, data_sets: DataSets, eval_only: bool) -> None:
    """Check the data sets on rank 0; read them on all ranks, which must see the same files."""
    from pretrain.common.distributed import world_size
    from pretrain.common.ranks.agreement import check_agreement, on_every_rank, on_first_rank

    on_first_rank(_check_data, cfg, data_sets, eval_only)
    on_every_rank(data_sets.read_rest, cfg.OUTPUT_DIR)
    if not eval_only:
        _check_scored(cfg, data_sets)
    if world_size() > 1:
        check_agreement(data_sets.list_digests(cfg.OUTPUT_DIR), "the data (SHA-256 of the annotations that are read)")


def _check_data(cfg: CfgNode, data_sets: DataSets, eval_only: bool) -> None:
    """Check the data sets, and their classes against those that the run folder records; training records them."""
    recorded = preflight.read_recorded_classes(cfg, eval_only)
    if eval_only and not recorded:
        log.info(f"the folder of {cfg.MODEL.WEIGHTS} has no {CLASSES}: its classes are not compared with the data")
    classes = data_sets.check(cfg.OUTPUT_DIR, recorded, is_resumed=bool(recorded) and not eval_only)
    if not eval_only:
        _check_category(cfg, classes)
        write_json(Path(cfg.OUTPUT_DIR) / CLASSES, classes)


def _check_category(cfg: CfgNode, classes: list[str]) -> None:
    """Raise UserError for a TEST.BEST of a category that is not one of the ``classes`` of the data."""
    category = cfg.TEST.BEST.partition("/AP-")[2]
    if category and category not in classes:
        problem = f"TEST.BEST is {cfg.TEST.BEST!r}, but the data have no category {category!r}"
        raise UserError(f"{problem}; choose one of {shorten_list(classes)}{suggest_name(category, classes)}")


def _check_scored(cfg: CfgNode, data_sets: DataSets) -> None:
    """Raise UserError if TEST.BEST needs scores of a data set that has no annotations to compute them from."""
    name = next(iter(cfg.DATASETS.TEST), "")
    if not cfg.TEST.BEST or not name:
        return
    data_set = data_sets[name]
    if data_set.images is not None and not data_set.num_objects:
        problem = f"TEST.BEST is {cfg.TEST.BEST!r}, but {name}, the first of DATASETS.TEST, has no annotated objects"
        raise UserError(f"{problem}; put a data set that has some before it, or set TEST.BEST ''")
    category = cfg.TEST.BEST.partition("/AP-")[2]
    if category and data_set.images is not None and not data_set.count_objects(category):
        problem = f"TEST.BEST is {cfg.TEST.BEST!r}, but {name}, the first of DATASETS.TEST, has no {category}"
        raise UserError(f"{problem}; choose a category that it has, or TEST.BEST bbox/AP")
