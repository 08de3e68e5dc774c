"""The checkpoints in a detector's run folder, the same for both engines: how they are written, and which is the newest.

The newest has the most iterations, which each file stores; file times change when a folder is copied.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.common.errors import UserError
from pretrain.common.weights import checkpoint
from pretrain.common.weights.formats import load_torch

from .preflight import EVALUATING

BEST = "model_best.pth"


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint completely or not at all, and never weights that are not finite.

    Args:
        state: contains at least ``model`` (names -> tensors) and ``iteration`` (the last completed one, from 0).

    Raises:
        UserError: training has diverged, or the disk is full.
    """
    name = first_nonfinite(state["model"])
    if name:
        when = f"after iteration {state['iteration']}"
        raise build_divergence_error(f": {when} {name} has values that are not finite, so no checkpoint was written")
    checkpoint.save(path, state)


def build_divergence_error(details: str) -> UserError:
    """Return the error of a training run whose losses or weights are no longer finite."""
    return UserError(f"training diverged{details}; lower SOLVER.BASE_LR or lengthen SOLVER.WARMUP_ITERS")


def list_checkpoints(output_dir: str | Path, *, evaluating: bool = False) -> list[Path]:
    """Return the checkpoints to resume from, newest first; ``evaluating`` adds that of an unfinished evaluation."""
    folder = Path(output_dir)
    paths = [path for path in folder.glob("model_*.pth") if path.name != BEST]
    if evaluating and (folder / EVALUATING).is_file():
        paths.append(folder / EVALUATING)
    # At the same iteration EVALUATING comes first, since evaluation is still due, and model_final before the others.
    return sorted(paths, key=lambda path: (_read_iteration(path), path.name == EVALUATING, path.name), reverse=True)


def load_newest(output_dir: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest checkpoint that is not damaged; return None if the folder contains no checkpoint.

    Raises:
        UserError: all are damaged, or the newest cannot be read for another reason than damage.
    """
    return checkpoint.load_first_undamaged(output_dir, list_checkpoints(output_dir), checkpoint.read)


def load_newest_on_all_ranks(output_dir: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the checkpoint to resume from, as `checkpoint.load_newest_on_all_ranks` does; return None for a new run."""
    paths = list_checkpoints(output_dir, evaluating=True)
    return checkpoint.load_newest_on_all_ranks(output_dir, paths, checkpoint.read)


def _read_iteration(path: Path) -> int:
    """Return the last completed iteration, read without the tensors; -1 where none is stored."""
    try:
        return int(load_torch(path, mmap=True).get("iteration", -1))
    except Exception:  # damaged, or not plain: it comes first, so that reading it entirely shows the problem
        return sys.maxsize


def first_nonfinite(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first tensor that is not finite, or an empty string."""
    floats = {name: tensor for name, tensor in state_dict.items() if tensor.is_floating_point()}
    finite = torch.stack([tensor.isfinite().all() for tensor in floats.values()]).tolist() if floats else []
    return next((name for name, is_finite in zip(floats, finite, strict=True) if not is_finite), "")
