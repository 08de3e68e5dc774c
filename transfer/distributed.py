"""What both engines do alike with several processes: join the group, agree on batch-norm statistics."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode

from pretrain.common import process_group
from pretrain.common.errors import UserError


def join(device_name: str) -> torch.device:
    """This process's device; joins the process group of the environment (RANK, WORLD_SIZE, MASTER_ADDR, ...), if any.

    Args:
        device_name: MODEL.DEVICE; cuda means the CPU where there is no GPU.

    Raises:
        UserError: no such device, one GPU of several by its number, or more processes on this machine than GPUs.
    """
    kind, _, number = device_name.partition(":")
    if kind not in ("cpu", "cuda"):
        raise UserError(f"MODEL.DEVICE is {device_name}; choose cpu or cuda")
    if number:
        raise UserError(f"MODEL.DEVICE is {device_name}; say {kind}, and choose by CUDA_VISIBLE_DEVICES={number}")
    return process_group.join(kind == "cuda" and torch.cuda.is_available())


def check_unused(out: Path) -> None:
    """Raises UserError where OUTPUT_DIR has a checkpoint or a line of metrics."""
    metrics = out / "metrics.json"
    if (out / "last_checkpoint").exists() or (metrics.exists() and metrics.stat().st_size > 0):
        raise UserError(f"OUTPUT_DIR {out} holds an earlier run; add --resume to go on with it, or name another folder")


def check_not_beyond(cfg: CfgNode, done: int) -> None:
    """Raises UserError where a run to be resumed has done more iterations than SOLVER.MAX_ITER."""
    if done > cfg.SOLVER.MAX_ITER:
        raise UserError(
            f"SOLVER.MAX_ITER is {cfg.SOLVER.MAX_ITER}, but {cfg.OUTPUT_DIR} has done {done} iterations; raise it, or "
            "choose another OUTPUT_DIR"
        )


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
