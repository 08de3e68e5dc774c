"""Environment of a measurement: processor, threads, commit and versions."""

import contextlib
import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from pretrain.common.gpus import read_output
from pretrain.common.run.folder import CODE, read_git_state


def describe_environment(*packages: str) -> dict[str, Any]:
    """Return processor, threads, commit and versions, including those of ``packages``, for the JSON of a benchmark."""
    names = ["torch", "torchvision", "numpy", "pillow", *packages]
    names += ["detectron2"] if importlib.util.find_spec("detectron2") else []
    return {
        "cpu": read_processor(),
        "cpus": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "git": read_git_state((*CODE, "benchmarks")),
        **{name: metadata.version(name) for name in names},
    }


def describe_gpu() -> dict[str, Any]:
    """Return the first GPU's name, memory and driver, and the versions of the libraries that compute on it."""
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    driver = read_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "gpu_mib": properties.total_memory // 2**20,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver.strip() or "unknown",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl.version())),
    }


def read_processor() -> str:
    """Return the model of this machine's processor."""
    with contextlib.suppress(OSError):  # the platform module does not know the model on Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
