"""Starts jobs of one process from a process that has already imported what stages import.

The imports of a stage take several seconds; the stages of a pipeline on this machine do them once, in Python's fork
server. A fork of it becomes the controller of a job, and a fork of that its rank. The server computes nothing and never
looks for a GPU, so that no OpenMP team and no CUDA context exist before the fork; a job gets its own environment in the
fork. Only variables that libraries read on import have to be the same for all: those of the launcher.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

_PRELOAD = [
    "tools.launcher.job", "tools.launcher.controller", "tools.convert_to_d2", "pretrain.train", "pretrain.probe.knn",
    "pretrain.probe.linear",
]  # fmt: skip


class Forked:
    """A forked process with the methods of `subprocess.Popen` that submitit uses.

    Args:
        method: forkserver (of a process that is warm) or fork (of this process).
        environment: its whole environment.
    """

    returncode: int | None = None

    def __init__(self, method: str, environment: Mapping[str, str], function: Callable[..., None], *args: Any) -> None:
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        self._process = context.Process(target=_run, args=(dict(environment), function, args))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(environment: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher forwards the terminal's Ctrl-C
    function(*args)


def run_rank(command: list[str], out: int, err: int) -> None:
    """Does in this process what ``command`` (submitit's) does in a new one, with its output in two open files."""
    from submitit.core.submission import submitit_main

    for stream, target, source in ((sys.stdout, 1, out), (sys.stderr, 2, err)):
        os.dup2(source, target)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)  # python -u
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and "torch" in sys.modules:  # it read the launcher's value on import
        sys.modules["torch"].set_num_threads(int(threads))
    sys.argv = command[command.index("-m") + 1 :]
    try:
        submitit_main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends a process without them
