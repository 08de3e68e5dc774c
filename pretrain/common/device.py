"""The device of a run: GPUs, precision, memory layout, errors of torch, and copies that do not wait for the device."""

import contextlib
import os
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ProcessLost, UserError, count_noun, first_line

# Variables that name a job's GPUs, and their values if it has none; the first that is set decides. SLURM also writes
# NoDevFiles for GPUs that it counts without having their device files.
_GPU_VARIABLES = {"CUDA_VISIBLE_DEVICES": ("NoDevFiles",), "SLURM_GPUS_ON_NODE": ("", "0"), "SLURM_JOB_GPUS": ("",)}


def can_use_gpus(key: str) -> bool:
    """Return whether torch can use a GPU.

    Args:
        key: the config key that chooses the device, for the remedy.

    Raises:
        UserError: this process was given GPUs that torch cannot use: they would idle while it trains on CPUs.
    """
    if torch.cuda.is_available():
        return True
    values = {name: os.environ.get(name, unset[0]) for name, unset in _GPU_VARIABLES.items()}
    name = next((name for name, value in values.items() if value not in _GPU_VARIABLES[name]), "")
    if not name or values[name] in ("", "-1"):  # there are none, or the user hides them
        return False
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # the former where torch was built without CUDA
        reason = first_line(error).partition(". ")[0]
        problem = f"{name}={values[name]} gives this process GPUs that torch {torch.__version__} cannot use ({reason})"
        remedy = f"check the driver (nvidia-smi) and the container's --nv or --gpus all, or set {key} cpu"
        raise UserError(f"{problem}; {remedy}") from error
    return True


def choose_gpu() -> torch.device:
    """Select this process's GPU; raise UserError if there are more processes on this machine than GPUs."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    is_slurm = os.environ.get("SLURM_LOCALID") == str(local_rank)  # it may hide other tasks' GPUs (--gpu-bind)
    if local_rank >= count and not is_slurm:
        limit = count_noun(count, "process", "processes")
        raise UserError(f"local rank {local_rank} sees {count_noun(count, 'GPU')}; start at most {limit} per machine")
    device = torch.device("cuda", local_rank % count)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        remedy = "nvidia-smi shows who uses it; CUDA_VISIBLE_DEVICES chooses another one"
        raise UserError(f"GPU {device.index} cannot be used ({first_line(error)}); {remedy}") from error
    return device


def check_gpu_is_own(device: torch.device, store: dist.Store, rank: int, world_size: int) -> None:
    """Raise UserError on every rank if two have the same GPU: nccl would fail without naming them."""
    gpu = f"{torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}"
    store.set(f"gpu/{rank}", gpu)
    owners: dict[str, int] = {}
    for other in range(world_size):
        first = owners.setdefault(store.get(f"gpu/{other}").decode(), other)
        if first != other:
            problem = f"ranks {first} and {other} have the same GPU"
            raise UserError(f"{problem}; request one GPU per process (on SLURM as many --gpus-per-node as tasks)")


def autocast(amp: str, device_type: str) -> torch.autocast:
    """Return the context of SOLVER.AMP's precision: none | bf16 | fp16 (for GPUs without bf16).

    Raises:
        UserError: the GPU has no bf16.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp)
    if dtype == torch.bfloat16:
        check_bfloat16(device_type, "set SOLVER.AMP fp16 or none")
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


def check_bfloat16(device_type: str, remedy: str) -> None:
    """Raise UserError if this process's GPU has no bfloat16: torch emulates some of it, and cuDNN no convolution."""
    if device_type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise UserError(f"{name} has no bfloat16, which GPUs have from compute capability 8.0 (A100) on; {remedy}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch, CUDA, one of its libraries or NCCL raised ``error`` because memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return any(phrase in text for phrase in ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED"))


@contextlib.contextmanager
def translate_torch_errors(memory_remedy: str = "") -> Iterator[None]:
    """Raise UserError for what torch raises when memory runs out or another rank is lost.

    Args:
        memory_remedy: what to do if memory runs out: which keys to set.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = first_line(error)
        if is_out_of_memory(error):
            raise UserError(_describe_lack_of_memory(error, memory_remedy or "use smaller images")) from error
        if "Failed to find C compiler" in str(error):  # Triton's, which torch.compile calls
            remedy = "install gcc and Python's header files (python3-dev), or set SOLVER.COMPILE False"
            raise UserError(f"torch.compile found no C compiler; {remedy}") from error
        if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in text):
            remedy = "its own output shows the cause; run again to resume"
            raise ProcessLost(f"another process of this run has ended or hangs ({text}); {remedy}") from error
        raise


def _describe_lack_of_memory(error: BaseException, remedy: str) -> str:
    """Describe an error of `is_out_of_memory` by its line that says so; NCCL's is the last of several.

    Args:
        remedy: which keys to set for the memory of the device to suffice.
    """
    line = next((line for line in str(error).splitlines() if "memory" in line), first_line(error))
    is_on_host = isinstance(error, MemoryError) or "can't allocate memory" in line or "pin memory" in line
    return f"memory ran out: {line}; {remedy}{', or lower DATALOADER.NUM_WORKERS' if is_on_host else ''}"


def choose_memory_format(amp: str, device_type: str) -> torch.memory_format:
    """Return the memory format of weights and images: channels_last for half precision on a GPU.

    Tensor cores read half precision in that layout; with the other one, each convolution would convert its tensors.
    """
    return torch.channels_last if device_type == "cuda" and amp != "none" else torch.contiguous_format


def set_float32_precision(precision: str) -> None:
    """Apply FLOAT32_PRECISION as Detectron2 does: highest turns TF32 off, high and medium turn it on.

    An empty string keeps torch's defaults, TF32 for convolutions and not for matrix products.
    """
    if precision:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"


def describe(device: torch.device) -> str:
    """Describe what a run computes on, for its log: ``device cuda:0 (NVIDIA H100), 8 processes, backend nccl``."""
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    if not dist.is_initialized():
        return f"device {device}{name}, 1 process"
    return f"device {device}{name}, {dist.get_world_size()} processes, backend {dist.get_backend()}"


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device`` from pinned memory: from other memory, the copy would wait for the device."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


class AsyncHostCopy:
    """A copy to the host of a small tensor, to be read later: reading it now would wait for the device."""

    def __init__(self, x: Tensor) -> None:
        self._host = x.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if x.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def read(self) -> Tensor:
        """Return the tensor on the host."""
        if self._arrived:
            self._arrived.synchronize()
        return self._host
