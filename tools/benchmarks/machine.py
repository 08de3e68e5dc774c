"""What a measurement was made with and on."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pretrain.common.run_folder import git_state


def about(packages: list[str], threads: int) -> dict[str, Any]:
    """Processor, threads, commit and versions, of ``packages`` too, for the JSON of a benchmark."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "numpy", "pillow", *packages)}
    return {"cpu": read_processor(), "cpus": os.cpu_count(), "threads_per_process": threads,
            "platform": platform.platform(), "python": platform.python_version(), "git": git_state(),
            **versions}  # fmt: skip


def read_processor() -> str:
    """The model of this machine's processor."""
    with contextlib.suppress(OSError):  # Python itself does not know it on Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
