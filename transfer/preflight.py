"""What fine-tuning refuses before it imports torch or starts a job: used folders, missing data, wrong weights.

Only names from a user's module or from Detectron2's catalog are looked up in imported modules.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fvcore.common.config import CfgNode

from pretrain.common.config import extensions
from pretrain.common.config.yaml_io import get
from pretrain.common.errors import UserError, did_you_mean
from pretrain.common.files import existing_file, read_json
from pretrain.common.run.folder import check_stage_of, stage_of

from . import HOOKS, MAPPERS
from .coco import catalog, data
from .config import check_same_training, check_supported
from .weights.files import weights_file

# Saved before precise BN and evaluation and removed after them: while it exists, they are still due.
EVALUATING = "evaluating.pth"


def check_engine(cfg: CfgNode, engine: str, *, eval_only: bool) -> None:
    """Raises UserError for keys and data sets that only the Detectron2 engine can honor, with the other engine, and
    for what that engine cannot do.
    """
    if engine == "torchvision":
        check_supported(cfg)
        data.check_not_in_catalog(data_names(cfg, eval_only))
        return
    model = cfg.MODEL
    architecture = model.META_ARCHITECTURE
    if cfg.TEST.AUG.ENABLED and (model.KEYPOINT_ON or model.LOAD_PROPOSALS or architecture != "GeneralizedRCNN"):
        raise UserError("TEST.AUG.ENABLED needs GeneralizedRCNN, and no keypoints or files of proposals; set it False")
    wrong = f"MODEL.META_ARCHITECTURE is {architecture}"
    if architecture in ("ProposalNetwork", "SemanticSegmentor") and (eval_only or cfg.DATASETS.TEST):
        raise UserError(f'{wrong}, for which there is no AP; set DATASETS.TEST "()", or choose GeneralizedRCNN')
    trains_on_objects = not (eval_only or all(map(data.in_catalog, cfg.DATASETS.TRAIN)))
    if architecture in ("PanopticFPN", "SemanticSegmentor") and trains_on_objects:
        raise UserError(f"{wrong}, but a file of objects in COCO's format labels no pixels; choose GeneralizedRCNN")
    if any(model.RESNETS.DEFORM_ON_PER_STAGE) and importlib.util.find_spec("detectron2._C") is None:
        raise UserError("MODEL.RESNETS.DEFORM_ON_PER_STAGE needs Detectron2's compiled operators; build it from source")


def check_inputs(cfg: CfgNode, *, eval_only: bool, weights: bool) -> None:
    """Checks that data, weights and what the config names in the user's modules exist.

    Args:
        weights: check MODEL.WEIGHTS, too.

    Raises:
        UserError: something does not, or a data set's evaluator is not COCO's.
    """
    names = data_names(cfg, eval_only)
    for name in sorted(names, key=data.in_catalog):
        data.find(name)
    for split in ("TRAIN", "TEST")[eval_only:] if cfg.MODEL.LOAD_PROPOSALS else ():
        files = cfg.DATASETS[f"PROPOSAL_FILES_{split}"]
        if len(files) != len(cfg.DATASETS[split]):
            raise UserError(f"DATASETS.PROPOSAL_FILES_{split} is {files}; give a file for each set in DATASETS.{split}")
        for file in (file for file in files if "://" not in file):
            existing_file(file, f"file of DATASETS.PROPOSAL_FILES_{split}")
    if weights:
        weights_file(cfg.MODEL.WEIGHTS)
    data.check_early(cfg, names, recorded_classes(cfg, eval_only) if weights or not eval_only else None)
    for name in filter(data.in_catalog, cfg.DATASETS.TEST):
        catalog.check_evaluator(name)
    extensions.load()
    mappers = ("INPUT.MAPPER", filter(None, [get(cfg, "INPUT.MAPPER")]), MAPPERS)
    hooks = ("SOLVER.HOOKS", get(cfg, "SOLVER.HOOKS") or (), HOOKS)
    for key, wanted, known in (mappers, hooks):
        for name in wanted:
            if name not in known:
                raise UserError(
                    f"{key} names {name!r}, but the imported modules register {', '.join(known) or 'none'}; --import "
                    f"the module that registers it{did_you_mean(name, known)}"
                )


def recorded_classes(cfg: CfgNode, eval_only: bool) -> data.Classes:
    """Where a run folder keeps the classes of the detector that is evaluated or trained further, and their names.

    {}: a new training, or a detector from elsewhere or from before they were kept.
    """
    folder = Path(cfg.MODEL.WEIGHTS).parent if eval_only else Path(cfg.OUTPUT_DIR)
    file = folder / data.CLASSES
    is_known = file.is_file() and stage_of(folder) == "transfer" and (eval_only or has_checkpoint(folder))
    return {str(file): read_json(file, list)} if is_known else {}


def has_checkpoint(folder: Path) -> bool:
    """Whether a training has begun in a run folder and can continue."""
    return any(folder.glob("model_*.pth")) or (folder / EVALUATING).exists()


def data_names(cfg: CfgNode, eval_only: bool) -> list[str]:
    """The data sets that a run reads: an evaluation has none to train on, and they may not be on its machine."""
    return [*(() if eval_only else cfg.DATASETS.TRAIN), *cfg.DATASETS.TEST]


def check_output_dir(cfg: CfgNode, resume: bool) -> None:
    """Checks that a training may start, or with ``resume`` continue, in OUTPUT_DIR.

    Raises:
        UserError: it is another stage's, or has a checkpoint, a line of metrics or results; with ``resume``, results
            alone, or a training under another config.
    """
    out = Path(cfg.OUTPUT_DIR)
    check_stage_of(out, "transfer")
    metrics, results = out / "metrics.json", (out / "results.json").exists()
    begun = has_checkpoint(out)
    if not resume and (begun or results or (metrics.exists() and metrics.stat().st_size > 0)):
        raise UserError(f"OUTPUT_DIR {out} holds an earlier run; add --resume to continue it, or choose another folder")
    if resume and results and not begun:
        raise UserError(
            f"OUTPUT_DIR {out} holds the results of an earlier run, but no checkpoint to continue from; delete "
            "results.json to start again, or choose another folder"
        )
    if resume:
        check_same_training(cfg, out / "config.yaml")
