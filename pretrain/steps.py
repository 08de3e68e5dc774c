"""One training step: of an objective with a queue, and of one within the batch; each names every change it makes.

SOLVER.ACCUMULATE divides a rank's batch into micro-batches, which go through the encoders one after the other. Loss and
gradients are those of the whole batch: the loss of a query needs no other query, and the micro-batches of an objective
within the batch go through the encoder twice, first to find all embeddings (GradCache: Gao et al. 2021, Sec. 3.2).

Shape letters: V views, M positive keys per image, n images of this rank, p of a micro-batch, D dimensions; A anchors of
this rank, B candidates of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .common import distributed
from .common.copies import to_device
from .common.distributed import averaged_after
from .data.loader import Batch
from .methods import Objective
from .model.dense import DenseResNet, Locations, with_dense
from .model.encoder import set_bn_groups
from .model.objectives import InBatchObjective, QueueObjective


class Training(NamedTuple):
    """Everything that a step changes."""

    objective: QueueObjective | InBatchObjective
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def training_step(training: Training, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """`queue_step` or `in_batch_step`.

    Args:
        batch: this rank's images, on the model's device: (V, n, 3, S, S) uint8, the query's view first.

    Returns:
        This rank's mean loss, detached, and named metrics.
    """
    if isinstance(training.objective, QueueObjective):
        return queue_step(training, training.objective, batch.views_VNCHW, step)
    return in_batch_step(training, training.objective, batch, step)


def queue_step(
    training: Training, objective: QueueObjective, views_VnCHW: Tensor, step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """A query against keys of the momentum encoder and a queue of negatives."""
    _, optimizer, scaler = training
    model, method, n = objective.model, objective.method, views_VnCHW.shape[1]
    optimizer.zero_grad(set_to_none=True)
    if objective.ema_first:
        model.update_keys(objective.momentum(step))  # He et al., Eq. (2)
    shuffle = torch.Generator().manual_seed(objective.seed * 1_000_003 + step)  # of ShuffleBN, the same on every rank
    keys_MnD, key_locations = model.encode_keys(
        views_VnCHW[1:], objective.batch_size, shuffle, objective.embed, objective.micro_batches
    )
    queries, results, shares = [], [], []
    for part in objective.micro_batches:
        set_bn_groups(model.encoder_q, part.bn_groups)
        with averaged_after(objective.query_forward, part is objective.micro_batches[-1]):
            q_pD, q_locations = objective.embed(objective.query_forward, views_VnCHW[0, part.images])
            result = method(q_pD, keys_MnD[:, part.images], model.negatives.queue, step=step)
            if q_locations and key_locations and model.dense_negatives:  # METHOD.DENSE_WEIGHT
                of_part = Locations(*(tensor[:, part.images] for tensor in key_locations))
                dense_method, queue_DK = functools.partial(method, step=step), model.dense_negatives.queue
                if weight := objective.dense_weight(step):
                    result = with_dense(result, dense_method, q_locations, of_part, queue_DK, weight)
                else:  # every parameter needs a gradient, but a dense loss that is not finite must not reach the others
                    head = cast(DenseResNet, objective.encoder).dense
                    result = result._replace(loss=result.loss + 0 * sum(p.sum() for p in head.parameters()))
            share = len(q_pD) / n
            scaler.scale(result.loss * share * _rank_weight(n, objective.batch_size)).backward()
        queries.append(q_pD.detach())
        results.append(result)
        shares.append(share)
    scaler.step(optimizer)
    scaler.update()
    if not objective.ema_first:
        model.update_keys(objective.momentum(step))  # SCE's pseudo-code
    enqueue_nD = torch.cat([cast(Tensor, result.enqueue_ND) for result in results])
    sizes = distributed.slice_sizes(objective.batch_size)
    model.negatives.enqueue(distributed.gather(enqueue_nD, sizes))
    if key_locations and model.dense_negatives:
        model.dense_negatives.enqueue(distributed.gather(key_locations.pooled_nD.mean(0), sizes))
    average_bn_statistics(model)
    return _mean(results, shares, torch.cat(queries))


def in_batch_step(
    training: Training, objective: InBatchObjective, batch: Batch, step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Every view against the other views of the global batch: one encoder, no queue."""
    _, optimizer, scaler = training
    parts, batch_size = objective.micro_batches, objective.batch_size
    num_views, n = batch.views_VNCHW.shape[:2]
    # Image by image, not view by view: a BN group then holds all views of its images, as a rank's does.
    images_nVCHW = batch.views_VNCHW.transpose(0, 1)
    optimizer.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(len(parts) == 1):
        embedded = []
        for part in parts:
            set_bn_groups(objective.encoder, part.bn_groups)
            embedded.append(objective.embed(objective.query_forward, images_nVCHW[part.images].flatten(0, 1))[0])
    anchors_AD = torch.cat(embedded).requires_grad_()
    labels_n = batch.label_N if objective.supervised else batch.index_N
    # The only positives of an image without a label are its own views.
    labels_n = torch.where(labels_n < 0, -1 - batch.index_N, labels_n)
    labels_A = to_device(labels_n, anchors_AD.device).repeat_interleave(num_views)
    sizes = [num_views * size for size in distributed.slice_sizes(batch_size)]
    candidates_BD = distributed.gather(anchors_AD, sizes, with_grad=True)
    start = sum(sizes[: distributed.rank()])
    self_index_A = torch.arange(start, start + len(labels_A), device=anchors_AD.device)
    labels_B = distributed.gather(labels_A, sizes)
    result = objective.method(anchors_AD, candidates_BD, labels_A, labels_B, self_index_A, step=step)
    scaler.scale(result.loss * _rank_weight(n, batch_size)).backward()
    if len(parts) > 1:  # so far, the gradients of the embeddings alone
        gradients = cast(Tensor, anchors_AD.grad).split([len(part_AD) for part_AD in embedded])
        for part, gradient_aD in zip(parts, gradients, strict=True):
            set_bn_groups(objective.encoder, part.bn_groups)
            with averaged_after(objective.query_forward, part is parts[-1]):
                again_aD, _ = objective.embed(objective.query_forward, images_nVCHW[part.images].flatten(0, 1))
                again_aD.backward(gradient_aD)
    scaler.step(optimizer)
    scaler.update()
    average_bn_statistics(objective.model)
    return _mean([result], [1.0], anchors_AD)


def _rank_weight(images: int, batch_size: int) -> float:
    """DDP averages over ranks; a rank with more images must weigh more for the mean over the global batch."""
    return images * distributed.world_size() / batch_size


@torch.no_grad()
def average_bn_statistics(model: nn.Module) -> None:
    """Makes batch norm's running statistics their mean over ranks: a checkpoint of rank 0 is right for every rank."""
    if distributed.world_size() == 1:
        return
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.ndim == 1]
    means = distributed.mean_(torch.cat(statistics)).split([buffer.numel() for buffer in statistics])
    torch._foreach_copy_(statistics, list(means))


def _mean(results: Sequence[Objective], shares: Sequence[float], anchors_AD: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The loss and the metrics of micro-batches with these ``shares`` of the images, and ``feature_spread``."""
    values = [{"loss": result.loss.detach(), **result.metrics} for result in results]
    means = {name: sum(share * part[name] for share, part in zip(shares, values, strict=True)) for name in values[0]}
    return cast(Tensor, means.pop("loss")), {**means, "feature_spread": _relative_std(anchors_AD)}


def _relative_std(embeddings_ND: Tensor) -> Tensor:
    """Standard deviation per dimension, relative to vectors spread evenly over the sphere: 1; 0 is a collapse."""
    return embeddings_ND.detach().std(dim=0).mean() * embeddings_ND.shape[1] ** 0.5
