"""Runs an importable function in several processes, for tests; the first failing rank's error is raised."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.multiprocessing as mp

from pretrain import distributed
from pretrain.common.stage import leave


def run_ranks(function: Callable, ranks: int, *args, device: str | None = "cpu") -> None:
    """Calls ``function(*args)`` in ``ranks`` processes on this machine.

    They form one process group (gloo; nccl on cuda); with ``device`` None they have its environment and do not join it.
    A group must not be left and joined again in one call: a rank may then meet the old group's store at this port.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_enter, (ranks, port, function, args, device), nprocs=ranks, start_method="spawn")


def _enter(rank: int, ranks: int, port: int, function: Callable, args: tuple, device: str | None) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    if device is not None:
        distributed.init(device)
    function(*args)
    leave()  # not after an error: the other ranks may never reach it
