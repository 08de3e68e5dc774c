"""ShuffleBN across processes: rows travel to another rank by a permutation that every rank knows, and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.batch_split import slice_bounds
from ..common.copies import to_device
from ..common.distributed import rank, world_size


class ExchangePlan:
    """Moves rows between ranks by a permutation that every rank knows, and moves the results back.

    The M x N global rows are numbered m N + i. Rank r holds rows (m, i) of its slice of the N images, m-major; after
    `scatter` it holds the rows ``order[M start:M stop]``, M positions for each image of its slice. Only rows that
    change rank travel, and only once (an all-gather would send every row to every rank).
    """

    def __init__(self, order: Tensor, num_keys: int, total: int) -> None:
        ranks, me = world_size(), rank()
        slices = [slice_bounds(total, r, ranks) for r in range(ranks)]
        counts = torch.tensor([stop - start for start, stop in slices])
        owner = torch.arange(ranks).repeat_interleave(counts)
        local = torch.cat([torch.arange(stop - start) for start, stop in slices])
        source = owner[order % total]  # rank that holds the row of each position
        slot = (order // total) * counts[source] + local[order % total]  # its place on that rank
        bounds = [(num_keys * start, num_keys * stop) for start, stop in slices]
        mine = slice(*bounds[me])
        # What I send to rank r, in the order of r's positions; what I receive comes grouped by source rank.
        sends = [slot[start:stop][source[start:stop] == me] for start, stop in bounds]
        self._send = torch.cat(sends)
        self._send_sizes = [len(s) for s in sends]
        self._receive_sizes = [int((source[mine] == r).sum()) for r in range(ranks)]
        self._arrange = torch.argsort(torch.argsort(source[mine], stable=True))  # position -> place among received
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
        own = torch.empty_like(results)
        own[to_device(self._send, results.device)] = results
        return own
