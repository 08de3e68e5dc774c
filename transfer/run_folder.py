"""Run folders of fine-tuning and of evaluation, by the names of their stages in state.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.common import files
from pretrain.common.run import file_names
from pretrain.common.run.folder import read_stage

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

log = logging.getLogger(__name__)
TRAINING = "transfer"
EVALUATION = "evaluation"


def is_training(folder: str | Path) -> bool:
    """Return whether a folder is the run folder of a fine-tuning, not of an evaluation or another stage."""
    return read_stage(folder) == TRAINING


def find_output_dir(cfg: CfgNode) -> str:
    """Return the run folder of an evaluation: in that of a training, whose results are not overwritten, a new one."""
    return str(Path(cfg.OUTPUT_DIR) / "eval_only") if is_training(cfg.OUTPUT_DIR) else cfg.OUTPUT_DIR


def resolve_evaluation(cfg: CfgNode, resume: bool) -> CfgNode:
    """Return the config of an evaluation in its own folder: with ``resume``, of the newest checkpoint."""
    from .config import load_config
    from .training import checkpoints
    from .weights.load import check_same_weights

    cfg = cfg.clone()
    record = Path(cfg.OUTPUT_DIR) / file_names.INITIAL_WEIGHTS
    newest = checkpoints.load_newest(cfg.OUTPUT_DIR) if resume else None
    if newest:
        if record.is_file():
            check_same_weights(cfg.MODEL.WEIGHTS, files.read_json(record), cfg.OUTPUT_DIR)
            cfg.SOLVER = load_config(record.with_name(file_names.CONFIG)).SOLVER.clone()  # the report shows its length
        cfg.MODEL.WEIGHTS = str(newest[0])
        if newest[1].get("pending") == checkpoints.PRECISE_BN:
            log.warning(f"{newest[0]} was saved before the run's precise BN: expect other scores from the run itself")
    cfg.OUTPUT_DIR = find_output_dir(cfg)
    return cfg


def remove_unfinished(output_dir: Path) -> None:
    """Remove the temporary files that a killed run left in the folders of its run folder."""
    for folder in (output_dir / "datasets", *output_dir.glob("inference/*")):
        files.remove_unfinished(folder)
