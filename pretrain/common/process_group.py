"""The device and process group of one rank, from the environment that torchrun and submitit set."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from .errors import UserError


def join(cuda: bool) -> torch.device:
    """This process's device; joins the process group of the environment, where WORLD_SIZE is above 1.

    Reads WORLD_SIZE, LOCAL_RANK and, through torch, RANK, MASTER_ADDR and MASTER_PORT.

    Args:
        cuda: one GPU a process and nccl; else the CPU and gloo.

    Raises:
        UserError: more processes on this machine than GPUs.
    """
    device = torch.device("cpu")
    if cuda:
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count > 1:
            raise UserError(f"local rank {local} but {count} GPUs are visible; start at most {count} processes a node")
        device = torch.device("cuda", local if local < count else 0)  # SLURM may show each task only its own
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=30))
    return device
