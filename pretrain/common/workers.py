"""The DataLoader of every stage: it shields its workers from the job's signals, and ends a run whose loading hangs."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader

from . import interrupt
from .errors import UserError

log = logging.getLogger("pretrain.workers")
REPORT_AFTER_S, GIVE_UP_AFTER_S = 60, 600  # of waiting for one batch
# Forked workers share the data set's memory and are born with signals blocked. On macOS, forking is not safe.
START_METHOD = "fork" if sys.platform == "linux" else None


class ShieldedDataLoader(DataLoader):
    """torch's DataLoader, with workers that obey SIGTERM from their parent and no other request to stop.

    A preemption signals every process of a job. The stage must finish its step and write a checkpoint, for which it
    needs its workers.

    Args:
        dataset: may have a method ``name(item) -> str``, used to say which items a stuck worker was given.
        batch_sampler: batches of items, perhaps without end.

    Raises:
        UserError: by its iterator, when a batch has not come for GIVE_UP_AFTER_S.
    """

    def __init__(self, dataset: Any, batch_sampler: Iterable[Any], num_workers: int, **kwargs: Any) -> None:
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        if num_workers:
            batch_sampler = self._pending = _Pending(batch_sampler)
            defaults["multiprocessing_context"] = START_METHOD
        super().__init__(
            dataset,
            batch_sampler=batch_sampler,  # type: ignore[arg-type]  # any iterable of batches will do
            num_workers=num_workers,
            **{**defaults, **kwargs},
        )

    def __iter__(self) -> Any:
        if self.num_workers and START_METHOD != "fork":
            resource_tracker.ensure_running()  # starting it unblocks signals
        with interrupt.held_back():  # until the new workers ignore them
            batches = super().__iter__()
        return self._watched(batches) if self.num_workers else batches

    def _watched(self, batches: Any) -> Iterator[Any]:
        pending, watch = self._pending.batches, _HangWatch(batches, getattr(self.dataset, "name", str))
        try:
            while True:
                watch.awaited = pending[0] if pending else None
                batch = next(batches)
                watch.awaited = None
                pending.popleft()
                yield batch
        except StopIteration:
            return
        except Exception as error:
            if watch.gave_up:
                raise UserError(watch.gave_up) from error
            raise
        finally:
            watch.end.set()


class _Pending:
    """A batch sampler that remembers the batches that were drawn from it but not yet delivered."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.batches: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.batches.clear()
        for batch in self._sampler:
            self.batches.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)


class _HangWatch:
    """A thread that reports a long wait for one batch and finally ends it by killing the workers.

    torch's own time-out does not help: a worker that is stopped while it hands over a batch blocks the receiver.

    Attributes:
        awaited: the batch that the process is waiting for now, or None; set by the process.
        gave_up: why the workers were killed, or an empty string.
        end: ends the watch; set by the process.
    """

    def __init__(self, batches: Any, name: Any) -> None:
        self.awaited: Any = None
        self.gave_up = ""
        self.end = threading.Event()
        self._batches, self._name = weakref.ref(batches), name  # torch ends the workers of an iterator that is deleted
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        periods, last, period_s = 0, None, REPORT_AFTER_S / 10
        while not self.end.wait(period_s):  # counted in periods: the time of a suspended job must not count
            awaited = self.awaited
            periods = periods + 1 if awaited is not None and awaited is last else 0
            last = awaited
            if periods == 10:
                log.warning(
                    f"no batch for {REPORT_AFTER_S:g} s: {self._stuck(awaited)}; the run ends after "
                    f"{GIVE_UP_AFTER_S:g} s; is the disk slow, or the process stopped?"
                )
            if periods * period_s >= GIVE_UP_AFTER_S:
                reason = f"no batch for {GIVE_UP_AFTER_S:g} s: {self._stuck(awaited)}; check them and their disk"
                self._kill_workers(reason)
                return

    def _stuck(self, items: Any) -> str:
        names = [self._name(item) for item in items[:3]] + ["..."] * (len(items) > 3)
        batches: Any = self._batches()
        worker = batches._workers[batches._task_info[batches._rcvd_idx][0]]
        return f"worker process {worker.pid} is reading {', '.join(names)}"

    def _kill_workers(self, reason: str) -> None:
        batches: Any = self._batches()
        self.gave_up = reason
        torch._C._remove_worker_pids(id(batches))  # else a signal handler would raise, perhaps outside of next()
        batches._worker_pids_set = False
        for process in batches._workers:  # a stopped one ignores SIGTERM, and Python would wait for it at exit
            process.kill()
