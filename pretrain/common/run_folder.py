"""What every run folder holds, written so that a crash leaves the old file or the new one, never half of either."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import UserError

_PACKAGES = (
    "torch",
    "torchvision",
    "detectron2",
    "fvcore",
    "submitit",
    "pycocotools",
    "opencv-python-headless",
    "timm",
)


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Writes a whole file or nothing: temporary file beside it, fsync, rename.

    Raises:
        UserError: the disk is full or the folder is not writable; an earlier file at ``path`` is untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only disk, or below a file, this fails as well
            temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def make_folder(path: str | Path) -> None:
    """Makes a folder and those above it.

    Raises:
        UserError: the disk is read-only, or a file stands in the way.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(Path(path), error) from error


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON with NaN and infinities as null (JSON has no word for them)."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: str | Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically; NaN becomes null."""
    atomic_write(path, json_text(value, indent=2) + "\n")


class MetricsWriter:
    """`metrics.json` (a JSON object a line, as Detectron2 writes it) and TensorBoard events.

    Lines at or after ``start_iteration`` are dropped on opening, so a resumed run repeats none.
    """

    def __init__(self, output_dir: str | Path, start_iteration: int = 0) -> None:
        self._path = Path(output_dir) / "metrics.json"
        kept = [line for line in _lines(self._path) if line["iteration"] < start_iteration]
        atomic_write(self._path, "".join(json_text(line) + "\n" for line in kept))
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import: only by a run

        self._events = SummaryWriter(str(output_dir), purge_step=start_iteration)

    def write(self, iteration: int, values: Mapping[str, float | int | str]) -> None:
        """Appends one line; numbers go to TensorBoard too. ``iteration`` counts optimiser steps from 0."""
        try:
            with open(self._path, "a") as file:
                file.write(json_text({"iteration": iteration, **values}) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; free space and run again to resume"
            ) from error
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._events.add_scalar(name, value, iteration)

    def holds(self, iteration: int, name: str) -> bool:
        """True if a line of ``iteration`` has ``name``."""
        return any(line["iteration"] == iteration and name in line for line in _lines(self._path))

    def close(self) -> None:
        self._events.close()


def setup_logging(output_dir: str | Path, rank: int = 0, name: str = "pretrain") -> logging.Logger:
    """A logger to standard output and `log.txt` (rank 0) or `log.txt.rank<r>` (warnings of the others).

    Raises:
        UserError: the folder cannot be made or written to.
    """
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    form = logging.Formatter("[%(asctime)s] %(message)s", datefmt="%m/%d %H:%M:%S")
    path = Path(output_dir) / ("log.txt" if rank == 0 else f"log.txt.rank{rank}")
    try:
        make_folder(path.parent)
        file = logging.FileHandler(path, delay=rank > 0)
    except OSError as error:
        raise _cannot_write(path, error) from error
    handlers: list[logging.Handler] = [file, logging.StreamHandler(sys.stdout)] if rank == 0 else [file]
    for handler in handlers:
        handler.setFormatter(form)
        handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.addHandler(handler)
    return logger


def write_environment(output_dir: str | Path) -> None:
    """`environment.txt`: command line, git commit, versions, host and devices of this process."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [
        f"command: {shlex.join(sys.argv)}",
        f"git: {_git_state()}",
        f"host: {platform.node()} ({platform.platform()}, {os.cpu_count()} CPUs)",
        f"devices: {', '.join(devices) or 'cpu'}",
        f"python: {platform.python_version()}",
        *(f"{name}: {_version(name)}" for name in _PACKAGES),
        *(
            f"{key}={os.environ[key]}"
            for key in sorted(os.environ)
            if key.startswith(("SLURM_JOB", "SLURM_NNODES", "CUDA_VISIBLE"))
        ),
    ]
    atomic_write(Path(output_dir) / "environment.txt", "\n".join(lines) + "\n")


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {path}: {error.strerror or error}; free space or choose another folder")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_state() -> str:
    root = Path(__file__).resolve().parents[2]
    if (root / "GIT_STATE").is_file():  # a queued job's copy of the code says what it is a copy of
        return (root / "GIT_STATE").read_text().strip()
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if commit.returncode:
        return "not a git checkout"
    return commit.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[dict[str, Any]]:
    """The good lines of a metrics file; a last line cut short by a crash is dropped."""
    kept: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict) and "iteration" in value:
            kept.append(value)
    return kept
