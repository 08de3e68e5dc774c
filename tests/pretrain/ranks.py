"""Runs an importable function in other processes, for tests."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import pytest
import torch
import torch.multiprocessing as mp

from pretrain.common.ranks import process_group
from pretrain.common.ranks.process_group import leave
from tests import tiny

# The processes of all tests are forked from one that has imported these, because that takes seconds of CPU time.
START_METHOD = "forkserver"
_IMPORTED = (
    "pytest torch._dynamo torch.utils.tensorboard.writer cv2 matplotlib.figure sklearn.datasets scipy.stats "
    "pycocotools.cocoeval pretrain.train transfer.api tools.convert_to_d2 tools.report tests.in_process"
)
multiprocessing.set_forkserver_preload([*_IMPORTED.split()])


def call_on_ranks(function: Callable, ranks: int, *args, device: str | None = "cpu") -> None:
    """Call ``function(*args)`` in ``ranks`` processes on this machine; raise the error of the first one that fails.

    They form one process group (gloo; nccl on cuda); with ``device`` None they have its environment and do not join it.
    A group must not be left and joined again in one call: a rank may then meet the old group's store at this port.
    Changes of ``os.environ`` in this process do not reach them.
    """
    values = (ranks, find_port(), function, args, device, tiny.in_use())
    mp.start_processes(_enter, values, nprocs=ranks, start_method=START_METHOD)


def find_port() -> int:
    """Find a port that is free on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def set_rank(rank: int, ranks: int, port: int) -> None:
    """Set the environment of a rank on this machine, with one thread."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)


def start(function: Callable, *args) -> BaseProcess:
    """Start ``function(*args)`` in another process."""
    process = multiprocessing.get_context(START_METHOD).Process(target=_call, args=(function, args, tiny.in_use()))
    process.start()
    return process


def _call(function: Callable, args: tuple, is_tiny: bool) -> None:
    if is_tiny:
        tiny.use(pytest.MonkeyPatch())
    function(*args)


def _enter(
    rank: int, ranks: int, port: int, function: Callable, args: tuple, device: str | None, is_tiny: bool
) -> None:
    set_rank(rank, ranks, port)
    if device is not None:
        process_group.init_process_group(device)
    _call(function, args, is_tiny)
    leave()  # not after an error: the other ranks may never reach it
