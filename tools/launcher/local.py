"""A job of this machine: a process per rank, started and watched by the launcher.

A rank that failed or was killed ends the other ranks, which would wait for it in a collective for half an hour.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.lock import start_of
from pretrain.common.run_folder import atomic_write, usable_cores, write_json

from .job import STOPPED, rank_environment
from .launch_file import new_log_folder, record
from .options import Options, visible_gpus
from .ranks import mark_failed, stem
from .spec import ROOT, StageSpec

_GRACE_S = 5.0  # between one rank's failure and the end of the other ranks, which may be about to report the same
_END_S = 10.0  # for killed processes to free their memory and their devices
_OUTER = ("SLURM_", "SRUN_", "SUBMITIT_")  # variables of a job that this process may be part of


class LocalJob:
    """The running ranks of a stage.

    Args:
        options: the stage's own (`Options.fitting`).
        gpus: names of its GPUs; None: CUDA_VISIBLE_DEVICES stays as it is, unless --gpus asked for a number.

    Raises:
        UserError: the run folder cannot be written.
    """

    def __init__(self, spec: StageSpec, options: Options, gpus: Sequence[str] | None = None) -> None:
        self.folder, self.logs = Path(spec.folder), new_log_folder(spec.folder)
        self.is_stopping = self.is_killed = False
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._failed_at: float | None = None
        write_json(self.logs / "spec.json", spec.to_json())
        environment, size = _environment(options, gpus), options.tasks_per_node
        command = [sys.executable, "-u", "-m", "tools.launcher.job", str(self.logs)]
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # ranks never see the terminal's Ctrl-C
        try:
            for rank in range(size):
                place = rank_environment(rank, size, rank, size, "127.0.0.1", self.logs.name)
                out, err = log_paths(self.logs, rank)
                with open(out, "wb") as stdout, open(err, "wb") as stderr:
                    start = subprocess.Popen(command, env={**environment, **place}, stdout=stdout, stderr=stderr)
                self.ranks.append(start)
        except OSError as error:
            for process in self.ranks:
                process.kill()
            raise UserError(f"cannot start the ranks of {spec.stage}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        self._processes = {str(process.pid): start_of(process.pid) for process in self.ranks}
        record(spec, options, str(self.ranks[0].pid), self.logs, processes=self._processes)

    def has_ended(self) -> bool:
        """True once every rank has ended; those that would wait for one that failed are killed after some seconds."""
        codes = [process.poll() for process in self.ranks]
        if self._failed_at is None:
            place = stem(self.folder, self.logs.name, 0)
            bad = next((rank for rank, code in enumerate(codes) if code not in (None, 0, STOPPED)), None)
            if bad is not None and not self._was_ended(codes[bad] or 0):
                mark_failed(place, bad, f"rank {bad}: {_how_it_ended(codes[bad] or 0, log_paths(self.logs, bad)[1])}")
            if bad is not None or os.path.exists(f"{place}.failed"):
                self._failed_at = time.monotonic()
        elif None in codes and time.monotonic() > self._failed_at + _GRACE_S:
            self.kill()
        return None not in codes

    def ask_to_stop(self) -> None:
        """Asks every rank to stop after the current step and its checkpoint."""
        self.is_stopping = True
        for process in self.ranks:
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.is_killed = True
        kill(self._processes)

    def _was_ended(self, code: int) -> bool:
        """True if a signal ended the rank because the user ended the job, perhaps before the rank had its handlers."""
        is_ours = self.is_killed or (self.is_stopping and code == -signal.SIGTERM)
        return code < 0 and (is_ours or bool(ended_by(self.folder, self.logs)))


def _environment(options: Options, gpus: Sequence[str] | None) -> dict[str, str]:
    """That of the ranks: they import this code, whatever their working directory."""
    values = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
    earlier = values.get("PYTHONPATH")
    values |= {"PYTHONPATH": f"{ROOT}:{earlier}" if earlier else str(ROOT), "PYTHONSAFEPATH": "1"}
    if gpus is None and options.gpus is not None:
        gpus = visible_gpus()[: options.gpus]
    if gpus is not None:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if options.threads:
        values["OMP_NUM_THREADS"] = str(options.threads)
    elif options.tasks_per_node > 1:
        values.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // options.tasks_per_node)))
    return values


def log_paths(logs: Path, rank: int) -> list[Path]:
    """Standard output and standard error of a rank."""
    return [logs / f"{rank}.{kind}" for kind in ("out", "err")]


def is_running(job: Mapping[str, Any]) -> bool:
    """True if a rank of the job in launch.json is alive."""
    return bool(_alive(job.get("processes", {})))


def stop(folder: Path, job: Mapping[str, Any], now: bool) -> None:
    """Ends a job that another process has started; ``now``: without time for a checkpoint."""
    note_end(folder, Path(job["logs"]), "launch.py cancel --now" if now else "launch.py cancel")
    if now:
        kill(job["processes"])
        return
    for pid in _alive(job["processes"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def kill(processes: Mapping[str, str]) -> None:
    """Ends ranks without giving them time for a checkpoint."""
    for pid in _alive(processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while _alive(processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def note_end(folder: Path, logs: Path, by: str) -> None:
    """Records who ended the job that logs to ``logs``: a process that is killed cannot record it."""
    with contextlib.suppress(UserError):  # on a full disk the job must still end
        atomic_write(folder / "launch" / logs.name / "ended_by", by)


def ended_by(folder: Path, logs: Path) -> str:
    """Who ended the job that logs to ``logs`` (see `note_end`); empty: nobody did."""
    with contextlib.suppress(OSError):
        return (folder / "launch" / logs.name / "ended_by").read_text()
    return ""


def _alive(processes: Mapping[str, str]) -> list[int]:
    """Process ids are reused, so a process has to be the one that was started."""
    return [int(pid) for pid, started in processes.items() if started and start_of(int(pid)) == started]


def _how_it_ended(code: int, stderr: Path) -> str:
    """For a rank that recorded no reason of its own."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"it was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    with contextlib.suppress(OSError), open(stderr, "rb") as file:
        file.seek(max(0, os.path.getsize(stderr) - 4096))
        if lines := file.read().decode(errors="replace").split("\n")[:-1]:
            return f"it ended with status {code}: {lines[-1]}"
    return f"it ended with status {code}"
