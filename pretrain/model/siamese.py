"""The query/key encoder pair of every queue method: EMA, ShuffleBN, one forward pass for all M' keys.

Shape letters: M positive keys per image, N images of the global batch, n images of this rank, D dimensions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ..common import distributed
from ..common.batch_split import MicroBatch, slice_bounds
from ..common.copies import to_device
from ..common.errors import UserError
from ..data import views
from .dense import Locations, locations
from .encoder import set_bn_groups
from .queue import NegativeQueue

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


class ExchangePlan:
    """Moves rows between ranks by a permutation that every rank knows, and moves the results back.

    The M x N global rows are numbered m N + i. Rank r holds rows (m, i) of its slice of the N images, m-major; after
    `scatter` it holds the rows ``order[M start:M stop]``, M positions for each image of its slice. Only rows that
    change rank travel, and only once (an all-gather would send every row to every rank).
    """

    def __init__(self, order: Tensor, num_keys: int, total: int) -> None:
        ranks, this_rank = distributed.world_size(), distributed.rank()
        slices = [slice_bounds(total, r, ranks) for r in range(ranks)]
        counts = torch.tensor([stop - start for start, stop in slices])
        owner = torch.arange(ranks).repeat_interleave(counts)
        local = torch.cat([torch.arange(stop - start) for start, stop in slices])
        source = owner[order % total]  # rank that holds the row of each position
        slot = (order // total) * counts[source] + local[order % total]  # its place on that rank
        bounds = [(num_keys * start, num_keys * stop) for start, stop in slices]
        positions = slice(*bounds[this_rank])
        # What goes to rank r, in the order of r's positions; what is received comes grouped by source rank.
        sends = [slot[start:stop][source[start:stop] == this_rank] for start, stop in bounds]
        self._send = torch.cat(sends)
        self._send_sizes = [len(s) for s in sends]
        self._receive_sizes = [int((source[positions] == r).sum()) for r in range(ranks)]
        self._arrange = torch.argsort(torch.argsort(source[positions], stable=True))  # position -> place among received
        self._alone = ranks == 1

    def scatter(self, rows: Tensor) -> Tensor:
        """This rank's (M n, ...) rows -> the rows of its positions."""
        picked = rows[to_device(self._send, rows.device)]
        if self._alone:
            return picked
        received = picked.new_empty(sum(self._receive_sizes), *rows.shape[1:])
        dist.all_to_all_single(received, picked, self._receive_sizes, self._send_sizes)
        return received[to_device(self._arrange, rows.device)]

    def collect(self, results: Tensor) -> Tensor:
        """Results of this rank's positions -> results of its own rows (inverse of `scatter`)."""
        if not self._alone:
            grouped = results[to_device(torch.argsort(self._arrange), results.device)].contiguous()
            results = grouped.new_empty(sum(self._send_sizes), *results.shape[1:])
            dist.all_to_all_single(results, grouped, self._send_sizes, self._receive_sizes)
        of_rows = torch.empty_like(results)
        of_rows[to_device(self._send, results.device)] = results
        return of_rows


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
