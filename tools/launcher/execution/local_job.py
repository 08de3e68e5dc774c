"""A job of this machine: one process per rank, started and monitored by the launcher.

When a rank fails or is killed, the other ranks are killed: they would wait for it in a collective for half an hour.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError, escape_control
from pretrain.common.files import write_json
from pretrain.common.run.folder import count_usable_cores
from pretrain.common.run.lease import read_start_time
from pretrain.common.run.state import read_record
from tools import ROOT
from tools.stages.base import Stage

from ..resources import Resources
from .job import Job
from .rank_main import STOPPED, build_rank_environment
from .records import name_log_folder, record_failure, record_job

_GRACE_S = 5.0  # between one rank's failure and the end of the other ranks, which may be about to report the same
_SLURM_VARIABLES = ("SLURM_", "SRUN_", "SUBMITIT_")  # variables of a job that this process may be part of


class LocalJob:
    """The running ranks of a stage.

    Args:
        gpus: names of its GPUs.
        prefix: before every line of its output.
    """

    def __init__(self, spec: Stage, resources: Resources, gpus: list[str], prefix: str) -> None:
        self.spec = spec
        self.gpus = gpus
        self.started = time.monotonic()
        self.folder = Path(spec.folder)
        self.logs = name_log_folder(spec.folder)
        self._prefix = prefix
        self._shown = dict.fromkeys(list_log_files(self.logs, 0), 0)  # number of bytes by file
        self._is_stopping = False
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._failed_at: float | None = None
        write_json(self.logs / "spec.json", spec.to_json())
        is_share = resources.request.gpus is not None or resources.parallel > 1 or not spec.gpu
        environment = _build_environment(resources, gpus if gpus or is_share else None)
        size = resources.tasks
        command = [sys.executable, "-u", "-m", "tools.launcher.execution.rank_main", str(self.logs)]
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # ranks never see the terminal's Ctrl-C
        try:
            for rank in range(size):
                variables = {**environment, **build_rank_environment(rank, size, rank, size)}
                out, err = list_log_files(self.logs, rank)
                with open(out, "wb") as stdout, open(err, "wb") as stderr:
                    process = subprocess.Popen(command, env=variables, stdout=stdout, stderr=stderr)
                self._ranks.append(process)
        except OSError as error:
            for process in self._ranks:
                process.kill()
            raise UserError(f"cannot start the ranks of {spec.name}: {error}; free memory or processes") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        processes = {str(process.pid): read_start_time(process.pid) for process in self._ranks}
        launcher = {str(os.getpid()): read_start_time(os.getpid())}
        place: dict[str, Any] = {"cluster": "local", "host": socket.gethostname(), "logs": str(self.logs)}
        place |= {"processes": processes, "launcher": launcher, "submitted": time.time()}
        record_job(spec, resources, Job(self.folder, str(self._ranks[0].pid), **place))

    def has_ended(self) -> bool:
        """Return whether every rank has ended; ranks that wait for one that failed are killed after some seconds."""
        codes = [process.poll() for process in self._ranks]
        if self._failed_at is None:
            for rank, code in enumerate(codes):
                has_failed = read_record(self.folder / f"failed.{rank}.json").get("job") == self.logs.name
                if code in (0, STOPPED) or (code is None and not has_failed):  # a failed rank may hang at its exit
                    continue
                self._failed_at = time.monotonic()
                if code is not None and not has_failed and not (code < 0 and self._is_stopping):
                    error = f"rank {rank}: {_describe_exit(code, list_log_files(self.logs, rank)[1])}"
                    record_failure(self.folder, rank, error, self.logs.name)
                break
        elif None in codes and time.monotonic() > self._failed_at + _GRACE_S:
            self.stop(now=True)
        return None not in codes

    def show_output(self) -> None:
        """Print the complete lines that rank 0 has written since the last call."""
        for path, offset in self._shown.items():
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(offset)
                data = file.read()
                lines = data[: data.rfind(b"\n") + 1]
                self._shown[path] = offset + len(lines)
                stream = sys.stderr if path.suffix == ".err" else sys.stdout
                for line in lines.decode(errors="replace").splitlines():
                    print(f"{self._prefix}{strip_control(line)}", file=stream, flush=True)

    def stop(self, now: bool = False) -> None:
        """Ask every rank to stop after the current step and its checkpoint; with ``now``, kill every rank."""
        self._is_stopping = True
        for process in self._ranks:
            process.send_signal(signal.SIGKILL if now else signal.SIGTERM)


def _build_environment(resources: Resources, gpus: Sequence[str] | None) -> dict[str, str]:
    """Return the environment of the ranks, which import this code whatever their working directory is.

    Args:
        gpus: None to keep the user's CUDA_VISIBLE_DEVICES.
    """
    values = {name: value for name, value in os.environ.items() if not name.startswith(_SLURM_VARIABLES)}
    earlier = values.get("PYTHONPATH")
    values |= {"PYTHONPATH": f"{ROOT}:{earlier}" if earlier else str(ROOT), "PYTHONSAFEPATH": "1"}
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    if gpus is not None:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    processes = resources.parallel * resources.tasks
    if resources.cpus_per_task:
        values["OMP_NUM_THREADS"] = str(resources.cpus_per_task)
    elif processes > 1:
        values.setdefault("OMP_NUM_THREADS", str(max(1, count_usable_cores() // processes)))
    return values


def list_log_files(logs: Path, rank: int) -> list[Path]:
    """Return the files of a rank's standard output and standard error."""
    return [logs / f"{rank}.{kind}" for kind in ("out", "err")]


def strip_control(line: str) -> str:
    """Remove control sequences that move the cursor or retitle the window; colors remain."""
    parts = re.split(r"(\x1b\[[\d;]*m)", line)
    return "".join(part if part.startswith("\x1b[") else escape_control(part) for part in parts)


def _describe_exit(code: int, stderr: Path) -> str:
    """Describe the exit of a rank that left no record."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"it was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = stderr.read_text(errors="replace").splitlines()
    return f"it ended with status {code}: {''.join(lines[-1:])}"
