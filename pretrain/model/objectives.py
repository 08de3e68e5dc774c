"""Builds what a step minimizes from the config: an objective with a queue, or one within the batch.

Shape letters: M positive keys per image, N images of the global batch, n of this rank, D dimensions.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torchvision.models import ResNet

from .. import methods, schedule
from ..common import distributed
from ..common.config.yaml_io import get
from ..common.device import autocast, choose_memory_format
from ..common.errors import UserError
from ..common.weights.backbone import read_backbone
from ..data import views
from .batch_split import count_configured_bn_groups, micro_batches
from .compilation import compile_encoders
from .dense import DenseFeatures, DenseLoss, DenseResNet
from .encoder import Encoder, build_network
from .momentum_encoder import BatchShuffle, MomentumEncoderPair
from .queue import NegativeQueue

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loss:
    """A method's pure function and its hyperparameters, which may change over the epochs.

    Attributes:
        function: the pure function.
        hyper: the configured values, by keyword.
        schedule: see `methods.method.Method`.
    """

    function: Callable[..., methods.LossOutput]
    hyper: Mapping[str, Any]
    schedule: Callable[[int, int, dict[str, Any]], dict[str, Any]] | None
    epochs: int
    steps_per_epoch: int

    def at(self, step: int) -> Callable[..., methods.LossOutput]:
        """Return the function with the values of its hyperparameters at a step."""
        hyper = dict(self.hyper)
        if self.schedule:
            hyper = self.schedule(step // self.steps_per_epoch, self.epochs, hyper)
        return functools.partial(self.function, **hyper)


class KeyUpdate(NamedTuple):
    """When the key encoder moves toward the query encoder, and how far.

    Attributes:
        before_keys: before it encodes the keys (MoCo), not after the optimizer's step (SCE).
        momentum: step -> m; see `schedule.compute_ema_momentum`.
    """

    before_keys: bool
    momentum: Callable[[int], float]


@dataclass(frozen=True)
class InBatchObjective:
    """Every view against the other views of the global batch: one encoder, no queue.

    Attributes:
        model: ``encoder_q`` alone, which a checkpoint saves.
        encoder: the trained encoder.
        accumulate: micro-batches that a rank's batch is divided into.
        supervised: all images of one class are positives, not only the views of one image.
    """

    model: nn.ModuleDict
    encoder: Encoder
    loss: Loss
    accumulate: int
    supervised: bool


@dataclass(frozen=True)
class QueueObjective:
    """A query against keys of the momentum encoder and a queue of negatives.

    Attributes:
        model: both networks and the queues: everything that a checkpoint saves.
        encoder: the trained encoder, which embeds the queries.
        key_encoder: the momentum encoder.
        accumulate: micro-batches that a rank's batch is divided into.
        dense: the loss of locations, if there is one.
        seed: seed of the shuffles.
    """

    model: MomentumEncoderPair
    encoder: Encoder
    key_encoder: Encoder
    loss: Loss
    key_update: KeyUpdate
    accumulate: int
    dense: DenseLoss | None
    seed: int

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
            self.key_encoder.embed(rows_nMCHW[micro_batch].flatten(0, 1))
            for micro_batch, _ in micro_batches(n, self.accumulate)
        ]
        keys_MnD = batch_shuffle.unshuffle([keys for keys, _ in outputs])
        dense = [features for _, features in outputs if features is not None]
        if not dense:
            return keys_MnD, None
        fields = [batch_shuffle.unshuffle(tensors) for tensors in zip(*dense, strict=True)]
        return keys_MnD, DenseFeatures(*fields)


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
    bn_groups = _choose_bn_groups(cfg, has_keys)
    network = _build_query_network(cfg, device, bn_groups, read_weights)
    hyper = {keyword: get(cfg, hyperparameter.name) for keyword, hyperparameter in method.hyper.items()}
    loss = Loss(method.load_function(), hyper, method.schedule, cfg.SOLVER.EPOCHS, steps_per_epoch)
    accumulate = cfg.SOLVER.ACCUMULATE

    if not has_keys:
        lone_network = nn.ModuleDict({"encoder_q": network})
        encoder = _build_encoder(lone_network, network, cfg, device, bn_groups)
        return InBatchObjective(lone_network, encoder, loss, accumulate, cfg.METHOD.LABELS == "class")

    num_queues = 2 if cfg.METHOD.DENSE_WEIGHT else 1
    queues = [NegativeQueue(cfg.MODEL.EMBEDDING_DIM, cfg.MODEL.QUEUE_SIZE) for _ in range(num_queues)]
    model = MomentumEncoderPair(network, *queues)
    encoder = _build_encoder(model, network, cfg, device, bn_groups)
    dense = None
    if model.dense_negatives is not None:
        head = cast(DenseResNet, model.encoder_q).dense
        dense = DenseLoss(cfg.METHOD.DENSE_WEIGHT, cfg.METHOD.DENSE_WARMUP_STEPS, head, model.dense_negatives)
    total_steps = steps_per_epoch * cfg.SOLVER.EPOCHS
    momentum = functools.partial(
        schedule.compute_ema_momentum,
        total_steps=total_steps,
        base=cfg.MODEL.EMA_MOMENTUM,
        kind=cfg.MODEL.EMA_SCHEDULE,
    )
    return QueueObjective(
        model=model,
        encoder=encoder,
        key_encoder=dataclasses.replace(encoder, network=model.encoder_k, parallel=model.encoder_k),
        loss=loss,
        key_update=KeyUpdate(cfg.MODEL.EMA_UPDATE == "before_keys", momentum),
        accumulate=accumulate,
        dense=dense,
        seed=cfg.SEED,
    )


def _choose_bn_groups(cfg: CfgNode, has_keys: bool) -> int:
    """Return the BN groups of the global batch, and log what follows from them."""
    processes = distributed.world_size()
    bn_groups = count_configured_bn_groups(cfg, processes)
    if has_keys and cfg.MODEL.BN_GROUPS == 1:
        log.info("MODEL.BN_GROUPS is 1: query and keys share BN statistics, which can leak the answer (MoCo, Sec. 3.3)")
    if has_keys and cfg.MODEL.BN_GROUPS == 0 and processes == 1:
        log.info(f"one process: split BN with {bn_groups} groups replaces ShuffleBN (MODEL.BN_GROUPS {bn_groups})")
    return bn_groups


def _build_encoder(model: nn.Module, network: ResNet, cfg: CfgNode, device: torch.device, bn_groups: int) -> Encoder:
    """Move ``model`` to the device, compile it if the config says so, and return the encoder of its trained network."""
    memory_format = choose_memory_format(cfg.SOLVER.AMP, device.type)
    model.to(device).to(memory_format=cast(Any, memory_format)).train()
    if cfg.SOLVER.COMPILE:
        compile_encoders(model)
    return Encoder(
        network=network,
        parallel=distributed.data_parallel(network),
        normalize=views.Normalization(cfg.VIEWS.MEAN, cfg.VIEWS.STD, device),
        autocast=autocast(cfg.SOLVER.AMP, device.type),
        memory_format=memory_format,
        bn_groups=bn_groups,
    )


def _build_query_network(cfg: CfgNode, device: torch.device, bn_groups: int, read_weights: bool) -> ResNet:
    """Build the trained network, from MODEL.WEIGHTS if given; BN_GROUPS 1 on several ranks is SyncBN.

    Args:
        bn_groups: groups of the global batch; each micro-batch of a process has whole groups.
    """
    model = cfg.MODEL
    ranks = distributed.world_size()
    network = build_network(
        model.ARCH,
        model.STEM,
        hidden_dims=model.HEAD_HIDDEN_DIMS,
        head_bn=model.HEAD_BN,
        dim=model.EMBEDDING_DIM,
        bn_groups=max(1, bn_groups // (ranks * cfg.SOLVER.ACCUMULATE)),
        dense=cfg.METHOD.DENSE_WEIGHT > 0,
    )
    if model.WEIGHTS and read_weights:
        source = read_backbone(model.WEIGHTS)
        if (source.arch, source.stem) != (model.ARCH, model.STEM):
            ours = f"MODEL.ARCH is {model.ARCH} and MODEL.STEM {model.STEM}; set them to the file's"
            raise UserError(f"MODEL.WEIGHTS contains a {source.arch} with {source.stem} stem, but {ours}")
        trained_with = source.provenance.input
        other = (
            trained_with.compare_statistics(cfg.VIEWS.MEAN, cfg.VIEWS.STD)
            if trained_with and distributed.is_first_rank()
            else ""
        )
        if other:
            log.warning(f"MODEL.WEIGHTS was pretrained with other pixel statistics: {other}, unless that is intended")
        network.load_state_dict(source.state_dict, strict=False)  # only heads are missing: read_backbone is strict
    if model.BN_GROUPS == 1 and ranks > 1:
        if device.type == "cpu":
            problem = f"MODEL.BN_GROUPS is 1 with {ranks} processes: SyncBN, for GPUs only"
            raise UserError(f"{problem}; start one process, or set MODEL.BN_GROUPS 0")
        return cast(ResNet, nn.SyncBatchNorm.convert_sync_batchnorm(network))
    return network
