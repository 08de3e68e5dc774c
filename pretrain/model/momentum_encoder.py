"""The query and key encoders of queue methods, and ShuffleBN.

Shape letters: M positive keys per image, N images of the global batch, n images of this rank, D dimensions.
"""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..common import distributed
from ..common.device import to_device
from .queue import NegativeQueue


class MomentumEncoderPair(nn.Module):
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
    def update_key_encoder(self, momentum: float) -> None:
        """Update theta_k <- m theta_k + (1 - m) theta_q (He et al. 2020, Eq. 2).

        Only parameters are averaged: batch norm has its own running average.
        """
        key_parameters: list[Tensor] = list(self.encoder_k.parameters())
        query_parameters: list[Tensor] = list(self.encoder_q.parameters())
        torch._foreach_lerp_(key_parameters, query_parameters, 1 - momentum)


class BatchShuffle:
    """Exchanges rows between ranks by a permutation that every rank knows, and returns the results (ShuffleBN).

    The M x N global rows are numbered m N + i. Rank r has the rows (m, i) of its n images, m-major; after `shuffle` it
    has the rows ``order[M n r : M n (r + 1)]``. Only rows that change rank travel, and only once (an all-gather would
    send every row to every rank).

    Args:
        order: a permutation of the M N rows.
        num_keys: M.
    """

    def __init__(self, order: Tensor, num_keys: int) -> None:
        ranks = distributed.world_size()
        this_rank = distributed.rank()
        num_images = len(order) // num_keys
        n = num_images // ranks
        # For each position, grouped by the rank that gets it: the rank that has its row, and the row's index there.
        owner_RP = (order % num_images // n).view(ranks, -1)
        index_RP = (order // num_images * n + order % n).view(ranks, -1)
        is_ours_RP = owner_RP == this_rank
        self._send = index_RP[is_ours_RP]
        self._send_sizes = is_ours_RP.sum(1).tolist()
        self._receive_sizes = torch.bincount(owner_RP[this_rank], minlength=ranks).tolist()
        # Received rows are grouped by the rank that had them: position -> index among the received rows.
        self._arrange = torch.argsort(torch.argsort(owner_RP[this_rank], stable=True))
        self._is_alone = ranks == 1
        self._num_keys = num_keys

    def shuffle(self, rows: Tensor) -> Tensor:
        """Exchange this rank's (M n, ...) rows for the rows of its positions."""
        sent = rows[to_device(self._send, rows.device)]
        if self._is_alone:
            return sent
        received = sent.new_empty(sum(self._receive_sizes), *rows.shape[1:])
        dist.all_to_all_single(received, sent, self._receive_sizes, self._send_sizes)
        return received[to_device(self._arrange, rows.device)]

    def unshuffle(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Return the results of this rank's positions to the ranks that their rows came from, as (M, n, ...).

        Args:
            micro_batches: the results, divided along the first dimension.
        """
        results = torch.cat(list(micro_batches))
        if not self._is_alone:
            grouped = results[to_device(torch.argsort(self._arrange), results.device)].contiguous()
            results = grouped.new_empty(sum(self._send_sizes), *results.shape[1:])
            dist.all_to_all_single(results, grouped, self._send_sizes, self._receive_sizes)
        row_results = torch.empty_like(results)
        row_results[to_device(self._send, results.device)] = results
        return row_results.unflatten(0, (self._num_keys, -1))
