"""Progress of long work: a bar on a terminal, one line per minute in a log, and whether data or compute limits it."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from .. import distributed
from .workers import verdict

log = logging.getLogger(__name__)
T = TypeVar("T")


class Progress:
    """Counts steps, time and the share of it spent waiting for data.

    Args:
        total_steps: optimizer steps of the whole run.
        start_step: steps completed by an earlier part of the run.
        images_per_step: global batch.
    """

    def __init__(self, total_steps: int, start_step: int, images_per_step: int, name: str) -> None:
        self._total = total_steps
        self._step = start_step
        self._images_per_step = images_per_step
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            desc=name,
            unit="step",
            disable=not (distributed.is_main() and sys.stderr.isatty()),
            dynamic_ncols=True,
        )
        now = time.perf_counter()
        self._mark = now
        self._marked_step = start_step
        self.seconds_waited = 0.0  # for data, since the last call of `rates`
        self._next_line = now

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """``batches``; the time that the loop waits for each is added to ``seconds_waited``."""
        began = time.perf_counter()
        for batch in batches:
            self.seconds_waited += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the block from the rates, because it is not a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._mark += time.perf_counter() - began
            self._bar.unpause()

    def advance(self) -> None:
        self._step += 1
        self._bar.update()

    def rates(self, seconds_waited: float | None = None) -> dict[str, float]:
        """Since the last call: images_per_second (all ranks), data_wait_share (0 to 1), eta_seconds, max_memory_mib.

        Args:
            seconds_waited: of the rank that waited longest for its data and held up the others; None: of this rank.
        """
        waited = self.seconds_waited if seconds_waited is None else seconds_waited
        now = time.perf_counter()
        spent, steps = max(now - self._mark, 1e-9), max(self._step - self._marked_step, 1)
        rates = {
            "images_per_second": steps * self._images_per_step / spent,
            "data_wait_share": min(waited / spent, 1.0),
            "eta_seconds": (self._total - self._step) * spent / steps,
        }
        if torch.cuda.is_available():
            rates["max_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
        self._mark, self.seconds_waited, self._marked_step = now, 0.0, self._step
        return rates

    def report(self, text: str, rates: dict[str, float], force: bool = False) -> None:
        """Logs a line at most once a minute (``force``: now); on a terminal the bar shows the numbers too."""
        self._bar.set_postfix_str(text)
        now = time.perf_counter()
        if now < self._next_line and not force:
            return
        self._next_line = now + 60
        share = rates["data_wait_share"]
        with tqdm.external_write_mode(file=sys.stdout, nolock=False):
            log.info(
                f"step {self._step}/{self._total}  {text}  {rates['images_per_second']:.1f} images/s  "
                f"eta {timedelta(seconds=int(rates['eta_seconds']))}  "
                f"data wait {100 * share:.0f}% ({verdict(share, 0.3)})"
            )

    def close(self) -> None:
        self._bar.close()


def reduce_metrics(values: dict[str, Tensor], seconds_waited: float) -> tuple[dict[str, float], float]:
    """Return the means over the global batch, and the seconds that the slowest rank waited for its data.

    Args:
        values: means over this rank's images.
    """
    waited = torch.tensor([seconds_waited], device=next(iter(values.values())).device)
    row = torch.cat([waited, torch.stack([value.float() for value in values.values()])])
    rows = distributed.gather(row[None]).tolist()
    waits, *columns = zip(*rows, strict=True)
    means = [sum(column) / len(column) for column in columns]
    return dict(zip(values, means, strict=True)), max(waits)
