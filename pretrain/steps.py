"""One training step per kind of objective; every side effect is visible in the step.

SOLVER.ACCUMULATE divides a rank's batch into micro-batches, which go through the encoders one after another. Loss and
gradients are those of the whole batch: the loss of a query needs no other query, and the micro-batches of an objective
within the batch go through the encoder twice, first to compute all embeddings (GradCache: Gao et al. 2021, Sec. 3.2).

Shape letters: V views, M positive keys per image, n images of this rank, p of a micro-batch, D dimensions; A anchors of
this rank, a of a micro-batch, B candidates of all ranks.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from .common import distributed
from .common.device import to_device
from .common.distributed import average_gradients
from .data.loader import Batch
from .methods import LossOutput
from .model.batch_split import micro_batches
from .model.objectives import InBatchObjective, QueueObjective
from .state import TrainState


def training_step(state: TrainState, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Run `queue_step` or `in_batch_step`.

    Args:
        batch: this rank's images, on the model's device: (V, n, 3, S, S) uint8, the query's view first.

    Returns:
        This rank's mean loss, detached, and named metrics.
    """
    if isinstance(state.objective, QueueObjective):
        return queue_step(state.objective, state.optimizer, state.scaler, batch.views_VnCHW, step)
    return in_batch_step(state.objective, state.optimizer, state.scaler, batch, step)


def queue_step(
    objective: QueueObjective,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    views_VnCHW: Tensor,
    step: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Train queries against the momentum encoder's keys and a queue of negatives (MoCo, JCL, SCE, ReSSL)."""
    model = objective.model
    method = objective.loss.at(step)
    dense = objective.dense
    outputs: list[LossOutput] = []
    queries: list[Tensor] = []

    optimizer.zero_grad(set_to_none=True)
    if objective.key_update.before_keys:
        model.update_key_encoder(objective.key_update.momentum(step))  # He et al., Eq. (2)
    keys_MnD, dense_keys = objective.encode_keys(views_VnCHW[1:], step)  # ShuffleBN, no gradient

    for micro_batch, is_last in micro_batches(views_VnCHW.shape[1], objective.accumulate):
        with average_gradients(objective.encoder.parallel, when=is_last):
            q_pD, dense_queries = objective.encoder.embed(views_VnCHW[0, micro_batch])
            output = method(q_pD, keys_MnD[:, micro_batch], model.negatives.queue)
            if dense and dense_queries and dense_keys:
                output = dense.add(output, method, dense_queries, dense_keys.select(micro_batch), step)
            scaler.scale(output.loss / objective.accumulate).backward()
        outputs.append(output)
        queries.append(q_pD.detach())

    scaler.step(optimizer)
    scaler.update()
    if not objective.key_update.before_keys:
        model.update_key_encoder(objective.key_update.momentum(step))  # SCE's pseudo-code
    model.negatives.enqueue(distributed.gather(torch.cat([cast(Tensor, output.enqueue_ND) for output in outputs])))
    if dense and dense_keys:
        dense.negatives.enqueue(distributed.gather(dense_keys.pooled_nD.mean(0)))  # an image's mean dense key
    average_bn_statistics(model)
    return average_metrics(outputs, torch.cat(queries))


def in_batch_step(
    objective: InBatchObjective,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: Batch,
    step: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Train every view against the other views of the global batch: one encoder, no queue (SimCLR, SupCon, TCL)."""
    num_views, n = batch.views_VnCHW.shape[:2]
    slices = list(micro_batches(n, objective.accumulate))
    # Order by image, not by view, so that each BN group has all views of its images, as a rank does.
    images_nVCHW = batch.views_VnCHW.transpose(0, 1)
    optimizer.zero_grad(set_to_none=True)
    embeddings: list[Tensor] = []
    with torch.set_grad_enabled(len(slices) == 1):
        for micro_batch, _ in slices:
            embedding_aD, _ = objective.encoder.embed(images_nVCHW[micro_batch].flatten(0, 1))
            embeddings.append(embedding_aD)
    anchors_AD = torch.cat(embeddings).requires_grad_()

    labels_n = batch.label_n if objective.supervised else batch.index_n
    labels_n = torch.where(labels_n < 0, -1 - batch.index_n, labels_n)  # without a label, its own views are positive
    labels_A = to_device(labels_n, anchors_AD.device).repeat_interleave(num_views)
    candidates_BD = distributed.gather(anchors_AD, with_grad=True)
    first = distributed.rank() * len(labels_A)
    self_index_A = torch.arange(first, first + len(labels_A), device=anchors_AD.device)
    labels_B = distributed.gather(labels_A)
    output = objective.loss.at(step)(anchors_AD, candidates_BD, labels_A, labels_B, self_index_A)
    scaler.scale(output.loss).backward()

    if len(slices) > 1:  # backward has reached only the embeddings so far
        gradients = cast(Tensor, anchors_AD.grad).chunk(len(slices))
        for (micro_batch, is_last), gradient_aD in zip(slices, gradients, strict=True):
            with average_gradients(objective.encoder.parallel, when=is_last):
                embedding_aD, _ = objective.encoder.embed(images_nVCHW[micro_batch].flatten(0, 1))
                embedding_aD.backward(gradient_aD)
    scaler.step(optimizer)
    scaler.update()
    average_bn_statistics(objective.model)
    return average_metrics([output], anchors_AD)


@torch.no_grad()
def average_bn_statistics(model: nn.Module) -> None:
    """Average BN running statistics over ranks, so that rank 0's checkpoint is valid for all."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point() and buffer.ndim == 1]
    distributed.mean_together_(statistics)


def average_metrics(outputs: Sequence[LossOutput], embeddings_ND: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss and metrics of equal micro-batches, and ``feature_spread`` of their embeddings."""
    rows = [{"loss": output.loss.detach(), **output.metrics} for output in outputs]
    means = {name: cast(Tensor, sum(row[name] for row in rows)) / len(rows) for name in rows[0]}
    loss = means.pop("loss")
    return loss, {**means, "feature_spread": _measure_spread(embeddings_ND)}


def _measure_spread(embeddings_ND: Tensor) -> Tensor:
    """Return the mean std per dimension x sqrt(D): 1 for embeddings uniform on the sphere, 0 when collapsed."""
    return embeddings_ND.detach().std(dim=0).mean() * embeddings_ND.shape[1] ** 0.5
