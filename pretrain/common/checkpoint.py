"""Checkpoints in MoCo's format: atomic save, strict read, the newest good one of a run folder.

A file holds only tensors and plain types, so ``torch.load(weights_only=True)`` reads it: ``epoch``, ``arch``,
``state_dict`` (``module.encoder_q.*``, ``module.encoder_k.*``, ``module.queue``, ``module.queue_ptr``), ``optimizer``;
beside these ``step``, ``steps_per_epoch``, ``scaler``, ``random_states``, ``method`` and ``config`` (YAML text).
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import UserError, nearest
from .files import empty_or_text, existing_file
from .run_folder import cannot_write, replacing

FINAL = "checkpoint_final.pth"


class Damaged(UserError):
    """What a file holds cannot be read as a checkpoint, now or ever; an earlier one may do instead."""


def path_of_step(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint after ``step`` optimiser steps stands."""
    return Path(output_dir) / f"checkpoint_{step:08d}.pth"


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a checkpoint whole or not at all: temporary file beside it, synced, renamed.

    Raises:
        UserError: the disk is full or the folder cannot be written; earlier checkpoints are untouched.
    """
    path = Path(path)
    try:
        with replacing(path) as file:
            torch.save(dict(state), file)
    except (OSError, RuntimeError) as error:
        failed: BaseException | None = error  # torch raises a RuntimeError in the context of a write that failed
        while failed is not None and not isinstance(failed, OSError):
            failed = failed.__cause__ or failed.__context__
        if failed is None:  # the device failed, or memory was short: nothing that a free disk would cure
            raise
        raise cannot_write(path, failed, resume=True) from error


def read(path: str | Path, unsafe_pickle: bool = False) -> dict[str, Any]:
    """Reads a checkpoint (zip or old tar format) to the CPU.

    Args:
        unsafe_pickle: unpickle anything the file holds; only for files from a source you trust.

    Raises:
        Damaged: not a whole checkpoint (the message says what it is).
        UserError: missing, not plain tensors and types, or the disk or the memory failed while reading.
    """
    path = Path(path)
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.p*")] if path.parent.is_dir() else []
        raise UserError(f"no checkpoint at {path}{nearest(path.name, siblings)}")
    try:
        if what := empty_or_text(path):
            raise ValueError(what)
        if zipfile.is_zipfile(path):  # torch does not look at the checksums it wrote
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
            if bad:
                raise ValueError(f"checksum of {bad} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=not unsafe_pickle)
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and re.search("GLOBAL|Unsupported class", str(error)):
            raise UserError(f"{path} holds more than tensors and plain types; {unsafe_remedy(path)}") from error
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek to where nothing can be
            raise UserError(f"cannot read {path}: {error.strerror or error}; make it readable and run again") from error
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            size = path.stat().st_size / 2**20
            raise UserError(f"not enough memory to read {path} ({size:.0f} MiB); free memory and run again") from error
        raise Damaged(f"{path} is damaged or not a checkpoint: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise Damaged(f"{path} holds a {type(state).__name__}, not a dictionary of tensors")
    return state


def unsafe_remedy(path: str | Path) -> str:
    """What helps where a file needs an unsafe unpickler: only the conversion has one, and leaves plain tensors."""
    return (
        f"if you trust its source, convert it first: python tools/convert_to_d2.py {path} OUTPUT.pth --unsafe-pickle "
        "(with --to-torchvision for pretraining and probes)"
    )


def all_in(output_dir: str | Path) -> list[Path]:
    """The checkpoints of a run folder, newest first."""
    folder = Path(output_dir)
    numbered = sorted(folder.glob("checkpoint_[0-9]*.pth"), reverse=True)
    return [folder / FINAL, *numbered] if (folder / FINAL).is_file() else numbered


def newest(output_dir: str | Path, warn: Callable[[str], None] = print) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that reads whole; a damaged one is passed over with a warning. None: there is none.

    Raises:
        UserError: every one is damaged, or the newest cannot be read for another reason than damage.
    """
    damaged = 0
    for path in all_in(output_dir):
        try:
            return path, read(path)
        except Damaged as error:
            damaged += 1
            warn(f"{error}; falling back to the checkpoint before it")
    if damaged:
        raise UserError(f"every checkpoint in {output_dir} is damaged; start again in another OUTPUT_DIR")
    return None


def resolve(path: str | Path, warn: Callable[[str], None] = print) -> Path:
    """A run folder's newest good checkpoint, or a file itself.

    Raises:
        UserError: nothing there, or a folder without a checkpoint.
    """
    path = Path(path)
    if not os.path.isdir(path):
        return existing_file(path, "run folder or checkpoint")
    found = newest(path, warn)
    if found is None:
        raise UserError(f"{path} holds no checkpoint_*.pth; name a run folder of pretraining or a checkpoint file")
    return found[0]


def prune(output_dir: str | Path, keep: int, saved: Path) -> None:
    """Removes all numbered checkpoints but the ``keep`` newest up to the one just ``saved``.

    Newer ones are damaged: the run fell back to an earlier one, which ``saved`` continues.
    """
    numbered = sorted(Path(output_dir).glob("checkpoint_[0-9]*.pth"), reverse=True)
    kept = [path for path in numbered if path.name <= saved.name][:keep]
    for path in set(numbered) - set(kept):
        path.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
