"""A rank's batch in parts that go through the encoders one after the other, to take less memory (SOLVER.ACCUMULATE).

The parts end where BN groups end (`pretrain.encoder`), so loss and gradients are those of the whole batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from torch import nn

from .encoder import Grouped


class Parts:
    """The parts of a batch; one part is the batch.

    Args:
        encoder: its BN groups are divided into ``count`` parts of equally many.
        count: of parts.

    Attributes:
        images: the images of each part, among those of this rank.
    """

    def __init__(self, encoder: nn.Module, count: int) -> None:
        self.images = [slice(None)]
        self._groups: list[list[int]] = []
        if count == 1:
            return
        groups = _norms(encoder)[0].groups
        size = len(groups) // count
        self._groups = [list(groups[first : first + size]) for first in range(0, len(groups), size)]
        ends = list(itertools.accumulate(map(sum, self._groups)))
        self.images = list(itertools.starmap(slice, itertools.pairwise([0, *ends])))

    @contextlib.contextmanager
    def taking(self, encoder: nn.Module, index: int) -> Iterator[None]:
        """Sets the BN groups of micro-batch ``index``; running statistics follow each one, as torch's own do.

        Micro-batches with groups of the same sizes share a graph of torch.compile: nothing else changes between them.
        """
        if not self._groups:
            yield
            return
        norms = _norms(encoder)
        whole = norms[0].groups
        try:
            for norm in norms:
                norm.groups = self._groups[index]
            yield
        finally:
            for norm in norms:
                norm.groups = whole


def _norms(encoder: nn.Module) -> list[Grouped]:
    return [module for module in encoder.modules() if isinstance(module, Grouped)]
