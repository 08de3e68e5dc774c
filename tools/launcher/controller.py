"""The process that starts a local job's ranks and waits for them: submitit's, with what srun does on a cluster.

- A rank that failed or was killed ends the other ranks, which would wait for it in a collective for half an hour.
- A job is requeued as often as it asks for it, within `Options.max_timeouts`; submitit ends it after 6 times.
- Every rank gets the number of its attempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit
from submitit.core import utils
from submitit.local import local

from . import warm
from .ranks import mark_failed

ATTEMPT = "LAUNCH_ATTEMPT"  # how often the job was started before
_GRACE_S = 5.0  # between one rank's failure and the end of the other ranks, which may be about to report the same
_STOPPED = 128 + signal.SIGTERM  # a rank's exit status after a requested stop
_GOOD = (None, 0, _STOPPED, local.LOCAL_REQUEUE_RETURN_CODE)


class LocalExecutor(submitit.LocalExecutor):
    """Starts jobs under `Controller`.

    Args:
        variables: of the ranks' environment: CUDA_VISIBLE_DEVICES, as submitit itself can only count devices from 0.
        is_warm: start jobs of one process from a process that has imported what stages import (see `warm`).
    """

    def __init__(self, folder: Path, max_num_timeout: int, variables: Mapping[str, str], is_warm: bool) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout)
        self._variables, self._is_warm = variables, is_warm

    def _submit_command(self, command: str) -> local.LocalJob[Any]:
        tasks = self.parameters["tasks_per_node"]
        env = {
            **os.environ, "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": str(tasks), "SUBMITIT_LOCAL_NODEID": "0", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(self.parameters["signal_delay_s"]),
            "SUBMITIT_STDERR_TO_STDOUT": "", "SUBMITIT_LOCAL_WITH_SHELL": "", **self._variables,
        }  # fmt: skip
        process: Any
        if self._is_warm and tasks == 1:
            process = warm.Forked("forkserver", env, _control, str(self.folder), True)
        else:
            process = subprocess.Popen([sys.executable, "-m", "tools.launcher.controller", str(self.folder)], env=env)
        return local.LocalJob(self.folder, str(process.pid), tasks=list(range(tasks)), process=process)


class Controller(local.Controller):
    """Reads its job from the environment that `LocalExecutor` made.

    Args:
        is_warm: run the rank in a fork of this process, which has done its imports.
    """

    attempt = -1
    is_stopping = False

    def __init__(self, folder: Path, is_warm: bool = False) -> None:
        super().__init__(folder)
        self._is_warm = is_warm

    def _forward_signal(self, signum: signal.Signals, *args: Any) -> None:
        self.is_stopping |= signum == signal.SIGTERM
        super()._forward_signal(signum, *args)

    def start_tasks(self) -> None:
        self.attempt += 1
        os.environ[ATTEMPT] = str(self.attempt)
        if not self._is_warm:
            super().start_tasks()
            return
        paths = utils.JobPaths(self.folder, self.pid, 0)
        while not paths.submitted_pickle.exists():  # the rank would look for it once per second
            time.sleep(0.01)
        self.stdouts, self.stderrs = [paths.stdout.open("a")], [paths.stderr.open("a")]
        ids = {f"SUBMITIT_LOCAL_{name}": "0" for name in ("LOCALID", "GLOBALID")}
        environment = {**os.environ, **ids, "SUBMITIT_LOCAL_JOB_ID": self.pid}
        files = (self.stdouts[0].fileno(), self.stderrs[0].fileno())
        rank: Any = warm.Forked("fork", environment, warm.run_rank, self.command, *files)
        self.tasks = [rank]

    def wait(self, freq: int = 24) -> list[int | None]:
        """Waits for all ranks, a failure or the time limit; returns exit statuses, None for ranks still running."""
        if self.is_stopping:  # the signal came before all ranks were started
            self._forward_signal(signal.SIGTERM)
        started = time.monotonic()
        failed_at, is_warned = None, False
        while True:
            codes = [task.poll() for task in self.tasks]
            ran = time.monotonic() - started
            if failed_at is None:
                bad = next((rank for rank, code in enumerate(codes) if code not in _GOOD), None)
                if bad is not None:
                    failed_at = ran
                    if (
                        not self.is_stopping or codes[bad] != -signal.SIGTERM
                    ):  # otherwise its handler was not installed yet
                        self._record_failure(bad, _how_it_ended(codes[bad] or 0, self.stderrs[bad].name))
            if None not in codes or (failed_at is not None and ran > failed_at + _GRACE_S):
                return codes
            if ran > self.timeout_s:
                self._record_failure(
                    codes.index(None), f"it exceeded the time limit of {self.timeout_s / 60:.0f} minutes"
                )
                return codes
            if ran > self.timeout_s - self.signal_delay_s and not is_warned:
                is_warned = True
                self._forward_signal(local.LocalJobEnvironment._usr_sig())
            time.sleep(1 / freq)

    def _record_failure(self, rank: int, text: str) -> None:
        stem = f"{self.folder.name}.{self.pid}.{self.attempt}"
        mark_failed(self.folder.parent / "ranks" / stem, rank, f"rank {rank}: {text}")


def _how_it_ended(code: int, stderr: str) -> str:
    """For a rank that recorded no reason of its own."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"it was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    with contextlib.suppress(OSError), open(stderr, "rb") as file:
        file.seek(max(0, os.path.getsize(stderr) - 4096))
        if lines := file.read().decode(errors="replace").split("\n")[:-1]:
            return f"it ended with status {code}: {lines[-1]}"
    return f"it ended with status {code}"


def _control(folder: str, is_warm: bool = False) -> None:
    Controller(Path(folder), is_warm).run(max_retry=sys.maxsize)


if __name__ == "__main__":
    _control(sys.argv[1])
