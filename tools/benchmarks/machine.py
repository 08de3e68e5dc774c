"""Environment of a measurement: processor, threads, commit and versions."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pretrain.common.run.folder import git_state


def describe_environment(packages: list[str], threads: int) -> dict[str, Any]:
    """Return processor, threads, commit and versions, including those of ``packages``, for the JSON of a benchmark."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "numpy", "pillow", *packages)}
    return {
        "cpu": read_processor(),
        "cpus": os.cpu_count(),
        "threads_per_process": threads,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "git": git_state(),
        **versions,
    }


def read_processor() -> str:
    """Return the model of this machine's processor."""
    with contextlib.suppress(OSError):  # the platform module does not know the model on Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
