"""The checkpoints in a detector's run folder, the same for both engines: how they are written, and which is the newest.

The newest has the most iterations, which each file stores; file times change when a folder is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.common.errors import UserError
from pretrain.common.weights import checkpoint
from pretrain.common.weights.file import load_torch

from .preflight import EVALUATING

BEST = "model_best.pth"


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a checkpoint completely or not at all, and never weights that are not finite.

    Args:
        state: holds at least ``model`` (names -> tensors) and ``iteration`` (the last completed one, from 0).

    Raises:
        UserError: training has diverged, or the disk is full.
    """
    if name := _not_finite(state["model"]):
        raise UserError(
            f"training diverged: after iteration {state['iteration']} {name} has values that are not finite, so no "
            "checkpoint was written; lower SOLVER.BASE_LR or lengthen SOLVER.WARMUP_ITERS"
        )
    checkpoint.save(path, state)


def all_in(output_dir: str | Path, *, evaluating: bool = False) -> list[Path]:
    """The checkpoints to resume from, newest first; ``evaluating`` includes that of an unfinished evaluation."""
    folder = Path(output_dir)
    periodic = [path for path in folder.glob("model_*.pth") if path.name != BEST]
    unfinished = [folder / EVALUATING] if evaluating and (folder / EVALUATING).is_file() else []
    # At the same iteration EVALUATING comes first, since evaluation is still due, and model_final before the others.
    return sorted([*unfinished, *periodic], key=lambda p: (_iteration(p), p.name == EVALUATING, p.name), reverse=True)


def newest(output_dir: str | Path, *, evaluating: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint and its content; None if the folder holds no checkpoint.

    One that is damaged, or whose weights are not finite, is skipped with a warning.

    Args:
        evaluating: consider the checkpoint that was saved before an unfinished evaluation, too.

    Raises:
        UserError: all are damaged, or the newest cannot be read for another reason than damage.
    """
    return checkpoint.load_first_undamaged(output_dir, all_in(output_dir, evaluating=evaluating), _read_finite)


def agreed(output_dir: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the checkpoint to resume from on every rank (see `load_latest_checkpoint`); return None for a new run."""
    return checkpoint.load_latest_checkpoint(output_dir, all_in(output_dir, evaluating=True), _read_finite)


def _read_finite(path: Path) -> dict[str, Any]:
    """Read a checkpoint; raise Damaged if it is, or has weights that are not finite."""
    state = checkpoint.read(path)
    if name := _not_finite(state.get("model")):
        raise checkpoint.Damaged(f"{path}: {name} has values that are not finite")
    return state


def _iteration(path: Path) -> int:
    """The last completed iteration, read without the tensors; -1 where none is stored."""
    try:
        return int(load_torch(path, mmap=True).get("iteration", -1))
    except Exception:  # damaged, or not plain: first in order, so that reading all of it says what is wrong
        return sys.maxsize


def _not_finite(model: Any) -> str:
    """The name of the first tensor that is not finite, or an empty string."""
    tensors = model if isinstance(model, Mapping) else {}
    real = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    finite = torch.stack([tensor.isfinite().all() for tensor in real.values()]).tolist() if real else []
    return next((name for name, is_finite in zip(real, finite, strict=True) if not is_finite), "")
