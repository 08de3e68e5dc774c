"""The query/key encoder pair of every queue method: EMA, ShuffleBN, one forward pass for all M' keys.

Shape letters: M positive keys per image, N images of the global batch, n images of this rank, D dimensions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common.batch_split import MicroBatch
from ..common.errors import UserError
from ..data import views
from .dense import Locations, locations
from .encoder import set_bn_groups
from .queue import NegativeQueue
from .shuffle import ExchangePlan

Embeddings = tuple[Tensor, Locations | None]
Embed = Callable[[nn.Module, Tensor], Embeddings]  # `embed` with its settings bound


class SiameseEncoder(nn.Module):
    """``encoder_q`` (trained), ``encoder_k`` (its moving average) and the queue, under MoCo's names.

    Args:
        encoder_q: module (n, 3, H, W) -> (n, D).
        negatives: the queue.
        dense_negatives: the queue of the dense head, if the encoder has one.
    """

    def __init__(
        self, encoder_q: nn.Module, negatives: NegativeQueue, dense_negatives: NegativeQueue | None = None
    ) -> None:
        super().__init__()
        self.encoder_q = encoder_q
        self.encoder_k = copy.deepcopy(encoder_q)
        self.encoder_k.requires_grad_(False)
        self.negatives = negatives
        self.dense_negatives = dense_negatives

    @torch.no_grad()
    def update_keys(self, momentum: float) -> None:
        """theta_k <- m theta_k + (1 - m) theta_q (He et al. 2020, Eq. 2); parameters only: BN has its own average."""
        keys: list[Tensor] = list(self.encoder_k.parameters())
        queries: list[Tensor] = list(self.encoder_q.parameters())
        torch._foreach_lerp_(keys, queries, 1 - momentum)

    @torch.no_grad()
    def encode_keys(
        self, images_MnCHW: Tensor, total: int, shuffle: torch.Generator, embed: Embed, parts: Sequence[MicroBatch]
    ) -> Embeddings:
        """All M' keys of this rank's images in one pass over the shuffled global batch (ShuffleBN).

        Args:
            images_MnCHW: this rank's key views; they travel between ranks as they are (uint8 is 4 times smaller).
            total: N, images in the global batch.
            shuffle: generator in the same state on every rank; draws one permutation of the M' N rows.
            parts: micro-batches of the rank's positions after the shuffle.

        Returns:
            (M, n, D) unit-norm keys, and the locations of their images as (M, n, ...).
        """
        num_keys, count = images_MnCHW.shape[:2]
        order = torch.randperm(num_keys * total, generator=shuffle)
        plan = ExchangePlan(order, num_keys, total)
        rows = plan.scatter(images_MnCHW.flatten(0, 1)).unflatten(0, (count, num_keys))
        embedded = []
        for part in parts:
            set_bn_groups(self.encoder_k, part.bn_groups)
            embedded.append(embed(self.encoder_k, rows[part.images].flatten(0, 1)))

        def collect(tensors: Iterable[Tensor]) -> Tensor:
            return plan.collect(torch.cat(list(tensors))).unflatten(0, (num_keys, count))

        keys, dense = zip(*embedded, strict=True)
        return collect(keys), Locations(*map(collect, zip(*dense, strict=True))) if dense[0] else None


def embed(
    encoder: nn.Module,
    images: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    amp: str = "none",
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Embeddings:
    """Unit-norm float32 embeddings (n, D) of uint8 images (n, 3, H, W), and of their locations with a dense head.

    Args:
        mean: as in `views.normalize`, like ``std``.
        amp: as in `autocast`.

    Raises:
        UserError: batch norm has a single value per channel, of which there are no statistics.
    """
    x = views.normalize(images, mean, std).contiguous(memory_format=memory_format)
    try:
        with autocast(amp, x.device.type):
            output = encoder(x)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            f"batch norm has no statistics of a single image ({len(images)} in this rank's batch); raise "
            "SOLVER.IMS_PER_BATCH, lower MODEL.BN_GROUPS or start fewer processes"
        ) from error
    embeddings, *maps = [output] if isinstance(output, Tensor) else output
    return F.normalize(embeddings.float(), dim=1), locations(*maps) if maps else None


def autocast(amp: str, device_type: str) -> torch.autocast:
    """The precision of SOLVER.AMP: none | bf16 | fp16 (for GPUs without bf16)."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp)
    return torch.autocast(device_type, dtype, enabled=dtype is not None)
