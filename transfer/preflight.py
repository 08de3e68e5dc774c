"""Checks fine-tuning before torch is imported or a job is started: run folder, data, weights, registered names.

User modules and Detectron2's catalog are imported only for names that they define.
"""

import importlib.util
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from pretrain.common.config import extensions
from pretrain.common.errors import UserError, suggest_name
from pretrain.common.files import read_json
from pretrain.common.run import file_names
from pretrain.common.run.folder import check_stage_of

from .coco import catalog, names
from .coco.checks.classes import CLASSES, Classes
from .coco.data import DataSets
from .config import check_same_training, list_unsupported
from .registries import HOOKS, MAPPERS
from .run_folder import TRAINING, is_training
from .weights.locate import find_weights

ENGINES = ("auto", "detectron2", "torchvision")
FALLBACK_NOTE = (
    "fine-tuning uses the torchvision engine, since Detectron2 is not installed; run `make detectron2` to install it, "
    "or pass --engine torchvision"
)
FINAL = "model_final.pth"
BEST = "model_best.pth"  # of TEST.BEST; no run resumes from it
# Saved by earlier versions before precise BN and evaluation, and removed after them: it marks an unfinished evaluation.
PENDING_EVALUATION = "evaluating.pth"


def check_engine_name(name: str) -> None:
    """Raise UserError for a name that is not one of `ENGINES`."""
    if name not in ENGINES:
        raise UserError(f"engine {name!r} is not one of {', '.join(ENGINES)}{suggest_name(str(name), ENGINES)}")


def choose_engine(name: str) -> str:
    """Return the engine's name; ``auto`` is Detectron2 if it is installed.

    Raises:
        UserError: Detectron2 is requested but not installed, or the name is unknown.
    """
    check_engine_name(name)
    is_installed = importlib.util.find_spec("detectron2") is not None
    if name == "detectron2" and not is_installed:
        raise UserError("Detectron2 is not installed; run `make detectron2`, or use --engine torchvision")
    return "detectron2" if is_installed and name != "torchvision" else "torchvision"


def check_engine(cfg: CfgNode, engine: str, *, eval_only: bool) -> None:
    """Raise UserError for keys and data sets that ``engine`` does not support; see `trial` for Detectron2's own."""
    if engine == "torchvision":
        check_supported(cfg, eval_only=eval_only)
        names.check_not_in_catalog(data_names(cfg, eval_only))
        return
    model = cfg.MODEL
    architecture = model.META_ARCHITECTURE
    if architecture in ("ProposalNetwork", "SemanticSegmentor", "PanopticFPN"):
        raise UserError(f"MODEL.META_ARCHITECTURE is {architecture}, not a detector; set GeneralizedRCNN or RetinaNet")
    if model.LOAD_PROPOSALS:
        raise UserError("MODEL.LOAD_PROPOSALS is True, but proposal files are not supported; set it False")


def check_supported(cfg: CfgNode, *, eval_only: bool = False) -> None:
    """Check that the torchvision engine can honor a config.

    Raises:
        UserError: names every key that it cannot honor, its value and what the engine supports; and Detectron2 if that
            takes all these values.
    """
    unsupported = list_unsupported(cfg)
    if not unsupported:
        return
    remedy = "set supported values"
    if importlib.util.find_spec("detectron2") is None:
        remedy += "; Detectron2, which `make detectron2` installs, may support others"
    elif _detectron2_takes(cfg, unsupported.keys(), eval_only):
        remedy += ", or use --engine detectron2"
    raise UserError(f"the torchvision engine does not support this config: {'; '.join(unsupported.values())}; {remedy}")


def _detectron2_takes(cfg: CfgNode, keys: Set[str], eval_only: bool) -> bool:
    """Return whether Detectron2 reads these keys of a config, and refuses none of its values."""
    from .train import load_engine  # imports torch and Detectron2
    from .trial import try_config

    try:
        check_engine(cfg, "detectron2", eval_only=eval_only)
        extensions.load()
        return keys <= try_config(load_engine("detectron2"), cfg, eval_only=eval_only)
    except UserError:
        return False


def check_inputs(cfg: CfgNode, *, eval_only: bool, reads_weights: bool) -> DataSets:
    """Check that the data, the weights, and the mapper and hooks that the config names exist.

    Args:
        reads_weights: check MODEL.WEIGHTS, too.

    Returns:
        The data sets, of which small ones are checked already.

    Raises:
        UserError: something does not exist, a small data set has bad records, or a data set's evaluator is unknown.
    """
    data_sets = DataSets(cfg, data_names(cfg, eval_only))
    data_sets.check_small(read_recorded_classes(cfg, eval_only) if reads_weights or not eval_only else None)
    for name in filter(names.is_catalog_name, cfg.DATASETS.TEST):
        catalog.check_evaluator(name)
    if reads_weights:
        find_weights(cfg.MODEL.WEIGHTS)
    extensions.load()
    _check_registered("INPUT.MAPPER", filter(None, [cfg.INPUT.MAPPER]), MAPPERS)
    _check_registered("SOLVER.HOOKS", cfg.SOLVER.HOOKS, HOOKS)
    return data_sets


def _check_registered(key: str, names: Iterable[str], registry: Mapping[str, Any]) -> None:
    for name in names:
        if name not in registry:
            problem = f"{key} names {name!r}, but the imported modules register {', '.join(registry) or 'none'}"
            raise UserError(f"{problem}; --import the module that registers it{suggest_name(name, registry)}")
        if not callable(registry[name]):
            problem = f"{key} {name!r} is of type {type(registry[name]).__name__}, not a function"
            raise UserError(f"{problem}; register one as docs/templates/my_detection.py does")


def read_recorded_classes(cfg: CfgNode, eval_only: bool) -> Classes:
    """Read the class names of the detector that is evaluated or trained further, under the file that records them.

    Returns {} for a new training, and for a detector whose folder does not record its classes.
    """
    folder = Path(cfg.MODEL.WEIGHTS).parent if eval_only else Path(cfg.OUTPUT_DIR)
    file = folder / CLASSES
    is_recorded = file.is_file() and is_training(folder) and (eval_only or has_checkpoint(folder))
    return {str(file): read_json(file, list)} if is_recorded else {}


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run folder contains a training run that can be resumed."""
    return (
        any(path.name != BEST for path in folder.glob(file_names.DETECTORS)) or (folder / PENDING_EVALUATION).exists()
    )


def data_names(cfg: CfgNode, eval_only: bool) -> list[str]:
    """Return the data sets that a run reads: an evaluation does not read DATASETS.TRAIN."""
    return [*(() if eval_only else cfg.DATASETS.TRAIN), *cfg.DATASETS.TEST]


def check_output_dir(cfg: CfgNode, resume: bool) -> None:
    """Check that training may start, or with ``resume`` continue, in OUTPUT_DIR.

    Raises:
        UserError: the folder is another stage's, or contains a checkpoint, a line of metrics or results. With
            ``resume``: it contains results but no checkpoint, or a training run with a different config.
    """
    folder = Path(cfg.OUTPUT_DIR)
    check_stage_of(folder, TRAINING)
    metrics = folder / file_names.METRICS
    has_results = (folder / file_names.RESULTS).exists()
    is_started = has_checkpoint(folder)
    if resume and has_results and not is_started:
        remedy = "delete results.json to start again, or choose another folder"
        raise UserError(f"OUTPUT_DIR {folder} contains an earlier run's results, but no checkpoint; {remedy}")
    if resume:
        check_same_training(cfg, folder / file_names.CONFIG)
    elif is_started or has_results or (metrics.exists() and metrics.stat().st_size > 0):
        remedy = "add --resume to continue it, or choose another folder"
        raise UserError(f"OUTPUT_DIR {folder} contains an earlier run; {remedy}")
