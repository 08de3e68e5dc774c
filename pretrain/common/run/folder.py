"""Run folders: which stage a folder belongs to, and the environment of a run."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import UserError, count_noun, shorten_list
from ..files import atomic_write
from . import file_names
from .state import read_state

_FILES_OF_STAGES = (
    file_names.CONFIG,
    file_names.ENVIRONMENT,
    file_names.EVENTS,
    file_names.LOG,
    file_names.METRICS,
    file_names.RESULTS,
    file_names.VIEWS,
)
CODE = ("pretrain", "transfer", "tools", "configs")  # other files, such as a pipeline of yours, are no edits
_GIT_TIMEOUT_S = 60.0  # for a checkout on a file server under load
_PACKAGES = "torch torchvision detectron2 fvcore submitit pycocotools opencv-python-headless timm"


def check_stage_of(output_dir: str | Path, stage: str) -> None:
    """Raise UserError if a folder belongs to a stage other than ``stage``, or contains another program's files."""
    earlier = read_stage(output_dir)
    if not earlier:
        check_no_foreign_files(
            output_dir, (*_FILES_OF_STAGES, f"{stage}.csv", f"{stage}.png"), file_names.LAUNCH, "OUTPUT_DIR"
        )
    elif earlier != stage:
        raise UserError(f"{output_dir} belongs to the {earlier} stage, not to {stage}; choose another OUTPUT_DIR")


def check_no_foreign_files(folder: str | Path, patterns: Iterable[str], marker: str, option: str) -> None:
    """Raise UserError if a folder has files of these names, but no ``marker``, which the launcher writes."""
    files = sorted(path.name for pattern in patterns for path in Path(folder).glob(pattern))
    if files and not (Path(folder) / marker).exists():
        contents = f"{shorten_list(files)} of another program, or of an earlier version of this one"
        raise UserError(f"{folder} contains {contents}; choose another {option}")


def read_stage(output_dir: str | Path) -> str:
    """Return the stage that a run folder belongs to; empty if no stage was started there."""
    return read_state(output_dir).get("stage", "")


def find_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints in a run folder of any stage, in no order; whether they can be read only torch knows."""
    patterns = (file_names.CHECKPOINTS, file_names.DETECTORS)
    return [path for pattern in patterns for path in Path(output_dir).glob(pattern)]


def write_environment(output_dir: str | Path) -> None:
    """Write `environment.txt` (command line, commit, versions, host, devices); a resumed run adds another block."""
    import torch

    # Where the driver is too old for torch, devices are counted but have no names.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_name(i) for i in range(count)]
    variables = ("SLURM_JOB", "SLURM_NNODES", "CUDA_VISIBLE", "NCCL_", "TORCH_DIST_USE_NCCL2", "P2T_")
    path = Path(output_dir) / file_names.ENVIRONMENT
    earlier = f"{path.read_text(errors='replace')}\n" if path.is_file() else ""
    lines = [
        f"started: {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"command: {shlex.join(sys.argv)}",
        f"git: {read_git_state()}",
        f"host: {platform.node()} ({platform.platform()}, {count_noun(os.cpu_count() or 1, 'CPU')})",
        f"devices: {', '.join(devices) or 'cpu'}",
        *(_describe_cuda() if devices else []),
        f"threads: {torch.get_num_threads()}",
        f"python: {platform.python_version()}",
        *(f"{name}: {_find_version(name)}" for name in _PACKAGES.split()),
        *(f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(variables)),
    ]
    atomic_write(path, earlier + "\n".join(lines) + "\n")


def _describe_cuda() -> list[str]:
    """Return lines with what numbers and speed on GPUs depend on: driver, libraries and precision of float32."""
    import torch
    from torch.cuda import nccl

    driver = Path("/proc/driver/nvidia/version")
    nccl_version = ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return [
        f"driver: {driver.read_text().splitlines()[0] if driver.is_file() else 'unknown'}",
        f"cuda: {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl_version}",
        f"tf32: convolutions {torch.backends.cudnn.allow_tf32}, "
        f"matrix products {torch.backends.cuda.matmul.allow_tf32}",
    ]


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def read_git_state(folders: Sequence[str] = CODE) -> str:
    """Return the commit of the running code, and whether files in ``folders`` were edited since.

    A copy without .git, such as the launcher's for a queued job, has it in a file: GIT_STATE.
    """
    root = Path(__file__).resolve().parents[3]
    if (root / "GIT_STATE").is_file() and not (root / ".git").exists():
        return (root / "GIT_STATE").read_text().strip()
    options: Any = {"cwd": root, "capture_output": True, "text": True, "timeout": _GIT_TIMEOUT_S}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **options)
        if commit.returncode:
            return "not a git checkout"
        changed = subprocess.run(["git", "status", "--porcelain", "--", *folders], **options)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return commit.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")
