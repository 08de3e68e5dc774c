"""The GPUs of this machine."""

import ctypes
import functools
import itertools
import os
import subprocess
import sys

from .errors import UserError, count_noun

# Without these, torch finds no GPU. NVIDIA's device files do not tell: the first program on the GPU may create them.
NVIDIA_DRIVER = "libcuda.so.1"
AMD_DEVICE = "/dev/kfd"
_NO_GPU = ("", "-1", "NoDevFiles")  # the last one is SLURM's in a job without GPUs


def list_visible_gpus() -> list[str]:
    """Return the GPUs a local job may use, in the form of CUDA_VISIBLE_DEVICES; torch is not imported here."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return [str(index) for index in range(_count_devices())]
    # CUDA ignores the names that follow one that no GPU has.
    return [*itertools.takewhile(lambda name: name not in _NO_GPU, map(str.strip, names.split(",")))]


def check_visible_gpus(option: str, count: int, on_cpus: str) -> None:
    """Raise UserError if an option asks for more GPUs than a local job may use.

    Args:
        on_cpus: what to do on a machine without GPUs.
    """
    visible = len(list_visible_gpus())
    if count > visible:
        problem = f"{option} is {count}, but this machine has {count_noun(visible, 'visible GPU')}"
        raise UserError(f"{problem}; {f'request at most {visible}' if visible else on_cpus}")


def name_visible_gpu() -> str:
    """Return the name of the first visible GPU, or nothing where torch cannot tell; torch is not imported here."""
    return read_output([sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]).strip()


def read_output(command: list[str]) -> str:
    """Return what a program prints, or nothing if it is not installed, fails or does not answer in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def _count_devices() -> int:
    """Ask torch in a separate process: nvidia-smi may be missing or fail where torch works.

    Without a driver, the answer is known, and importing torch takes seconds.
    """
    if not _has_driver():
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise UserError(f"torch cannot count the GPUs ({reason}); name them in CUDA_VISIBLE_DEVICES") from None


def _has_driver() -> bool:
    try:
        ctypes.CDLL(NVIDIA_DRIVER)  # loads the library, and does not initialize it
    except OSError:
        return os.path.exists(AMD_DEVICE)
    return True
