"""The DataLoader of every stage: its workers ignore the job's signals, and one that hangs is named and ends the run."""

import functools
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from .. import distributed, interrupt
from ..errors import UserError, count_noun, shorten_list
from ..interrupt import StopRequest
from ..logs import log_to_terminal
from ..ranks import process_group
from ..ranks.environment import count_cores_per_process, read_local_world_size
from .receiver import PendingBatches, Receiver, describe_worker, find_lost_worker
from .socket_folder import choose_socket_folder

_START_METHODS = ("fork", "forkserver", "spawn")
_POLL_S = 1.0  # between two checks of the workers and of the request to stop
_DEAD_S = 10.0  # torch reports a dead worker within 5 s, unless it died while it sent a batch
_LARGE_BATCH = 600  # images; a larger batch may take proportionally longer: 1 s for each image
_TIMEOUT_FRACTION = 0.8  # of a collective's time-out after which a rank without a batch says so
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoaderPatience:
    """How long a loader waits, in seconds.

    Attributes:
        warn_after_s: for a batch, until a warning.
        end_after_s: for a batch of up to 600 images, until the error; in proportion for more.
        stop_s: for a batch to arrive after a request to stop.
        stop_ranks_s: the same with several ranks, of which SLURM's first requeues the job before.
        exit_s: for the workers to exit by themselves.
    """

    warn_after_s: float = 60.0
    end_after_s: float = 600.0
    stop_s: float = 10.0
    stop_ranks_s: float = 120.0
    exit_s: float = 10.0


_PATIENCE = LoaderPatience()


def choose_start_method() -> str:
    """Return how to start workers: P2T_START_METHOD if it is set, or else fork where that is safe.

    Forked workers share the data set's memory and are born with signals blocked. InfiniBand's libraries may deadlock in
    a forked process (see torch's DistributedDataParallel), so a run on several machines uses a fork server, where each
    worker has its own copy of the data set: 55 MiB (measured) for the names and labels of ImageNet-1K.
    """
    processes = distributed.world_size()
    is_one_machine = processes <= read_local_world_size(processes)
    method = os.environ.get("P2T_START_METHOD") or ("fork" if is_one_machine else "forkserver")
    if method not in _START_METHODS:
        raise UserError(f"P2T_START_METHOD is {method}; set one of {', '.join(_START_METHODS)}")
    return method


def describe_bottleneck(fraction: float) -> str:
    """Say whether the loader or the computation limits a run that waits for data this ``fraction`` of the time."""
    if fraction <= 0.25:
        return "compute-bound"
    limit = count_noun(count_cores_per_process(), "core")
    return f"loader-bound: raise DATALOADER.NUM_WORKERS, at most to the {limit} that each process has"


class SignalSafeDataLoader(DataLoader):
    """torch's DataLoader, whose workers obey SIGTERM from their parent and ignore every other request to stop.

    A preemption signals every process of a job. The stage must finish its step and write a checkpoint, for which it
    needs its workers. torch only looks for workers that have died; here a worker that hangs is reported, and ends the
    run with a UserError. Without workers, a read that hangs is only reported, because nothing can end it.

    Args:
        batch_sampler: an iterable of batches of items, perhaps without end.
        describe: returns the name of an item's image, for messages.
        stop: a request that is obeyed even while a worker hangs.
        patience: how long to wait for a batch.
        kwargs: arguments of torch's DataLoader, including a ``collate_fn``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Iterable[Any],
        num_workers: int,
        *,
        describe: Callable[[Any], str] = str,
        stop: StopRequest | None = None,
        patience: LoaderPatience = _PATIENCE,
        **kwargs: Any,
    ) -> None:
        # Without a generator each iterator would draw from torch's global stream, and resuming would shift it.
        defaults = {"worker_init_fn": interrupt.ignore_in_worker, "generator": torch.Generator()}
        self._describe = describe
        self._stop = stop or StopRequest()
        self._patience = patience
        self._batches = PendingBatches(batch_sampler)
        self._is_forked = False
        if num_workers and multiprocessing.current_process().daemon:
            problem = "a daemonic process, such as one of a multiprocessing.Pool, cannot start loader workers"
            log.warning(f"{problem}; it reads the images itself")
            num_workers = 0
            kwargs.pop("prefetch_factor", None)
        if num_workers:
            start_method = choose_start_method()
            self._is_forked = start_method == "fork"
            if start_method == "forkserver":  # workers then share these imports, which take seconds
                multiprocessing.set_forkserver_preload(["pretrain.data.loader"])
            defaults["multiprocessing_context"] = start_method
            kwargs["collate_fn"] = functools.partial(_collate_into_shared_memory, kwargs["collate_fn"])
        options = {**defaults, **kwargs}
        options["worker_init_fn"] = functools.partial(_start_worker, options["worker_init_fn"])
        super().__init__(dataset, batch_sampler=self._batches, num_workers=num_workers, **options)

    def __iter__(self) -> Any:
        if not self.num_workers:
            return self._read_here(super().__iter__())
        choose_socket_folder()
        if not self._is_forked:
            resource_tracker.ensure_running()  # starting it unblocks signals
        on_child_exit = signal.getsignal(signal.SIGCHLD)
        with interrupt.block_signals():  # until the new workers ignore them
            iterator: Any = super().__iter__()
        if threading.current_thread() is threading.main_thread():
            # torch's handler raises at whatever line this process is when a worker dies, such as in writing a file.
            signal.signal(signal.SIGCHLD, on_child_exit or signal.SIG_DFL)
        return self._receive(iterator)

    def check_worker_number_rationality(self) -> None:
        """Say once per run that there are more workers than cores; torch's own check warns for each loader, twice."""
        cores = count_cores_per_process()
        if self.num_workers > cores:
            problem = f"{self.num_workers} loader workers share {count_noun(cores, 'core')}"
            remedy = f"DATALOADER.NUM_WORKERS {cores} needs less memory"
            log.info(f"{problem}; {remedy}", extra={"once": "more workers than cores"})

    def _receive(self, iterator: Any) -> Iterator[Any]:
        """Yield the workers' batches, which a thread receives, so that this one can watch and stop in the meantime."""
        receiver = Receiver(iterator)
        receiver.start()
        number = 0
        try:
            while True:
                worker = iterator._workers[number % self.num_workers]  # torch asks one after the other
                batch, error = self._wait(receiver, worker, iterator._workers)
                if isinstance(error, StopIteration):
                    return
                if error:
                    raise find_lost_worker(error, iterator._workers) or error
                number += 1
                self._batches.pending.popleft()
                yield batch
        finally:
            receiver.end(iterator._workers, self._patience.exit_s)

    def _wait(self, receiver: Receiver, worker: Any, workers: list[Any]) -> tuple[Any, BaseException | None]:
        """Return the next batch, or the error of receiving it."""
        receiver.request()
        poll_s = min(_POLL_S, self._patience.warn_after_s)
        waited_s = 0.0  # counted in polls: the time for which the whole job was suspended does not count
        dead_s = 0.0
        has_warned = False
        images = len(self._batches.pending[0]) if self._batches.pending else 0
        end_after_s = self._patience.end_after_s * max(1.0, images / _LARGE_BATCH)  # slow is not dead
        if distributed.world_size() > 1:  # the others wait in a collective, which must not time out first
            end_after_s = min(end_after_s, _TIMEOUT_FRACTION * process_group.STEP_TIMEOUT_S)
        while True:
            try:
                return receiver.results.get(timeout=poll_s)
            except queue.Empty:
                waited_s += poll_s
            if not all(process.is_alive() for process in workers):
                dead_s += poll_s
            if dead_s > _DEAD_S:
                return None, EOFError("it ended while it sent a batch")
            if waited_s < min(self._patience.warn_after_s, self._patience.stop_s):
                continue
            problem = f"no batch for {waited_s:.0f} s: {self._describe_wait(worker)}"
            _raise_if_stopped(self._stop.reason, problem, waited_s, self._patience)
            if waited_s >= end_after_s:
                cause = "the disk or file server does not respond, or the process was stopped"
                raise UserError(f"{problem}; {cause}; check that these files can be read, and run again to resume")
            if waited_s >= self._patience.warn_after_s and not has_warned:
                has_warned = True
                log.warning(f"{problem}; is the disk or file server slow? The run ends after {end_after_s:.0f} s")

    def _describe_wait(self, worker: Any) -> str:
        """Name the process that reads the batch waited for, and the images."""
        reader = describe_worker(worker.pid) if worker else "this process"
        pending = self._batches.pending
        names = shorten_list([self._describe(item) for item in pending[0]]) if pending else "the next batch"
        return f"{reader} does not deliver {names}"

    def _read_here(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches that this process reads itself; warn of a read that hangs."""

        def warn() -> None:
            problem = f"no batch for {self._patience.warn_after_s:.0f} s: {self._describe_wait(None)}"
            log.warning(f"{problem}; is the disk or file server slow?")

        while True:
            timer = threading.Timer(self._patience.warn_after_s, warn)
            timer.daemon = True
            timer.start()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                timer.cancel()
            self._batches.pending.popleft()
            yield batch


def _raise_if_stopped(reason: str, problem: str, waited_s: float, patience: LoaderPatience) -> None:
    """Obey a request to stop while waiting for a batch that may never come.

    Raises:
        Stopped: in a single process.
        UserError: with several ranks, which cannot agree on a stop: the others wait for this one in a collective.
    """
    if not reason:
        return
    if distributed.world_size() == 1:
        if waited_s >= patience.stop_s:
            raise interrupt.Stopped(reason, f"{problem}; run the same command again to resume")
    elif waited_s >= patience.stop_ranks_s:
        raise UserError(f"stopped by {reason}; {problem}; run the same command again to resume")


def _start_worker(initialize: Callable[[int], None], worker: int) -> None:
    initialize(worker)
    if not logging.getLogger("pretrain").handlers:  # unlike a forked worker, which logs as its parent does
        log_to_terminal()


def _collate_into_shared_memory(collate: Callable[[Any], Any], items: Any) -> Any:
    """Allocate shared memory here: where it is too small, the worker raises; torch's queue would send no batch."""
    return tree_map_only(torch.Tensor, torch.Tensor.share_memory_, collate(items))
