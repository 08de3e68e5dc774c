"""What a step minimizes: objectives with a queue, and objectives within the batch, built from the config.

Shape letters: M positive keys per image, N images of the global batch, n of this rank, D dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torchvision.models import ResNet

from .. import methods, schedule
from ..common import distributed
from ..common.backbone_file import read_backbone
from ..common.batch_split import MicroBatch, local_bn_groups, micro_batches
from ..common.config_io import get
from ..common.errors import UserError
from .encoder import build_encoder
from .queue import NegativeQueue
from .siamese import Embed, SiameseEncoder, embed

Method = Callable[..., methods.Objective]  # (tensors, step=...) -> the loss with the step's hyperparameters


@dataclass(frozen=True)
class _Objective:
    """What both kinds have."""

    encoder: ResNet  # the one that is trained
    query_forward: nn.Module  # the same, or its DistributedDataParallel
    embed: Embed
    method: Method
    batch_size: int  # N
    micro_batches: Sequence[MicroBatch]  # of this rank's batch
    bn_groups: int  # parts of the global batch with their own BN statistics; runs with equal results agree on it


@dataclass(frozen=True)
class InBatchObjective(_Objective):
    """Every view against the other views of the global batch: one encoder, no queue."""

    model: nn.ModuleDict  # ``encoder_q`` alone
    supervised: bool  # all images of one class are positives, not only the views of one image


@dataclass(frozen=True)
class QueueObjective(_Objective):
    """A query against keys of the momentum encoder and a queue of negatives."""

    model: SiameseEncoder
    momentum: Callable[[int], float]  # of the key encoder, by step
    dense_weight: Callable[[int], float]  # w of `with_dense`, by step
    ema_first: bool  # update the key encoder before the keys are encoded (MoCo), not after the step (SCE)
    seed: int  # of the shuffles


def build_objective(
    cfg: CfgNode, device: torch.device, steps_per_epoch: int, log: Callable[[str], None], read_weights: bool = True
) -> QueueObjective | InBatchObjective:
    """The objective of METHOD.NAME, with initial weights and queue that are the same on every rank.

    Args:
        log: called with a line for the log.
        read_weights: start from MODEL.WEIGHTS; a resumed run no longer needs that file.
    """
    torch.manual_seed(cfg.SEED)
    method, total = methods.METHODS[cfg.METHOD.NAME], cfg.SOLVER.IMS_PER_BATCH
    groups = local_bn_groups(
        total, cfg.MODEL.BN_GROUPS, method.kind == "queue", log, cfg.SOLVER.ACCUMULATE,
        rank=distributed.rank(), ranks=distributed.world_size(),
    )  # fmt: skip
    encoder = _build_query_encoder(cfg, device, groups, read_weights)
    if method.kind == "queue":
        size = (cfg.MODEL.EMBEDDING_DIM, cfg.MODEL.QUEUE_SIZE)
        negatives = NegativeQueue(*size)
        model = SiameseEncoder(encoder, negatives, NegativeQueue(*size) if cfg.METHOD.DENSE_WEIGHT else None)
    else:
        model = nn.ModuleDict({"encoder_q": encoder})
    memory_format = torch.channels_last if cfg.SOLVER.CHANNELS_LAST else torch.contiguous_format
    model.to(device).to(memory_format=cast(Any, memory_format)).train()
    if cfg.SOLVER.COMPILE:
        for name, child in model.named_children():
            if name.startswith("encoder"):
                child.compile()
    bound_embed = functools.partial(
        embed, mean=cfg.VIEWS.MEAN, std=cfg.VIEWS.STD, amp=cfg.SOLVER.AMP, memory_format=memory_format
    )

    def bound_method(*tensors: Tensor, step: int) -> methods.Objective:
        hyper = {keyword: get(cfg, hyperparameter.key) for keyword, hyperparameter in method.hyper.items()}
        if method.schedule:
            hyper = method.schedule(step // steps_per_epoch, cfg.SOLVER.EPOCHS, hyper)
        return method.objective(*tensors, **hyper)

    shared = (  # in the order of `_Objective`
        encoder, distributed.data_parallel(encoder, device), bound_embed, bound_method, total,
        micro_batches(groups, cfg.SOLVER.ACCUMULATE),
        1 if cfg.MODEL.BN_GROUPS == 1 else len(groups) * distributed.world_size(),
    )  # fmt: skip
    if not isinstance(model, SiameseEncoder):
        return InBatchObjective(*shared, model, supervised=cfg.METHOD.LABELS == "class")
    return QueueObjective(
        *shared, model, seed=cfg.SEED, ema_first=cfg.MODEL.EMA_UPDATE == "before_keys",
        momentum=lambda step: schedule.ema_momentum(
            step / (steps_per_epoch * cfg.SOLVER.EPOCHS), cfg.MODEL.EMA_MOMENTUM, cfg.MODEL.EMA_SCHEDULE
        ),
        dense_weight=lambda step: cfg.METHOD.DENSE_WEIGHT * (step >= cfg.METHOD.DENSE_WARMUP_STEPS),
    )  # fmt: skip


def _build_query_encoder(cfg: CfgNode, device: torch.device, groups: Sequence[int], read_weights: bool) -> ResNet:
    ranks, model = distributed.world_size(), cfg.MODEL
    encoder = build_encoder(
        model.ARCH, model.STEM, hidden_dims=model.HEAD_HIDDEN_DIMS, head_bn=model.HEAD_BN, dim=model.EMBEDDING_DIM,
        bn_groups=groups, dense=cfg.METHOD.DENSE_WEIGHT > 0,
    )  # fmt: skip
    if model.WEIGHTS and read_weights:
        source = read_backbone(model.WEIGHTS)
        if (source.arch, source.stem) != (model.ARCH, model.STEM):
            raise UserError(
                f"MODEL.WEIGHTS holds a {source.arch} with {source.stem} stem, but MODEL.ARCH is {model.ARCH} and "
                f"MODEL.STEM {model.STEM}"
            )
        encoder.load_state_dict(source.state_dict, strict=False)  # only heads are missing: read_backbone is strict
    if model.BN_GROUPS == 1 and ranks > 1:
        if device.type != "cuda":
            raise UserError(
                f"MODEL.BN_GROUPS is 1 with {ranks} processes: that is SyncBN, which torch has on GPUs only; start one "
                "process, or set MODEL.BN_GROUPS 0 (one per process)"
            )
        return cast(ResNet, nn.SyncBatchNorm.convert_sync_batchnorm(encoder))
    return encoder
