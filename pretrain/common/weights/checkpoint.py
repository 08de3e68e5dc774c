"""Checkpoints in MoCo's format: write them atomically, and load the newest undamaged one of a run folder.

A file contains only tensors and plain types, so ``torch.load(weights_only=True)`` reads it: ``epoch``, ``arch``,
``state_dict`` (``module.encoder_q.*``, ``module.encoder_k.*``, ``module.queue``, ``module.queue_ptr``), ``optimizer``;
in addition, ``step``, ``steps_per_epoch``, ``scaler``, ``method``, ``bn_groups``, ``skipped_steps``, ``images`` (digest
of image names and labels), ``recipe_changes`` and ``config`` (YAML text).
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import UserError, first_line
from ..files import atomic_writer, build_write_error, remove
from ..ranks.agreement import check_agreement, on_every_rank, on_first_rank
from .file import Damaged, read

log = logging.getLogger(__name__)
FINAL = "checkpoint_final.pth"
NUMBERED = "checkpoint_[0-9]*.pth"  # what `path_of_step` names
Content = TypeVar("Content")


def path_of_step(output_dir: str | Path, step: int) -> Path:
    """Return the path of the checkpoint after ``step`` optimizer steps."""
    return Path(output_dir) / f"checkpoint_{step:08d}.pth"


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint completely or not at all (see `files.atomic_writer`); raise UserError if the disk fails."""
    path = Path(path)
    try:
        with atomic_writer(path) as file:
            torch.save(dict(state), file)
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error  # torch raises a RuntimeError in the context of a write that failed
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:  # a failed device or a lack of memory, for which freeing the disk is no remedy
            raise
        raise build_write_error(path, cause, resume=True) from error


def save_step(output_dir: str | Path, step: int, state: Mapping[str, Any], keep: int) -> None:
    """Write the checkpoint after ``step`` optimizer steps; remove all numbered ones except the ``keep`` newest."""
    path = path_of_step(output_dir, step)
    save(path, state)
    prune(output_dir, keep, path)


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a run folder of pretraining or of a linear probe, newest first."""
    folder = Path(output_dir)
    numbered = sorted(folder.glob(NUMBERED), reverse=True)
    return [folder / FINAL, *numbered] if (folder / FINAL).is_file() else numbered


def load_first_undamaged(
    output_dir: str | Path, paths: Sequence[Path], read_file: Callable[[Path], Content]
) -> tuple[Path, Content] | None:
    """Load the first of a run folder's ``paths`` that ``read_file`` does not find damaged; return None without paths.

    Raises:
        UserError: every one is damaged, or one cannot be read for another reason than damage.
    """
    for path in paths:
        try:
            return path, read_file(path)
        except Damaged as error:
            log.warning(f"{error}; trying the checkpoint before it")
    if paths:
        raise UserError(f"every checkpoint in {output_dir} is damaged; delete them, or choose another OUTPUT_DIR")
    return None


def load_newest(output_dir: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest undamaged checkpoint in a run folder, in this process alone; return None if there is none."""
    return load_first_undamaged(output_dir, list_checkpoints(output_dir), read)


def load_newest_on_all_ranks(
    output_dir: str | Path, paths: Sequence[Path], read_file: Callable[[Path], Content]
) -> tuple[Path, Content] | None:
    """Load the newest undamaged checkpoint on every rank; rank 0 chooses it, and reads it only once.

    Args:
        paths: the checkpoints in ``output_dir``, newest first; what ranks other than 0 list need not be complete.

    Returns:
        Its path and what ``read_file`` returns; None if there is no checkpoint.

    Raises:
        UserError: every checkpoint is damaged, or a rank cannot read the chosen one, or sees one although rank 0 sees
            none.
    """
    read_once = functools.cache(read_file)  # rank 0 has already read the checkpoint that it chose
    name = on_first_rank(_choose_name, output_dir, paths, read_once)
    if not name:
        # A machine may list a shared folder late, or have its own disk.
        check_agreement(bool(paths), f"whether {output_dir} contains a checkpoint")
        return None
    path = Path(output_dir) / name
    return path, on_every_rank(read_once, path)


def _choose_name(output_dir: str | Path, paths: Sequence[Path], read_file: Callable[[Path], Any]) -> str:
    newest = load_first_undamaged(output_dir, paths, read_file)
    return newest[0].name if newest else ""


@contextlib.contextmanager
def translate_restore_errors(description: str, optimizer: torch.optim.Optimizer, remedy: str) -> Iterator[None]:
    """Raise UserError if the block cannot restore a run and its ``optimizer``.

    The checkpoint is then damaged, or belongs to another run.
    """
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        yield
        for group, configured in zip(optimizer.param_groups, options, strict=True):  # only the rate is the checkpoint's
            group.update({**configured, "lr": group["lr"]})
        for parameter, state in optimizer.state.items():
            for name in state.keys() - {"step"}:  # fused steps rely on the parameter's type and strides
                state[name] = torch.empty_like(parameter).copy_(state[name])
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{description} lacks {error}, so no run can resume from it; {remedy}") from error
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{description} does not fit this config: {first_line(error)}; {remedy}") from error


def prune(output_dir: str | Path, keep: int, saved: Path, pattern: str = NUMBERED) -> None:
    """Remove all numbered checkpoints except the ``keep`` newest up to the one just ``saved``.

    Newer ones are damaged: the run fell back to an earlier one, from which ``saved`` comes.
    """
    numbered = sorted(Path(output_dir).glob(pattern), reverse=True)
    remaining = [path for path in numbered if path.name <= saved.name][:keep]
    for path in set(numbered) - set(remaining):
        remove(path)
