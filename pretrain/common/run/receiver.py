"""Receipt of batches from the workers of a data loader, by a thread, and the reasons why none arrives."""

import queue
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line

_LOST_S = 10.0  # from the end of a worker's connection to that of its process, at most
_PROCESS_STATES = {"T": " (stopped)", "D": " (waiting for the disk or file server)", "t": " (in a debugger)"}


class PendingBatches:
    """Batches of items that remember which ones were handed out but not yet delivered."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.pending: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.pending.clear()
        for batch in self._batches:
            self.pending.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # of a sampler that ends


class Receiver(threading.Thread):
    """A thread that takes batches from torch's iterator when it is asked for one.

    A worker that is stopped while it hands over a batch blocks the receiver, whatever time-out torch is given.

    Attributes:
        results: for each request the batch, or the error.
    """

    def __init__(self, iterator: Any) -> None:
        super().__init__(daemon=True)
        self.results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._iterator = iterator
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_busy = False

    def run(self) -> None:
        while self._requests.get():
            result: tuple[Any, BaseException | None]
            try:
                result = (next(self._iterator), None)
            except BaseException as error:
                result = (None, error)
            self._is_busy = False
            self.results.put(result)
            del result  # a batch in shared memory
        self._iterator._shutdown_workers()

    def request(self) -> None:
        """Ask for the next batch."""
        self._is_busy = True
        self._requests.put(True)

    def end(self, workers: list[Any], patience_s: float) -> None:
        """End the workers and the thread; kill workers that hang, because this process's exit would wait for them.

        Args:
            patience_s: how long to wait for the workers to exit by themselves.
        """
        self._requests.put(False)
        if not self._is_busy:  # otherwise it waits for a worker that hangs
            self.join(patience_s)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(1)  # a read of an absent file server can outlast even this


def find_lost_worker(error: BaseException, workers: list[Any]) -> UserError | None:
    """Return an error that names a worker's exit as the cause of ``error``, if it is."""
    text = first_line(error)
    is_of_connection = isinstance(error, (EOFError, ConnectionError, FileNotFoundError))  # that to a worker's memory
    if is_of_connection and not text.startswith("Caught "):  # otherwise, the worker is alive and reports its error
        ends = wait([worker.sentinel for worker in workers], _LOST_S)  # its process ends a moment later
        for worker in workers:
            if worker.sentinel in ends:
                worker.join()
    exits = [_describe_exit(worker) for worker in workers if not worker.is_alive()]
    if not exits and "unable to allocate shared memory" not in str(error):
        return None
    problem = f"a worker process of the data loader has ended ({exits[0] if exits else text})"
    memory = "if memory ran out, lower DATALOADER.NUM_WORKERS"
    shared = "if /dev/shm is too small, enlarge it (docker run --shm-size 16g or --ipc=host) or set NUM_WORKERS 0"
    lost = UserError(f"{problem}; {memory}; {shared}; run again")
    lost.__cause__ = error
    return lost


def _describe_exit(worker: Any) -> str:
    code = worker.exitcode
    if code < 0:
        return f"process {worker.pid} was killed by {signal.Signals(-code).name}"
    return f"process {worker.pid} exited with status {code}"


def describe_worker(pid: int) -> str:
    """Name a worker process, and its state if it explains why no batch arrives."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        state = ""
    return f"loader worker process {pid}{_PROCESS_STATES.get(state, '')}"
