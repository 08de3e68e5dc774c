"""The checkpoints in a detector's run folder, the same for both engines: how they are written, and which is the newest.

The newest has the most iterations: model_0004999.pth has 5,000. File times change when a folder is copied.
"""

import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain.common.errors import UserError
from pretrain.common.files import read_json, remove
from pretrain.common.ranks.agreement import on_first_rank
from pretrain.common.run import file_names
from pretrain.common.weights import checkpoint
from pretrain.common.weights.file import Damaged
from pretrain.common.weights.formats import load_torch

from ..preflight import BEST, PENDING_EVALUATION

BEST_RECORD = "best.json"
# What is due after the iterations of a checkpoint, as its entry ``pending`` names it; empty if nothing is.
PRECISE_BN = "precise_bn"  # and then the evaluation
EVALUATION = "evaluation"


def path_after(output_dir: str | Path, iterations: int) -> Path:
    """Return the path of the checkpoint after that many iterations, as Detectron2 names it."""
    return Path(output_dir) / f"model_{iterations - 1:07d}.pth"


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


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints to resume from, newest first."""
    paths = [path for path in Path(output_dir).glob(file_names.DETECTORS) if path.name != BEST]
    # At the same iteration, the final one comes before the others.
    return sorted(paths, key=lambda path: (_read_iteration(path), path.name), reverse=True)


def load_newest(output_dir: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest checkpoint that is not damaged; return None if the folder contains no checkpoint.

    Raises:
        UserError: all are damaged, or the newest cannot be read for another reason than damage.
    """
    return checkpoint.load_first_undamaged(output_dir, list_checkpoints(output_dir), checkpoint.read)


def load_newest_on_all_ranks(output_dir: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the checkpoint to resume from, as `checkpoint.load_newest_on_all_ranks` does; return None for a new run.

    Its entries are those that today's version writes.
    """
    on_first_rank(_replace_evaluating, Path(output_dir))
    damaged = Path(output_dir).glob(PENDING_EVALUATION)  # if it is not, it was replaced
    return checkpoint.load_newest_on_all_ranks(output_dir, [*damaged, *list_checkpoints(output_dir)], _read)


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, and add what an earlier version did not write."""
    content = checkpoint.read(path)
    content.setdefault("pending", "")
    if "scores" not in content:
        record = path.with_name(BEST_RECORD)
        best = read_json(record) if record.is_file() else {}
        scores = (
            {"metric": best["metric"], "data": best["data"], "values": [[best["done"], best["value"]]]} if best else {}
        )
        content["scores"] = scores
    return content


def _replace_evaluating(output_dir: Path) -> None:
    """Replace what an earlier version wrote before precise BN and an evaluation by an ordinary checkpoint."""
    path = output_dir / PENDING_EVALUATION
    if path.is_file():
        with contextlib.suppress(Damaged):
            content = checkpoint.read(path)
            save(path_after(output_dir, content["iteration"] + 1), content | {"pending": PRECISE_BN})
            remove(path)


def _read_iteration(path: Path) -> int:
    """Return the last completed iteration, which numbered files name, and others store; -1 where neither is so."""
    number = re.fullmatch(r"model_(\d+)\.pth", path.name)
    if number:
        return int(number[1])
    try:
        return int(load_torch(path, mmap=True).get("iteration", -1))  # without the tensors
    except Exception:  # damaged, or not plain: it comes first, so that reading it entirely shows the problem
        return sys.maxsize


def first_nonfinite(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first tensor that is not finite, or an empty string."""
    floats = {name: tensor for name, tensor in state_dict.items() if tensor.is_floating_point()}
    finite = torch.stack([tensor.isfinite().all() for tensor in floats.values()]).tolist() if floats else []
    return next((name for name, is_finite in zip(floats, finite, strict=True) if not is_finite), "")
