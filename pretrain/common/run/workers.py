"""The DataLoader of every stage: it shields its workers from the job's signals, and ends a run whose loading hangs."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from .. import interrupt
from ..errors import UserError
from .folder import usable_cores

TIMEOUT_S = 5  # of one wait for a batch; then torch looks for dead workers
TIMEOUTS = 120  # in a row end the run; a job that was suspended, however long, has one
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


class SignalSafeDataLoader(DataLoader):
    """torch's DataLoader, with workers that obey SIGTERM from their parent and no other request to stop.

    A preemption signals every process of a job. The stage must finish its step and write a checkpoint, for which it
    needs its workers. If they deliver no batch for TIMEOUTS * TIMEOUT_S, its iterator raises UserError.

    Args:
        batch_sampler: batches of items, perhaps without end.
        kwargs: of torch's DataLoader, with a ``collate_fn``.
    """

    def __init__(self, dataset: Any, batch_sampler: Iterable[Any], num_workers: int, **kwargs: Any) -> None:
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        if num_workers:
            defaults |= {"multiprocessing_context": START_METHOD, "timeout": TIMEOUT_S}
            kwargs["collate_fn"] = functools.partial(_collate_into_shared_memory, kwargs["collate_fn"])
        super().__init__(
            dataset,
            batch_sampler=batch_sampler,  # type: ignore[arg-type]  # any iterable of batches will do
            num_workers=num_workers,
            **{**defaults, **kwargs},
        )

    def __iter__(self) -> Any:
        if self.num_workers and START_METHOD != "fork":
            resource_tracker.ensure_running()  # starting it unblocks signals
        before = set(multiprocessing.active_children())
        on_child = signal.getsignal(signal.SIGCHLD)
        with interrupt.block_signals():  # until the new workers ignore them
            batches = super().__iter__()
        if threading.current_thread() is threading.main_thread():
            # torch's handler raises wherever a worker's death finds this thread, such as in the writing of a file.
            signal.signal(signal.SIGCHLD, on_child or signal.SIG_DFL)
        return _until_they_hang(batches, set(multiprocessing.active_children()) - before)


def _until_they_hang(batches: Any, workers: Iterable[Any]) -> Iterator[Any]:
    timeouts = 0
    while timeouts < TIMEOUTS:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            timeouts += 1
            continue
        timeouts = 0
        yield batch
    del batches  # torch ends the workers; one that waits for a disk may ignore it, and exit would wait for that one
    for worker in workers:
        worker.kill()
    raise UserError(
        f"the data loader's workers delivered no batch for {TIMEOUTS * TIMEOUT_S:g} s; check the disk or the file "
        "server"
    )


def _collate_into_shared_memory(collate: Callable[[Any], Any], items: Any) -> Any:
    """Where shared memory is too small, the worker raises; a thread of torch's queue would, and send no batch."""
    return tree_map_only(torch.Tensor, torch.Tensor.share_memory_, collate(items))
