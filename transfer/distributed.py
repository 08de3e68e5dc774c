"""The processes of a fine-tuning run: their start, their group, agreement on a stop, and progress."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.multiprocessing as mp

from pretrain.common import distributed, interrupt
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.run.state import Job

_POLL_S = 1.0  # between two checks for a rank that has failed but does not exit
_GRACE_S = 3.0  # until the other ranks are killed after one has failed: they may be waiting for it in a collective
log = logging.getLogger(__name__)
T = TypeVar("T")


def launch(count: int, run: Callable[..., object], *arguments: Any) -> None:
    """Call ``run(*arguments, job)`` in ``count`` ranks, as Detectron2's `launch` does.

    A rank's mistake is raised in one line.

    A signal reaches every rank as a request to stop. torchrun also sends Ctrl-C on to ranks that have received it from
    the terminal already, which makes them stop immediately, without a checkpoint.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    messages = mp.get_context("spawn").SimpleQueue()
    with interrupt.block_signals():  # the ranks start with signals blocked, which would kill them during their imports
        ranks: Any = mp.start_processes(_rank_main, (count, port, messages, run, *arguments), count, join=False)
        for number in (signal.SIGINT, signal.SIGTERM):  # a second SIGINT would stop the ranks immediately
            signal.signal(number, lambda *_: [rank.terminate() for rank in ranks.processes])
    rank, mistake = None, None  # the first failure's: later errors may follow from it
    try:
        while not ranks.join(timeout=_POLL_S, grace_period=_GRACE_S):
            if rank is None and not messages.empty():
                rank, mistake = messages.get()
                ranks.join(timeout=_GRACE_S, grace_period=_GRACE_S)
                ranks.processes[rank].kill()  # it hangs at its exit
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        if rank is None and not messages.empty():
            rank, mistake = messages.get()
        raise (mistake or error) from error


def _rank_main(rank: int, count: int, port: int, messages: Any, run: Callable[..., object], *arguments: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    job = Job()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, job.stop.handle)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # see launch
    try:
        run(*arguments, job)
    except (UserError, Stopped, KeyboardInterrupt) as error:
        messages.put((rank, error))
        raise SystemExit(1) from error
    except Exception:
        messages.put((rank, None))  # torch passes its traceback on
        raise


def join(device_name: str) -> torch.device:
    """Join the process group of the environment (RANK, WORLD_SIZE, ...), if any, and return this process's device.

    Args:
        device_name: MODEL.DEVICE; cuda means the CPU where there is no GPU.

    Raises:
        UserError: an unknown device, a GPU chosen by its number, GPUs that torch cannot use, or more processes on this
            machine than GPUs.
    """
    if device_name not in ("cpu", "cuda"):
        raise UserError(f"MODEL.DEVICE is {device_name}; choose cpu or cuda (CUDA_VISIBLE_DEVICES selects a GPU)")
    device = distributed.init_process_group("auto" if device_name == "cuda" else "cpu", "MODEL.DEVICE")
    torch.backends.cudnn.benchmark = False  # images differ in size; CUDNN_BENCHMARK decides for training
    return device


def log_progress(batches: Iterable[T], total: int, activity: str) -> Iterator[T]:
    """Yield ``batches``; log every 10 s how many of ``total`` are complete, the rate, and the time left."""
    start = last_line = time.perf_counter()
    for done, batch in enumerate(batches):
        now = time.perf_counter()
        if done and now - last_line > 10:
            last_line = now
            rate = done / (now - start)
            log.info(f"{activity}: {done} / {total} batches, {rate:.2f} batches/s, {(total - done) / rate:.0f} s left")
        yield batch
