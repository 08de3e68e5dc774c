"""A rank's batch in parts that go through the encoders one after the other, to take less memory (SOLVER.ACCUMULATE).

The parts end where BN groups end (`pretrain.encoder`), so statistics, loss and gradients are those of the whole batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, cast

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
    def taking(self, encoder: nn.Module, index: int, again: bool = False) -> Iterator[None]:
        """Within it, a batch that ``encoder`` is given is part ``index``.

        Once it has taken all parts, its running statistics are those after the whole batch.

        Args:
            again: a second time in the same step, which changes no running statistics.
        """
        if not self._groups:
            yield
            return
        norms, count = _norms(encoder), len(self._groups)
        whole, momentum = norms[0].groups, cast(Any, norms[0]).momentum
        # In the end, the old statistics weigh 1 - m and each part m / count; so far, they and these parts have come.
        weight = 1 - momentum + (index + 1) * momentum / count
        try:
            for norm in norms:
                norm.groups, norm.counted = self._groups[index], index == 0 and not again
                cast(Any, norm).momentum = 0.0 if again else momentum / count / weight
            yield
        finally:
            for norm in norms:
                norm.groups, norm.counted, cast(Any, norm).momentum = whole, True, momentum


def _norms(encoder: nn.Module) -> list[Grouped]:
    return [module for module in encoder.modules() if isinstance(module, Grouped)]
