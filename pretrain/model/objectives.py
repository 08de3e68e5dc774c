"""Builds what a step minimizes from the config: an objective with a queue, or one within the batch.

Shape letters: M positive keys per image, N images of the global batch, n of this rank, D dimensions.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torchvision.models import ResNet

from .. import methods, schedule
from ..common import distributed
from ..common.config.yaml_io import get
from ..common.device import choose_memory_format
from ..common.errors import UserError
from ..common.weights.backbone import read_backbone
from .batch_split import count_bn_groups, micro_batches
from .dense import DenseFeatures, DenseResNet, mix_dense_loss
from .encoder import build_encoder, embed
from .momentum_encoder import BatchShuffle, MomentumEncoderPair
from .queue import NegativeQueue

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Networks and settings that both kinds of objective share.

    Attributes:
        model: everything that a checkpoint saves.
        encoder: the trained encoder.
        ddp_encoder: the encoder, wrapped in DistributedDataParallel if there are several ranks.
        mean, std, amp, memory_format: see `encoder.embed`.
        method: the pure function and how its hyperparameters change over the epochs.
        hyper: the values of its hyperparameters, by keyword.
        accumulate: micro-batches that a rank's batch is divided into.
        bn_groups: groups of the global batch with their own BN statistics; runs with equal results agree on it.
    """

    model: nn.Module
    encoder: ResNet
    ddp_encoder: nn.Module
    mean: Sequence[float]
    std: Sequence[float]
    amp: str
    memory_format: torch.memory_format
    method: methods.Method
    hyper: dict[str, Any]
    epochs: int
    steps_per_epoch: int
    accumulate: int
    bn_groups: int

    def embed(self, encoder: nn.Module, images: Tensor) -> tuple[Tensor, DenseFeatures | None]:
        """Embed uint8 images (n, 3, H, W) as (n, D) with one of the encoders; see `encoder.embed`."""
        return embed(encoder, images, mean=self.mean, std=self.std, amp=self.amp, memory_format=self.memory_format)

    def loss(self, *tensors: Tensor, step: int) -> methods.LossOutput:
        """Call the method's function with its hyperparameters at ``step``."""
        hyper = self.hyper
        if self.method.schedule:
            hyper = self.method.schedule(step // self.steps_per_epoch, self.epochs, hyper)
        return self.method.loss_function(*tensors, **hyper)


@dataclass(frozen=True, kw_only=True)
class InBatchObjective(Objective):
    """Every view against the other views of the global batch: one encoder, no queue.

    Attributes:
        model: ``encoder_q`` alone.
        supervised: all images of one class are positives, not only the views of one image.
    """

    model: nn.ModuleDict
    supervised: bool


@dataclass(frozen=True, kw_only=True)
class QueueObjective(Objective):
    """A query against keys of the momentum encoder and a queue of negatives.

    Attributes:
        ema_before_keys: the key encoder is updated before it encodes the keys (MoCo), not after the step (SCE).
        momentum: m of the key encoder at the first step.
        momentum_schedule: how m changes; see `schedule.compute_ema_momentum`.
        dense_weight: w of `mix_dense_loss` from ``dense_warmup_steps`` on; 0 before.
        seed: seed of the shuffles.
    """

    model: MomentumEncoderPair
    ema_before_keys: bool
    momentum: float
    momentum_schedule: str
    dense_weight: float
    dense_warmup_steps: int
    seed: int

    def update_key_encoder(self, step: int) -> None:
        """Move the key encoder toward the query encoder."""
        progress = step / (self.steps_per_epoch * self.epochs)
        self.model.update_key_encoder(schedule.compute_ema_momentum(progress, self.momentum, self.momentum_schedule))

    @torch.no_grad()
    def encode_keys(self, images_MnCHW: Tensor, step: int) -> tuple[Tensor, DenseFeatures | None]:
        """Encode all M' keys of this rank's images in one pass over the shuffled global batch (ShuffleBN).

        Args:
            images_MnCHW: this rank's key views, which ranks exchange as uint8: a quarter of float32.
            step: selects the permutation of the M' N rows, which is the same on every rank.

        Returns:
            (M, n, D) unit-norm keys, and with a dense head the features of their images.
        """
        num_keys, n = images_MnCHW.shape[:2]
        total = num_keys * n * distributed.world_size()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        batch_shuffle = BatchShuffle(torch.randperm(total, generator=generator), num_keys)
        rows_nMCHW = batch_shuffle.shuffle(images_MnCHW.flatten(0, 1)).unflatten(0, (n, num_keys))
        outputs = [
            self.embed(self.model.encoder_k, rows_nMCHW[micro_batch].flatten(0, 1))
            for micro_batch, _ in micro_batches(n, self.accumulate)
        ]
        keys_MnD = batch_shuffle.unshuffle([keys for keys, _ in outputs])
        dense = [features for _, features in outputs if features is not None]
        if not dense:
            return keys_MnD, None
        fields = [batch_shuffle.unshuffle(tensors) for tensors in zip(*dense, strict=True)]
        return keys_MnD, DenseFeatures(*fields)

    def add_dense_loss(
        self, output: methods.LossOutput, queries: DenseFeatures, keys: DenseFeatures, step: int
    ) -> methods.LossOutput:
        """Add the loss of the images' locations (METHOD.DENSE_WEIGHT)."""
        if step < self.dense_warmup_steps:
            # DDP needs a gradient for every parameter; 0 * dense_loss could be NaN.
            head = cast(DenseResNet, self.encoder).dense
            return output._replace(loss=output.loss + 0 * sum(p.sum() for p in head.parameters()))
        queue_DK = cast(NegativeQueue, self.model.dense_negatives).queue
        loss = functools.partial(self.loss, step=step)
        return mix_dense_loss(output, loss, queries, keys, queue_DK, self.dense_weight)

    def enqueue(self, keys_nD: Tensor, dense_keys: DenseFeatures | None) -> None:
        """Push every rank's keys to the queue, and the mean dense key of each image to the dense queue."""
        self.model.negatives.enqueue(distributed.gather(keys_nD))
        if dense_keys is not None and self.model.dense_negatives is not None:
            self.model.dense_negatives.enqueue(distributed.gather(dense_keys.pooled_nD.mean(0)))


def build_objective(
    cfg: CfgNode, device: torch.device, steps_per_epoch: int, read_weights: bool = True
) -> QueueObjective | InBatchObjective:
    """Build the objective of METHOD.NAME, with initial weights and queue that are the same on every rank.

    Args:
        read_weights: Start from MODEL.WEIGHTS. A resumed run no longer needs that file.

    Raises:
        UserError: the batch does not divide evenly, or MODEL.WEIGHTS does not fit.
    """
    torch.manual_seed(cfg.SEED)
    method = methods.METHODS[cfg.METHOD.NAME]
    has_keys = method.kind == "queue"
    processes = distributed.world_size()
    accumulate = cfg.SOLVER.ACCUMULATE
    division = {"processes": processes, "accumulate": accumulate, "has_keys": has_keys}
    bn_groups = count_bn_groups(cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.BN_GROUPS, **division)
    if has_keys and cfg.MODEL.BN_GROUPS == 1:
        log.info("MODEL.BN_GROUPS is 1: query and keys share BN statistics, which can leak the answer (MoCo, Sec. 3.3)")
    if has_keys and cfg.MODEL.BN_GROUPS == 0 and processes == 1:
        log.info(f"one process: split BN with {bn_groups} groups replaces ShuffleBN (MODEL.BN_GROUPS {bn_groups})")

    encoder = _build_query_encoder(cfg, device, max(1, bn_groups // (processes * accumulate)), read_weights)
    memory_format = choose_memory_format(cfg.SOLVER.AMP, device.type)
    if has_keys:
        num_queues = 2 if cfg.METHOD.DENSE_WEIGHT else 1
        queues = [NegativeQueue(cfg.MODEL.EMBEDDING_DIM, cfg.MODEL.QUEUE_SIZE) for _ in range(num_queues)]
        model = MomentumEncoderPair(encoder, *queues)
    else:
        model = nn.ModuleDict({"encoder_q": encoder})
    model.to(device).to(memory_format=cast(Any, memory_format)).train()
    if cfg.SOLVER.COMPILE:
        for name, child in model.named_children():
            if name.startswith("encoder"):
                child.compile()

    shared: dict[str, Any] = {
        "encoder": encoder,
        "ddp_encoder": distributed.data_parallel(encoder, device),
        "mean": cfg.VIEWS.MEAN,
        "std": cfg.VIEWS.STD,
        "amp": cfg.SOLVER.AMP,
        "memory_format": memory_format,
        "method": method,
        "hyper": {keyword: get(cfg, hyperparameter.key) for keyword, hyperparameter in method.hyper.items()},
        "epochs": cfg.SOLVER.EPOCHS,
        "steps_per_epoch": steps_per_epoch,
        "accumulate": accumulate,
        "bn_groups": bn_groups,
    }
    if isinstance(model, nn.ModuleDict):
        return InBatchObjective(model=model, supervised=cfg.METHOD.LABELS == "class", **shared)
    return QueueObjective(
        model=model,
        ema_before_keys=cfg.MODEL.EMA_UPDATE == "before_keys",
        momentum=cfg.MODEL.EMA_MOMENTUM,
        momentum_schedule=cfg.MODEL.EMA_SCHEDULE,
        dense_weight=cfg.METHOD.DENSE_WEIGHT,
        dense_warmup_steps=cfg.METHOD.DENSE_WARMUP_STEPS,
        seed=cfg.SEED,
        **shared,
    )


def _build_query_encoder(cfg: CfgNode, device: torch.device, bn_groups: int, read_weights: bool) -> ResNet:
    """Build the trained encoder, from MODEL.WEIGHTS if given; BN_GROUPS 1 on several ranks is SyncBN."""
    model = cfg.MODEL
    ranks = distributed.world_size()
    is_dense = cfg.METHOD.DENSE_WEIGHT > 0
    head = {"hidden_dims": model.HEAD_HIDDEN_DIMS, "head_bn": model.HEAD_BN, "dim": model.EMBEDDING_DIM}
    encoder = build_encoder(model.ARCH, model.STEM, **head, bn_groups=bn_groups, dense=is_dense)
    if model.WEIGHTS and read_weights:
        source = read_backbone(model.WEIGHTS)
        if (source.arch, source.stem) != (model.ARCH, model.STEM):
            ours = f"MODEL.ARCH is {model.ARCH} and MODEL.STEM {model.STEM}; set them to the file's"
            raise UserError(f"MODEL.WEIGHTS contains a {source.arch} with {source.stem} stem, but {ours}")
        encoder.load_state_dict(source.state_dict, strict=False)  # only heads are missing: read_backbone is strict
    if model.BN_GROUPS == 1 and ranks > 1:
        if device.type == "cpu":
            problem = f"MODEL.BN_GROUPS is 1 with {ranks} processes: SyncBN, for GPUs only"
            raise UserError(f"{problem}; start one process, or set MODEL.BN_GROUPS 0")
        return cast(ResNet, nn.SyncBatchNorm.convert_sync_batchnorm(encoder))
    return encoder
