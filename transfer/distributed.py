"""What both engines do alike with several processes: join the group, agree on batch-norm statistics."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from pretrain.common.errors import UserError


def join(device_name: str, world: int) -> torch.device:
    """This process's device; joins the process group of the environment (RANK, MASTER_ADDR, ...) where ``world`` > 1.

    Args:
        device_name: MODEL.DEVICE; cuda means the CPU where there is no GPU.

    Raises:
        UserError: more processes on this machine than GPUs.
    """
    cuda = device_name.startswith("cuda") and torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count > 1:
            raise UserError(f"local rank {local} but {count} GPUs are visible; start at most {count} processes a node")
        device = torch.device("cuda", local if local < count else 0)  # SLURM may show each task only its own
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=30))
    return device


def shared_seed(configured: int, world: int) -> int:
    """SEED, or a random one that all processes share where it is negative."""
    seed = configured if configured >= 0 else int.from_bytes(os.urandom(4), "little")
    if world == 1:
        return seed
    box = [seed]
    dist.broadcast_object_list(box)
    return box[0]


@torch.no_grad()
def pool_batch_norm(norms: Iterable[torch.nn.Module]) -> None:
    """Replaces running means and variances by those of all ranks' images together, in place.

    The pooled variance is the mean of variances plus the variance of means (law of total variance).
    """
    for norm in norms:
        mean, var = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        moments = torch.stack([mean.double(), var.double() + mean.double() ** 2])
        dist.all_reduce(moments)
        moments /= dist.get_world_size()
        mean.copy_(moments[0])
        var.copy_(moments[1] - moments[0] ** 2)
