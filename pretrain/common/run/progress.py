"""Progress of long work: a bar on a terminal, one line per minute in a log, and whether data or compute limits it."""

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
from tqdm.contrib.logging import logging_redirect_tqdm

from .. import distributed
from .workers import describe_bottleneck

log = logging.getLogger(__name__)
T = TypeVar("T")
_LINE_PERIOD_S = 60.0


class Progress:
    """Counts of steps and time, and the fraction of it spent waiting for data; `close` it at the end.

    Args:
        total_steps: optimizer steps of the whole run.
        start_step: steps completed before the run was resumed.
        images_per_step: images in the global batch.
        name: shown before the bar.
    """

    def __init__(self, total_steps: int, start_step: int, images_per_step: int, name: str) -> None:
        self._total = total_steps
        self._step = start_step
        self._images_per_step = images_per_step
        self._cleanup = contextlib.ExitStack()
        has_bar = distributed.is_first_rank() and sys.stderr.isatty()
        if has_bar:  # lines of the log appear above it
            loggers = [logging.getLogger(package) for package in ("pretrain", "transfer")]
            self._cleanup.enter_context(logging_redirect_tqdm(loggers))
        self._bar = tqdm(
            total=total_steps, initial=start_step, desc=name, unit="step", disable=not has_bar, dynamic_ncols=True
        )
        self._cleanup.callback(self._bar.close)
        self._interval_start = self._next_line = time.perf_counter()
        self._next_count = self._interval_start + _LINE_PERIOD_S
        self._interval_first_step = start_step
        self.seconds_waited = 0.0  # for data, since the last call of `take_rates`

    def measure_waits(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield ``batches``; add the time that the loop waits for each to ``seconds_waited``."""
        start = time.perf_counter()
        for batch in batches:
            self.seconds_waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the block from the rates, because it is not a step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._interval_start += time.perf_counter() - start
            self._bar.unpause()

    def advance(self) -> None:
        """Count one step; log the count if a minute has passed without a line, because the next report may be far."""
        self._step += 1
        self._bar.update()
        if distributed.is_first_rank() and time.perf_counter() >= self._next_count:
            self._log_line("", self._measure_rates(self.seconds_waited))

    def take_rates(self, seconds_waited: float | None = None) -> dict[str, float]:
        """Return the rates since the last call, and start the next interval; see `rates_at`.

        Args:
            seconds_waited: what the slowest rank waited for its data; None means this rank's time.
        """
        rates = self._measure_rates(self.seconds_waited if seconds_waited is None else seconds_waited)
        self._interval_start = time.perf_counter()
        self._interval_first_step = self._step
        self.seconds_waited = 0.0
        return rates

    def _measure_rates(self, seconds_waited: float) -> dict[str, float]:
        """Return the rates since the last call of `take_rates`."""
        spent = max(time.perf_counter() - self._interval_start, 1e-9)
        steps = max(self._step - self._interval_first_step, 1)
        return self.rates_at(spent / steps, seconds_waited / spent)

    def rates_at(self, seconds_per_step: float, wait_fraction: float) -> dict[str, float]:
        """Return images_per_second, data_wait_share (0 to 1) and eta_seconds."""
        return {
            "images_per_second": self._images_per_step / seconds_per_step,
            "data_wait_share": min(wait_fraction, 1.0),
            "eta_seconds": (self._total - self._step) * seconds_per_step,
        }

    def report(self, text: str, rates: dict[str, float], force: bool = False) -> None:
        """Log a line at most once a minute, or now with ``force``; on a terminal the bar shows ``text``, too."""
        self._bar.set_postfix_str(text)
        if time.perf_counter() >= self._next_line or force:
            self._next_line = time.perf_counter() + _LINE_PERIOD_S
            self._log_line(f"{text}  ", rates)

    def _log_line(self, text: str, rates: dict[str, float]) -> None:
        self._next_count = time.perf_counter() + _LINE_PERIOD_S
        fraction = rates["data_wait_share"]
        speed = f"{rates['images_per_second']:.1f} images/s  eta {timedelta(seconds=int(rates['eta_seconds']))}"
        memory = f"  {rates['max_memory_mib']:.0f} MiB" if "max_memory_mib" in rates else ""
        wait = f"data wait {fraction:.0%} ({describe_bottleneck(fraction)})"
        log.info(f"step {self._step}/{self._total}  {text}{speed}{memory}  {wait}")

    def close(self) -> None:
        """Remove the bar."""
        self._cleanup.close()


def take_memory_peaks(device: torch.device) -> dict[str, float]:
    """Return the peaks of a run's GPU memory (MiB) since the last call; an empty dict if its ``device`` is the CPU.

    What torch has allocated does not tell: a run on the CPU may follow one on the GPU in the same process.
    """
    if device.type != "cuda":
        return {}
    allocated = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()  # with the allocator's free blocks
    torch.cuda.reset_peak_memory_stats()
    return {"max_memory_mib": allocated / 2**20, "max_reserved_mib": reserved / 2**20}


def reduce_metrics(
    values: dict[str, Tensor], seconds_waited: float
) -> tuple[dict[str, float], float, dict[str, float]]:
    """Reduce the numbers of a log line over ranks, in one collective.

    Args:
        values: means over this rank's images.

    Returns:
        The means over the global batch, the seconds that the slowest rank waited for its data, and the largest of all
        ranks' memory peaks.
    """
    device = next(iter(values.values())).device
    peaks = take_memory_peaks(device)
    maxima = torch.tensor([seconds_waited, *peaks.values()], device=device)
    row = torch.cat([maxima, torch.stack([value.float() for value in values.values()])])
    columns = list(zip(*distributed.gather(row[None]).tolist(), strict=True))
    waited, *largest = (max(column) for column in columns[: len(maxima)])
    means = [sum(column) / len(column) for column in columns[len(maxima) :]]
    return dict(zip(values, means, strict=True)), waited, dict(zip(peaks, largest, strict=True))
