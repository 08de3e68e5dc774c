"""The process group of a run: how a rank joins it, on which device, and how it leaves it.

It comes from the environment that torchrun or the launcher sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT).
"""

import atexit
import contextlib
import datetime
import hashlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..config import extensions
from ..device import can_use_gpus, check_gpu_is_own, choose_gpu
from ..distributed import world_size
from ..errors import UserError, first_line
from ..interrupt import Stopped
from .agreement import check_agreement
from .environment import read_world_size
from .meeting import heartbeat

TIMEOUT_S = 1800.0  # for one collective up to the end of the first step, before which a rank may compile
STEP_TIMEOUT_S = 300.0  # for one collective afterwards; longer waits are meetings
P = ParamSpec("P")
T = TypeVar("T")


def init_process_group(device_name: str = "auto", key: str = "DEVICE", rendezvous_s: float = 300.0) -> torch.device:
    """Join the process group that the environment names, if WORLD_SIZE is above 1, and return this rank's device.

    Args:
        device_name: auto (CUDA if available, with one GPU per process), cpu or cuda.
        key: the config key of the device, for errors.
        rendezvous_s: how long to wait until all processes of the run have found each other.

    Raises:
        UserError: no CUDA device, more processes on this machine than GPUs, or ranks that run different code.
    """
    is_cuda = device_name != "cpu" and can_use_gpus(key)
    if device_name == "cuda" and not is_cuda:
        raise UserError(f"{key} is cuda, but torch sees no CUDA device; set {key} cpu or auto")
    device = choose_gpu() if is_cuda else torch.device("cpu")
    torch.backends.cudnn.benchmark = is_cuda  # sizes do not change, so the search pays off
    if read_world_size() > 1 and not dist.is_initialized():
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        rendezvous = _rendezvous(rendezvous_s)
        rendezvous["store"].set_timeout(timeout)
        if is_cuda:
            check_gpu_is_own(device, **rendezvous)
        backend = "nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, timeout=timeout, device_id=device if is_cuda else None, **rendezvous)
        check_agreement((torch.__version__, compute_code_digest()), "(torch's version, digest of the code)")
    return device


def _rendezvous(timeout_s: float) -> dict[str, Any]:
    """Wait for the other ranks; return the shared store, this rank and the number of ranks."""
    host = os.environ.get("MASTER_ADDR")
    address = f"{host}:{os.environ.get('MASTER_PORT')}"
    try:
        socket.getaddrinfo(host, None)  # the store would retry an unknown host until its time-out
        store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
        return {"store": store, "rank": rank, "world_size": size}
    except (OSError, dist.DistError) as error:
        problem = f"the processes of this run cannot connect to each other at {address} ({first_line(error)})"
        remedy = "export a MASTER_ADDR that all machines reach and a free MASTER_PORT (SLURM: in the site file's setup)"
        raise UserError(f"{problem}; {remedy}") from error


def compute_code_digest() -> str:
    """Return 8 hexadecimal digits of the source of both stages and of extensions: a machine may have an older copy."""
    root = Path(__file__).resolve().parents[3]
    files = [path for stage in ("pretrain", "transfer") for path in (root / stage).rglob("*")]
    sources = sorted(path for path in files if path.suffix in (".py", ".yaml", ".txt"))  # defaults are in YAML
    content = b"".join(path.read_bytes() for path in (*sources, *extensions.sources()))
    return hashlib.sha256(content).hexdigest()[:8]


def shorten_timeout() -> None:
    """Let collectives time out after STEP_TIMEOUT_S from now on; every loop calls it after its first step."""
    if world_size() > 1:
        set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # torch 2.14 and earlier
        set_timeout(datetime.timedelta(seconds=STEP_TIMEOUT_S))


@contextlib.contextmanager
def enter_process_group(folder: str | Path, join: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
    """Call ``join``, yield its result, and leave the process group that it joined, if any, when the block ends.

    All ranks leave together unless there was an error; a group that the caller had joined before is not left. If a
    collective times out, nccl writes each rank's last collectives into ``folder`` (`_record_collectives`).

    The exit of the first rank would end the others, which may be about to write. After an error the group is left only
    at exit: the other ranks wait for this one, and would report a lost connection before this one reports its error.
    """
    if dist.is_initialized():
        result = join(*args, **kwargs)
        with heartbeat():
            yield result
        return
    if read_world_size() > 1:
        _record_collectives(Path(folder))
    try:
        result = join(*args, **kwargs)
        with heartbeat() if dist.is_initialized() else contextlib.nullcontext():
            yield result
    except Stopped:  # all ranks have agreed on it
        leave()
        raise
    except BaseException as error:
        atexit.register(_abandon, 2 if isinstance(error, UserError) else 1)
        raise
    leave()


def _record_collectives(folder: Path) -> None:
    """Switch on torch's flight recorder, whose files torchfrtrace reads, unless the user has set it up."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # the name before torch 2.9, which is still read
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "nccl_trace_rank_"))


def leave() -> None:
    """Wait for the other ranks and leave the process group, if any."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.1)  # gloo's threads need the GIL to free their tensors; DDP's destructor joins them and holds it
        dist.destroy_process_group()


def _abandon(status: int) -> None:
    """Leave the process group at exit, after an error on this rank.

    With nccl the process exits here with ``status``: destroying or aborting the group may wait for the other ranks,
    which wait for this one in a collective. They end when this process exits.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        for worker in multiprocessing.active_children():
            worker.kill()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)
    if dist.is_initialized():
        dist.destroy_process_group()
