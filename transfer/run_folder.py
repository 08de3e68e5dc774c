"""Run folders of fine-tuning and of evaluation, by the names of their stages in state.json."""

from pathlib import Path

from pretrain.common.run.folder import read_stage

TRAINING = "transfer"
EVALUATION = "evaluation"


def is_training(folder: str | Path) -> bool:
    """Return whether a folder is the run folder of a fine-tuning, not of an evaluation or another stage."""
    return read_stage(folder) == TRAINING
