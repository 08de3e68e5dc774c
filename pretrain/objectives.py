"""What a step computes and what follows it: objectives with a queue, and objectives within the batch.

SOLVER.ACCUMULATE divides a rank's batch into parts that go through the encoders one after the other. Loss and gradients
are those of the whole batch: the loss of a query needs no other query, and the parts of an objective within the batch
go through the encoder twice, first to find the embeddings of all (GradCache: Gao et al. 2021, Sec. 3.2).

Shape letters: V views, M positive keys per image, N images of the global batch, n of this rank, D dimensions; A anchors
of this rank, B candidates of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torchvision.models import ResNet

from . import distributed, methods, schedule
from .accumulate import Parts
from .common import process_group
from .common.backbone_file import load_backbone
from .common.config_io import get
from .common.copies import to_device
from .common.errors import UserError
from .encoder import build_encoder
from .loader import Batch
from .queue import NegativeQueue
from .shares import local_bn_groups
from .siamese import Embed, SiameseEncoder, embed

Loss = Callable[..., methods.Objective]  # (tensors, step) -> loss; an objective with the step's hyperparameters
Scale = Callable[[Tensor], Tensor]  # a loss -> what its gradients are of


class QueueObjective:
    """A query against keys of the momentum encoder and a queue of negatives.

    Args:
        model: both encoders and the queue.
        query_forward: ``model.encoder_q``, or its DistributedDataParallel.
        loss_of: (q_ND, keys_MND, queue_DK, step=...) -> the method's loss.
        momentum_of: step -> momentum of the key encoder.
        update_first: update the key encoder before the keys are encoded (MoCo), not after the step (SCE).
        batch_size: N.
        seed: of the shuffles.
        parts: of this rank's batch.
    """

    def __init__(
        self, model: SiameseEncoder, query_forward: nn.Module, embed: Embed, loss_of: Loss,
        momentum_of: Callable[[int], float], *, update_first: bool, batch_size: int, seed: int, parts: Parts,
    ) -> None:  # fmt: skip
        self.model, self.encoder = model, cast(ResNet, model.encoder_q)
        self._query_forward, self._embed, self._loss_of, self._momentum_of = query_forward, embed, loss_of, momentum_of
        self._update_first, self._batch_size, self._seed, self._parts = update_first, batch_size, seed, parts

    def backward(
        self, images_VnCHW: Tensor, _batch: Batch, step: int, scale: Scale = lambda loss: loss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the gradients of this rank's queries (view 0) against their keys (the other views).

        Args:
            scale: applied to the loss before its gradients.

        Returns:
            The loss, detached, and metrics.
        """
        if self._update_first:
            self.model.update_keys(self._momentum_of(step))
        shuffle = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        keys_MnD = self.model.encode_keys(images_VnCHW[1:], self._batch_size, shuffle, self._embed, self._parts)
        queries, results, shares = [], [], []
        for index, images in enumerate(self._parts.images):
            with process_group.averaged_after(self._query_forward, index == len(self._parts.images) - 1):
                with self._parts.taking(self.encoder, index):
                    q_pD = self._embed(self._query_forward, images_VnCHW[0, images])
                result = self._loss_of(q_pD, keys_MnD[:, images], self.model.negatives.queue, step=step)
                shares.append(len(q_pD) / images_VnCHW.shape[1])
                scale(result.loss * shares[-1]).backward()
            queries.append(q_pD.detach())
            results.append(result)
        self._enqueue_nD = torch.cat([cast(Tensor, result.enqueue_ND) for result in results])
        values = [{"loss": result.loss.detach(), **result.metrics} for result in results]
        means = {name: sum(share * one[name] for share, one in zip(shares, values, strict=True)) for name in values[0]}
        loss = cast(Tensor, means.pop("loss"))
        return loss, {**cast(dict[str, Tensor], means), "feature_spread": _spread(torch.cat(queries))}

    def after_step(self, step: int) -> None:
        """Updates the key encoder, unless `backward` has done so, and enqueues this step's keys."""
        if not self._update_first:
            self.model.update_keys(self._momentum_of(step))
        sizes = distributed.slice_sizes(self._batch_size)
        self.model.negatives.enqueue(distributed.gather(self._enqueue_nD, sizes))


class InBatchObjective:
    """Every view against the other views of the global batch: one encoder, no queue.

    Args:
        model: a module with ``encoder_q`` alone.
        query_forward: ``encoder_q``, or its DistributedDataParallel.
        loss_of: (anchors_AD, candidates_BD, labels_A, labels_B, self_index_A, step=...) -> the method's loss.
        supervised: all images of one class are positives, not only the views of one image.
        batch_size: N.
        parts: of this rank's batch.
    """

    def __init__(
        self, model: nn.ModuleDict, query_forward: nn.Module, embed: Embed, loss_of: Loss, *, supervised: bool,
        batch_size: int, parts: Parts,
    ) -> None:  # fmt: skip
        self.model, self.encoder = model, cast(ResNet, model["encoder_q"])
        self._query_forward, self._embed, self._loss_of = query_forward, embed, loss_of
        self._supervised, self._batch_size, self._parts = supervised, batch_size, parts

    def backward(
        self, images_VnCHW: Tensor, batch: Batch, step: int, scale: Scale = lambda loss: loss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the gradients of this rank's views as anchors.

        Args:
            scale: applied to the loss before its gradients.

        Returns:
            The loss, detached, and metrics.
        """
        num_views, several = len(images_VnCHW), len(self._parts.images) > 1
        # Image by image, not view by view: a BN group then holds all views of its images, as a rank's does.
        images_nVCHW = images_VnCHW.transpose(0, 1)
        with torch.set_grad_enabled(not several):
            embedded = [self._embed_part(images_nVCHW, index) for index in range(len(self._parts.images))]
        anchors_AD = torch.cat(embedded).requires_grad_()
        labels_n = batch.label_N if self._supervised else batch.index_N
        # The only positives of an image without a label are its own views.
        labels_n = torch.where(labels_n < 0, -1 - batch.index_N, labels_n)
        labels_A = to_device(labels_n, anchors_AD.device).repeat_interleave(num_views)
        sizes = [num_views * size for size in distributed.slice_sizes(self._batch_size)]
        candidates_BD = distributed.gather(anchors_AD, sizes, with_grad=True)
        labels_B = distributed.gather(labels_A, sizes)
        start = sum(sizes[: distributed.rank()])
        self_index_A = torch.arange(start, start + len(labels_A), device=anchors_AD.device)
        result = self._loss_of(anchors_AD, candidates_BD, labels_A, labels_B, self_index_A, step=step)
        scale(result.loss).backward()
        if several:
            gradients = cast(Tensor, anchors_AD.grad).split([len(part) for part in embedded])
            for index, gradient_aD in enumerate(gradients):
                with process_group.averaged_after(self._query_forward, index == len(gradients) - 1):
                    self._embed_part(images_nVCHW, index).backward(gradient_aD)
        return result.loss.detach(), {**result.metrics, "feature_spread": _spread(anchors_AD)}

    def _embed_part(self, images_nVCHW: Tensor, index: int) -> Tensor:
        with self._parts.taking(self.encoder, index):
            return self._embed(self._query_forward, images_nVCHW[self._parts.images[index]].flatten(0, 1))

    def after_step(self, step: int) -> None:
        """Nothing follows a step."""


def _spread(embeddings_ND: Tensor) -> Tensor:
    """Standard deviation per dimension, relative to vectors spread evenly over the sphere: 1; 0 is a collapse."""
    return embeddings_ND.detach().std(dim=0).mean() * embeddings_ND.shape[1] ** 0.5


def build_objective(
    cfg: CfgNode, device: torch.device, steps_per_epoch: int, log: Callable[[str], None], read_weights: bool = True
) -> QueueObjective | InBatchObjective:
    """The objective of METHOD.NAME, with initial weights and queue that are the same on every rank.

    Args:
        log: takes a line for the log.
        read_weights: start from MODEL.WEIGHTS; a resumed run no longer needs that file.
    """
    torch.manual_seed(cfg.SEED)
    method, total = methods.METHODS[cfg.METHOD.NAME], cfg.SOLVER.IMS_PER_BATCH
    encoder = _build_query_encoder(cfg, device, method.kind == "queue", log, read_weights)
    if method.kind == "queue":
        model = SiameseEncoder(encoder, NegativeQueue(cfg.MODEL.EMBEDDING_DIM, cfg.MODEL.QUEUE_SIZE))
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
    forward, parts = process_group.data_parallel(encoder, device), Parts(encoder, cfg.SOLVER.ACCUMULATE)
    all_steps = steps_per_epoch * cfg.SOLVER.EPOCHS

    def loss_of(*tensors: Tensor, step: int) -> methods.Objective:
        hyper = {keyword: get(cfg, hyperparameter.key) for keyword, hyperparameter in method.hyper.items()}
        if method.schedule:
            hyper = method.schedule(step // steps_per_epoch, cfg.SOLVER.EPOCHS, hyper)
        return method.objective(*tensors, **hyper)

    def momentum_of(step: int) -> float:
        return schedule.ema_momentum(step / all_steps, cfg.MODEL.EMA_MOMENTUM, cfg.MODEL.EMA_SCHEDULE)

    if isinstance(model, SiameseEncoder):
        first = cfg.MODEL.EMA_UPDATE == "before_keys"
        return QueueObjective(model, forward, bound_embed, loss_of, momentum_of, update_first=first, batch_size=total,
                              seed=cfg.SEED, parts=parts)  # fmt: skip
    supervised = cfg.METHOD.LABELS == "class"
    return InBatchObjective(model, forward, bound_embed, loss_of, supervised=supervised, batch_size=total, parts=parts)


def _build_query_encoder(
    cfg: CfgNode, device: torch.device, has_keys: bool, log: Callable[[str], None], read_weights: bool
) -> nn.Module:
    ranks, model = distributed.world_size(), cfg.MODEL
    groups = local_bn_groups(
        cfg.SOLVER.IMS_PER_BATCH, model.BN_GROUPS, has_keys, log, cfg.SOLVER.ACCUMULATE,
        rank=distributed.rank(), ranks=ranks,
    )  # fmt: skip
    encoder = build_encoder(
        model.ARCH, model.STEM, hidden_dims=model.HEAD_HIDDEN_DIMS, head_bn=model.HEAD_BN, dim=model.EMBEDDING_DIM,
        bn_groups=groups,
    )  # fmt: skip
    if model.WEIGHTS and read_weights:
        source = load_backbone(model.WEIGHTS)
        if (source.arch, source.stem) != (model.ARCH, model.STEM):
            raise UserError(
                f"MODEL.WEIGHTS holds a {source.arch} with {source.stem} stem, but MODEL.ARCH is {model.ARCH} and "
                f"MODEL.STEM {model.STEM}"
            )
        encoder.load_state_dict(source.state_dict, strict=False)  # only the head is missing: load_backbone is strict
    if model.BN_GROUPS == 1 and ranks > 1:
        if device.type != "cuda":
            raise UserError(
                f"MODEL.BN_GROUPS is 1 with {ranks} processes: that is SyncBN, which torch has on GPUs only; start one "
                "process, or set MODEL.BN_GROUPS 0 (one per process)"
            )
        return nn.SyncBatchNorm.convert_sync_batchnorm(encoder)
    return encoder
