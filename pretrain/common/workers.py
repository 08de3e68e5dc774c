"""The DataLoader of every stage: its workers outlive signals meant for the job, a hang is reported and then ends the
run, and no random numbers are drawn."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader

from . import interrupt
from .errors import UserError

log = logging.getLogger("pretrain.workers")
REPORT_AFTER_S, GIVE_UP_AFTER_S = 60, 600  # of waiting for one batch
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
        UserError: by its iterator, when a batch has not come for GIVE_UP_AFTER_S.
    """

    def __init__(self, dataset: Any, batch_sampler: Iterable[Any], num_workers: int, **kwargs: Any) -> None:
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        if num_workers:
            batch_sampler = self._drawn = _Drawn(batch_sampler)
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
        waiting = self._drawn.awaited
        watch = _Watch(batches, getattr(self.dataset, "name", str))
        try:
            while True:
                watch.awaited = waiting[0] if waiting else None
                batch = next(batches)
                watch.awaited = None
                waiting.popleft()
                yield batch
        except StopIteration:
            return
        except Exception as error:
            if watch.gave_up:
                raise UserError(watch.gave_up) from error
            raise
        finally:
            watch.end.set()


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


class _Watch:
    """A thread that reports a wait for one batch that takes too long, and at last ends it by killing the workers.

    torch's own time-out does not help: a worker that is stopped while it hands over a batch blocks the receiver.

    Attributes:
        awaited: the batch that the process is waiting for now, or None. To be set by the process.
        gave_up: why the workers were killed, or an empty string.
        end: ends the watch. To be set by the process.
    """

    def __init__(self, batches: Any, name: Callable[[Any], str]) -> None:
        self.awaited: Any = None
        self.gave_up = ""
        self.end = threading.Event()
        self._batches, self._name = weakref.ref(batches), name  # torch ends the workers of an iterator that is deleted
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        waited_s, last = 0.0, None
        period_s = REPORT_AFTER_S / 10
        while not self.end.wait(period_s):  # counted in periods: while a job is suspended, nobody waits
            awaited = self.awaited
            before_s, waited_s = waited_s, 0.0 if awaited is None or awaited is not last else waited_s + period_s
            last = awaited
            if waited_s >= GIVE_UP_AFTER_S:
                self._give_up(f"no batch for {GIVE_UP_AFTER_S:g} s: {self._stuck(awaited)}; check them and their disk")
                return
            if before_s < REPORT_AFTER_S <= waited_s:
                log.warning(
                    f"no batch for {REPORT_AFTER_S:g} s: {self._stuck(awaited)}; the run ends after "
                    f"{GIVE_UP_AFTER_S:g} s; is the disk slow, or the process stopped?"
                )

    def _stuck(self, items: Any) -> str:
        names = [self._name(item) for item in items[:3]] + ["..."] * (len(items) > 3)
        batches: Any = self._batches()
        worker = batches._workers[batches._task_info[batches._rcvd_idx][0]]
        return f"worker process {worker.pid} is reading {', '.join(names)}"

    def _give_up(self, reason: str) -> None:
        batches: Any = self._batches()
        self.gave_up = reason
        torch._C._remove_worker_pids(id(batches))  # else a signal handler would raise, perhaps outside of next()
        batches._worker_pids_set = False
        for process in batches._workers:  # a stopped one is deaf to SIGTERM, and Python would wait for it at exit
            process.kill()
