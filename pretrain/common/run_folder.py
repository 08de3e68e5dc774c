"""What every run folder holds, written so that a crash leaves the old file or the new one, but never a part of it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from .errors import UserError, escape_unprintable, first_line, one_line, printable, shortlist

FAILED = "failed.txt"  # the error that ended the folder's last start, until the next one
_PRODUCTS = "config.yaml environment.txt events.out.tfevents.* failed.txt log.txt metrics.json results.json views.png"
_GIT_TIMEOUT_S = 60.0  # for a checkout on a file server under load
_PACKAGES = (
    "torch", "torchvision", "detectron2", "fvcore", "submitit", "pycocotools", "opencv-python-headless", "timm",
)  # fmt: skip


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Writes a file completely or not at all (see `replacing`); UserError if it cannot be written."""
    with writing(path), replacing(path) as file:
        # The text may hold a path, which need not be UTF-8.
        file.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


@contextlib.contextmanager
def writing(path: str | Path, resume: bool = False) -> Iterator[None]:
    """Surrounds what writes or removes ``path``: UserError (see `cannot_write`) in the place of OSError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, resume) from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write that replaces ``path`` when the block ends; after an error nothing has changed.

    It has the suffix of ``path`` and lies next to it, under a name that no other process, thread or machine uses. File
    and folder are synced, so that a power cut leaves the old file or the new one.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp{path.suffix}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # on a read-only disk this fails too
            temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: str | Path, kind: type = dict) -> Any:
    """The JSON object in a file, with ``kind`` list the array; UserError if there is none that can be read."""
    try:
        value = json.loads(Path(path).read_bytes())  # in UTF-8, 16 or 32, with or without a byte-order mark
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise UserError(f"{path} is not JSON ({first_line(error)}); restore it, or save it as UTF-8") from error
    if not isinstance(value, kind):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not a {kind.__name__}; it is the wrong file")
    return value


def check_stage_of(output_dir: str | Path, stage: str) -> None:
    """Raises UserError if a folder belongs to another stage than ``stage``, or holds files of another program."""
    earlier = stage_of(output_dir)
    if not earlier:
        check_free(output_dir, (*_PRODUCTS.split(), f"{stage}.csv", f"{stage}.png"), "launch", "OUTPUT_DIR")
    if earlier and earlier != stage:
        raise UserError(f"{output_dir} is the run folder of {earlier}, not of {stage}; choose another OUTPUT_DIR")


def check_free(folder: str | Path, patterns: Iterable[str], marker: str, option: str) -> None:
    """Raises UserError if a folder has files of these names, but no ``marker``, which the launcher makes."""
    files = sorted(path.name for pattern in patterns for path in Path(folder).glob(pattern))
    if files and not (Path(folder) / marker).exists():
        raise UserError(f"{folder} holds {shortlist(files)} of another program; choose another {option}")


def stage_of(output_dir: str | Path) -> str:
    """The stage a run folder belongs to; empty: none so far."""
    path = Path(output_dir) / "stage.txt"
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def make_folder(path: str | Path) -> None:
    """Makes a folder and its parents; UserError if that is not possible."""
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)


def usable_cores() -> int:
    """The CPU cores that this process may use; macOS does not limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON with NaN and infinities as null (JSON cannot express them)."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: str | Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically; NaN becomes null."""
    atomic_write(path, json_text(value, indent=2) + "\n")


def setup_logging(output_dir: str | Path, rank: int = 0, name: str = "pretrain") -> logging.Logger:
    """A logger to standard output and `log.txt` (rank 0) or `log.txt.rank<r>` (warnings of the others)."""
    logging.raiseExceptions = False  # a full disk would cost a traceback per line; the run's own files name it
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    form = _Printable("[%(asctime)s] %(message)s", datefmt="%m/%d %H:%M:%S")
    path = Path(output_dir) / ("log.txt" if rank == 0 else f"log.txt.rank{rank}")
    make_folder(path.parent)
    with writing(path):
        file = logging.FileHandler(path, encoding="utf-8", delay=rank > 0, errors="backslashreplace")
    escape_unprintable()
    handlers: list[logging.Handler] = [file, logging.StreamHandler(sys.stdout)] if rank == 0 else [file]
    for handler in handlers:
        handler.setFormatter(form)
        handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.addHandler(handler)
    return logger


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """The line or lines of a record; names of images and keys come from files."""
        return printable(super().format(record))


def write_environment(output_dir: str | Path) -> None:
    """`environment.txt`: command line, commit, versions, host, devices, threads; a resumed run adds another block."""
    import torch

    # Where the driver is too old for torch, devices are counted but have no names.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_name(i) for i in range(count)]
    path = Path(output_dir) / "environment.txt"
    earlier = f"{path.read_text(errors='replace')}\n" if path.is_file() else ""
    lines = [
        f"started: {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"command: {shlex.join(sys.argv)}",
        f"git: {git_state()}",
        f"host: {platform.node()} ({platform.platform()}, {os.cpu_count()} CPUs)",
        f"devices: {', '.join(devices) or 'cpu'}",
        f"threads: {torch.get_num_threads()}",
        f"python: {platform.python_version()}",
        *(f"{name}: {_version(name)}" for name in _PACKAGES),
        *(
            f"{key}={os.environ[key]}"
            for key in sorted(os.environ)
            if key.startswith(("SLURM_JOB", "SLURM_NNODES", "CUDA_VISIBLE", "P2T_"))
        ),
    ]
    atomic_write(path, earlier + "\n".join(lines) + "\n")


def cannot_write(path: str | Path, error: OSError, resume: bool = False) -> UserError:
    """The one line about a file that could not be written.

    Args:
        resume: the run is under way and should continue in this folder instead of starting in another one.
    """
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if resume:
        remedy = f"{'free space' if is_full else 'make the folder writable'} and run again to resume"
    else:
        remedy = f"{'free space or ' if is_full else ''}choose another folder"
    return UserError(f"cannot write {path}: {error.strerror or one_line(error)}; {remedy}")


def remove(path: str | Path) -> None:
    """Removes a file of a run, which may be gone already; UserError if the disk fails."""
    with writing(path, resume=True):
        Path(path).unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Raises UserError unless a file can be made at ``path``, with the folders above it: it is written much later."""
    path = Path(path)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; name a file in it")
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    with writing(path):
        tempfile.TemporaryFile(dir=folder).close()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def git_state() -> str:
    """The commit of the code that runs, and whether it was edited since."""
    root = Path(__file__).resolve().parents[2]
    if (root / "GIT_STATE").is_file():  # a queued job runs a copy of the code, made by the launcher
        return (root / "GIT_STATE").read_text().strip()
    options: Any = {"cwd": root, "capture_output": True, "text": True, "timeout": _GIT_TIMEOUT_S}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **options)
        if commit.returncode:
            return "not a git checkout"
        changed = subprocess.run(["git", "status", "--porcelain"], **options)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return commit.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
