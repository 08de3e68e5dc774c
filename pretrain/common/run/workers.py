"""The DataLoader of every stage, whose workers ignore the job's signals."""

import functools
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from .. import distributed, interrupt
from ..errors import UserError
from .folder import count_usable_cores

_START_METHODS = ("fork", "forkserver", "spawn")


def choose_start_method() -> str:
    """Return how to start workers: P2T_START_METHOD if it is set, or else fork where that is safe.

    Forked workers share the data set's memory and are born with signals blocked. InfiniBand's libraries may deadlock in
    a forked process (see torch's DistributedDataParallel), so a run on several machines uses a fork server, where each
    worker has its own copy of the data set: 55 MiB (measured) for the names and labels of ImageNet-1K.
    """
    processes = distributed.world_size()
    is_one_machine = processes <= int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    method = os.environ.get("P2T_START_METHOD") or ("fork" if is_one_machine else "forkserver")
    if method not in _START_METHODS:
        raise UserError(f"P2T_START_METHOD is {method}; set one of {', '.join(_START_METHODS)}")
    return method


def describe_bottleneck(fraction: float) -> str:
    """Say whether the loader or the computation limits a run that waits for data this ``fraction`` of the time."""
    if fraction <= 0.25:
        return "compute-bound"
    per_task = os.environ.get("SLURM_CPUS_PER_TASK")
    cores = int(per_task) if per_task else count_usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"loader-bound: raise DATALOADER.NUM_WORKERS, at most to the {max(1, cores)} core(s) that each process has"


class SignalSafeDataLoader(DataLoader):
    """torch's DataLoader, whose workers obey SIGTERM from their parent and ignore every other request to stop.

    A preemption signals every process of a job. The stage must finish its step and write a checkpoint, for which it
    needs its workers.

    Args:
        batch_sampler: an iterable of batches of items, perhaps without end.
        kwargs: arguments of torch's DataLoader, including a ``collate_fn``.
    """

    def __init__(self, dataset: Any, batch_sampler: Any, num_workers: int, **kwargs: Any) -> None:
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        self._is_forked = False
        if num_workers:
            start_method = choose_start_method()
            self._is_forked = start_method == "fork"
            if start_method == "forkserver":  # workers then share these imports, which take seconds
                multiprocessing.set_forkserver_preload(["pretrain.data.loader"])
            defaults["multiprocessing_context"] = start_method
            kwargs["collate_fn"] = functools.partial(_collate_into_shared_memory, kwargs["collate_fn"])
        super().__init__(dataset, batch_sampler=batch_sampler, num_workers=num_workers, **{**defaults, **kwargs})

    def __iter__(self) -> Any:
        if self.num_workers and not self._is_forked:
            resource_tracker.ensure_running()  # starting it unblocks signals
        with interrupt.block_signals():  # until the new workers ignore them
            return super().__iter__()


def _collate_into_shared_memory(collate: Callable[[Any], Any], items: Any) -> Any:
    """Allocate shared memory here: where it is too small, the worker raises; torch's queue would send no batch."""
    return tree_map_only(torch.Tensor, torch.Tensor.share_memory_, collate(items))
