"""The DataLoader of every stage: it shields its workers from the job's signals, and reports loading that hangs."""

from __future__ import annotations

import logging
import os
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
from .run_folder import usable_cores

log = logging.getLogger("pretrain.workers")
REPORT_AFTER_S, GIVE_UP_AFTER_S = 60, 600  # of waiting for one batch
# Forked workers share the data set's memory and are born with signals blocked. On macOS, forking is not safe.
START_METHOD = "fork" if sys.platform == "linux" else None


def verdict(share: float, limit: float) -> str:
    """Whether the loader or the computation bounds a run that waits for data this ``share`` of the time.

    The cores are those that a process may use: its own on SLURM, else its part of this machine's.
    """
    if share <= limit:
        return "compute-bound"
    per_task = os.environ.get("SLURM_CPUS_PER_TASK")
    cores = int(per_task) if per_task else usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"loader-bound: raise DATALOADER.NUM_WORKERS, at most to the {max(1, cores)} core(s) that each process has"


class ShieldedDataLoader(DataLoader):
    """torch's DataLoader, with workers that obey SIGTERM from their parent and no other request to stop.

    A preemption signals every process of a job. The stage must finish its step and write a checkpoint, for which it
    needs its workers.

    Args:
        dataset: may have a method ``name(item) -> str``, used to say which items a stuck worker was given.
        batch_sampler: batches of items, perhaps without end.
        kwargs: of torch's DataLoader, with a ``collate_fn``.

    Raises:
        UserError: by its iterator, when a worker has not delivered a batch for GIVE_UP_AFTER_S.
    """

    def __init__(self, dataset: Any, batch_sampler: Iterable[Any], num_workers: int, **kwargs: Any) -> None:
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        batch_sampler = self._pending = _Pending(batch_sampler)
        if num_workers:
            defaults["multiprocessing_context"] = START_METHOD
            kwargs["collate_fn"] = _Shared(kwargs["collate_fn"])
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
        return self._watched(batches)

    def _watched(self, batches: Any) -> Iterator[Any]:
        watch = _HangWatch(batches, self._pending, getattr(self.dataset, "name", str))
        try:
            while True:
                watch.is_waiting = True
                batch = next(batches)
                watch.is_waiting = False
                self._pending.batches.popleft()
                yield batch
        except StopIteration:
            return
        except Exception as error:
            if watch.gave_up:
                raise UserError(watch.gave_up) from error
            raise
        finally:
            watch.end.set()


class _Shared:
    """Collates in a worker, and moves the tensors to shared memory there: where that is too small, the worker raises.

    torch would move them in a thread of the queue, which prints the error, and the batch never comes.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Any:
        batch = self._collate(items)
        _share(batch)
        return batch


def _share(batch: Any) -> None:
    if isinstance(batch, torch.Tensor):
        batch.share_memory_()
    for part in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ():
        _share(part)


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

    def first(self) -> Any:
        """The batch to be delivered next; None: none was drawn."""
        try:
            return self.batches[0]
        except IndexError:
            return None


class _HangWatch:
    """A thread that reports a long wait for one batch and finally ends it by killing the workers.

    torch's own time-out does not help: a worker that is stopped while it hands over a batch blocks the receiver.
    Without workers it only reports: nothing can end the process's own reading, and a debugger may be what holds it.

    Attributes:
        is_waiting: the process is waiting for a batch now; set by the process.
        gave_up: why the workers were killed, or an empty string.
        end: ends the watch; set by the process.
    """

    def __init__(self, batches: Any, pending: _Pending, name: Any) -> None:
        self.is_waiting = False
        self.gave_up = ""
        self.end = threading.Event()
        self._batches = weakref.ref(batches)  # torch ends the workers of an iterator that is deleted
        self._pending, self._name, self._workers = pending, name, bool(getattr(batches, "_workers", ()))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        periods, last, period_s = 0, None, REPORT_AFTER_S / 10
        while not self.end.wait(period_s):  # counted in periods: the time of a suspended job must not count
            awaited = self._pending.first() if self.is_waiting else None
            periods = periods + 1 if awaited is not None and awaited is last else 0
            last = awaited
            if periods == 10:
                end = f"the run ends after {GIVE_UP_AFTER_S:g} s; is the disk slow, or the process stopped?"
                text = f"no batch for {REPORT_AFTER_S:g} s: {self._stuck(awaited)}"
                log.warning(f"{text}; {end if self._workers else 'is the disk slow?'}")
            if self._workers and periods * period_s >= GIVE_UP_AFTER_S:
                reason = f"no batch for {GIVE_UP_AFTER_S:g} s: {self._stuck(awaited)}; check them and their disk"
                self._kill_workers(reason)
                return

    def _stuck(self, items: Any) -> str:
        names = [self._name(item) for item in items[:3]] + ["..."] * (len(items) > 3)
        reader = "this process"
        if self._workers:
            batches: Any = self._batches()
            reader = f"worker process {batches._workers[batches._task_info[batches._rcvd_idx][0]].pid}"
        return f"{reader} is reading {', '.join(names)}"

    def _kill_workers(self, reason: str) -> None:
        batches: Any = self._batches()
        self.gave_up = reason
        torch._C._remove_worker_pids(id(batches))  # else a signal handler would raise, perhaps outside of next()
        batches._worker_pids_set = False
        for process in batches._workers:  # a stopped one ignores SIGTERM, and Python would wait for it at exit
            process.kill()
