"""The DataLoader of every stage, whose workers ignore the job's signals."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from .. import interrupt
from .folder import usable_cores

# Forked workers share the data set's memory and are born with signals blocked. On macOS, forking is not safe.
START_METHOD = "fork" if sys.platform == "linux" else None


def verdict(fraction: float, limit: float) -> str:
    """Say whether the loader or the computation limits a run that waits for data this ``fraction`` of the time."""
    if fraction <= limit:
        return "compute-bound"
    per_task = os.environ.get("SLURM_CPUS_PER_TASK")
    cores = int(per_task) if per_task else usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"loader-bound: raise DATALOADER.NUM_WORKERS, at most to the {max(1, cores)} core(s) that each process has"


class SignalSafeDataLoader(DataLoader):
    """torch's DataLoader, whose workers obey SIGTERM from their parent and ignore every other request to stop.

    A preemption signals every process of a job. The stage must finish its step and write a checkpoint, for which it
    needs its workers.

    Args:
        batch_sampler: an iterable of batches of items, perhaps without end.
        kwargs: of torch's DataLoader, with a ``collate_fn``.
    """

    def __init__(self, dataset: Any, batch_sampler: Any, num_workers: int, **kwargs: Any) -> None:
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        if num_workers:
            defaults["multiprocessing_context"] = START_METHOD
            kwargs["collate_fn"] = functools.partial(_collate_into_shared_memory, kwargs["collate_fn"])
        super().__init__(dataset, batch_sampler=batch_sampler, num_workers=num_workers, **{**defaults, **kwargs})

    def __iter__(self) -> Any:
        if self.num_workers and START_METHOD != "fork":
            resource_tracker.ensure_running()  # starting it unblocks signals
        with interrupt.block_signals():  # until the new workers ignore them
            return super().__iter__()


def _collate_into_shared_memory(collate: Callable[[Any], Any], items: Any) -> Any:
    """Allocate shared memory here: where it is too small, the worker raises; torch's queue would send no batch."""
    return tree_map_only(torch.Tensor, torch.Tensor.share_memory_, collate(items))
