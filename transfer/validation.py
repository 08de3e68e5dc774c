"""The training's losses on test images, for both engines (TEST.LOSS)."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from pretrain.common.errors import UserError
from pretrain.common.process_group import on_every_rank

from .distributed import until_stopped
from .stream import mix


def config(cfg: CfgNode, world: int) -> CfgNode:
    """``cfg`` as if it trained on the first data set of DATASETS.TEST: an image per process, as a test resizes it."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST[:1]
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (cfg.INPUT.MIN_SIZE_TEST,), cfg.INPUT.MAX_SIZE_TEST
    cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING, cfg.INPUT.RANDOM_FLIP, cfg.INPUT.CROP.ENABLED = "choice", "none", False
    cfg.SOLVER.IMS_PER_BATCH, cfg.DATALOADER.SAMPLER_TRAIN = world, "TrainingSampler"
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = False
    return cfg


def refuse_unusable(cfg: CfgNode, world: int, read: Callable[[CfgNode], Any]) -> None:
    """Raises UserError, before the first iteration, if losses cannot be measured on a rank's test images.

    Args:
        read: the training data of a config.
    """
    try:
        on_every_rank(lambda: read(config(cfg, world)))
    except UserError as error:
        raise UserError(f"TEST.LOSS cannot be measured: {error}") from error


@torch.no_grad()
def losses(
    model: Callable[[Any], dict[str, Tensor]], network: nn.Module, batches: Iterable[Any], images: int, *, seed: int,
    rank: int, world: int,
) -> dict[str, float]:  # fmt: skip
    """``{"val_total_loss": ..., "val_loss_cls": ...}``: means over the images; the same on every rank.

    Batch norm uses its running statistics, which stay as they are. Where the images are no multiple of the processes,
    the remaining ones are left out.

    Args:
        model: a batch -> its losses in training mode.
        network: whose modes are changed meanwhile.
        batches: of `config`'s, endless, each image once before one comes again.
        images: in the data set.

    Raises:
        Stopped: a stop was requested on one of the ranks.
    """
    sums: dict[str, Tensor | float] = defaultdict(float)
    count = max(1, images // world)
    torch.manual_seed(mix(seed, 0, rank))  # of the proposals that are sampled
    with _learning_without_statistics(network):
        for _, batch in zip(range(count), until_stopped(batches), strict=False):
            for name, loss in model(batch).items():
                sums[name] = sums[name] + loss.double() / count
    stacked = torch.stack([torch.as_tensor(value) for value in sums.values()])
    if world > 1:
        dist.all_reduce(stacked)
        stacked /= world
    found = dict(zip(sums, stacked.tolist(), strict=True))
    return {"val_total_loss": sum(found.values()), **{f"val_{name}": value for name, value in found.items()}}


@contextlib.contextmanager
def _learning_without_statistics(network: nn.Module) -> Iterator[None]:
    """In training mode, except for batch norms, whose running statistics would be changed."""
    modes = {module: module.training for module in network.modules()}
    network.train()
    for module in modes:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
