"""Checkpoints in MoCo's format: atomic save, strict read, and the newest good one in a run folder.

A file holds only tensors and plain types, so ``torch.load(weights_only=True)`` reads it: ``epoch``, ``arch``,
``state_dict`` (``module.encoder_q.*``, ``module.encoder_k.*``, ``module.queue``, ``module.queue_ptr``), ``optimizer``;
in addition, ``step``, ``steps_per_epoch``, ``scaler``, ``method`` and ``config`` (YAML text).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import UserError, first_line
from ..files import atomic_writer, check_not_sharded, existing_file, remove, write_error
from .file import Damaged, read

log = logging.getLogger(__name__)
FINAL = "checkpoint_final.pth"
Content = TypeVar("Content")


def path_of_step(output_dir: str | Path, step: int) -> Path:
    """The path of the checkpoint after ``step`` optimizer steps."""
    return Path(output_dir) / f"checkpoint_{step:08d}.pth"


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a checkpoint completely or not at all (see `files.atomic_writer`); UserError if the disk fails."""
    path = Path(path)
    try:
        with atomic_writer(path) as file:
            torch.save(dict(state), file)
    except (OSError, RuntimeError) as error:
        failed: BaseException | None = error  # torch raises a RuntimeError in the context of a write that failed
        while failed is not None and not isinstance(failed, OSError):
            failed = failed.__cause__ or failed.__context__
        if failed is None:  # a failed device or a lack of memory, for which freeing the disk is no remedy
            raise
        raise write_error(path, failed, resume=True) from error


def all_in(output_dir: str | Path) -> list[Path]:
    """The checkpoints of a run folder, newest first."""
    folder = Path(output_dir)
    numbered = sorted(folder.glob("checkpoint_[0-9]*.pth"), reverse=True)
    return [folder / FINAL, *numbered] if (folder / FINAL).is_file() else numbered


def first_readable(
    paths: Sequence[Path], output_dir: str | Path, read: Callable[[Path], Content]
) -> tuple[Path, Content] | None:
    """The first of a run folder's ``paths`` that ``read`` does not find damaged, and its content; None: no paths.

    Raises:
        UserError: every one is damaged, or one cannot be read for another reason than damage.
    """
    for path in paths:
        try:
            return path, read(path)
        except Damaged as error:
            log.warning(f"{error}; trying the checkpoint before it")
    if paths:
        raise UserError(
            f"every checkpoint in {output_dir} is damaged; delete them to start again, or choose another OUTPUT_DIR"
        )
    return None


@contextlib.contextmanager
def restoring(what: str, optimizer: torch.optim.Optimizer, remedy: str) -> Iterator[None]:
    """Surrounds what restores a run and its optimizer: UserError if the checkpoint is damaged, or another run's."""
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        yield
        for group, given in zip(optimizer.param_groups, options, strict=True):  # the config's, except for the rate
            group.update({**given, "lr": group["lr"]})
        for parameter, state in optimizer.state.items():
            for name in state.keys() - {"step"}:  # fused steps trust shape, type and strides, and write beyond the end
                if state[name].shape != parameter.shape:
                    raise ValueError(f"{name} of its optimizer does not fit a parameter of {tuple(parameter.shape)}")
                state[name] = torch.empty_like(parameter).copy_(state[name])
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{what} lacks {error}, so no run can resume from it; {remedy}") from error
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{what} does not fit this config: {first_line(error)}; {remedy}") from error


def newest(output_dir: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of pretraining that is not damaged, and its content (see `first_readable`)."""
    return first_readable(all_in(output_dir), output_dir, read)


def resolve(path: str | Path) -> Path:
    """A run folder's newest good checkpoint, or a file itself; UserError if there is none."""
    path = Path(path)
    if not os.path.isdir(path):
        return existing_file(path, "run folder or checkpoint")
    newest_good = newest(path)
    if newest_good is None:
        check_not_sharded(path)
        raise UserError(f"{path} holds no checkpoint_*.pth; name a run folder of pretraining or a checkpoint file")
    return newest_good[0]


def prune(output_dir: str | Path, keep: int, saved: Path, pattern: str = "checkpoint_[0-9]*.pth") -> None:
    """Removes all numbered checkpoints except the ``keep`` newest up to the one just ``saved``.

    Newer ones are damaged: the run fell back to an earlier one, from which ``saved`` comes.
    """
    numbered = sorted(Path(output_dir).glob(pattern), reverse=True)
    remaining = [path for path in numbered if path.name <= saved.name][:keep]
    for path in set(numbered) - set(remaining):
        remove(path)
