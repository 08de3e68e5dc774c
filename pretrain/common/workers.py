"""The DataLoader of every stage: its workers outlive signals meant for the job, a hang is reported and then ends the
run, and no random numbers are drawn."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from . import interrupt
from .errors import UserError

log = logging.getLogger("pretrain.workers")
REPORT_AFTER_S, GIVE_UP_AFTER_S = 60, 600  # without a batch, although a process is waiting for one
# Forked workers share the data set's memory and are born with signals held back. On macOS, forking is not safe.
START_METHOD = "fork" if sys.platform == "linux" else None


class ShieldedDataLoader(DataLoader):
    """torch's, with workers that take SIGTERM from their parent only and no other request to stop.

    A preemption signals every process of a job. The stage must end its step and write a checkpoint, for which it needs
    its workers.

    Args:
        dataset: may have a method ``name(item) -> str``, used to say which items a stuck worker was given.
        batch_sampler: batches of items, perhaps without end.

    Raises:
        UserError: by its iterator, when a worker has returned nothing for GIVE_UP_AFTER_S.
    """

    def __init__(self, dataset: Any, batch_sampler: Iterable[Any], num_workers: int, **kwargs: Any) -> None:
        self._drawn = _Drawn(batch_sampler)
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        if num_workers:
            defaults |= {"timeout": REPORT_AFTER_S, "multiprocessing_context": START_METHOD}
        super().__init__(
            dataset,
            batch_sampler=self._drawn,  # type: ignore[arg-type]  # any iterable of batches will do
            num_workers=num_workers,
            **{**defaults, **kwargs},
        )

    def __iter__(self) -> Any:
        with interrupt.held_back():  # until the new workers ignore them
            batches = super().__iter__()
        return self._watched(batches)

    def _watched(self, batches: Any) -> Iterator[Any]:
        waited_s = 0.0
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
                waited_s += self.timeout
                self._report(batches, waited_s)
                continue
            waited_s = 0.0
            self._drawn.awaited.popleft()
            yield batch

    def _report(self, batches: Any, waited_s: float) -> None:
        items = self._drawn.awaited[0]
        names = [getattr(self.dataset, "name", str)(item) for item in items[:3]] + ["..."] * (len(items) > 3)
        worker = batches._workers[batches._task_info[batches._rcvd_idx][0]]
        stuck = f"no batch for {waited_s:g} s: worker process {worker.pid} is reading {', '.join(names)}"
        if waited_s < GIVE_UP_AFTER_S:
            log.warning(f"{stuck}; the run ends after {GIVE_UP_AFTER_S:g} s; is the disk slow, or the process stopped?")
            return
        batches._shutdown_workers()
        for process in batches._workers:  # one that is stopped is deaf to SIGTERM, and Python would wait for it at exit
            process.kill()
        raise UserError(f"{stuck}; check these files, their disk and the process, and run again to resume")


class _Drawn:
    """A batch sampler that remembers the batches that were drawn from it but not yet delivered."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.awaited: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.awaited.clear()
        for batch in self._batches:
            self.awaited.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._batches)
